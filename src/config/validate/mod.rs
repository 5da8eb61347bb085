//! Which values of a ProxyConfig make sense.
//!
//! Looks at the effective document, so a value that a later document replaces does no harm. All
//! problems are reported, each with the document and line its member came from.
//!
//! Does not check types: what is here is of the right type.

use std::time::Duration;

use serde_json::Value;

use super::members::is_address;
use super::mesh::Document;
use super::{Notes, Problem, duration};

const ADDRESS: &str = "host:port with a port from 1 to 65535";
const NOT_EMPTY: &str = "a string that is not empty";

/// Members of `connectionSettings` and the least they may say. A window has a least size in HTTP/2.
const LEAST: [(&[&str], i64); 3] = [
    (
        &[
            "listenerPerConnectionBufferLimitBytes",
            "clusterPerConnectionBufferLimitBytes",
        ],
        0,
    ),
    (
        &[
            "httpMaxConcurrentStreams",
            "listenerConnectionLimit",
            "globalDownstreamConnectionLimit",
        ],
        1,
    ),
    (
        &[
            "http2InitialStreamWindowSize",
            "http2InitialConnectionWindowSize",
        ],
        65_535,
    ),
];

/// Reports what cannot be used, and warns of what is out of date.
pub(super) fn check(document: &Document, notes: &mut Notes) {
    let root = Value::Object(document.canonical());
    let mut rules = Rules {
        document,
        root: &root,
        problems: &mut notes.problems,
    };
    rules.required();
    rules.ports();
    rules.addresses();
    rules.tracing();
    rules.services();
    rules.key_provider();
    rules.connections();
    if root
        .pointer("/proxyMetadata/ISTIO_META_DNS_AUTO_ALLOCATE")
        .is_some()
    {
        let path = "proxyMetadata.ISTIO_META_DNS_AUTO_ALLOCATE";
        let expected = "nothing: istiod allocates addresses by itself";
        notes.warnings.push(document.problem(path, "set", expected));
    }
}

struct Rules<'a> {
    document: &'a Document,
    root: &'a Value,
    problems: &'a mut Vec<Problem>,
}

impl Rules<'_> {
    fn required(&mut self) {
        for name in ["configPath", "binaryPath"] {
            self.filled(name);
        }
        if self.at("tracingServiceName").is_none() {
            self.filled("serviceCluster");
        }
        let drain = self.duration("drainDuration").unwrap_or_default();
        if drain.is_zero() || drain.subsec_nanos() != 0 {
            self.problem("drainDuration", "a duration of whole seconds, at least 1s");
        }
        if self.text("controlPlaneAuthPolicy") == "INHERIT" {
            self.problem("controlPlaneAuthPolicy", "NONE or MUTUAL_TLS");
        }
        // A negative one would be lost without a word.
        if self
            .number("concurrency")
            .is_some_and(|threads| threads < 0)
        {
            self.problem("concurrency", "a whole number, 0 or more");
        }
    }

    fn ports(&mut self) {
        for name in ["proxyAdminPort", "statusPort"] {
            let port = self.number(name).unwrap_or_default();
            if !(1..=65535).contains(&port) {
                self.problem(name, "a port from 1 to 65535");
            }
        }
    }

    fn addresses(&mut self) {
        self.address("discoveryAddress", false);
        for name in ["statsdUdpAddress", "envoyMetricsServiceAddress"] {
            if !self.text(name).is_empty() {
                self.address(name, false);
            }
        }
    }

    fn tracing(&mut self) {
        for (tracer, may_be_host) in [("zipkin", true), ("datadog", true), ("lightstep", false)] {
            if self.at(&format!("tracing.{tracer}")).is_some() {
                self.address(&format!("tracing.{tracer}.address"), may_be_host);
            }
        }
        if self.at("tracing.lightstep").is_some() {
            self.filled("tracing.lightstep.accessToken");
        }
        self.tls("tracing.tlsSettings");
    }

    fn services(&mut self) {
        for name in ["envoyMetricsService", "envoyAccessLogService"] {
            let path = format!("{name}.address");
            if !self.text(&path).is_empty() {
                self.address(&path, false);
            }
            self.tls(&format!("{name}.tlsSettings"));
        }
    }

    fn tls(&mut self, path: &str) {
        let member = |name: &str| format!("{path}.{name}");
        let mode = self.text(&member("mode"));
        let by_credential = !self.text(&member("credentialName")).is_empty();
        let files = ["clientCertificate", "privateKey", "caCertificates", "caCrl"];
        if by_credential && matches!(mode.as_str(), "SIMPLE" | "MUTUAL") {
            self.absent(path, &files, "nothing beside a credentialName");
        } else if mode == "MUTUAL" {
            for name in ["clientCertificate", "privateKey"] {
                self.filled(&member(name));
            }
        }
        if self.at(&member("insecureSkipVerify")) == Some(&Value::Bool(true)) {
            self.absent(path, &files[2..], "nothing beside insecureSkipVerify");
        }
    }

    fn key_provider(&mut self) {
        let Some(provider) = self.at("privateKeyProvider").and_then(Value::as_object) else {
            return;
        };
        match provider.keys().next() {
            None => self.problem("privateKeyProvider", "a provider: cryptomb or qat"),
            Some(name) => {
                let path = format!("privateKeyProvider.{name}.pollDelay");
                if self.duration(&path).unwrap_or_default().is_zero() {
                    self.problem(&path, "a duration that is not zero");
                }
            }
        }
    }

    /// Durations cannot be negative here.
    fn connections(&mut self) {
        for (names, least) in LEAST {
            for name in names {
                let path = format!("connectionSettings.{name}");
                if self.number(&path).is_some_and(|number| number < least) {
                    self.problem(&path, &format!("a whole number, {least} or more"));
                }
            }
        }
    }

    fn filled(&mut self, path: &str) {
        if self.text(path).is_empty() {
            self.problem(path, NOT_EMPTY);
        }
    }

    fn absent(&mut self, path: &str, names: &[&str], expected: &str) {
        for name in names {
            let path = format!("{path}.{name}");
            if !self.text(&path).is_empty() {
                self.problem(&path, expected);
            }
        }
    }

    /// An address of a collector may name the host it runs on by a variable.
    fn address(&mut self, path: &str, may_be_host: bool) {
        let mut address = self.text(path);
        if may_be_host {
            address = address.replacen("$(HOST_IP)", "127.0.0.1", 1);
        }
        if !is_address(&address) {
            self.problem(path, ADDRESS);
        }
    }

    fn at(&self, path: &str) -> Option<&Value> {
        self.root.pointer(&format!("/{}", path.replace('.', "/")))
    }

    fn text(&self, path: &str) -> String {
        let text = self.at(path).and_then(Value::as_str);
        text.unwrap_or_default().to_owned()
    }

    fn number(&self, path: &str) -> Option<i64> {
        self.at(path)?.as_i64()
    }

    fn duration(&self, path: &str) -> Option<Duration> {
        duration::parse(self.at(path)?.as_str()?)
    }

    fn problem(&mut self, path: &str, expected: &str) {
        // Zero is not written, but may have been set.
        let found = match self.at(path).or_else(|| self.document.get(path)) {
            None => "not set".to_owned(),
            Some(Value::String(text)) => text.clone(),
            Some(Value::Object(members)) if members.is_empty() => "empty".to_owned(),
            Some(value) => value.to_string(),
        };
        let problem = self.document.problem(path, &found, expected);
        self.problems.push(problem);
    }
}

#[cfg(test)]
mod tests;
