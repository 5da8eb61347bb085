//! `ISTIO_KUBE_APP_PROBERS`: the application's probes by path, as JSON the injector writes.
//!
//! Names of members are matched in any case, as in Go. Every problem is reported with its path.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Map, Value};

use crate::probe::Kind;
use crate::request_path;

/// What the port is expected to be.
const PORT: &str = "from 1 to 65535: the port must be int type";

/// Probers by path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Probers(BTreeMap<String, Prober>);

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prober {
    pub port: u16,
    pub kind: Kind,
    pub timeout: Option<Duration>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    #[error("failed to decode: {0}")]
    Json(String),
    #[error(
        "{path}: invalid path, expected /app-health or /app-lifecycle, a container and a probe"
    )]
    Path { path: String },
    #[error("{path}: {member} is {found}, expected {expected}")]
    Member {
        path: String,
        member: &'static str,
        found: String,
        expected: &'static str,
    },
}

impl Probers {
    /// Parses the variable. An empty text is an empty list.
    pub fn parse(text: &str) -> Result<Self, Vec<Problem>> {
        if text.is_empty() {
            return Ok(Self::default());
        }
        let list: BTreeMap<String, Value> =
            serde_json::from_str(text).map_err(|error| vec![Problem::Json(error.to_string())])?;
        let mut problems = Vec::new();
        let mut probers = BTreeMap::new();
        for (path, value) in list {
            match prober(&path, &value) {
                Ok(prober) => {
                    probers.insert(path, prober);
                }
                Err(problem) => problems.push(problem),
            }
        }
        if problems.is_empty() {
            Ok(Self(probers))
        } else {
            Err(problems)
        }
    }

    pub fn get(&self, path: &str) -> Option<&Prober> {
        self.0.get(path)
    }
}

fn prober(path: &str, value: &Value) -> Result<Prober, Problem> {
    if !is_path(path) {
        let path = path.to_owned();
        return Err(Problem::Path { path });
    }
    let reader = Reader { path };
    let prober = reader.object("the prober", value)?;
    let named = ["httpGet", "tcpSocket", "grpc"].map(|name| (name, member(prober, name)));
    let mut given = named
        .into_iter()
        .filter_map(|(name, value)| Some((name, value?)));
    let (Some((name, target)), None) = (given.next(), given.next()) else {
        let expected = "one: invalid prober type, must be one of type httpGet, tcpSocket or gRPC";
        let kinds = named.iter().filter(|(_, value)| value.is_some()).count();
        return Err(reader.problem("the number of kinds", &kinds.into(), expected));
    };
    let target = reader.object(name, target)?;
    Ok(Prober {
        port: reader.port(target)?,
        kind: match name {
            "httpGet" => Kind::Http {
                is_https: reader.text(target, "scheme")? == "HTTPS",
                path: request_path::escaped(&reader.text(target, "path")?),
            },
            "tcpSocket" => Kind::Tcp,
            _ => Kind::Grpc {
                service: reader.text(target, "service")?,
            },
        },
        timeout: reader.timeout(prober)?,
    })
}

fn is_path(path: &str) -> bool {
    const PROBES: [&str; 5] = ["livez", "readyz", "startupz", "prestopz", "poststartz"];
    let segments: Vec<_> = path.split('/').collect();
    match segments.as_slice() {
        ["", "app-health" | "app-lifecycle", container, probe] => {
            !container.is_empty() && PROBES.contains(probe)
        }
        _ => false,
    }
}

/// A member by its name in any case. Null is none.
fn member<'a>(object: &'a Map<String, Value>, name: &str) -> Option<&'a Value> {
    let mut members = object.iter();
    let (_, value) = members.find(|(found, _)| found.eq_ignore_ascii_case(name))?;
    (!value.is_null()).then_some(value)
}

/// Reads members of one prober.
struct Reader<'a> {
    path: &'a str,
}

impl Reader<'_> {
    fn problem(&self, member: &'static str, found: &Value, expected: &'static str) -> Problem {
        Problem::Member {
            path: self.path.to_owned(),
            member,
            found: found.to_string(),
            expected,
        }
    }

    fn object<'v>(
        &self,
        name: &'static str,
        value: &'v Value,
    ) -> Result<&'v Map<String, Value>, Problem> {
        let object = value.as_object();
        object.ok_or_else(|| self.problem(name, value, "an object"))
    }

    fn port(&self, target: &Map<String, Value>) -> Result<u16, Problem> {
        let value = member(target, "port").unwrap_or(&Value::Null);
        let port = value.as_u64().and_then(|port| u16::try_from(port).ok());
        let port = port.filter(|port| *port != 0);
        port.ok_or_else(|| self.problem("port", value, PORT))
    }

    fn text(&self, target: &Map<String, Value>, name: &'static str) -> Result<String, Problem> {
        match member(target, name) {
            None => Ok(String::new()),
            Some(Value::String(text)) => Ok(text.clone()),
            Some(other) => Err(self.problem(name, other, "a text")),
        }
    }

    fn timeout(&self, prober: &Map<String, Value>) -> Result<Option<Duration>, Problem> {
        const NAME: &str = "timeoutSeconds";
        let Some(value) = member(prober, NAME) else {
            return Ok(None);
        };
        let seconds = value
            .as_u64()
            .and_then(|seconds| u32::try_from(seconds).ok());
        let expected = "a whole number of seconds, or 0 for the default";
        let seconds = seconds.ok_or_else(|| self.problem(NAME, value, expected))?;
        Ok((seconds != 0).then(|| Duration::from_secs(seconds.into())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn only(text: &str) -> Prober {
        let probers = Probers::parse(text).expect("good probers");
        let prober = probers.get("/app-health/a/livez");
        prober.expect("a prober").clone()
    }

    #[test]
    fn an_empty_list_has_no_probers() {
        for text in ["", "{}"] {
            assert_eq!(Probers::parse(text), Ok(Probers::default()));
        }
    }

    #[test]
    fn each_kind_is_parsed_and_members_for_the_kubelet_are_ignored() {
        let http = r#"{"/app-health/a/livez": {"httpGet": {"path": "x?y", "port": 8080, "host": "h",
            "scheme": "HTTPS", "httpHeaders": [{"name": "a", "value": "b"}]},
            "timeoutSeconds": 5, "initialDelaySeconds": 3, "tcpSocket": null}}"#;
        let prober = only(http);
        let path = "x?y".to_owned();
        let is_https = true;
        assert_eq!(prober.kind, Kind::Http { is_https, path });
        assert_eq!(prober.port, 8080);
        assert_eq!(prober.timeout, Some(Duration::from_secs(5)));
        let tcp =
            only(r#"{"/app-health/a/livez": {"tcpSocket": {"port": 1}, "timeoutSeconds": 0}}"#);
        assert_eq!((tcp.kind, tcp.timeout), (Kind::Tcp, None));
        for service in ["null", "\"\""] {
            let text = format!(
                "{{\"/app-health/a/livez\": {{\"gRPC\": {{\"port\": 1, \"service\": {service}}}}}}}"
            );
            let service = String::new();
            assert_eq!(only(&text).kind, Kind::Grpc { service });
        }
    }

    #[test]
    fn characters_not_allowed_in_a_request_path_are_escaped() {
        let text = r#"{"/app-health/a/livez": {"httpGet": {"port": 1, "path": "/a b"}}}"#;
        let (is_https, path) = (false, "/a%20b".to_owned());
        assert_eq!(only(text).kind, Kind::Http { is_https, path });
    }

    #[test]
    fn every_problem_is_named_with_its_path() {
        for (text, expected) in [
            ("{", "failed to decode"),
            ("[]", "failed to decode"),
            (r#"{"/app-health/a/other": {}}"#, "invalid path"),
            (r#"{"/app-health//livez": {}}"#, "invalid path"),
            (r#"{"/app-health/a/b/livez": {}}"#, "invalid path"),
            (r#"{"/app-health/a/livez": null}"#, "the prober is null"),
            (r#"{"/app-health/a/livez": {}}"#, "invalid prober type"),
            (
                r#"{"/app-health/a/livez": {"httpGet": {"port": 1}, "tcpSocket": {"port": 1}}}"#,
                "kinds is 2, expected one: invalid prober type, must be one of type httpGet",
            ),
            (
                r#"{"/app-health/a/livez": {"httpGet": {"port": "web"}}}"#,
                "port is \"web\", expected from 1 to 65535: the port must be int type",
            ),
            (
                r#"{"/app-health/a/livez": {"tcpSocket": {}}}"#,
                "port is null",
            ),
            (
                r#"{"/app-health/a/livez": {"grpc": {"port": 70000}}}"#,
                "port is 70000",
            ),
            (
                r#"{"/app-health/a/livez": {"tcpSocket": {"port": 1}, "timeoutSeconds": -1}}"#,
                "timeoutSeconds is -1, expected a whole number",
            ),
            (
                r#"{"/app-health/a/livez": {"httpGet": {"port": 1, "path": 2}}}"#,
                "path is 2, expected a text",
            ),
        ] {
            let problems = Probers::parse(text).expect_err("a problem");
            let found = problems[0].to_string();
            assert!(found.contains(expected), "{found}");
        }
        let two = r#"{"/x": {}, "/app-health/a/livez": {}}"#;
        assert_eq!(Probers::parse(two).expect_err("problems").len(), 2);
    }
}
