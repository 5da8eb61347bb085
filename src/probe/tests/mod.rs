//! Tests probes of applications on loopback.

mod faults;

use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use http::{HeaderValue, Response, Version};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use super::*;
use crate::proto::grpc_health_v1::health_check_response::ServingStatus;
use crate::proto::grpc_health_v1::health_server::{Health, HealthServer};
use crate::proto::grpc_health_v1::{HealthCheckRequest, HealthCheckResponse};

const SOURCE: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 6));

/// An application that stops when it is dropped.
struct App {
    port: u16,
    _tasks: JoinSet<()>,
}

impl App {
    /// Starts an application that passes each connection to `serve`.
    async fn start<F: Future<Output = ()> + Send + 'static>(
        serve: impl Fn(TcpStream, SocketAddr) -> F + Send + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, from)) = listener.accept().await {
                connections.spawn(serve(stream, from));
            }
        });
        Self { port, _tasks: tasks }
    }

    async fn plain() -> Self {
        Self::start(|stream, from| serve_http(stream, from, false)).await
    }

    /// Starts an application that sends these bytes after the first bytes of a request, again and again
    /// if `endless`.
    async fn raw(bytes: &'static [u8], endless: bool) -> Self {
        Self::start(move |mut stream, _| async move {
            let mut request = [0; 4096];
            let _ = stream.read(&mut request).await;
            while stream.write_all(bytes).await.is_ok() && endless {}
        })
        .await
    }

    async fn tls(alpn: &[&str]) -> Self {
        let key = rcgen::generate_simple_self_signed(["other".to_owned()]).expect("a pair");
        let private = PrivatePkcs8KeyDer::from(key.signing_key.serialize_der());
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_no_client_auth()
            .with_single_cert(vec![key.cert.der().clone()], PrivateKeyDer::from(private))
            .expect("a pair");
        config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
        let acceptor = TlsAcceptor::from(Arc::new(config));
        Self::start(move |stream, from| {
            let acceptor = acceptor.clone();
            async move {
                if let Ok(stream) = acceptor.accept(stream).await {
                    let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
                    serve_http(stream, from, is_http2).await;
                }
            }
        })
        .await
    }

    async fn get(&self, path: &str) -> Result<Outcome, Problem> {
        self.get_with(path, false, &HeaderMap::new()).await
    }

    async fn get_with(
        &self,
        path: &str,
        is_https: bool,
        headers: &HeaderMap,
    ) -> Result<Outcome, Problem> {
        let path = path.to_owned();
        let kind = Kind::Http { is_https, path };
        client(true, false).probe(&self.probe(kind), headers).await
    }

    fn probe(&self, kind: Kind) -> Probe {
        Probe {
            host: "127.0.0.1".to_owned(),
            port: self.port,
            kind,
            timeout: Duration::from_secs(5),
        }
    }
}

async fn serve_http(
    io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    from: SocketAddr,
    is_http2: bool,
) {
    let service =
        service_fn(move |request| async move { Ok::<_, Infallible>(answer(&request, from)) });
    let io = TokioIo::new(io);
    // The probe may close the connection at any time, so an error does not matter.
    let _ = if is_http2 {
        http2::Builder::new(TokioExecutor::new()).serve_connection(io, service).await
    } else {
        http1::Builder::new().serve_connection(io, service).await
    };
}

fn answer(request: &Request<Incoming>, from: SocketAddr) -> Response<Full<Bytes>> {
    let path = request.uri().path().trim_start_matches('/');
    let to = |location: &str| (302, String::new(), Some(location.to_owned()));
    let (status, body, location) = match path {
        "from" => (200, from.ip().to_string(), None),
        "peer" => (200, from.to_string(), None),
        "version" => (200, format!("{:?}", request.version()), None),
        "headers" => (200, format!("{:?}", request.headers()), None),
        "authority" => (200, format!("{:?}", request.uri().authority()), None),
        "query" => (200, request.uri().query().unwrap_or_default().into(), None),
        "redirect" => to("/redirected"),
        "redirected" => (201, "there".into(), None),
        "redirect-loop" => to("/redirect-loop"),
        "redirect-away" => to("http://example.com/"),
        "redirect-badly" => to("http://["),
        "redirect-nowhere" => to(""),
        "redirect-elsewhere" => to("ftp://127.0.0.1/"),
        "large-head" => (200, String::new(), None),
        "long" => (200, "x".repeat(20_000), None),
        status => (status.parse().unwrap_or(404), "echo".into(), None),
    };
    let mut answer = Response::new(Full::new(Bytes::from(body)));
    *answer.status_mut() = StatusCode::from_u16(status).expect("a status");
    if let Some(location) = location {
        let location = HeaderValue::from_str(&location).expect("a value");
        answer.headers_mut().insert(header::LOCATION, location);
    }
    if path == "large-head" {
        let large = HeaderValue::from_str(&"x".repeat(500_000)).expect("a value");
        answer.headers_mut().insert("large", large);
    }
    answer
}

fn client(offers_http2: bool, keeps_connections: bool) -> Client {
    Client::new(Config { source: SOURCE, offers_http2, keeps_connections }).expect("a client")
}

#[tokio::test]
async fn the_status_is_the_applications_except_for_redirects() {
    let app = App::plain().await;
    for status in (200..=511).filter(|status| ![204, 205, 304].contains(status)) {
        let outcome = app.get(&status.to_string()).await.expect("an answer");
        let expected = if (300..400).contains(&status) { 200 } else { status };
        assert_eq!(outcome.status.as_u16(), expected);
        assert_eq!(outcome.body, "echo");
    }
    for (path, expected) in [
        ("304", 200),
        ("204", 204),
        ("/redirect", 201),
        ("redirect-away", 200),
        ("redirect-nowhere", 200),
        ("redirect-elsewhere", 200),
    ] {
        let outcome = app.get(path).await.expect("an answer");
        assert_eq!(outcome.status.as_u16(), expected, "{path}");
    }
}

#[tokio::test]
async fn probes_come_from_the_source_address_with_the_callers_headers() {
    let app = App::plain().await;
    let body = |outcome: Result<Outcome, Problem>| outcome.expect("an answer").body;
    assert_eq!(body(app.get("from").await), "127.0.0.6");
    assert_eq!(body(app.get("query?a=b").await), "a=b");
    assert_eq!(body(app.get("long").await).len(), 10_240);
    let mut headers = HeaderMap::new();
    headers.insert("host", HeaderValue::from_static("cart:80"));
    headers.append("x-twice", HeaderValue::from_static("1"));
    headers.append("x-twice", HeaderValue::from_static("2"));
    let got = body(app.get_with("headers", false, &headers).await);
    let expected = "{\"host\": \"cart:80\", \"x-twice\": \"1\", \"x-twice\": \"2\", \"connection\": \"close\"}";
    assert_eq!(got, expected);
}

#[tokio::test]
async fn connections_are_kept_only_if_configured() {
    let app = App::plain().await;
    for keeps in [false, true] {
        let client = client(true, keeps);
        let path = "peer".to_owned();
        let is_https = false;
        let probe = app.probe(Kind::Http { is_https, path });
        let first = client.probe(&probe, &HeaderMap::new()).await.expect("one");
        let second = client.probe(&probe, &HeaderMap::new()).await.expect("two");
        assert_eq!(first.body == second.body, keeps);
    }
}

#[tokio::test]
async fn a_kept_connection_the_application_has_closed_is_replaced() {
    let app = App::start(|mut stream, from| async move {
        let mut request = [0; 4096];
        let _ = stream.read(&mut request).await;
        let from = format!("{from:>21}");
        let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: 21\r\n\r\n{from}");
        let _ = stream.write_all(answer.as_bytes()).await;
    })
    .await;
    let client = client(true, true);
    let path = String::new();
    let is_https = false;
    let probe = app.probe(Kind::Http { is_https, path });
    let first = client.probe(&probe, &HeaderMap::new()).await.expect("one");
    let second = client.probe(&probe, &HeaderMap::new()).await.expect("two");
    assert_ne!(first.body, second.body);
}

#[tokio::test]
async fn tls_accepts_any_certificate_and_negotiates_the_protocol() {
    let (http1, http2) = (Version::HTTP_11, Version::HTTP_2);
    for (alpn, offers_http2, expected) in [
        (&[][..], true, Some(http1)),
        (&["http/1.1"], true, Some(http1)),
        (&["h2"], true, Some(http2)),
        (&["h2", "http/1.1"], true, Some(http2)),
        (&["h2", "http/1.1"], false, Some(http1)),
        (&["h2"], false, None),
        (&["foo"], true, None),
    ] {
        let app = App::tls(alpn).await;
        let path = "version".to_owned();
        let is_https = true;
        let probe = app.probe(Kind::Http { is_https, path });
        let outcome = client(offers_http2, false).probe(&probe, &HeaderMap::new()).await;
        match expected {
            Some(version) => {
                assert_eq!(outcome.expect("an answer").body, format!("{version:?}"));
            }
            None => assert!(outcome.is_err(), "{alpn:?}"),
        }
    }
}

#[tokio::test]
async fn http2_has_the_host_header_as_its_authority() {
    let app = App::tls(&["h2"]).await;
    let client = client(true, true);
    let mut headers = HeaderMap::new();
    headers.insert("host", HeaderValue::from_static("cart:80"));
    let (is_https, path) = (true, "authority".to_owned());
    let probe = app.probe(Kind::Http { is_https, path });
    let outcome = client.probe(&probe, &headers).await;
    assert_eq!(outcome.expect("an answer").body, "Some(cart:80)");
}

#[tokio::test]
async fn large_heads_are_read_in_every_protocol() {
    for alpn in ["h2", "http/1.1"] {
        let app = App::tls(&[alpn]).await;
        let outcome = app.get_with("large-head", true, &HeaderMap::new()).await;
        assert_eq!(outcome.expect("an answer").status, StatusCode::OK, "{alpn}");
    }
}

#[tokio::test]
async fn a_tcp_probe_succeeds_if_a_connection_is_accepted() {
    let app = App::plain().await;
    let probe = app.probe(Kind::Tcp);
    let outcome = client(true, false).probe(&probe, &HeaderMap::new()).await;
    assert_eq!(outcome.expect("a connection").status, StatusCode::OK);
    drop(app);
    let outcome = client(true, false).probe(&probe, &HeaderMap::new()).await;
    assert!(outcome.is_err());
}

/// A health service that responds with the status that the name of the service selects, and fails for
/// other names. For an empty name, it expects the kubelet's user agent.
struct Fake;

#[tonic::async_trait]
impl Health for Fake {
    async fn check(
        &self,
        request: tonic::Request<HealthCheckRequest>,
    ) -> Result<tonic::Response<HealthCheckResponse>, tonic::Status> {
        let agent = request.metadata().get("user-agent");
        let is_kubelet = agent.is_some_and(|agent| agent == "kube-probe/1.30");
        let status = match request.get_ref().service.as_str() {
            "" if is_kubelet => ServingStatus::Serving,
            "down" => ServingStatus::NotServing,
            "unknown" => ServingStatus::Unknown,
            _ => return Err(tonic::Status::unimplemented("no such service")),
        };
        Ok(tonic::Response::new(HealthCheckResponse { status: status.into() }))
    }
}

#[tokio::test]
async fn a_grpc_probe_succeeds_if_the_service_is_serving() {
    let app = App::start(|stream, _| async move {
        let service = hyper_util::service::TowerToHyperService::new(HealthServer::new(Fake));
        let _ = http2::Builder::new(TokioExecutor::new())
            .serve_connection(TokioIo::new(stream), service)
            .await;
    })
    .await;
    let mut headers = HeaderMap::new();
    let agent = HeaderValue::from_static("kube-probe/1.30");
    headers.insert(header::USER_AGENT, agent);
    for (service, expected) in [
        ("", ""),
        ("down", "the application answers NOT_SERVING, expected SERVING"),
        ("unknown", "the application answers UNKNOWN, expected SERVING"),
        ("other", "the health check failed"),
    ] {
        let service = service.to_owned();
        let probe = app.probe(Kind::Grpc { service });
        let outcome = client(true, false).probe(&probe, &headers).await;
        let found = outcome.map_or_else(|problem| problem.found, |_| String::new());
        assert!(found.starts_with(expected) && found.is_empty() == expected.is_empty(), "{found}");
    }
    let silent = App::plain().await;
    let service = String::new();
    let probe = silent.probe(Kind::Grpc { service });
    assert!(client(true, false).probe(&probe, &headers).await.is_err());
}

#[tokio::test]
async fn a_grpc_probe_is_addressed_to_the_host_and_port_it_dials() {
    let (sender, mut authorities) = tokio::sync::mpsc::unbounded_channel();
    let app = App::start(move |stream, _| {
        let sender = sender.clone();
        async move {
            let service = service_fn(move |request: Request<Incoming>| {
                let authority = request.uri().authority().map(ToString::to_string);
                sender.send(authority).expect("a receiver");
                async { Ok::<_, Infallible>(Response::new(Full::<Bytes>::default())) }
            });
            let _ = http2::Builder::new(TokioExecutor::new())
                .serve_connection(TokioIo::new(stream), service)
                .await;
        }
    })
    .await;
    let service = String::new();
    let mut probe = app.probe(Kind::Grpc { service });
    let answer = client(true, false).probe(&probe, &HeaderMap::new()).await;
    assert!(answer.is_err(), "it is no health check");
    let expected = format!("127.0.0.1:{}", app.port);
    assert_eq!(authorities.recv().await, Some(Some(expected)));
    (probe.host, probe.port) = ("fd00::1".to_owned(), 80);
    let url = url("http", &probe, "").expect("an address");
    assert_eq!(url.authority().expect("a host").as_str(), "[fd00::1]:80");
}

#[test]
fn the_callers_host_is_forwarded_and_its_connection_headers_are_not() {
    let mut headers = HeaderMap::new();
    for (name, value) in [
        ("host", "cart"),
        ("x-twice", "1"),
        ("x-twice", "2"),
        ("connection", "keep-alive"),
        ("content-length", "5"),
    ] {
        headers.append(name, HeaderValue::from_static(value));
    }
    let probe =
        Probe { host: "::1".to_owned(), port: 80, kind: Kind::Tcp, timeout: Duration::ZERO };
    let request = http_request(url("http", &probe, "x").expect("an address"), &headers);
    assert_eq!(request.uri(), "http://[::1]:80/x");
    let found: Vec<_> = request
        .headers()
        .iter()
        .map(|(name, value)| (name.as_str(), value.to_str().expect("text")))
        .collect();
    assert_eq!(found, [("host", "cart"), ("x-twice", "1"), ("x-twice", "2")]);
}
