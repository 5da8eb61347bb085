//! Requests to a cloud's metadata service.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response};

use crate::http_client::Client;
use crate::lifecycle::with_causes;

/// Bounds discovery as a whole, and one answer of a service that has no shorter bound.
pub(super) const LIMIT: Duration = Duration::from_secs(1);
/// The link-local address of every cloud's metadata service.
pub(super) const SERVICE: &str = "169.254.169.254";

const LARGEST_ANSWER: usize = 1 << 20;

/// Sends a request with one header to `host`, a host or `host:port`. None if no answer arrives within
/// `limit`: then this is another cloud.
pub(super) async fn request(
    host: &str,
    method: Method,
    path: &str,
    (name, value): (&str, &str),
    limit: Duration,
) -> Option<Response<Bytes>> {
    let request = Request::builder()
        .method(method)
        .uri(format!("http://{host}{path}"))
        .header(name, value)
        .body(Bytes::new())
        .ok()?;
    let answer = Client::default()
        .fetch(request, limit, LARGEST_ANSWER)
        .await;
    let answer = answer.inspect_err(|error| {
        let error = with_causes(error);
        tracing::debug!(error, path, "a metadata service did not answer");
    });
    answer.ok()
}

pub(super) fn text(answer: &Response<Bytes>) -> String {
    String::from_utf8_lossy(answer.body()).into_owned()
}

/// The text of an answer that is a success.
pub(super) fn success(answer: Option<Response<Bytes>>) -> Option<String> {
    let answer = answer.filter(|answer| answer.status().is_success())?;
    Some(text(&answer))
}

/// The pairs whose value is not empty.
pub(super) fn present<const N: usize>(
    pairs: [(&str, Option<String>); N],
) -> BTreeMap<String, String> {
    let found = pairs.into_iter().filter_map(|(name, value)| {
        Some((name.to_owned(), value.filter(|value| !value.is_empty())?))
    });
    found.collect()
}
