//! Tests how the documents and other sources of ProxyConfig are merged.

use std::time::Duration;

use serde_json::{Map, Value, json};

use super::*;
use crate::proxy_config::time;

fn merged(documents: &[&str]) -> Merged {
    let mut merged = Merged::builtin();
    for (index, text) in documents.iter().enumerate() {
        merged.merge_text(&format!("document {index}"), text);
    }
    merged
}

fn canonical(documents: &[&str]) -> Map<String, Value> {
    let merged = merged(documents);
    assert_eq!(merged.notes.problems, [], "{documents:?}");
    merged.config.document()
}

#[test]
fn empty_documents_change_nothing() {
    let merged = merged(&["", "{}\n", "null", "# only a comment\n"]);
    assert_eq!(merged.notes.problems, []);
    let config = merged.config;
    assert_eq!(config.discovery_address, "istiod.istio-system.svc:15012");
    assert_eq!(config.drain_time(), Duration::from_secs(45));
    assert_eq!(config.document().len(), 10);
}

#[test]
fn each_proxy_config_member_is_merged_by_its_own_rule() {
    for (documents, name, expected) in [
        (
            ["tracing: {zipkin: {address: a:1}}", "tracing: {sampling: 5}"],
            "tracing",
            json!({"sampling": 5}),
        ),
        (
            ["proxyMetadata: {C: '1', B: '1'}", "proxyMetadata: {B: '2', A: '2'}"],
            "proxyMetadata",
            json!({"A": "2", "B": "2", "C": "1"}),
        ),
        (["concurrency: 2", "concurrency: null"], "concurrency", json!(2)),
        (["concurrency: 2", "concurrency: 0"], "concurrency", json!(0)),
        (["statusPort: 2", "statusPort: 0"], "statusPort", Value::Null),
        (["extraStatTags: [a]", "extraStatTags: [b]"], "extraStatTags", json!(["b"])),
        (["extraStatTags: [a]", "extraStatTags: []"], "extraStatTags", Value::Null),
        (
            ["runtimeValues: {a: '1'}", "runtimeValues: {b: '1'}"],
            "runtimeValues",
            json!({"b": "1"}),
        ),
        (
            [
                "proxyHeaders: {requestId: {disabled: true}, server: {value: a}, \
                 forwardedClientCert: SANITIZE, xForwardedHost: {enabled: true}}",
                "proxyHeaders: {server: {disabled: true}, attemptCount: {}}",
            ],
            "proxyHeaders",
            json!({
                "server": {"disabled": true},
                "attemptCount": {},
                "forwardedClientCert": "SANITIZE",
                "requestId": {"disabled": true},
            }),
        ),
        (
            ["serviceCluster: a", "tracingServiceName: APP_LABEL_AND_NAMESPACE"],
            "serviceCluster",
            Value::Null,
        ),
        (
            ["tracingServiceName: CANONICAL_NAME_ONLY", "serviceCluster: a"],
            "tracingServiceName",
            Value::Null,
        ),
        (["controlPlaneAuthPolicy: NONE", "{}"], "controlPlaneAuthPolicy", Value::Null),
    ] {
        let found = canonical(&documents);
        let found = found.get(name).unwrap_or(&Value::Null);
        assert_eq!(found, &expected, "{documents:?}");
    }
}

#[test]
fn a_oneof_is_written_even_when_it_is_zero() {
    let found = canonical(&["tracingServiceName: 0"]);
    assert_eq!(found["tracingServiceName"], "APP_LABEL_AND_NAMESPACE");
    assert!(!found.contains_key("serviceCluster"));
    assert_eq!(canonical(&["serviceCluster: ''"])["serviceCluster"], "");
}

#[test]
fn the_members_the_agent_uses_have_types() {
    let text = "{controlPlaneAuthPolicy: 0, status_port: '2', drain_duration: 1m30s, \
                fileFlushInterval: 10ms, customConfigFile: a.json, concurrency: 3}";
    let config = merged(&[text]).config;
    assert!(config.is_plaintext());
    assert_eq!(config.agent_port(), Some(2));
    assert_eq!(config.drain_time(), Duration::from_secs(90));
    assert_eq!(time(config.file_flush_interval), Some(Duration::from_millis(10)));
    assert_eq!(config.custom_config_file, "a.json");
    assert_eq!(config.concurrency, Some(3));
    assert_eq!(config.document()["drainDuration"], "90s");
}

#[test]
fn every_wrong_member_is_named_with_its_document_and_line() {
    let merged = merged(&[
        "drainDuration: 1\nstatusPort: x",
        "\nproxyMetadata: {A: true}\ncontrolPlaneAuthPolicy: MAYBE",
        "- 1",
    ]);
    let problems = merged.notes.problems.into_iter();
    let subjects: Vec<_> = problems.map(|problem| problem.subject).collect();
    assert_eq!(
        subjects,
        [
            "drainDuration of document 0 line 1",
            "statusPort of document 0 line 2",
            "controlPlaneAuthPolicy of document 1 line 3",
            "proxyMetadata.A of document 1 line 2",
            "document 2 line 1",
        ]
    );
}

#[test]
fn merged_members_keep_their_document_and_line() {
    let merged = merged(&["statusPort: 1\ndrainDuration: 1s", "\nstatusPort: 2"]);
    assert_eq!(merged.origins.find("statusPort"), "document 1 line 2");
    assert_eq!(merged.origins.find("drainDuration"), "document 0 line 2");
    assert_eq!(merged.origins.find("proxyAdminPort"), "default");
}

#[test]
fn the_concurrency_flag_overrides_documents_and_these_override_the_cpu_limit() {
    for (document, variable, flag, threads) in [
        ("{}", 0, 0, None),
        ("{}", 4, 0, Some(4)),
        ("{concurrency: 3}", 4, 0, Some(3)),
        ("{concurrency: 0}", 4, 0, Some(0)),
        ("{concurrency: 3}", 4, 5, Some(5)),
        ("{}", 0, 5, Some(5)),
    ] {
        let mut merged = merged(&[document]);
        set_threads(&mut merged, flag, variable);
        assert_eq!(merged.config.concurrency, threads, "{document} {variable}");
        let warnings = merged.notes.warnings.len();
        assert_eq!(warnings, usize::from(flag != 0), "{document}");
    }
}

#[test]
fn the_log_shows_no_secrets() {
    let text = "{proxyMetadata: {TOKEN: hush, ISTIO_META_A: a}, \
                tracing: {lightstep: {accessToken: hush, address: 'a:1'}}, \
                readinessProbe: {httpGet: {httpHeaders: [{name: a, value: hush}]}}}";
    let merged = merged(&[text]);
    let text = Value::from(merged.config.printable()).to_string();
    assert!(!text.contains("hush") && text.contains("a:1"), "{text}");
}
