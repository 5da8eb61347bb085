//! Measures the agent's start and idle state: the time until it listens, until the first certificate,
//! and from a live Envoy to readiness; memory and wake-ups while idle. `benches/README.md` explains the
//! table.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::arithmetic_side_effects,
    clippy::disallowed_methods,
    clippy::disallowed_types
)]

mod support;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::service::discovery::v3::DiscoveryRequest;
use envoy_types::pb::envoy::service::secret::v3::secret_discovery_service_client::SecretDiscoveryServiceClient;
use local_istiod::{LocalIstiod, Options};
use support::table::Table;
use support::{Process, block_on, connect, median, write};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

/// The number of starts of each kind.
const ROUNDS: usize = 20;
/// The time during which the wake-ups of the idle agent are counted.
const REST: Duration = Duration::from_secs(5);

fn main() {
    let (ready, started) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        block_on(async {
            let istiod = LocalIstiod::start(Options::default()).await.expect("a control plane");
            let token = istiod.mint_token("default", "bench", Duration::from_secs(3600));
            let address = format!("localhost:{}", istiod.address.port());
            ready.send((address, istiod.root_pem(), token.expect("a token"))).expect("awaited");
            std::future::pending::<()>().await;
        });
    });
    let (address, root, token) = started.recv().expect("a control plane");
    block_on(async {
        let mut table = Table::new(&["at start", "median", "least", "most"]);
        let (mut listening, mut certified) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let directory = workdir(&token);
            let start = Instant::now();
            let agent = Process::sidecar(directory.path(), &address, &root);
            let secrets = directory.path().join("var/run/secrets/workload-spiffe-uds/socket");
            connect(&secrets).await;
            connect(&directory.path().join("etc/istio/proxy/XDS")).await;
            listening.push(start.elapsed().as_secs_f64() * 1e3);
            first_certificate(&secrets).await;
            certified.push(start.elapsed().as_secs_f64() * 1e3);
            drop(agent);
        }
        row(&mut table, "exec to both sockets listening, ms", listening);
        row(&mut table, "exec to first certificate, ms", certified);
        let mut ready = Vec::new();
        for _ in 0..ROUNDS {
            ready.push(until_ready(&address, &root, &token).await.as_secs_f64() * 1e3);
        }
        row(&mut table, "Envoy live to ready on the status port, ms", ready);
        table.print();
        at_rest(&address, &root, &token).await;
    });
}

fn row(table: &mut Table, what: &str, values: Vec<f64>) {
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let most = values.iter().copied().fold(0.0, f64::max);
    let cells = [median(values), least, most].map(|value| format!("{value:.1}"));
    table.row(std::iter::once(what.to_owned()).chain(cells));
}

/// Returns the time from a live and configured Envoy to readiness on the status port.
async fn until_ready(address: &str, root: &str, token: &str) -> Duration {
    let admin = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let admin_port = admin.local_addr().expect("an address").port();
    let status = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let status_port = status.local_addr().expect("an address").port();
    drop(status);
    let is_live = Arc::new(AtomicBool::new(false));
    let mut envoy = JoinSet::new();
    envoy.spawn(support::act_as_admin(admin, is_live.clone()));
    let directory = workdir(token);
    let ports = format!("proxyAdminPort: {admin_port}, statusPort: {status_port}");
    let _agent = Process::sidecar_with(directory.path(), address, root, &ports);
    while !response_contains(status_port, "config not received").await {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    is_live.store(true, Ordering::Relaxed);
    let live = Instant::now();
    while !response_contains(status_port, "HTTP/1.1 200").await {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    live.elapsed()
}

/// Returns true if the response to a readiness probe contains `text`.
async fn response_contains(port: u16, text: &str) -> bool {
    let asked = async {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
        let request = b"GET /healthz/ready HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
        stream.write_all(request).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        Ok::<_, std::io::Error>(answer)
    };
    asked.await.is_ok_and(|answer| answer.contains(text))
}

fn workdir(token: &str) -> tempfile::TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    write(directory.path(), "var/run/secrets/tokens/istio-token", token);
    directory
}

/// Requests the workload's certificate in the way that Envoy does, and waits for it.
async fn first_certificate(socket: &Path) {
    let mut secrets = SecretDiscoveryServiceClient::new(support::channel(socket).await);
    let request = DiscoveryRequest {
        node: Some(Node { id: "bench".into(), ..Default::default() }),
        resource_names: vec!["default".into()],
        type_url: "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret".into(),
        ..Default::default()
    };
    let requests =
        tokio_stream::StreamExt::chain(tokio_stream::once(request), tokio_stream::pending());
    let stream = secrets.stream_secrets(requests).await.expect("a stream");
    let response = stream.into_inner().message().await.expect("no error").expect("an answer");
    assert_eq!(response.resources.len(), 1);
}

/// Prints the memory and the wake-ups of an agent that has a certificate, and no stream.
async fn at_rest(address: &str, root: &str, token: &str) {
    let directory = workdir(token);
    // The Envoy is live at once, because the agent polls an Envoy that is not live.
    let admin = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let admin_port = admin.local_addr().expect("an address").port();
    let mut envoy = JoinSet::new();
    envoy.spawn(support::act_as_admin(admin, Arc::new(AtomicBool::new(true))));
    let ports = format!("proxyAdminPort: {admin_port}");
    let agent = Process::sidecar_with(directory.path(), address, root, &ports);
    let secrets = directory.path().join("var/run/secrets/workload-spiffe-uds/socket");
    connect(&secrets).await;
    first_certificate(&secrets).await;
    // The threads that generated the key end ten seconds after their work.
    tokio::time::sleep(Duration::from_secs(11)).await;
    let before = agent.wake_ups();
    tokio::time::sleep(REST).await;
    let mut table = Table::new(&["at rest", ""]);
    let mb = |bytes: u64| format!("{:.1} MB", bytes as f64 / (1024.0 * 1024.0));
    table.row(["resident".to_owned(), mb(agent.memory("VmRSS") * 1024)]);
    table.row(["of it anonymous".to_owned(), mb(agent.memory("RssAnon") * 1024)]);
    table.row(["threads".to_owned(), agent.status("Threads").to_string()]);
    let wake_ups = agent.wake_ups() - before;
    table.row([format!("wake-ups in {REST:?}"), wake_ups.to_string()]);
    table.print();
}
