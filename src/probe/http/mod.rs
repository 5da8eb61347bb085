//! HTTP probes: a GET, over TLS or not, that follows redirects on the same host.
//!
//! A request goes to a connection of its own unless connections are kept; a kept one that has ended
//! meanwhile is replaced once. What remains of a redirection counts as success, every other status is
//! the answer.
//!
//! Does not decode bodies, use proxies or keep cookies.

mod connection;

use ::http::uri::{PathAndQuery, Scheme};
use ::http::{HeaderMap, HeaderValue, Request, StatusCode, Uri, header};
use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use tokio::time::{Instant, timeout_at};

pub(super) use connection::{Driver, Pool};
use connection::{Key, Open};

use super::{Client, Outcome, connect};

/// What of a body is passed on.
const LONGEST_BODY: usize = 10 << 10;
/// What is read beyond that, so that an application does not see its answer cut off.
const LONGEST_REST: usize = 1 << 20;
const MOST_REDIRECTS: usize = 10;

/// They are about one connection, or about a body that is not passed on.
const NOT_COPIED: [&str; 9] = [
    "connection",
    "content-length",
    "http2-settings",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{found:?} is no address to probe")]
    Address { found: String },
    #[error("TLS handshake failed")]
    Tls(#[source] std::io::Error),
    #[error("the exchange broke off")]
    Exchange(#[source] hyper::Error),
    #[error("{found:?} is no address to be redirected to")]
    Location { found: String },
    #[error("stopped after {MOST_REDIRECTS} redirects")]
    Redirects,
}

/// A request that is to be sent.
#[derive(Debug)]
pub(super) struct Get {
    uri: Uri,
    headers: HeaderMap,
}

impl Get {
    pub(super) fn new(
        is_https: bool,
        host: &str,
        port: u16,
        path: &str,
        headers: &HeaderMap,
    ) -> Result<Self, Error> {
        let scheme = if is_https { "https" } else { "http" };
        let host = if host.contains(':') {
            format!("[{host}]")
        } else {
            host.to_owned()
        };
        let slash = if path.starts_with('/') { "" } else { "/" };
        let found = format!("{scheme}://{host}:{port}{slash}{path}");
        let Ok(uri) = found.parse::<Uri>() else {
            return Err(Error::Address { found });
        };
        let mut headers = headers.clone();
        for name in NOT_COPIED {
            headers.remove(name);
        }
        let mut get = Self { uri, headers };
        if !get.headers.contains_key(header::HOST) {
            get.name_host()?;
        }
        Ok(get)
    }

    /// Takes the Host header from the address.
    fn name_host(&mut self) -> Result<(), Error> {
        let authority = self.uri.authority().map(|authority| authority.as_str());
        let host = HeaderValue::from_str(authority.unwrap_or_default());
        let host = host.map_err(|_| Error::Address {
            found: self.uri.to_string(),
        })?;
        self.headers.insert(header::HOST, host);
        Ok(())
    }

    fn key(&self) -> Key {
        let is_https = self.uri.scheme() == Some(&Scheme::HTTPS);
        let host = self.uri.host().unwrap_or_default();
        Key {
            is_https,
            host: host.trim_matches(['[', ']']).to_owned(),
            port: self
                .uri
                .port_u16()
                .unwrap_or(if is_https { 443 } else { 80 }),
        }
    }

    /// Goes where an answer sends it. False if that is another host, or nowhere.
    fn follow(&mut self, status: StatusCode, headers: &HeaderMap) -> Result<bool, Error> {
        let Some(location) = headers.get(header::LOCATION) else {
            return Ok(false);
        };
        if !matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308) {
            return Ok(false);
        }
        let (next, is_absolute) = resolve(&self.uri, location).ok_or_else(|| Error::Location {
            found: String::from_utf8_lossy(location.as_bytes()).into_owned(),
        })?;
        if next.host() != self.uri.host() {
            return Ok(false);
        }
        self.uri = next;
        if is_absolute {
            self.name_host()?;
        }
        Ok(true)
    }

    fn request(&self, is_http2: bool, keeps: bool) -> Result<Request<Empty<Bytes>>, Error> {
        let mut request = Request::new(Empty::new());
        *request.headers_mut() = self.headers.clone();
        if is_http2 {
            // HTTP/2 has the host in the address.
            let host = request.headers_mut().remove(header::HOST);
            *request.uri_mut() = self.uri_for(host.as_ref())?;
            return Ok(request);
        }
        if !keeps {
            let close = HeaderValue::from_static("close");
            request.headers_mut().insert(header::CONNECTION, close);
        }
        *request.uri_mut() = path_of(&self.uri).into();
        Ok(request)
    }

    fn uri_for(&self, host: Option<&HeaderValue>) -> Result<Uri, Error> {
        let mut parts = self.uri.clone().into_parts();
        let named = host.and_then(|host| host.to_str().ok()?.parse().ok());
        parts.authority = named.or(parts.authority);
        Uri::from_parts(parts).map_err(|_| Error::Address {
            found: self.uri.to_string(),
        })
    }
}

impl Client {
    pub(super) async fn get(&self, mut get: Get, end: Instant) -> Result<Outcome, super::Error> {
        for _ in 0..=MOST_REDIRECTS {
            let (answer, open) = self.exchange(&get).await?;
            let (head, body) = answer.into_parts();
            if !get.follow(head.status, &head.headers)? {
                return Ok(self.outcome(head.status, body, open, get.key(), end).await);
            }
            self.finish(body, open, get.key(), end).await;
        }
        Err(Error::Redirects.into())
    }

    /// Sends the request on a kept connection, if there is one that still works, or on a new one.
    async fn exchange(
        &self,
        get: &Get,
    ) -> Result<(::http::Response<Incoming>, Open), super::Error> {
        let key = get.key();
        let keeps = self.pool.is_some();
        if let Some(mut open) = self.pool.as_ref().and_then(|pool| pool.take(&key))
            && let Ok(answer) = open.send(get.request(open.is_http2(), keeps)?).await
        {
            return Ok((answer, open));
        }
        let stream = connect::connect(self.origin, &key.host, key.port).await?;
        let mut open = Open::new(stream, &key, &self.tls).await?;
        let request = get.request(open.is_http2(), keeps)?;
        let answer = open.send(request).await.map_err(Error::Exchange)?;
        Ok((answer, open))
    }

    /// The status counts, whatever becomes of the body.
    async fn outcome(
        &self,
        status: StatusCode,
        mut body: Incoming,
        open: Open,
        key: Key,
        end: Instant,
    ) -> Outcome {
        let mut beginning = BytesMut::new();
        let read = async {
            while beginning.len() < LONGEST_BODY
                && let Some(Ok(frame)) = body.frame().await
            {
                if let Ok(data) = frame.into_data() {
                    let room = LONGEST_BODY - beginning.len();
                    beginning.extend_from_slice(&data[..data.len().min(room)]);
                }
            }
        };
        if timeout_at(before(end), read).await.is_ok() {
            self.finish(body, open, key, end).await;
        }
        Outcome {
            status: match status.is_redirection() {
                true => StatusCode::OK,
                false => status,
            },
            body: beginning.freeze(),
        }
    }

    /// Reads the rest of an answer. What becomes of it changes the answer no more, only whether the
    /// connection can be kept.
    async fn finish(&self, mut body: Incoming, open: Open, key: Key, end: Instant) {
        let rest = async {
            let mut left = LONGEST_REST;
            while let Some(Ok(frame)) = body.frame().await {
                let length = frame.data_ref().map_or(0, Bytes::len);
                left = left.checked_sub(length)?;
            }
            Some(())
        };
        let is_read = timeout_at(before(end), rest).await == Ok(Some(()));
        if let (Some(pool), true) = (&self.pool, is_read) {
            pool.put(key, open);
        }
    }
}

/// The answer must be there before the time of the whole probe is over.
fn before(end: Instant) -> Instant {
    end - std::time::Duration::from_millis(1)
}

fn path_of(uri: &Uri) -> PathAndQuery {
    let root = PathAndQuery::from_static("/");
    uri.path_and_query().cloned().unwrap_or(root)
}

/// Where a Location header points from `base`, and whether it says so in full.
fn resolve(base: &Uri, location: &HeaderValue) -> Option<(Uri, bool)> {
    let location = location.to_str().ok()?;
    let location = location.split('#').next()?;
    let (scheme, authority) = (base.scheme_str()?, base.authority()?);
    if let Some(rest) = location.strip_prefix("//") {
        return Some((format!("{scheme}://{rest}").parse().ok()?, true));
    }
    if location.contains("://") && !location.starts_with(['/', '?', '.']) {
        let uri: Uri = location.parse().ok()?;
        let is_known = matches!(uri.scheme_str(), Some("http" | "https"));
        return is_known.then_some((uri, true));
    }
    let path = base.path();
    let path = match location {
        "" => path_of(base).to_string(),
        absolute if absolute.starts_with('/') => absolute.to_owned(),
        query if query.starts_with('?') => format!("{path}{query}"),
        relative => {
            let (directory, _) = path.rsplit_once('/')?;
            format!("{directory}/{relative}")
        }
    };
    let uri = format!("{scheme}://{authority}{path}").parse().ok()?;
    Some((uri, false))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_location_is_seen_from_where_it_was_found() {
        for (location, expected) in [
            ("/b?q", Some("http://[::1]:80/b?q")),
            ("b", Some("http://[::1]:80/a/b")),
            ("?q", Some("http://[::1]:80/a/x?q")),
            ("", Some("http://[::1]:80/a/x?old")),
            ("//h/y#part", Some("http://h/y")),
            ("https://h:8/", Some("https://h:8/")),
            ("ftp://h/", None),
            ("http://", None),
            ("/a b", None),
        ] {
            let base: Uri = "http://[::1]:80/a/x?old".parse().expect("an address");
            let location = HeaderValue::from_str(location).expect("a value");
            let found = resolve(&base, &location).map(|(uri, _)| uri.to_string());
            assert_eq!(found.as_deref(), expected, "{location:?}");
        }
    }

    #[test]
    fn the_host_of_whoever_asks_is_kept_and_what_is_about_the_connection_is_not() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("host", "cart"),
            ("x-twice", "1"),
            ("x-twice", "2"),
            ("connection", "keep-alive"),
            ("content-length", "5"),
        ] {
            headers.append(name, HeaderValue::from_static(value));
        }
        let get = Get::new(false, "::1", 80, "x", &headers).expect("an address");
        let request = get.request(false, false).expect("a request");
        let found: Vec<_> = request
            .headers()
            .iter()
            .map(|(name, value)| (name.as_str(), value.to_str().expect("text")))
            .collect();
        assert_eq!(
            found,
            [
                ("host", "cart"),
                ("x-twice", "1"),
                ("x-twice", "2"),
                ("connection", "close")
            ]
        );
        let request = get.request(true, false).expect("a request");
        assert_eq!(request.uri(), "http://cart/x");
    }
}
