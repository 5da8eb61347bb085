//! Which statistics Envoy keeps, and the tags it cuts out of their names.
//!
//! The lists are those Istio's dashboards rely on.
//!
//! Does not know about tags or inclusions a user configures.

use serde_json::{Value, json};

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

pub fn section(metadata_discovery: bool) -> Value {
    let tags = TAGS
        .iter()
        .map(|(name, regex)| json!({ "tag_name": name, "regex": regex }));
    json!({
        "use_all_default_tags": false,
        "stats_tags": tags.collect::<Vec<_>>(),
        "stats_matcher": { "inclusion_list": { "patterns": patterns(metadata_discovery) } },
    })
}

fn patterns(metadata_discovery: bool) -> Vec<Value> {
    let prefix = |text: &str| json!({ "prefix": text });
    let mut patterns = vec![prefix("reporter=")];
    if metadata_discovery {
        patterns.push(prefix("workload_discovery"));
    }
    patterns.extend(PREFIXES.iter().map(|text| prefix(text)));
    patterns.extend(SUFFIXES.iter().map(|text| json!({ "suffix": text })));
    let expressions = EXPRESSIONS.iter();
    patterns.extend(expressions.map(|text| json!({ "safe_regex": { "regex": text } })));
    patterns.extend([prefix("component"), prefix("istio")]);
    patterns
}
