//! Inspects Envoy through its admin port: resources that it waits for, calls that it refuses, and endpoints that it
//! does not reach.
//!
//! The doctor, the readiness check, the stored configuration and a handover call one function each. A full
//! configuration dump may have 100 MB, so only names are requested.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use futures_util::future::join_all;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::admin::Admin;
use crate::problem::{Code, Problem, codes};

/// The pause before a finding is confirmed, because every update warms for a moment.
const PAUSE: Duration = Duration::from_millis(300);
/// The limit of a connection attempt. It leaves time for other checks within the doctor's limit.
const DIAL_LIMIT: Duration = Duration::from_millis(700);
const MAX_DIALS: usize = 16;

const WARMING_LISTENERS: &str = "/init_dump?mask=listener";
const WARMING_CLUSTERS: &str = "/config_dump?resource=dynamic_warming_clusters&mask=cluster.name";
const ACTIVE_SECRETS: &str = "/config_dump?resource=dynamic_active_secrets&mask=name";
const WARMING_SECRETS: &str = "/config_dump?resource=dynamic_warming_secrets&mask=name";
/// `^(listener|http)\..*(no_filter_chain_match|ssl\.(connection_error|fail_verify.*)|rbac\..*denied)$`
const REFUSALS: &str = "/stats?filter=%5E(listener%7Chttp)%5C..*(no_filter_chain_match%7C\
    ssl%5C.(connection_error%7Cfail_verify.*)%7Crbac%5C..*denied)%24";
/// The advice for an Envoy without the statistics of [`refusals`].
pub const STATISTICS_HINT: &str = "Envoy does not count them; it does with the annotation \
    `sidecar.istio.io/statsInclusionRegexps: listener.*(no_filter_chain_match|ssl.*),http.*rbac.*denied`";

/// Lists the resources that Envoy waits for. A page that cannot be read is a problem with another code.
pub async fn warming(admin: &Admin) -> Vec<Problem> {
    let problems = join_all([
        warming_in(admin, codes::LISTENER_WARMING, WARMING_LISTENERS, listeners),
        warming_in(admin, codes::CLUSTER_WARMING, WARMING_CLUSTERS, names),
        warming_in(admin, codes::SECRET_AWAITED, WARMING_SECRETS, names),
    ]);
    problems.await.into_iter().flatten().collect()
}

/// Returns the problem of the resources that a page lists twice.
async fn warming_in(
    admin: &Admin,
    code: &'static Code,
    path: &str,
    names: fn(&Value) -> BTreeSet<String>,
) -> Option<Problem> {
    let read = async || admin.page(path).await.map(|page| names(&page));
    let confirmed = async {
        let first = read().await?;
        if first.is_empty() {
            return Ok(first);
        }
        tokio::time::sleep(PAUSE).await;
        Ok(&first & &read().await?)
    };
    let (code, found) = match timeout(admin.limit, confirmed).await {
        Ok(Ok(names)) if names.is_empty() => return None,
        Ok(Ok(names)) => (code, Vec::from_iter(names).join("; ")),
        Ok(Err(reason)) => (codes::ENVOY_NOT_INSPECTED, reason),
        Err(_) => (codes::ENVOY_NOT_INSPECTED, "no answer in time".to_owned()),
    };
    Some(Problem::new(code, code.cause, found))
}

/// Returns the names of the resources of a type of which Envoy has accepted a version, active or warming.
pub(crate) async fn accepted_names(
    admin: &Admin,
    type_url: &str,
) -> Result<BTreeSet<String>, String> {
    // Listeners and endpoints of which Envoy has refused every version are listed without the members `states`.
    let (dumps, name, states): (&[_], _, _) = match type_url.rsplit('.').next() {
        Some("Cluster") => {
            let dumps = &["dynamic_active_clusters", "dynamic_warming_clusters"];
            (dumps, "cluster.name", "")
        }
        Some("ClusterLoadAssignment") => {
            let states = ",endpoint_config.endpoints";
            let name = "endpoint_config.cluster_name";
            (&["dynamic_endpoint_configs"], name, states)
        }
        Some("Listener") => {
            let states = ",active_state.version_info,warming_state.version_info";
            (&["dynamic_listeners"], "name", states)
        }
        Some("RouteConfiguration") => (&["dynamic_route_configs"], "route_config.name", ""),
        Some("TypedExtensionConfig") => (&["ecds_filters"], "ecds_filter.name", ""),
        _ => return Err(format!("{type_url} is not in a configuration dump")),
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
    let endpoints = entry.pointer("/endpoint_config/endpoints");
    listener.or(endpoints).is_some()
}

/// The names of the resources that Envoy serves with.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct ServingResources {
    /// The dynamic listeners. A warming one counts, because a starting Envoy activates all of them together.
    pub listeners: BTreeSet<String>,
    pub secrets: BTreeSet<String>,
}

impl ServingResources {
    pub async fn read(admin: &Admin) -> Result<Self, String> {
        let secrets = admin.page(ACTIVE_SECRETS).await?;
        Ok(Self {
            listeners: accepted_names(admin, "envoy.config.listener.v3.Listener").await?,
            secrets: names(&secrets),
        })
    }
}

/// Checks that an Envoy can take over: fails unless the Envoy of this restart epoch has started, has the listeners and
/// secrets of its parent, and waits for no resource. Only listeners whose names begin with `ignored_listener` may wait.
/// Without `parent`, it must have at least one listener.
pub async fn check_takeover(
    admin: &Admin,
    restart_epoch: u32,
    parent: Option<&ServingResources>,
    ignored_listener: &str,
) -> Result<(), String> {
    let info = admin.page("/server_info").await?;
    // The parent responds until this Envoy has taken the admin port over.
    if info["command_line_options"]["restart_epoch"].as_u64() != Some(restart_epoch.into()) {
        return Err("Envoy has not started".to_owned());
    }
    let mut warming = listeners(&admin.page(WARMING_LISTENERS).await?);
    warming.retain(|listener| !listener.starts_with(ignored_listener));
    if !warming.is_empty() {
        return Err(Vec::from_iter(warming).join("; "));
    }
    let found = ServingResources::read(admin).await?;
    match parent {
        Some(parent) => {
            check_names("secrets", &parent.secrets, &found.secrets)?;
            check_names("listeners", &parent.listeners, &found.listeners)
        }
        None if found.listeners.is_empty() => Err("it has no listeners".to_owned()),
        None => Ok(()),
    }
}

/// Fails if a wanted name has not been found. `kind` is used in the error.
fn check_names(
    kind: &str,
    wanted: &BTreeSet<String>,
    found: &BTreeSet<String>,
) -> Result<(), String> {
    let missing: Vec<_> = wanted.difference(found).map(String::as_str).collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(format!("it lacks {kind} {}", missing.join(", ")))
}

/// Lists the calls to the pod that Envoy has refused since its start. Returns None if Envoy does not count them.
pub async fn refusals(admin: &Admin) -> Option<Vec<Problem>> {
    let page = admin.text(REFUSALS).await.ok()?;
    let counts = page.lines().filter_map(|line| line.rsplit_once(": "));
    let refused = counts.clone().filter(|(_, count)| *count != "0");
    let problems = refused.map(|(name, count)| {
        let code = match name {
            _ if name.contains("filter_chain") => codes::INBOUND_NOT_MATCHED,
            _ if name.contains(".ssl.") => codes::HANDSHAKES_FAILED,
            _ => codes::RBAC_DENIED,
        };
        let found = format!("{}: {count} since Envoy's start", code.cause);
        Problem::new(code, name, found)
    });
    (counts.count() > 0).then(|| problems.collect())
}

/// Lists endpoints that neither Envoy nor the agent can connect to, and services without healthy ones. The agent
/// dials because Envoy's count of failures never decreases.
pub async fn endpoints(admin: &Admin) -> Vec<Problem> {
    let page = match admin.text("/clusters").await {
        Ok(page) => page,
        Err(reason) => {
            let (code, subject) = (codes::ENVOY_NOT_INSPECTED, "endpoints of Envoy's clusters");
            return vec![Problem::new(code, subject, reason)];
        }
    };
    let (failed, services) = read_clusters(&page);
    let dials = join_all(failed.into_iter().take(MAX_DIALS).map(dial)).await;
    let mut problems: Vec<_> = dials.into_iter().flatten().collect();
    if !services.is_empty() {
        let subject = "services without a healthy endpoint";
        let names = Vec::from_iter(services).join(", ");
        problems.push(Problem::new(codes::NO_HEALTHY_ENDPOINT, subject, names));
    }
    problems
}

/// An endpoint to which connections of Envoy have failed.
#[derive(Debug, PartialEq)]
struct FailedEndpoint<'a> {
    cluster: &'a str,
    address: SocketAddr,
    /// The number of failed connections.
    count: &'a str,
}

/// Reads lines such as `cluster::address::cx_connect_fail::1`. Also returns the services without a healthy
/// endpoint among those whose endpoints istiod sends.
fn read_clusters(page: &str) -> (Vec<FailedEndpoint<'_>>, BTreeSet<&str>) {
    let (mut failed, mut all, mut healthy) = (Vec::new(), BTreeSet::new(), BTreeSet::new());
    for line in page.lines() {
        let (rest, value) = line.rsplit_once("::").unwrap_or_default();
        let (endpoint, name) = rest.rsplit_once("::").unwrap_or_default();
        let (cluster, address) = endpoint.split_once("::").unwrap_or((endpoint, ""));
        match (name, address.parse()) {
            ("cx_connect_fail", Ok(address)) if value != "0" => {
                failed.push(FailedEndpoint { cluster, address, count: value });
            }
            ("health_flags", _) if !value.contains("failed") => _ = healthy.insert(cluster),
            ("health_flags" | "eds_service_name", _) => _ = all.insert(cluster),
            _ => {}
        }
    }
    all.retain(|name| name.starts_with("outbound|") && !healthy.contains(name));
    let hosts = all.iter().filter_map(|name| name.rsplit('|').next());
    (failed, hosts.collect())
}

/// Returns the problem of an endpoint that cannot be connected to.
async fn dial(endpoint: FailedEndpoint<'_>) -> Option<Problem> {
    let FailedEndpoint { cluster, address, count } = endpoint;
    let reason = match timeout(DIAL_LIMIT, TcpStream::connect(address)).await {
        Ok(Ok(_)) => return None,
        Ok(Err(error)) => error.to_string(),
        Err(_) => "no answer".to_owned(),
    };
    let code = if cluster.starts_with("inbound|") {
        codes::APPLICATION_PORT_CLOSED
    } else {
        codes::UPSTREAM_UNREACHABLE
    };
    let found = format!("{address}: {reason}; failed connections of Envoy: {count}");
    Some(Problem::new(code, cluster, found))
}

/// Describes each waiting listener with the resources that it waits for.
fn listeners(dump: &Value) -> BTreeSet<String> {
    let managers = entries(dump, "unready_targets_dumps").filter_map(|manager| {
        let targets: Vec<_> = entries(manager, "target_names").map(text).collect();
        let name = listener(text(&manager["name"]));
        // A listener without targets only waits for the other listeners.
        (!targets.is_empty()).then(|| format!("{name} waits for {}", targets.join(", ")))
    });
    managers.collect()
}

/// Returns the listener of `init manager Listener-local-init-manager <listener> <hash>`.
fn listener(manager: &str) -> &str {
    manager
        .strip_prefix("init manager Listener-local-init-manager ")
        .and_then(|suffix| suffix.rsplit_once(' '))
        .map_or(manager, |(listener, _)| listener)
}

/// Returns the names of clusters or secrets.
fn names(dump: &Value) -> BTreeSet<String> {
    let configs = entries(dump, "configs");
    let names = configs.filter_map(|it| it.pointer("/cluster/name").or(it.get("name")));
    names.map(|name| text(name).to_owned()).collect()
}

fn entries<'v>(value: &'v Value, name: &str) -> impl Iterator<Item = &'v Value> {
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
    fn failed_endpoints_and_services_without_a_healthy_one_are_read_in_both_families() {
        let page = "outbound|80||a.b::observability_name::outbound|80||a.b\n\
                    outbound|80||a.b::default_priority::max_connections::1024\n\
                    outbound|80||a.b::eds_service_name::outbound|80||a.b\n\
                    outbound|80||a.b::[fd00::1]:8080::cx_connect_fail::2\n\
                    outbound|80||a.b::[fd00::1]:8080::health_flags::healthy\n\
                    outbound|80||a.b::10.0.0.1:8080::cx_connect_fail::0\n\
                    outbound|80||a.b::10.0.0.1:8080::health_flags::/failed_outlier_check\n\
                    outbound|80||c.b::eds_service_name::outbound|80||c.b\n\
                    outbound|80||d.b::10.0.0.1:8080::health_flags::/failed_eds_health\n\
                    inbound|80||::eds_service_name::x\n\
                    xds-grpc::./etc/istio/proxy/XDS::cx_connect_fail::1\nx\n::\n";
        let (failed, services) = read_clusters(page);
        let address = "[fd00::1]:8080".parse().expect("an address");
        let expected = FailedEndpoint { cluster: "outbound|80||a.b", address, count: "2" };
        assert_eq!(failed, [expected]);
        let services = Vec::from_iter(services);
        assert_eq!(services, ["c.b", "d.b"]);
    }
}
