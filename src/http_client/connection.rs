//! A client connection and the futures that drive it, and the pool of idle ones.

use std::fmt;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::uri::{Authority, Scheme};
use http::{Request, Response, Uri, header};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::Instant;

use super::stream::Stream;
use crate::dial::proxy::Proxy;
use crate::executor::ConnectionTasks;

/// How long an idle connection is kept. Probes and scrapes come more often.
const LONGEST_IDLE: Duration = Duration::from_secs(90);
const MOST_IDLE: usize = 32;
/// A MiB of headers, and the status line.
const MAX_HEAD: u32 = (1 << 20) + (8 << 10);
/// As many as a `HeaderMap` holds; hyper panics beyond.
const MAX_HEADERS: usize = 24 << 10;

pub(super) struct Connection {
    sender: Sender,
    driver: Driver,
    /// The proxy it leads to, which forwards requests.
    proxy: Option<Proxy>,
}

enum Sender {
    Http1(http1::SendRequest<Full<Bytes>>),
    Http2(http2::SendRequest<Full<Bytes>>),
}

/// What moves the bytes of a connection; it does so only while it is polled.
struct Driver {
    future: Pin<Box<dyn Future<Output = ()> + Send>>,
    has_ended: bool,
    /// Streams of HTTP/2.
    _tasks: ConnectionTasks,
}

/// Idle connections. Clones share them.
#[derive(Clone, Default)]
pub(super) struct Pool(Arc<Mutex<Vec<Idle>>>);

struct Idle {
    endpoint: Endpoint,
    since: Instant,
    connection: Connection,
}

type Endpoint = (Option<Scheme>, Option<Authority>);

impl Driver {
    fn new<E>(
        tasks: ConnectionTasks,
        connection: impl Future<Output = Result<(), E>> + Send + 'static,
    ) -> Self {
        Self {
            // The request learns of an error.
            future: Box::pin(async move { drop(connection.await) }),
            has_ended: false,
            _tasks: tasks,
        }
    }

    /// Completes `work`, which waits for the connection. It may do so after the connection's end.
    async fn run<T>(&mut self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        poll_fn(|context| {
            self.has_ended = self.has_ended || self.future.as_mut().poll(context).is_ready();
            work.as_mut().poll(context)
        })
        .await
    }
}

impl Connection {
    pub(super) async fn http1(
        io: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
        proxy: Option<Proxy>,
    ) -> hyper::Result<Self> {
        let handshake = http1::Builder::new()
            .max_buf_size(MAX_HEAD as usize)
            .max_headers(MAX_HEADERS)
            .allow_spaces_after_header_name_in_responses(true)
            .allow_obsolete_multiline_headers_in_responses(true)
            .ignore_invalid_headers_in_responses(true)
            .handshake(TokioIo::new(Stream(io)));
        let (sender, connection) = handshake.await?;
        Ok(Self {
            sender: Sender::Http1(sender),
            driver: Driver::new(ConnectionTasks::default(), connection),
            proxy,
        })
    }

    pub(super) async fn http2(
        io: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    ) -> hyper::Result<Self> {
        let tasks = ConnectionTasks::default();
        let handshake = http2::Builder::new(tasks.executor())
            .max_header_list_size(MAX_HEAD)
            .handshake(TokioIo::new(io));
        let (sender, connection) = handshake.await?;
        Ok(Self {
            sender: Sender::Http2(sender),
            driver: Driver::new(tasks, connection),
            proxy: None,
        })
    }

    /// Completes `work`, which waits for this connection.
    pub(super) async fn drive<T>(&mut self, work: impl Future<Output = T>) -> T {
        self.driver.run(work).await
    }

    /// Sends a request whose URI is absolute and that has a Host header.
    pub(super) async fn send(
        &mut self,
        mut request: Request<Bytes>,
    ) -> hyper::Result<Response<Incoming>> {
        let Self {
            sender,
            driver,
            proxy,
        } = self;
        let host = request.headers().get(header::HOST);
        match sender {
            Sender::Http1(sender) => {
                if let Some(proxy) = proxy {
                    // It gets the whole URI: RFC 9112, 3.2.2.
                    let authorization = proxy.authorization.clone();
                    let header = authorization.map(|value| (header::PROXY_AUTHORIZATION, value));
                    request.headers_mut().extend(header);
                } else {
                    let path = request.uri().path_and_query().cloned();
                    *request.uri_mut() = path.map(Uri::from).unwrap_or_default();
                }
                let request = request.map(Full::new);
                driver.run(sender.send_request(request)).await
            }
            Sender::Http2(sender) => {
                // HTTP/2 has the host in the URI.
                let mut parts = request.uri().clone().into_parts();
                let named = host.and_then(|host| host.to_str().ok()?.parse().ok());
                parts.authority = named.or(parts.authority);
                if let Ok(uri) = Uri::from_parts(parts) {
                    *request.uri_mut() = uri;
                }
                request.headers_mut().remove(header::HOST);
                request.headers_mut().remove(header::CONNECTION);
                let request = request.map(Full::new);
                driver.run(sender.send_request(request)).await
            }
        }
    }

    /// Whether the server still holds the connection open for another request.
    async fn is_usable(&mut self) -> bool {
        let Self { sender, driver, .. } = self;
        let is_ready = match sender {
            Sender::Http1(sender) => driver.run(sender.ready()).await.is_ok(),
            Sender::Http2(sender) => driver.run(sender.ready()).await.is_ok(),
        };
        is_ready && !driver.has_ended
    }
}

impl Pool {
    /// A connection that is still open as far as is known.
    pub(super) async fn take(&self, uri: &Uri) -> Option<Connection> {
        let endpoint = endpoint(uri);
        loop {
            let mut kept = {
                let mut idle = self.0.lock();
                idle.retain(|kept| kept.since.elapsed() < LONGEST_IDLE);
                let found = idle.iter().position(|kept| kept.endpoint == endpoint)?;
                idle.swap_remove(found).connection
            };
            if kept.is_usable().await {
                return Some(kept);
            }
        }
    }

    pub(super) fn put(&self, uri: &Uri, connection: Connection) {
        let mut idle = self.0.lock();
        if idle.len() < MOST_IDLE {
            idle.push(Idle {
                endpoint: endpoint(uri),
                since: Instant::now(),
                connection,
            });
        }
    }
}

fn endpoint(uri: &Uri) -> Endpoint {
    (uri.scheme().cloned(), uri.authority().cloned())
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").finish_non_exhaustive()
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("idle", &self.0.lock().len())
            .finish()
    }
}
