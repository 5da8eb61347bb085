//! The `Sidecar` resource that suffices for what was used, as YAML, and what is to be known before it is
//! applied, as comments in it.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::json;

use super::{Pod, Service, Usage};
use crate::duration::approximate;

/// What an Envoy without services has allocated, in bytes.
const ENVOY_BASE: u64 = 10_000_000;
/// What is used once an hour is seen in this time, in seconds.
const LONG: u64 = 3600;

/// Which services are kept besides those that were used.
#[derive(Clone, Debug)]
pub struct Keep {
    /// `namespace/host`, as in `egress.hosts`.
    pub hosts: Vec<String>,
    /// Services that DNS was asked for and that had no connection.
    pub asked: bool,
}

/// Adds what another pod used, or the same one at another time.
pub fn merge(mut merged: Usage, other: Usage) -> Result<Usage, String> {
    if other.namespace != merged.namespace {
        let (one, another) = (merged.namespace, other.namespace);
        return Err(format!(
            "the pods are in the namespaces {one} and {another}, expected pods of one workload"
        ));
    }
    merged
        .labels
        .retain(|name, value| other.labels.get(name) == Some(value));
    merged.pods.extend(other.pods);
    let all = merged.services.into_iter().chain(other.services);
    let mut services = BTreeMap::<_, Service>::new();
    for service in all {
        let same = services
            .entry(service.egress_host())
            .or_insert_with(|| Service {
                connections: 0,
                requests: 0,
                ..service.clone()
            });
        same.clusters = same.clusters.max(service.clusters);
        same.connections = same.connections.saturating_add(service.connections);
        same.requests = same.requests.saturating_add(service.requests);
        same.is_asked |= service.is_asked;
    }
    merged.services = services.into_values().collect();
    merged.bytes_per_cluster = merged.bytes_per_cluster.max(other.bytes_per_cluster);
    merged.envoy_bytes = merged.envoy_bytes.max(other.envoy_bytes);
    Ok(merged)
}

/// The resource for what was used, with comments.
pub fn sidecar(usage: &Usage, keep: &Keep) -> Result<String, String> {
    if let Some(wrong) = keep.hosts.iter().find(|host| !host.contains('/')) {
        return Err(format!(
            "--keep is {wrong:?}, expected <namespace>/<host>, such as istio-system/*"
        ));
    }
    if usage.labels.is_empty() {
        let names: Vec<_> = usage.pods.iter().map(|pod| pod.name.as_str()).collect();
        return Err(format!(
            "the pods {} do not have a label in common, which a Sidecar resource needs to select them; without a \
             selector it would apply to the whole namespace",
            names.join(", ")
        ));
    }
    let mut hosts: BTreeSet<_> = keep.hosts.iter().cloned().collect();
    let namespaces = keep.hosts.iter().filter_map(|host| host.strip_suffix("/*"));
    let whole: Vec<_> = namespaces
        .map(|it| if it == "." { &usage.namespace } else { it })
        .collect();
    let mut left_out = Vec::new();
    for service in &usage.services {
        let is_kept = keep.hosts.contains(&service.egress_host());
        let is_used = is_kept || service.is_used() || (keep.asked && service.is_asked);
        if whole.contains(&"*") || whole.contains(&service.namespace.as_str()) {
            // Its namespace is there.
        } else if is_used {
            hosts.insert(service.egress_host());
        } else {
            left_out.push(service);
        }
    }
    if hosts.is_empty() {
        // No host at all.
        hosts.insert("~/*".to_owned());
    }
    let labels = usage.labels.iter();
    let labels = labels.map(|(name, value)| format!("      {}: {}\n", json!(name), json!(value)));
    let hosts = hosts.iter().map(|host| format!("    - {}\n", json!(host)));
    let workload = match usage.workload.as_str() {
        "" => usage.labels.values().next().map_or("", String::as_str),
        workload => workload,
    };
    let comments = comments(usage, keep, &left_out);
    Ok(format!(
        "{}apiVersion: networking.istio.io/v1\n\
         kind: Sidecar\n\
         metadata:\n  name: {}\n  namespace: {}\n\
         spec:\n  workloadSelector:\n    labels:\n{}  egress:\n  - hosts:\n{}",
        comments
            .iter()
            .map(|line| format!("# {line}\n"))
            .collect::<String>(),
        json!(workload),
        json!(usage.namespace),
        labels.collect::<String>(),
        hosts.collect::<String>(),
    ))
}

fn comments(usage: &Usage, keep: &Keep, left_out: &[&Service]) -> Vec<String> {
    let mut lines =
        vec!["What was used, as a Sidecar resource. Read it before you apply it.".to_owned()];
    lines.extend(usage.pods.iter().map(|pod| {
        let observed = approximate(pod.observed_seconds as f64);
        format!("Pod {:?} was observed for {observed}.", pod.name)
    }));
    let sent: u64 = usage.services.iter().map(|it| it.clusters).sum();
    let used = usage.services.iter().filter(|it| it.is_used()).count();
    let services = usage.services.len();
    lines.push(format!(
        "Envoy was sent {services} services ({sent} clusters); {used} had connections."
    ));
    let clusters: u64 = left_out.iter().map(|it| it.clusters).sum();
    let memory =
        usage.envoy_bytes.saturating_sub(ENVOY_BASE) as f64 * clusters as f64 / sent.max(1) as f64;
    lines.push(format!(
        "Left out: {} services, {clusters} clusters, about {:.1} MB of configuration and {:.0} MB of Envoy's \
         memory in each pod.",
        left_out.len(),
        clusters.saturating_mul(usage.bytes_per_cluster) as f64 / 1e6,
        memory / 1e6,
    ));
    let of_left_out = match usage.pods.iter().any(|pod| pod.is_registry_only) {
        true => "is refused: the mesh is REGISTRY_ONLY",
        false => {
            "passes through Envoy as one outside of the mesh: without routes, policies and mutual TLS, \
             and without an address where only a ServiceEntry gives it one"
        }
    };
    lines.push(format!("A host that is left out {of_left_out}."));
    lines.extend(
        [
            "Endpoints that are gone took their counters along, and what runs more rarely than a pod was \
             observed is not seen: merge several pods, over time.",
            "Only what istiod sends is known: if a Sidecar selects this workload already, hosts that it leaves out \
             are not here.",
        ]
        .map(str::to_owned),
    );
    for pod in &usage.pods {
        lines
            .extend(warnings(pod).map(|warning| format!("Warning: pod {:?}: {warning}", pod.name)));
    }
    let wildcards = usage
        .services
        .iter()
        .filter(|it| it.host.starts_with('*') && it.is_used());
    lines.extend(wildcards.map(|service| {
        let host = &service.host;
        format!("Warning: {host:?} stays whole: which of its hosts are used is not known.")
    }));
    let asked = usage
        .services
        .iter()
        .filter(|it| it.is_asked && !it.is_used());
    let kept = if keep.asked { "kept" } else { "left out" };
    lines.extend(asked.map(|service| {
        let host = service.egress_host();
        format!("Asked for and never connected to, {kept}: {host:?}. A VirtualService may send its requests elsewhere.")
    }));
    lines
}

/// Why a pod may use more than was seen.
fn warnings(pod: &Pod) -> impl Iterator<Item = String> {
    let to_none = |count: u64, cluster: &str| {
        let went = format!(
            "{count} connections or requests went to {cluster}: to addresses or hosts of no service."
        );
        (count > 0).then_some(went)
    };
    let brief = "observed for less than an hour.";
    let no_dns = "the agent does not answer its DNS (ISTIO_META_DNS_CAPTURE), so names asked for are not known.";
    [
        (pod.observed_seconds < LONG).then(|| brief.to_owned()),
        to_none(pod.passthrough, "PassthroughCluster"),
        to_none(pod.black_hole, "BlackHoleCluster, which refuses them"),
        (!pod.has_dns).then(|| no_dns.to_owned()),
    ]
    .into_iter()
    .flatten()
}
