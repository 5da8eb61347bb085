//! Tests the reading of valid, invalid and random documents.

use proptest::prelude::*;
use prost_reflect::ReflectMessage;
use serde_json::json;

use super::*;
use crate::problem::Diagnostics;

fn read(text: &str) -> (ProxyConfig, Diagnostics) {
    let mut notes = Diagnostics::default();
    let node = yaml::parse(text).expect("YAML").expect("an object");
    (members_of(&node, &mut notes), notes)
}

#[test]
fn a_value_is_written_in_one_form() {
    for (text, canonical) in [
        ("{status_port: '15021'}", json!({"statusPort": 15021})),
        ("{statusPort: 15021.0}", json!({"statusPort": 15021})),
        ("{statusPort: 1, status_port: 2}", json!({"statusPort": 1})),
        ("{statusPort: 0}", json!({})),
        ("{statusPort: null}", json!({})),
        (
            "{extraStatTags: [a, null], proxyMetadata: {A: null}, tracing: null}",
            json!({"extraStatTags": ["a", ""], "proxyMetadata": {"A": ""}}),
        ),
        ("{drainDuration: 1m30s}", json!({"drainDuration": "90s"})),
        ("{drainDuration: 100ms}", json!({"drainDuration": "0.100s"})),
        ("{interceptionMode: 1}", json!({"interceptionMode": "TPROXY"})),
        ("{statsCompression: off}", json!({"statsCompression": false})),
        ("{statsCompression: Yes}", json!({"statsCompression": true})),
        ("{tracing: {sampling: 5}}", json!({"tracing": {"sampling": 5}})),
        ("{tracing: {sampling: '0.5'}}", json!({"tracing": {"sampling": 0.5}})),
        ("{tracing: {sampling: 0}}", json!({"tracing": {}})),
        (
            "{tracing: {stackdriver: {max_number_of_attributes: 7, debug: false}}}",
            json!({"tracing": {"stackdriver": {"maxNumberOfAttributes": "7"}}}),
        ),
        (
            "{tracing: {custom_tags: {b_c: {literal: {value: x}}, a: {header: {}}}}}",
            json!({"tracing": {"customTags": {"a": {"header": {}}, "b_c": {"literal": {"value": "x"}}}}}),
        ),
        (
            "{tracing: {open_census_agent: {context: [B3, 1]}}}",
            json!({"tracing": {"openCensusAgent": {"context": ["B3", "W3C_TRACE_CONTEXT"]}}}),
        ),
        (
            "{sds: {k8s_sa_jwt_path: p}, proxyMetadata: {B: x, A: }}",
            json!({"proxyMetadata": {"A": "", "B": "x"}, "sds": {"k8sSaJwtPath": "p"}}),
        ),
        (
            "{connection_settings: {http2_initial_stream_window_size: 0, profile: EDGE}}",
            json!({"connectionSettings": {"profile": "EDGE", "http2InitialStreamWindowSize": 0}}),
        ),
        (
            "{tracing: {tlsSettings: {mode: DISABLE, insecureSkipVerify: false}}}",
            json!({"tracing": {"tlsSettings": {"insecureSkipVerify": false}}}),
        ),
        (
            "{gatewayTopology: {proxyProtocol: {}}, image: {}}",
            json!({"gatewayTopology": {"proxyProtocol": {}}, "image": {}}),
        ),
    ] {
        let (found, notes) = read(text);
        assert_eq!(notes.problems, [], "{text}");
        assert_eq!(Value::Object(found.document()), canonical, "{text}");
    }
}

#[test]
fn a_value_of_the_wrong_type_is_named_with_path_and_line() {
    for (text, report) in [
        (
            "statusPort: x",
            r#"statusPort of it line 1 is "x", expected a whole number from -2147483648 to 2147483647"#,
        ),
        (
            "a: 1\ntracing:\n  zipkin:\n    address: 5",
            r#"tracing.zipkin.address of it line 4 is the number 5, expected a string: put the value in quotes"#,
        ),
        (
            "drainDuration: 45",
            r#"drainDuration of it line 1 is the number 45, expected a duration such as 45s or 1m30s"#,
        ),
        (
            "\ninterceptionMode: OFTEN",
            r#"interceptionMode of it line 2 is "OFTEN", expected one of REDIRECT, TPROXY, NONE"#,
        ),
        (
            "extraStatTags:\n- a\n- yes",
            r#"extraStatTags[1] of it line 3 is the boolean true, expected a string: put the value in quotes"#,
        ),
        (
            "proxyMetadata:\n  PIN: 1234",
            r#"proxyMetadata.PIN of it line 2 is a number (not shown), expected a string: put the value in quotes"#,
        ),
        ("tracing: 5", r#"tracing of it line 1 is the number 5, expected an object"#),
        (
            "statsCompression: 'true'",
            r#"statsCompression of it line 1 is "true", expected true or false"#,
        ),
        (
            "fileFlushMinSizeKb: -1",
            r#"fileFlushMinSizeKb of it line 1 is the number -1, expected a whole number from 0 to 4294967295"#,
        ),
    ] {
        let (_, notes) = read(text);
        let reports: Vec<_> = notes.problems.iter().map(Problem::brief).collect();
        assert_eq!(reports, [report], "{text}");
    }
}

#[test]
fn a_member_without_effect_is_named_with_the_nearest_name() {
    let (found, notes) = read(
        "fromTheFuture: 1\ntracing:\n  sampling: 1\n  other: null\n  zipkn: {}\nmeshId: a\nmesh_id: b\n\
         serviceCluster: a\ntracingServiceName: CANONICAL_NAME_ONLY\ndiscoveryAdress: a:1\nstatus_prt: 1\nx_é: 1",
    );
    let canonical = json!({
        "tracingServiceName": "CANONICAL_NAME_ONLY",
        "tracing": {"sampling": 1},
        "meshId": "a",
    });
    assert_eq!(Value::Object(found.document()), canonical);
    assert_eq!(notes.problems, []);
    let warnings: Vec<_> = notes.warnings.iter().map(Problem::brief).collect();
    let expected = [
        "it line 1: unknown member fromTheFuture",
        "it line 7: member mesh_id gives way to another",
        "it line 8: member serviceCluster gives way to another",
        "it line 10: unknown member discoveryAdress (discoveryAddress?)",
        "it line 11: unknown member status_prt (statusPort?)",
        "it line 12: unknown member x_é",
        "it line 4: unknown member tracing.other",
        "it line 5: unknown member tracing.zipkn (zipkin?)",
    ];
    assert_eq!(warnings, expected);
}

#[test]
fn the_last_of_equal_keys_is_used_with_a_warning() {
    let (found, notes) = read(
        "meshId: a\nproxyMetadata: {c: '2', c: '3'}\nsds: {k8sSaJwtPath: '4',\n  k8sSaJwtPath: '5'}\n\
         <<: {meshId: '6'}\nmeshId: '7'",
    );
    let canonical = json!({
        "meshId": "7", "proxyMetadata": {"c": "3"}, "sds": {"k8sSaJwtPath": "5"},
    });
    assert_eq!(Value::Object(found.document()), canonical);
    let subjects: Vec<_> = notes.warnings.iter().map(|it| it.subject.as_str()).collect();
    assert_eq!(subjects, ["it line 6", "it line 4", "it line 2"]);
}

#[test]
fn debug_output_holds_no_token() {
    let document = json!({"tracing": {"lightstep": {"accessToken": "hush"}}});
    let config: ProxyConfig = from_json(&document);
    assert!(!format!("{config:?}").contains("hush"));
}

/// Generates any tree of YAML, written as JSON. Most names of members are known.
pub(crate) fn document() -> impl Strategy<Value = Value> {
    let scalar = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(|n| json!(n)),
        "\\PC{0,12}".prop_map(Value::from),
        prop_oneof![Just("10s"), Just("1"), Just("NONE"), Just("a:1")].prop_map(Value::from),
    ];
    scalar.prop_recursive(4, 48, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::hash_map(name(), inner, 0..8)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

/// Returns the names of the members of ProxyConfig.
fn members() -> Vec<String> {
    let config = dynamic(&ProxyConfig::default(), "ProxyConfig").expect("a definition");
    let message = config.descriptor();
    let names = message.fields().map(|field| field.json_name().to_owned());
    names.collect()
}

pub(crate) fn name() -> impl Strategy<Value = String> {
    let top = members();
    let inner = ["zipkin", "address", "tlsSettings", "mode", "httpGet", "port"];
    let known = top.into_iter().chain(inner.map(str::to_owned));
    prop_oneof![
        9 => prop::sample::select(known.collect::<Vec<_>>()),
        1 => "[a-zA-Z_]{1,8}",
    ]
}

proptest! {
    #[test]
    fn any_document_is_read_or_has_problems_with_member_and_line(
        members in prop::collection::hash_map(name(), document(), 0..8),
    ) {
        let names = self::members();
        let document = Value::Object(members.into_iter().collect());
        for text in [document.to_string(), format!("{document:#}")] {
            let Ok(Some(node)) = yaml::parse(&text) else { continue };
            let mut notes = Diagnostics::default();
            members_of(&node, &mut notes);
            for problem in notes.problems {
                let (path, line) = problem.subject.split_once(" of it line ").expect("a line");
                let top = path.split(['.', '[']).next().expect("a member");
                prop_assert!(names.iter().any(|name| name == top), "{path}");
                let line: usize = line.parse().expect("a number");
                prop_assert!((1..=text.lines().count()).contains(&line));
            }
        }
    }

    #[test]
    fn the_written_form_reads_back_as_itself(
        members in prop::collection::hash_map(name(), document(), 0..8),
    ) {
        let document = Value::Object(members.into_iter().collect()).to_string();
        let Ok(Some(node)) = yaml::parse(&document) else { return Ok(()) };
        let mut notes = Diagnostics::default();
        let once = members_of(&node, &mut notes);
        let text = Value::Object(once.document()).to_string();
        let node = yaml::parse(&text).expect("YAML").expect("an object");
        let mut notes = Diagnostics::default();
        prop_assert_eq!(members_of(&node, &mut notes), once);
        prop_assert_eq!(notes.problems, []);
    }
}

fn members_of(node: &Node, notes: &mut Diagnostics) -> ProxyConfig {
    let mut config = ProxyConfig::default();
    config.read("it", node, notes);
    config
}
