//! Makes responses: text, JSON, HTML, and the errors that all pages share.

use ::http::header::{
    ACCEPT, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, LOCATION, REFERRER_POLICY,
    X_CONTENT_TYPE_OPTIONS,
};
use ::http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use serde::Serialize;
use serde_json::json;

use super::Body;
use crate::metrics::Registry;

/// The media type of Prometheus' text format.
const METRICS: &str = "text/plain; version=0.0.4; charset=utf-8";
/// A policy under which a page can run, load and send nothing, whatever text it contains.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; \
                      form-action 'none'; frame-ancestors 'none'";

/// Returns the media type that `Accept` names first, of three. JSON is for tools that accept anything.
pub(super) fn preferred_media_type(headers: &HeaderMap) -> &'static str {
    let header = headers.get(ACCEPT).and_then(|value| value.to_str().ok());
    let accept = header.unwrap_or_default().to_ascii_lowercase();
    ["text/html", "text/plain", "application/json"]
        .into_iter()
        .filter(|name| accept.contains(name))
        .min_by_key(|name| accept.find(name))
        .unwrap_or("application/json")
}

/// Makes a response with these headers only.
pub(super) fn with(
    status: StatusCode,
    body: impl Into<Bytes>,
    headers: &[(HeaderName, &'static str)],
) -> Response<Body> {
    let body = Full::new(body.into()).map_err(|never| match never {});
    let mut reply = Response::new(body.boxed_unsync());
    *reply.status_mut() = status;
    for (name, value) in headers {
        reply.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    reply
}

pub(super) fn plain(status: StatusCode, text: impl Into<Bytes>) -> Response<Body> {
    with(status, text, &[(CONTENT_TYPE, "text/plain; charset=utf-8")])
}

/// Makes a JSON response, or 404 and an empty object for None.
pub(super) fn json(value: Option<impl Serialize>) -> Response<Body> {
    json_text(value.map(|value| json!(value).to_string()))
}

/// Makes the response of [`json`] from text that is JSON already.
pub(super) fn json_text(text: Option<String>) -> Response<Body> {
    let (status, text) = match text {
        Some(text) => (StatusCode::OK, text),
        None => (StatusCode::NOT_FOUND, "{}".to_owned()),
    };
    let headers = [(CONTENT_TYPE, "application/json"), (CACHE_CONTROL, "no-store")];
    with(status, text, &headers)
}

pub(super) fn html(text: String) -> Response<Body> {
    let headers = [
        (CONTENT_TYPE, "text/html; charset=utf-8"),
        (CACHE_CONTROL, "no-store"),
        (CONTENT_SECURITY_POLICY, POLICY),
        (REFERRER_POLICY, "no-referrer"),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    with(StatusCode::OK, text, &headers)
}

pub(super) fn metrics(registry: &Registry) -> Response<Body> {
    with(StatusCode::OK, registry.render(), &[(CONTENT_TYPE, METRICS)])
}

struct OnDrop<F: FnMut()>(F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// Calls `then` once `body` has been sent or given up.
pub(super) fn call_after(body: Body, then: impl FnMut() + Send + 'static) -> Body {
    let then = OnDrop(then);
    body.map_err(move |error| {
        // The body owns this closure, and with it `then`.
        let _held = &then;
        error
    })
    .boxed_unsync()
}

/// Redirects to another path, with the method of the request.
pub(super) fn redirect(to: &str) -> Response<Body> {
    let Ok(location) = HeaderValue::from_str(to) else {
        return not_found();
    };
    let mut reply = plain(StatusCode::TEMPORARY_REDIRECT, format!("see {to}\n"));
    reply.headers_mut().insert(LOCATION, location);
    reply
}

pub(super) fn not_found() -> Response<Body> {
    refusal(StatusCode::NOT_FOUND, "404 page not found\n")
}

pub(super) fn method_not_allowed() -> Response<Body> {
    refusal(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed\n")
}

/// Makes an error response as text, which browsers must not take for another type.
pub(super) fn refusal(status: StatusCode, text: impl Into<Bytes>) -> Response<Body> {
    let headers =
        [(CONTENT_TYPE, "text/plain; charset=utf-8"), (X_CONTENT_TYPE_OPTIONS, "nosniff")];
    with(status, text, &headers)
}
