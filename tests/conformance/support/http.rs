//! HTTP as the kubelet and Envoy's admin port speak it, small enough to say anything.

use std::net::{Ipv4Addr, SocketAddr, TcpListener as Bound};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, OnceLock};

use rustls::pki_types::PrivatePkcs8KeyDer;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use super::soon;

/// A port on which no process listens, given out once; below the ports the kernel gives to clients.
pub fn free_port() -> u16 {
    static NEXT: OnceLock<AtomicU16> = OnceLock::new();
    let next = NEXT.get_or_init(|| {
        let of_process = u16::try_from(std::process::id() % 100).unwrap();
        AtomicU16::new(12_100 + of_process * 200)
    });
    loop {
        let port = next.fetch_add(1, Ordering::Relaxed);
        if Bound::bind((Ipv4Addr::UNSPECIFIED, port)).is_ok() {
            return port;
        }
    }
}

pub fn local(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}

/// Status, header lines and body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: String,
}

/// One request on a connection of its own; `line` is method and path.
pub async fn ask(port: u16, line: &str) -> Answer {
    ask_with(port, line, "").await
}

/// The same with further header lines.
pub async fn ask_with(port: u16, line: &str, headers: &str) -> Answer {
    try_ask(port, line, headers).await.expect("an answer")
}

/// The same, of a port that may not be there.
pub async fn try_ask(port: u16, line: &str, headers: &str) -> Option<Answer> {
    let exchange = async {
        let mut stream = TcpStream::connect(local(port)).await.ok()?;
        let host = format!("host: localhost:{port}\r\n");
        let request = format!("{line} HTTP/1.1\r\n{host}{headers}connection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.ok()?;
        let (head, body) = answer.split_once("\r\n\r\n")?;
        Some(Answer {
            status: head.split(' ').nth(1)?.parse().ok()?,
            head: head.to_ascii_lowercase(),
            body: body.to_owned(),
        })
    };
    soon(exchange).await
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// A server that answers each path with a status, header lines and a body; none never answers.
pub struct Server {
    pub port: u16,
    pub requests: watch::Receiver<Vec<String>>,
    _serving: JoinSet<()>,
}

impl Server {
    pub async fn start(
        port: u16,
        answer: impl Fn(&str) -> Option<(u16, String, String)> + Send + Sync + 'static,
    ) -> Self {
        Self::serve(port, None, answer).await
    }

    /// With a self-signed certificate.
    pub async fn tls(
        answer: impl Fn(&str) -> Option<(u16, String, String)> + Send + Sync + 'static,
    ) -> Self {
        let own = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
        let key = PrivatePkcs8KeyDer::from(own.signing_key.serialize_der());
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![own.cert.der().clone()], key.into())
            .unwrap();
        Self::serve(0, Some(Arc::new(config).into()), answer).await
    }

    async fn serve(
        port: u16,
        tls: Option<TlsAcceptor>,
        answer: impl Fn(&str) -> Option<(u16, String, String)> + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind(local(port)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (sender, requests) = watch::channel(Vec::new());
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            let mut hung = Vec::new();
            while let Ok((stream, _)) = listener.accept().await {
                let mut stream: Box<dyn Stream> = match &tls {
                    None => Box::new(stream),
                    Some(tls) => match tls.accept(stream).await {
                        Ok(stream) => Box::new(stream),
                        Err(_) => continue, // It may have gone.
                    },
                };
                let mut request = Vec::new();
                while !request.ends_with(b"\r\n\r\n") {
                    let Ok(byte) = stream.read_u8().await else {
                        break;
                    };
                    request.push(byte);
                }
                let request = String::from_utf8_lossy(&request).into_owned();
                let path = request.split(' ').nth(1).unwrap_or_default().to_owned();
                sender.send_modify(|requests| requests.push(request));
                let Some((status, headers, body)) = answer(&path) else {
                    hung.push(stream);
                    continue;
                };
                let length = body.len();
                let head = format!("HTTP/1.1 {status} X\r\n{headers}content-length: {length}");
                let text = format!("{head}\r\nconnection: close\r\n\r\n{body}");
                let _ = stream.write_all(text.as_bytes()).await; // It may have gone.
                let _ = stream.shutdown().await;
            }
        });
        Self {
            port,
            requests,
            _serving: serving,
        }
    }
}
