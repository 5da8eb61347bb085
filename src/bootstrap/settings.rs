//! The members of ProxyConfig that end up in the bootstrap.
//!
//! Read with types from the effective document, which is canonical: camel case, enums by name,
//! durations in seconds. Members of other rooms are skipped.
//!
//! Does not know defaults of a mesh.

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::address::Address;

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Settings {
    pub tracing: Tracing,
    pub envoy_metrics_service: RemoteService,
    /// The older spelling of the metrics service's address.
    pub envoy_metrics_service_address: Option<Address>,
    pub envoy_access_log_service: RemoteService,
    pub statsd_udp_address: Option<Address>,
    pub extra_stat_tags: Vec<String>,
    pub proxy_stats_matcher: StatsMatcher,
    pub stats_compression: Option<bool>,
    pub runtime_values: BTreeMap<String, String>,
    pub connection_settings: ConnectionSettings,
    pub proxy_metadata: BTreeMap<String, String>,
    pub file_flush_min_size_kb: u32,
}

/// One tracer, or none.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Tracing {
    pub zipkin: Collector,
    pub lightstep: Lightstep,
    pub datadog: Collector,
    pub tls_settings: TlsSettings,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Collector {
    pub address: Option<Address>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Lightstep {
    pub address: Option<Address>,
    pub access_token: Token,
}

/// A secret, which no log shows.
#[derive(Clone, Default, Deserialize)]
#[serde(transparent)]
pub struct Token(pub String);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(not shown)")
    }
}

/// A service Envoy streams to: metrics or access logs.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RemoteService {
    pub address: Option<Address>,
    pub tls_settings: TlsSettings,
    pub tcp_keepalive: Keepalive,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Keepalive {
    pub probes: u32,
    /// Seconds, as `75s`.
    pub time: String,
    pub interval: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TlsSettings {
    pub mode: TlsMode,
    pub client_certificate: String,
    pub private_key: String,
    pub ca_certificates: String,
    pub sni: String,
    pub subject_alt_names: Vec<String>,
    pub insecure_skip_verify: bool,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum TlsMode {
    #[default]
    Disable,
    Simple,
    Mutual,
    IstioMutual,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct StatsMatcher {
    pub inclusion_prefixes: Vec<String>,
    pub inclusion_suffixes: Vec<String>,
    pub inclusion_regexps: Vec<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ConnectionSettings {
    pub global_downstream_connection_limit: Option<i64>,
}

impl Settings {
    /// Reads the effective ProxyConfig.
    pub fn read(document: &Map<String, Value>) -> Result<Self, serde_json::Error> {
        Self::deserialize(document)
    }

    /// Puts the node's address where addresses name it as `$(HOST_IP)`.
    pub fn resolve_host_ip(&mut self, host_ip: &str) {
        let addresses = [
            &mut self.tracing.zipkin.address,
            &mut self.tracing.lightstep.address,
            &mut self.tracing.datadog.address,
            &mut self.envoy_metrics_service.address,
            &mut self.envoy_metrics_service_address,
            &mut self.envoy_access_log_service.address,
            &mut self.statsd_udp_address,
        ];
        for address in addresses.into_iter().flatten() {
            address.resolve_host_ip(host_ip);
        }
    }

    /// Where metrics are streamed to, in either spelling.
    pub fn metrics_service(&self) -> Option<(&Address, &RemoteService)> {
        let service = &self.envoy_metrics_service;
        let address = service.address.as_ref();
        let address = address.or(self.envoy_metrics_service_address.as_ref())?;
        Some((address, service))
    }

    /// How many connections Envoy takes: the first that is said in one of three places.
    pub fn connection_limit(&self) -> i64 {
        let of_metadata = self
            .proxy_metadata
            .get("ISTIO_META_GLOBAL_DOWNSTREAM_MAX_CONNECTIONS");
        let of_runtime = self
            .runtime_values
            .get("overload.global_downstream_max_connections");
        let settings = self.connection_settings.global_downstream_connection_limit;
        settings
            .into_iter()
            .chain(
                [of_metadata, of_runtime]
                    .into_iter()
                    .flatten()
                    .flat_map(|text| text.parse()),
            )
            .find(|limit| *limit > 0)
            .unwrap_or(i64::from(i32::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(document: Value) -> Settings {
        serde_json::from_value(document).expect("settings")
    }

    #[test]
    fn the_first_place_that_limits_connections_wins() {
        let meta = "ISTIO_META_GLOBAL_DOWNSTREAM_MAX_CONNECTIONS";
        let runtime = "overload.global_downstream_max_connections";
        for (document, limit) in [
            (json!({}), 2_147_483_647),
            (json!({"runtimeValues": {runtime: "5"}}), 5),
            (
                json!({"runtimeValues": {runtime: "5"}, "proxyMetadata": {meta: "6"}}),
                6,
            ),
            (
                json!({"runtimeValues": {runtime: "5"}, "proxyMetadata": {meta: "six"}}),
                5,
            ),
            (
                json!({"connectionSettings": {"globalDownstreamConnectionLimit": 7},
                       "proxyMetadata": {meta: "6"}}),
                7,
            ),
            (
                json!({"connectionSettings": {"globalDownstreamConnectionLimit": 0}}),
                2_147_483_647,
            ),
        ] {
            assert_eq!(
                read(document.clone()).connection_limit(),
                limit,
                "{document}"
            );
        }
    }

    #[test]
    fn either_spelling_of_the_metrics_address_counts() {
        let settings = read(json!({"envoyMetricsServiceAddress": "metrics:1"}));
        let (address, _) = settings.metrics_service().expect("a service");
        assert_eq!((address.host.as_str(), address.port), ("metrics", 1));
    }

    #[test]
    fn the_host_ip_is_put_in() {
        let mut settings = read(json!({"tracing": {"zipkin": {"address": "$(HOST_IP):9411"}}}));
        settings.resolve_host_ip("10.0.0.1");
        let address = settings.tracing.zipkin.address.expect("an address");
        assert_eq!(address.host, "10.0.0.1");
    }

    #[test]
    fn debug_output_holds_no_token() {
        let settings = read(json!({"tracing": {"lightstep": {"accessToken": "hush"}}}));
        assert!(!format!("{settings:?}").contains("hush"));
    }
}
