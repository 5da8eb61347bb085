//! Sends HTTP requests over TCP or TLS, directly or through HTTP proxies, or over a Unix socket.
//!
//! Requests are HTTP/1.1, or HTTP/2 where TLS negotiates it. [`Client::fetch`] reads a complete response
//! within limits of time and size. [`Client::send`] returns once the head has arrived; its caller reads
//! the body and sets the time limit. Responses are read as leniently as in Go: heads of up to 1 MiB,
//! folded headers and spaces before a colon are accepted, and invalid headers are left out.
//!
//! A connection is closed when its call or its body is dropped. With [`Config::keeps_connections`], the connection
//! is pooled when its response is complete.

mod redirect;
mod stream;

use std::error::Error as StdError;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use http::uri::Authority;
use http::{Extensions, HeaderValue, Request, Response, Uri, header};
use http_body_util::{BodyDataStream, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy;
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use rustls::pki_types::ServerName;
use tokio::net::UnixStream;
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsConnector;
use tokio_util::either::Either;
use tower::util::BoxCloneSyncService;

use crate::net::dial::proxy::{Proxies, Proxy};
use crate::net::dial::{self, Dialer};
use crate::net::executor::ConnectionTasks;
pub use redirect::Redirects;
use stream::Stream;

const MAX_REDIRECTS: usize = 10;
/// The time after which an idle connection is closed. Probes and scrapes are more frequent.
const MAX_IDLE_TIME: Duration = Duration::from_secs(90);
/// The maximum number of idle connections to each host.
const MAX_IDLE: usize = 32;
/// The maximum size of a head, in bytes: 1 MiB of headers, and the status line.
const MAX_HEAD: u32 = (1 << 20) + (8 << 10);
/// The maximum number of headers: the capacity of a `HeaderMap`, because hyper panics beyond it.
const MAX_HEADERS: usize = 24 << 10;
/// The maximum number of bytes that are read of an unwanted body, so that the server can finish its response.
const MAX_DISCARDED: usize = 10 << 20;

#[derive(Clone, Debug, Default)]
pub struct Config {
    pub dialer: Dialer,
    /// The TLS settings for `https` URLs; such URLs are refused without them. ALPN decides between HTTP/1.1 and
    /// HTTP/2.
    pub tls: Option<Arc<rustls::ClientConfig>>,
    /// The proxies for requests. Because a proxy resolves the names in URLs, the dialer's filter checks the
    /// address of the proxy, and the host of a URL only if it is an address.
    pub proxies: Proxies,
    pub redirects: Redirects,
    /// True to pool connections. An idle connection is closed after 90 s.
    pub keeps_connections: bool,
    /// The Unix socket to which all `http` requests go, whatever their host is.
    pub socket: Option<Arc<Path>>,
}

/// Sends requests. Clones share pooled connections and the record of failed addresses.
#[derive(Clone, Debug)]
pub struct Client {
    config: Arc<Config>,
    pool: Pool,
    tasks: Arc<ConnectionTasks>,
}

type Pool = legacy::Client<Connector, Full<Bytes>>;

type Connector = BoxCloneSyncService<Uri, TokioIo<Stream>, ConnectError>;

/// The error of an attempt to connect. The request takes the error out and returns it.
#[derive(Debug, thiserror::Error)]
#[error("cannot connect")]
struct ConnectError(Mutex<Option<Error>>);

#[derive(Debug)]
pub struct Body {
    data: BodyDataStream<Incoming>,
    authority: String,
    /// The owner of the tasks of the connection, which are aborted when their last owner is dropped.
    _tasks: Arc<ConnectionTasks>,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{found:?} is not a URL that can be requested, expected http://host[:port]/path")]
    Url { found: String },
    #[error(transparent)]
    Connect(#[from] dial::Error),
    #[error("cannot connect to {}", .path.display())]
    Socket {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the proxy {}:{} refused a connection to {authority}", .proxy.host, .proxy.port)]
    Proxy {
        proxy: Proxy,
        authority: String,
        #[source]
        source: io::Error,
    },
    #[error("TLS handshake with {authority} failed")]
    Tls {
        authority: String,
        #[source]
        source: io::Error,
    },
    #[error("the connection to {authority} failed before the end of the answer")]
    Broken {
        authority: String,
        #[source]
        source: Box<dyn StdError + Send + Sync>,
    },
    #[error("{authority} redirects to {found:?}, expected {expected}")]
    Redirect { authority: String, found: String, expected: &'static str },
    #[error("stopped after {MAX_REDIRECTS} redirects, the last by {authority}")]
    Redirects { authority: String },
    #[error("the answer of {authority} has more than {limit} bytes")]
    TooLarge { authority: String, limit: usize },
    #[error("no answer from {authority} within {limit:?}")]
    Late { authority: String, limit: Duration },
}

impl Default for Client {
    fn default() -> Self {
        Self::new(Config::default())
    }
}

impl Client {
    pub fn new(config: Config) -> Self {
        let config = Arc::new(config);
        let tasks = Arc::<ConnectionTasks>::default();
        Self { pool: create_pool(&config, &tasks, None), config, tasks }
    }

    /// Returns a client that sends all `http` requests to this Unix socket.
    pub fn of_socket(path: &Path) -> Self {
        Self::new(Config { socket: Some(path.into()), ..Config::default() })
    }

    /// Sends a request and reads the complete response, within `limit`. Fails if the body has more than
    /// `largest_body` bytes.
    pub async fn fetch(
        &self,
        request: Request<Bytes>,
        limit: Duration,
        largest_body: usize,
    ) -> Result<Response<Bytes>, Error> {
        let authority = host_and_port(request.uri());
        let fetched = timeout(limit, async {
            let (head, mut body) = self.send(request).await?.into_parts();
            Ok(Response::from_parts(head, body.collect(largest_body).await?))
        });
        fetched.await.unwrap_or_else(|_| Err(Error::Late { authority, limit }))
    }

    /// Sends a request, whose URI is absolute, and follows redirects as configured. If the request has no Host
    /// header, the URI determines it.
    pub async fn send(&self, mut request: Request<Bytes>) -> Result<Response<Body>, Error> {
        for _ in 0..MAX_REDIRECTS {
            let mut response = self.send_once(&request).await?;
            if !self.config.redirects.follow(&mut request, &response)? {
                return Ok(response);
            }
            response.body_mut().discard().await;
        }
        Err(Error::Redirects { authority: host_and_port(request.uri()) })
    }

    /// Sends a request without following redirects. Sends it again if it failed on a pooled connection.
    async fn send_once(&self, request: &Request<Bytes>) -> Result<Response<Body>, Error> {
        let uri = request.uri();
        let (host, port, is_tls) = self.config.target(uri)?;
        let mut request = request.clone().map(Full::new);
        let headers = request.headers_mut();
        if !self.config.keeps_connections {
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        if !is_tls && let Some(proxy) = self.config.proxies.find(false, host, port) {
            let authorization = proxy.authorization.clone();
            headers.extend(authorization.map(|value| (header::PROXY_AUTHORIZATION, value)));
        }
        let host_header = headers.get(header::HOST);
        let host_header = host_header.and_then(|value| Authority::try_from(value.as_bytes()).ok());
        let mut client = self.pool.clone();
        if is_tls && host_header.is_some() && host_header.as_ref() != uri.authority() {
            // HTTP/2 sends the host in the URI, so the URI gets the host of the header. The separate pool connects
            // to the host of the original URI, for this request only.
            let mut parts = uri.clone().into_parts();
            parts.authority = host_header;
            *request.uri_mut() = Uri::from_parts(parts).unwrap_or_default();
            client = create_pool(&self.config, &self.tasks, Some(uri.clone()));
        }
        let began = Instant::now();
        let mut sent = client.request(request.clone()).await;
        // The server may close a pooled connection just as the request arrives.
        if sent.as_ref().is_err_and(|error| used_pooled_connection(error, began)) {
            sent = client.request(request).await;
        }
        let authority = host_and_port(uri);
        match sent {
            Ok(response) => Ok(response.map(|incoming| Body {
                data: BodyDataStream::new(incoming),
                authority,
                _tasks: self.tasks.clone(),
            })),
            Err(error) => {
                let cause = error.source().and_then(|cause| cause.downcast_ref());
                let cause = cause.and_then(|ConnectError(cause)| cause.lock().take());
                Err(cause.unwrap_or(Error::Broken { authority, source: error.into() }))
            }
        }
    }
}

/// Returns true if a request failed on a connection that was opened before `began`, the time of the request.
fn used_pooled_connection(error: &legacy::Error, began: Instant) -> bool {
    let mut extras = Extensions::new();
    if let Some(connected) = error.connect_info() {
        connected.get_extras(&mut extras);
    }
    extras.get().is_some_and(|since: &Instant| *since < began)
}

/// Creates a pool of connections to the hosts of requests. With a `target`, all connections lead to its host,
/// whatever the URI of a request is, and none is reused.
fn create_pool(config: &Arc<Config>, tasks: &ConnectionTasks, target: Option<Uri>) -> Pool {
    let is_pooled = config.keeps_connections && target.is_none();
    let config = config.clone();
    let connector = tower::service_fn(move |uri| {
        let config = config.clone();
        let target = target.clone().unwrap_or(uri);
        async move {
            let connected = config.connect(&target).await.map(TokioIo::new);
            connected.map_err(|error| ConnectError(Mutex::new(Some(error))))
        }
    });
    legacy::Client::builder(tasks.executor())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(MAX_IDLE_TIME)
        .pool_max_idle_per_host(if is_pooled { MAX_IDLE } else { 0 })
        .http1_max_buf_size(MAX_HEAD as usize)
        .http1_max_headers(MAX_HEADERS)
        .http1_allow_spaces_after_header_name_in_responses(true)
        .http1_allow_obsolete_multiline_headers_in_responses(true)
        .http1_ignore_invalid_headers_in_responses(true)
        .http2_max_header_list_size(MAX_HEAD)
        .build(BoxCloneSyncService::new(connector))
}

impl Config {
    /// Returns host and port of a URL, and true for `https`.
    fn target<'a>(&self, uri: &'a Uri) -> Result<(&'a str, u16, bool), Error> {
        let (default_port, is_tls) = match uri.scheme_str() {
            Some("http") => (80, false),
            Some("https") if self.tls.is_some() => (443, true),
            _ => return Err(unusable(uri)),
        };
        let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
        if host.is_empty() {
            return Err(unusable(uri));
        }
        Ok((host, uri.port_u16().unwrap_or(default_port), is_tls))
    }

    /// Connects to the host of a URL, through its proxy if there is one, with TLS for `https`.
    async fn connect(&self, uri: &Uri) -> Result<Stream, Error> {
        let (host, port, is_tls) = self.target(uri)?;
        if let Some(path) = &self.socket {
            let connected = UnixStream::connect(path).await;
            let stream =
                connected.map_err(|source| Error::Socket { path: path.to_path_buf(), source })?;
            return Ok(Stream { io: Either::Left(Either::Right(stream)), is_proxied: false });
        }
        let authority = host_and_port(uri);
        let proxy = self.proxies.find(is_tls, host, port);
        let stream = match proxy {
            None => self.dialer.connect(host, port).await?,
            Some(proxy) => {
                if let Ok(address) = host.parse() {
                    self.dialer.check(address)?;
                }
                let reached = async {
                    let stream = self.dialer.connect(&proxy.host, proxy.port).await;
                    let mut stream = stream.map_err(io::Error::other)?;
                    if is_tls {
                        proxy.tunnel(&mut stream, host, port).await?;
                    }
                    Ok(stream)
                };
                reached.await.map_err(|source| Error::Proxy {
                    proxy: proxy.clone(),
                    authority: authority.clone(),
                    source,
                })?
            }
        };
        let io = match &self.tls {
            Some(tls) if is_tls => {
                let name = ServerName::try_from(host.to_owned()).map_err(|_| unusable(uri))?;
                let stream = TlsConnector::from(tls.clone()).connect(name, stream).await;
                Either::Right(stream.map_err(|source| Error::Tls { authority, source })?)
            }
            _ => Either::Left(Either::Left(stream)),
        };
        Ok(Stream { io, is_proxied: proxy.is_some() && !is_tls })
    }
}

impl Body {
    /// Returns the next bytes of the body, without trailers; `None` at its end.
    pub async fn chunk(&mut self) -> Option<Result<Bytes, Error>> {
        Some(self.data.next().await?.map_err(|error| Error::Broken {
            authority: self.authority.clone(),
            source: error.into(),
        }))
    }

    /// Reads the body to its end. Fails if it has more than `limit` bytes.
    pub async fn collect(&mut self, limit: usize) -> Result<Bytes, Error> {
        let mut whole = BytesMut::new();
        self.read_into(&mut whole, limit + 1).await?;
        if whole.len() > limit {
            return Err(Error::TooLarge { authority: self.authority.clone(), limit });
        }
        Ok(whole.freeze())
    }

    /// Reads until `buffer` has `length` bytes or the body ends. If the future is dropped, the bytes that were
    /// read stay in the buffer.
    pub async fn read_into(&mut self, buffer: &mut BytesMut, length: usize) -> Result<(), Error> {
        while buffer.len() < length
            && let Some(chunk) = self.chunk().await.transpose()?
        {
            buffer.extend_from_slice(&chunk[..chunk.len().min(length - buffer.len())]);
        }
        Ok(())
    }

    /// Reads the rest of the body, up to 10 MiB, so that the server can finish its response and the connection can
    /// be pooled.
    pub async fn discard(&mut self) {
        let mut left = MAX_DISCARDED;
        while left > 0
            && let Some(Ok(chunk)) = self.chunk().await
        {
            left = left.saturating_sub(chunk.len());
        }
    }
}

/// Parses a URL of the form `http://host[:port]/path`. Fails for any other scheme, and without a host.
pub fn http_url(text: &str) -> Result<Uri, Error> {
    let url = text.parse::<Uri>().ok();
    let url = url.filter(|url| url.scheme_str() == Some("http"));
    url.filter(|url| url.host().is_some_and(|host| !host.is_empty()))
        .ok_or_else(|| Error::Url { found: text.to_owned() })
}

/// Returns the authority of a URL without the user information.
fn host_and_port(uri: &Uri) -> String {
    let authority = uri.authority().map_or("", |authority| authority.as_str());
    authority.rsplit('@').next().unwrap_or_default().to_owned()
}

fn unusable(uri: &Uri) -> Error {
    Error::Url { found: uri.to_string() }
}

#[cfg(test)]
mod tests;
