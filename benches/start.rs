//! What the agent costs before it does anything: size, time to listen, time to the first
//! certificate, memory and wake-ups at rest. `benches/README.md` says how to read the table.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods,
    clippy::disallowed_types
)]

mod support;

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::service::discovery::v3::DiscoveryRequest;
use envoy_types::pb::envoy::service::secret::v3::secret_discovery_service_client::SecretDiscoveryServiceClient;
use istio_agent::local_istiod::{LocalIstiod, Options};
use support::table::Table;
use support::{Process, block_on, connect, median, write};

/// Starts of each kind; the median counts.
const ROUNDS: usize = 20;
/// How long the agent is left alone before it is looked at.
const REST: Duration = Duration::from_secs(5);

fn main() {
    let (ready, started) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        block_on(async {
            let istiod = LocalIstiod::start(Options::default())
                .await
                .expect("a control plane");
            let token = istiod.mint_token("default", "bench", Duration::from_secs(3600));
            let address = format!("localhost:{}", istiod.address.port());
            ready
                .send((address, istiod.root_pem(), token.expect("a token")))
                .expect("awaited");
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
            let secrets = directory
                .path()
                .join("var/run/secrets/workload-spiffe-uds/socket");
            connect(&secrets).await;
            connect(&directory.path().join("etc/istio/proxy/XDS")).await;
            listening.push(start.elapsed().as_secs_f64() * 1e3);
            first_certificate(&secrets).await;
            certified.push(start.elapsed().as_secs_f64() * 1e3);
            drop(agent);
        }
        row(&mut table, "exec to both sockets listening, ms", listening);
        row(&mut table, "exec to first certificate, ms", certified);
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

fn workdir(token: &str) -> tempfile::TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    write(
        directory.path(),
        "var/run/secrets/tokens/istio-token",
        token,
    );
    directory
}

/// Asks for the workload's certificate as Envoy does and waits for it.
async fn first_certificate(socket: &Path) {
    let mut secrets = SecretDiscoveryServiceClient::new(support::channel(socket).await);
    let request = DiscoveryRequest {
        node: Some(Node {
            id: "bench".into(),
            ..Default::default()
        }),
        resource_names: vec!["default".into()],
        type_url: "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret".into(),
        ..Default::default()
    };
    let requests =
        tokio_stream::StreamExt::chain(tokio_stream::once(request), tokio_stream::pending());
    let stream = secrets.stream_secrets(requests).await.expect("a stream");
    let response = stream
        .into_inner()
        .message()
        .await
        .expect("no error")
        .expect("an answer");
    assert_eq!(response.resources.len(), 1);
}

/// Memory and wake-ups of an agent with a certificate and an open stream on each socket.
async fn at_rest(address: &str, root: &str, token: &str) {
    let directory = workdir(token);
    let agent = Process::sidecar(directory.path(), address, root);
    let secrets = directory
        .path()
        .join("var/run/secrets/workload-spiffe-uds/socket");
    connect(&secrets).await;
    first_certificate(&secrets).await;
    // Until the threads that made the key are gone, which stay for ten seconds.
    tokio::time::sleep(Duration::from_secs(11)).await;
    let before = agent.wake_ups();
    tokio::time::sleep(REST).await;
    let mut table = Table::new(&["at rest", ""]);
    let size = fs::metadata(env!("CARGO_BIN_EXE_pilot-agent"))
        .expect("the binary")
        .len();
    let mb = |bytes: u64| format!("{:.1} MB", bytes as f64 / (1024.0 * 1024.0));
    table.row(["binary".to_owned(), mb(size)]);
    table.row(["resident".to_owned(), mb(agent.memory("VmRSS") * 1024)]);
    table.row([
        "of it anonymous".to_owned(),
        mb(agent.memory("RssAnon") * 1024),
    ]);
    table.row(["threads".to_owned(), agent.status("Threads").to_string()]);
    let wake_ups = agent.wake_ups() - before;
    table.row([format!("wake-ups in {REST:?}"), wake_ups.to_string()]);
    table.print();
}
