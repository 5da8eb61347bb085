use super::*;
use envoy_types::pb::envoy::config::cluster::v3::Cluster;
use envoy_types::pb::envoy::config::endpoint::v3::ClusterLoadAssignment;
use envoy_types::pb::envoy::config::listener::v3::Listener;
use envoy_types::pb::envoy::config::listener::v3::filter::ConfigType;
use envoy_types::pb::envoy::extensions::filters::network::http_connection_manager::v3::HttpConnectionManager;

const MESH: &str = r#"
resources:
- "@type": type.googleapis.com/envoy.config.listener.v3.Listener
  name: outbound
  address: { socket_address: { address: 127.0.0.1, port_value: 15001 } }
  filter_chains:
  - filters:
    - name: http
      typed_config:
        "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
        stat_prefix: outbound
        rds:
          route_config_name: shop
          config_source: { ads: {}, resource_api_version: V3 }
        http_filters:
        - name: router
          typed_config:
            "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
- "@type": type.googleapis.com/envoy.config.route.v3.RouteConfiguration
  name: shop
  virtual_hosts:
  - name: all
    domains: ["*"]
    routes: [{ match: { prefix: / }, route: { cluster: cart, timeout: 1.5s } }]
- "@type": type.googleapis.com/envoy.config.cluster.v3.Cluster
  name: cart
  type: EDS
  connectTimeout: 1s
  eds_cluster_config: { eds_config: { ads: {} } }
  transport_socket:
    name: tls
    typed_config:
      "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
      sni: cart.shop
      common_tls_context:
        tls_certificate_sds_secret_configs:
        - name: default
          sds_config: { api_config_source: { api_type: GRPC, grpc_services: [{ envoy_grpc: { cluster_name: sds-grpc } }] } }
- "@type": type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment
  cluster_name: cart
  endpoints:
  - lb_endpoints:
    - endpoint: { address: { socket_address: { address: 127.0.0.1, port_value: 8080 } } }
"#;

#[test]
fn reads_a_realistic_file_as_envoys_own_messages() {
    let resources = parse(MESH).unwrap();
    let names: Vec<_> = resources.iter().map(|found| found.name.as_str()).collect();
    assert_eq!(names, ["outbound", "shop", "cart", "cart"]);
    let listener = Listener::decode(resources[0].any.value.as_slice()).unwrap();
    let filter = listener.filter_chains[0].filters[0].config_type.clone();
    let Some(ConfigType::TypedConfig(http)) = filter else {
        panic!("found {filter:?}");
    };
    let http = HttpConnectionManager::decode(http.value.as_slice()).unwrap();
    assert_eq!(http.stat_prefix, "outbound");
    let cluster = Cluster::decode(resources[2].any.value.as_slice()).unwrap();
    assert_eq!(cluster.connect_timeout.unwrap().seconds, 1);
    assert!(cluster.transport_socket.is_some());
    let endpoints = ClusterLoadAssignment::decode(resources[3].any.value.as_slice()).unwrap();
    assert_eq!(endpoints.endpoints[0].lb_endpoints.len(), 1);
}

#[test]
fn the_version_follows_the_content() {
    let versions = |text: &str| -> Vec<_> {
        let resources = parse(text).unwrap().into_iter();
        resources.map(|resource| resource.version).collect()
    };
    let before = versions(MESH);
    assert_eq!(before, versions(MESH));
    let after = versions(&MESH.replace("1.5s", "2s"));
    let differs: Vec<_> = before.iter().zip(&after).map(|(a, b)| a != b).collect();
    assert_eq!(differs, [false, true, false, false]);
}

#[test]
fn accepts_json_one_resource_and_raw_types() {
    let json = r#"{"@type": "type.googleapis.com/envoy.config.cluster.v3.Cluster", "name": "a"}"#;
    assert_eq!(parse(json).unwrap()[0].name, "a");
    let raw = r#"[{"@type": "type.googleapis.com/istio.x.Y", "name": "t", "value": "CgE3"}]"#;
    assert_eq!(parse(raw).unwrap()[0].any.value, b"\x0a\x017");
    assert_eq!(parse("# nothing yet\n"), Ok(Vec::new()));
}

#[test]
fn errors_name_line_and_path() {
    let table = [
        ("stat_prefix: outbound", "stat_prefiks: x", "stat_prefiks of"),
        ("port_value: 8080", "port_value: many", "socket_address.port_value of"),
        ("sni: cart.shop", "snj: cart", "transport_socket.typed_config.snj of"),
        ("prefix: /", "prefixx: /", "virtual_hosts[0].routes[0].match.prefixx of"),
        ("http.router.v3.Router", "rooter.v3.R", "typed_config.@type of"),
        ("type: EDS", "type: EDDS", "type of Cluster \"cart\""),
        ("type.googleapis.com/envoy.config.route", "a/b", "is not known"),
        (
            "\"@type\": type.googleapis.com/envoy.config.route.v3.RouteConfiguration",
            "x: 1",
            "@type",
        ),
        ("name: shop", "vhds: {}", ""),
    ];
    for (right, wrong, text) in table {
        let file = MESH.replacen(right, wrong, 1);
        let message = parse(&file).unwrap_err().to_string();
        assert!(message.contains(text), "{wrong}: {message}");
        let line = file.lines().position(|line| line.contains(wrong)).unwrap() + 1;
        let near = [line - 1, line].map(|line| format!("line {line}:"));
        assert!(near.iter().any(|near| message.starts_with(near)), "{near:?}: {message}");
    }
    let error = parse("a: 1\nb: [\n").unwrap_err();
    assert!(matches!(error, ResourceError::Syntax { line: 2.., .. }), "{error}");
}
