//! The `Sidecar` resource that suffices for what was used, as YAML, and what is to be known before it is
//! applied, as comments in it.

use std::collections::BTreeSet;
use std::fmt;

use serde_json::json;

use super::{Pod, Sent, Service, Usage};
use crate::dns::Names;
use crate::duration::approximate;

/// What Envoy holds for a service, in bytes; see docs/sizing.md.
const ENVOY_BYTES: u64 = 57_000;
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

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("nothing to merge")]
    Nothing,
    #[error("found pods of the namespaces {0:?} and {1:?}, expected those of one workload")]
    Namespaces(String, String),
    #[error(
        "the pods {0:?} have no label in common by which a Sidecar could select them; without a selector \
         it would apply to the whole namespace"
    )]
    NoLabels(Vec<String>),
    #[error("found {0:?} to keep, expected <namespace>/<host>, such as istio-system/*")]
    Keep(String),
}

/// What all of these used together.
pub fn merge(all: impl IntoIterator<Item = Usage>) -> Result<Usage, Error> {
    let mut all = all.into_iter();
    let mut merged = all.next().ok_or(Error::Nothing)?;
    for one in all {
        if one.namespace != merged.namespace {
            return Err(Error::Namespaces(merged.namespace, one.namespace));
        }
        merged
            .labels
            .retain(|name, value| one.labels.get(name) == Some(value));
        merged.pods.extend(one.pods);
        for (namespace, sent) in one.sent {
            let most = merged.sent.entry(namespace).or_default();
            most.services = most.services.max(sent.services);
            most.clusters = most.clusters.max(sent.clusters);
        }
        for service in one.services {
            let is_same =
                |it: &&mut Service| it.host == service.host && it.namespace == service.namespace;
            match merged.services.iter_mut().find(is_same) {
                Some(same) => {
                    same.clusters = same.clusters.max(service.clusters);
                    same.connections += service.connections;
                    same.requests += service.requests;
                    same.is_asked |= service.is_asked;
                }
                None => merged.services.push(service),
            }
        }
        merged.bytes_per_cluster = merged.bytes_per_cluster.max(one.bytes_per_cluster);
    }
    merged.services.sort_unstable();
    Ok(merged)
}

/// The resource for what was used, with comments.
pub fn sidecar(usage: &Usage, keep: &Keep) -> Result<String, Error> {
    if let Some(wrong) = keep.hosts.iter().find(|host| !host.contains('/')) {
        return Err(Error::Keep(wrong.clone()));
    }
    if usage.labels.is_empty() {
        let names = usage.pods.iter().map(|pod| pod.name.clone());
        return Err(Error::NoLabels(names.collect()));
    }
    let kept = Kept::new(usage, keep);
    let labels = usage.labels.iter();
    let labels = labels.map(|(name, value)| format!("      {}: {}\n", json!(name), json!(value)));
    let hosts = kept
        .hosts
        .iter()
        .map(|host| format!("    - {}\n", json!(host)));
    let workload = match usage.workload.as_str() {
        "" => usage.labels.values().next().map_or("", String::as_str),
        workload => workload,
    };
    Ok(format!(
        "{}apiVersion: networking.istio.io/v1\n\
         kind: Sidecar\n\
         metadata:\n  name: {}\n  namespace: {}\n\
         spec:\n  workloadSelector:\n    labels:\n{}  egress:\n  - hosts:\n{}",
        comments(usage, keep, &kept),
        json!(workload),
        json!(usage.namespace),
        labels.collect::<String>(),
        hosts.collect::<String>(),
    ))
}

/// What the resource keeps.
struct Kept {
    /// `namespace/host`.
    hosts: BTreeSet<String>,
    sent: Sent,
}

impl Kept {
    fn new(usage: &Usage, keep: &Keep) -> Self {
        let mut kept = Self {
            hosts: keep.hosts.iter().cloned().collect(),
            sent: Sent::default(),
        };
        let namespaces = keep.hosts.iter().filter_map(|host| host.strip_suffix("/*"));
        let whole = |of: &str| match of {
            "." => usage.namespace.clone(),
            other => other.to_owned(),
        };
        let whole: BTreeSet<_> = namespaces.map(whole).collect();
        let is_whole = |namespace: &String| whole.contains("*") || whole.contains(namespace);
        for (_, sent) in usage
            .sent
            .iter()
            .filter(|(namespace, _)| is_whole(namespace))
        {
            kept.sent.services += sent.services;
            kept.sent.clusters += sent.clusters;
        }
        let services = usage
            .services
            .iter()
            .filter(|it| it.is_used() || keep.asked);
        for service in services.filter(|it| !is_whole(&it.namespace)) {
            kept.hosts
                .insert(format!("{}/{}", service.namespace, service.host));
            kept.sent.services += 1;
            kept.sent.clusters += service.clusters;
        }
        if kept.hosts.is_empty() {
            // No host at all.
            kept.hosts.insert("~/*".to_owned());
        }
        kept
    }
}

fn comments(usage: &Usage, keep: &Keep, kept: &Kept) -> String {
    let mut text = String::new();
    let mut line = |line: fmt::Arguments<'_>| text += &format!("# {line}\n");
    let total = |of: fn(&Sent) -> u64| usage.sent.values().map(of).sum::<u64>();
    let (services, clusters) = (total(|it| it.services), total(|it| it.clusters));
    let used = usage.services.iter().filter(|it| it.is_used()).count();
    line(format_args!(
        "What was used, as a Sidecar resource. Look through it before you apply it."
    ));
    for pod in &usage.pods {
        let observed = approximate(pod.observed_seconds as f64);
        line(format_args!(
            "Pod {:?} was observed for {observed}.",
            pod.name
        ));
    }
    line(format_args!(
        "Envoy was sent {services} services ({clusters} clusters); {used} had connections."
    ));
    let services = services.saturating_sub(kept.sent.services);
    let clusters = clusters.saturating_sub(kept.sent.clusters);
    let megabytes = |bytes: u64| bytes as f64 / 1e6;
    line(format_args!(
        "Left out: {services} services, {clusters} clusters, about {:.1} MB of configuration and {:.0} MB of \
         Envoy's memory in each pod.",
        megabytes(clusters.saturating_mul(usage.bytes_per_cluster)),
        megabytes(services.saturating_mul(ENVOY_BYTES)),
    ));
    line(format_args!(
        "Endpoints that are gone took their counters along, and what runs more rarely than a pod was observed \
         is not seen: merge several pods, over time."
    ));
    let is_registry_only = usage.pods.iter().any(|pod| pod.is_registry_only);
    line(format_args!(
        "A host that is left out {}.",
        match is_registry_only {
            true => "is refused: the mesh is REGISTRY_ONLY",
            false =>
                "passes through Envoy as one outside of the mesh: without routes, policies and mutual TLS",
        }
    ));
    for pod in &usage.pods {
        for warning in warnings(pod) {
            line(format_args!("Warning: pod {:?}: {warning}", pod.name));
        }
    }
    for service in usage.services.iter().filter(|it| it.host.starts_with('*')) {
        line(format_args!(
            "Warning: {:?} stays whole: which of its hosts are used is not known.",
            service.host
        ));
    }
    for service in usage.services.iter().filter(|it| !it.is_used()) {
        let kept = if keep.asked { "kept" } else { "left out" };
        line(format_args!(
            "Asked for and never connected to, {kept}: {:?}. A VirtualService may send its requests elsewhere.",
            format!("{}/{}", service.namespace, service.host)
        ));
    }
    text
}

/// Why a pod may use more than was seen.
fn warnings(pod: &Pod) -> impl Iterator<Item = String> {
    let to_none = |count: u64, cluster: &str| {
        format!(
            "{count} connections or requests went to {cluster}: to addresses or hosts of no service."
        )
    };
    [
        (pod.observed_seconds < LONG).then(|| "observed for less than an hour.".to_owned()),
        (pod.passthrough > 0).then(|| to_none(pod.passthrough, "PassthroughCluster")),
        (pod.black_hole > 0).then(|| to_none(pod.black_hole, "BlackHoleCluster, which refuses them")),
        match pod.names {
            Names::Known => None,
            Names::Incomplete => Some("more names were asked for than are remembered.".to_owned()),
            Names::Unknown => Some(
                "the agent does not answer its DNS (ISTIO_META_DNS_CAPTURE), so names asked for are not known."
                    .to_owned(),
            ),
        },
    ]
    .into_iter()
    .flatten()
}
