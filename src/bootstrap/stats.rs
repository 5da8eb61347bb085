//! The statistics Envoy keeps and the tags it extracts from their names: what Istio's dashboards need,
//! and what the user adds.

use std::net::IpAddr;

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
    (
        "listener_address",
        r"^listener\.(((?:[_.[:digit:]]*|[_\[\]aAbBcCdDeEfF[:digit:]]*))\.)",
    ),
    (
        "mongo_prefix",
        r"^mongo\.(.+?)\.(collection|cmd|cx_|op_|delays_|decoding_)(.*?)$",
    ),
];

/// Tags after those of the user.
const LATER_TAGS: &[(&str, &str)] = &[
    ("cache", r"(cache\.(.+?)\.)"),
    ("component", r"(component\.(.+?)\.)"),
    ("tag", r"(tag\.(.+?);\.)"),
    ("wasm_filter", r"(wasm_filter\.(.+?)\.)"),
    ("authz_enforce_result", r"rbac(\.(allowed|denied))"),
    ("authz_dry_run_action", r"(\.istio_dry_run_(allow|deny)_)"),
    ("authz_dry_run_result", r"(\.shadow_(allowed|denied))"),
];

const PREFIXES: &[&str] = &[
    "cluster_manager",
    "listener_manager",
    "server",
    "cluster.xds-grpc",
    "wasm",
];

const SUFFIXES: &[&str] = &[
    "rbac.allowed",
    "rbac.denied",
    "shadow_allowed",
    "shadow_denied",
];

const EXPRESSIONS: &[&str] = &[r"vhost\..*\.route\..*"];

pub(super) fn section(config: &Config) -> Value {
    let tag = |name: &str, regex: &str| json!({ "tag_name": name, "regex": regex });
    let table = |tags: &[(&str, &str)]| -> Vec<Value> {
        tags.iter().map(|(name, regex)| tag(name, regex)).collect()
    };
    let mut tags = table(TAGS);
    let chosen = config.stats.tags.iter();
    tags.extend(chosen.map(|name| tag(name, &format!(r"({name}=\.=(.*?);\.;)"))));
    tags.extend(table(LATER_TAGS));
    let buckets = config.stats.buckets.iter();
    let buckets = buckets
        .map(|(prefix, buckets)| json!({ "match": { "prefix": prefix }, "buckets": buckets }));
    let buckets: Vec<_> = buckets.collect();
    json!({
        "use_all_default_tags": false,
        "stats_tags": tags,
        "stats_matcher": { "inclusion_list": { "patterns": patterns(config) } },
        "histogram_bucket_settings": (!buckets.is_empty()).then_some(buckets),
    })
}

fn patterns(config: &Config) -> Vec<Value> {
    let prefix = |text: &str| json!({ "prefix": text });
    let choice = &config.stats;
    let all = |chosen: &[String], required: &[&str]| {
        let chosen = chosen
            .iter()
            .flat_map(|text| per_address(text, &config.node.addresses));
        let required = required.iter().map(|text| (*text).to_owned());
        chosen.chain(required).collect::<Vec<_>>()
    };
    let discovery = config
        .metadata_discovery
        .then(|| prefix("workload_discovery"));
    let mut patterns = vec![prefix("reporter=")];
    patterns.extend(discovery);
    let prefixes = all(&choice.prefixes, PREFIXES);
    patterns.extend(prefixes.iter().map(|text| prefix(text)));
    let mut suffixes = all(&choice.suffixes, SUFFIXES);
    if config.exit_on_zero_connections {
        suffixes.push("downstream_cx_active".to_owned());
    }
    patterns.extend(suffixes.iter().map(|text| json!({ "suffix": text })));
    let chosen = [&choice.expressions[..], &choice.of_requests].concat();
    let expressions = all(&chosen, EXPRESSIONS);
    let expressions = expressions.iter();
    patterns.extend(expressions.map(|text| json!({ "safe_regex": { "regex": text } })));
    patterns.extend([prefix("component"), prefix("istio")]);
    patterns
}

/// The pattern once per address of the pod, if it names one.
fn per_address(pattern: &str, addresses: &[IpAddr]) -> Vec<String> {
    const PLACE: &str = "{pod_ip}";
    if !pattern.contains(PLACE) {
        return vec![pattern.to_owned()];
    }
    let addresses = addresses.iter();
    addresses
        .map(|address| pattern.replace(PLACE, &address.to_string()))
        .collect()
}
