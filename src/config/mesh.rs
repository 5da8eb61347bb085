//! ProxyConfig: several documents folded into one, then read with types.
//!
//! Later documents win member by member: a member replaces the earlier one whole, except
//! `proxyMetadata`, which merges by key. `null` leaves what is there. Names may be written in camel
//! or snake case. Members that are not part of ProxyConfig are dropped, because istiod refuses
//! metadata that carries them; those this agent has no use for are kept for istiod.
//!
//! Does not look at the rest of MeshConfig, nor apply flags.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::members::Reader;
use super::{Problem, duration};

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
    pub document: Map<String, Value>,
}

/// A ProxyConfig under construction, which remembers where each member came from.
#[derive(Clone, Debug)]
pub struct Document {
    members: Map<String, Value>,
    origins: BTreeMap<String, String>,
}

impl Document {
    /// The built-in defaults.
    pub fn builtin() -> Self {
        let mut document = Self {
            members: Map::new(),
            origins: BTreeMap::new(),
        };
        let defaults = json!({
            "configPath": "./etc/istio/proxy",
            "binaryPath": "/usr/local/bin/envoy",
            "serviceCluster": "istio-proxy",
            "drainDuration": "45s",
            "terminationDrainDuration": "5s",
            "discoveryAddress": "istiod.istio-system.svc:15012",
            "proxyAdminPort": 15000,
            "controlPlaneAuthPolicy": "MUTUAL_TLS",
            "statNameLength": 189,
            "statusPort": 15020,
        });
        if let Value::Object(defaults) = defaults {
            document.overlay("the defaults", defaults);
        }
        document
    }

    /// Lays the ProxyConfig in `text` (YAML or JSON) over this one.
    pub fn overlay_text(&mut self, origin: &str, text: &str) -> Result<(), Problem> {
        if let Some(members) = parse(origin, text)? {
            self.overlay(origin, members);
        }
        Ok(())
    }

    /// Lays `defaultConfig` of the MeshConfig in `text` over this one.
    pub fn overlay_mesh(&mut self, origin: &str, text: &str) -> Result<(), Problem> {
        let Some(mut mesh) = parse(origin, text)? else {
            return Ok(());
        };
        match mesh
            .remove("defaultConfig")
            .or_else(|| mesh.remove("default_config"))
        {
            None | Some(Value::Null) => Ok(()),
            Some(Value::Object(members)) => {
                self.overlay(origin, members);
                Ok(())
            }
            Some(other) => Err(Problem {
                subject: format!("defaultConfig of {origin}"),
                found: other.to_string(),
                expected: "an object".to_owned(),
            }),
        }
    }

    /// Sets one member.
    pub fn set(&mut self, origin: &str, name: &str, value: Value) {
        self.members.insert(name.to_owned(), value);
        self.origins.insert(name.to_owned(), origin.to_owned());
    }

    /// A flag that is not zero wins; a CPU limit counts where nothing is said.
    pub fn set_threads(&mut self, flag: u32, cpu_limit: u32) {
        if flag != 0 {
            self.set("--concurrency", "concurrency", json!(flag));
        } else if cpu_limit != 0 && !self.members.contains_key("concurrency") {
            self.set("ISTIO_CPU_LIMIT", "concurrency", json!(cpu_limit));
        }
    }

    fn overlay(&mut self, origin: &str, members: Map<String, Value>) {
        let both = |camel: &str| members.contains_key(camel);
        let renamed: Vec<(String, &Value)> = members
            .iter()
            .filter(|(_, value)| !value.is_null())
            .map(|(name, value)| (camel_case(name), name, value))
            .filter(|(camel, name, _)| camel == *name || !both(camel))
            .map(|(camel, _, value)| (camel, value))
            .collect();
        for (name, value) in renamed {
            if !MEMBERS.contains(&name.as_str()) {
                continue;
            }
            if let Some(other) = other_of_pair(&name) {
                self.members.remove(other);
            }
            let value = match (self.members.get(&name), value) {
                (Some(Value::Object(old)), Value::Object(new)) if name == "proxyMetadata" => {
                    let mut merged = old.clone();
                    merged.extend(new.clone());
                    Value::Object(merged)
                }
                _ => value.clone(),
            };
            self.set(origin, &name, value);
        }
    }

    /// Reads every member the agent uses. All problems are reported, not just the first.
    pub fn read(self, problems: &mut Vec<Problem>) -> ProxyConfig {
        let mut reader = Reader {
            members: &self.members,
            origins: &self.origins,
            problems,
        };
        let mut config = ProxyConfig {
            config_path: reader.some_text("configPath"),
            binary_path: reader.some_text("binaryPath").into(),
            service_cluster: reader.text("serviceCluster").unwrap_or_default(),
            drain_duration: reader.whole_seconds("drainDuration"),
            termination_drain_duration: reader.duration("terminationDrainDuration", Duration::ZERO),
            discovery_address: reader.address("discoveryAddress"),
            plaintext: reader.plaintext(),
            admin_port: reader.port("proxyAdminPort").unwrap_or_default(),
            status_port: reader.port("statusPort"),
            concurrency: reader.count("concurrency"),
            metadata: reader.texts("proxyMetadata"),
            file_flush_interval: reader.duration("fileFlushInterval", Duration::from_secs(1)),
            document: Map::new(),
        };
        for name in ["customConfigFile", "proxyBootstrapTemplatePath"] {
            reader.refuse(name, "nothing: this agent writes the bootstrap itself");
        }
        config.document = self.for_istiod();
        config
    }

    /// Durations in the form protobuf reads, which is narrower than Go's.
    fn for_istiod(mut self) -> Map<String, Value> {
        for name in [
            "drainDuration",
            "terminationDrainDuration",
            "fileFlushInterval",
        ] {
            if let Some(Value::String(text)) = self.members.get_mut(name)
                && let Some(parsed) = duration::parse(text)
            {
                *text = duration::seconds(parsed);
            }
        }
        self.members
    }
}

/// The document for the log, without what is secret in it: tokens and the values of
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
    for token in ["accessToken", "access_token"] {
        let lightstep = shown
            .get_mut("tracing")
            .and_then(|t| t.get_mut("lightstep"));
        if let Some(value) = lightstep.and_then(|l| l.get_mut(token)) {
            *value = json!("(not shown)");
        }
    }
    Value::Object(shown)
}

/// The members of a document, or nothing when it is empty.
fn parse(origin: &str, text: &str) -> Result<Option<Map<String, Value>>, Problem> {
    let problem = |found: String| Problem {
        subject: origin.to_owned(),
        found,
        expected: "a YAML or JSON object".to_owned(),
    };
    if text.trim().is_empty() {
        return Ok(None);
    }
    match serde_saphyr::from_str::<Value>(text) {
        Ok(Value::Null) => Ok(None),
        Ok(Value::Object(members)) => Ok(Some(members)),
        Ok(other) => Err(problem(other.to_string())),
        // The parser tells line and column itself.
        Err(error) => Err(problem(first_line(&error.to_string()).to_owned())),
    }
}

fn first_line(text: &str) -> &str {
    let line = text.lines().next().unwrap_or_default();
    line.strip_prefix("error: ").unwrap_or(line)
}

fn camel_case(name: &str) -> String {
    let mut words = name.split('_');
    let mut camel = words.next().unwrap_or_default().to_owned();
    for word in words {
        let mut letters = word.chars();
        camel.extend(letters.next().map(|first| first.to_ascii_uppercase()));
        camel.push_str(letters.as_str());
    }
    camel
}

/// The member that setting `name` unsets.
fn other_of_pair(name: &str) -> Option<&'static str> {
    match name {
        "serviceCluster" => Some("tracingServiceName"),
        "tracingServiceName" => Some("serviceCluster"),
        _ => None,
    }
}

/// Every member of ProxyConfig, source: mesh/v1alpha1/proxy.proto.
const MEMBERS: &[&str] = &[
    "availabilityZone",
    "binaryPath",
    "caCertificatesPem",
    "concurrency",
    "configPath",
    "connectionSettings",
    "controlPlaneAuthPolicy",
    "customConfigFile",
    "discoveryAddress",
    "discoveryRefreshDelay",
    "drainDuration",
    "envoyAccessLogService",
    "envoyMetricsService",
    "envoyMetricsServiceAddress",
    "extraStatTags",
    "fileFlushInterval",
    "fileFlushMinSizeKb",
    "gatewayTopology",
    "holdApplicationUntilProxyStarts",
    "image",
    "interceptionMode",
    "meshId",
    "privateKeyProvider",
    "proxyAdminPort",
    "proxyBootstrapTemplatePath",
    "proxyHeaders",
    "proxyMetadata",
    "proxyStatsMatcher",
    "readinessProbe",
    "runtimeValues",
    "sds",
    "serviceCluster",
    "statNameLength",
    "statsCompression",
    "statsdUdpAddress",
    "statusPort",
    "terminationDrainDuration",
    "tracing",
    "tracingServiceName",
    "zipkinAddress",
];

#[cfg(test)]
mod tests {
    use super::*;

    fn folded(documents: &[&str]) -> (ProxyConfig, Vec<Problem>) {
        let mut problems = Vec::new();
        let mut document = Document::builtin();
        for (index, text) in documents.iter().enumerate() {
            if let Err(problem) = document.overlay_text(&format!("document {index}"), text) {
                problems.push(problem);
            }
        }
        (document.read(&mut problems), problems)
    }

    #[test]
    fn empty_documents_change_nothing() {
        let (config, problems) = folded(&["", "{}\n", "null", "# only a comment\n"]);
        assert_eq!(problems, []);
        assert_eq!(config.discovery_address, "istiod.istio-system.svc:15012");
        assert_eq!(config.drain_duration, Duration::from_secs(45));
        assert_eq!(config.document.len(), 10);
    }

    #[test]
    fn later_members_replace_earlier_ones_and_metadata_merges_by_key() {
        let (config, problems) = folded(&[
            "tracing: {zipkin: {address: a:1}}\nproxyMetadata: {A: '1', B: '1'}\nconcurrency: 2",
            r#"{"tracing": {"sampling": 5}, "proxyMetadata": {"B": "2"}, "concurrency": null}"#,
        ]);
        assert_eq!(problems, []);
        assert_eq!(config.document["tracing"], json!({"sampling": 5}));
        assert_eq!(
            config.document["proxyMetadata"],
            json!({"A": "1", "B": "2"})
        );
        assert_eq!(config.concurrency, Some(2));
    }

    #[test]
    fn names_may_be_in_snake_case_and_camel_case_wins() {
        let (config, _) = folded(&["status_port: 1\nstatusPort: '2'\ndrain_duration: 1m30s"]);
        assert_eq!(config.status_port, Some(2));
        assert_eq!(config.document["drainDuration"], "90s");
    }

    #[test]
    fn members_of_no_proxy_config_are_dropped() {
        let (config, problems) = folded(&["fromTheFuture: 1"]);
        assert_eq!(problems, []);
        assert!(!config.document.contains_key("fromTheFuture"));
    }

    #[test]
    fn every_wrong_member_is_named_with_its_document() {
        let (_, problems) = folded(&[
            "drainDuration: 1500ms\nstatusPort: 0\ndiscoveryAddress: istiod",
            "proxyMetadata: {A: true}\ncontrolPlaneAuthPolicy: INHERIT",
        ]);
        let subjects: Vec<_> = problems.iter().map(|p| p.subject.as_str()).collect();
        assert_eq!(
            subjects,
            [
                "drainDuration of document 0",
                "discoveryAddress of document 0",
                "controlPlaneAuthPolicy of document 1",
                "statusPort of document 0",
                "proxyMetadata of document 1",
            ]
        );
    }

    #[test]
    fn the_log_shows_no_secrets() {
        let (config, _) = folded(&["proxyMetadata: {TOKEN: hush, ISTIO_META_A: a}\n\
             tracing: {lightstep: {accessToken: hush, address: 'a:1'}}"]);
        let text = printable(&config.document).to_string();
        assert!(!text.contains("hush") && text.contains("a:1"), "{text}");
    }

    #[test]
    fn a_document_that_is_no_object_is_a_problem_with_its_line() {
        let (_, problems) = folded(&["a: 1\nb: [", "- 1"]);
        assert_eq!(problems.len(), 2, "{problems:?}");
        assert!(problems[0].found.starts_with("line "), "{problems:?}");
    }
}
