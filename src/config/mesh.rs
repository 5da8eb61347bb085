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
            document: &self,
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
        Err(error) => Err(problem(match error.location() {
            Some(at) => format!("line {}: {}", at.line(), first_line(&error.to_string())),
            None => first_line(&error.to_string()).to_owned(),
        })),
    }
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
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

struct Reader<'a> {
    document: &'a Document,
    problems: &'a mut Vec<Problem>,
}

impl Reader<'_> {
    /// The member as `take` understands it; a problem when it does not.
    fn member<T>(
        &mut self,
        name: &str,
        expected: &str,
        take: impl Fn(&Value) -> Option<T>,
    ) -> Option<T> {
        let value = self.document.members.get(name)?;
        let taken = take(value);
        if taken.is_none() {
            self.problem(name, value.to_string(), expected);
        }
        taken
    }

    fn problem(&mut self, name: &str, found: String, expected: &str) {
        let origin = self
            .document
            .origins
            .get(name)
            .map_or("ProxyConfig", String::as_str);
        self.problems.push(Problem {
            subject: format!("{name} of {origin}"),
            found,
            expected: expected.to_owned(),
        });
    }

    fn text(&mut self, name: &str) -> Option<String> {
        self.member(name, "a string", |v| v.as_str().map(str::to_owned))
    }

    fn some_text(&mut self, name: &str) -> String {
        let expected = "a string that is not empty";
        let text = |v: &Value| v.as_str().filter(|s| !s.is_empty()).map(str::to_owned);
        self.member(name, expected, text).unwrap_or_default()
    }

    fn duration(&mut self, name: &str, default: Duration) -> Duration {
        let expected = "a duration such as 45s or 1m30s";
        self.member(name, expected, |v| duration::parse(v.as_str()?))
            .unwrap_or(default)
    }

    fn whole_seconds(&mut self, name: &str) -> Duration {
        let expected = "a duration of whole seconds, at least 1s";
        let whole = |d: &Duration| d.subsec_nanos() == 0 && !d.is_zero();
        self.member(name, expected, |v| {
            duration::parse(v.as_str()?).filter(whole)
        })
        .unwrap_or_default()
    }

    fn address(&mut self, name: &str) -> String {
        let expected = "host:port with a port from 1 to 65535";
        self.member(name, expected, |v| {
            let text = v.as_str()?;
            split_address(text).map(|_| text.to_owned())
        })
        .unwrap_or_default()
    }

    fn plaintext(&mut self) -> bool {
        self.member("controlPlaneAuthPolicy", "NONE or MUTUAL_TLS", |v| match v
            .as_str()
            .map_or_else(
                || v.as_i64(),
                |name| match name {
                    "NONE" => Some(0),
                    "MUTUAL_TLS" => Some(1),
                    _ => None,
                },
            )? {
            0 => Some(true),
            1 => Some(false),
            _ => None,
        })
        .unwrap_or_default()
    }

    fn port(&mut self, name: &str) -> Option<u16> {
        let port = |v: &Value| u16::try_from(whole_number(v)?).ok().filter(|p| *p != 0);
        self.member(name, "a port from 1 to 65535", port)
    }

    fn count(&mut self, name: &str) -> Option<u32> {
        let count = |v: &Value| u32::try_from(whole_number(v)?).ok();
        self.member(name, "a whole number, 0 or more", count)
    }

    fn texts(&mut self, name: &str) -> BTreeMap<String, String> {
        self.member(name, "an object of strings", |v| {
            let pairs = v.as_object()?.iter();
            pairs
                .map(|(k, v)| Some((k.clone(), v.as_str()?.to_owned())))
                .collect()
        })
        .unwrap_or_default()
    }

    fn refuse(&mut self, name: &str, expected: &str) {
        self.member(name, expected, |v| (v.as_str() == Some("")).then_some(()));
    }
}

/// Numbers may be quoted.
fn whole_number(value: &Value) -> Option<i64> {
    value.as_i64().or_else(|| value.as_str()?.parse().ok())
}

/// Host and port of `host:port`; an IPv6 host stands in brackets, which are taken off.
pub fn split_address(address: &str) -> Option<(&str, u16)> {
    let (host, port) = address.rsplit_once(':')?;
    let port = port.parse().ok().filter(|port| *port != 0)?;
    let host = match host.strip_prefix('[') {
        Some(bracketed) => bracketed.strip_suffix(']')?,
        None => Some(host).filter(|host| !host.contains(':'))?,
    };
    let named = |c: char| c.is_ascii_alphanumeric() || "-._:%".contains(c);
    (!host.is_empty() && host.chars().all(named)).then_some((host, port))
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
    fn a_document_that_is_no_object_is_a_problem_with_its_line() {
        let (_, problems) = folded(&["a: 1\nb: [", "- 1"]);
        assert_eq!(problems.len(), 2, "{problems:?}");
        assert!(problems[0].found.starts_with("line "), "{problems:?}");
    }

    #[test]
    fn splits_addresses_into_host_and_port() {
        assert_eq!(
            split_address("istiod.istio-system.svc:15012"),
            Some(("istiod.istio-system.svc", 15012))
        );
        assert_eq!(split_address("[fd00::1]:1"), Some(("fd00::1", 1)));
        for text in [
            "a",
            "a:",
            "a:0",
            "a:65536",
            ":1",
            "fd00::1:1",
            "a b:1",
            "http://a:1",
        ] {
            assert_eq!(split_address(text), None, "{text}");
        }
    }
}
