//! What a workload uses of the services its Envoy was sent: those whose endpoints had connections, and
//! those whose names the application asked DNS for.
//!
//! A service costs Envoy memory whether it is used or not; a `Sidecar` resource leaves it out.
//! [`observe`] asks Envoy's admin port, [`advice`] makes the resource. Neither changes anything.

pub mod advice;
mod envoy;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bootstrap::node::Node;
use crate::clock;
use crate::dns::Dns;
use crate::envoy::handle::Envoy;
use crate::lifecycle::BoxError;
use crate::xds::observe::Observer;
use envoy::{Admin, Outbound};

/// How long all answers of Envoy may take.
pub const LIMIT: Duration = Duration::from_secs(3);

/// Where Envoy sends what belongs to no service, and where that ends in a `REGISTRY_ONLY` mesh.
const PASSTHROUGH: &str = "PassthroughCluster";
const BLACK_HOLE: &str = "BlackHoleCluster";

/// The types of configuration that belong to one cluster.
const TYPES: [&str; 2] = [
    "type.googleapis.com/envoy.config.cluster.v3.Cluster",
    "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
];

/// Labels that controllers set, which differ between pods of one workload or say nothing of it: names, and
/// domains of names.
const GENERATED: [&str; 5] = [
    "controller-revision-hash",
    "controller-uid",
    "job-name",
    "pod-template-generation",
    "pod-template-hash",
];
const GENERATED_DOMAINS: [&str; 4] = [
    ".istio.io",
    ".apps.kubernetes.io",
    ".batch.kubernetes.io",
    ".statefulset.kubernetes.io",
];

/// What one pod used, or several of one workload.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    pub namespace: String,
    pub workload: String,
    /// Those of all pods, without generated ones.
    pub labels: BTreeMap<String, String>,
    pub pods: Vec<Pod>,
    /// Those that Envoy was sent, sorted.
    pub services: Vec<Service>,
    /// Bytes of discovery responses for one cluster and its endpoints.
    pub bytes_per_cluster: u64,
    /// What Envoy has allocated.
    pub envoy_bytes: u64,
}

/// How far one pod's use is known.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pod {
    pub name: String,
    /// Since its Envoy's start.
    pub observed_seconds: u64,
    /// Connections and requests to no service; of the black hole only where Istio's metrics are on.
    pub passthrough: u64,
    pub black_hole: u64,
    /// Whether connections to no service are refused.
    pub is_registry_only: bool,
    /// Whether the agent answers its DNS, and so knows the names asked for.
    pub has_dns: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Service {
    pub namespace: String,
    pub host: String,
    /// Its ports and subsets.
    pub clusters: u64,
    /// Of the endpoints there are now.
    pub connections: u64,
    pub requests: u64,
    /// Whether DNS was asked for it.
    pub is_asked: bool,
}

impl Service {
    pub fn is_used(&self) -> bool {
        self.connections > 0 || self.requests > 0
    }

    /// As in `egress.hosts`.
    pub fn egress_host(&self) -> String {
        format!("{}/{}", self.namespace, self.host)
    }
}

/// What the use is read from.
#[derive(Clone, Debug)]
pub struct Sources {
    pub node: Node,
    pub envoy: Option<Envoy>,
    pub dns: Option<Dns>,
    pub discovery: Observer,
}

/// Reads what this pod uses, within [`LIMIT`].
pub async fn observe(sources: &Sources) -> Result<Usage, BoxError> {
    let node = &sources.node;
    let kind = node.id.split('~').next().unwrap_or_default();
    if kind != "sidecar" {
        let why = "gateways and waypoints need other services than they call";
        return Err(format!("found a {kind}, expected a sidecar: {why}").into());
    }
    let no_envoy = "no Envoy runs, expected one whose clusters can be read";
    let envoy = sources.envoy.as_ref().ok_or(no_envoy)?;
    let started = envoy.snapshot().started.ok_or(no_envoy)?;
    let admin = Admin {
        address: envoy.admin().address,
        until: clock::after(LIMIT),
    };
    let counters = admin.counters().await?.into_iter();
    let counters = counters.map(|it| (it.cluster, (it.connections, it.requests)));
    let counters: HashMap<_, _> = counters.collect();
    let counted = |cluster: &str| counters.get(cluster).copied().unwrap_or_default();
    let asked = sources.dns.as_ref().map(Dns::asked);
    let services = services(&admin.outbound().await?, counted, asked.iter().flatten());
    let [passthrough, black_hole] = admin.to_no_service().await?;
    let to = |cluster: &str, metric: u64| metric.max(counted(cluster).0).max(counted(cluster).1);
    let text = |name: &str| node.metadata.get(name).and_then(Value::as_str);
    let text = |name| text(name).unwrap_or_default().to_owned();
    let observed = SystemTime::now().duration_since(started);
    let pod = Pod {
        name: text("NAME"),
        observed_seconds: observed.unwrap_or_default().as_secs(),
        passthrough: to(PASSTHROUGH, passthrough),
        black_hole: to(BLACK_HOLE, black_hole),
        is_registry_only: admin.is_registry_only().await?,
        has_dns: asked.is_some(),
    };
    Ok(Usage {
        namespace: text("NAMESPACE"),
        workload: text("WORKLOAD_NAME"),
        labels: labels(node.metadata.get("LABELS")),
        pods: vec![pod],
        services,
        bytes_per_cluster: bytes_per_cluster(&sources.discovery),
        envoy_bytes: admin.memory().await?,
    })
}

/// The services of clusters, with their counters and whether they are among the hosts asked for. A host may
/// be in several namespaces; a pod of a headless service has a name below the service's.
fn services<'a>(
    clusters: &[Outbound],
    counters: impl Fn(&str) -> (u64, u64),
    asked: impl Iterator<Item = &'a String>,
) -> Vec<Service> {
    let below = |host: &'a String| host.split_once('.').map_or("", |(_, service)| service);
    let asked: HashSet<_> = asked.flat_map(|host| [host, below(host)]).collect();
    let mut services = BTreeMap::new();
    for cluster in clusters {
        let (connections, requests) = counters(&cluster.cluster);
        for (namespace, host) in &cluster.services {
            let service = services
                .entry((namespace, host))
                .or_insert_with(|| Service {
                    namespace: namespace.clone(),
                    host: host.clone(),
                    is_asked: asked.contains(host.as_str()),
                    ..Service::default()
                });
            service.clusters += 1;
            service.connections += connections;
            service.requests += requests;
        }
    }
    services.into_values().collect()
}

fn labels(labels: Option<&Value>) -> BTreeMap<String, String> {
    let labels = labels.map(BTreeMap::<String, String>::deserialize);
    let mut labels = labels.and_then(Result::ok).unwrap_or_default();
    labels.retain(|name, _| {
        let domain = name.split_once('/').map_or("", |(domain, _)| domain);
        let domain = format!(".{domain}");
        !GENERATED.contains(&name.as_str())
            && !GENERATED_DOMAINS.iter().any(|it| domain.ends_with(it))
    });
    labels
}

/// By the last response of each type, which may be of some resources only.
fn bytes_per_cluster(discovery: &Observer) -> u64 {
    let types = discovery.snapshot().types;
    let last = TYPES
        .iter()
        .filter_map(|url| types.get(*url)?.last_response.as_ref());
    last.filter_map(|last| last.bytes.checked_div(last.resources.into()))
        .sum()
}
