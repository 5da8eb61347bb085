//! Both peers of the measured relay, as cheap as possible: a control plane behind TLS that responds to
//! each request with a message of the requested size, and a client that counts bytes.

use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse, Resource,
};
use envoy_types::pb::google::protobuf::Any;
use http_body::{Body, Frame};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use istio_agent::xds::Protocol;
use istio_agent::xds::request::RequestReader;
use prost::Message;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_rustls::rustls::crypto::{CryptoProvider, aws_lc_rs};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{CipherSuite, ClientConfig, RootCertStore, ServerConfig};
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// The name in the control plane's certificate.
pub const NAME: &str = "istiod.istio-system.svc";

const LISTENER: &str = "type.googleapis.com/envoy.config.listener.v3.Listener";
const CLUSTER: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";
/// The size of the pieces in which a response is sent: HTTP/2 does not put more into one DATA frame by
/// default.
const PIECE: usize = 16 * 1024;

/// The approximate size of a discovery response and of each of its resources, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub bytes: usize,
    pub resource: usize,
}

/// A control plane on a thread of its own. It responds to requests whose type URL is a [`Shape`].
pub struct ControlPlane {
    pub address: String,
    pub root_pem: String,
}

impl ControlPlane {
    pub fn start() -> Self {
        let certified = rcgen::generate_simple_self_signed(vec![NAME.to_owned()]).expect("a key");
        let root_pem = certified.cert.pem();
        let key = PrivateKeyDer::try_from(certified.signing_key.serialize_der()).expect("a key");
        let chain: Vec<CertificateDer<'static>> = vec![certified.cert.der().clone()];
        let mut config = ServerConfig::builder_with_provider(Arc::new(provider()))
            .with_safe_default_protocol_versions()
            .expect("TLS versions")
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .expect("a usable certificate");
        config.ignore_client_order = true;
        config.alpn_protocols = vec![b"h2".to_vec()];
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        listener.set_nonblocking(true).expect("a socket");
        let address = format!("localhost:{}", listener.local_addr().expect("bound").port());
        std::thread::spawn(move || block_on(serve(listener, acceptor)));
        Self { address, root_pem }
    }

    /// Opens a TLS connection to the control plane in the way that the agent does.
    pub async fn dial(
        address: &str,
        root_pem: &str,
    ) -> io::Result<impl AsyncRead + AsyncWrite + Unpin + use<>> {
        let mut roots = RootCertStore::empty();
        let root = PemObject::from_pem_slice(root_pem.as_bytes());
        let root: CertificateDer<'static> = root.expect("a certificate");
        roots.add(root).expect("a root");
        let mut config =
            ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
        config.alpn_protocols = vec![b"h2".to_vec()];
        let tcp = TcpStream::connect(address).await?;
        tcp.set_nodelay(true)?;
        let name = ServerName::try_from(NAME).expect("a name");
        TlsConnector::from(Arc::new(config)).connect(name, tcp).await
    }
}

/// Returns a provider that prefers AES-128, like istiod: a Go server picks it, whatever the client's
/// order is.
fn provider() -> CryptoProvider {
    let mut provider = aws_lc_rs::default_provider();
    let aes_128 = CipherSuite::TLS13_AES_128_GCM_SHA256;
    provider.cipher_suites.sort_by_key(|suite| suite.suite() != aes_128);
    provider
}

/// Runs a future on a runtime of this thread.
pub fn block_on<F: Future>(future: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(future)
}

async fn serve(listener: std::net::TcpListener, acceptor: TlsAcceptor) {
    let listener = TcpListener::from_std(listener).expect("a socket");
    while let Ok((stream, _)) = listener.accept().await {
        stream.set_nodelay(true).expect("a TCP socket");
        let acceptor = acceptor.clone();
        tokio::task::spawn(async move {
            let Ok(stream) = acceptor.accept(stream).await else {
                return;
            };
            let service = hyper::service::service_fn(answer);
            let _ = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                .max_send_buf_size(1024 * 1024)
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
    }
}

async fn answer(request: http::Request<Incoming>) -> Result<http::Response<Answers>, Infallible> {
    let (sender, receiver) = mpsc::channel(16);
    if let Some(protocol) = Protocol::from_path(request.uri().path()) {
        tokio::task::spawn(send_answers(protocol, request.into_body(), sender));
    }
    let response = http::Response::builder().header("content-type", "application/grpc");
    Ok(response.body(Answers(receiver)).expect("a response"))
}

async fn send_answers(protocol: Protocol, mut requests: Incoming, answers: mpsc::Sender<Bytes>) {
    let mut reader = RequestReader::new(protocol, usize::MAX);
    let mut cached: Option<(String, Bytes)> = None;
    while let Some(Ok(frame)) = requests.frame().await {
        let Ok(bytes) = frame.into_data() else {
            continue;
        };
        let mut asked = Vec::new();
        let read = reader.feed(bytes, |request| {
            if request.nonce.is_empty() {
                asked.push(request.type_url);
            }
        });
        read.expect("a request");
        for shape in asked {
            if cached.as_ref().is_none_or(|(cached, _)| *cached != shape) {
                let answer = match Change::parse(&shape) {
                    Some(change) => change.response(),
                    None if shape == LISTENER => empty(),
                    None => response(protocol, Shape::parse(&shape)),
                };
                cached = Some((shape, answer));
            }
            let Some((_, answer)) = &cached else { return };
            let mut rest = answer.clone();
            while !rest.is_empty() {
                let piece = rest.split_to(rest.len().min(PIECE));
                if answers.send(piece).await.is_err() {
                    return;
                }
            }
        }
    }
}

impl Shape {
    pub fn new(bytes: usize, resource: usize) -> Self {
        Self { bytes, resource }
    }

    fn parse(text: &str) -> Self {
        let (bytes, resource) = text.split_once('/').expect("a shape");
        let number = |text: &str| text.parse().expect("a number");
        Self::new(number(bytes), number(resource))
    }
}

/// Returns a framed delta response without listeners.
pub fn empty() -> Bytes {
    let (type_url, nonce) = (LISTENER.to_owned(), "nonce".to_owned());
    framed(&DeltaDiscoveryResponse { type_url, nonce, ..Default::default() }.encode_to_vec())
}

/// A response with some clusters of a mesh whose names differ, as those of a real mesh do.
#[derive(Clone, Copy, Debug)]
pub struct Change {
    pub revision: usize,
    pub first: usize,
    pub count: usize,
}

impl Change {
    /// Returns a framed request for the response.
    pub fn request(self) -> Bytes {
        let Self { revision, first, count } = self;
        framed_request(Protocol::Delta, format!("change/{revision}/{first}/{count}"), "")
    }

    fn parse(text: &str) -> Option<Self> {
        let numbers = text.strip_prefix("change/")?.split('/');
        let numbers: Vec<usize> = numbers.map(|it| it.parse().expect("a number")).collect();
        let &[revision, first, count] = &numbers[..] else { return None };
        Some(Self { revision, first, count })
    }

    pub fn response(self) -> Bytes {
        let numbers = self.first..self.first + self.count;
        let message = DeltaDiscoveryResponse {
            resources: numbers.map(|number| varied(number, self.revision)).collect(),
            type_url: CLUSTER.into(),
            nonce: "nonce".into(),
            ..Default::default()
        };
        framed(&message.encode_to_vec())
    }
}

/// Returns a cluster of about 1.3 kB: text that all clusters have, between names that only this one has.
fn varied(number: usize, revision: usize) -> Resource {
    let mut random = fastrand::Rng::with_seed(number as u64);
    let mut word = || {
        let length = random.usize(4..12);
        std::iter::repeat_with(|| random.lowercase()).take(length).collect::<String>()
    };
    let (service, namespace, account) = (format!("{}-{}", word(), word()), word(), word());
    let host = format!("{service}.{namespace}.svc.cluster.local");
    let name = format!("outbound|8080||{host}");
    let common = "envoy.transport_sockets.tls type.googleapis.com/envoy.extensions.transport_sockets.tls.v3\
                  UpstreamTlsContext sds default ROOTCA path ./var/run/secrets/workload-spiffe-uds/socket ";
    let parts = [
        &name,
        common,
        &host,
        &format!("spiffe://cluster.local/ns/{namespace}/sa/{account}"),
        &common.repeat(3),
        &host,
        &format!("revision {revision} of {service} in {namespace} {:x}", random.u64(..)),
        &common.repeat(2),
    ];
    let any = Any { type_url: CLUSTER.into(), value: parts.concat().into_bytes() };
    let version = format!("{revision}/{:x}", random.u64(..));
    Resource { name, resource: Some(any), version, ..Default::default() }
}

/// Returns a framed response of this shape.
pub fn response(protocol: Protocol, shape: Shape) -> Bytes {
    let any = |size| Any { type_url: CLUSTER.into(), value: vec![b'c'; size] };
    let count = (shape.bytes / shape.resource).max(1);
    // The type URL and the framing of a resource take about 70 bytes.
    let each = (shape.bytes / count).saturating_sub(70);
    let message = match protocol {
        Protocol::Sotw => DiscoveryResponse {
            version_info: "1".into(),
            resources: (0..count).map(|_| any(each)).collect(),
            type_url: CLUSTER.into(),
            nonce: "nonce".into(),
            ..Default::default()
        }
        .encode_to_vec(),
        Protocol::Delta => DeltaDiscoveryResponse {
            resources: (0..count)
                .map(|i| Resource {
                    name: i.to_string(),
                    resource: Some(any(each)),
                    ..Default::default()
                })
                .collect(),
            type_url: CLUSTER.into(),
            nonce: "nonce".into(),
            ..Default::default()
        }
        .encode_to_vec(),
    };
    framed(&message)
}

/// Returns a framed request for a response of this shape.
pub fn request(protocol: Protocol, shape: Shape) -> Bytes {
    let type_url = format!("{}/{}", shape.bytes, shape.resource);
    framed_request(protocol, type_url, "")
}

/// Returns the framed ACK of a response.
fn ack(protocol: Protocol) -> Bytes {
    framed_request(protocol, CLUSTER.to_owned(), "nonce")
}

fn framed_request(protocol: Protocol, type_url: String, nonce: &str) -> Bytes {
    let (response_nonce, node) = (nonce.to_owned(), Some(Node::default()));
    framed(&match protocol {
        Protocol::Sotw => DiscoveryRequest { node, type_url, response_nonce, ..Default::default() }
            .encode_to_vec(),
        Protocol::Delta => {
            DeltaDiscoveryRequest { node, type_url, response_nonce, ..Default::default() }
                .encode_to_vec()
        }
    })
}

/// Returns the message with gRPC's prefix of five bytes.
pub fn framed(message: &[u8]) -> Bytes {
    let length = u32::try_from(message.len()).expect("under 4 GiB").to_be_bytes();
    Bytes::from([&[0], &length[..], message].concat())
}

/// A body with the bytes from a channel: the responses of the control plane, or the requests of the
/// client.
struct Answers(mpsc::Receiver<Bytes>);

impl Body for Answers {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(context).map(|bytes| bytes.map(|bytes| Ok(Frame::data(bytes))))
    }
}

/// An ADS stream that is opened in the way that Envoy does. It only counts the received bytes.
pub struct Client {
    protocol: Protocol,
    requests: mpsc::Sender<Bytes>,
    body: Incoming,
}

impl Client {
    /// Opens a stream over `io`, with large HTTP/2 windows.
    pub async fn open(
        io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        protocol: Protocol,
        first: Bytes,
    ) -> Self {
        let (mut send, connection) = hyper::client::conn::http2::Builder::new(TokioExecutor::new())
            .initial_stream_window_size(4 * 1024 * 1024)
            .initial_connection_window_size(8 * 1024 * 1024)
            .handshake(TokioIo::new(io))
            .await
            .expect("HTTP/2");
        tokio::task::spawn(connection);
        let (requests, receiver) = mpsc::channel(16);
        requests.send(first).await.expect("the receiver is here");
        let request = http::Request::post(format!("http://{NAME}{}", protocol.path()))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(Answers(receiver))
            .expect("a request");
        let response = send.send_request(request).await.expect("a response");
        Self { protocol, requests, body: response.into_body() }
    }

    /// Sends the ACK of the last message and requests another message.
    pub async fn ask(&mut self, shape: Shape) {
        self.send(ack(self.protocol)).await;
        self.send(request(self.protocol, shape)).await;
    }

    /// Sends the ACK of the last message.
    pub async fn acknowledge(&mut self) {
        self.send(ack(self.protocol)).await;
    }

    /// Asks for listeners, gets none, and acknowledges that.
    pub async fn take_no_listeners(&mut self) {
        self.send(framed_request(self.protocol, LISTENER.to_owned(), "")).await;
        self.read(empty().len(), None).await;
        self.send(framed_request(self.protocol, LISTENER.to_owned(), "nonce")).await;
    }

    /// Sends a framed request.
    pub async fn send(&mut self, request: Bytes) {
        let sent = self.requests.send(request).await;
        sent.expect("the stream is open");
    }

    /// Reads until the stream ends, and counts the bytes meanwhile.
    pub async fn read_to_end(&mut self, read: &AtomicU64) {
        while let Some(Ok(frame)) = self.body.frame().await {
            let bytes = frame.data_ref().map_or(0, Bytes::len);
            read.fetch_add(bytes as u64, Ordering::Relaxed);
        }
    }

    /// Reads `bytes` bytes, with a pause after each frame if a rate is given.
    pub async fn read(&mut self, bytes: usize, bytes_per_second: Option<f64>) {
        let mut left = bytes;
        while left > 0 {
            let frame = poll_fn(|context| Pin::new(&mut self.body).poll_frame(context)).await;
            let frame = frame.expect("the stream is open").expect("a frame");
            let data = frame.into_data().unwrap_or_else(|f| panic!("ended with {f:?}"));
            if let Some(rate) = bytes_per_second {
                tokio::time::sleep(Duration::from_secs_f64(data.len() as f64 / rate)).await;
            }
            left = left.checked_sub(data.len()).expect("no more than asked for");
        }
    }
}
