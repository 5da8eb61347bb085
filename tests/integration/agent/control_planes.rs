//! Tests control planes that do not serve: how long Envoy's stream is held, and when the next control plane is
//! used.

use std::convert::Infallible;
use std::future::pending;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use envoy_types::pb::envoy::service::discovery::v3::DiscoveryRequest;
use futures_util::future::join_all;
use http_body::Frame;
use http_body_util::StreamBody;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use istio_agent::ca::Ca;
use istio_agent::ca::csr;
use istio_agent::ca::istio::IstioCa;
use istio_agent::ca::key::KeyType;
use istio_agent::problem;
use istio_agent::trust::identity::SpiffeId;
use istio_agent::xds::Protocol;
use local_istiod::{LocalIstiod, Options};
use rustls::ServerConfig;
use rustls::pki_types::PrivatePkcs8KeyDer;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;
use tonic::{Code, Status};

use crate::agent::relay::{PROTOCOLS, request, response};
use crate::support::bench::Bench;
use crate::support::envoy::Envoy;
use crate::support::{CLUSTER, LISTENER, advance_clock, framed, soon, until};

const HEALTH: &str = "type.googleapis.com/istio.v1.HealthInformation";

/// The way in which a control plane fails.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    Refused,
    OtherRoot,
    SilentAfterTcp,
    SilentAfterTls,
    FullBacklog,
    PingOnly,
    StreamWithoutResponse,
    Errors,
}

const FAULTS: [Fault; 8] = [
    Fault::Refused,
    Fault::OtherRoot,
    Fault::SilentAfterTcp,
    Fault::SilentAfterTls,
    Fault::FullBacklog,
    Fault::PingOnly,
    Fault::StreamWithoutResponse,
    Fault::Errors,
];

/// A control plane that fails. It stops when it is dropped.
struct Faulty {
    address: SocketAddr,
    /// The PEM root certificate of its authority; empty if the bench is not to trust it, or if it has no TLS.
    root: String,
    _istiod: Option<LocalIstiod>,
    _backlog: Vec<TcpStream>,
    _tasks: JoinSet<()>,
}

/// Returns a TLS acceptor in place of istiod's, with a certificate of a new authority, and the root certificate of
/// this authority.
fn tls() -> (TlsAcceptor, String) {
    let mut params = rcgen::CertificateParams::default();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let key = rcgen::KeyPair::generate().unwrap();
    let authority = rcgen::CertifiedIssuer::self_signed(params, key).unwrap();
    let key = rcgen::KeyPair::generate().unwrap();
    let params = rcgen::CertificateParams::new(["istiod.istio-system.svc".into()]).unwrap();
    let leaf = params.signed_by(&key, &authority).unwrap();
    let key = PrivatePkcs8KeyDer::from(key.serialize_der()).into();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![leaf.der().clone()], key)
        .unwrap();
    config.alpn_protocols = vec![b"h2".to_vec()];
    (TlsAcceptor::from(Arc::new(config)), authority.pem())
}

impl Faulty {
    async fn start(fault: Fault) -> Self {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let mut faulty = Self {
            address: socket.local_addr().unwrap(),
            root: String::new(),
            _istiod: None,
            _backlog: Vec::new(),
            _tasks: JoinSet::new(),
        };
        match fault {
            Fault::Refused => drop(socket),
            Fault::OtherRoot => {
                let istiod = LocalIstiod::start(Options::default()).await.unwrap();
                faulty.address = istiod.address;
                faulty._istiod = Some(istiod);
            }
            Fault::FullBacklog => {
                let listener = socket.listen(1).unwrap();
                let connect = || TcpStream::connect(faulty.address);
                // The kernel drops SYN packets when the backlog is full, so the last connection attempt times out.
                while let Ok(connected) =
                    tokio::time::timeout(Duration::from_millis(500), connect()).await
                {
                    faulty._backlog.push(connected.unwrap());
                }
                faulty._tasks.spawn(async move {
                    let _listener = listener;
                    pending().await
                });
            }
            _ => {
                let listener = socket.listen(64).unwrap();
                let (tls, root) = tls();
                faulty.root = root;
                faulty._tasks.spawn(accept(listener, tls, fault));
            }
        }
        faulty
    }
}

async fn accept(listener: TcpListener, tls: TlsAcceptor, fault: Fault) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let tls = tls.clone();
        connections.spawn(async move {
            if fault == Fault::SilentAfterTcp {
                let _stream = stream;
                return pending().await;
            }
            let Ok(stream) = tls.accept(stream).await else {
                return;
            };
            if fault == Fault::SilentAfterTls {
                let _stream = stream;
                return pending().await;
            }
            let service = service_fn(move |request| answer(request, fault));
            let server = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
            let _ = server.serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

/// Answers a call of the discovery service or of the certificate service.
async fn answer(
    _request: http::Request<Incoming>,
    fault: Fault,
) -> Result<http::Response<tonic::body::Body>, Infallible> {
    let nothing = tokio_stream::pending::<Result<Frame<Bytes>, Status>>();
    let response = http::Response::builder().header("content-type", "application/grpc");
    Ok(match fault {
        Fault::PingOnly => pending().await,
        Fault::StreamWithoutResponse => {
            let body = tonic::body::Body::new(StreamBody::new(nothing));
            response.body(body).unwrap()
        }
        _ => {
            let status = Status::permission_denied("not today");
            status.into_http()
        }
    })
}

/// Starts a bench whose first control plane fails.
async fn bench_behind(fault: Fault) -> (Faulty, Bench) {
    let first = Faulty::start(fault).await;
    let bench = Bench::behind(first.address).await;
    let root = bench.directory.path().join("root.pem");
    let roots = bench.control_plane.root_pem() + &first.root;
    std::fs::write(root, roots).unwrap();
    (first, bench)
}

async fn discovery(fault: Fault) {
    let (_first, mut bench) = bench_behind(fault).await;
    let protocol = Protocol::Delta;
    let mut envoy = bench.envoy(protocol).await;
    envoy.send_raw(framed(&request(protocol, CLUSTER)));
    let mut istiod = bench.control_plane.streams.recv().await.unwrap();
    let asked = istiod.next_bytes().await.unwrap().unwrap();
    assert_eq!(asked, request(protocol, CLUSTER));
    let message = response(protocol, CLUSTER, 10);
    istiod.send_bytes(message.clone()).await.unwrap();
    assert_eq!(envoy.next_bytes().await, message);
}

async fn certificates(fault: Fault) {
    let (_first, bench) = bench_behind(fault).await;
    let authority = IstioCa::new(bench.istiod.clone(), String::new(), Duration::from_secs(10));
    let identity = SpiffeId::new("cluster.local", "default", "bench");
    let request = csr::generate(KeyType::P256, Default::default(), &identity).unwrap();
    let life = Duration::from_secs(60);
    while authority.sign(&request.csr_pem, life).await.is_err() {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

/// The limit is 30 s: the 20 s of the name, and 10 s more because the test runs in real time, perhaps on a slow
/// machine.
#[tokio::test]
async fn the_second_control_plane_serves_within_20_s() {
    let limit = Duration::from_secs(30);
    let begun = Instant::now();
    let cases = FAULTS.map(|fault| async move {
        let serves = async {
            tokio::join!(
                async {
                    discovery(fault).await;
                    println!("{fault:?}, discovery: {:?}", begun.elapsed());
                },
                async {
                    certificates(fault).await;
                    println!("{fault:?}, certificates: {:?}", begun.elapsed());
                }
            )
        };
        let served = tokio::time::timeout(limit, serves).await;
        assert!(served.is_ok(), "{fault:?}");
    });
    join_all(cases).await;
}

/// Longer than the limit of 15 s for the first response of a stream, and shorter than the interval of keepalive pings.
const SILENCE: Duration = Duration::from_secs(16);

#[tokio::test]
async fn a_silent_control_plane_is_abandoned_only_if_there_is_another() {
    for has_second in [false, true] {
        let (mut bench, mut second) = if !has_second {
            (Bench::start().await, None)
        } else {
            let (bench, second) = Bench::with_second().await;
            (bench, Some(second))
        };
        let protocol = Protocol::Sotw;
        let mut envoy = bench.envoy(protocol).await;
        envoy.send_raw(framed(&request(protocol, CLUSTER)));
        let mut istiod = bench.accepted().await;
        soon(istiod.next_bytes()).await.unwrap().unwrap();
        let message = response(protocol, CLUSTER, 10);
        advance_clock(SILENCE).await;
        match &mut second {
            None => {
                istiod.send_bytes(message.clone()).await.unwrap();
                assert_eq!(envoy.next_bytes().await, message);
            }
            Some(second) => {
                let mut istiod = soon(second.streams.recv()).await.unwrap();
                soon(istiod.next_bytes()).await.unwrap().unwrap();
                istiod.send_bytes(message.clone()).await.unwrap();
                assert_eq!(envoy.next_bytes().await, message);
            }
        }
        drop((envoy, istiod));
        bench.finish().await;
    }
}

#[tokio::test]
async fn control_planes_that_are_all_slow_get_more_time() {
    let (mut bench, mut second) = Bench::with_second().await;
    let protocol = Protocol::Delta;
    let mut envoy = bench.envoy(protocol).await;
    envoy.send_raw(framed(&request(protocol, CLUSTER)));
    let mut slow = bench.accepted().await;
    soon(slow.next_bytes()).await.unwrap().unwrap();
    advance_clock(SILENCE).await;
    let mut istiod = soon(second.streams.recv()).await.unwrap();
    soon(istiod.next_bytes()).await.unwrap().unwrap();
    advance_clock(SILENCE).await;
    let message = response(protocol, CLUSTER, 10);
    istiod.send_bytes(message.clone()).await.unwrap();
    assert_eq!(envoy.next_bytes().await, message);
    drop((envoy, istiod, slow));
    bench.finish().await;
}

#[tokio::test]
async fn envoys_requests_are_sent_again_until_istiod_has_answered() {
    for (protocol, _) in PROTOCOLS {
        let mut bench = Bench::start().await;
        bench.health.send_replace(Some(Ok(())));
        let mut envoy = bench.envoy(protocol).await;
        let [first, second] = [CLUSTER, LISTENER].map(|type_url| request(protocol, type_url));
        for request in [&first, &second] {
            envoy.send_raw(framed(request));
        }
        for code in [Code::Unauthenticated, Code::Ok, Code::Unavailable] {
            let mut istiod = bench.accepted().await;
            for request in [&first, &second] {
                assert_eq!(&soon(istiod.next_bytes()).await.unwrap().unwrap(), request);
            }
            let health = soon(istiod.next_bytes()).await.unwrap().unwrap();
            assert!(health.windows(HEALTH.len()).any(|it| it == HEALTH.as_bytes()));
            if code == Code::Ok {
                drop(istiod);
            } else {
                istiod.end(Status::new(code, "not yet")).await;
            }
        }
        assert!(!bench.observer.snapshot().stream.unwrap().connected);
        let mut istiod = bench.accepted().await;
        for request in [&first, &second] {
            assert_eq!(&soon(istiod.next_bytes()).await.unwrap().unwrap(), request);
        }
        assert!(bench.istiod.status().last_error.is_some());
        let message = response(protocol, CLUSTER, 10);
        istiod.send_bytes(message.clone()).await.unwrap();
        assert_eq!(envoy.next_bytes().await, message);
        assert_eq!(bench.istiod.status().last_error, None);
        assert!(bench.observer.snapshot().stream.unwrap().connected);
        istiod.end(Status::aborted("enough")).await;
        assert_eq!(envoy.end().await.code(), Code::Aborted);
        bench.finish().await;
    }
}

#[tokio::test]
async fn envoys_stream_is_held_while_the_token_is_refused() {
    let mut bench = Bench::start().await;
    std::fs::write(bench.directory.path().join("token"), "no token").unwrap();
    let mut envoy = bench.envoy(Protocol::Delta).await;
    envoy.send_raw(framed(&request(Protocol::Delta, CLUSTER)));
    until("an error of istiod", || bench.istiod.status().last_error.is_some()).await;
    let problem = bench.istiod.status().last_error.unwrap().problem;
    // The code is that of an invalid token because the file holds two words.
    assert_eq!(problem.code, problem::Code::IstiodTokenInvalid);
    assert!(problem.found.contains("Unauthenticated: authentication failure"));
    bench.write_token("default", "bench");
    let mut istiod = bench.accepted().await;
    soon(istiod.next_bytes()).await.unwrap().unwrap();
    let message = response(Protocol::Delta, CLUSTER, 10);
    istiod.send_bytes(message.clone()).await.unwrap();
    assert_eq!(envoy.next_bytes().await, message);
    drop((envoy, istiod));
    bench.finish().await;
}

#[tokio::test]
async fn the_stream_of_an_application_ends_with_the_status_of_istiod() {
    let mut bench = Bench::start().await;
    bench.is_envoy.store(false, Ordering::Relaxed);
    let header = ("user-agent", "grpc-go/1.82.1");
    let client = Envoy::open_with(&bench.socket(), Protocol::Sotw.path(), header).await;
    client.send(&DiscoveryRequest::default());
    let istiod = bench.accepted().await;
    istiod.end(Status::permission_denied("not you")).await;
    let status = client.end().await;
    assert_eq!((status.code(), status.message()), (Code::PermissionDenied, "not you"));
    bench.finish().await;
}
