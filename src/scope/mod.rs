//! Finds which of the services that Envoy was sent its workload uses: services whose endpoints had connections, and
//! services whose names the application has looked up.
//!
//! A service costs Envoy memory whether it is used or not; a `Sidecar` resource leaves it out.
//! [`observe`] queries Envoy's admin port, [`advice`] writes the resource. Neither changes Envoy or the mesh.

pub mod advice;
mod envoy;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bootstrap::node::Node;
use crate::dns::Dns;
use crate::envoy::handle::Envoy;
use crate::runtime::clock;
use crate::runtime::lifecycle::BoxError;
use crate::xds::observe::Observer;
use envoy::{Admin, Outbound};

/// The limit of all Envoy's responses together.
pub const LIMIT: Duration = Duration::from_secs(3);

/// The clusters of traffic that belongs to no service; the second one in a `REGISTRY_ONLY` mesh, which blocks it.
const PASSTHROUGH: &str = "PassthroughCluster";
const BLACK_HOLE: &str = "BlackHoleCluster";

/// The types of the resources that each cluster has.
const TYPES: [&str; 2] = [
    "type.googleapis.com/envoy.config.cluster.v3.Cluster",
    "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
];

/// Labels that controllers set, and domains of such labels. They differ between pods of one workload, or do not
/// describe it.
const GENERATED: [&str; 5] = [
    "controller-revision-hash",
    "controller-uid",
    "job-name",
    "pod-template-generation",
    "pod-template-hash",
];
const GENERATED_DOMAINS: [&str; 4] =
    [".istio.io", ".apps.kubernetes.io", ".batch.kubernetes.io", ".statefulset.kubernetes.io"];

/// The services that one pod has used, or several pods of one workload.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    pub namespace: String,
    pub workload: String,
    /// The labels that all pods have, without generated ones.
    pub labels: BTreeMap<String, String>,
    pub pods: Vec<Pod>,
    /// The services that Envoy was sent, sorted.
    pub services: Vec<Service>,
    /// Bytes of discovery responses for one cluster and its endpoints.
    pub bytes_per_cluster: u64,
    pub envoy_bytes: u64,
}

/// A pod, and how well the services it uses are known.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pod {
    pub name: String,
    /// The time since its Envoy's start.
    pub observed_seconds: u64,
    /// Connections and requests to no service, by cluster. The black hole has some only if Istio's metrics are on.
    pub passthrough: u64,
    pub black_hole: u64,
    /// True if connections to no service are blocked.
    pub is_registry_only: bool,
    /// True if the agent answers the pod's DNS, and so knows the names it has looked up.
    pub has_dns: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Service {
    pub namespace: String,
    pub host: String,
    /// The number of its ports and subsets.
    pub clusters: u64,
    /// Connections and requests of its present endpoints.
    pub connections: u64,
    pub requests: u64,
    /// True if the application has looked up its name.
    pub is_asked: bool,
}

impl Service {
    pub fn is_used(&self) -> bool {
        self.connections > 0 || self.requests > 0
    }

    /// Formats the service as in `egress.hosts`.
    pub fn egress_host(&self) -> String {
        format!("{}/{}", self.namespace, self.host)
    }
}

/// The parts of the agent that know which services are used.
#[derive(Clone, Debug)]
pub struct Sources {
    pub node: Node,
    pub envoy: Option<Envoy>,
    pub dns: Option<Dns>,
    pub discovery: Observer,
}

/// Finds the services that this pod uses, within [`LIMIT`].
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
    let admin = Admin { address: envoy.admin().address, until: clock::after(LIMIT) };
    let clusters = admin.counters().await?.into_iter();
    let by_cluster: HashMap<_, _> =
        clusters.map(|it| (it.cluster, (it.connections, it.requests))).collect();
    let counted = |cluster: &str| by_cluster.get(cluster).copied().unwrap_or_default();
    let asked = sources.dns.as_ref().map(Dns::queried_hosts);
    let services = services(&admin.outbound().await?, counted, asked.iter().flatten());
    let [passthrough, black_hole] = admin.unknown_service_counts().await?;
    let text = |name: &str| node.metadata.get(name).and_then(Value::as_str).unwrap_or_default();
    let observed = SystemTime::now().duration_since(started);
    let pod = Pod {
        name: text("NAME").to_owned(),
        observed_seconds: observed.unwrap_or_default().as_secs(),
        passthrough: highest(counted(PASSTHROUGH), passthrough),
        black_hole: highest(counted(BLACK_HOLE), black_hole),
        is_registry_only: admin.is_registry_only().await?,
        has_dns: asked.is_some(),
    };
    Ok(Usage {
        namespace: text("NAMESPACE").to_owned(),
        workload: text("WORKLOAD_NAME").to_owned(),
        labels: labels(node.metadata.get("LABELS")),
        pods: vec![pod],
        services,
        bytes_per_cluster: bytes_per_cluster(&sources.discovery),
        envoy_bytes: admin.memory().await?,
    })
}

fn highest((connections, requests): (u64, u64), metric: u64) -> u64 {
    metric.max(connections).max(requests)
}

/// Sums up the counters of each service's clusters, and marks services whose names were looked up. A host may be in
/// several namespaces. A pod of a headless service has a name below the service's, and marks the service.
fn services<'a>(
    clusters: &[Outbound],
    counters: impl Fn(&str) -> (u64, u64),
    asked: impl Iterator<Item = &'a String>,
) -> Vec<Service> {
    let asked: HashSet<_> = asked
        .flat_map(|host| [host.as_str(), host.split_once('.').map_or("", |(_, service)| service)])
        .collect();
    let mut services = BTreeMap::new();
    for cluster in clusters {
        let (connections, requests) = counters(&cluster.cluster);
        for (namespace, host) in &cluster.services {
            let service = services.entry((namespace, host)).or_insert_with(|| Service {
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
    let parsed = labels.map(BTreeMap::<String, String>::deserialize);
    let mut labels = parsed.and_then(Result::ok).unwrap_or_default();
    labels.retain(|name, _| {
        let domain = format!(".{}", name.split_once('/').map_or("", |(prefix, _)| prefix));
        !GENERATED.contains(&name.as_str())
            && !GENERATED_DOMAINS.iter().any(|it| domain.ends_with(it))
    });
    labels
}

/// Estimates the bytes by the last response of each type, which may have only some of its resources.
fn bytes_per_cluster(discovery: &Observer) -> u64 {
    let types = discovery.snapshot().types;
    let last = TYPES.iter().filter_map(|url| types.get(*url)?.last_response.as_ref());
    last.filter_map(|last| last.bytes.checked_div(last.resources.into())).sum()
}
