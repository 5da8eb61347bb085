//! Sends HTTP requests over TCP or TLS, directly or through HTTP proxies.
//!
//! Requests are HTTP/1.1, or HTTP/2 where TLS negotiates it. [`Client::fetch`] reads a whole answer
//! within a deadline and a size; [`Client::send`] returns once the head has arrived and leaves
//! reading, and the deadline, to its caller. Answers are read as leniently as by Go: heads of up to
//! 1 MiB, folded headers and spaces before a colon pass, invalid headers are left out.
//!
//! A connection is driven by the call or the body that waits for it, so dropping these ends it. Where
//! connections are kept, one is kept once its answer has been read to the end.

mod connection;
mod redirect;
mod stream;

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{HeaderValue, Request, Response, Uri, header};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;

use crate::dial::proxy::{Proxies, Proxy};
use crate::dial::{self, Dialer};
use connection::{Connection, Pool};
pub use redirect::Redirects;

const MAX_REDIRECTS: usize = 10;
/// What is read of a body that is not wanted, so that the server does not see its answer cut off.
const MAX_DISCARDED: usize = 10 << 20;

/// How a client connects and what it accepts.
#[derive(Clone, Debug)]
pub struct Config {
    pub dialer: Dialer,
    /// For `https`, which is refused without. ALPN decides between HTTP/1.1 and HTTP/2.
    pub tls: Option<Arc<rustls::ClientConfig>>,
    /// Those that requests go through. A proxy resolves names; the dialer's filter sees the address of
    /// the proxy then, and of the URL only one that is no name.
    pub proxies: Proxies,
    pub redirects: Redirects,
    /// Whether connections are kept for the next request, idle for 90 s at most.
    pub keeps_connections: bool,
}

/// Sends requests. Clones share kept connections and the memory of failed addresses.
#[derive(Clone, Debug, Default)]
pub struct Client {
    config: Config,
    pool: Pool,
}

/// The body of an answer, and the connection it arrives on.
#[derive(Debug)]
pub struct Body {
    incoming: Incoming,
    uri: Uri,
    /// None after the end.
    connection: Option<Connection>,
    pool: Option<Pool>,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{found:?} is no address to ask, expected http://host[:port]/path")]
    Url { found: String },
    #[error(transparent)]
    Connect(#[from] dial::Error),
    #[error("the proxy {proxy:?} gives no connection to {authority}")]
    Proxy {
        proxy: Proxy,
        authority: String,
        #[source]
        source: std::io::Error,
    },
    #[error("TLS handshake with {authority} failed")]
    Tls {
        authority: String,
        #[source]
        source: std::io::Error,
    },
    #[error("the connection to {authority} failed before the end of the answer")]
    Broken {
        authority: String,
        #[source]
        source: hyper::Error,
    },
    #[error("{authority} redirects to {found:?}, expected {expected}")]
    Redirect {
        authority: String,
        found: String,
        expected: &'static str,
    },
    #[error("stopped after {MAX_REDIRECTS} redirects, the last by {authority}")]
    Redirects { authority: String },
    #[error("the answer of {authority} has more than {limit} bytes")]
    TooLarge { authority: String, limit: usize },
    #[error("no answer from {authority} within {limit:?}")]
    Late { authority: String, limit: Duration },
}

impl Default for Config {
    fn default() -> Self {
        Self {
            dialer: Dialer::default(),
            tls: None,
            proxies: Proxies::default(),
            redirects: Redirects::Return,
            keeps_connections: false,
        }
    }
}

impl Client {
    pub fn new(config: Config) -> Self {
        let pool = Pool::default();
        Self { config, pool }
    }

    /// Sends a request and reads the answer, all within `limit`.
    pub async fn fetch(
        &self,
        request: Request<Bytes>,
        limit: Duration,
        largest_body: usize,
    ) -> Result<Response<Bytes>, Error> {
        let authority = host_and_port(request.uri());
        let fetched = tokio::time::timeout(limit, async {
            let (head, mut body) = self.send(request).await?.into_parts();
            let bytes = body.collect(largest_body).await?;
            Ok(Response::from_parts(head, bytes))
        });
        fetched
            .await
            .map_err(|_| Error::Late { authority, limit })?
    }

    /// Like [`Client::send`], within `limit` until the head of the answer.
    pub async fn send_within(
        &self,
        request: Request<Bytes>,
        limit: Duration,
    ) -> Result<Response<Body>, Error> {
        let authority = host_and_port(request.uri());
        let sent = tokio::time::timeout(limit, self.send(request)).await;
        sent.map_err(|_| Error::Late { authority, limit })?
    }

    /// Sends a request, whose URI is absolute, and follows redirects as configured. The Host header
    /// is taken from the URI if there is none.
    pub async fn send(&self, mut request: Request<Bytes>) -> Result<Response<Body>, Error> {
        for _ in 0..=MAX_REDIRECTS {
            let mut response = self.send_once(&request).await?;
            if !self.config.redirects.follow(&mut request, &response)? {
                return Ok(response);
            }
            response.body_mut().discard().await;
        }
        let authority = host_and_port(request.uri());
        Err(Error::Redirects { authority })
    }

    /// Sends the request on a kept connection, if one still works, or on a new one.
    async fn send_once(&self, request: &Request<Bytes>) -> Result<Response<Body>, Error> {
        let uri = request.uri();
        let mut request = request.clone();
        if !request.headers().contains_key(header::HOST) {
            let host = HeaderValue::from_str(&host_and_port(uri)).map_err(|_| unusable(uri))?;
            request.headers_mut().insert(header::HOST, host);
        }
        if !self.config.keeps_connections {
            let close = HeaderValue::from_static("close");
            request.headers_mut().insert(header::CONNECTION, close);
        }
        while let Some(mut kept) = self.pool.take(uri).await {
            // The server may close it just as the request arrives; then another one is tried.
            if let Ok(response) = kept.send(request.clone()).await {
                return Ok(self.answer(response, uri, kept));
            }
        }
        // TLS makes this future large, which kept connections and their callers need not hold.
        let mut connection = Box::pin(self.connect(uri)).await?;
        let response = connection.send(request).await;
        let response = response.map_err(|source| broken(uri, source))?;
        Ok(self.answer(response, uri, connection))
    }

    fn answer(
        &self,
        response: Response<Incoming>,
        uri: &Uri,
        connection: Connection,
    ) -> Response<Body> {
        response.map(|incoming| Body {
            incoming,
            uri: uri.clone(),
            connection: Some(connection),
            pool: self.config.keeps_connections.then(|| self.pool.clone()),
        })
    }

    async fn connect(&self, uri: &Uri) -> Result<Connection, Error> {
        let (default_port, tls) = match (uri.scheme_str(), &self.config.tls) {
            (Some("http"), _) => (80, None),
            (Some("https"), Some(config)) => (443, Some(config.clone())),
            _ => return Err(unusable(uri)),
        };
        let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
        if host.is_empty() {
            return Err(unusable(uri));
        }
        let port = uri.port_u16().unwrap_or(default_port);
        let proxy = self.config.proxies.find(tls.is_some(), host, port);
        let stream = match proxy {
            None => self.config.dialer.connect(host, port).await?,
            Some(proxy) => self.reach(proxy, uri, host, port).await?,
        };
        let Some(tls) = tls else {
            let connection = Connection::http1(stream, proxy.cloned()).await;
            return connection.map_err(|source| broken(uri, source));
        };
        let name = ServerName::try_from(host.to_owned()).map_err(|_| unusable(uri))?;
        let stream = tokio_rustls::TlsConnector::from(tls).connect(name, stream);
        let stream = stream.await.map_err(|source| Error::Tls {
            authority: host_and_port(uri),
            source,
        })?;
        let connection = match stream.get_ref().1.alpn_protocol() {
            Some(b"h2") => Connection::http2(stream).await,
            _ => Connection::http1(stream, None).await,
        };
        connection.map_err(|source| broken(uri, source))
    }

    /// Connects to a proxy, and for `https` through it to the host.
    async fn reach(
        &self,
        proxy: &Proxy,
        uri: &Uri,
        host: &str,
        port: u16,
    ) -> Result<TcpStream, Error> {
        let dialer = &self.config.dialer;
        if let Ok(address) = host.parse() {
            dialer.check(address)?;
        }
        let failed = |source| Error::Proxy {
            proxy: proxy.clone(),
            authority: host_and_port(uri),
            source,
        };
        let stream = dialer.connect(&proxy.host, proxy.port).await;
        let mut stream = stream.map_err(|error| failed(std::io::Error::other(error)))?;
        if uri.scheme_str() == Some("https") {
            let tunnel = proxy.tunnel(&mut stream, host, port).await;
            tunnel.map_err(failed)?;
        }
        Ok(stream)
    }
}

impl Body {
    /// The next bytes of the body. None at its end.
    pub async fn chunk(&mut self) -> Option<Result<Bytes, Error>> {
        loop {
            let connection = self.connection.as_mut()?;
            match connection.drive(self.incoming.frame()).await {
                Some(Ok(frame)) => {
                    // Trailers are left out.
                    if let Ok(data) = frame.into_data() {
                        return Some(Ok(data));
                    }
                }
                Some(Err(source)) => {
                    self.connection = None;
                    return Some(Err(broken(&self.uri, source)));
                }
                None => {
                    let connection = self.connection.take()?;
                    if let Some(pool) = &self.pool {
                        pool.put(&self.uri, connection);
                    }
                    return None;
                }
            }
        }
    }

    /// Reads the body to its end, in at most `limit` bytes.
    pub async fn collect(&mut self, limit: usize) -> Result<Bytes, Error> {
        let mut whole = BytesMut::new();
        self.read_into(&mut whole, limit + 1).await?;
        if whole.len() > limit {
            let authority = host_and_port(&self.uri);
            return Err(Error::TooLarge { authority, limit });
        }
        Ok(whole.freeze())
    }

    /// Reads until `buffer` has `length` bytes or the body ends. What was read stays in the buffer if
    /// the future is dropped.
    pub async fn read_into(&mut self, buffer: &mut BytesMut, length: usize) -> Result<(), Error> {
        while buffer.len() < length
            && let Some(chunk) = self.chunk().await.transpose()?
        {
            let missing = length - buffer.len();
            buffer.extend_from_slice(&chunk[..chunk.len().min(missing)]);
        }
        Ok(())
    }

    /// Reads what is left, up to 10 MiB, so that the server does not see its answer cut off and the
    /// connection can be kept.
    pub async fn discard(&mut self) {
        let mut left = MAX_DISCARDED;
        while let Some(Ok(chunk)) = self.chunk().await {
            match left.checked_sub(chunk.len()) {
                Some(rest) => left = rest,
                None => return,
            }
        }
    }
}

/// Reads `http://host[:port]/path`.
pub fn http_url(text: &str) -> Result<Uri, Error> {
    let url = text.parse::<Uri>().ok();
    let url = url.filter(|url| url.scheme_str() == Some("http"));
    url.filter(|url| url.host().is_some_and(|host| !host.is_empty()))
        .ok_or_else(|| Error::Url {
            found: text.to_owned(),
        })
}

/// The authority without a user.
fn host_and_port(uri: &Uri) -> String {
    let authority = uri.authority().map_or("", |authority| authority.as_str());
    let host = authority.rsplit('@').next();
    host.unwrap_or_default().to_owned()
}

fn unusable(uri: &Uri) -> Error {
    let found = uri.to_string();
    Error::Url { found }
}

fn broken(uri: &Uri, source: hyper::Error) -> Error {
    let authority = host_and_port(uri);
    Error::Broken { authority, source }
}

#[cfg(test)]
mod tests;
