//! HTTP probes: a GET, over TLS or not, that follows redirects on the same host.
//!
//! A redirect to another host counts as success. Every other status is the outcome, whatever happens
//! to the body.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Request, StatusCode};
use tokio::time::{Instant, timeout_at};

use super::Outcome;
use crate::http_client::{Client, Error};

/// What of a body is passed on.
const MAX_BODY: usize = 10 << 10;
/// Time kept back from reading the body, so that the status arrives within the probe's timeout.
const RESERVE: Duration = Duration::from_millis(1);

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

pub(super) fn request(
    is_https: bool,
    host: &str,
    port: u16,
    path: &str,
    headers: &HeaderMap,
) -> Result<Request<Bytes>, Error> {
    let scheme = if is_https { "https" } else { "http" };
    let host = match host.contains(':') {
        true => format!("[{host}]"),
        false => host.to_owned(),
    };
    let slash = if path.starts_with('/') { "" } else { "/" };
    let url = format!("{scheme}://{host}:{port}{slash}{path}");
    let mut request = Request::new(Bytes::new());
    *request.uri_mut() = url.parse().map_err(|_| Error::Url { found: url })?;
    *request.headers_mut() = headers.clone();
    for name in NOT_COPIED {
        request.headers_mut().remove(name);
    }
    Ok(request)
}

pub(super) async fn get(
    client: &Client,
    request: Request<Bytes>,
    end: Instant,
) -> Result<Outcome, Error> {
    let (head, mut body) = client.send(request).await?.into_parts();
    let mut beginning = BytesMut::new();
    let reading = async {
        if body.read_into(&mut beginning, MAX_BODY).await.is_ok() {
            body.discard().await;
        }
    };
    let _ = timeout_at(end.checked_sub(RESERVE).unwrap_or(end), reading).await; // The status counts.
    let status = match head.status.is_redirection() {
        true => StatusCode::OK,
        false => head.status,
    };
    let body = beginning.freeze();
    Ok(Outcome { status, body })
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn the_callers_host_is_kept_and_headers_about_its_connection_are_not() {
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
        let request = request(false, "::1", 80, "x", &headers).expect("an address");
        assert_eq!(request.uri(), "http://[::1]:80/x");
        let found: Vec<_> = request
            .headers()
            .iter()
            .map(|(name, value)| (name.as_str(), value.to_str().expect("text")))
            .collect();
        assert_eq!(
            found,
            [("host", "cart"), ("x-twice", "1"), ("x-twice", "2")]
        );
    }
}
