//! Envoy's admin pages about clusters, read element by element while they arrive: with thousands of
//! services they have tens of megabytes.

use std::collections::HashMap;
use std::fmt;
use std::io::{self, BufReader, Read};
use std::marker::PhantomData;
use std::net::SocketAddr;

use bytes::Bytes;
use futures_util::stream;
use http::{Request, StatusCode};
use serde::de::{
    DeserializeOwned, DeserializeSeed, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor,
};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use tokio::time::{Instant, timeout_at};
use tokio_util::io::{StreamReader, SyncIoBridge};

use super::{BLACK_HOLE, PASSTHROUGH, Services};
use crate::http_client::{self, Client, http_url};

/// The prefix of clusters that lead out of the pod.
const OUTBOUND: &str = "outbound|";
/// The filter chain for connections to no service.
const CATCH_ALL: &str = "virtualOutbound-catchall-tcp";
/// The most that is read of Istio's metrics for connections to no service.
const MAX_METRICS: usize = 1 << 20;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no answer from Envoy's admin port in time: {path}")]
    Late { path: &'static str },
    #[error(transparent)]
    Http(#[from] http_client::Error),
    #[error("Envoy's admin port answers {path} with status {found}")]
    Status {
        path: &'static str,
        found: StatusCode,
    },
    #[error("Envoy's admin port answers {path} with other JSON than expected")]
    Json {
        path: &'static str,
        source: serde_json::Error,
    },
}

/// Of all endpoints of a cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counters {
    pub(super) connections: u64,
    pub(super) requests: u64,
}

/// The clusters that had connections or requests.
pub(super) async fn connections(
    admin: SocketAddr,
    until: Instant,
) -> Result<HashMap<String, Counters>, Error> {
    let path = "/clusters?format=json";
    fold(
        admin,
        until,
        path,
        "cluster_statuses",
        |used: &mut HashMap<_, _>, cluster: ClusterStatus| {
            let hosts = cluster.host_statuses.iter();
            let sum = hosts.fold(Counters::default(), |sum, host| Counters {
                connections: sum.connections.saturating_add(host.0.connections),
                requests: sum.requests.saturating_add(host.0.requests),
            });
            if sum != Counters::default() {
                used.insert(cluster.name, sum);
            }
        },
    )
    .await
}

/// The services of all outbound clusters.
pub(super) async fn services(admin: SocketAddr, until: Instant) -> Result<Services, Error> {
    let path = "/config_dump?resource=dynamic_active_clusters&mask=cluster.name,cluster.metadata";
    fold(
        admin,
        until,
        path,
        "configs",
        |services: &mut Services, dump: Value| {
            let cluster = &dump["cluster"];
            let name = cluster["name"].as_str().unwrap_or_default();
            let of_cluster = cluster.pointer("/metadata/filter_metadata/istio/services");
            let of_cluster = of_cluster.and_then(Value::as_array);
            for service in of_cluster
                .into_iter()
                .flatten()
                .filter(|_| name.starts_with(OUTBOUND))
            {
                if let (Some(namespace), Some(host)) =
                    (service["namespace"].as_str(), service["host"].as_str())
                {
                    services.add(name, namespace, host);
                }
            }
        },
    )
    .await
}

/// Whether connections to no service are refused.
pub(super) async fn is_registry_only(admin: SocketAddr, until: Instant) -> Result<bool, Error> {
    let path = "/config_dump?resource=dynamic_listeners&name_regex=^virtualOutbound$";
    fold(
        admin,
        until,
        path,
        "configs",
        |is: &mut bool, dump: Value| {
            let chains = dump.pointer("/active_state/listener/filter_chains");
            let chains = chains.and_then(Value::as_array).into_iter().flatten();
            let mut filters = chains
                .filter(|chain| chain["name"] == CATCH_ALL)
                .filter_map(|chain| chain["filters"].as_array())
                .flatten();
            *is |= filters.any(|filter| filter["typed_config"]["cluster"] == BLACK_HOLE);
        },
    )
    .await
}

/// How many connections and requests Istio's metrics count to clusters of no service. Envoys without
/// Istio's filters have none.
pub(super) async fn to_no_service(
    admin: SocketAddr,
    until: Instant,
) -> Result<HashMap<String, u64>, Error> {
    let path = "/stats/prometheus?usedonly&filter=(PassthroughCluster|BlackHoleCluster)";
    let mut body = open(admin, until, path).await?;
    let page = timeout_at(until, body.collect(MAX_METRICS)).await;
    let page = page.map_err(|_| Error::Late { path })??;
    let mut counts = HashMap::new();
    for line in String::from_utf8_lossy(&page).lines() {
        let families = [
            "istio_requests_total{",
            "istio_tcp_connections_opened_total{",
        ];
        let is_counter = families.iter().any(|family| line.starts_with(family));
        let Some((labels, value)) = line.rsplit_once(' ').filter(|_| is_counter) else {
            continue;
        };
        for cluster in [PASSTHROUGH, BLACK_HOLE] {
            if labels.contains(&format!("destination_service_name=\"{cluster}\"")) {
                *counts.entry(cluster.to_owned()).or_default() += value.parse().unwrap_or(0);
            }
        }
    }
    Ok(counts)
}

#[derive(Deserialize)]
struct ClusterStatus {
    name: String,
    #[serde(default)]
    host_statuses: Vec<HostStatus>,
}

/// The counters of an endpoint, summed up as they are read.
struct HostStatus(Counters);

impl<'de> Deserialize<'de> for HostStatus {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Status {
            #[serde(default)]
            stats: Vec<Stat>,
        }
        /// protobuf's JSON leaves out a value of zero, and writes 64 bits as text.
        #[derive(Deserialize)]
        struct Stat {
            name: String,
            #[serde(default)]
            value: String,
        }
        let mut counters = Counters::default();
        for stat in Status::deserialize(deserializer)?.stats {
            let counter = match stat.name.as_str() {
                "cx_total" => &mut counters.connections,
                "rq_total" => &mut counters.requests,
                _ => continue,
            };
            *counter = match stat.value.as_str() {
                "" => 0,
                value => value.parse().map_err(D::Error::custom)?,
            };
        }
        Ok(Self(counters))
    }
}

/// Reads a page and combines the elements of an array in it, none of which is kept. On a thread of its
/// own, as reading takes a while.
async fn fold<T, S>(
    admin: SocketAddr,
    until: Instant,
    path: &'static str,
    array: &'static str,
    step: fn(&mut S, T),
) -> Result<S, Error>
where
    T: DeserializeOwned + 'static,
    S: Default + Send + 'static,
{
    let body = open(admin, until, path).await?;
    let chunks = stream::unfold(body, move |mut body| async move {
        let chunk = match timeout_at(until, body.chunk()).await {
            Ok(chunk) => chunk?.map_err(io::Error::other),
            Err(late) => Err(late.into()),
        };
        Some((chunk, body))
    });
    let page = SyncIoBridge::new(StreamReader::new(Box::pin(chunks)));
    let reading = tokio::task::spawn_blocking(move || {
        let mut state = S::default();
        let each = |element| step(&mut state, element);
        read(page, array, each).map(|()| state)
    });
    let read = reading.await.map_err(serde_json::Error::custom).flatten();
    read.map_err(|source| match source.io_error_kind() {
        Some(io::ErrorKind::TimedOut) => Error::Late { path },
        _ => Error::Json { path, source },
    })
}

async fn open(
    admin: SocketAddr,
    until: Instant,
    path: &'static str,
) -> Result<http_client::Body, Error> {
    let mut request = Request::new(Bytes::new());
    *request.uri_mut() = http_url(&format!("http://{admin}{path}"))?;
    let answer = timeout_at(until, Client::default().send(request)).await;
    let answer = answer.map_err(|_| Error::Late { path })??;
    match answer.status() {
        StatusCode::OK => Ok(answer.into_body()),
        found => Err(Error::Status { path, found }),
    }
}

/// Hands out the elements of an array that is a member of the object in `json`.
fn read<T: DeserializeOwned>(
    json: impl Read,
    array: &'static str,
    each: impl FnMut(T),
) -> serde_json::Result<()> {
    let mut json = serde_json::Deserializer::from_reader(BufReader::new(json));
    let elements = Elements(each, PhantomData);
    json.deserialize_map(Object { array, elements })
}

struct Object<T, F> {
    array: &'static str,
    elements: Elements<T, F>,
}

struct Elements<T, F>(F, PhantomData<T>);

impl<'de, T: Deserialize<'de>, F: FnMut(T)> Visitor<'de> for Object<T, F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        while let Some(member) = map.next_key::<String>()? {
            if member == self.array {
                map.next_value_seed(&mut self.elements)?;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(())
    }
}

impl<'de, T: Deserialize<'de>, F: FnMut(T)> DeserializeSeed<'de> for &mut Elements<T, F> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de, T: Deserialize<'de>, F: FnMut(T)> Visitor<'de> for &mut Elements<T, F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<(), A::Error> {
        while let Some(element) = elements.next_element()? {
            (self.0)(element);
        }
        Ok(())
    }
}
