//! The configuration of Envoy's bootstrap, of the bootstrap for gRPC applications, and of the cloud
//! platform.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use indexmap::IndexSet;
use serde_json::{Number, Value};

use super::environment as variables;
use super::pod::NodeType;
use super::{LEFT_OUT, Loader};
use crate::bootstrap::{self, StatsConfig, grpc, node, platform};
use crate::compliance::Policy;
use crate::problem::{Problem, codes};
use crate::{duration, json, unix_socket};

const PREFIX: &str = "sidecar.istio.io/";
/// Where the agent serves secrets from files while another process serves the workload's.
const FILES_SOCKET: &str = "./var/run/secrets/credential-uds/files-socket";
/// Envoy's default flush interval.
const FLUSH: Duration = Duration::from_secs(5);

impl Loader<'_> {
    pub(super) fn bootstrap(
        &mut self,
        xds_socket: &Path,
        sds_socket: &Path,
        log_as_json: bool,
    ) -> bootstrap::Config {
        let ports = self.ports();
        let node = self.node(sds_socket, &ports);
        let waypoint = self.flags.kind == NodeType::Waypoint;
        let delta = self.get(&variables::ISTIO_DELTA_XDS) || waypoint;
        let metadata_discovery = node.is_true("METADATA_DISCOVERY") || waypoint;
        if metadata_discovery && !delta {
            let consequence = "the metadata of peers is not discovered";
            self.warn("ISTIO_DELTA_XDS", "false", "true", consequence);
        }
        let container = self.get(&variables::ISTIO_AGENT_STANDBY);
        let exit_on_zero_connections = self.get(&variables::EXIT_ON_ZERO_ACTIVE_CONNECTIONS);
        let strips_fragment = &variables::HTTP_STRIP_FRAGMENT_FROM_PATH_UNSAFE_IF_DISABLED;
        bootstrap::Config {
            directory: match container.as_str() {
                "" => self.proxy_config.config_path.clone().into(),
                container => Path::new(&self.proxy_config.config_path).join(container),
            },
            revision: None,
            ports,
            xds_socket: unix_socket::of_container(xds_socket, &container),
            sds_socket: unix_socket::of_container(sds_socket, &container),
            files_socket: unix_socket::of_container(Path::new(FILES_SOCKET), &container),
            delta,
            metadata_discovery: metadata_discovery && delta,
            dual_stack: self.get(&variables::ISTIO_DUAL_STACK),
            log_as_json,
            health_proxy_protocol: self.get(&variables::ENVOY_STATUS_PORT_ENABLE_PROXY_PROTOCOL),
            exit_on_zero_connections,
            outlier_log_path: Some(self.flags.outlier_log_path.clone()).filter(|p| !p.is_empty()),
            stats: self.stats(exit_on_zero_connections),
            host_ip: self.get(&variables::HOST_IP),
            compliance_fips_140_2: self.policy == Policy::Fips140_2,
            keep_path_fragment: !self.get(strips_fragment),
            load_stats: self.load_stats(&node),
            node,
        }
    }

    fn load_stats(&mut self, node: &node::Node) -> Option<Value> {
        const NAME: &str = "LOAD_STATS_CONFIG_JSON";
        let text = node.metadata.get(NAME)?.as_str()?;
        if text.is_empty() {
            return None;
        }
        let parsed = serde_json::from_str(text).ok().filter(Value::is_object);
        if parsed.is_none() {
            let subject = format!("ISTIO_META_{NAME}");
            let code = codes::LOAD_STATS_CONFIG_INVALID;
            let problem = Problem::value(code, subject, text, "a JSON object");
            self.notes.add(problem);
        }
        parsed
    }

    /// The bootstrap of gRPC applications; None when it is switched off.
    pub(super) fn grpc(&mut self, xds_socket: &Path) -> Option<grpc::Config> {
        Some(grpc::Config {
            path: self.text(&variables::GRPC_XDS_BOOTSTRAP)?.into(),
            xds_socket: xds_socket.to_owned(),
            certificates: self.text(&variables::OUTPUT_CERTS).map(Into::into),
        })
    }

    pub(super) fn platform(&mut self) -> platform::Config {
        let known = self.get(&variables::GCP_METADATA);
        let quota = self.get(&variables::GCP_QUOTA_PROJECT);
        let gcp = platform::known_google(&known, quota, self.get(&variables::GCP_ZONE));
        if gcp.is_none() && !known.is_empty() {
            let expected = "project|number|cluster|location";
            self.warn("GCP_METADATA", &known, expected, LEFT_OUT);
        }
        platform::Config {
            choice: self.get(&variables::CLOUD_PLATFORM),
            gcp,
            gcp_host: self.text(&variables::GCE_METADATA_HOST),
            root: "/".into(),
            v6: self.addresses.iter().any(IpAddr::is_ipv6),
        }
    }

    /// The statistics a pod adds to the default ones: annotations over ProxyConfig.
    fn stats(&mut self, until_idle: bool) -> StatsConfig {
        let matcher = self.proxy_config.proxy_stats_matcher.clone();
        let matcher = matcher.unwrap_or_default();
        let expected = "a duration from 1ms to less than 5m";
        let flush = self.interval("statsFlushInterval", expected, |flush| {
            flush.is_zero() || (1..300_000).contains(&flush.as_millis())
        });
        let expected = "a multiple of the flush interval";
        let multiple_of = flush.unwrap_or(FLUSH).as_nanos();
        let eviction = self.interval("statsEvictionInterval", expected, |eviction| {
            eviction.as_nanos().is_multiple_of(multiple_of)
        });
        StatsConfig {
            prefixes: self.either("statsInclusionPrefixes", &matcher.inclusion_prefixes),
            suffixes: self.either("statsInclusionSuffixes", &matcher.inclusion_suffixes),
            expressions: self.either("statsInclusionRegexps", &matcher.inclusion_regexps),
            of_requests: self.statistics_of_requests(until_idle),
            tags: self.tags(),
            buckets: self.buckets(),
            flush,
            eviction,
        }
    }

    fn stats_annotation(&self, name: &str) -> Option<&str> {
        let text = self.annotations.get(&format!("{PREFIX}{name}"))?;
        Some(text.as_str()).filter(|text| !text.is_empty())
    }

    /// The annotation's list, else the setting's.
    fn either(&self, annotation: &str, setting: &[String]) -> Vec<String> {
        match self.stats_annotation(annotation) {
            Some(list) => list.split(',').map(str::to_owned).collect(),
            None => setting.to_vec(),
        }
    }

    fn tags(&self) -> Vec<String> {
        let annotation = self.stats_annotation("extraStatTags").unwrap_or_default();
        let setting = self.proxy_config.extra_stat_tags.iter();
        let all = setting.map(String::as_str).chain(annotation.split(','));
        let tags: IndexSet<_> = all.filter(|tag| !tag.is_empty()).collect();
        tags.into_iter().map(str::to_owned).collect()
    }

    fn buckets(&mut self) -> BTreeMap<String, Vec<Number>> {
        const NAME: &str = "statsHistogramBuckets";
        let text = self.stats_annotation(NAME).unwrap_or("{}").to_owned();
        json::read(&text).unwrap_or_else(|_| {
            let expected = "a JSON object of lists of numbers";
            self.warn(&format!("{PREFIX}{NAME}"), &text, expected, LEFT_OUT);
            BTreeMap::new()
        })
    }

    /// An interval that is valid and not zero, which stands for Envoy's default.
    fn interval(
        &mut self,
        annotation: &str,
        expected: &'static str,
        is_valid: impl Fn(&Duration) -> bool,
    ) -> Option<Duration> {
        let text = self.stats_annotation(annotation)?;
        let Some(interval) = duration::parse(text).filter(is_valid) else {
            let text = text.to_owned();
            self.warn(&format!("{PREFIX}{annotation}"), &text, expected, LEFT_OUT);
            return None;
        };
        (!interval.is_zero()).then_some(interval)
    }
}
