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
/// The smallest window HTTP/2 allows.
const SMALLEST_WINDOW: i64 = 65_535;

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
        for (names, least) in [
            (
                &[
                    "listenerPerConnectionBufferLimitBytes",
                    "clusterPerConnectionBufferLimitBytes",
                ][..],
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
                SMALLEST_WINDOW,
            ),
        ] {
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
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::config::schema::convert::tests as random;

    fn notes(text: &str) -> Notes {
        let mut notes = Notes::default();
        let mut document = Document::builtin();
        document.overlay_text("it", text, &mut notes);
        assert_eq!(notes.problems, [], "{text}");
        check(&document, &mut notes);
        notes
    }

    #[test]
    fn good_values_are_good() {
        for text in [
            "{}",
            "{tracingServiceName: APP_LABEL_AND_NAMESPACE}",
            "{discoveryAddress: 'istiod.:1', drainDuration: 1m}",
            "{tracing: {zipkin: {address: '$(HOST_IP):9411'}}}",
            "{tracing: {lightstep: {address: 'a:1', accessToken: t}, tlsSettings: {mode: SIMPLE}}}",
            "{tracing: {tlsSettings: {mode: MUTUAL, credentialName: c}}}",
            "{tracing: {tlsSettings: {mode: MUTUAL, clientCertificate: c, privateKey: k}}}",
            "{tracing: {stackdriver: {}}}",
            "{envoyMetricsService: {}, envoyMetricsServiceAddress: 'a:1'}",
            "{privateKeyProvider: {qat: {pollDelay: 1ms}}, controlPlaneAuthPolicy: NONE}",
            "{connectionSettings: {http2InitialStreamWindowSize: 65535, \
              listenerPerConnectionBufferLimitBytes: 0, httpMaxConcurrentStreams: 1}}",
            "{concurrency: 0}",
        ] {
            let notes = notes(text);
            assert_eq!((notes.problems, notes.warnings), (vec![], vec![]), "{text}");
        }
    }

    #[test]
    fn values_nobody_could_use_are_named_with_document_and_line() {
        for (text, path) in [
            ("{configPath: ''}", "configPath"),
            ("{binaryPath: ''}", "binaryPath"),
            ("{serviceCluster: ''}", "serviceCluster"),
            ("{drainDuration: 1500ms}", "drainDuration"),
            ("{drainDuration: 0s}", "drainDuration"),
            ("{discoveryAddress: istiod}", "discoveryAddress"),
            ("{discoveryAddress: 'a_b:1'}", "discoveryAddress"),
            ("{tracing: {zipkin: {}}}", "tracing.zipkin.address"),
            (
                "{tracing: {datadog: {address: x}}}",
                "tracing.datadog.address",
            ),
            (
                "{tracing: {lightstep: {address: '$(HOST_IP):1', accessToken: t}}}",
                "tracing.lightstep.address",
            ),
            (
                "{tracing: {lightstep: {address: 'a:1'}}}",
                "tracing.lightstep.accessToken",
            ),
            (
                "{tracing: {tlsSettings: {mode: MUTUAL, privateKey: k}}}",
                "tracing.tlsSettings.clientCertificate",
            ),
            (
                "{tracing: {tlsSettings: {mode: SIMPLE, credentialName: c, caCertificates: f}}}",
                "tracing.tlsSettings.caCertificates",
            ),
            (
                "{envoyMetricsService: {tlsSettings: {insecureSkipVerify: true, caCrl: f}}}",
                "envoyMetricsService.tlsSettings.caCrl",
            ),
            ("{statsdUdpAddress: a}", "statsdUdpAddress"),
            (
                "{envoyMetricsServiceAddress: a}",
                "envoyMetricsServiceAddress",
            ),
            (
                "{envoyMetricsService: {address: a}}",
                "envoyMetricsService.address",
            ),
            (
                "{envoyAccessLogService: {address: a}}",
                "envoyAccessLogService.address",
            ),
            ("{proxyAdminPort: 70000}", "proxyAdminPort"),
            ("{statusPort: 0}", "statusPort"),
            (
                "{controlPlaneAuthPolicy: INHERIT}",
                "controlPlaneAuthPolicy",
            ),
            ("{privateKeyProvider: {}}", "privateKeyProvider"),
            (
                "{privateKeyProvider: {qat: {}}}",
                "privateKeyProvider.qat.pollDelay",
            ),
            (
                "{connectionSettings: {http2InitialConnectionWindowSize: 65534}}",
                "connectionSettings.http2InitialConnectionWindowSize",
            ),
            (
                "{connectionSettings: {globalDownstreamConnectionLimit: 0}}",
                "connectionSettings.globalDownstreamConnectionLimit",
            ),
            (
                "{connectionSettings: {clusterPerConnectionBufferLimitBytes: -1}}",
                "connectionSettings.clusterPerConnectionBufferLimitBytes",
            ),
            ("{concurrency: -1}", "concurrency"),
        ] {
            let problems = notes(text).problems.into_iter();
            let subjects: Vec<_> = problems.map(|problem| problem.subject).collect();
            assert_eq!(subjects, [format!("{path} of it line 1")], "{text}");
        }
    }

    #[test]
    fn a_setting_that_is_out_of_date_is_a_warning() {
        let notes = notes("{proxyMetadata: {ISTIO_META_DNS_AUTO_ALLOCATE: 'true'}}");
        assert_eq!((notes.problems.len(), notes.warnings.len()), (0, 1));
    }

    #[test]
    fn the_line_is_that_of_the_member_or_of_what_should_contain_it() {
        let text = "tracing:\n  lightstep:\n    address:\n      x\nstatusPort: 0\n";
        let problems = notes(text).problems.into_iter();
        let subjects: Vec<_> = problems.map(|problem| problem.subject).collect();
        let expected = [
            "statusPort of it line 5",
            "tracing.lightstep.address of it line 4",
            "tracing.lightstep.accessToken of it line 3",
        ];
        assert_eq!(subjects, expected);
    }

    proptest! {
        #[test]
        fn any_document_is_used_or_refused_by_member(
            documents in prop::collection::vec(
                prop::collection::hash_map(random::name(), random::document(), 0..8),
                1..3,
            ),
        ) {
            let mut notes = Notes::default();
            let mut document = Document::builtin();
            for members in documents {
                let text = Value::Object(members.into_iter().collect()).to_string();
                document.overlay_text("it", &text, &mut notes);
            }
            notes.problems.clear();
            check(&document, &mut notes);
            if notes.problems.is_empty() {
                prop_assert!(document.read().status_port.is_some());
            }
            for problem in notes.problems {
                let (path, origin) = problem.subject.split_once(" of ").expect("an origin");
                prop_assert!(!path.is_empty());
                prop_assert!(origin == "default" || origin.starts_with("it line "), "{origin}");
            }
        }
    }
}
