//! Measures the agent's memory before, during and after a mixed load: DNS, metrics, probes and debug
//! pages, pushes of clusters and name tables, and streams that end. `benches/README.md` explains the
//! table.
#![allow(
    clippy::arithmetic_side_effects,
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods,
    clippy::disallowed_types
)]

mod support;

use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::service::discovery::v3::DiscoveryRequest;
use envoy_types::pb::envoy::service::discovery::v3::aggregated_discovery_service_client::AggregatedDiscoveryServiceClient;
use futures_util::future::join_all;
use local_istiod::{LocalIstiod, Options, Resource, Snapshot};
use prost::Message;
use support::names::{self, NAME_TABLE};
use support::table::Table;
use support::{Process, block_on, connect, write};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_stream::wrappers::ReceiverStream;

const CLUSTER: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";
const LISTENER: &str = "type.googleapis.com/envoy.config.listener.v3.Listener";

/// The duration of the load in seconds, unless an argument sets another duration.
const LOAD: u64 = 60;
/// The time without load before the idle agent is measured, in which threads without work end and free
/// memory returns to the kernel.
const REST: Duration = Duration::from_secs(40);
const QUESTIONS_PER_SECOND: u32 = 215;
const REQUESTS_PER_SECOND: u32 = 60;
const PUSHES_PER_SECOND: u32 = 3;
/// The time after which a discovery stream ends.
const STREAM: Duration = Duration::from_secs(13);

const HOSTS: usize = 10_000;
const CLUSTERS: usize = 1_500;
const PAGES: [&str; 12] = [
    "/stats/prometheus",
    "/healthz/ready",
    "/debug/doctor",
    "/metrics/agent",
    "/app-health/app/readyz",
    "/debug/",
    "/debug/overview",
    "/debug/xdsz",
    "/debug/ndsz",
    "/debug/certs",
    "/debug/config",
    "/debug/log",
];
/// The number of lines of Envoy's metrics.
const ENVOY_LINES: usize = 5_000;
/// The number of lines of the application's metrics.
const LINES: usize = 500;

static QUESTIONS: AtomicU64 = AtomicU64::new(0);
static ANSWERS: AtomicU64 = AtomicU64::new(0);
static PAGES_READ: AtomicU64 = AtomicU64::new(0);
static PASSED: AtomicU64 = AtomicU64::new(0);

fn main() {
    let seconds = std::env::args().find_map(|word| word.parse().ok());
    let load = Duration::from_secs(seconds.unwrap_or(LOAD));
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path();
    let (address, root) = control_plane(path);
    let ports = Ports::serve();
    let search = "nameserver 127.77.0.1\nsearch ns1.svc.cluster.local\n";
    write(path, "resolv.conf", search);
    let agent = start(path, &root, &address, &ports);
    let (dns, status, socket) = (ports.dns, ports.status, path.join("etc/istio/proxy/XDS"));
    block_on(connect(&socket));
    std::thread::sleep(REST);

    let mut table = Table::new(&["", "resident MB", "anonymous MB", "threads"]);
    let mut row = |when: &str| {
        let mb = |name| format!("{:.1}", agent.memory(name) as f64 / 1024.0);
        let threads = agent.status("Threads").to_string();
        table.row([when.to_owned(), mb("VmRSS"), mb("RssAnon"), threads]);
    };
    row("before");
    let is_loaded = Arc::new(AtomicBool::new(true));
    let loading = [
        spawn(&is_loaded, move |is_loaded| question(dns, is_loaded)),
        spawn(&is_loaded, move |is_loaded| {
            block_on(browse(status, is_loaded));
        }),
        spawn(&is_loaded, move |is_loaded| {
            block_on(subscribe(&socket, is_loaded));
        }),
    ];
    std::thread::sleep(load);
    row("under load");
    is_loaded.store(false, Ordering::Relaxed);
    for thread in loading {
        thread.join().expect("no panic");
    }
    std::thread::sleep(REST);
    row("after it");
    table.print();
    let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    println!(
        "{load:?}: {} of {} questions answered, {} pages, {:.0} MB of discovery",
        of(&ANSWERS),
        of(&QUESTIONS),
        of(&PAGES_READ),
        of(&PASSED) as f64 / 1e6
    );
}

/// The addresses on which the agent listens, and the addresses of the servers from which it requests
/// pages.
struct Ports {
    dns: SocketAddr,
    status: SocketAddr,
    envoy: SocketAddr,
    application: SocketAddr,
}

impl Ports {
    /// Starts the servers, each on a thread that ends with the program.
    fn serve() -> Self {
        let udp = UdpSocket::bind("127.0.0.1:0").expect("a port");
        let tcp = [(); 3].map(|()| TcpListener::bind("127.0.0.1:0").expect("a port"));
        let dns = udp.local_addr().expect("an address");
        let [status, envoy, application] = tcp.map(|tcp| tcp.local_addr().expect("an address"));
        for (address, name, lines) in [(envoy, "envoy", ENVOY_LINES), (application, "app", LINES)] {
            let page = metrics(name, lines);
            std::thread::spawn(move || block_on(serve_metrics(address, page)));
        }
        // Only root may bind port 53. Without this resolver, queries for names outside the mesh fail at
        // once.
        if let Ok(resolver) = UdpSocket::bind("127.77.0.1:53") {
            std::thread::spawn(move || resolve(&resolver));
        }
        Self { dns, status, envoy, application }
    }
}

fn metrics(name: &str, lines: usize) -> Arc<str> {
    let line =
        |number| format!("{name}_requests{{cluster=\"outbound|9080||reviews-{number}\"}} 1\n");
    (0..lines).map(line).collect::<String>().into()
}

fn spawn(
    is_loaded: &Arc<AtomicBool>,
    run: impl FnOnce(&AtomicBool) + Send + 'static,
) -> std::thread::JoinHandle<()> {
    let is_loaded = is_loaded.clone();
    std::thread::spawn(move || run(&is_loaded))
}

/// Starts a sidecar's agent with DNS, an application with metrics and a probe, and an Envoy with
/// metrics.
fn start(directory: &Path, root: &str, address: &str, ports: &Ports) -> Process {
    let mut command = support::agent(directory, root);
    let targets =
        format!(r#"{{"scrape":"true","path":"/metrics","port":"{}"}}"#, ports.application.port());
    let probers = format!(
        r#"{{"/app-health/app/readyz":{{"httpGet":{{"path":"/","port":{}}}}}}}"#,
        ports.application.port()
    );
    let settings = [
        ("ISTIO_META_DNS_CAPTURE", "true".to_owned()),
        ("DNS_PROXY_ADDR", ports.dns.to_string()),
        ("ISTIO_AGENT_RESOLV_CONF", "resolv.conf".to_owned()),
        ("ENVOY_PROMETHEUS_PORT", ports.envoy.port().to_string()),
        ("ISTIO_PROMETHEUS_ANNOTATIONS", targets),
        ("ISTIO_KUBE_APP_PROBERS", probers),
        ("DISABLE_ENVOY", "true".to_owned()),
        (
            "PROXY_CONFIG",
            format!("{{discoveryAddress: '{address}', statusPort: {}}}", ports.status.port()),
        ),
    ];
    Process::start(command.envs(settings))
}

/// Starts a control plane that pushes clusters and a name table, of which two versions take turns.
/// Returns its address and its root certificate.
fn control_plane(directory: &Path) -> (String, String) {
    let (ready, started) = std::sync::mpsc::channel();
    let directory = directory.to_owned();
    std::thread::spawn(move || {
        block_on(async move {
            let versions = [1, 2].map(snapshot);
            let snapshots = watch::Sender::new(versions[0].clone());
            let options = Options { snapshots: Some(snapshots.subscribe()), ..Options::default() };
            let istiod = LocalIstiod::start(options).await.expect("a control plane");
            let token = istiod.mint_token("default", "bench", Duration::from_secs(3600));
            let token = token.expect("a token");
            write(&directory, "var/run/secrets/tokens/istio-token", &token);
            let address = format!("localhost:{}", istiod.address.port());
            ready.send((address, istiod.root_pem())).expect("awaited");
            let mut pushes = every(PUSHES_PER_SECOND);
            for version in versions.iter().cycle() {
                pushes.tick().await;
                snapshots.send_replace(version.clone());
            }
        });
    });
    started.recv().expect("a control plane")
}

fn snapshot(version: u8) -> Arc<Snapshot> {
    let mut snapshot = Snapshot::default();
    let table = Resource::new("", NAME_TABLE, names::name_table(HOSTS, version));
    snapshot.insert("common", table);
    for number in 0..CLUSTERS {
        let cluster = Resource::new(format!("c{number}"), CLUSTER, vec![version; 2000]);
        snapshot.insert("common", cluster);
    }
    Arc::new(snapshot)
}

fn every(per_second: u32) -> tokio::time::Interval {
    let mut interval = interval(Duration::from_secs(1) / per_second);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    interval
}

/// Subscribes and sends ACKs in the way that Envoy does, and opens a new stream when the last one has
/// lasted for [`STREAM`].
async fn subscribe(socket: &Path, is_loaded: &AtomicBool) {
    while is_loaded.load(Ordering::Relaxed) {
        let _ = timeout(STREAM, accept_all(socket)).await; // The timeout ends the stream.
    }
}

async fn accept_all(socket: &Path) -> Result<(), tonic::Status> {
    let channel = support::channel(socket).await;
    let mut client = AggregatedDiscoveryServiceClient::new(channel);
    client = client.max_decoding_message_size(usize::MAX);
    let (requests, receiver) = mpsc::channel(4);
    for type_url in [CLUSTER, LISTENER] {
        let _ = requests.try_send(request(type_url)); // The channel has room.
    }
    let responses = client.stream_aggregated_resources(ReceiverStream::new(receiver));
    let mut responses = responses.await?.into_inner();
    while let Some(response) = responses.message().await? {
        PASSED.fetch_add(response.encoded_len() as u64, Ordering::Relaxed);
        let ack = DiscoveryRequest {
            version_info: response.version_info,
            response_nonce: response.nonce,
            ..request(&response.type_url)
        };
        let _ = requests.send(ack).await; // The next read reports a closed stream.
    }
    Ok(())
}

fn request(type_url: &str) -> DiscoveryRequest {
    DiscoveryRequest {
        node: Some(Node {
            id: "sidecar~127.0.0.1~bench.default~default.svc.cluster.local".into(),
            ..Default::default()
        }),
        type_url: type_url.into(),
        ..Default::default()
    }
}

/// Sends queries for names of the mesh; every fourth query is for another name.
fn question(dns: SocketAddr, is_loaded: &AtomicBool) {
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    socket.connect(dns).expect("connected");
    socket.set_nonblocking(true).expect("a socket");
    let mut number = 0_usize;
    while is_loaded.load(Ordering::Relaxed) {
        let name = match number % 4 {
            0 => format!("host{number}.example.com"),
            _ => names::host(number % HOSTS),
        };
        let query = names::query((number % (1 << 16)) as u16, &name);
        let _ = socket.send(&query); // A full queue loses the query.
        QUESTIONS.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(Duration::from_secs(1) / QUESTIONS_PER_SECOND);
        while socket.recv(&mut [0; 4096]).is_ok() {
            ANSWERS.fetch_add(1, Ordering::Relaxed);
        }
        number += 1;
    }
}

/// Answers every query with NXDOMAIN.
fn resolve(socket: &UdpSocket) {
    let mut message = [0; 4096];
    while let Ok((length, client)) = socket.recv_from(&mut message) {
        message[2] |= 0x80;
        message[3] = 0x83;
        let _ = socket.send_to(&message[..length], client); // The client may have ended.
    }
}

/// Requests all pages at once, repeatedly.
async fn browse(status: SocketAddr, is_loaded: &AtomicBool) {
    let mut ticks = every(REQUESTS_PER_SECOND / PAGES.len() as u32);
    while is_loaded.load(Ordering::Relaxed) {
        ticks.tick().await;
        for read in join_all(PAGES.map(|page| get(status, page))).await {
            PAGES_READ.fetch_add(u64::from(read.is_ok_and(|read| read > 0)), Ordering::Relaxed);
        }
    }
}

async fn get(status: SocketAddr, page: &str) -> std::io::Result<u64> {
    let mut stream = TcpStream::connect(status).await?;
    let request = format!("GET {page} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    tokio::io::copy(&mut stream, &mut tokio::io::sink()).await
}

/// Serves a page of metrics; all requests get the same response.
async fn serve_metrics(address: SocketAddr, page: Arc<str>) {
    let listener = tokio::net::TcpListener::bind(address).await.expect("a free port");
    loop {
        let (mut stream, _) = listener.accept().await.expect("a connection");
        let page = page.clone();
        tokio::task::spawn(async move {
            let _ = stream.read(&mut [0; 4096]).await; // The request is not parsed.
            let length = page.len();
            let head = format!(
                "HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: {length}\r\n\
                 connection: close\r\n\r\n"
            );
            let _ = stream.write_all(head.as_bytes()).await; // The client may have closed it.
            let _ = stream.write_all(page.as_bytes()).await;
        });
    }
}
