//! Tests the parser for the output of `nft -j list ruleset`. `cli::iptables::tests` reads rules from the kernel.

use super::*;
use proptest::prelude::*;

const NAT: &str = "istio-proxy-nat";

fn live(objects: &[Value]) -> [Layout; 2] {
    let text = json!({"nftables": objects}).to_string();
    [Family::V4, Family::V6].map(|family| parse(text.as_bytes(), family).expect("a rule set"))
}

fn output(change: impl FnOnce(&mut Value)) -> Value {
    let mut chain = json!({
        "family": "inet", "table": NAT, "name": "output", "handle": 2,
        "type": "nat", "hook": "output", "prio": -100, "policy": "accept",
    });
    change(&mut chain);
    json!({ "chain": chain })
}

fn rule(expr: &Value) -> Value {
    json!({"rule": {"family": "inet", "table": NAT, "chain": "output", "handle": 3, "expr": expr}})
}

fn entries(expr: &Value) -> [Vec<Entry>; 2] {
    live(&[output(|_| ()), rule(expr)])
        .map(|layout| layout.chains[&(Table::Nat, Chain::Output)].clone())
}

#[test]
fn a_chain_with_another_hook_priority_type_or_policy_is_unknown() {
    let [v4, v6] = live(&[output(|_| ())]);
    assert!(v4.chains.contains_key(&(Table::Nat, Chain::Output)));
    assert!(v6.unknown_chains.is_empty());
    for (member, value) in [
        ("hook", json!("input")),
        ("hook", Value::Null),
        ("prio", json!(-99)),
        ("type", json!("filter")),
        ("policy", json!("drop")),
        ("name", json!("istio-new")),
    ] {
        let chain = output(|chain| chain[member] = value.clone());
        let [v4, v6] = live(&[chain, rule(&json!([{"return": null}]))]);
        assert!(v4.chains.is_empty(), "{member}: {value}");
        assert_eq!(v4.unknown_chains.len(), 1);
        assert_eq!(v6, v4);
    }
    for (member, value) in [("family", "ip"), ("table", "nat")] {
        let of_others = output(|chain| chain[member] = json!(value));
        assert_eq!(live(&[of_others]), [Layout::default(), Layout::default()]);
    }
}

#[test]
fn a_rule_is_of_one_family_or_both() {
    let both = entries(&json!([{"counter": {"packets": 1, "bytes": 2}}, {"return": null}]));
    let expected = [Entry::rule(Vec::new(), Verdict::Return)];
    assert_eq!(both, [&expected[..], &expected[..]]);
    let nfproto =
        json!({"match": {"op": "==", "left": {"meta": {"key": "nfproto"}}, "right": "ipv6"}});
    assert_eq!(entries(&json!([nfproto, {"return": null}])), [&[], &expected[..]]);
    let source = |protocol: &str, address: &str| {
        let left = json!({"payload": {"protocol": protocol, "field": "saddr"}});
        json!({"match": {"op": "==", "left": left, "right": address}})
    };
    let [v4, v6] = entries(&json!([source("ip", "127.0.0.6"), {"return": null}]));
    assert_eq!((v4.len(), v6.len()), (1, 0));
}

#[test]
fn a_protocol_may_be_a_number() {
    for (tcp, udp) in [(json!("tcp"), json!("udp")), (json!(6), json!(17))] {
        for (value, protocol) in [(tcp, Protocol::Tcp), (udp, Protocol::Udp)] {
            let left = json!({"meta": {"key": "l4proto"}});
            let condition = json!({"match": {"op": "==", "left": left, "right": value}});
            let [v4, _] = entries(&json!([condition, {"return": null}]));
            let expected = vec![Match::Is(Criterion::Protocol(protocol))];
            assert_eq!(v4, [Entry::rule(expected, Verdict::Return)]);
        }
    }
}

#[test]
fn an_nft_rule_with_an_unsupported_expression_is_foreign() {
    let matched = |op: &str, left: Value, right: Value| json!([{"match": {"op": op, "left": left, "right": right}}, {"return": null}]);
    let port = || json!({"payload": {"protocol": "tcp", "field": "dport"}});
    let address = || json!({"payload": {"protocol": "ip", "field": "daddr"}});
    let prefix = |length: u8| json!({"prefix": {"addr": "10.0.0.0", "len": length}});
    let meta = |key: &str| json!({"meta": {"key": key}});
    for expr in [
        Value::Null,
        json!([]),
        json!({"return": null}),
        json!([{"return": null}, {"return": null}]),
        json!([{"log": null}, {"return": null}]),
        json!([{"redirect": {"port": 15001, "flags": "random"}}]),
        json!([{"redirect": {"port": 65536}}]),
        json!([{"jump": {"target": "others"}}]),
        json!([{"reject": {"type": "icmpx"}}]),
        json!([{"mangle": {"key": {"ct": {"key": "zone"}}, "value": 65536}}]),
        json!([{"tproxy": {"family": "ip", "port": 1}}, {"accept": null}]),
        matched("<", port(), json!(80)),
        matched("==", port(), json!({"set": [80, "http"]})),
        matched("==", port(), json!({"range": [80]})),
        matched("==", address(), prefix(33)),
        matched("==", address(), json!("host")),
        matched("==", meta("skuid"), json!("root")),
        matched("!=", meta("nfproto"), json!("ipv6")),
        matched("==", meta("length"), json!(5)),
        // A match after the statement of the action.
        json!([{"mangle": {"key": meta("mark"), "value": 1}},
            {"match": {"op": "==", "left": meta("mark"), "right": 1}}]),
    ] {
        let [v4, v6] = entries(&expr);
        assert!(matches!(&v4[..], [Entry::Foreign(_)]), "{expr}: {v4:?}");
        assert_eq!(v4, v6);
    }
}

#[test]
fn output_that_is_not_a_rule_set_is_an_error() {
    for text in ["", "{}", "[]", "nonsense", "{\"nftables\": 1}", "{\"nftables\": [", "\u{0}"] {
        assert!(parse(text.as_bytes(), Family::V4).is_err(), "{text}");
    }
}

/// Generates JSON with the words of nft's expressions.
fn expression() -> impl Strategy<Value = Value> {
    let scalar = prop_oneof![
        Just(Value::Null),
        any::<u32>().prop_map(|number| json!(number)),
        any::<i64>().prop_map(|number| json!(number)),
        "ipv?[46]?|tcp|udp|mark|state|zone|[ds]port|[ds]addr|[io]ifname|skuid|nfproto|10.0.0.1|::1|[!=]=|in"
            .prop_map(|text| json!(text)),
    ];
    let name = "match|op|left|right|meta|ct|payload|key|protocol|field|prefix|addr|len|range|set|value|\
                mangle|tproxy|family|port|return|accept|jump|target|counter";
    scalar.prop_recursive(5, 40, 4, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::Array),
            prop::collection::vec((name, inner), 0..4)
                .prop_map(|members| Value::Object(members.into_iter().collect())),
        ]
    })
}

/// Generates the expressions of a rule: a match, `return`, and any expression.
fn condition() -> impl Strategy<Value = Value> {
    let key = "mark|state|zone|[io]ifname|sk[ug]id|nfproto|l4proto";
    let left = prop_oneof![
        ("meta|ct", key).prop_map(|(object, key)| json!({ object: {"key": key} })),
        ("ip6?|tcp|udp", "[sd](port|addr)").prop_map(
            |(protocol, field)| json!({"payload": {"protocol": protocol, "field": field}})
        ),
    ];
    let numbers = (any::<u32>(), any::<u32>());
    let right = prop_oneof![
        expression(),
        numbers.prop_map(|(first, last)| json!({"range": [first, last]})),
        numbers.prop_map(|(first, last)| json!({"set": [first, {"range": [first, last]}]})),
        ("10.0.0.1|::1|", any::<u8>())
            .prop_map(|(addr, len)| json!({"prefix": {"addr": addr, "len": len}})),
    ];
    ("[!=]=|in", left, right, expression()).prop_map(|(op, left, right, verdict)| {
        json!([{"match": {"op": op, "left": left, "right": right}}, {"return": null}, verdict])
    })
}

proptest! {
    #[test]
    fn live_rules_of_any_text_are_read_or_refused(text in prop_oneof![
        any::<Vec<u8>>(),
        expression().prop_map(|value| json!({"nftables": [value]}).to_string().into_bytes()),
    ]) {
        let _ = parse(&text, Family::V4);
    }

    #[test]
    fn a_live_rule_of_any_expression_is_one_entry(
        mut expr in prop_oneof![expression(), condition()],
        is_whole in any::<bool>(),
    ) {
        if let (false, Some(statements)) = (is_whole, expr.as_array_mut()) {
            statements.truncate(2);
        }
        let [v4, v6] = entries(&expr);
        prop_assert!(v4.len() <= 1 && v6.len() <= 1 && v4.len() + v6.len() >= 1);
    }
}
