//! The resources that a kind of request needs.

use std::net::SocketAddr;

use serde_json::{Value, json};

use super::traffic::{Client, TLS};
use crate::support::resources::{cluster, endpoints, listener, logged, routes};

const LINE: &str = "%PROTOCOL% %REQ(:METHOD)% %RESPONSE_CODE% %RESPONSE_FLAGS% %UPSTREAM_CLUSTER% %UPSTREAM_HOST% \
                    %RESPONSE_CODE_DETAILS% %CONNECTION_TERMINATION_DETAILS% %UPSTREAM_TRANSPORT_FAILURE_REASON% \
                    %UPSTREAM_REQUEST_ATTEMPT_COUNT% %BYTES_RECEIVED% %BYTES_SENT% %ROUTE_NAME%";
pub(super) const EXTENSIONS: &str = "type.googleapis.com/envoy.extensions";

/// The last case whose log is compared.
pub(super) const END: &str = "end";
pub(super) const LISTENER_REPLACED: &str = "listener replaced";
pub(super) const ROUTES_REPLACED: &str = "routes replaced";

/// A kind of request: its name, a text that the result contains with the mode off, the changes of its resources, and its
/// client.
///
/// The changes are JSON merge patches: of the objects `listener`, `chain`, `manager` (HTTP connection manager), `tcp` (a
/// TCP proxy instead of the manager), `host` (virtual host), `entry` (the route), `route` (its action), `cluster` and
/// `endpoints` (of the first service). `filters` are HTTP filters, `first` are routes before the route. `@1` and `@2` are
/// the clusters of the two services, `@3` is the name of a missing cluster, `@log` is the file of the access log.
pub(super) type Case = (&'static str, &'static str, Value, Client);

/// Applies a patch: objects are merged, and null removes a member.
pub(super) fn merge(value: &mut Value, patch: &Value) {
    let (Value::Object(object), Value::Object(patch)) = (&mut *value, patch) else {
        value.clone_from(patch);
        return;
    };
    for (key, patch) in patch {
        match object.get_mut(key) {
            Some(_) if patch.is_null() => drop(object.remove(key)),
            Some(value) => merge(value, patch),
            None => drop(object.insert(key.clone(), patch.clone())),
        }
    }
}

/// Returns the cluster of one of a case's services.
pub(super) fn service(case: &str, number: &str) -> String {
    format!("outbound|80||{}-{number}.shop.svc.cluster.local", case.replace(' ', "_"))
}

/// Returns the resources of a case.
pub(super) fn resources(
    (name, _, changes, _): &Case,
    address: SocketAddr,
    log: &str,
    ports: [u16; 2],
) -> Vec<Value> {
    let patched = |mut value: Value, key: &str| {
        merge(&mut value, changes.get(key).unwrap_or(&json!({})));
        value
    };
    let mut table = routes(name, "@1", "table");
    table["validate_clusters"] = json!(false);
    let mut host = patched(table["virtual_hosts"][0].take(), "host");
    host["include_request_attempt_count"] = json!(true);
    let mut entry = host["routes"][0].take();
    entry["name"] = json!("main");
    entry["route"] = patched(entry["route"].take(), "route");
    let mut entries = changes.get("first").and_then(Value::as_array).cloned().unwrap_or_default();
    entries.push(patched(entry, "entry"));
    host["routes"] = json!(entries);
    table["virtual_hosts"] = json!([host]);

    let mut listener = listener(name, address.port(), name);
    if changes.get("tcp").is_some() {
        let kind = format!("{EXTENSIONS}.filters.network.tcp_proxy.v3.TcpProxy");
        let proxy = json!({ "@type": kind, "stat_prefix": "@1", "cluster": "@1" });
        listener["filter_chains"] =
            json!([{ "filters": [{ "name": "tcp", "typed_config": proxy }] }]);
    }
    let mut listener = logged(listener, "@log", &format!("{name}: {LINE}\n"));
    listener["traffic_direction"] = json!("OUTBOUND");
    listener["address"]["socket_address"]["address"] = json!(address.ip());
    let manager = &mut listener["filter_chains"][0]["filters"][0]["typed_config"];
    *manager = patched(patched(manager.take(), "manager"), "tcp");
    if let Some(filters) = changes.get("filters") {
        let router = manager["http_filters"][0].take();
        let filters = filters.as_array().unwrap().iter().cloned().chain([router]);
        manager["http_filters"] = filters.collect();
    }
    listener["filter_chains"][0] = patched(listener["filter_chains"][0].take(), "chain");
    let resources = json!([
        patched(listener, "listener"),
        table,
        patched(cluster("@1"), "cluster"),
        cluster("@2"),
        patched(endpoints("@1", &ports[..1]), "endpoints"),
        endpoints("@2", &ports[1..]),
    ]);
    let mut text = resources.to_string().replace("@log", log);
    for number in ["1", "2", "3"] {
        text = text.replace(&format!("@{number}"), &service(name, number));
    }
    serde_json::from_str(&text).unwrap()
}

/// Returns a filter, whose type is in the package of HTTP filters.
pub(super) fn http_filter(kind: &str, mut config: Value) -> Value {
    config["@type"] = json!(format!("{EXTENSIONS}.filters.http.{kind}"));
    json!({ "name": kind, "typed_config": config })
}

pub(super) fn listener_filter(kind: &str) -> Value {
    json!({ "name": kind, "typed_config": { "@type": format!("{EXTENSIONS}.filters.listener.{kind}") } })
}

pub(super) fn lua(code: &str) -> Value {
    let code = format!("function envoy_on_request(handle)\n{code}\nend");
    json!({ "filters": [http_filter("lua.v3.Lua", json!({ "default_source_code": { "inline_string": code } }))] })
}

/// Returns the changes for a cluster with HTTP/2.
pub(super) fn to_http2() -> Value {
    let kind = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions";
    json!({ "cluster": { "typed_extension_protocol_options": { kind: {
        "@type": format!("type.googleapis.com/{kind}"),
        "explicit_http_config": { "http2_protocol_options": {} },
    } } } })
}

/// Returns the changes for a cluster with TLS, whose certificate must have this name.
pub(super) fn to_tls(name: &str) -> Value {
    let validation = json!({
        "trusted_ca": { "inline_string": TLS.0 },
        "match_typed_subject_alt_names": [{ "san_type": "DNS", "matcher": { "exact": name } }],
    });
    json!({ "cluster": { "transport_socket": { "name": "tls", "typed_config": {
        "@type": format!("{EXTENSIONS}.transport_sockets.tls.v3.UpstreamTlsContext"),
        "common_tls_context": { "validation_context": validation },
    } } } })
}

/// Returns the addresses of endpoints.
pub(super) fn hosts(address: &str, ports: &[u16]) -> Value {
    let host = |port| json!({ "endpoint": { "address": { "socket_address": { "address": address, "port_value": port } } } });
    json!([{ "lb_endpoints": ports.iter().map(host).collect::<Value>() }])
}

/// Returns the changes for a cluster of another type than EDS.
pub(super) fn of_type(kind: impl Into<Value>, more: Value, hosts: Value) -> Value {
    let mut cluster = json!({ "type": kind.into(), "eds_cluster_config": null });
    merge(&mut cluster, &more);
    if !hosts.is_null() {
        cluster["load_assignment"] = json!({ "cluster_name": "@1", "endpoints": hosts });
    }
    json!({ "cluster": cluster })
}
