//! Envoy resources like those that istiod sends.

use serde_json::{Value, json};

const TLS: &str = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3";
const HCM: &str = "type.googleapis.com/envoy.extensions.filters.network.\
                   http_connection_manager.v3.HttpConnectionManager";
const ROUTER: &str = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router";

const LISTENER_FILTER: &str = "type.googleapis.com/envoy.extensions.filters.listener";

pub fn ads() -> Value {
    json!({ "ads": {}, "resource_api_version": "V3", "initial_fetch_timeout": "0s" })
}

/// Returns a cluster whose endpoints Envoy gets by EDS.
pub fn cluster(name: &str) -> Value {
    json!({
        "@type": "type.googleapis.com/envoy.config.cluster.v3.Cluster",
        "name": name,
        "type": "EDS",
        "connect_timeout": "1s",
        "eds_cluster_config": { "eds_config": ads() },
    })
}

pub fn secured(mut cluster: Value) -> Value {
    cluster["transport_socket"] = json!({
        "name": "envoy.transport_sockets.tls",
        "typed_config": {
            "@type": format!("{TLS}.UpstreamTlsContext"),
            "common_tls_context": workload_certificate(),
        },
    });
    cluster
}

pub fn endpoints(cluster: &str, ports: &[u16]) -> Value {
    let endpoint = |port: &u16| {
        let address = json!({ "address": "127.0.0.1", "port_value": port });
        json!({ "endpoint": { "address": { "socket_address": address } } })
    };
    json!({
        "@type": "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
        "cluster_name": cluster,
        "endpoints": [{ "lb_endpoints": ports.iter().map(endpoint).collect::<Vec<_>>() }],
    })
}

/// Returns an inbound listener whose routes Envoy gets by RDS.
pub fn listener(name: &str, port: u16, routes: &str) -> Value {
    let rds = json!({ "route_config_name": routes, "config_source": ads() });
    inbound(name, port, ("rds", rds))
}

/// Adds an access log to the listener: a line in a file for each request.
pub fn logged(mut listener: Value, file: &str, line: &str) -> Value {
    let manager = &mut listener["filter_chains"][0]["filters"][0]["typed_config"];
    manager["access_log"] = json!([{
        "name": "envoy.access_loggers.file",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog",
            "path": file,
            "log_format": { "text_format_source": { "inline_string": line } },
        },
    }]);
    listener
}

/// Returns an inbound listener that responds to each request itself, without a cluster.
pub fn answering(name: &str, port: u16) -> Value {
    let answer = json!({ "status": 200, "body": { "inline_string": "hello" } });
    let routes = json!({ "virtual_hosts": [{
        "name": "all",
        "domains": ["*"],
        "routes": [{ "match": { "prefix": "/" }, "direct_response": answer }],
    }]});
    inbound(name, port, ("route_config", routes))
}

/// Returns an inbound listener like [`answering`] with mutual TLS.
pub fn secured_listener(name: &str, port: u16) -> Value {
    let mut listener = answering(name, port);
    listener["filter_chains"][0]["transport_socket"] = json!({
        "name": "envoy.transport_sockets.tls",
        "typed_config": {
            "@type": format!("{TLS}.DownstreamTlsContext"),
            "require_client_certificate": true,
            "common_tls_context": workload_certificate(),
        },
    });
    listener
}

/// Adds an HTTP filter (`kind` is `http`) or a network filter to the listener. Its configuration comes by ECDS.
pub fn extended(mut listener: Value, kind: &str, extension: &str) -> Value {
    let chain = &mut listener["filter_chains"][0]["filters"];
    let filters = match kind {
        "http" => &mut chain[0]["typed_config"]["http_filters"],
        _ => chain,
    };
    let types = ["wasm.v3.Wasm", "rbac.v3.RBAC"];
    let types =
        types.map(|name| format!("type.googleapis.com/envoy.extensions.filters.{kind}.{name}"));
    let filter = json!({
        "name": extension,
        "config_discovery": { "config_source": ads(), "type_urls": types },
    });
    filters.as_array_mut().unwrap().insert(0, filter);
    listener
}

/// Returns routes that lead to one cluster. Each response has `mark` in the header `x-mark`.
pub fn routes(name: &str, cluster: &str, mark: &str) -> Value {
    json!({
        "@type": "type.googleapis.com/envoy.config.route.v3.RouteConfiguration",
        "name": name,
        "response_headers_to_add": [{ "header": { "key": "x-mark", "value": mark } }],
        "virtual_hosts": [{
            "name": "all",
            "domains": ["*"],
            "routes": [{ "match": { "prefix": "/" }, "route": { "cluster": cluster } }],
        }],
    })
}

fn inbound(name: &str, port: u16, routes: (&str, Value)) -> Value {
    let mut manager = json!({
        "@type": HCM,
        "stat_prefix": format!("inbound_{name};"),
        "http_filters": [{
            "name": "envoy.filters.http.router",
            "typed_config": { "@type": ROUTER },
        }],
    });
    manager[routes.0] = routes.1;
    json!({
        "@type": "type.googleapis.com/envoy.config.listener.v3.Listener",
        "name": name,
        "traffic_direction": "INBOUND",
        "address": { "socket_address": { "address": "127.0.0.1", "port_value": port } },
        "filter_chains": [{ "filters": [{
            "name": "envoy.filters.network.http_connection_manager",
            "typed_config": manager,
        }]}],
    })
}

/// Returns a listener of captured traffic. Each response has the listener's name in the header `x-mark`. A request to
/// one of these hosts goes to the cluster of that name, and any other request to the original destination of its
/// connection.
pub fn captured(name: &str, port: u16, hosts: &[&str]) -> Value {
    let route = |host: &str, cluster: &str| {
        json!({
            "name": host,
            "domains": [host],
            "routes": [{ "match": { "prefix": "/" }, "route": { "cluster": cluster } }],
        })
    };
    let mut routes: Vec<_> = hosts.iter().map(|host| route(host, host)).collect();
    routes.push(route("*", &format!("{name}-passthrough")));
    let routes = json!({
        "response_headers_to_add": [{ "header": { "key": "x-mark", "value": name } }],
        "virtual_hosts": routes,
    });
    let mut listener = inbound(name, port, ("route_config", routes));
    let address = |address| json!({ "socket_address": { "address": address, "port_value": port } });
    listener["address"] = address("0.0.0.0");
    listener["additional_addresses"] = json!([{ "address": address("::") }]);
    listener["listener_filters"] = json!([{
        "name": "envoy.filters.listener.original_dst",
        "typed_config": { "@type": format!("{LISTENER_FILTER}.original_dst.v3.OriginalDst") },
    }]);
    listener
}

/// Changes the listener for mode TPROXY: Envoy connects to the application from the client's address.
pub fn transparent(mut listener: Value) -> Value {
    listener["transparent"] = json!(true);
    let filters = listener["listener_filters"].as_array_mut().unwrap();
    filters.push(json!({
        "name": "envoy.filters.listener.original_src",
        "typed_config": {
            "@type": format!("{LISTENER_FILTER}.original_src.v3.OriginalSrc"),
            "mark": 1337,
        },
    }));
    listener
}

/// Returns the cluster of [`captured`] for all other hosts: Envoy connects to the original destination, from these
/// source addresses if there are any.
pub fn passthrough(listener: &str, sources: &[&str]) -> Value {
    let mut cluster = json!({
        "@type": "type.googleapis.com/envoy.config.cluster.v3.Cluster",
        "name": format!("{listener}-passthrough"),
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "connect_timeout": "1s",
    });
    let source = |source: &&str| json!({ "address": source, "port_value": 0 });
    let mut sources = sources.iter().map(source);
    if let Some(first) = sources.next() {
        let others: Vec<_> = sources.map(|source| json!({ "address": source })).collect();
        cluster["upstream_bind_config"] =
            json!({ "source_address": first, "extra_source_addresses": others });
    }
    cluster
}

fn workload_certificate() -> Value {
    json!({
        "tls_certificate_sds_secret_configs": [secret("default")],
        "validation_context_sds_secret_config": secret("ROOTCA"),
    })
}

/// Returns a reference to a secret that the agent serves.
pub fn secret(name: &str) -> Value {
    json!({ "name": name, "sds_config": {
        "resource_api_version": "V3",
        "initial_fetch_timeout": "0s",
        "api_config_source": {
            "api_type": "GRPC",
            "transport_api_version": "V3",
            "set_node_on_first_message_only": true,
            "grpc_services": [{ "envoy_grpc": { "cluster_name": "sds-grpc" } }],
        },
    }})
}
