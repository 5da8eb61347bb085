//! Reads Envoy's admin pages about clusters. With thousands of services they have tens of megabytes, so they are
//! parsed while they arrive, and little of each cluster is stored.

use std::io::{self, BufReader};

use bytes::Bytes;
use futures_util::stream;
use http::{Request, StatusCode};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::{Instant, timeout_at};
use tokio_util::io::{StreamReader, SyncIoBridge};

use super::{BLACK_HOLE, PASSTHROUGH};
use crate::envoy::admin::Address;
use crate::net::http_client::{Body, http_url};
use crate::runtime::lifecycle::BoxError;

/// The filter chain for connections to no service.
const CATCH_ALL: &str = "virtualOutbound-catchall-tcp";
/// The maximum number of bytes that are read of Istio's metrics for connections to no service.
const MAX_METRICS: usize = 1 << 20;

#[derive(Debug, thiserror::Error)]
#[error("cannot read {path} of Envoy's admin port")]
pub(super) struct Error {
    path: &'static str,
    source: BoxError,
}

/// The address of Envoy's admin interface, and the deadline of all its responses.
#[derive(Clone)]
pub(super) struct Admin {
    pub(super) address: Address,
    pub(super) until: Instant,
}

/// The connections and requests of a cluster's present endpoints.
#[derive(Deserialize)]
#[serde(from = "ClusterStatus")]
pub(super) struct Counters {
    pub(super) cluster: String,
    pub(super) connections: u64,
    pub(super) requests: u64,
}

#[derive(Deserialize)]
struct ClusterStatus {
    name: String,
    host_statuses: Option<Vec<HostStatus>>,
}

#[derive(Deserialize)]
struct HostStatus {
    stats: Option<Vec<Stat>>,
}

/// A statistic. Protobuf's JSON leaves out a value of zero, and has 64-bit numbers as text.
#[derive(Deserialize)]
struct Stat {
    name: String,
    value: Option<String>,
}

impl From<ClusterStatus> for Counters {
    fn from(status: ClusterStatus) -> Self {
        let mut counters = Self { cluster: status.name, connections: 0, requests: 0 };
        for host in status.host_statuses.into_iter().flatten() {
            for stat in host.stats.into_iter().flatten() {
                let value = stat.value.and_then(|value| value.parse().ok()).unwrap_or(0);
                match stat.name.as_str() {
                    "cx_total" => counters.connections += value,
                    "rq_total" => counters.requests += value,
                    _ => {}
                }
            }
        }
        counters
    }
}

/// A cluster, and the namespace and host of each service that istiod names in its metadata. Clusters that are not
/// outbound have none.
#[derive(Deserialize)]
#[serde(from = "Value")]
pub(super) struct Outbound {
    pub(super) cluster: String,
    pub(super) services: Vec<(String, String)>,
}

impl From<Value> for Outbound {
    fn from(dump: Value) -> Self {
        let cluster = text(&dump["cluster"]["name"]);
        let list = dump.pointer("/cluster/metadata/filter_metadata/istio/services");
        let services = match list.and_then(Value::as_array) {
            Some(services) if cluster.starts_with("outbound|") => services
                .iter()
                .map(|service| (text(&service["namespace"]), text(&service["host"])))
                .collect(),
            _ => Vec::new(),
        };
        Self { services, cluster }
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

impl Admin {
    pub(super) async fn counters(&self) -> Result<Vec<Counters>, Error> {
        #[derive(Deserialize)]
        struct Page {
            cluster_statuses: Option<Vec<Counters>>,
        }
        let page: Page = self.stream("/clusters?format=json").await?;
        Ok(page.cluster_statuses.unwrap_or_default())
    }

    pub(super) async fn outbound(&self) -> Result<Vec<Outbound>, Error> {
        #[derive(Deserialize)]
        struct Page {
            configs: Option<Vec<Outbound>>,
        }
        let path =
            "/config_dump?resource=dynamic_active_clusters&mask=cluster.name,cluster.metadata";
        let page: Page = self.stream(path).await?;
        Ok(page.configs.unwrap_or_default())
    }

    pub(super) async fn memory(&self) -> Result<u64, Error> {
        let page: Value = self.stream("/memory").await?;
        Ok(page["allocated"].as_str().and_then(|it| it.parse().ok()).unwrap_or_default())
    }

    pub(super) async fn is_registry_only(&self) -> Result<bool, Error> {
        let path = "/config_dump?resource=dynamic_listeners&name_regex=^virtualOutbound$";
        let page: Value = self.stream(path).await?;
        let mut filters = page
            .pointer("/configs/0/active_state/listener/filter_chains")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .filter(|chain| chain["name"] == CATCH_ALL)
            .filter_map(|chain| chain["filters"].as_array())
            .flatten();
        Ok(filters.any(|filter| filter["typed_config"]["cluster"] == BLACK_HOLE))
    }

    /// Returns how many connections and requests Istio's metrics count to [`PASSTHROUGH`] and [`BLACK_HOLE`]:
    /// none in Envoys without Istio's filters.
    pub(super) async fn unknown_service_counts(&self) -> Result<[u64; 2], Error> {
        let path = "/stats/prometheus?usedonly&filter=(PassthroughCluster|BlackHoleCluster)";
        let page = self.metrics(path).await.map_err(|source| Error { path, source })?;
        let page = String::from_utf8_lossy(&page);
        let families = ["istio_requests_total{", "istio_tcp_connections_opened_total{"];
        let samples =
            page.lines().filter(|line| families.iter().any(|family| line.starts_with(family)));
        Ok([PASSTHROUGH, BLACK_HOLE].map(|cluster| {
            let label = format!("destination_service_name=\"{cluster}\"");
            samples
                .clone()
                .filter(|line| line.contains(&label))
                .filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok())
                .sum()
        }))
    }

    async fn metrics(&self, path: &'static str) -> Result<Bytes, BoxError> {
        Ok(timeout_at(self.until, self.open(path).await?.collect(MAX_METRICS)).await??)
    }

    /// Parses JSON while it arrives, on a blocking thread, because that takes a while.
    async fn stream<T: DeserializeOwned + Send + 'static>(
        &self,
        path: &'static str,
    ) -> Result<T, Error> {
        self.parse(path).await.map_err(|source| Error { path, source })
    }

    async fn parse<T: DeserializeOwned + Send + 'static>(
        &self,
        path: &'static str,
    ) -> Result<T, BoxError> {
        let body = self.open(path).await?;
        let until = self.until;
        let chunks = stream::unfold(body, move |mut body| async move {
            let chunk = match timeout_at(until, body.chunk()).await {
                Ok(chunk) => chunk?.map_err(io::Error::other),
                Err(late) => Err(late.into()),
            };
            Some((chunk, body))
        });
        let page = SyncIoBridge::new(StreamReader::new(Box::pin(chunks)));
        Ok(tokio::task::spawn_blocking(|| serde_json::from_reader(BufReader::new(page))).await??)
    }

    async fn open(&self, path: &'static str) -> Result<Body, BoxError> {
        let mut request = Request::new(Bytes::new());
        *request.uri_mut() = http_url(&self.address.url(path))?;
        let response = timeout_at(self.until, self.address.client().send(request)).await??;
        match response.status() {
            StatusCode::OK => Ok(response.into_body()),
            status => Err(format!("it answers with status {status}").into()),
        }
    }
}
