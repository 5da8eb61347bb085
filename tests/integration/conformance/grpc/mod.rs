//! Tests clients on gRPC's C core (Python) on both sockets.
//!
//! These clients send the path of the socket as the authority of their requests. The package `grpcio` comes from
//! PyPI. Without it, the tests report this and are not run; if `GRPC_TESTS` is set, they fail.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use envoy_types::pb::envoy::service::discovery::v3::DiscoveryResponse;
use local_istiod::{Events, LocalIstiod, Options, follow};
use prost::Message;
use serde_json::{Value, json};

use crate::support::place::Place;
use crate::support::python::package;
use crate::support::{SECRET, STREAM_SECRETS, local_istiod, options, request, until};

const BOOTSTRAP: &str = "etc/istio/proxy/grpc-bootstrap.json";

/// A process of `echo.py`. It is killed when it is dropped.
struct Python(Child);

impl Python {
    fn start(package: &Path, arguments: &[&str], bootstrap: &Path) -> Self {
        let program =
            concat!(env!("CARGO_MANIFEST_DIR"), "/tests/integration/conformance/grpc/echo.py");
        let child = Command::new("python3")
            .arg("-B")
            .arg(program)
            .args(arguments)
            .env("PYTHONPATH", package)
            .env("GRPC_XDS_BOOTSTRAP", bootstrap)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        Self(child.unwrap())
    }

    fn first_line(&mut self) -> String {
        let mut line = String::new();
        BufReader::new(self.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    /// Writes `input` to the process, waits until it ends, and returns its output.
    async fn output(mut self, input: Vec<u8>) -> Vec<u8> {
        let ended = tokio::task::spawn_blocking(move || {
            self.0.stdin.take().unwrap().write_all(&input).unwrap();
            let mut output = Vec::new();
            std::io::copy(&mut self.0.stdout.take().unwrap(), &mut output).unwrap();
            (self.0.wait().unwrap().success(), output)
        });
        let (succeeded, output) = ended.await.unwrap();
        assert!(succeeded, "python failed");
        output
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        let _ = self.0.kill(); // The process may have ended by itself.
        let _ = self.0.wait();
    }
}

/// Returns the resources that istiod sends to gRPC clients of a service with one endpoint.
fn resources(port: &str) -> Value {
    let types = "type.googleapis.com/envoy";
    let manager = "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager";
    let router = "extensions.filters.http.router.v3.Router";
    let ads = json!({ "ads": {}, "resource_api_version": "V3" });
    let port: u16 = port.parse().unwrap();
    let address = json!({ "socket_address": { "address": "127.0.0.1", "port_value": port } });
    json!({ "resources": [
        {
            "@type": format!("{types}.config.listener.v3.Listener"),
            "name": "echo.shop:80",
            "api_listener": { "api_listener": {
                "@type": format!("{types}.{manager}"),
                "rds": { "route_config_name": "echo", "config_source": ads },
                "http_filters": [{
                    "name": "router",
                    "typed_config": { "@type": format!("{types}.{router}") },
                }],
            }},
        },
        {
            "@type": format!("{types}.config.route.v3.RouteConfiguration"),
            "name": "echo",
            "virtual_hosts": [{
                "name": "echo",
                "domains": ["*"],
                "routes": [{ "match": { "prefix": "" }, "route": { "cluster": "echo" } }],
            }],
        },
        {
            "@type": format!("{types}.config.cluster.v3.Cluster"),
            "name": "echo",
            "type": "EDS",
            "eds_cluster_config": { "eds_config": ads },
        },
        {
            "@type": format!("{types}.config.endpoint.v3.ClusterLoadAssignment"),
            "cluster_name": "echo",
            "endpoints": [{
                "locality": { "region": "here" },
                "load_balancing_weight": 1,
                "lb_endpoints": [{ "endpoint": { "address": address } }],
            }],
        },
    ]})
}

#[tokio::test]
async fn python_clients_reach_a_server_by_the_agents_configuration() {
    let Some(package) =
        package("tests/integration/conformance/grpc/requirements.txt", "GRPC_TESTS")
    else {
        return;
    };
    let mut server = Python::start(&package, &["serve"], Path::new("none"));
    let folder = tempfile::tempdir().unwrap();
    let text = resources(&server.first_line()).to_string();
    std::fs::write(folder.path().join("resources.json"), text).unwrap();
    let (snapshots, _) = follow(folder.path().to_owned(), Events::default()).await.unwrap();
    let istiod = LocalIstiod::start(Options { snapshots: Some(snapshots), ..options() });
    let istiod = istiod.await.unwrap();
    // If the agent runs an Envoy, gRPC applications share the discovery socket with it.
    for place in [Place::of(&istiod), Place::with_envoy(&istiod)] {
        let socket_folder = json!(place.path("etc/istio/proxy"));
        let place = place.proxy("configPath", socket_folder);
        let agent = place.start().await;
        let bootstrap = place.path(BOOTSTRAP);
        until("a bootstrap of gRPC", || bootstrap.exists()).await;
        let clients = [(); 2].map(|()| {
            let arguments = ["say", "xds:///echo.shop:80"];
            Python::start(&package, &arguments, &bootstrap).output(Vec::new())
        });
        let [one, other] = clients;
        let (one, other) = tokio::join!(one, other);
        assert_eq!(String::from_utf8(one).unwrap(), "heard hello\n");
        assert_eq!(String::from_utf8(other).unwrap(), "heard hello\n");
        assert!(agent.is_running());
    }
}

#[tokio::test]
async fn a_python_client_gets_a_secret() {
    let Some(package) =
        package("tests/integration/conformance/grpc/requirements.txt", "GRPC_TESTS")
    else {
        return;
    };
    let istiod = local_istiod().await;
    let place = Place::with_envoy(&istiod);
    let _agent = place.start().await;
    let socket = place.sds_socket();
    let arguments = ["stream", socket.to_str().unwrap(), STREAM_SECRETS];
    let client = Python::start(&package, &arguments, Path::new("none"));
    let output = client.output(request(SECRET, &["default"]).encode_to_vec()).await;
    let response = DiscoveryResponse::decode(output.as_slice()).unwrap();
    assert_eq!((response.type_url.as_str(), response.resources.len()), (SECRET, 1));
}
