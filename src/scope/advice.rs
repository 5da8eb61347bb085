//! Writes a `Sidecar` resource for the services that were used, as YAML. Its comments say what to know before it is
//! applied.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::json;

use super::{Pod, Service, Usage};
use crate::runtime::duration::rounded_seconds;
use crate::runtime::lifecycle::BoxError;

/// The memory that an Envoy without services has allocated, in bytes.
const ENVOY_BASE: u64 = 10_000_000;
/// The seconds after which services that are used hourly have been seen.
const LONG: u64 = 3600;

/// The services that are kept although they were not used.
#[derive(Clone, Debug)]
pub struct Keep {
    /// Hosts as in `egress.hosts`: `namespace/host`.
    pub hosts: Vec<String>,
    /// True to keep services whose names were looked up and that had no connection.
    pub looked_up: bool,
}

/// Adds the services that another pod used, or the same one at another time.
pub fn merge(mut merged: Usage, other: Usage) -> Result<Usage, BoxError> {
    if other.namespace != merged.namespace {
        return Err(format!(
            "the pods are in the namespaces {} and {}, expected pods of one workload",
            merged.namespace, other.namespace
        )
        .into());
    }
    merged.labels.retain(|name, value| other.labels.get(name) == Some(value));
    merged.pods.extend(other.pods);
    let mut services = BTreeMap::<_, Service>::new();
    for service in merged.services.into_iter().chain(other.services) {
        let same = services.entry(service.egress_host()).or_insert_with(|| Service {
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

pub fn sidecar(usage: &Usage, keep: &Keep) -> Result<String, BoxError> {
    if let Some(wrong) = keep.hosts.iter().find(|host| !host.contains('/')) {
        return Err(format!(
            "--keep is {wrong:?}, expected <namespace>/<host>, such as istio-system/*"
        )
        .into());
    }
    if usage.labels.is_empty() {
        let names: Vec<_> = usage.pods.iter().map(|pod| pod.name.as_str()).collect();
        return Err(format!(
            "the pods {} do not have a label in common, which a Sidecar resource needs to select them; without a \
             selector it would apply to the whole namespace",
            names.join(", ")
        )
        .into());
    }
    let mut hosts: BTreeSet<_> = keep.hosts.iter().cloned().collect();
    let namespaces = keep.hosts.iter().filter_map(|host| host.strip_suffix("/*"));
    let kept_namespaces: Vec<_> =
        namespaces.map(|it| if it == "." { &usage.namespace } else { it }).collect();
    let mut left_out = Vec::new();
    for service in &usage.services {
        let host = service.egress_host();
        let is_kept = service.is_used() || (keep.looked_up && service.is_asked);
        if kept_namespaces.contains(&"*") || kept_namespaces.contains(&service.namespace.as_str()) {
            // A host that stands for its namespace includes it.
        } else if is_kept || keep.hosts.contains(&host) {
            hosts.insert(host);
        } else {
            left_out.push(service);
        }
    }
    if hosts.is_empty() {
        // `~/*` stands for no service.
        hosts.insert("~/*".to_owned());
    }
    let label_lines = usage
        .labels
        .iter()
        .map(|(name, value)| format!("      {}: {}\n", json!(name), json!(value)));
    let host_lines = hosts.iter().map(|host| format!("    - {}\n", json!(host)));
    let workload = match usage.workload.as_str() {
        "" => usage.labels.values().next().map_or("", String::as_str),
        workload => workload,
    };
    let comments = comments(usage, keep, &left_out);
    let comment_lines = comments.iter().map(|line| format!("# {line}\n"));
    Ok(format!(
        "{}apiVersion: networking.istio.io/v1\n\
         kind: Sidecar\n\
         metadata:\n  name: {}\n  namespace: {}\n\
         spec:\n  workloadSelector:\n    labels:\n{}  egress:\n  - hosts:\n{}",
        comment_lines.collect::<String>(),
        json!(workload),
        json!(usage.namespace),
        label_lines.collect::<String>(),
        host_lines.collect::<String>(),
    ))
}

fn comments(usage: &Usage, keep: &Keep, left_out: &[&Service]) -> Vec<String> {
    let mut lines = vec![
        "A Sidecar resource with the services in use. Read these notes before you apply it."
            .to_owned(),
    ];
    lines.extend(usage.pods.iter().map(|pod| {
        let observed = rounded_seconds(pod.observed_seconds as f64);
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
    let consequence = if usage.pods.iter().any(|pod| pod.is_registry_only) {
        "is blocked: the mesh is REGISTRY_ONLY"
    } else {
        "passes through Envoy as if the host were outside of the mesh: without routes, policies and mutual TLS, \
         and without an address if only a ServiceEntry defines one"
    };
    lines.push(format!("Traffic to a host that is left out {consequence}."));
    lines.extend(
        [
            "Counters of removed endpoints are lost, and a service that is rarely used may not be seen: merge the \
             usage of several pods and times.",
            "Only services that istiod sends are listed: if a Sidecar resource already selects this workload, the \
             hosts that it leaves out are missing.",
        ]
        .map(str::to_owned),
    );
    for pod in &usage.pods {
        for warning in warnings(pod) {
            lines.push(format!("Warning: pod {:?}: {warning}", pod.name));
        }
    }
    for Service { host, .. } in
        usage.services.iter().filter(|it| it.host.starts_with('*') && it.is_used())
    {
        lines.push(format!(
            "Warning: {host:?} is not narrowed down: the command does not know which of its hosts are used."
        ));
    }
    let action = if keep.looked_up { "kept" } else { "left out" };
    for service in usage.services.iter().filter(|it| it.is_asked && !it.is_used()) {
        let host = service.egress_host();
        lines.push(format!(
            "Looked up but not connected to, {action}: {host:?}. A VirtualService may send its requests elsewhere."
        ));
    }
    lines
}

/// Lists the reasons why a pod may use more services than were seen.
fn warnings(pod: &Pod) -> Vec<String> {
    let mut warnings = Vec::new();
    if pod.observed_seconds < LONG {
        warnings.push("observed for less than an hour.".to_owned());
    }
    for (count, cluster) in [
        (pod.passthrough, "PassthroughCluster"),
        (pod.black_hole, "BlackHoleCluster, which refuses them"),
    ] {
        if count > 0 {
            warnings.push(format!(
                "{count} connections or requests went to {cluster}: to addresses or hosts that belong to no service."
            ));
        }
    }
    if !pod.has_dns {
        let unknown = "the agent does not answer its DNS (ISTIO_META_DNS_CAPTURE), so the names that the workload looked up are not known.";
        warnings.push(unknown.to_owned());
    }
    warnings
}
