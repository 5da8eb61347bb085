//! Measures the time from an SDS request to the first certificate: in total, for each part, and for a
//! bare client that makes the same call. `benches/README.md` explains the table.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::arithmetic_side_effects,
    clippy::disallowed_methods,
    clippy::disallowed_types
)]

mod support;

use std::time::{Duration, Instant};

use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::service::discovery::v3::DiscoveryRequest;
use envoy_types::pb::envoy::service::secret::v3::secret_discovery_service_client::SecretDiscoveryServiceClient;
use hyper_util::rt::TokioIo;
use istio_agent::ca::Ca;
use istio_agent::ca::csr;
use istio_agent::ca::istio::IstioCa;
use istio_agent::ca::key::Encoding;
use istio_agent::ca::key::KeyType;
use istio_agent::istiod::{self, Istiod, Keepalive, Security, tls, token};
use istio_agent::metrics::Registry;
use istio_agent::net::unix_socket;
use istio_agent::proto::istio_v1_auth::IstioCertificateRequest;
use istio_agent::proto::istio_v1_auth::istio_certificate_service_client::IstioCertificateServiceClient;
use istio_agent::runtime::clock::Clock;
use istio_agent::runtime::lifecycle::CancellationToken;
use istio_agent::trust::compliance::Policy;
use istio_agent::trust::identity::SpiffeId;
use istio_agent::{sds, secrets};
use local_istiod::{LocalIstiod, Options};
use support::peer::{ControlPlane, NAME};
use support::table::Table;
use support::{block_on, median, write};
use tokio::task::JoinSet;

const ROUNDS: usize = 200;
const LIMIT: Duration = Duration::from_secs(10);
const DAY: Duration = Duration::from_secs(24 * 3600);

/// The address of the control plane, its root certificate, and a token that it accepts.
struct Target {
    address: String,
    root: String,
    token: String,
    directory: tempfile::TempDir,
}

/// The times of each step in milliseconds.
#[derive(Default)]
struct Figures {
    sds_total: Vec<f64>,
    key: Vec<f64>,
    connection: Vec<f64>,
    call: Vec<f64>,
    bare_connection: Vec<f64>,
    bare_call: Vec<f64>,
}

fn main() {
    let target = target();
    let mut figures = Figures::default();
    block_on(async {
        for round in 0..ROUNDS {
            figures.sds_total.push(sds_total(&target, round).await);
            parts(&target, &mut figures).await;
            bare(&target, &mut figures).await;
        }
    });
    let [sds_total, key, connection, call, bare_connection, bare_call] = [
        figures.sds_total,
        figures.key,
        figures.connection,
        figures.call,
        figures.bare_connection,
        figures.bare_call,
    ]
    .map(median);
    let mut table = Table::new(&["first certificate", "agent, ms", "bare client, ms"]);
    let mut row = |what: &str, agent: f64, bare: Option<f64>| {
        let bare = bare.map_or(String::new(), |bare| format!("{bare:.2}"));
        table.row([what.to_owned(), format!("{agent:.2}"), bare]);
    };
    row("key and request", key, None);
    row("TCP, TLS and HTTP/2", connection, Some(bare_connection));
    row("signing call", call, Some(bare_call));
    row("sum", key + connection + call, Some(bare_connection + bare_call));
    row("SDS request to certificate", sds_total, None);
    table.print();
}

fn target() -> Target {
    let (ready, started) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        block_on(async {
            let started = LocalIstiod::start(Options::default()).await;
            let istiod = started.expect("a control plane");
            let token = istiod.mint_token("default", "bench", DAY).expect("a token");
            let address = istiod.address.to_string();
            let said = ready.send((address, istiod.root_pem(), token));
            said.expect("awaited");
            std::future::pending::<()>().await;
        });
    });
    let (address, root, token) = started.recv().expect("a control plane");
    let directory = tempfile::tempdir().expect("a directory");
    write(directory.path(), "root.pem", &root);
    write(directory.path(), "token", &token);
    Target { address, root, token, directory }
}

fn identity() -> SpiffeId {
    SpiffeId::new("cluster.local", "default", "bench")
}

fn connection(target: &Target) -> (Istiod, JoinSet<()>) {
    let config = istiod::Config {
        address: target.address.clone(),
        security: Security::Tls(tls::Config {
            server_name: NAME.to_owned(),
            roots: tls::Roots::File(target.directory.path().join("root.pem")),
            client: None,
            policy: Policy::None,
        }),
        token: token::Source::File(target.directory.path().join("token")),
        metadata: Vec::new(),
        keepalive: Keepalive { interval: LIMIT, timeout: LIMIT },
        proxy: None,
        limits: istiod::Limits::default(),
        setting: "discoveryAddress",
        identity: identity(),
        fallbacks: Vec::new(),
    };
    let (istiod, run) = istiod::new(config, &Registry::default(), CancellationToken::new());
    (istiod, JoinSet::from_iter([run]))
}

/// Measures all modules together: the time until a client on the socket receives the secret `default`.
/// The first certificate request is made after the client has connected.
async fn sds_total(target: &Target, round: usize) -> f64 {
    let (istiod, mut tasks) = connection(target);
    let config = secrets::Config {
        identity: identity(),
        key_type: KeyType::P256,
        falls_back_to_rsa: false,
        encoding: Encoding::Traditional,
        ttl: DAY,
        grace_ratio: 0.5,
        grace_jitter: 0.0,
        least_pause: secrets::MIN_PAUSE,
        cache: None,
    };
    let registry = Registry::default();
    let authority = IstioCa::new(istiod, String::new(), LIMIT);
    let (secrets, renewal) = secrets::new(config, authority, Clock::system(), &registry);
    let socket = target.directory.path().join(format!("socket-{round}"));
    let listener = unix_socket::bind(&socket).expect("a free path");
    let stop = CancellationToken::new();
    let files = secrets::files::Config {
        workload: None,
        system_roots: "none".into(),
        debounce: Duration::from_millis(100),
    };
    let (files, watching) = secrets::files::new(files, Clock::system(), &registry);
    tasks.spawn(watching);
    let sources = sds::Sources {
        secrets: Some(secrets),
        files,
        serves_workload: true,
        options: sds::SecretOptions::default(),
        rejections: sds::Rejections::default(),
    };
    tasks.spawn(sds::serve(listener, sources, &registry, stop.clone()));
    let client = support::channel(&socket).await;
    let start = Instant::now();
    tasks.spawn(renewal);
    first_certificate(client).await;
    let taken = start.elapsed();
    stop.cancel();
    milliseconds(taken)
}

async fn first_certificate(channel: tonic::transport::Channel) {
    let request = DiscoveryRequest {
        node: Some(Node { id: "bench".into(), ..Default::default() }),
        resource_names: vec!["default".into()],
        type_url: "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret".into(),
        ..Default::default()
    };
    let requests =
        tokio_stream::StreamExt::chain(tokio_stream::once(request), tokio_stream::pending());
    let mut secrets = SecretDiscoveryServiceClient::new(channel);
    let stream = secrets.stream_secrets(requests).await.expect("a stream");
    let answer = stream.into_inner().message().await.expect("no error");
    assert_eq!(answer.expect("an answer").resources.len(), 1);
}

/// Measures the parts one after the other, without a client.
async fn parts(target: &Target, figures: &mut Figures) {
    let start = Instant::now();
    let generating = tokio::task::spawn_blocking(|| {
        csr::generate(KeyType::P256, Encoding::Traditional, &identity())
    });
    let request = generating.await.expect("no panic").expect("a request");
    figures.key.push(milliseconds(start.elapsed()));
    let (istiod, _tasks) = connection(target);
    let start = Instant::now();
    istiod.try_connection().await.expect("a connection");
    figures.connection.push(milliseconds(start.elapsed()));
    let authority = IstioCa::new(istiod, String::new(), LIMIT);
    let start = Instant::now();
    let chain = authority.sign(&request.csr_pem, DAY).await;
    figures.call.push(milliseconds(start.elapsed()));
    assert_eq!(chain.expect("a chain").len(), 2);
}

/// Measures the same call by a client that consists only of the same libraries.
async fn bare(target: &Target, figures: &mut Figures) {
    let request = csr::generate(KeyType::P256, Encoding::Traditional, &identity());
    let csr = request.expect("a request").csr_pem;
    let (address, root) = (target.address.clone(), target.root.clone());
    let connector = tower::service_fn(move |_: http::Uri| {
        let (address, root) = (address.clone(), root.clone());
        async move { ControlPlane::dial(&address, &root).await.map(TokioIo::new) }
    });
    let start = Instant::now();
    let endpoint = tonic::transport::Endpoint::from_static("http://istiod.istio-system.svc");
    let channel = endpoint.connect_with_connector(connector).await;
    let channel = channel.expect("a connection");
    figures.bare_connection.push(milliseconds(start.elapsed()));
    let mut call = tonic::Request::new(IstioCertificateRequest {
        csr,
        validity_duration: 86_400,
        metadata: None,
    });
    let token = format!("Bearer {}", target.token).parse().expect("a header");
    call.metadata_mut().insert("authorization", token);
    let start = Instant::now();
    let mut client = IstioCertificateServiceClient::new(channel);
    let answer = client.create_certificate(call).await.expect("an answer");
    figures.bare_call.push(milliseconds(start.elapsed()));
    assert_eq!(answer.into_inner().cert_chain.len(), 2);
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
