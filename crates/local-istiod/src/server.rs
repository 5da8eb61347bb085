//! The listener: TLS, HTTP/2 and the routing to the two services, with one task per connection.
//!
//! All connections and their streams belong to the future that accepts them. Dropping this future closes
//! all of them at once, like a crash; cancelling the token lets streams end with a status first.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::RwLock;
use rcgen::KeyPair;
use rustls::RootCertStore;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::server::WebPkiClientVerifier;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;
use tonic::body::Body;
use tonic::codegen::{Service, StdError};

use super::authority::{Authority, AuthorityError};
use super::caller::Peer;
use super::certificates::Certificates;
use super::event::Event;
use super::stream::{Acceptor, Variant};
use crate::proto::istio_certificate_service_server::IstioCertificateServiceServer;

/// The HTTP/2 window for received data. It is large, so that only a client's own windows slow a test
/// down.
const WINDOW: u32 = 16 * 1024 * 1024;
const HANDSHAKE: Duration = Duration::from_secs(10);
const PING_INTERVAL: Duration = Duration::from_secs(30);
const PING_TIMEOUT: Duration = Duration::from_secs(10);

/// The certificate of the control plane, and the authority that verifies client certificates.
#[derive(Debug)]
pub(super) struct Tls {
    pub(super) leaf: Vec<u8>,
    pub(super) key: KeyPair,
    pub(super) authority: Arc<Authority>,
}

/// The services of every connection.
#[derive(Clone)]
pub(super) struct Services {
    pub(super) discovery: Acceptor,
    pub(super) certificates: IstioCertificateServiceServer<Certificates>,
}

/// The peers of all connections accepted so far.
#[derive(Debug, Default)]
pub(super) struct Peers(RwLock<Vec<SocketAddr>>);

/// The reason why TLS cannot be offered.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("cannot make the serving certificate")]
    Authority(#[from] AuthorityError),
    #[error("cannot set up TLS")]
    Rustls(#[from] rustls::Error),
    #[error("cannot set up the verification of client certificates")]
    Verifier(#[from] rustls::server::VerifierBuilderError),
}

impl Peers {
    pub(super) fn all(&self) -> Vec<SocketAddr> {
        self.0.read().clone()
    }

    fn add(&self, peer: SocketAddr) {
        let mut peers = self.0.write();
        peers.push(peer);
    }
}

impl Tls {
    /// Returns the configuration for a new connection. It is built for each connection, because the
    /// roots may have been rotated.
    fn config(&self) -> Result<Arc<rustls::ServerConfig>, TlsError> {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut roots = RootCertStore::empty();
        for root in self.authority.roots() {
            roots.add(CertificateDer::from(root.der()))?;
        }
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider))
                .allow_unauthenticated()
                .build()?;
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(self.key.serialize_der()));
        let mut config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_client_cert_verifier(verifier)
            .with_single_cert(vec![CertificateDer::from(self.leaf.clone())], key)?;
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Arc::new(config))
    }
}

/// Accepts connections until `stopping` is cancelled, then waits until they end. Without `tls` the
/// connections are plaintext.
pub(super) async fn serve(
    listener: TcpListener,
    tls: Option<Arc<Tls>>,
    services: Services,
    peers: Arc<Peers>,
    stopping: CancellationToken,
) {
    let events = services.discovery.events.clone();
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            () = stopping.cancelled() => break,
            accepted = listener.accept() => accepted,
            Some(_) = connections.join_next() => continue,
        };
        match accepted {
            Ok((stream, peer)) => {
                peers.add(peer);
                let connection = connection(stream, peer, tls.clone(), services.clone());
                let (stopping, events) = (stopping.clone(), events.clone());
                connections.spawn(async move {
                    if let Err(error) = connection(stopping).await {
                        let reason = chain(error.as_ref());
                        events.report(Event::ConnectionFailed { peer, reason });
                    }
                });
            }
            Err(error) => {
                tracing::error!(%error, "cannot accept a connection; trying again in 1s");
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

fn connection(
    stream: TcpStream,
    address: SocketAddr,
    tls: Option<Arc<Tls>>,
    services: Services,
) -> impl FnOnce(CancellationToken) -> tonic::codegen::BoxFuture<(), StdError> {
    move |stopping| {
        Box::pin(async move {
            stream.set_nodelay(true)?;
            let Some(tls) = tls else {
                let peer = Peer { address, leaf: None };
                return http2(stream, peer, services, stopping).await;
            };
            let acceptor = tokio_rustls::TlsAcceptor::from(tls.config()?);
            let stream = tokio::time::timeout(HANDSHAKE, acceptor.accept(stream))
                .await
                .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
            let leaf = stream.get_ref().1.peer_certificates();
            let leaf = leaf.and_then(|chain| chain.first()).map(|leaf| Arc::from(leaf.as_ref()));
            http2(stream, Peer { address, leaf }, services, stopping).await
        })
    }
}

async fn http2(
    io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    peer: Peer,
    services: Services,
    stopping: CancellationToken,
) -> Result<(), StdError> {
    let route = hyper::service::service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(peer.clone());
        let services = services.clone();
        async move { Ok::<_, Infallible>(services.route(request).await) }
    });
    let connection = hyper::server::conn::http2::Builder::new(Streams::new())
        .timer(TokioTimer::new())
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT)
        .serve_connection(TokioIo::new(io), route);
    tokio::pin!(connection);
    tokio::select! {
        ended = connection.as_mut() => return Ok(ended?),
        () = stopping.cancelled() => {}
    }
    connection.as_mut().graceful_shutdown();
    Ok(connection.await?)
}

impl Services {
    async fn route(mut self, request: Request<Incoming>) -> Response<Body> {
        match Variant::of_path(request.uri().path()) {
            Some(variant) => self.discovery.serve(variant, request).await,
            None => match self.certificates.call(request).await {
                Ok(response) => response,
                Err(never) => match never {},
            },
        }
    }
}

/// An executor of the streams of one connection, which ends them when the connection ends.
#[derive(Clone)]
struct Streams {
    tasks: TaskTracker,
    ended: CancellationToken,
    _end: Arc<DropGuard>,
}

impl Streams {
    fn new() -> Self {
        let ended = CancellationToken::new();
        Self { tasks: TaskTracker::new(), _end: Arc::new(ended.clone().drop_guard()), ended }
    }
}

impl<F> hyper::rt::Executor<F> for Streams
where
    F: Future<Output: Send + 'static> + Send + 'static,
{
    fn execute(&self, future: F) {
        let ended = self.ended.clone();
        self.tasks.spawn(async move { ended.run_until_cancelled(future).await });
    }
}

/// Returns an error with its causes on one line.
fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
