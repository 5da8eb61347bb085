//! Merges the ProxyConfig from all its sources.
//!
//! Weakest first: defaults, the mesh file, `PROXY_CONFIG`, the pod's annotation, then flags and the
//! machine. The result is checked; then two annotations and the flag of a template are applied.

use std::io::ErrorKind;
use std::path::Path;

use super::environment::{self, Environment};
use super::flags::{MESH_CONFIG, ProxyFlags};
use super::merged::Merged;
use super::pod::Pairs;
use super::{statsd, threads, validate};
use crate::address;
use crate::problem::{Diagnostics, Problem};

const CONFIG_ANNOTATION: &str = "proxy.istio.io/config";
const ADDRESS_ANNOTATION: &str = "sidecar.istio.io/discoveryAddress";
const STATUS_PORT_ANNOTATION: &str = "status.sidecar.istio.io/port";

/// The template in Istio's images, which says what this agent writes anyway.
const TEMPLATE: &str = "var/lib/istio/envoy/envoy_bootstrap_tmpl.json";

/// Merges all sources.
pub(super) fn merge(
    flags: &ProxyFlags,
    env: &Environment,
    root: &Path,
    annotations: &Pairs,
    notes: &mut Diagnostics,
) -> Merged {
    let mut merged = without_flags(&flags.mesh_config, env, root, annotations, notes);
    let cpus = env.get(&environment::ISTIO_CPU_LIMIT, &mut notes.warnings);
    threads::set(&mut merged, flags.concurrency, cpus, root, notes);
    if merged.config.service_cluster.as_deref() == Some("") {
        merged.config.service_cluster = Some(flags.service_cluster.clone());
        merged.set_origin("serviceCluster", "--serviceCluster");
    }
    statsd::resolve(&mut merged, notes);
    validate::check(&merged, notes);
    late_annotations(&mut merged, annotations, notes);
    templates(&mut merged, flags, env, root, notes);
    merged
}

/// The status port, which no flag changes. Problems are for [`merge`] to report.
pub(super) fn status_port(env: &Environment, root: &Path, annotations: &Pairs) -> Option<u16> {
    let mut notes = Diagnostics::default();
    let path = Path::new(MESH_CONFIG);
    let mut merged = without_flags(path, env, root, annotations, &mut notes);
    late_annotations(&mut merged, annotations, &mut notes);
    merged.config.agent_port()
}

/// Merges files, environment and annotations.
fn without_flags(
    mesh_config: &Path,
    env: &Environment,
    root: &Path,
    annotations: &Pairs,
    notes: &mut Diagnostics,
) -> Merged {
    let mut merged = Merged::builtin();
    mesh_file(&mut merged, mesh_config, root, notes);
    let variable = env.get(&environment::PROXY_CONFIG, &mut notes.warnings);
    merged.merge_text("PROXY_CONFIG", &variable, notes);
    if let Some(text) = annotations.get(CONFIG_ANNOTATION) {
        merged.merge_text(CONFIG_ANNOTATION, text, notes);
    }
    merged
}

fn mesh_file(merged: &mut Merged, path: &Path, root: &Path, notes: &mut Diagnostics) {
    let origin = path.display().to_string();
    match std::fs::read_to_string(root.join(path)) {
        Ok(text) => merged.merge_mesh(&origin, &text, notes),
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => {
            let expected = "a readable MeshConfig file, or none";
            let problem = Problem::new(origin, error.to_string(), expected);
            notes.problems.push(problem);
        }
    }
}

fn late_annotations(merged: &mut Merged, annotations: &Pairs, notes: &mut Diagnostics) {
    if let Some(address) = annotations.get(ADDRESS_ANNOTATION) {
        merged.config.discovery_address.clone_from(address);
        merged.set_origin("discoveryAddress", ADDRESS_ANNOTATION);
        if address::split(address).is_none() {
            let expected = "host:port with a port from 1 to 65535";
            let problem = merged.problem("discoveryAddress", address, expected);
            notes.problems.push(problem);
        }
    }
    match annotations
        .get(STATUS_PORT_ANNOTATION)
        .map(|text| (text, text.parse::<u16>()))
    {
        None => {}
        Some((_, Ok(port))) => {
            merged.config.status_port = port.into();
            merged.set_origin("statusPort", STATUS_PORT_ANNOTATION);
        }
        // A typing error must not switch the status server off.
        Some((text, Err(_))) => {
            let expected = "a port, or 0 for no status server; leaving it out";
            let warning = Problem::new(STATUS_PORT_ANNOTATION, text, expected);
            notes.warnings.push(warning);
        }
    }
}

/// Refuses bootstrap templates. They have no effect where Envoy has a custom bootstrap.
fn templates(
    merged: &mut Merged,
    flags: &ProxyFlags,
    env: &Environment,
    root: &Path,
    notes: &mut Diagnostics,
) {
    let custom = &merged.config.custom_config_file;
    if !custom.is_empty() {
        if !root.join(custom).is_file() {
            let expected = "an existing file, Envoy's bootstrap";
            let problem = merged.problem("customConfigFile", custom, expected);
            notes.problems.push(problem);
        }
        return;
    }
    const MEMBER: &str = "proxyBootstrapTemplatePath";
    if !flags.template_file.is_empty() {
        let path = flags.template_file.clone();
        merged.config.proxy_bootstrap_template_path = path;
        merged.set_origin(MEMBER, "--templateFile");
    }
    let expected = "nothing: this agent writes the bootstrap itself";
    let is_foreign = |path: &str| {
        let path = path.strip_prefix('.').unwrap_or(path);
        !path.is_empty() && path.trim_start_matches('/') != TEMPLATE
    };
    let member = &merged.config.proxy_bootstrap_template_path;
    if is_foreign(member) {
        notes
            .problems
            .push(merged.problem(MEMBER, member, expected));
    }
    let variable = env.get(&environment::ISTIO_BOOTSTRAP, &mut notes.warnings);
    if is_foreign(&variable) {
        let problem = Problem::new("ISTIO_BOOTSTRAP", variable, expected);
        notes.problems.push(problem);
    }
}
