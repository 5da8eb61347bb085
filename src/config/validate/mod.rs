//! Checks the values of a merged ProxyConfig, so that a value a later document replaces does no harm.
//! Every problem is reported, with the document and line of the member.

use std::fmt::Display;

use serde_json::Value;

use super::merged::Merged;
use crate::proxy_config::field::{Message, Secrets};
use crate::proxy_config::{
    AuthenticationPolicy, ConnectionSettings, Enumeration, KeyOffload, ProxyConfig, RemoteService,
    TlsMode, TlsSettings, Tracing,
};
use crate::{address, duration};

const NOT_EMPTY: &str = "a string that is not empty";

/// The least values of members of `connectionSettings`. HTTP/2 has a least size of windows.
const MIN: [(&str, i64); 7] = [
    ("listenerPerConnectionBufferLimitBytes", 0),
    ("clusterPerConnectionBufferLimitBytes", 0),
    ("httpMaxConcurrentStreams", 1),
    ("listenerConnectionLimit", 1),
    ("globalDownstreamConnectionLimit", 1),
    ("http2InitialStreamWindowSize", 65_535),
    ("http2InitialConnectionWindowSize", 65_535),
];

/// Reports values that cannot be used, and warns of outdated ones.
pub(super) fn check(merged: &mut Merged) {
    let config = merged.config.clone();
    let config = &config;
    let mut rules = Rules(merged);
    rules.required(config);
    rules.addresses(config);
    if let Some(tracing) = &config.tracing {
        rules.tracing(tracing);
    }
    for (name, service) in [
        ("envoyMetricsService", &config.envoy_metrics_service),
        ("envoyAccessLogService", &config.envoy_access_log_service),
    ] {
        if let Some(service) = service {
            rules.service(name, service);
        }
    }
    rules.key_provider(config);
    if let Some(settings) = &config.connection_settings {
        rules.connections(settings);
    }
    if config.metadata("ISTIO_META_DNS_AUTO_ALLOCATE").is_some() {
        let path = "proxyMetadata.ISTIO_META_DNS_AUTO_ALLOCATE";
        let expected = "nothing: istiod allocates addresses by itself";
        merged.warn(path, "set", expected);
    }
}

struct Rules<'a>(&'a mut Merged);

impl Rules<'_> {
    fn required(&mut self, config: &ProxyConfig) {
        self.filled("configPath", &config.config_path);
        self.filled("binaryPath", &config.binary_path);
        if config.tracing_service_name.is_none() {
            let cluster = config.service_cluster.as_deref();
            self.filled("serviceCluster", cluster.unwrap_or_default());
        }
        let drain = config.drain_time();
        let is_good = !drain.is_zero() && drain.subsec_nanos() == 0;
        let expected = "a duration of whole seconds, at least 1s";
        self.expect(is_good, "drainDuration", duration::seconds(drain), expected);
        let policy = config.control_plane_auth_policy;
        let is_good = policy != AuthenticationPolicy::INHERIT;
        let expected = "NONE or MUTUAL_TLS";
        self.expect(is_good, "controlPlaneAuthPolicy", policy.name(), expected);
        self.at_least("concurrency", config.concurrency.map(i64::from), 0);
        for (name, port) in [
            ("proxyAdminPort", config.proxy_admin_port),
            ("statusPort", config.status_port),
        ] {
            let is_port = (1..=65535).contains(&port);
            self.expect(is_port, name, port, "a port from 1 to 65535");
        }
    }

    fn addresses(&mut self, config: &ProxyConfig) {
        self.address("discoveryAddress", &config.discovery_address);
        self.address_if_any("statsdUdpAddress", &config.statsd_udp_address);
        let older = &config.envoy_metrics_service_address;
        self.address_if_any("envoyMetricsServiceAddress", older);
    }

    fn tracing(&mut self, tracing: &Tracing) {
        // An address of these two may name the host it runs on by a variable.
        for (name, collector) in [("zipkin", &tracing.zipkin), ("datadog", &tracing.datadog)] {
            if let Some(collector) = collector {
                let address = collector.address.replacen("$(HOST_IP)", "127.0.0.1", 1);
                self.address(&format!("tracing.{name}.address"), &address);
            }
        }
        if let Some(lightstep) = &tracing.lightstep {
            self.address("tracing.lightstep.address", &lightstep.address);
            let has_token = !lightstep.access_token.0.is_empty();
            self.expect(has_token, "tracing.lightstep.accessToken", "", NOT_EMPTY);
        }
        self.tls("tracing.tlsSettings", tracing.tls_settings.as_ref());
    }

    fn service(&mut self, name: &str, service: &RemoteService) {
        self.address_if_any(&format!("{name}.address"), &service.address);
        let path = format!("{name}.tlsSettings");
        self.tls(&path, service.tls_settings.as_ref());
    }

    fn tls(&mut self, path: &str, settings: Option<&TlsSettings>) {
        let Some(settings) = settings else { return };
        let files = [
            ("clientCertificate", &settings.client_certificate),
            ("privateKey", &settings.private_key),
            ("caCertificates", &settings.ca_certificates),
            ("caCrl", &settings.ca_crl),
        ];
        let by_credential = !settings.credential_name.is_empty();
        if by_credential && matches!(settings.mode, TlsMode::SIMPLE | TlsMode::MUTUAL) {
            self.empty(path, &files, "nothing beside a credentialName");
        } else if settings.mode == TlsMode::MUTUAL {
            for (name, file) in &files[..2] {
                self.filled(&format!("{path}.{name}"), file);
            }
        }
        if settings.insecure_skip_verify == Some(true) {
            self.empty(path, &files[2..], "nothing beside insecureSkipVerify");
        }
    }

    fn key_provider(&mut self, config: &ProxyConfig) {
        let Some(provider) = &config.private_key_provider else {
            return;
        };
        let mut poll_delay = |name: &str, method: &KeyOffload| {
            let delay = method.poll_delay.unwrap_or_default();
            let path = format!("privateKeyProvider.{name}.pollDelay");
            let expected = "a duration that is not zero";
            self.expect(!delay.is_zero(), &path, duration::seconds(delay), expected);
        };
        match (&provider.cryptomb, &provider.qat) {
            (Some(method), _) => poll_delay("cryptomb", method),
            (None, Some(method)) => poll_delay("qat", method),
            (None, None) => {
                let expected = "a provider: cryptomb or qat";
                self.expect(false, "privateKeyProvider", "empty", expected);
            }
        }
    }

    fn connections(&mut self, settings: &ConnectionSettings) {
        let settings = settings.members(Secrets::Shown);
        for (name, least) in MIN {
            let value = settings.get(name).and_then(Value::as_i64);
            self.at_least(&format!("connectionSettings.{name}"), value, least);
        }
    }

    fn at_least(&mut self, path: &str, value: Option<i64>, least: i64) {
        if let Some(value) = value {
            let expected = format!("a whole number, {least} or more");
            self.expect(value >= least, path, value, &expected);
        }
    }

    fn filled(&mut self, path: &str, text: &str) {
        self.expect(!text.is_empty(), path, text, NOT_EMPTY);
    }

    fn empty(&mut self, path: &str, members: &[(&str, &String)], expected: &str) {
        for (name, text) in members {
            self.expect(text.is_empty(), &format!("{path}.{name}"), text, expected);
        }
    }

    fn address(&mut self, path: &str, address: &str) {
        let expected = "host:port with a port from 1 to 65535";
        self.expect(address::is_valid(address), path, address, expected);
    }

    fn address_if_any(&mut self, path: &str, address: &str) {
        if !address.is_empty() {
            self.address(path, address);
        }
    }

    fn expect(&mut self, is_good: bool, path: &str, found: impl Display, expected: &str) {
        if !is_good {
            self.0.problem(path, found.to_string(), expected);
        }
    }
}

#[cfg(test)]
mod tests;
