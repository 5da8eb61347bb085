//! A server for tests, with or without TLS. It responds to each request with the bytes that a function returns.

use std::net::SocketAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

/// A running server. Dropping it stops it.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    heads: Arc<Mutex<Vec<String>>>,
    _tasks: JoinSet<()>,
}

/// The function that returns the response to a request. Its arguments are the head of the request and the number of
/// earlier requests. If it returns no bytes, the server does not respond.
type Answer = dyn Fn(&str, usize) -> Vec<u8> + Send + Sync;

impl Server {
    pub(crate) async fn start(
        answer: impl Fn(&str, usize) -> Vec<u8> + Send + Sync + 'static,
    ) -> Self {
        Self::serve(None, answer).await
    }

    /// Starts a server with a self-signed certificate.
    pub(crate) async fn tls(
        answer: impl Fn(&str, usize) -> Vec<u8> + Send + Sync + 'static,
    ) -> Self {
        let names = vec!["127.0.0.1".to_owned()];
        let own = rcgen::generate_simple_self_signed(names).expect("a certificate");
        let key = rustls::pki_types::PrivatePkcs8KeyDer::from(own.signing_key.serialize_der());
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_no_client_auth()
            .with_single_cert(vec![own.cert.der().clone()], key.into())
            .expect("a pair");
        Self::serve(Some(Arc::new(config).into()), answer).await
    }

    pub(crate) async fn serve(
        tls: Option<tokio_rustls::TlsAcceptor>,
        answer: impl Fn(&str, usize) -> Vec<u8> + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let heads = Arc::<Mutex<Vec<String>>>::default();
        let (answer, seen): (Arc<Answer>, _) = (Arc::new(answer), heads.clone());
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut streams = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let (tls, answer, seen) = (tls.clone(), answer.clone(), seen.clone());
                streams.spawn(async move {
                    match tls {
                        None => respond(stream, &answer, &seen).await,
                        Some(tls) => {
                            if let Ok(stream) = tls.accept(stream).await {
                                respond(stream, &answer, &seen).await;
                            }
                        }
                    }
                });
            }
        });
        Self { address, heads, _tasks: tasks }
    }

    /// Returns the heads of all requests so far.
    pub(crate) fn heads(&self) -> Vec<String> {
        self.heads.lock().clone()
    }
}

async fn respond(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    answer: &Arc<Answer>,
    seen: &Mutex<Vec<String>>,
) {
    let mut head = Vec::new();
    // 0x16 begins a TLS handshake. A server without TLS responds to it as to a request.
    while head.first() != Some(&0x16) && !head.windows(4).any(|end| end == b"\r\n\r\n") {
        let mut part = [0; 4096];
        match stream.read(&mut part).await {
            Ok(count) if count > 0 => head.extend_from_slice(&part[..count]),
            _ => return,
        }
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    let before = {
        let mut seen = seen.lock();
        seen.push(head.clone());
        seen.len() - 1
    };
    let bytes = answer(&head, before);
    if bytes.is_empty() {
        std::future::pending::<()>().await;
    }
    let _ = stream.write_all(&bytes).await;
    let _ = stream.shutdown().await;
}

/// Returns a response with a `content-length` header.
pub(crate) fn answer(status: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let length = body.len();
    let head = format!("HTTP/1.1 {status}\r\n{headers}content-length: {length}\r\n\r\n");
    [head.as_bytes(), body].concat()
}

pub(crate) fn ok(body: &[u8]) -> Vec<u8> {
    answer("200 OK", "", body)
}

/// Returns the path of a request.
pub(crate) fn path(head: &str) -> &str {
    head.split(' ').nth(1).unwrap_or_default()
}
