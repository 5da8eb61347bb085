//! Implements a fake istiod for tests: HTTP/2 on loopback, with TLS or in plaintext, a certificate
//! service that follows a script, and streams that misbehave on demand.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::StreamBody;
use hyper::body::{Frame, Incoming};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, date_time_ymd,
};
use rustls::ServerConfig;
use rustls::crypto::aws_lc_rs::sign::any_supported_type;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use tokio::net::TcpListener;
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};
use tower::Service;

use crate::metrics::Registry;
use crate::trust::compliance::Policy;

use super::{Body, Config, Istiod, Keepalive, Limits, Security, tls, token};
use crate::proto::istio_v1_auth::istio_certificate_service_server::{
    IstioCertificateService, IstioCertificateServiceServer,
};
use crate::proto::istio_v1_auth::{IstioCertificateRequest, IstioCertificateResponse};

pub(crate) const NAME: &str = "istiod.istio-system.svc";

/// The path of a stream that sends data without end, as fast as the client reads it.
pub(crate) const ENDLESS: &str = "/test/Endless";
/// The path of a stream that sends the texts of [`Fake::say`].
pub(crate) const HELD: &str = "/test/Held";

pub(crate) struct Authority(CertifiedIssuer<'static, KeyPair>);

pub(crate) struct Pair {
    pub(crate) chain: String,
    pub(crate) key: String,
}

pub(crate) fn key_pem() -> String {
    KeyPair::generate().unwrap().serialize_pem()
}

impl Authority {
    pub(crate) fn new(name: &str) -> Self {
        Self::until(name, 2999)
    }

    pub(crate) fn expired(name: &str) -> Self {
        Self::until(name, 2001)
    }

    fn until(name: &str, year: i32) -> Self {
        let params = Self::params(name, year);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// Creates an authority whose certificate this authority signs.
    pub(crate) fn below(&self, name: &str) -> Self {
        let (params, key) = (Self::params(name, 2999), KeyPair::generate().unwrap());
        Self(CertifiedIssuer::signed_by(params, key, &self.0).unwrap())
    }

    /// Returns the parameters of a CA certificate that a server can also use as its own certificate.
    fn params(name: &str, year: i32) -> CertificateParams {
        let mut params = CertificateParams::new([NAME.to_owned(), "127.0.0.1".to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.not_before = date_time_ymd(2000, 1, 1);
        params.not_after = date_time_ymd(year, 1, 1);
        params
    }

    /// Returns a resolver that makes a server send the certificates of these authorities, the server's
    /// own first.
    pub(crate) fn shown(chain: &[&Self]) -> Arc<SingleCertAndKey> {
        let key = PrivateKeyDer::try_from(chain[0].0.key().serialize_der()).unwrap();
        let chain = chain.iter().map(|authority| authority.0.der().clone());
        let pair = CertifiedKey::new(chain.collect(), any_supported_type(&key).unwrap());
        Arc::new(pair.into())
    }

    pub(crate) fn pem(&self) -> String {
        self.0.pem()
    }

    pub(crate) fn issue(&self, name: &str) -> Pair {
        self.issue_until(name, 2999)
    }

    pub(crate) fn issue_until(&self, name: &str, year: i32) -> Pair {
        self.issue_for(name, [2000, year])
    }

    /// Issues a certificate that is valid from the first to the second year.
    fn issue_for(&self, name: &str, years: [i32; 2]) -> Pair {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new([name.to_owned()]).unwrap();
        params.not_before = date_time_ymd(years[0], 1, 1);
        params.not_after = date_time_ymd(years[1], 1, 1);
        let chain = params.signed_by(&key, &self.0).unwrap().pem();
        let key = key.serialize_pem();
        Pair { chain, key }
    }
}

/// The requirement for client certificates.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Clients {
    Optional,
    Required,
}

/// Returns the TLS settings of a server with a certificate of `authority` for `name`. The certificates
/// of clients must be issued by `authority`, too.
pub(crate) fn server_tls(authority: &Authority, name: &str, clients: Clients) -> ServerConfig {
    server_tls_for(authority, name, clients, [2000, 2999])
}

/// Returns the same settings as [`server_tls`], with a certificate that is valid from the first to the
/// second year.
pub(crate) fn server_tls_for(
    authority: &Authority,
    name: &str,
    clients: Clients,
    years: [i32; 2],
) -> ServerConfig {
    let pair = authority.issue_for(name, years);
    let chain = CertificateDer::from_pem_slice(pair.chain.as_bytes()).unwrap();
    let key = PrivateKeyDer::from_pem_slice(pair.key.as_bytes()).unwrap();
    let mut roots = rustls::RootCertStore::empty();
    roots.add(authority.0.der().clone()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone());
    let verifier = match clients {
        Clients::Optional => verifier.allow_unauthenticated(),
        Clients::Required => verifier,
    };
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_client_cert_verifier(verifier.build().unwrap())
        .with_single_cert(vec![chain], key)
        .unwrap();
    config.alpn_protocols = vec![b"h2".to_vec()];
    config
}

/// Limits the TLS settings of a server to one cipher suite and one key exchange. The server then
/// requests no client certificate.
pub(crate) fn offer(
    config: &mut ServerConfig,
    suite: rustls::SupportedCipherSuite,
    group: &'static dyn rustls::crypto::SupportedKxGroup,
) {
    let mut provider = rustls::crypto::CryptoProvider::clone(config.crypto_provider());
    provider.cipher_suites = vec![suite];
    provider.kx_groups = vec![group];
    let provider = Arc::new(provider);
    let versions = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[suite.version()])
        .unwrap();
    let mut narrow =
        versions.with_no_client_auth().with_cert_resolver(config.cert_resolver.clone());
    narrow.alpn_protocols.clone_from(&config.alpn_protocols);
    *config = narrow;
}

#[derive(Clone)]
pub(crate) enum Answer {
    Chain(Vec<&'static str>),
    Refusal(Code, &'static str),
    Never,
}

#[derive(Default)]
pub(crate) struct Seen {
    /// The connections that have reached HTTP/2: true for each that has a client certificate.
    pub(crate) connections: Vec<bool>,
    pub(crate) requests: Vec<http::request::Parts>,
    pub(crate) signing: Vec<IstioCertificateRequest>,
    /// The number of bytes that were handed to HTTP/2 for [`ENDLESS`].
    pub(crate) streamed: usize,
}

#[derive(Clone, Default)]
struct Shared {
    seen: Arc<Mutex<Seen>>,
    script: Arc<Mutex<VecDeque<Answer>>>,
    words: Arc<Mutex<Option<mpsc::UnboundedReceiver<Bytes>>>>,
    close: Arc<Notify>,
    go_away: Arc<Notify>,
}

/// A running server that stops when it is dropped.
pub(crate) struct Fake {
    pub(crate) address: SocketAddr,
    shared: Shared,
    words: mpsc::UnboundedSender<Bytes>,
    _tasks: JoinSet<()>,
}

impl Fake {
    pub(crate) async fn start(tls: Option<ServerConfig>) -> Self {
        Self::at("127.0.0.1:0".parse().unwrap(), tls).await
    }

    pub(crate) async fn at(address: SocketAddr, tls: Option<ServerConfig>) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (words, heard) = mpsc::unbounded_channel();
        let shared = Shared::default();
        *shared.words.lock().unwrap() = Some(heard);
        let mut tasks = JoinSet::new();
        let tls = tls.map(|tls| TlsAcceptor::from(Arc::new(tls)));
        tasks.spawn(accept(listener, tls, shared.clone()));
        Self { address, shared, words, _tasks: tasks }
    }

    pub(crate) fn seen(&self) -> std::sync::MutexGuard<'_, Seen> {
        self.shared.seen.lock().unwrap()
    }

    pub(crate) fn answers(&self, answers: impl IntoIterator<Item = Answer>) {
        self.shared.script.lock().unwrap().extend(answers);
    }

    pub(crate) fn say(&self, words: &'static str) {
        self.words.send(Bytes::from_static(words.as_bytes())).unwrap();
    }

    /// Drops all connections.
    pub(crate) fn close(&self) {
        self.shared.close.notify_waiters();
    }

    pub(crate) fn go_away(&self) {
        self.shared.go_away.notify_waiters();
    }
}

async fn accept(listener: TcpListener, tls: Option<TlsAcceptor>, shared: Shared) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let (tls, shared) = (tls.clone(), shared.clone());
        connections.spawn(async move {
            match tls {
                None => serve(stream, false, shared).await,
                Some(tls) => {
                    if let Ok(stream) = tls.accept(stream).await {
                        let client = stream.get_ref().1.peer_certificates().is_some();
                        serve(stream, client, shared).await;
                    }
                }
            }
        });
    }
}

async fn serve<T>(io: T, client: bool, shared: Shared)
where
    T: tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + Unpin + 'static,
{
    shared.seen.lock().unwrap().connections.push(client);
    let (close, go_away) = (shared.close.clone(), shared.go_away.clone());
    let service = hyper::service::service_fn(move |request| respond(shared.clone(), request));
    let mut serving = std::pin::pin!(
        hyper::server::conn::http2::Builder::new(TokioExecutor::new())
            .serve_connection(TokioIo::new(io), service)
    );
    let mut closing = std::pin::pin!(close.notified());
    tokio::select! {
        _ = &mut serving => return,
        () = &mut closing => return,
        () = go_away.notified() => serving.as_mut().graceful_shutdown(),
    }
    tokio::select! {
        _ = &mut serving => {}
        () = &mut closing => {}
    }
}

async fn respond(
    shared: Shared,
    request: http::Request<Incoming>,
) -> Result<http::Response<Body>, Infallible> {
    let (parts, body) = request.into_parts();
    let path = parts.uri.path().to_owned();
    shared.seen.lock().unwrap().requests.push(parts.clone());
    match path.as_str() {
        ENDLESS => {
            let chunk = Bytes::from_static(&[b'x'; 16 * 1024]);
            let chunks = std::iter::repeat_with(move || {
                shared.seen.lock().unwrap().streamed += chunk.len();
                chunk.clone()
            });
            Ok(streaming(tokio_stream::iter(chunks)))
        }
        HELD => {
            let heard = shared.words.lock().unwrap().take().unwrap();
            Ok(streaming(tokio_stream::wrappers::UnboundedReceiverStream::new(heard)))
        }
        _ => {
            let request = http::Request::from_parts(parts, body);
            IstioCertificateServiceServer::new(shared).call(request).await
        }
    }
}

fn streaming(
    chunks: impl tokio_stream::Stream<Item = Bytes> + Send + 'static,
) -> http::Response<Body> {
    let frames = tokio_stream::StreamExt::map(chunks, |chunk| Ok::<_, Status>(Frame::data(chunk)));
    http::Response::new(Body::new(StreamBody::new(frames)))
}

#[tonic::async_trait]
impl IstioCertificateService for Shared {
    async fn create_certificate(
        &self,
        request: tonic::Request<IstioCertificateRequest>,
    ) -> Result<tonic::Response<IstioCertificateResponse>, Status> {
        self.seen.lock().unwrap().signing.push(request.into_inner());
        let answer = self.script.lock().unwrap().pop_front();
        match answer.unwrap_or(Answer::Never) {
            Answer::Chain(chain) => Ok(tonic::Response::new(IstioCertificateResponse {
                cert_chain: chain.into_iter().map(str::to_owned).collect(),
            })),
            Answer::Refusal(code, message) => Err(Status::new(code, message)),
            Answer::Never => std::future::pending().await,
        }
    }
}

/// Returns the settings of plaintext connections to `address`, without a token, and without a minimum
/// time between dials.
pub(crate) fn plaintext(address: impl ToString) -> Config {
    Config {
        address: address.to_string(),
        security: Security::Plaintext,
        token: token::Source::None,
        metadata: Vec::new(),
        keepalive: Keepalive {
            interval: Duration::from_secs(30),
            timeout: Duration::from_secs(10),
        },
        proxy: None,
        limits: Limits { least_between: Duration::ZERO, ..Limits::default() },
        setting: "discoveryAddress",
        identity: crate::trust::identity::SpiffeId::new("cluster.local", "shop", "cart"),
        fallbacks: Vec::new(),
    }
}

/// Returns the settings of TLS connections to `address`, with the root certificates in the file
/// `roots`.
pub(crate) fn encrypted(address: impl ToString, roots: &Path) -> Config {
    Config {
        security: Security::Tls(tls::Config {
            server_name: NAME.to_owned(),
            roots: tls::Roots::File(roots.to_owned()),
            client: None,
            policy: Policy::None,
        }),
        ..plaintext(address)
    }
}

/// Returns a handle, and the task that owns its connection.
pub(crate) fn run(config: Config) -> (Istiod, JoinSet<()>) {
    let (istiod, future) = super::new(config, &Registry::default(), CancellationToken::new());
    let mut tasks = JoinSet::new();
    tasks.spawn(future);
    (istiod, tasks)
}

/// A temporary directory with the files of a configuration.
pub(crate) struct Files(tempfile::TempDir);

impl Files {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn write(&self, name: &str, content: &str) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, content).unwrap();
        path
    }
}
