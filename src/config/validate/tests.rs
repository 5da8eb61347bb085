//! Tests the validation of ProxyConfig with valid, invalid and random values.

use proptest::prelude::*;

use serde_json::Value;

use super::*;
use crate::problem::Diagnostics;
use crate::proxy_config::tests as random;

fn notes(text: &str) -> Diagnostics {
    let mut merged = Merged::builtin();
    merged.merge_text("it", text);
    assert_eq!(merged.notes.problems, [], "{text}");
    check(&mut merged);
    merged.notes
}

#[test]
fn valid_proxy_configs_are_accepted() {
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
fn unusable_values_are_named_with_document_and_line() {
    for (text, path) in [
        ("{configPath: ''}", "configPath"),
        ("{binaryPath: ''}", "binaryPath"),
        ("{serviceCluster: ''}", "serviceCluster"),
        ("{drainDuration: 1500ms}", "drainDuration"),
        ("{drainDuration: 0s}", "drainDuration"),
        ("{discoveryAddress: istiod}", "discoveryAddress"),
        ("{discoveryAddress: 'a_b:1'}", "discoveryAddress"),
        ("{tracing: {zipkin: {}}}", "tracing.zipkin.address"),
        ("{tracing: {datadog: {address: x}}}", "tracing.datadog.address"),
        (
            "{tracing: {lightstep: {address: '$(HOST_IP):1', accessToken: t}}}",
            "tracing.lightstep.address",
        ),
        ("{tracing: {lightstep: {address: 'a:1'}}}", "tracing.lightstep.accessToken"),
        (
            "{tracing: {tlsSettings: {mode: MUTUAL, privateKey: k}}}",
            "tracing.tlsSettings.clientCertificate",
        ),
        (
            "{tracing: {tlsSettings: {mode: MUTUAL, clientCertificate: c}}}",
            "tracing.tlsSettings.privateKey",
        ),
        ("{envoyMetricsServiceAddress: a}", "envoyMetricsServiceAddress"),
        ("{envoyMetricsService: {address: a}}", "envoyMetricsService.address"),
        ("{envoyAccessLogService: {address: a}}", "envoyAccessLogService.address"),
        ("{proxyAdminPort: 70000}", "proxyAdminPort"),
        ("{statusPort: 0}", "statusPort"),
        ("{controlPlaneAuthPolicy: INHERIT}", "controlPlaneAuthPolicy"),
        ("{privateKeyProvider: {}}", "privateKeyProvider"),
        ("{privateKeyProvider: {qat: {}}}", "privateKeyProvider.qat.pollDelay"),
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
fn an_outdated_setting_is_a_warning() {
    let notes = notes("{proxyMetadata: {ISTIO_META_DNS_AUTO_ALLOCATE: 'true'}}");
    assert_eq!((notes.problems.len(), notes.warnings.len()), (0, 1));
}

#[test]
fn the_line_is_that_of_the_member_or_of_its_parent() {
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
    fn an_arbitrary_document_is_accepted_or_its_invalid_members_are_named(
        documents in prop::collection::vec(
            prop::collection::hash_map(random::name(), random::document(), 0..8),
            1..3,
        ),
    ) {
        let mut merged = Merged::builtin();
        for members in documents {
            let text = Value::Object(members.into_iter().collect()).to_string();
            merged.merge_text("it", &text);
        }
        merged.notes.problems.clear();
        check(&mut merged);
        if merged.notes.problems.is_empty() {
            prop_assert!(merged.config.agent_port().is_some());
        }
        for problem in merged.notes.problems {
            let (path, origin) = problem.subject.split_once(" of ").expect("an origin");
            prop_assert!(!path.is_empty());
            prop_assert!(origin == "default" || origin.starts_with("it line "), "{origin}");
        }
    }
}
