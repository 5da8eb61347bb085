//! ProxyConfig: several documents folded into one, then read with types.
//!
//! Later documents win member by member: a member replaces the earlier one whole, except
//! `proxyMetadata`, which merges by key, and `proxyHeaders`, which keeps some of its members. `null`
//! leaves what is there. Members that are not part of ProxyConfig are dropped, because istiod refuses
//! metadata that carries them; those this agent has no use for are kept for istiod.
//!
//! Does not look at the rest of MeshConfig, but for what makes a mesh file unusable.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::members::Reader;
use super::schema::convert::{self, Lines, Set};
use super::schema::{self, Member, PROXY_CONFIG};
use super::yaml::{self, Node, Tree};
use super::{Notes, Problem, mesh_file};

/// The members the agent uses, and the whole document for istiod.
#[derive(Clone, Debug)]
pub struct ProxyConfig {
    pub config_path: String,
    pub binary_path: PathBuf,
    pub service_cluster: String,
    pub drain_duration: Duration,
    pub termination_drain_duration: Duration,
    pub discovery_address: String,
    pub plaintext: bool,
    pub admin_port: u16,
    /// None while the status server is switched off.
    pub status_port: Option<u16>,
    /// None or zero lets Envoy use every hardware thread.
    pub concurrency: Option<u32>,
    pub metadata: BTreeMap<String, String>,
    pub file_flush_interval: Duration,
    /// A bootstrap Envoy is to use as it is, in place of one of ours.
    pub custom_bootstrap: Option<PathBuf>,
    /// The canonical document.
    pub document: Map<String, Value>,
}

/// A ProxyConfig under construction, which remembers where each member came from.
#[derive(Clone, Debug)]
pub(super) struct Document {
    members: BTreeMap<&'static str, Entry>,
    lines: Lines,
}

#[derive(Clone, Debug)]
struct Entry {
    /// In canonical form; zero has been set on purpose.
    value: Value,
    origin: String,
}

/// The origin of what nobody set.
pub(super) const DEFAULT: &str = "default";

impl Document {
    /// The built-in defaults.
    pub(super) fn builtin() -> Self {
        let defaults = [
            ("configPath", json!("./etc/istio/proxy")),
            ("binaryPath", json!("/usr/local/bin/envoy")),
            ("serviceCluster", json!("istio-proxy")),
            ("drainDuration", json!("45s")),
            ("terminationDrainDuration", json!("5s")),
            ("discoveryAddress", json!("istiod.istio-system.svc:15012")),
            ("proxyAdminPort", json!(15000)),
            ("controlPlaneAuthPolicy", json!("MUTUAL_TLS")),
            ("statNameLength", json!(189)),
            ("statusPort", json!(15020)),
        ];
        let mut document = Self {
            members: BTreeMap::new(),
            lines: Lines::new(),
        };
        for (name, value) in defaults {
            document.set(DEFAULT, name, value);
        }
        document
    }

    /// Lays the ProxyConfig in `text` (YAML or JSON) over this one.
    pub(super) fn overlay_text(&mut self, origin: &str, text: &str, notes: &mut Notes) {
        match yaml::object(origin, text) {
            Ok(None) => {}
            Ok(Some(node)) => self.overlay(origin, &node, notes),
            Err(problem) => notes.problems.push(problem),
        }
    }

    /// Lays `defaultConfig` of the MeshConfig in `text` over this one.
    pub(super) fn overlay_mesh(&mut self, origin: &str, text: &str, notes: &mut Notes) {
        let mesh = match yaml::object(origin, text) {
            Ok(None) => return,
            Ok(Some(mesh)) => mesh,
            Err(problem) => return notes.problems.push(problem),
        };
        mesh_file::check(origin, &mesh, notes);
        let config = mesh_file::member(&mesh, "defaultConfig", "default_config");
        // Anything else was reported by the check, or is null.
        let config = config.filter(|node| matches!(node.tree, Tree::Map(_)));
        if let Some(config) = config {
            self.overlay(&format!("defaultConfig of {origin}"), config, notes);
        }
    }

    fn overlay(&mut self, origin: &str, node: &Node, notes: &mut Notes) {
        let (sets, lines) = convert::members(origin, node, PROXY_CONFIG, notes);
        for Set { member, value } in sets {
            for rival in schema::rivals(PROXY_CONFIG, member) {
                self.members.remove(rival);
            }
            let value = match self.get(member.name) {
                Some(old) => merged(member.name, old, value),
                None => value,
            };
            self.set(origin, member.name, value);
        }
        self.lines.extend(lines);
    }

    /// Sets one member, given in canonical form.
    pub(super) fn set(&mut self, origin: &str, name: &'static str, value: Value) {
        let origin = origin.to_owned();
        self.lines.retain(|path, _| member_of(path) != name);
        self.members.insert(name, Entry { value, origin });
    }

    pub(super) fn unset(&mut self, name: &str) {
        self.members.remove(name);
    }

    pub(super) fn get(&self, name: &str) -> Option<&Value> {
        self.members.get(name).map(|entry| &entry.value)
    }

    /// The member as text; nothing when it is unset or empty.
    pub(super) fn text(&self, name: &str) -> Option<&str> {
        let text = self.get(name)?.as_str();
        text.filter(|text| !text.is_empty())
    }

    /// Where what is at `path` was set last; of what is not there, where it would be.
    pub(super) fn origin(&self, path: &str) -> String {
        let Some(entry) = self.members.get(member_of(path)) else {
            return DEFAULT.to_owned();
        };
        let parents = std::iter::successors(Some(path), |path| Some(path.rsplit_once('.')?.0));
        let line = parents.filter_map(|path| self.lines.get(path)).next();
        match line {
            Some(line) => format!("{} line {line}", entry.origin),
            None => entry.origin.clone(),
        }
    }

    /// A problem with the value at `path`.
    pub(super) fn problem(&self, path: &str, found: &str, expected: &str) -> Problem {
        Problem {
            subject: format!("{path} of {}", self.origin(path)),
            found: found.to_owned(),
            expected: expected.to_owned(),
        }
    }

    /// The document istiod reads.
    pub(super) fn canonical(&self) -> Map<String, Value> {
        let set = |member: &'static Member| {
            let value = self.get(member.name)?;
            let written = member.has_presence() || !convert::is_zero(value, member.kind);
            written.then(|| (member.name.to_owned(), value.clone()))
        };
        PROXY_CONFIG.iter().filter_map(set).collect()
    }

    /// The members the agent uses. Of a document that was found good, all of them are there.
    pub(super) fn read(&self) -> ProxyConfig {
        let document = self.canonical();
        let reader = Reader(&document);
        let policy = reader.text("controlPlaneAuthPolicy");
        let custom = reader.text("customConfigFile");
        ProxyConfig {
            config_path: reader.text("configPath"),
            binary_path: reader.text("binaryPath").into(),
            service_cluster: reader.text("serviceCluster"),
            drain_duration: reader.duration("drainDuration").unwrap_or_default(),
            termination_drain_duration: reader
                .duration("terminationDrainDuration")
                .unwrap_or_default(),
            discovery_address: reader.text("discoveryAddress"),
            // The zero of the enumeration, which is not written.
            plaintext: policy.is_empty(),
            admin_port: reader.number("proxyAdminPort").unwrap_or_default(),
            status_port: reader.number("statusPort"),
            concurrency: reader.number("concurrency"),
            metadata: reader.texts("proxyMetadata"),
            file_flush_interval: reader
                .duration("fileFlushInterval")
                .unwrap_or(Duration::from_secs(1)),
            custom_bootstrap: Some(PathBuf::from(custom)).filter(|p| !p.as_os_str().is_empty()),
            document,
        }
    }
}

/// The member of ProxyConfig that a path begins with.
fn member_of(path: &str) -> &str {
    path.split(['.', '[']).next().unwrap_or(path)
}

/// What of a message outlives its replacement.
const INHERITED_HEADERS: [&str; 5] = [
    "forwardedClientCert",
    "requestId",
    "attemptCount",
    "server",
    "envoyDebugHeaders",
];

/// The new value of a member that had one.
fn merged(name: &str, old: &Value, new: Value) -> Value {
    let (Value::Object(old), Value::Object(mut new)) = (old, new.clone()) else {
        return new;
    };
    match name {
        "proxyMetadata" => {
            let mut all = old.clone();
            all.extend(new);
            all.sort_keys();
            Value::Object(all)
        }
        "proxyHeaders" => {
            for name in INHERITED_HEADERS {
                if let (None, Some(value)) = (new.get(name), old.get(name)) {
                    new.insert(name.to_owned(), value.clone());
                }
            }
            Value::Object(new)
        }
        _ => Value::Object(new),
    }
}

/// The document for people, without what is secret in it: tokens and the values of
/// `proxyMetadata`, which end up in the environment of containers and may be anything.
pub fn printable(document: &Map<String, Value>) -> Value {
    let mut shown = document.clone();
    if let Some(Value::Object(metadata)) = shown.get_mut("proxyMetadata") {
        for (_, value) in metadata
            .iter_mut()
            .filter(|(name, _)| !name.starts_with("ISTIO_META"))
        {
            *value = json!("(not shown)");
        }
    }
    let mut shown = Value::Object(shown);
    if let Some(token) = shown.pointer_mut("/tracing/lightstep/accessToken") {
        *token = json!("(not shown)");
    }
    let headers = shown.pointer_mut("/readinessProbe/httpGet/httpHeaders");
    for header in headers.and_then(Value::as_array_mut).into_iter().flatten() {
        if let Some(value) = header.get_mut("value") {
            *value = json!("(not shown)");
        }
    }
    shown
}

#[cfg(test)]
mod tests;
