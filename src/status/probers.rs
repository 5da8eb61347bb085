//! Answers application probes, which the injector has the kubelet send to the status port. The path names the
//! prober; the application's status and body are passed back.
//!
//! [`Probers::parse`] reads the injector's JSON, probers by path, from `ISTIO_KUBE_APP_PROBERS`. Names of members
//! match in any case, as in Go. Every problem is reported with its path.

use std::collections::BTreeMap;
use std::time::Duration;

use ::http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};
use serde::Deserialize;
use serde_json::Value;

use super::{Body, Config, reply};
use crate::json;
use crate::net::request_path;
use crate::probe::{Client, Kind, Probe};
use crate::problem::{Code, Problem};

/// The kubelet's default timeout.
const PROBE_LIMIT: Duration = Duration::from_secs(1);
/// The timeout of hooks, which have none. The kubelet ends a hook with the pod's grace period, which the agent does
/// not know; it is rarely more than minutes.
const HOOK_LIMIT: Duration = Duration::from_secs(3600);
/// The prefix of the paths of hooks.
const HOOKS: &str = "/app-lifecycle/";

/// Probers by path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Probers(BTreeMap<String, Prober>);

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prober {
    pub port: u16,
    pub kind: Kind,
    pub timeout: Duration,
    /// Headers the kubelet sends with its HTTP probes; not shown, as they may be credentials.
    pub headers: HeaderMap,
}

impl Prober {
    /// Returns the probe of the application at `host`.
    pub fn probe(&self, host: &str) -> Probe {
        Probe {
            host: host.to_owned(),
            port: self.port,
            kind: self.kind.clone(),
            timeout: self.timeout,
        }
    }
}

impl Probers {
    /// Parses the variable, or returns all problems. An empty text has no probers.
    pub fn parse(text: &str) -> Result<Self, Vec<String>> {
        if text.is_empty() {
            return Ok(Self::default());
        }
        let list: Option<BTreeMap<String, Value>> =
            json::read(text).map_err(|error| vec![format!("failed to decode: {error}")])?;
        let mut probers = BTreeMap::new();
        let mut problems = Vec::new();
        for (path, value) in list.unwrap_or_default() {
            match prober(&path, value) {
                Ok(prober) => drop(probers.insert(path, prober)),
                Err(problem) => problems.push(format!("{path}: {problem}")),
            }
        }
        if problems.is_empty() { Ok(Self(probers)) } else { Err(problems) }
    }

    pub fn get(&self, path: &str) -> Option<&Prober> {
        self.0.get(path)
    }

    /// Lists the probes with their paths, without hooks.
    pub fn probes(&self) -> impl Iterator<Item = (&String, &Prober)> {
        self.0.iter().filter(|(path, _)| !path.starts_with(HOOKS))
    }
}

pub(super) struct AppProbes {
    client: Client,
    pub(super) config: Config,
}

impl AppProbes {
    pub(super) fn new(config: Config) -> Result<Self, rustls::Error> {
        Ok(Self { client: Client::new(config.probes)?, config })
    }

    pub(super) async fn answer(&self, path: &str, headers: &HeaderMap) -> Response<Body> {
        let Some(prober) = self.config.probers.get(path) else {
            let subject = format!("Prober does not exists url {path}");
            let problem = Problem::new(Code::ProbeUnknown, subject, Code::ProbeUnknown.cause());
            tracing::error!(target: "probes", "{problem}");
            let text = format!("app prober config does not exists for {path}\n");
            return reply::refusal(StatusCode::BAD_REQUEST, text);
        };
        let probe = prober.probe(&self.config.application_host);
        let headers = self.headers(headers, prober.port);
        match self.client.probe(&probe, &headers).await {
            Ok(outcome) => reply::with(outcome.status, outcome.body, &[]),
            Err(problem) => {
                tracing::error!(target: "probes", "Request to probe app failed: {problem}, path = {path}");
                reply::with(StatusCode::INTERNAL_SERVER_ERROR, "", &[])
            }
        }
    }

    /// Returns the kubelet's headers. In `Host`, the application's port replaces the status port.
    fn headers(&self, headers: &HeaderMap, port: u16) -> HeaderMap {
        const HOST: HeaderName = header::HOST;
        let mut headers = headers.clone();
        let host = headers.get(HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
        if let Some(name) = host.strip_suffix(&format!(":{}", self.config.port))
            && let Ok(host) = HeaderValue::from_str(&format!("{name}:{port}"))
        {
            headers.insert(HOST, host);
        }
        headers
    }
}

/// A prober as the injector writes it, with the names of members in lower case.
#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct Spec {
    httpget: Option<Target>,
    tcpsocket: Option<Target>,
    grpc: Option<Target>,
    /// Kubernetes has 32-bit seconds; 0 is the default timeout.
    timeoutseconds: Option<u32>,
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct Target {
    #[serde(default)]
    port: Value,
    scheme: Option<String>,
    path: Option<String>,
    service: Option<String>,
    #[serde(default)]
    httpheaders: Value,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Header {
    name: String,
    value: String,
}

impl Header {
    fn parse(self) -> Option<(HeaderName, HeaderValue)> {
        let mut value: HeaderValue = self.value.parse().ok()?;
        value.set_sensitive(true);
        Some((self.name.parse().ok()?, value))
    }
}

#[derive(Debug, thiserror::Error)]
enum Invalid {
    #[error("invalid path, expected /app-health or /app-lifecycle, a container and a probe")]
    Path,
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    #[error("invalid prober type, must be one of type httpGet, tcpSocket or gRPC")]
    Kind,
    #[error("port is {0}, expected from 1 to 65535: the port must be int type")]
    Port(Value),
    /// The decoder's error would show a header's value.
    #[error("httpHeaders must be a list of objects with name and value")]
    Headers,
}

fn prober(path: &str, value: Value) -> Result<Prober, Invalid> {
    if !is_path(path) {
        return Err(Invalid::Path);
    }
    let spec = Spec::deserialize(lower_case(value))?;
    let (kind, target) = match (spec.httpget, spec.tcpsocket, spec.grpc) {
        (Some(mut target), None, None) => {
            let is_https = target.scheme.as_deref() == Some("HTTPS");
            let path = request_path::escaped(&target.path.take().unwrap_or_default());
            (Kind::Http { is_https, path }, target)
        }
        (None, Some(target), None) => (Kind::Tcp, target),
        (None, None, Some(mut target)) => {
            let service = target.service.take().unwrap_or_default();
            (Kind::Grpc { service }, target)
        }
        _ => return Err(Invalid::Kind),
    };
    let headers = Option::<Vec<Header>>::deserialize(target.httpheaders)
        .map_err(|_| Invalid::Headers)?
        .unwrap_or_default()
        .into_iter();
    let port = match target.port.as_u64().and_then(|port| port.try_into().ok()) {
        None | Some(0) => return Err(Invalid::Port(target.port)),
        Some(port) => port,
    };
    Ok(Prober {
        port,
        kind,
        timeout: match spec.timeoutseconds {
            None | Some(0) if path.starts_with(HOOKS) => HOOK_LIMIT,
            None | Some(0) => PROBE_LIMIT,
            Some(seconds) => Duration::from_secs(seconds.into()),
        },
        // Headers that HTTP does not allow are left out.
        headers: headers.filter_map(Header::parse).collect(),
    })
}

/// Converts the names of members to lower case.
fn lower_case(value: Value) -> Value {
    match value {
        Value::Object(members) => members
            .into_iter()
            .map(|(name, value)| (name.to_ascii_lowercase(), lower_case(value)))
            .collect(),
        Value::Array(elements) => elements.into_iter().map(lower_case).collect(),
        scalar => scalar,
    }
}

fn is_path(path: &str) -> bool {
    const PROBES: [&str; 5] = ["livez", "readyz", "startupz", "prestopz", "poststartz"];
    let segments: Vec<_> = path.split('/').collect();
    matches!(
        segments[..],
        ["", "app-health" | "app-lifecycle", container, probe]
            if !container.is_empty() && PROBES.contains(&probe)
    )
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
        for text in ["", "{}", "null", r#"{"/app-health/a/livez": null}"#] {
            assert_eq!(Probers::parse(text), Ok(Probers::default()));
        }
    }

    #[test]
    fn each_kind_is_parsed_and_members_for_the_kubelet_are_ignored() {
        let http = r#"{"/app-health/a/livez": {"httpGet": {"path": "x?y", "port": 8080, "host": "h",
            "scheme": "HTTPS", "httpHeaders": [{"name": "a", "value": "b"}]},
            "timeoutSeconds": 5, "initialDelaySeconds": 3, "tcpSocket": null}}"#;
        let prober = only(http);
        assert_eq!(prober.headers["a"], "b");
        assert!(!format!("{prober:?}").contains("\"b\""), "{prober:?}");
        let path = "x?y".to_owned();
        let is_https = true;
        assert_eq!(prober.kind, Kind::Http { is_https, path });
        assert_eq!(prober.port, 8080);
        assert_eq!(prober.timeout, Duration::from_secs(5));
        let tcp =
            only(r#"{"/app-health/a/livez": {"tcpSocket": {"port": 1}, "timeoutSeconds": 0}}"#);
        assert_eq!((tcp.kind, tcp.timeout), (Kind::Tcp, PROBE_LIMIT));
        for service in ["null", "\"\""] {
            let text = format!(
                "{{\"/app-health/a/livez\": {{\"gRPC\": {{\"port\": 1, \"service\": {service}}}}}}}"
            );
            let service = String::new();
            assert_eq!(only(&text).kind, Kind::Grpc { service });
        }
    }

    #[test]
    fn a_member_that_is_null_is_absent() {
        let prober = only(
            r#"{"/app-health/a/livez": {"httpGet": {"port": 1, "path": null, "scheme": null, "httpHeaders":
                [null, {"name": "a", "value": null}]}, "tcpSocket": null, "timeoutSeconds": null}}"#,
        );
        assert_eq!(prober.headers["a"], "");
        assert_eq!(prober.timeout, PROBE_LIMIT);
        let headers = r#"{"/app-health/a/livez": {"httpGet": {"port": 1, "httpHeaders": null}}}"#;
        assert!(only(headers).headers.is_empty());
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
            (r#"{"/app-health/a/livez": {}}"#, "invalid prober type"),
            (
                r#"{"/app-health/a/livez": {"httpGet": {"port": 1}, "tcpSocket": {"port": 1}}}"#,
                "invalid prober type, must be one of type httpGet",
            ),
            (
                r#"{"/app-health/a/livez": {"httpGet": {"port": "web"}}}"#,
                "port is \"web\", expected from 1 to 65535: the port must be int type",
            ),
            (r#"{"/app-health/a/livez": {"tcpSocket": {}}}"#, "port is null"),
            (r#"{"/app-health/a/livez": {"grpc": {"port": 70000}}}"#, "port is 70000"),
            (
                r#"{"/app-health/a/livez": {"tcpSocket": {"port": 1}, "timeoutSeconds": -1}}"#,
                "invalid value: integer `-1`, expected u32",
            ),
            (
                r#"{"/app-health/a/livez": {"httpGet": {"port": 1, "path": 2}}}"#,
                "invalid type: integer `2`, expected a string",
            ),
            (
                r#"{"/app-health/a/livez": {"httpGet": {"port": 1, "httpHeaders": ["a: hush"]}}}"#,
                "httpHeaders must be a list of objects",
            ),
        ] {
            let problems = Probers::parse(text).expect_err("a problem");
            let found = &problems[0];
            assert!(found.contains(expected), "{found}");
            assert!(!found.contains("hush"), "{found}");
        }
        let two = r#"{"/x": {}, "/app-health/a/livez": {}}"#;
        assert_eq!(Probers::parse(two).expect_err("problems").len(), 2);
    }
}
