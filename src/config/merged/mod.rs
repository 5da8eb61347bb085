//! Merges ProxyConfig documents.
//!
//! A later document wins member by member: a member replaces the earlier one whole, except
//! `proxyMetadata`, which merges by key, and `proxyHeaders`, which keeps some of its members. `null`
//! leaves what is there.

use std::borrow::Cow;
use std::collections::BTreeMap;

use crate::problem::{Code, Diagnostics, Problem};
use crate::proxy_config::yaml::{self, Node, Tree};
use crate::proxy_config::{AuthenticationPolicy, ProxyConfig, proxy_config::ClusterName};

/// A merged ProxyConfig with the origin of each member, and what is wrong with it.
#[derive(Debug)]
pub(super) struct Merged {
    pub(super) config: ProxyConfig,
    pub(super) origins: Origins,
    pub(super) notes: Diagnostics,
}

/// Document and line by the path of a member; members of the default are missing.
#[derive(Debug, Default)]
pub(super) struct Origins(BTreeMap<String, String>);

/// The origin of a value that is set nowhere.
pub(super) const DEFAULT: &str = "default";

impl Merged {
    pub(super) fn builtin() -> Self {
        let seconds = |seconds| Some(prost_types::Duration { seconds, nanos: 0 });
        let cluster = ClusterName::ServiceCluster("istio-proxy".to_owned());
        let config = ProxyConfig {
            config_path: "./etc/istio/proxy".to_owned(),
            binary_path: "/usr/local/bin/envoy".to_owned(),
            cluster_name: Some(cluster),
            drain_duration: seconds(45),
            termination_drain_duration: seconds(5),
            discovery_address: "istiod.istio-system.svc:15012".to_owned(),
            proxy_admin_port: 15000,
            control_plane_auth_policy: AuthenticationPolicy::MutualTls.into(),
            stat_name_length: 189,
            status_port: 15020,
            ..ProxyConfig::default()
        };
        Self {
            config,
            origins: Origins::default(),
            notes: Diagnostics::default(),
        }
    }

    /// Merges the ProxyConfig in `text` (YAML or JSON).
    pub(super) fn merge_text(&mut self, origin: &str, text: &str) {
        if let Some(node) = yaml::object(origin, text, &mut self.notes) {
            self.merge(origin, &node);
        }
    }

    /// Merges `defaultConfig` of the MeshConfig in `text`; its other members are istiod's.
    pub(super) fn merge_mesh(&mut self, origin: &str, text: &str) {
        let mesh = yaml::object(origin, text, &mut self.notes);
        let Some(Tree::Map(members)) = mesh.as_ref().map(|mesh| &mesh.value) else {
            return;
        };
        let find = |name| members.iter().rfind(|(key, _)| key == name);
        let config = find("defaultConfig").or_else(|| find("default_config"));
        let set = config.filter(|(_, node)| !matches!(node.value, Tree::Null));
        if let Some((_, config)) = set {
            self.merge(&format!("defaultConfig of {origin}"), config);
        }
    }

    fn merge(&mut self, origin: &str, node: &Node) {
        let earlier = self.config.clone();
        let lines = self.config.read(origin, node, &mut self.notes);
        let config = &mut self.config;
        if lines.contains_key("proxyMetadata") {
            let later = std::mem::replace(&mut config.proxy_metadata, earlier.proxy_metadata);
            config.proxy_metadata.extend(later);
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
        for member in lines.keys().filter(|path| member_of(path) == *path) {
            self.forget(member);
        }
        let origins = lines
            .into_iter()
            .map(|(path, line)| (path, format!("{origin} line {line}")));
        self.origins.0.extend(origins);
    }

    /// Notes that a member was set by other means than a document.
    pub(super) fn set_origin(&mut self, member: &str, origin: &str) {
        self.forget(member);
        self.origins.0.insert(member.to_owned(), origin.to_owned());
    }

    fn forget(&mut self, member: &str) {
        self.origins.0.retain(|path, _| member_of(path) != member);
    }

    /// Reports a problem with the value at `path`.
    pub(super) fn problem(
        &mut self,
        code: &'static Code,
        path: &str,
        found: &str,
        expected: impl Into<Cow<'static, str>>,
    ) {
        let subject = format!("{path} of {}", self.origins.of(path));
        let problem = Problem::value(code, subject, found, expected);
        self.notes.add(problem);
    }

    pub(super) fn warn(
        &mut self,
        path: &str,
        found: &str,
        expected: &'static str,
        consequence: &'static str,
    ) {
        let subject = format!("{path} of {}", self.origins.of(path));
        self.notes.warn(subject, found, expected, consequence);
    }
}

impl Origins {
    /// Where the value at `path` was set last; for a value that is not set, where its parent was.
    pub(super) fn of(&self, path: &str) -> &str {
        let mut parents = std::iter::successors(Some(path), |path| Some(path.rsplit_once('.')?.0));
        let origin = parents.find_map(|path| self.0.get(path));
        origin.map_or(DEFAULT, String::as_str)
    }
}

/// The member of ProxyConfig that a path begins with.
fn member_of(path: &str) -> &str {
    path.split(['.', '[']).next().unwrap_or(path)
}

#[cfg(test)]
mod tests;
