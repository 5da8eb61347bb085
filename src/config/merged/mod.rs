//! Merges the ProxyConfig from all its sources.
//!
//! Weakest first: defaults, the mesh file, `PROXY_CONFIG`, the pod's annotation, then flags and the
//! machine. The result is checked; then two annotations, `DISCOVERY_ADDRESS` and the flag of a template are
//! applied.
//!
//! A later document overrides an earlier one member by member. A member replaces the complete earlier member,
//! except `proxyMetadata`, which merges by key, and `proxyHeaders`, which preserves some of its members. A
//! member that is `null` changes nothing.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;

use super::environment::{self, Environment};
use super::flags::{MESH_CONFIG, ProxyFlags};
use super::pod::Pairs;
use super::{HOST_PORT, NOWHERE, below, statsd, validate};
use crate::files::regular_file::{self, MAX_SETTINGS};
use crate::net::address;
use crate::problem::{Code, Diagnostics, Problem};
use crate::proxy_config::yaml::{self, Node, Tree};
use crate::proxy_config::{AuthenticationPolicy, ProxyConfig, proxy_config::ClusterName};

const CONFIG_ANNOTATION: &str = "proxy.istio.io/config";
const ADDRESS_ANNOTATION: &str = "sidecar.istio.io/discoveryAddress";
const STATUS_PORT_ANNOTATION: &str = "status.sidecar.istio.io/port";

/// The template in Istio's images. This agent writes the same bootstrap without it.
const TEMPLATE: &str = "var/lib/istio/envoy/envoy_bootstrap_tmpl.json";

/// The origin of a value that no source sets.
pub(super) const DEFAULT: &str = "default";

/// A merged ProxyConfig with the origin of each member, and its problems.
#[derive(Debug)]
pub(super) struct Merged {
    pub(super) config: ProxyConfig,
    pub(super) origins: Origins,
    pub(super) notes: Diagnostics,
}

/// Document and line by the path of a member; members with a default value are missing.
#[derive(Debug, Default)]
pub(super) struct Origins(BTreeMap<String, String>);

/// Merges and checks all sources. Paths resolve against `root`, the working directory.
pub(super) fn merge(
    flags: &ProxyFlags,
    env: &Environment,
    root: &Path,
    annotations: &Pairs,
) -> Merged {
    let mut merged = merge_without_flags(&flags.mesh_config, env, root, annotations);
    merged.notes.warnings.extend(env.unknown());
    merged.notes.warnings.extend(env.malformed());
    set_threads(&mut merged, flags.concurrency, env.get(&environment::ISTIO_CPU_LIMIT));
    if let Some(ClusterName::ServiceCluster(name)) = &mut merged.config.cluster_name
        && name.is_empty()
    {
        name.clone_from(&flags.service_cluster);
        merged.set_origin("serviceCluster", "--serviceCluster");
    }
    if root != Path::new(NOWHERE) && !merged.config.statsd_udp_address.is_empty() {
        statsd::resolve(&mut merged);
    }
    validate::check(&mut merged);
    apply_late_annotations(&mut merged, annotations);
    apply_discovery_addresses(&mut merged, env);
    apply_template(&mut merged, flags, env, root);
    merged
}

/// Merges the sources without flags. [`merge`] reports the problems.
pub(super) fn proxy_config(env: &Environment, root: &Path, annotations: &Pairs) -> ProxyConfig {
    let mut merged = merge_without_flags(Path::new(MESH_CONFIG), env, root, annotations);
    apply_late_annotations(&mut merged, annotations);
    merged.config
}

/// Merges files, environment and annotations.
fn merge_without_flags(
    mesh_config: &Path,
    env: &Environment,
    root: &Path,
    annotations: &Pairs,
) -> Merged {
    let mut merged = Merged::builtin();
    let origin = mesh_config.display().to_string();
    match regular_file::read_text(&below(root, mesh_config), MAX_SETTINGS) {
        Ok(text) => merged.merge_mesh(&origin, &text),
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => {
            merged.notes.add(
                Problem::new(Code::FileUnreadable, origin, error)
                    .consequence(Code::FileMissing.consequence()),
            );
        }
    }
    let variable = &environment::PROXY_CONFIG;
    merged.merge_text(variable.row.name, &env.get(variable));
    if let Some(text) = annotations.get(CONFIG_ANNOTATION) {
        merged.merge_text(CONFIG_ANNOTATION, text);
    }
    merged
}

/// Applies the annotations that win over checked values.
fn apply_late_annotations(merged: &mut Merged, annotations: &Pairs) {
    if let Some(address) = annotations.get(ADDRESS_ANNOTATION) {
        merged.config.discovery_address.clone_from(address);
        merged.set_origin("discoveryAddress", ADDRESS_ANNOTATION);
        if address::split(address).is_none() {
            merged.problem(Code::SettingInvalid, "discoveryAddress", address, HOST_PORT);
        }
    }
    let Some(text) = annotations.get(STATUS_PORT_ANNOTATION) else {
        return;
    };
    if let Ok(port) = text.parse::<u16>() {
        merged.config.status_port = port.into();
        merged.set_origin("statusPort", STATUS_PORT_ANNOTATION);
    } else {
        // A typing error must not switch the status server off.
        let code = Code::StatusPortAnnotation;
        let expected = "a port, or 0 for no status server";
        merged.notes.warnings.push(Problem::value(code, STATUS_PORT_ANNOTATION, text, expected));
    }
}

/// Applies the first address of `DISCOVERY_ADDRESS`; the connections use the others too.
fn apply_discovery_addresses(merged: &mut Merged, env: &Environment) {
    const NAME: &str = environment::DISCOVERY_ADDRESS.row.name;
    let addresses = env.get(&environment::DISCOVERY_ADDRESS);
    for address in &addresses {
        if address::split(address).is_none() {
            let expected = format!("{HOST_PORT}, separated by commas");
            merged.notes.add(Problem::value(Code::SettingInvalid, NAME, address, expected));
        }
    }
    if let Some(first) = addresses.into_iter().next() {
        merged.config.discovery_address = first;
        merged.set_origin("discoveryAddress", NAME);
    }
}

/// Applies the flag of a bootstrap template, and refuses templates other than Istio's own. They have no effect if
/// Envoy has a custom bootstrap, which must exist.
fn apply_template(merged: &mut Merged, flags: &ProxyFlags, env: &Environment, root: &Path) {
    const MEMBER: &str = "proxyBootstrapTemplatePath";
    let custom = merged.config.custom_config_file.clone();
    if !custom.is_empty() {
        if !below(root, &custom).is_file() {
            let expected = "an existing file, Envoy's bootstrap";
            merged.problem(Code::FileMissing, "customConfigFile", &custom, expected);
        }
        return;
    }
    if !flags.template_file.is_empty() {
        merged.config.proxy_bootstrap_template_path = flags.template_file.clone();
        merged.set_origin(MEMBER, "--templateFile");
    }
    let code = Code::BootstrapTemplateSet;
    let expected = "nothing: this agent writes the bootstrap itself";
    let member = merged.config.proxy_bootstrap_template_path.clone();
    if is_foreign_template(&member) {
        merged.problem(code, MEMBER, &member, expected);
    }
    let variable = env.get(&environment::ISTIO_BOOTSTRAP);
    if is_foreign_template(&variable) {
        merged.notes.add(Problem::value(code, "ISTIO_BOOTSTRAP", &variable, expected));
    }
}

/// Sets the number of Envoy's worker threads. A flag that is not zero wins over the documents, and those
/// over the CPU limit of the pod. If nothing sets the number, and for zero in a document, Envoy has one
/// thread for every hardware thread.
fn set_threads(merged: &mut Merged, flag: u32, cpu_limit: u32) {
    let (threads, origin) = if flag != 0 {
        let found = format!("{flag} overrides concurrency of ProxyConfig");
        let code = Code::FlagOverridesConfig;
        merged.notes.warnings.push(Problem::new(code, "--concurrency", found));
        (flag, "--concurrency")
    } else if merged.config.concurrency.is_none() && cpu_limit != 0 {
        (cpu_limit, "ISTIO_CPU_LIMIT")
    } else {
        return;
    };
    merged.config.concurrency = Some(i32::try_from(threads).unwrap_or(i32::MAX));
    merged.set_origin("concurrency", origin);
}

fn is_foreign_template(path: &str) -> bool {
    let path = path.strip_prefix('.').unwrap_or(path);
    !path.is_empty() && path.trim_start_matches('/') != TEMPLATE
}

impl Merged {
    /// Returns the defaults.
    pub(super) fn builtin() -> Self {
        let config = ProxyConfig {
            config_path: "./etc/istio/proxy".to_owned(),
            binary_path: "/usr/local/bin/envoy".to_owned(),
            cluster_name: Some(ClusterName::ServiceCluster("istio-proxy".to_owned())),
            drain_duration: Some(prost_types::Duration { seconds: 45, nanos: 0 }),
            termination_drain_duration: Some(prost_types::Duration { seconds: 5, nanos: 0 }),
            discovery_address: "istiod.istio-system.svc:15012".to_owned(),
            proxy_admin_port: 15000,
            control_plane_auth_policy: AuthenticationPolicy::MutualTls.into(),
            stat_name_length: 189,
            status_port: 15020,
            ..ProxyConfig::default()
        };
        Self { config, origins: Origins::default(), notes: Diagnostics::default() }
    }

    /// Merges the ProxyConfig in `text` (YAML or JSON).
    pub(super) fn merge_text(&mut self, origin: &str, text: &str) {
        if let Some(node) = yaml::object(origin, text, &mut self.notes) {
            self.merge(origin, &node);
        }
    }

    /// Merges `defaultConfig` of the MeshConfig in `text`; its other members are istiod's.
    fn merge_mesh(&mut self, origin: &str, text: &str) {
        let mesh = yaml::object(origin, text, &mut self.notes);
        let Some(Tree::Map(members)) = mesh.as_ref().map(|mesh| &mesh.value) else {
            return;
        };
        for name in ["defaultConfig", "default_config"] {
            if let Some((_, config)) = members.iter().rfind(|(key, _)| key == name) {
                if !matches!(config.value, Tree::Null) {
                    self.merge(&format!("defaultConfig of {origin}"), config);
                }
                return;
            }
        }
    }

    /// Merges a ProxyConfig over the earlier ones, and records the origins of its members.
    fn merge(&mut self, origin: &str, node: &Node) {
        let earlier = self.config.clone();
        let lines = self.config.read(origin, node, &mut self.notes);
        let config = &mut self.config;
        if lines.contains_key("proxyMetadata") {
            let mut metadata = earlier.proxy_metadata;
            metadata.append(&mut config.proxy_metadata);
            config.proxy_metadata = metadata;
        }
        if let (Some(later), Some(earlier)) = (&mut config.proxy_headers, earlier.proxy_headers) {
            if later.forwarded_client_cert == 0 {
                later.forwarded_client_cert = earlier.forwarded_client_cert;
            }
            later.request_id = later.request_id.or(earlier.request_id);
            later.attempt_count = later.attempt_count.or(earlier.attempt_count);
            later.server = later.server.take().or(earlier.server);
            let debug = &mut later.envoy_debug_headers;
            *debug = debug.or(earlier.envoy_debug_headers);
        }
        for member in lines.keys().filter(|path| top_member(path) == *path) {
            self.forget(member);
        }
        for (path, line) in lines {
            self.origins.0.insert(path, format!("{origin} line {line}"));
        }
    }

    /// Records the origin of a member that was not set by a document.
    pub(super) fn set_origin(&mut self, member: &str, origin: &str) {
        self.forget(member);
        self.origins.0.insert(member.to_owned(), origin.to_owned());
    }

    /// Removes the origins of a member and of everything in it.
    fn forget(&mut self, member: &str) {
        self.origins.0.retain(|path, _| top_member(path) != member);
    }

    /// Reports a problem with the value at `path`.
    pub(super) fn problem(
        &mut self,
        code: Code,
        path: &str,
        found: impl ToString,
        expected: impl Into<Cow<'static, str>>,
    ) {
        let subject = format!("{path} of {}", self.origins.find(path));
        self.notes.add(Problem::value(code, subject, &found.to_string(), expected));
    }

    /// Reports that the value at `path` is ignored or replaced.
    pub(super) fn warn(
        &mut self,
        path: &str,
        found: &str,
        expected: &'static str,
        consequence: &'static str,
    ) {
        let subject = format!("{path} of {}", self.origins.find(path));
        self.notes.warnings.push(Problem::replaced(subject, found, expected, consequence));
    }
}

impl Origins {
    /// Returns the origin of the value at `path`. If the value is not set, returns its parent's.
    pub(super) fn find(&self, path: &str) -> &str {
        match (self.0.get(path), path.rsplit_once('.')) {
            (Some(origin), _) => origin,
            (None, Some((parent, _))) => self.find(parent),
            (None, None) => DEFAULT,
        }
    }
}

/// Returns the member of ProxyConfig that a path begins with.
fn top_member(path: &str) -> &str {
    path.split(['.', '[']).next().unwrap_or(path)
}

#[cfg(test)]
mod tests;
