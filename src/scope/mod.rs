//! What a workload uses of the services its Envoy was sent: those whose endpoints had connections, and
//! those whose names the application asked DNS for.
//!
//! A service costs Envoy memory whether it is used or not; a `Sidecar` resource leaves it out.
//! [`observe`] asks Envoy's admin port, [`advice`] makes the resource. Neither changes anything.

pub mod advice;
mod envoy;

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bootstrap::node::Node;
use crate::clock;
use crate::dns::{Dns, Names};
use crate::envoy::handle::Envoy;
use crate::xds::observe::Observer;
use envoy::Counters;

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

/// Labels that controllers set, which differ between pods of one workload or say nothing of it.
const GENERATED: [&str; 5] = [
    "controller-revision-hash",
    "controller-uid",
    "job-name",
    "pod-template-generation",
    "pod-template-hash",
];
const GENERATED_DOMAINS: [&str; 4] = [
    "istio.io",
    "apps.kubernetes.io",
    "batch.kubernetes.io",
    "statefulset.kubernetes.io",
];

/// What one pod used, or several of one workload.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    pub namespace: String,
    pub workload: String,
    /// Those of all pods, without generated ones.
    pub labels: BTreeMap<String, String>,
    pub pods: Vec<Pod>,
    /// What Envoy was sent, by namespace.
    pub sent: BTreeMap<String, Sent>,
    /// The services that were used or asked for, sorted.
    pub services: Vec<Service>,
    /// Bytes of discovery responses for one cluster and its endpoints.
    pub bytes_per_cluster: u64,
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
    pub names: Names,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sent {
    pub services: u64,
    pub clusters: u64,
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
}

/// What the use is read from.
#[derive(Clone, Debug)]
pub struct Sources {
    pub node: Node,
    pub envoy: Option<Envoy>,
    pub dns: Option<Dns>,
    pub discovery: Observer,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "found a {found}, expected a sidecar: gateways and waypoints need other services than they call"
    )]
    Type { found: String },
    #[error("no Envoy runs, expected one whose clusters can be read")]
    NoEnvoy,
    #[error(transparent)]
    Envoy(#[from] envoy::Error),
}

/// Reads what this pod uses, within [`LIMIT`].
pub async fn observe(sources: &Sources) -> Result<Usage, Error> {
    let node = &sources.node;
    let kind = node.id.split('~').next().unwrap_or_default();
    if kind != "sidecar" {
        return Err(Error::Type {
            found: kind.to_owned(),
        });
    }
    let envoy = sources.envoy.as_ref().ok_or(Error::NoEnvoy)?;
    let started = envoy.snapshot().started.ok_or(Error::NoEnvoy)?;
    let (admin, until) = (envoy.admin().address, clock::after(LIMIT));
    let connections = envoy::connections(admin, until).await?;
    let mut services = envoy::services(admin, until).await?;
    for (cluster, counters) in &connections {
        services.count(cluster, *counters);
    }
    let (asked, names) = match &sources.dns {
        Some(dns) => dns.asked(),
        None => (Vec::new(), Names::Unknown),
    };
    asked.iter().for_each(|host| services.ask(host));
    let text = |name: &str| node.metadata.get(name).and_then(Value::as_str);
    let text = |name| text(name).unwrap_or_default().to_owned();
    let istio = envoy::to_no_service(admin, until).await?;
    let of = |cluster: &str| {
        let endpoints = connections.get(cluster).copied().unwrap_or_default();
        let endpoints = endpoints.connections.max(endpoints.requests);
        endpoints.max(istio.get(cluster).copied().unwrap_or_default())
    };
    let observed = SystemTime::now().duration_since(started);
    let pod = Pod {
        name: text("NAME"),
        observed_seconds: observed.unwrap_or_default().as_secs(),
        passthrough: of(PASSTHROUGH),
        black_hole: of(BLACK_HOLE),
        is_registry_only: envoy::is_registry_only(admin, until).await?,
        names,
    };
    Ok(Usage {
        namespace: text("NAMESPACE"),
        workload: text("WORKLOAD_NAME"),
        labels: labels(node.metadata.get("LABELS")),
        pods: vec![pod],
        sent: services.sent(),
        services: services.into_used(),
        bytes_per_cluster: bytes_per_cluster(&sources.discovery),
    })
}

/// The services that Envoy was sent.
#[derive(Debug, Default)]
struct Services {
    /// By host.
    all: BTreeMap<String, Vec<Service>>,
    /// The hosts of each cluster.
    hosts: HashMap<String, Vec<String>>,
}

impl Services {
    /// Adds a cluster that serves this host of a namespace. A host may be in several namespaces.
    fn add(&mut self, cluster: &str, namespace: &str, host: &str) {
        let services = self.all.entry(host.to_owned()).or_default();
        match services.iter_mut().find(|it| it.namespace == namespace) {
            Some(service) => service.clusters += 1,
            None => services.push(Service {
                namespace: namespace.to_owned(),
                host: host.to_owned(),
                clusters: 1,
                ..Service::default()
            }),
        }
        let hosts = self.hosts.entry(cluster.to_owned()).or_default();
        hosts.push(host.to_owned());
    }

    fn count(&mut self, cluster: &str, counters: Counters) {
        for host in self.hosts.get(cluster).into_iter().flatten() {
            for service in self.all.get_mut(host).into_iter().flatten() {
                service.connections += counters.connections;
                service.requests += counters.requests;
            }
        }
    }

    /// Marks a host that DNS was asked for. A pod of a headless service has a name below the service's.
    fn ask(&mut self, host: &str) {
        let service = host.split_once('.').map_or("", |(_, service)| service);
        let known = [host, service].into_iter();
        if let Some(host) = known.into_iter().find(|host| self.all.contains_key(*host)) {
            for service in self.all.get_mut(host).into_iter().flatten() {
                service.is_asked = true;
            }
        }
    }

    fn sent(&self) -> BTreeMap<String, Sent> {
        let mut sent = BTreeMap::<_, Sent>::new();
        for service in self.all.values().flatten() {
            let of = sent.entry(service.namespace.clone()).or_default();
            of.services += 1;
            of.clusters += service.clusters;
        }
        sent
    }

    fn into_used(self) -> Vec<Service> {
        let all = self.all.into_values().flatten();
        let mut used: Vec<_> = all.filter(|it| it.is_used() || it.is_asked).collect();
        used.sort_unstable();
        used
    }
}

fn labels(labels: Option<&Value>) -> BTreeMap<String, String> {
    let labels = labels.map(BTreeMap::<String, String>::deserialize);
    let mut labels = labels.and_then(Result::ok).unwrap_or_default();
    labels.retain(|name, _| {
        let domain = name.split_once('/').map_or("", |(domain, _)| domain);
        let is_below = |of: &&str| match domain.strip_suffix(of) {
            Some(rest) => rest.is_empty() || rest.ends_with('.'),
            None => false,
        };
        !GENERATED.contains(&name.as_str()) && !GENERATED_DOMAINS.iter().any(is_below)
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
#[cfg(test)]
mod tests;
