//! Inspects Envoy through its admin port: resources that it waits for, calls that it refuses, and endpoints for which
//! requests fail.
//!
//! A full configuration dump may have 100 MB, so only names and some clusters are requested.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use futures_util::future::join_all;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::time::timeout;

use super::admin::{Admin, Error};
use crate::problem::{Code, Problem};
use crate::runtime::lifecycle::BoxError;

/// The pause before a finding is confirmed, because every update warms for a moment.
const PAUSE: Duration = Duration::from_millis(300);
/// The clusters of the bootstrap to which Envoy sends traces, metrics and access logs.
const COLLECTORS: [&str; 5] =
    ["zipkin", "lightstep", "datadog_agent", "envoy_metrics_service", "envoy_accesslog_service"];
/// The most failing endpoints that are returned.
const MAX_FAILING: usize = 16;

/// The listener with which the agent keeps an Envoy that takes over from serving. It may wait, and is not reported.
pub const GATE: &str = "istio-agent-gate";

const WARMING_LISTENERS: &str = "/init_dump?mask=listener";
const WARMING_CLUSTERS: &str = "/config_dump?resource=dynamic_warming_clusters&mask=cluster.name";
const ACTIVE_SECRETS: &str = "/config_dump?resource=dynamic_active_secrets&mask=name";
const WARMING_SECRETS: &str = "/config_dump?resource=dynamic_warming_secrets&mask=name";
/// `^(listener|http|cluster\.(in|out)bound)\b.*(no_filter_chain_match|ssl\.(handshake|connection_error|fail_verify.*)|
/// rbac\..*denied|rq_pending_overflow)$`
const REFUSALS: &str = "/stats?filter=%5E(listener%7Chttp%7Ccluster%5C.(in%7Cout)bound)%5Cb.*(no_filter_chain_match%7C\
    ssl%5C.(handshake%7Cconnection_error%7Cfail_verify.*)%7Crbac%5C..*denied%7Crq_pending_overflow)%24";
const INBOUND_LISTENER: &str =
    "/config_dump?resource=dynamic_listeners&name_regex=%5EvirtualInbound%24";
/// Envoy's port for captured inbound traffic, where it serves nothing itself.
const INBOUND_PORT: u64 = 15006;
/// The number of failed handshakes from which they are a problem if they are the majority. Scanners make some.
const MANY_HANDSHAKES: u64 = 10;
/// The advice for an Envoy without the statistics of [`refusals`].
pub const STATISTICS_HINT: &str = "Envoy does not count all of them; it does with the annotation \
    `sidecar.istio.io/statsInclusionRegexps: listener.*(no_filter_chain_match|ssl.*),http.*rbac.*denied,\
    cluster.*(rq_pending_overflow|ssl.fail_verify_san)`";

/// Lists the resources that Envoy waits for. A page that cannot be read is a problem with another code.
pub async fn warming(admin: &Admin) -> Vec<Problem> {
    let problems = join_all([
        warming_in(admin, Code::ListenerWarming, WARMING_LISTENERS, listeners),
        warming_in(admin, Code::ClusterWarming, WARMING_CLUSTERS, names),
        warming_in(admin, Code::SecretAwaited, WARMING_SECRETS, names),
    ]);
    problems.await.into_iter().flatten().collect()
}

/// Returns the problem of the resources that a page lists twice.
async fn warming_in(
    admin: &Admin,
    code: Code,
    path: &str,
    names: fn(&Value) -> BTreeSet<String>,
) -> Option<Problem> {
    let confirmed = async {
        let first = names(&admin.page(path).await?);
        if first.is_empty() {
            return Ok(first);
        }
        tokio::time::sleep(PAUSE).await;
        Ok::<_, Error>(&first & &names(&admin.page(path).await?))
    };
    let (code, found) = match timeout(admin.limit, confirmed).await {
        Ok(Ok(names)) if names.is_empty() => return None,
        Ok(Ok(names)) => (code, Vec::from_iter(names).join("; ")),
        Ok(Err(error)) => (Code::EnvoyNotInspected, error.to_string()),
        Err(_) => (Code::EnvoyNotInspected, "no answer in time".to_owned()),
    };
    Some(Problem::new(code, code.cause(), found))
}

/// Returns the names of the resources of a type of which Envoy has accepted a version, active or warming.
pub(crate) async fn accepted_names(
    admin: &Admin,
    type_url: &str,
) -> Result<BTreeSet<String>, Error> {
    // Listeners and endpoints of which Envoy has refused every version are listed without the members `states`.
    let (dumps, name, states): (&[_], _, _) = match type_url.rsplit('.').next() {
        Some("Cluster") => {
            (&["dynamic_active_clusters", "dynamic_warming_clusters"], "cluster.name", "")
        }
        Some("ClusterLoadAssignment") => {
            let states = ",endpoint_config.endpoints";
            (&["dynamic_endpoint_configs"], "endpoint_config.cluster_name", states)
        }
        Some("Listener") => (
            &["dynamic_listeners"],
            "name",
            ",active_state.version_info,warming_state.version_info",
        ),
        Some("RouteConfiguration") => (&["dynamic_route_configs"], "route_config.name", ""),
        Some("TypedExtensionConfig") => (&["ecds_filters"], "ecds_filter.name", ""),
        _ => return Err(Error::NotInDump(type_url.to_owned())),
    };
    let pointer = format!("/{}", name.replace('.', "/"));
    let mut accepted = BTreeSet::new();
    for dump in dumps {
        let path = format!("/config_dump?include_eds&resource={dump}&mask={name}{states}");
        let page = admin.page(&path).await?;
        let names = entries(&page, "configs")
            .filter(|entry| states.is_empty() || has_version(entry))
            .filter_map(|entry| entry.pointer(&pointer)?.as_str());
        accepted.extend(names.map(str::to_owned));
    }
    Ok(accepted)
}

/// Returns true if Envoy has accepted a version of the listener or of the endpoints.
fn has_version(entry: &Value) -> bool {
    let listener = entry.get("active_state").or(entry.get("warming_state"));
    listener.or(entry.pointer("/endpoint_config/endpoints")).is_some()
}

/// The names of the resources that Envoy serves with.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct ServingResources {
    /// The dynamic listeners. A warming one counts, because a starting Envoy activates all of them together.
    pub listeners: BTreeSet<String>,
    pub secrets: BTreeSet<String>,
}

impl ServingResources {
    pub async fn read(admin: &Admin) -> Result<Self, Error> {
        let secrets = admin.page(ACTIVE_SECRETS).await?;
        Ok(Self {
            listeners: accepted_names(admin, "envoy.config.listener.v3.Listener").await?,
            secrets: names(&secrets),
        })
    }
}

/// Checks that an Envoy can take over: fails unless the Envoy of this restart epoch has started, has the listeners and
/// secrets of its parent, and waits for no resource. Without `parent`, it must have at least one listener.
pub async fn check_takeover(
    admin: &Admin,
    restart_epoch: u32,
    parent: Option<&ServingResources>,
) -> Result<(), BoxError> {
    let info = admin.page("/server_info").await?;
    // The parent responds until this Envoy has taken the admin port over.
    if info["command_line_options"]["restart_epoch"].as_u64() != Some(restart_epoch.into()) {
        return Err("Envoy has not started".into());
    }
    let warming = listeners(&admin.page(WARMING_LISTENERS).await?);
    if !warming.is_empty() {
        return Err(Vec::from_iter(warming).join("; ").into());
    }
    let found = ServingResources::read(admin).await?;
    match parent {
        Some(parent) => {
            check_names("secrets", &parent.secrets, &found.secrets)?;
            check_names("listeners", &parent.listeners, &found.listeners)
        }
        None if found.listeners.is_empty() => Err("it has no listeners".into()),
        None => Ok(()),
    }
}

fn check_names(
    kind: &str,
    wanted: &BTreeSet<String>,
    found: &BTreeSet<String>,
) -> Result<(), BoxError> {
    let missing: Vec<_> = wanted.difference(found).map(String::as_str).collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(format!("it lacks {kind} {}", missing.join(", ")).into())
}

/// The calls that Envoy has refused since its start.
#[derive(Debug, Default)]
pub struct Refusals {
    pub problems: Vec<Problem>,
    /// False if Envoy does not count some of them.
    pub are_counted: bool,
}

pub async fn refusals(admin: &Admin) -> Refusals {
    read_refusals(&admin.text(REFUSALS).await.unwrap_or_default())
}

fn read_refusals(page: &str) -> Refusals {
    let lines = page.lines().filter_map(|line| line.rsplit_once(": "));
    let counts: BTreeMap<&str, u64> =
        lines.filter_map(|(name, count)| Some((name, count.parse().ok()?))).collect();
    let problems = counts.iter().filter(|(_, count)| **count > 0).filter_map(|(name, count)| {
        let is_of_cluster = name.starts_with("cluster.");
        let code = match name.rsplit('.').next()? {
            "no_filter_chain_match" => Code::InboundNotMatched,
            "fail_verify_san" if is_of_cluster => Code::PeerCertificateRefused,
            // Other causes of a failed handshake are examined with the endpoint.
            "connection_error" if !is_of_cluster => {
                let handshakes = name.replace("connection_error", "handshake");
                let good = counts.get(&*handshakes).copied().unwrap_or_default();
                if *count < MANY_HANDSHAKES || *count <= good {
                    return None;
                }
                Code::HandshakesFailed
            }
            "upstream_rq_pending_overflow" => Code::CircuitBreakerOpen,
            last if last.ends_with("denied") => Code::RbacDenied,
            _ => return None,
        };
        Some(Problem::new(code, name, format!("{}: {count} since Envoy's start", code.cause())))
    });
    let are_counted = ["listener.", "cluster."]
        .iter()
        .all(|kind| counts.keys().any(|name| name.starts_with(kind)));
    Refusals { problems: problems.collect(), are_counted }
}

/// Returns the ports at which Envoy refuses plain text. None without a listener of captured inbound traffic.
pub async fn strict_ports(admin: &Admin) -> Option<String> {
    read_strict_ports(&admin.page(INBOUND_LISTENER).await.ok()?)
}

fn read_strict_ports(dump: &Value) -> Option<String> {
    let listener = entries(dump, "configs").next()?.pointer("/active_state/listener")?;
    // The key is the port; the chains without one are for all other ports.
    let mut plain = BTreeMap::new();
    for chain in entries(listener, "filter_chains").map(|chain| &chain["filter_chain_match"]) {
        let accepts_plain = chain["transport_protocol"] != "tls";
        *plain.entry(chain["destination_port"].as_u64()).or_insert(false) |= accepts_plain;
    }
    plain.remove(&Some(INBOUND_PORT));
    let strict: Vec<_> = plain
        .iter()
        .filter(|(_, accepts_plain)| !**accepts_plain)
        .map(|(port, _)| port.map_or("all others".to_owned(), |port| port.to_string()))
        .collect();
    Some(match &*strict {
        [] => "plain text is accepted at each port".to_owned(),
        ports => format!("plain text is refused (STRICT) at ports: {}", ports.join(", ")),
    })
}

/// The endpoints of Envoy's clusters, as far as they have a problem.
#[derive(Debug, Default, PartialEq)]
pub struct Endpoints {
    /// Endpoints for which connections or requests have failed, at most [`MAX_FAILING`].
    pub failing: Vec<FailingEndpoint>,
    /// The services without a healthy endpoint among those whose endpoints istiod sends.
    pub without_healthy: BTreeSet<String>,
    /// The clusters of the bootstrap whose host has no address.
    pub unresolved: BTreeSet<String>,
}

/// An endpoint to which connections of Envoy have failed, or most requests. The counters never decrease.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FailingEndpoint {
    pub cluster: String,
    pub address: String,
    pub failed_connections: u64,
    pub failed_requests: u64,
    /// The part of the failed requests that had no answer in time.
    pub late_requests: u64,
    pub successful_requests: u64,
}

pub async fn endpoints(admin: &Admin) -> Result<Endpoints, Problem> {
    let mut page = ClusterPage::default();
    match admin.read_lines("/clusters", |line| page.read(line)).await {
        Ok(()) => Ok(page.end()),
        Err(error) => {
            Err(Problem::new(Code::EnvoyNotInspected, "endpoints of Envoy's clusters", error))
        }
    }
}

/// A reader of `/clusters`. All lines of a cluster, and of an endpoint, follow each other.
#[derive(Debug, Default)]
struct ClusterPage {
    found: Endpoints,
    cluster: String,
    /// True if the cluster has endpoints or gets them by EDS.
    has_endpoints: bool,
    is_healthy: bool,
    endpoint: FailingEndpoint,
}

impl ClusterPage {
    /// Reads a line such as `cluster::address::cx_connect_fail::1`.
    fn read(&mut self, line: &str) {
        let (rest, value) = line.rsplit_once("::").unwrap_or_default();
        let (endpoint, name) = rest.rsplit_once("::").unwrap_or_default();
        let (cluster, address) = endpoint.split_once("::").unwrap_or((endpoint, ""));
        if self.cluster != cluster {
            self.end_cluster();
            cluster.clone_into(&mut self.cluster);
        }
        if self.endpoint.address != address {
            self.end_endpoint();
            address.clone_into(&mut self.endpoint.address);
        }
        let count = value.parse().unwrap_or_default();
        match name {
            "cx_connect_fail" => self.endpoint.failed_connections = count,
            "rq_error" => self.endpoint.failed_requests = count,
            "rq_timeout" => self.endpoint.late_requests = count,
            "rq_success" => self.endpoint.successful_requests = count,
            "health_flags" => {
                self.has_endpoints = true;
                self.is_healthy |= !value.contains("failed");
            }
            "eds_service_name" => self.has_endpoints = true,
            _ => {}
        }
    }

    fn end_endpoint(&mut self) {
        let endpoint = std::mem::take(&mut self.endpoint);
        if endpoint.fails() && self.found.failing.len() < MAX_FAILING {
            self.found.failing.push(FailingEndpoint { cluster: self.cluster.clone(), ..endpoint });
        }
    }

    fn end_cluster(&mut self) {
        self.end_endpoint();
        if self.cluster.starts_with("outbound|") && self.has_endpoints && !self.is_healthy {
            let host = self.cluster.rsplit('|').next().unwrap_or_default();
            self.found.without_healthy.insert(host.to_owned());
        }
        if COLLECTORS.contains(&&*self.cluster) && !self.has_endpoints {
            self.found.unresolved.insert(self.cluster.clone());
        }
        (self.has_endpoints, self.is_healthy) = (false, false);
    }

    fn end(mut self) -> Endpoints {
        self.end_cluster();
        self.found
    }
}

impl FailingEndpoint {
    fn fails(&self) -> bool {
        self.address.parse::<SocketAddr>().is_ok()
            && (self.failed_connections > 0 || self.requests_fail())
    }

    /// Returns true if most requests have failed although there was a connection. Envoy does not count requests that
    /// their clients gave up.
    pub fn requests_fail(&self) -> bool {
        self.failed_requests > self.successful_requests.saturating_add(self.failed_connections)
    }
}

/// Reads the configuration of these clusters and of their endpoints.
pub async fn clusters(admin: &Admin, names: &BTreeSet<&str>) -> Result<[Value; 2], Error> {
    let names: Vec<_> = names.iter().map(|name| pattern(name)).collect();
    let filter = format!("name_regex=%5E({})%24", names.join("%7C"));
    let clusters = format!("/config_dump?resource=dynamic_active_clusters&{filter}");
    let endpoints = format!("/config_dump?include_eds&resource=dynamic_endpoint_configs&{filter}");
    let (clusters, endpoints) = tokio::join!(admin.page(&clusters), admin.page(&endpoints));
    Ok([clusters?, endpoints?])
}

/// Returns the regular expression that matches this text only, escaped for a query.
fn pattern(text: &str) -> String {
    let bytes = text.bytes().map(|byte| match byte {
        byte if byte.is_ascii_alphanumeric() => char::from(byte).to_string(),
        byte if byte.is_ascii() => format!("%5C%{byte:02X}"),
        byte => format!("%{byte:02X}"),
    });
    bytes.collect()
}

/// Describes each waiting listener, except [`GATE`], with the resources that it waits for.
fn listeners(dump: &Value) -> BTreeSet<String> {
    entries(dump, "unready_targets_dumps")
        .filter_map(|manager| {
            let targets: Vec<_> = entries(manager, "target_names").map(text).collect();
            let name = listener(text(&manager["name"]));
            // A listener without targets only waits for the other listeners.
            if targets.is_empty() || name == GATE {
                return None;
            }
            Some(format!("{name} waits for {}", targets.join(", ")))
        })
        .collect()
}

/// Returns the listener of `init manager Listener-local-init-manager <listener> <hash>`.
fn listener(manager: &str) -> &str {
    manager
        .strip_prefix("init manager Listener-local-init-manager ")
        .and_then(|suffix| suffix.rsplit_once(' '))
        .map_or(manager, |(listener, _)| listener)
}

fn names(dump: &Value) -> BTreeSet<String> {
    let names =
        entries(dump, "configs").filter_map(|it| it.pointer("/cluster/name").or(it.get("name")));
    names.map(|name| text(name).to_owned()).collect()
}

pub(crate) fn entries<'v>(value: &'v Value, name: &str) -> impl Iterator<Item = &'v Value> {
    value[name].as_array().into_iter().flatten()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or("unknown")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_listener_is_named_with_the_resources_it_waits_for() {
        let dump = json!({ "unready_targets_dumps": [
            {
                "name": "init manager Listener-local-init-manager 0.0.0.0_8443 11964082629421921887",
                "target_names": [
                    "shared target SdsApi kubernetes://shop-tls",
                    "shared target RdsRouteConfigSubscription RDS init https.443",
                    "target FilterConfigSubscription init auth",
                    "target VHDS",
                ],
            },
            { "name": "another manager", "target_names": ["target x"] },
            {
                "name": format!("init manager Listener-local-init-manager {GATE} 1"),
                "target_names": ["target x"],
            },
            { "name": "init manager Listener-local-init-manager static 1" },
        ]});
        let expected = [
            "0.0.0.0_8443 waits for shared target SdsApi kubernetes://shop-tls, shared target RdsRouteConfigSubscription RDS init https.443, target FilterConfigSubscription init auth, target VHDS",
            "another manager waits for target x",
        ];
        assert_eq!(Vec::from_iter(listeners(&dump)), expected);
        for foreign in [json!(null), json!([]), json!({ "unready_targets_dumps": [7, "x"] })] {
            listeners(&foreign);
        }
    }

    #[test]
    fn failing_endpoints_and_services_without_a_healthy_one_are_read() {
        let page = "outbound|80||a.b::observability_name::outbound|80||a.b\n\
                    outbound|80||a.b::default_priority::max_connections::1024\n\
                    outbound|80||a.b::eds_service_name::outbound|80||a.b\n\
                    outbound|80||a.b::[fd00::1]:8080::cx_connect_fail::2\n\
                    outbound|80||a.b::[fd00::1]:8080::health_flags::healthy\n\
                    outbound|80||a.b::10.0.0.1:8080::cx_connect_fail::0\n\
                    outbound|80||a.b::10.0.0.1:8080::rq_error::3\n\
                    outbound|80||a.b::10.0.0.1:8080::rq_success::2\n\
                    outbound|80||a.b::10.0.0.1:8080::rq_timeout::1\n\
                    outbound|80||a.b::10.0.0.1:8080::health_flags::/failed_outlier_check\n\
                    outbound|80||a.b::10.0.0.2:8080::rq_error::3\n\
                    outbound|80||a.b::10.0.0.2:8080::rq_success::3\n\
                    outbound|80||c.b::eds_service_name::outbound|80||c.b\n\
                    outbound|80||d.b::10.0.0.1:8080::rq_error::0\n\
                    outbound|80||d.b::10.0.0.1:8080::health_flags::/failed_eds_health\n\
                    inbound|80||::eds_service_name::x\n\
                    zipkin::observability_name::zipkin\n\
                    datadog_agent::10.0.0.1:8126::health_flags::healthy\n\
                    xds-grpc::./etc/istio/proxy/XDS::cx_connect_fail::1\nx\n::\n";
        let failing = |address: &str| FailingEndpoint {
            cluster: "outbound|80||a.b".to_owned(),
            address: address.to_owned(),
            ..FailingEndpoint::default()
        };
        let expected = Endpoints {
            failing: vec![
                FailingEndpoint { failed_connections: 2, ..failing("[fd00::1]:8080") },
                FailingEndpoint {
                    failed_requests: 3,
                    late_requests: 1,
                    successful_requests: 2,
                    ..failing("10.0.0.1:8080")
                },
            ],
            without_healthy: ["c.b", "d.b"].map(str::to_owned).into(),
            unresolved: ["zipkin".to_owned()].into(),
        };
        let read = |text: &str| {
            let mut page = ClusterPage::default();
            text.lines().for_each(|line| page.read(line));
            page.end()
        };
        assert_eq!(read(page), expected);
        let many: String =
            (1..100).map(|port| format!("a::127.0.0.1:{port}::cx_connect_fail::1\n")).collect();
        assert_eq!(read(&many).failing.len(), MAX_FAILING);
    }

    #[test]
    fn most_of_ten_handshakes_must_fail_to_be_a_problem() {
        for (failed, good, expected) in
            [(9, 0, 0), (10, 9, 1), (10, 10, 0), (10, 11, 0), (20, 11, 1)]
        {
            let page = format!(
                "listener.0.0.0.0_15006.ssl.connection_error: {failed}\n\
                 listener.0.0.0.0_15006.ssl.handshake: {good}\n"
            );
            let found = read_refusals(&page);
            assert_eq!((found.problems.len(), found.are_counted), (expected, false), "{page}");
        }
        let page = "cluster.outbound|80||a.b;.upstream_rq_pending_overflow: 3\n\
                    cluster.outbound|80||a.b;.ssl.fail_verify_san: 1\n\
                    cluster.outbound|80||a.b;.ssl.connection_error: 70\n\
                    listener.a.no_filter_chain_match: 1\nhttp.a.rbac.denied: 2\nx: y\n";
        let found = read_refusals(page);
        let names: Vec<_> = found.problems.iter().map(|problem| problem.code.name()).collect();
        let expected = [
            "PEER_CERTIFICATE_REFUSED",
            "CIRCUIT_BREAKER_OPEN",
            "RBAC_DENIED",
            "INBOUND_NOT_MATCHED",
        ];
        assert_eq!((&*names, found.are_counted), (&expected[..], true));
    }

    #[test]
    fn the_mode_of_each_port_follows_from_its_filter_chains() {
        let chain = |port: Option<u16>, protocol: Option<&str>| json!({ "filter_chain_match": { "destination_port": port, "transport_protocol": protocol } });
        let (tls, plain) = (Some("tls"), Some("raw_buffer"));
        for (chains, expected) in [
            (
                vec![chain(Some(15006), None), chain(None, tls), chain(None, plain)],
                "accepted at each",
            ),
            (
                vec![
                    chain(None, tls),
                    chain(Some(8080), tls),
                    chain(Some(9090), tls),
                    chain(Some(9090), None),
                ],
                "refused (STRICT) at ports: all others, 8080",
            ),
        ] {
            let listener = json!({ "filter_chains": chains });
            let dump = json!({ "configs": [{ "active_state": { "listener": listener } }] });
            let found = read_strict_ports(&dump).expect("a listener");
            assert!(found.contains(expected), "{found}");
        }
        assert_eq!(read_strict_ports(&json!({ "configs": [{}] })), None);
    }

    #[test]
    fn a_pattern_matches_the_characters_of_a_name_literally() {
        assert_eq!(pattern("a|8.é"), "a%5C%7C8%5C%2E%C3%A9");
    }
}
