//! Checks the values of a merged ProxyConfig, so that a value a later document replaces does no harm.
//! Every problem is reported, with the document and line of the member.

use std::fmt::Display;

use serde_json::Value;

use super::merged::Merged;
use crate::problem::codes;
use crate::{address, duration};

const NOT_EMPTY: &str = "a string that is not empty";

/// The least values of numbers that may be missing. HTTP/2 has a least size of windows.
const MIN: [(&str, i64); 8] = [
    ("concurrency", 0),
    (
        "connectionSettings.listenerPerConnectionBufferLimitBytes",
        0,
    ),
    ("connectionSettings.clusterPerConnectionBufferLimitBytes", 0),
    ("connectionSettings.httpMaxConcurrentStreams", 1),
    ("connectionSettings.listenerConnectionLimit", 1),
    ("connectionSettings.globalDownstreamConnectionLimit", 1),
    ("connectionSettings.http2InitialStreamWindowSize", 65_535),
    (
        "connectionSettings.http2InitialConnectionWindowSize",
        65_535,
    ),
];

/// Reports values that cannot be used, and warns of outdated ones.
pub(super) fn check(merged: &mut Merged) {
    let document = Value::from(merged.config.document());
    let mut rules = Rules { document, merged };
    rules.required();
    rules.numbers();
    rules.addresses();
    rules.key_provider();
    rules.tracing_tls();
    let path = "proxyMetadata.ISTIO_META_DNS_AUTO_ALLOCATE";
    if rules.at(path).is_some() {
        let consequence = "istiod allocates addresses itself";
        merged.warn(path, "set", "nothing", consequence);
    }
}

struct Rules<'a> {
    document: Value,
    merged: &'a mut Merged,
}

impl Rules<'_> {
    fn required(&mut self) {
        self.filled("configPath");
        self.filled("binaryPath");
        if self.at("tracingServiceName").is_none() {
            self.filled("serviceCluster");
        }
        let drain = self.merged.config.drain_time();
        let is_good = !drain.is_zero() && drain.subsec_nanos() == 0;
        let expected = "a duration of whole seconds, at least 1s";
        self.expect(is_good, "drainDuration", duration::seconds(drain), expected);
        let policy = self.text("controlPlaneAuthPolicy");
        let expected = "NONE or MUTUAL_TLS";
        self.expect(
            policy != "INHERIT",
            "controlPlaneAuthPolicy",
            policy,
            expected,
        );
    }

    fn numbers(&mut self) {
        for (path, least) in MIN {
            if let Some(value) = self.at(path).and_then(Value::as_i64) {
                let expected = format!("a whole number, {least} or more");
                self.expect(value >= least, path, value, &expected);
            }
        }
        for path in ["proxyAdminPort", "statusPort"] {
            let port = self.at(path).and_then(Value::as_i64).unwrap_or_default();
            let is_port = (1..=65535).contains(&port);
            self.expect(is_port, path, port, "a port from 1 to 65535");
        }
    }

    fn addresses(&mut self) {
        self.address("discoveryAddress");
        for path in [
            "envoyMetricsServiceAddress",
            "envoyMetricsService.address",
            "envoyAccessLogService.address",
        ] {
            if !self.text(path).is_empty() {
                self.address(path);
            }
        }
        for tracer in ["tracing.zipkin", "tracing.datadog", "tracing.lightstep"] {
            if self.at(tracer).is_some() {
                self.address(&format!("{tracer}.address"));
            }
        }
        if self.at("tracing.lightstep").is_some() {
            self.filled("tracing.lightstep.accessToken");
        }
    }

    /// Pilot-agent checks no others; they go without a certificate then.
    fn tracing_tls(&mut self) {
        let by_credential = !self.text("tracing.tlsSettings.credentialName").is_empty();
        if self.text("tracing.tlsSettings.mode") == "MUTUAL" && !by_credential {
            self.filled("tracing.tlsSettings.clientCertificate");
            self.filled("tracing.tlsSettings.privateKey");
        }
    }

    fn key_provider(&mut self) {
        let Some(provider) = self.at("privateKeyProvider").and_then(Value::as_object) else {
            return;
        };
        let Some(method) = provider.keys().next().cloned() else {
            let expected = "a provider: cryptomb or qat";
            return self.expect(false, "privateKeyProvider", "empty", expected);
        };
        let path = format!("privateKeyProvider.{method}.pollDelay");
        let delay = self.text(&path);
        let is_good = !["", "0s"].contains(&&*delay);
        self.expect(is_good, &path, delay, "a duration that is not zero");
    }

    fn filled(&mut self, path: &str) {
        let text = self.text(path);
        self.expect(!text.is_empty(), path, text, NOT_EMPTY);
    }

    /// An address of these two may name the host it runs on by a variable.
    fn address(&mut self, path: &str) {
        let text = self.text(path);
        let address = match path {
            "tracing.zipkin.address" | "tracing.datadog.address" => {
                text.replacen("$(HOST_IP)", "127.0.0.1", 1)
            }
            _ => text.clone(),
        };
        let expected = "host:port with a port from 1 to 65535";
        self.expect(address::is_valid(&address), path, text, expected);
    }

    fn at(&self, path: &str) -> Option<&Value> {
        self.document
            .pointer(&format!("/{}", path.replace('.', "/")))
    }

    fn text(&self, path: &str) -> String {
        let text = self.at(path).and_then(Value::as_str);
        text.unwrap_or_default().to_owned()
    }

    fn expect(&mut self, is_good: bool, path: &str, found: impl Display, expected: &str) {
        if !is_good {
            let (code, found) = (codes::SETTING_INVALID, found.to_string());
            self.merged.problem(code, path, &found, expected.to_owned());
        }
    }
}

#[cfg(test)]
mod tests;
