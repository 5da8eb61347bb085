//! The configuration of a pod that is described, not run: without files, names and interfaces of the
//! machine that reads the description.

use std::path::Path;

use serde_json::{Map, Value};

use super::effective::Documents;
use super::environment::Environment;
use super::flags::{LogFlags, ProxyFlags};
use super::merged::DEFAULT;
use super::pod::{EXCLUDED_INTERFACES, Pairs};
use super::{Loader, Problem};
use crate::problem::Diagnostics;

/// No file is below it.
const NOWHERE: &str = "/nonexistent";

/// How subjects begin that the pod's files and interfaces decide.
const OF_THE_MACHINE: [&str; 8] = [
    "/",
    "./",
    "root file for istiod",
    "GKE workload certificate files",
    "customConfigFile",
    "ISTIO_BOOTSTRAP_OVERRIDE",
    EXCLUDED_INTERFACES,
    // The flag overrides the configuration, as in pilot-agent.
    "--concurrency",
];

#[derive(Debug)]
pub struct Described {
    /// The members of ProxyConfig that something sets.
    pub members: Map<String, Value>,
    pub notes: Diagnostics,
}

/// Reads a pod's flags, variables and annotations. The mesh file is not known.
pub fn described(
    flags: &ProxyFlags,
    log: &LogFlags,
    env: &Environment,
    annotations: Pairs,
) -> Described {
    let flags = ProxyFlags {
        mesh_config: "mesh".into(),
        ..flags.clone()
    };
    let root = Path::new(NOWHERE);
    let documents = Documents {
        env,
        root,
        annotations: &annotations,
        resolves: false,
    };
    let merged = documents.merge(&flags);
    let interfaces = Ok(Vec::new());
    let mut loader = Loader::of(&flags, env, root, interfaces, merged, None, annotations);
    let members = loader.proxy_config.printable().into_iter();
    let members = members.filter(|(name, _)| loader.origins.of(name) != DEFAULT);
    let members = members.collect();
    loader.build(log);
    let mut notes = loader.notes;
    notes.problems.append(&mut loader.authority_problems);
    let is_of_pod = |problem: &Problem| {
        let mut machine = OF_THE_MACHINE.iter();
        !machine.any(|subject| problem.subject.starts_with(subject))
    };
    notes.problems.retain(is_of_pod);
    notes.warnings.retain(is_of_pod);
    Described { members, notes }
}
