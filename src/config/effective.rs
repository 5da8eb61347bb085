//! The effective ProxyConfig: every source in its turn.
//!
//! Weakest first: defaults, the mesh file, `PROXY_CONFIG`, the pod's annotation, then what flags and
//! the machine say. That is checked; after it, two annotations have their say, and a template.
//!
//! Does not know how documents are laid over each other.

use std::io::ErrorKind;
use std::path::Path;

use serde_json::json;

use super::environment::{self, Environment};
use super::members::split_address;
use super::mesh::Document;
use super::pod::Pairs;
use super::{Notes, Problem, statsd, threads, validate};
use crate::cli::ProxyFlags;
use crate::cli::flags::MESH_CONFIG;

const CONFIG_ANNOTATION: &str = "proxy.istio.io/config";
const ADDRESS_ANNOTATION: &str = "sidecar.istio.io/discoveryAddress";
const STATUS_PORT_ANNOTATION: &str = "status.sidecar.istio.io/port";

/// The template every image of Istio has, which says what this agent writes anyway.
const TEMPLATE: &str = "var/lib/istio/envoy/envoy_bootstrap_tmpl.json";

/// Folds all sources.
pub(super) fn document(
    flags: &ProxyFlags,
    env: &Environment,
    root: &Path,
    annotations: &Pairs,
    notes: &mut Notes,
) -> Document {
    let mut document = without_flags(&flags.mesh_config, env, root, annotations, notes);
    let cpus = env.get(&environment::ISTIO_CPU_LIMIT, &mut notes.warnings);
    threads::set(&mut document, flags.concurrency, cpus, root, notes);
    if document.get("serviceCluster") == Some(&json!("")) {
        document.set(
            "--serviceCluster",
            "serviceCluster",
            json!(flags.service_cluster),
        );
    }
    statsd::resolve(&mut document, notes);
    validate::check(&document, notes);
    late_annotations(&mut document, annotations, notes);
    templates(&mut document, flags, env, root, notes);
    document
}

/// The status port, which no flag changes. Notes are for those who fold all sources.
pub(super) fn status_port(env: &Environment, root: &Path, annotations: &Pairs) -> Option<u16> {
    let mut notes = Notes::default();
    let path = Path::new(MESH_CONFIG);
    let mut document = without_flags(path, env, root, annotations, &mut notes);
    late_annotations(&mut document, annotations, &mut notes);
    document.read().status_port
}

/// What files, environment and annotations say.
fn without_flags(
    mesh_config: &Path,
    env: &Environment,
    root: &Path,
    annotations: &Pairs,
    notes: &mut Notes,
) -> Document {
    let mut document = Document::builtin();
    mesh_file(&mut document, mesh_config, root, notes);
    let variable = env.get(&environment::PROXY_CONFIG, &mut notes.warnings);
    document.overlay_text("PROXY_CONFIG", &variable, notes);
    if let Some(text) = annotations.get(CONFIG_ANNOTATION) {
        document.overlay_text(CONFIG_ANNOTATION, text, notes);
    }
    document
}

fn mesh_file(document: &mut Document, path: &Path, root: &Path, notes: &mut Notes) {
    let origin = path.display().to_string();
    match std::fs::read_to_string(root.join(path)) {
        Ok(text) => document.overlay_mesh(&origin, &text, notes),
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => notes.problems.push(Problem {
            subject: origin,
            found: error.to_string(),
            expected: "a readable MeshConfig file, or none".to_owned(),
        }),
    }
}

fn late_annotations(document: &mut Document, annotations: &Pairs, notes: &mut Notes) {
    if let Some(address) = annotations.get(ADDRESS_ANNOTATION) {
        document.set(ADDRESS_ANNOTATION, "discoveryAddress", json!(address));
        if split_address(address).is_none() {
            let expected = "host:port with a port from 1 to 65535";
            let problem = document.problem("discoveryAddress", address, expected);
            notes.problems.push(problem);
        }
    }
    match annotations.get(STATUS_PORT_ANNOTATION) {
        None => {}
        Some(text) => match text.parse::<u16>() {
            Ok(port) => document.set(STATUS_PORT_ANNOTATION, "statusPort", json!(port)),
            // A typing error is no wish to do without the status server.
            Err(_) => notes.warnings.push(Problem {
                subject: STATUS_PORT_ANNOTATION.to_owned(),
                found: text.clone(),
                expected: "a port, or 0 for no status server; leaving it out".to_owned(),
            }),
        },
    }
}

/// A template has no say where Envoy gets a bootstrap that is not ours.
fn templates(
    document: &mut Document,
    flags: &ProxyFlags,
    env: &Environment,
    root: &Path,
    notes: &mut Notes,
) {
    if let Some(custom) = document.text("customConfigFile") {
        if !root.join(custom).is_file() {
            let expected = "an existing file, Envoy's bootstrap";
            let problem = document.problem("customConfigFile", custom, expected);
            notes.problems.push(problem);
        }
        return;
    }
    if !flags.template_file.is_empty() {
        let path = json!(flags.template_file);
        document.set("--templateFile", "proxyBootstrapTemplatePath", path);
    }
    refuse_templates(document, env, notes);
}

/// A template nobody would fill in must not pass unnoticed.
fn refuse_templates(document: &Document, env: &Environment, notes: &mut Notes) {
    let expected = "nothing: this agent writes the bootstrap itself";
    let member = document.text("proxyBootstrapTemplatePath");
    if let Some(path) = member.filter(|path| !is_istios(path)) {
        let problem = document.problem("proxyBootstrapTemplatePath", path, expected);
        notes.problems.push(problem);
    }
    let variable = env.get(&environment::ISTIO_BOOTSTRAP, &mut notes.warnings);
    if !variable.is_empty() && !is_istios(&variable) {
        notes.problems.push(Problem {
            subject: "ISTIO_BOOTSTRAP".to_owned(),
            found: variable,
            expected: expected.to_owned(),
        });
    }
}

fn is_istios(template: &str) -> bool {
    let template = template.strip_prefix('.').unwrap_or(template);
    template.trim_start_matches('/') == TEMPLATE
}
