//! Merges the ProxyConfig from all its sources.
//!
//! Weakest first: defaults, the mesh file, `PROXY_CONFIG`, the pod's annotation, then flags and the
//! machine. The result is checked; then two annotations, `DISCOVERY_ADDRESS` and the flag of a template are
//! applied.

use std::io::ErrorKind;
use std::path::Path;

use super::environment::{self, Environment};
use super::flags::{MESH_CONFIG, ProxyFlags};
use super::merged::Merged;
use super::pod::Pairs;
use super::{NOWHERE, below, control_plane, statsd, validate};
use crate::address;
use crate::problem::{Problem, codes};
use crate::proxy_config::proxy_config::ClusterName;
use crate::regular_file::{self, MAX_SETTINGS};

const CONFIG_ANNOTATION: &str = "proxy.istio.io/config";
const ADDRESS_ANNOTATION: &str = "sidecar.istio.io/discoveryAddress";
const STATUS_PORT_ANNOTATION: &str = "status.sidecar.istio.io/port";

/// The template in Istio's images, which says what this agent writes anyway.
const TEMPLATE: &str = "var/lib/istio/envoy/envoy_bootstrap_tmpl.json";

/// The sources besides flags and machine.
pub(super) struct Documents<'a> {
    pub(super) env: &'a Environment,
    /// The working directory, against which paths resolve.
    pub(super) root: &'a Path,
    pub(super) annotations: &'a Pairs,
}

impl Documents<'_> {
    pub(super) fn merge(&self, flags: &ProxyFlags) -> Merged {
        let mut merged = self.without_flags(&flags.mesh_config);
        merged.notes.warnings.extend(self.env.unknown());
        merged.notes.warnings.extend(self.env.malformed());
        let cpus = self.env.get(&environment::ISTIO_CPU_LIMIT);
        set_threads(&mut merged, flags.concurrency, cpus);
        if let Some(ClusterName::ServiceCluster(name)) = &mut merged.config.cluster_name
            && name.is_empty()
        {
            name.clone_from(&flags.service_cluster);
            merged.set_origin("serviceCluster", "--serviceCluster");
        }
        if self.root != Path::new(NOWHERE) && !merged.config.statsd_udp_address.is_empty() {
            statsd::resolve(&mut merged);
        }
        validate::check(&mut merged);
        self.late_annotations(&mut merged);
        self.discovery_addresses(&mut merged);
        self.templates(&mut merged, flags);
        merged
    }

    /// The status port, which no flag changes. Problems are for [`Self::merge`] to report.
    pub(super) fn status_port(&self) -> Option<u16> {
        let mut merged = self.without_flags(Path::new(MESH_CONFIG));
        self.late_annotations(&mut merged);
        merged.config.agent_port()
    }

    /// Merges files, environment and annotations.
    fn without_flags(&self, mesh_config: &Path) -> Merged {
        let mut merged = Merged::builtin();
        let origin = mesh_config.display().to_string();
        match regular_file::read_text(&below(self.root, mesh_config), MAX_SETTINGS) {
            Ok(text) => merged.merge_mesh(&origin, &text),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => {
                let problem = Problem::new(codes::FILE_UNREADABLE, origin, error);
                let problem = problem.consequence(codes::FILE_MISSING.consequence);
                merged.notes.add(problem);
            }
        }
        let variable = self.env.get(&environment::PROXY_CONFIG);
        merged.merge_text("PROXY_CONFIG", &variable);
        if let Some(text) = self.annotations.get(CONFIG_ANNOTATION) {
            merged.merge_text(CONFIG_ANNOTATION, text);
        }
        merged
    }

    fn late_annotations(&self, merged: &mut Merged) {
        if let Some(address) = self.annotations.get(ADDRESS_ANNOTATION) {
            merged.config.discovery_address.clone_from(address);
            merged.set_origin("discoveryAddress", ADDRESS_ANNOTATION);
            if address::split(address).is_none() {
                let (code, path) = (codes::SETTING_INVALID, "discoveryAddress");
                merged.problem(code, path, address, "host:port with a port from 1 to 65535");
            }
        }
        let Some(text) = self.annotations.get(STATUS_PORT_ANNOTATION) else {
            return;
        };
        if let Ok(port) = text.parse::<u16>() {
            merged.config.status_port = port.into();
            merged.set_origin("statusPort", STATUS_PORT_ANNOTATION);
        } else {
            // A typing error must not switch the status server off.
            let expected = "a port, or 0 for no status server";
            let code = codes::STATUS_PORT_ANNOTATION;
            let problem = Problem::value(code, STATUS_PORT_ANNOTATION, text, expected);
            merged.notes.warnings.push(problem);
        }
    }

    /// Takes the first address of the variable; the others are for the connections.
    fn discovery_addresses(&self, merged: &mut Merged) {
        const NAME: &str = environment::DISCOVERY_ADDRESS.name;
        let given = self.env.get(&environment::DISCOVERY_ADDRESS);
        let addresses = control_plane::addresses(&given);
        for address in &addresses {
            if address::split(address).is_none() {
                let expected = "host:port with a port from 1 to 65535, separated by commas";
                merged.notes.problem(NAME, address, expected);
            }
        }
        if let Some(first) = addresses.into_iter().next() {
            merged.config.discovery_address = first;
            merged.set_origin("discoveryAddress", NAME);
        }
    }

    /// Refuses bootstrap templates. They have no effect where Envoy has a custom bootstrap.
    fn templates(&self, merged: &mut Merged, flags: &ProxyFlags) {
        const MEMBER: &str = "proxyBootstrapTemplatePath";
        let custom = merged.config.custom_config_file.clone();
        if !custom.is_empty() {
            if !below(self.root, &custom).is_file() {
                let expected = "an existing file, Envoy's bootstrap";
                merged.problem(codes::FILE_MISSING, "customConfigFile", &custom, expected);
            }
            return;
        }
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
        let member = merged.config.proxy_bootstrap_template_path.clone();
        if is_foreign(&member) {
            merged.problem(codes::BOOTSTRAP_TEMPLATE_SET, MEMBER, &member, expected);
        }
        let variable = self.env.get(&environment::ISTIO_BOOTSTRAP);
        if is_foreign(&variable) {
            let code = codes::BOOTSTRAP_TEMPLATE_SET;
            let problem = Problem::value(code, "ISTIO_BOOTSTRAP", &variable, expected);
            merged.notes.add(problem);
        }
    }
}

/// Sets the number of Envoy's worker threads. A flag that is not zero wins over the documents, and those
/// over the CPU limit of the pod. Without any, and for zero in a document, Envoy has one for every hardware
/// thread.
fn set_threads(merged: &mut Merged, flag: u32, limit: u32) {
    let (threads, origin) = match (flag, merged.config.concurrency) {
        (0, Some(_)) => return,
        (0, None) if limit == 0 => return,
        (0, None) => (limit, "ISTIO_CPU_LIMIT"),
        (flag, _) => (flag, "--concurrency"),
    };
    if flag != 0 {
        let found = format!("{flag} overrides concurrency of ProxyConfig");
        let problem = Problem::new(codes::FLAG_OVERRIDES_CONFIG, origin, found);
        merged.notes.warnings.push(problem);
    }
    merged.config.concurrency = Some(i32::try_from(threads).unwrap_or(i32::MAX));
    merged.set_origin("concurrency", origin);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_flag_wins_over_documents_and_those_over_limits() {
        for (document, variable, flag, threads) in [
            ("{}", 0, 0, None),
            ("{}", 4, 0, Some(4)),
            ("{concurrency: 3}", 4, 0, Some(3)),
            ("{concurrency: 0}", 4, 0, Some(0)),
            ("{concurrency: 3}", 4, 5, Some(5)),
            ("{}", 0, 5, Some(5)),
        ] {
            let mut config = Merged::builtin();
            config.merge_text("it", document);
            set_threads(&mut config, flag, variable);
            assert_eq!(config.config.concurrency, threads, "{document} {variable}");
            let warnings = config.notes.warnings.len();
            assert_eq!(warnings, usize::from(flag != 0), "{document}");
        }
    }
}
