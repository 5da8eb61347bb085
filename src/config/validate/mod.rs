//! Checks the values of a merged ProxyConfig. Values that a later document replaces are not checked.
//! Every problem is reported, with the document and line of the member.

use std::fmt::Display;

use serde_json::Value;

use super::HOST_PORT;
use super::merged::Merged;
use crate::net::address;
use crate::problem::Code;

/// The minimum values of members that may be missing. The minimum window sizes are HTTP/2's.
const MINIMA: [(&str, i64); 8] = [
    ("concurrency", 0),
    ("connectionSettings.listenerPerConnectionBufferLimitBytes", 0),
    ("connectionSettings.clusterPerConnectionBufferLimitBytes", 0),
    ("connectionSettings.httpMaxConcurrentStreams", 1),
    ("connectionSettings.listenerConnectionLimit", 1),
    ("connectionSettings.globalDownstreamConnectionLimit", 1),
    ("connectionSettings.http2InitialStreamWindowSize", 65_535),
    ("connectionSettings.http2InitialConnectionWindowSize", 65_535),
];

/// Reports values that cannot be used, and warns of outdated ones.
pub(super) fn check(merged: &mut Merged) {
    let mut rules = Rules { document: &merged.config.document().into(), merged };
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
    document: &'a Value,
    merged: &'a mut Merged,
}

impl<'a> Rules<'a> {
    fn required(&mut self) {
        self.filled("configPath");
        self.filled("binaryPath");
        if self.get("tracingServiceName").is_none() {
            self.filled("serviceCluster");
        }
        let expected = "a duration of whole seconds, at least 1s";
        // Protobuf's JSON writes a fraction only if there is one.
        self.text("drainDuration", expected, |text| {
            !["", "0s"].contains(&text) && !text.contains('.')
        });
        self.text("controlPlaneAuthPolicy", "NONE or MUTUAL_TLS", |text| text != "INHERIT");
    }

    fn numbers(&mut self) {
        for (path, min) in MINIMA {
            let number = self.number(path);
            let is_valid = number.is_none_or(|number| number >= min);
            let expected = format!("a whole number, {min} or more");
            self.expect(is_valid, path, number.unwrap_or_default(), &expected);
        }
        for path in ["proxyAdminPort", "statusPort"] {
            let port = self.number(path).unwrap_or_default();
            self.expect((1..=65535).contains(&port), path, port, "a port from 1 to 65535");
        }
    }

    fn addresses(&mut self) {
        self.text("discoveryAddress", HOST_PORT, address::is_valid);
        for path in [
            "envoyMetricsServiceAddress",
            "envoyMetricsService.address",
            "envoyAccessLogService.address",
        ] {
            self.text(path, HOST_PORT, |it| it.is_empty() || address::is_valid(it));
        }
        for tracer in ["tracing.zipkin", "tracing.datadog"] {
            if self.get(tracer).is_some() {
                self.text(&format!("{tracer}.address"), HOST_PORT, |text| {
                    address::is_valid(&text.replacen("$(HOST_IP)", "127.0.0.1", 1))
                });
            }
        }
        if self.get("tracing.lightstep").is_some() {
            self.text("tracing.lightstep.address", HOST_PORT, address::is_valid);
            self.filled("tracing.lightstep.accessToken");
        }
    }

    /// Checks the tracer's certificate. pilot-agent does not check the TLS settings of other services, which
    /// are sent without a certificate if it is missing.
    fn tracing_tls(&mut self) {
        let settings = &self.document["tracing"]["tlsSettings"];
        if settings["mode"] == "MUTUAL" && settings["credentialName"].is_null() {
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
        self.text(&path, "a duration that is not zero", |text: &str| !["", "0s"].contains(&text));
    }

    fn filled(&mut self, path: &str) {
        self.text(path, "a string that is not empty", |text| !text.is_empty());
    }

    /// Checks a text, which is empty if the member is missing.
    fn text(&mut self, path: &str, expected: &str, is_valid: impl Fn(&str) -> bool) {
        let text = self.get(path).and_then(Value::as_str).unwrap_or_default();
        self.expect(is_valid(text), path, text, expected);
    }

    fn number(&self, path: &str) -> Option<i64> {
        self.get(path)?.as_i64()
    }

    fn get(&self, path: &str) -> Option<&'a Value> {
        self.document.pointer(&format!("/{}", path.replace('.', "/")))
    }

    fn expect(&mut self, is_valid: bool, path: &str, found: impl Display, expected: &str) {
        if !is_valid {
            self.merged.problem(Code::SettingInvalid, path, found, expected.to_owned());
        }
    }
}

#[cfg(test)]
mod tests;
