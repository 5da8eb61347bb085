//! The backends and the clients.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{BoxFuture, join_all};
use futures_util::{FutureExt as _, StreamExt as _};
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::sleep;
use tokio_rustls::TlsAcceptor;
use tokio_stream::wrappers::ReceiverStream;

use crate::support::http::read_head;

pub(super) const PAUSE: Duration = Duration::from_millis(150);

/// What a client does. Returns what the client saw.
pub(super) type Client = Box<dyn Fn(SocketAddr) -> BoxFuture<'static, String> + Send + Sync>;

/// The requests that backends got, by their host.
pub(super) static SEEN: LazyLock<Mutex<BTreeMap<String, usize>>> = LazyLock::new(Mutex::default);

/// The certificate of the backends, and their TLS.
pub(super) static TLS: LazyLock<(String, CertificateDer<'static>, TlsAcceptor)> =
    LazyLock::new(|| {
        let own = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
        let key = PrivatePkcs8KeyDer::from(own.signing_key.serialize_der());
        let config = rustls::ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![own.cert.der().clone()], key.into())
            .unwrap();
        (own.cert.pem(), own.cert.der().clone(), Arc::new(config).into())
    });

pub(super) fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

/// Serves HTTP/1.1, HTTP/2, or HTTP/1.1 with TLS.
pub(super) async fn serve_http(stream: TcpStream) {
    let port = stream.local_addr().unwrap().port();
    let mut start = [0; 3];
    let service = service_fn(move |request| answer(port, request));
    let http1 = hyper::server::conn::http1::Builder::new();
    // Clients and Envoy end connections as they like.
    match stream.peek(&mut start).await {
        Ok(_) if start == *b"PRI" => {
            let http2 = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
            let _ = http2.serve_connection(TokioIo::new(stream), service).await;
        }
        Ok(_) if start[0] == 0x16 => {
            if let Ok(stream) = TLS.2.accept(stream).await {
                let _ = http1.serve_connection(TokioIo::new(stream), service).await;
            }
        }
        _ => drop(http1.serve_connection(TokioIo::new(stream), service).await),
    }
}

/// Responds as the last part of the path says; otherwise with a description of the request.
pub(super) async fn answer(
    port: u16,
    request: Request<Incoming>,
) -> Result<Response<BoxBody<Bytes, hyper::Error>>, std::io::Error> {
    let header = |name: &str| request.headers().get(name).and_then(|it| it.to_str().ok());
    let is_first = header("x-envoy-attempt-count") == Some("1");
    let host = request.uri().host().or(header("host")).unwrap_or_default().to_owned();
    *SEEN.lock().unwrap().entry(host).or_default() += 1;
    let mut response = Response::builder().header("content-type", "text/plain");
    match request.uri().path().rsplit('/').next().unwrap_or_default() {
        "hang" => std::future::pending().await,
        "slow" => sleep(PAUSE * 3).await,
        // Requests that are sent at once overlap, also on a busy machine.
        "slower" => sleep(PAUSE * 14).await,
        "deny" => response = response.status(403),
        "fail-first" if is_first => response = response.status(503),
        "reset-first" if is_first => return Err(std::io::Error::other("reset")),
        "redirect" => response = response.status(302).header("location", "http://cart/there"),
        "big" => return Ok(response.body(full(vec![b'b'; 5_000_000])).unwrap()),
        "drip" => {
            let pieces = futures_util::stream::iter(0..5).then(|it| async move {
                sleep(PAUSE / 5).await;
                Ok(Frame::data(Bytes::from(format!("piece {it}\n"))))
            });
            return Ok(response.body(BodyExt::boxed(StreamBody::new(pieces))).unwrap());
        }
        "echo" => {
            let trailers = HeaderMap::from_iter([(
                "grpc-status".parse().unwrap(),
                HeaderValue::from_static("0"),
            )]);
            let body = request.into_body().with_trailers(async { Some(Ok(trailers)) });
            let response = Response::builder().header("content-type", "application/grpc");
            return Ok(response.body(BodyExt::boxed(body)).unwrap());
        }
        _ => {}
    }
    let (head, body) = request.into_parts();
    let body = body.collect().await.map_err(std::io::Error::other)?.to_bytes();
    let mut text = format!("{port} {} {} {:?}\n", head.method, head.uri, head.version);
    let mut headers: Vec<_> = head.headers.iter().collect();
    let varies = |name: &str| name == "x-envoy-expected-rq-timeout-ms" && !is_first;
    headers.retain(|(name, _)| *name != "x-request-id" && !varies(name.as_str()));
    headers.sort_by_key(|(name, _)| name.as_str());
    writeln!(text, "{headers:?}\n{} bytes, {}", body.len(), crc32fast::hash(&body)).unwrap();
    Ok(response.body(full(text.into_bytes())).unwrap())
}

pub(super) fn full(bytes: Vec<u8>) -> BoxBody<Bytes, hyper::Error> {
    BodyExt::boxed(Full::new(Bytes::from(bytes)).map_err(|never: Infallible| match never {}))
}

/// Greets, echoes, and says goodbye.
pub(super) async fn serve_tcp(mut stream: TcpStream) {
    let _ = stream.write_all(b"hello\n").await;
    let (mut reader, mut writer) = stream.split();
    let _ = tokio::io::copy(&mut reader, &mut writer).await;
    let _ = writer.write_all(b"bye\n").await;
}

/// Upgrades the connection, echoes once, and ends the connection.
pub(super) async fn serve_upgrade(mut stream: TcpStream) {
    let Ok(_) = read_head(&mut stream).await else { return };
    let head =
        "HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n";
    let mut bytes = [0; 100];
    let _ = stream.write_all(head.as_bytes()).await;
    let read = stream.read(&mut bytes).await.unwrap_or(0);
    let _ = stream.write_all(&bytes[..read]).await;
}

/// Returns what can be compared of the bytes that a client got.
pub(super) fn comparable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let is_stable = |line: &&str| {
        !["date: ", "x-envoy-upstream-service-time: "].iter().any(|it| line.starts_with(it))
    };
    let text = text.lines().filter(is_stable).collect::<Vec<_>>().join("\n");
    let (head, body) = text.split_once("\n\n").unwrap_or((&text, ""));
    if text.len() < 10_000 {
        return text;
    }
    let beginning: String = head.chars().take(2000).collect();
    format!("{beginning}\n{} bytes, {}", body.len(), crc32fast::hash(text.as_bytes()))
}

/// Sends parts with pauses, and reads all until the server ends the connection. Then `ends` says whether the client ends
/// its direction after the last part.
pub(super) async fn talk(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    parts: &[Vec<u8>],
    ends: bool,
) -> String {
    let (mut reader, mut writer) = tokio::io::split(stream);
    let writing = async {
        for (number, part) in parts.iter().enumerate() {
            if number > 0 {
                sleep(PAUSE).await;
            }
            let _ = writer.write_all(part).await; // The server may have ended the connection.
        }
        if ends {
            let _ = writer.shutdown().await;
        }
    };
    let reading = async {
        let (mut bytes, mut buffer) = (Vec::new(), vec![0; 65536]);
        let end = loop {
            match reader.read(&mut buffer).await {
                Ok(0) => break "",
                Ok(read) => bytes.extend(&buffer[..read]),
                Err(_) => break "\nreset",
            }
        };
        comparable(&bytes) + end
    };
    tokio::join!(writing, reading).1
}

pub(super) fn client<F: Future<Output = String> + Send + 'static>(
    act: impl Fn(SocketAddr) -> F + Send + Sync + 'static,
) -> Client {
    Box::new(move |address| act(address).boxed())
}

pub(super) fn sends<const N: usize>(parts: [impl AsRef<[u8]>; N], ends: bool) -> Client {
    let parts = parts.map(|it| it.as_ref().to_vec());
    client(move |address| {
        let parts = parts.clone();
        async move { talk(TcpStream::connect(address).await.unwrap(), &parts, ends).await }
    })
}

/// Returns a client that sends HTTP/1.1 in parts.
pub(super) fn parts<const N: usize>(parts: [impl AsRef<[u8]>; N]) -> Client {
    sends(parts, false)
}

/// Returns a client that ends its direction after the last part.
pub(super) fn tcp<const N: usize>(parts: [impl AsRef<[u8]>; N]) -> Client {
    sends(parts, true)
}

/// Returns the text of a request after which the connection stays open.
pub(super) fn open(line: &str, headers: &str) -> String {
    format!("{line} HTTP/1.1\r\nhost: cart\r\n{headers}\r\n")
}

/// Returns the text of a request after which the server ends the connection.
pub(super) fn last(line: &str, headers: &str) -> String {
    open(line, &format!("connection: close\r\n{headers}"))
}

pub(super) fn get(path: &str, headers: &str) -> Client {
    parts([last(&format!("GET {path}"), headers)])
}

/// Returns a client that does the same several times at once. The results are sorted.
pub(super) fn at_once(times: usize, client: Client) -> Client {
    let client = Arc::new(client);
    Box::new(move |address| {
        let client = Arc::clone(&client);
        async move {
            let mut results = join_all((0..times).map(|_| client(address))).await;
            results.sort();
            results.join("\n")
        }
        .boxed()
    })
}

/// Returns a client that sends frames with HTTP/2. With `alternates`, it waits for a frame of the response after each.
pub(super) fn http2(
    method: &'static str,
    path: &'static str,
    frames: &[&'static str],
    alternates: bool,
) -> Client {
    let frames = frames.to_vec();
    client(move |address| {
        let frames = frames.clone();
        async move {
            let stream = TokioIo::new(TcpStream::connect(address).await.unwrap());
            let connected = hyper::client::conn::http2::handshake(TokioExecutor::new(), stream);
            let (mut requests, connection) = connected.await.unwrap();
            let mut driving = JoinSet::new();
            driving.spawn(async move { drop(connection.await) });
            let (sender, body) = mpsc::channel(1);
            let request = Request::builder().method(method).uri(format!("http://cart{path}"));
            let request =
                request.header("content-type", "application/grpc").header("te", "trailers");
            let body = StreamBody::new(ReceiverStream::new(body));
            let response = requests.send_request(request.body(body).unwrap());
            let mut response = std::pin::pin!(response);
            let (mut result, mut answered) = (String::new(), None);
            for frame in &frames {
                let frame = Frame::data(Bytes::from_static(frame.as_bytes()));
                let _ = sender.send(Ok::<_, Infallible>(frame)).await; // The server may have ended the stream.
                if alternates {
                    if answered.is_none() {
                        answered = Some((&mut response).await);
                    }
                    let Some(Ok(answer)) = &mut answered else { break };
                    writeln!(result, "{:?}", answer.frame().await).unwrap();
                }
            }
            drop(sender);
            let answered = match answered {
                Some(answered) => answered,
                None => response.await,
            };
            let Ok(answer) = answered else { return format!("{result}{answered:?}") };
            let (mut head, body) = answer.into_parts();
            head.headers.remove("date");
            head.headers.remove("x-envoy-upstream-service-time");
            writeln!(result, "{:?} {:?}", head.status, head.headers).unwrap();
            match body.collect().await {
                Ok(body) => {
                    let trailers = body.trailers().cloned();
                    result + &comparable(&body.to_bytes()) + &format!("{trailers:?}")
                }
                Err(error) => format!("{result}{error}"),
            }
        }
    })
}
