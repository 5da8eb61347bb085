//! Checks the values of a merged ProxyConfig. Values that a later document replaces are not checked.
//! Every problem is reported, with the document and line of the member.

use std::fmt::Display;

use serde_json::Value;

use super::HOST_PORT;
use super::merged::Merged;
use crate::problem::codes;
use crate::{address, duration};

const NOT_EMPTY: &str = "a string that is not empty";

/// The minimum values of `connectionSettings`. The minimum window sizes are HTTP/2's.
const MIN_CONNECTION_SETTINGS: [(&str, i64); 7] = [
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
    let document = Value::from(merged.config.document());
    let mut rules = Rules { document, merged };
    rules.required();
    rules.numbers();
    rules.addresses();
    rules.key_provider();
    rules.tracing_tls();
    let path = "proxyMetadata.ISTIO_META_DNS_AUTO_ALLOCATE";
    if rules.get(path).is_some() {
        merged.warn(path, "set", "nothing", "istiod allocates addresses itself");
    }
}

/// The rules, which report to `merged`. A path such as `tracing.zipkin.address` names a member.
struct Rules<'a> {
    document: Value,
    merged: &'a mut Merged,
}

impl Rules<'_> {
    fn required(&mut self) {
        self.filled("configPath");
        self.filled("binaryPath");
        if self.get("tracingServiceName").is_none() {
            self.filled("serviceCluster");
        }
        let drain = self.merged.config.drain_time();
        let is_valid = !drain.is_zero() && drain.subsec_nanos() == 0;
        let expected = "a duration of whole seconds, at least 1s";
        self.expect(
            is_valid,
            "drainDuration",
            duration::seconds(drain),
            expected,
        );
        let (path, expected) = ("controlPlaneAuthPolicy", "NONE or MUTUAL_TLS");
        let policy = self.text(path);
        self.expect(policy != "INHERIT", path, policy, expected);
    }

    fn numbers(&mut self) {
        self.at_least("concurrency", 0);
        for (member, min) in MIN_CONNECTION_SETTINGS {
            self.at_least(&format!("connectionSettings.{member}"), min);
        }
        for path in ["proxyAdminPort", "statusPort"] {
            let port = self.get(path).and_then(Value::as_i64).unwrap_or_default();
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
            if self.get(tracer).is_some() {
                self.address(&format!("{tracer}.address"));
            }
        }
        if self.get("tracing.lightstep").is_some() {
            self.filled("tracing.lightstep.accessToken");
        }
    }

    /// Checks the tracer's certificate. pilot-agent does not check the TLS settings of other services, which
    /// are sent without a certificate if it is missing.
    fn tracing_tls(&mut self) {
        let has_credential = !self.text("tracing.tlsSettings.credentialName").is_empty();
        if self.text("tracing.tlsSettings.mode") == "MUTUAL" && !has_credential {
            self.filled("tracing.tlsSettings.clientCertificate");
            self.filled("tracing.tlsSettings.privateKey");
        }
    }

    fn key_provider(&mut self) {
        const PATH: &str = "privateKeyProvider";
        let Some(provider) = self.get(PATH).and_then(Value::as_object) else {
            return;
        };
        let Some(method) = provider.keys().next() else {
            return self.expect(false, PATH, "empty", "a provider: cryptomb or qat");
        };
        let path = format!("{PATH}.{method}.pollDelay");
        let delay = self.text(&path);
        let is_valid = !["", "0s"].contains(&&*delay);
        self.expect(is_valid, &path, delay, "a duration that is not zero");
    }

    fn filled(&mut self, path: &str) {
        let text = self.text(path);
        self.expect(!text.is_empty(), path, text, NOT_EMPTY);
    }

    /// Checks an address. The addresses of two tracers may contain the variable `$(HOST_IP)`.
    fn address(&mut self, path: &str) {
        let text = self.text(path);
        let is_valid = match path {
            "tracing.zipkin.address" | "tracing.datadog.address" => {
                address::is_valid(&text.replacen("$(HOST_IP)", "127.0.0.1", 1))
            }
            _ => address::is_valid(&text),
        };
        self.expect(is_valid, path, text, HOST_PORT);
    }

    /// Checks a number, which may be missing.
    fn at_least(&mut self, path: &str, min: i64) {
        if let Some(value) = self.get(path).and_then(Value::as_i64) {
            let expected = format!("a whole number, {min} or more");
            self.expect(value >= min, path, value, &expected);
        }
    }

    fn get(&self, path: &str) -> Option<&Value> {
        let pointer = format!("/{}", path.replace('.', "/"));
        self.document.pointer(&pointer)
    }

    fn text(&self, path: &str) -> String {
        let text = self.get(path).and_then(Value::as_str);
        text.unwrap_or_default().to_owned()
    }

    fn expect(&mut self, is_valid: bool, path: &str, found: impl Display, expected: &str) {
        if !is_valid {
            let (code, found) = (codes::SETTING_INVALID, found.to_string());
            self.merged.problem(code, path, &found, expected.to_owned());
        }
    }
}

#[cfg(test)]
mod tests;
