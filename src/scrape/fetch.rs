//! One page fetched: a request, redirects followed, and the answer's body piece by piece.
//!
//! Connections are kept for the next scrape. One that the other side has closed meanwhile is
//! replaced without a word. What is not read stays in the socket, so a page that waits for its turn
//! costs no memory here. Answers are wanted as they are: an encoded one could be far larger than it
//! looks, and saves nothing on this machine.
//!
//! Has no deadline of its own, and does not speak TLS.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::Pin;

use bytes::Bytes;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, Uri, header};
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::net::TcpStream;

/// What of an answer is held: its head, or a piece of its body.
const LARGEST_PIECE: usize = 32 << 10;
const MOST_REDIRECTS: usize = 10;
/// Most connections kept idle.
const MOST_IDLE: usize = 32;

#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("cannot connect to {authority}")]
    Connect {
        authority: String,
        #[source]
        source: io::Error,
    },
    #[error("the exchange with {authority} broke off")]
    Exchange {
        authority: String,
        #[source]
        source: hyper::Error,
    },
    #[error("{authority} answered {found}, expected 200")]
    Status {
        authority: String,
        found: StatusCode,
    },
    #[error("{authority} answered in the encoding {found:?}, expected none")]
    Encoded {
        authority: String,
        found: HeaderValue,
    },
    #[error("{authority} redirects to {found:?}, expected http://host[:port]/path")]
    Redirect { authority: String, found: String },
    #[error("stopped after {MOST_REDIRECTS} redirects, the last by {authority}")]
    Redirects { authority: String },
}

/// Connections that wait for the next scrape.
#[derive(Default)]
pub(super) struct Pool(Mutex<Vec<Exchange>>);

/// An answer whose body is still to be read.
pub(super) struct Answer {
    response: Response<Incoming>,
    exchange: Exchange,
}

struct Exchange {
    authority: String,
    sender: SendRequest<Empty<Bytes>>,
    connection: Pin<Box<http1::Connection<TokioIo<TcpStream>, Empty<Bytes>>>>,
    is_closed: bool,
}

impl Pool {
    /// Asks for a page on this machine.
    pub(super) async fn get(
        &self,
        port: u16,
        path: &PathAndQuery,
        headers: &HeaderMap,
    ) -> Result<Answer, Error> {
        let mut authority = format!("localhost:{port}");
        let mut path = path.clone();
        for _ in 0..=MOST_REDIRECTS {
            let answer = self.ask(&authority, &path, headers).await?;
            if let Some(location) = redirection(&answer.response) {
                (authority, path) = follow(&authority, &path, location)?;
                continue;
            }
            return answer.checked();
        }
        Err(Error::Redirects { authority })
    }

    /// Takes back the connection of an answer that was read to its end.
    pub(super) fn keep(&self, answer: Answer) {
        let mut idle = self.lock();
        if idle.len() < MOST_IDLE && !answer.exchange.is_closed {
            idle.push(answer.exchange);
        }
    }

    async fn ask(
        &self,
        authority: &str,
        path: &PathAndQuery,
        headers: &HeaderMap,
    ) -> Result<Answer, Error> {
        while let Some(mut exchange) = self.idle(authority) {
            // The other side may close it just as the request leaves: then another one is tried.
            if exchange.is_usable().await
                && let Ok(answer) = exchange.send(path, headers).await
            {
                return Ok(answer);
            }
        }
        let exchange = Exchange::open(authority).await?;
        exchange.send(path, headers).await
    }

    fn idle(&self, authority: &str) -> Option<Exchange> {
        let mut idle = self.lock();
        let index = idle.iter().position(|one| one.authority == authority)?;
        Some(idle.swap_remove(index))
    }

    fn lock(&self) -> parking_lot::MutexGuard<'_, Vec<Exchange>> {
        self.0.lock()
    }
}

impl Exchange {
    async fn open(authority: &str) -> Result<Self, Error> {
        let stream = connect(authority).await.map_err(|source| Error::Connect {
            authority: authority.to_owned(),
            source,
        })?;
        let handshake = http1::Builder::new()
            .max_buf_size(LARGEST_PIECE)
            .handshake(TokioIo::new(stream));
        let (sender, connection) = handshake.await.map_err(|source| Error::Exchange {
            authority: authority.to_owned(),
            source,
        })?;
        Ok(Self {
            authority: authority.to_owned(),
            sender,
            connection: Box::pin(connection),
            is_closed: false,
        })
    }

    /// Whether the other side still holds the connection.
    async fn is_usable(&mut self) -> bool {
        tokio::select! {
            biased;
            _ = self.connection.as_mut() => false,
            ready = self.sender.ready() => ready.is_ok(),
        }
    }

    async fn send(mut self, path: &PathAndQuery, headers: &HeaderMap) -> Result<Answer, Error> {
        let mut request = Request::new(Empty::new());
        *request.uri_mut() = Uri::from(path.clone());
        *request.headers_mut() = headers.clone();
        if let Ok(host) = HeaderValue::from_str(&self.authority) {
            request.headers_mut().insert(header::HOST, host);
        }
        let answer = {
            let mut answer = std::pin::pin!(self.sender.send_request(request));
            tokio::select! {
                biased;
                answer = &mut answer => answer,
                // The answer says what went wrong, and may be there when nothing did.
                _ = self.connection.as_mut() => {
                    self.is_closed = true;
                    answer.await
                }
            }
        };
        match answer {
            Ok(response) => Ok(Answer {
                response,
                exchange: self,
            }),
            Err(source) => Err(self.broke_off(source)),
        }
    }

    fn broke_off(&self, source: hyper::Error) -> Error {
        Error::Exchange {
            authority: self.authority.clone(),
            source,
        }
    }
}

impl Answer {
    pub(super) fn header(&self, name: header::HeaderName) -> Option<&HeaderValue> {
        self.response.headers().get(name)
    }

    /// The next piece of the body. None is its end.
    pub(super) async fn piece(&mut self) -> Option<Result<Bytes, Error>> {
        loop {
            let exchange = &mut self.exchange;
            let frame = tokio::select! {
                biased;
                frame = self.response.frame() => frame?,
                _ = exchange.connection.as_mut(), if !exchange.is_closed => {
                    exchange.is_closed = true;
                    continue;
                }
            };
            match frame.map(|frame| frame.into_data()) {
                Ok(Ok(data)) => return Some(Ok(data)),
                // Trailers.
                Ok(Err(_)) => {}
                Err(source) => return Some(Err(exchange.broke_off(source))),
            }
        }
    }

    fn checked(self) -> Result<Self, Error> {
        let authority = self.exchange.authority.clone();
        let found = self.response.status();
        if found != StatusCode::OK {
            return Err(Error::Status { authority, found });
        }
        match self.header(header::CONTENT_ENCODING) {
            Some(found) if found != "identity" => Err(Error::Encoded {
                authority,
                found: found.clone(),
            }),
            _ => Ok(self),
        }
    }
}

/// Where an answer sends the asker.
fn redirection(response: &Response<Incoming>) -> Option<&HeaderValue> {
    let redirects = matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308);
    let location = response.headers().get(header::LOCATION);
    location.filter(|_| redirects)
}

fn follow(
    authority: &str,
    path: &PathAndQuery,
    location: &HeaderValue,
) -> Result<(String, PathAndQuery), Error> {
    let unusable = || Error::Redirect {
        authority: authority.to_owned(),
        found: String::from_utf8_lossy(location.as_bytes()).into_owned(),
    };
    let text = location.to_str().map_err(|_| unusable())?;
    let text = text.split('#').next().unwrap_or_default();
    let relative = match text {
        text if text.starts_with("//") => format!("http:{text}"),
        text if text.starts_with('/') || text.contains("://") => text.to_owned(),
        text if text.starts_with('?') => format!("{}{text}", path.path()),
        text => {
            let folder = path
                .path()
                .rfind('/')
                .map_or("/", |end| &path.path()[..=end]);
            format!("{folder}{text}")
        }
    };
    let uri: Uri = relative.parse().map_err(|_| unusable())?;
    let path = uri.path_and_query().cloned();
    let path = path.unwrap_or_else(|| PathAndQuery::from_static("/"));
    match (uri.scheme_str(), uri.authority()) {
        (None, None) => Ok((authority.to_owned(), path)),
        (Some("http"), Some(other)) if !other.host().is_empty() => Ok((other.to_string(), path)),
        _ => Err(unusable()),
    }
}

/// `localhost` is both loopback addresses, without asking a resolver.
async fn connect(authority: &str) -> io::Result<TcpStream> {
    let unusable = || io::Error::from(io::ErrorKind::InvalidInput);
    let parsed: http::uri::Authority = authority.parse().map_err(|_| unusable())?;
    let port = parsed.port_u16().unwrap_or(80);
    let addresses: Vec<SocketAddr> = match parsed.host() {
        "localhost" => {
            let hosts: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
            hosts.map(|host| (host, port).into()).to_vec()
        }
        host => {
            let host = host.trim_matches(['[', ']']);
            tokio::net::lookup_host((host, port)).await?.collect()
        }
    };
    let mut first = None;
    for address in addresses {
        match TcpStream::connect(address).await {
            Ok(stream) => return Ok(stream),
            Err(error) => first = first.or(Some(error)),
        }
    }
    Err(first.unwrap_or_else(unusable))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_redirect_is_read_against_where_it_came_from() {
        let path = PathAndQuery::from_static("/a/b?c=d");
        for (location, expected) in [
            ("/x?y#z", Some(("localhost:1", "/x?y"))),
            ("x", Some(("localhost:1", "/a/x"))),
            ("?y", Some(("localhost:1", "/a/b?y"))),
            ("http://127.0.0.1:2", Some(("127.0.0.1:2", "/"))),
            ("//[::1]:2/x", Some(("[::1]:2", "/x"))),
            ("https://localhost/", None),
            ("http://", None),
            ("http://a b/", None),
        ] {
            let location = HeaderValue::from_static(location);
            let found = follow("localhost:1", &path, &location);
            let found = found
                .ok()
                .map(|(authority, path)| (authority, path.to_string()));
            let expected = expected.map(|(a, p)| (a.to_owned(), p.to_owned()));
            assert_eq!(found, expected, "{location:?}");
        }
    }
}
