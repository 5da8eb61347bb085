//! Selects the statistics that Envoy collects and the tags that it extracts from their names: what Istio's
//! dashboards need, and what the user adds.

use std::net::IpAddr;

use indexmap::IndexSet;
use serde_json::{Value, json};

use super::config::Config;

/// Tag names and the expressions that find them, in the order Envoy tries them.
const TAGS: &[(&str, &str)] = &[
    ("cluster_name", r"^cluster(\.(.+);)"),
    (
        "http_conn_manager_prefix",
        r"^http\.(((?:[_.[:digit:]\w]*|[_\[\]aAbBcCdDeEfF[:digit:]\w\:]*));\.)",
    ),
    ("thread_name", r"^server(\.(.+))\.watchdog"),
    ("tcp_prefix", r"^tcp\.((.*?)\.)\w+?$"),
    ("response_code", r"_rq(_(\d{3}))$"),
    ("response_code_class", r"_rq(_(\dxx))$"),
    (
        "http_conn_manager_listener_prefix",
        r"^listener(?=\.).*?\.http\.(((?:[_.[:digit:]]*|[_\[\]aAbBcCdDeEfF[:digit:]]*))\.)",
    ),
    ("listener_address", r"^listener\.(((?:[_.[:digit:]]*|[_\[\]aAbBcCdDeEfF[:digit:]]*))\.)"),
    ("mongo_prefix", r"^mongo\.(.+?)\.(collection|cmd|cx_|op_|delays_|decoding_)(.*?)$"),
];

/// The tags that Envoy tries after the tags of the user.
const LATER_TAGS: &[(&str, &str)] = &[
    ("cache", r"(cache\.(.+?)\.)"),
    ("component", r"(component\.(.+?)\.)"),
    ("tag", r"(tag\.(.+?);\.)"),
    ("wasm_filter", r"(wasm_filter\.(.+?)\.)"),
    ("authz_enforce_result", r"rbac(\.(allowed|denied))"),
    ("authz_dry_run_action", r"(\.istio_dry_run_(allow|deny)_)"),
    ("authz_dry_run_result", r"(\.shadow_(allowed|denied))"),
];

const PREFIXES: &[&str] =
    &["cluster_manager", "listener_manager", "server", "cluster.xds-grpc", "wasm"];

const SUFFIXES: &[&str] = &["rbac.allowed", "rbac.denied", "shadow_allowed", "shadow_denied"];

const EXPRESSIONS: &[&str] = &[r"vhost\..*\.route\..*"];

pub(super) fn section(config: &Config) -> Value {
    let mut tags = table(TAGS);
    tags.extend(config.stats.tags.iter().map(|name| tag(name, &format!(r"({name}=\.=(.*?);\.;)"))));
    tags.extend(table(LATER_TAGS));
    let buckets = config.stats.buckets.iter();
    let settings: Vec<_> = buckets
        .map(|(prefix, buckets)| json!({ "match": { "prefix": prefix }, "buckets": buckets }))
        .collect();
    json!({
        "use_all_default_tags": false,
        "stats_tags": tags,
        "stats_matcher": { "inclusion_list": { "patterns": patterns(config) } },
        "histogram_bucket_settings": (!settings.is_empty()).then_some(settings),
    })
}

fn table(tags: &[(&str, &str)]) -> Vec<Value> {
    tags.iter().map(|(name, regex)| tag(name, regex)).collect()
}

fn tag(name: &str, regex: &str) -> Value {
    json!({ "tag_name": name, "regex": regex })
}

fn patterns(config: &Config) -> Vec<Value> {
    let stats = &config.stats;
    let ips = &config.node.addresses;
    let mut patterns = vec![json!({ "prefix": "reporter=" })];
    if config.metadata_discovery {
        patterns.push(json!({ "prefix": "workload_discovery" }));
    }
    patterns.extend(expand(&stats.prefixes, PREFIXES, ips).map(|text| json!({ "prefix": text })));
    patterns.extend(expand(&stats.suffixes, SUFFIXES, ips).map(|text| json!({ "suffix": text })));
    if config.exit_on_zero_connections {
        patterns.push(json!({ "suffix": "downstream_cx_active" }));
    }
    let chosen = [&stats.expressions[..], &stats.in_flight_expressions].concat();
    let expressions = expand(&chosen, EXPRESSIONS, ips);
    patterns.extend(expressions.map(|text| json!({ "safe_regex": { "regex": text } })));
    patterns.extend(["component", "istio"].map(|text| json!({ "prefix": text })));
    patterns
}

/// Lists the user's patterns, then Istio's. A pattern with `{pod_ip}` is repeated for each address of the pod.
fn expand(chosen: &[String], required: &[&str], ips: &[IpAddr]) -> impl Iterator<Item = String> {
    let chosen = chosen.iter().flat_map(move |text| {
        ips.iter().map(|ip| text.replace("{pod_ip}", &ip.to_string())).collect::<IndexSet<_>>()
    });
    chosen.chain(required.iter().map(|text| (*text).to_owned()))
}
