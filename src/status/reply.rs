//! The small answers.
//!
//! Text, JSON, HTML and the errors that every page shares.
//!
//! Does not decide which of them to give.

use ::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, LOCATION, REFERRER_POLICY,
    X_CONTENT_TYPE_OPTIONS,
};
use ::http::{HeaderValue, Response, StatusCode};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use serde_json::Value;

use super::Body;
use crate::metrics::Registry;

const TEXT: HeaderValue = HeaderValue::from_static("text/plain; charset=utf-8");
const JSON: HeaderValue = HeaderValue::from_static("application/json");
/// Prometheus' text format.
const METRICS: HeaderValue = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");

pub(super) fn plain(status: StatusCode, text: impl Into<Bytes>) -> Response<Body> {
    let mut reply = bytes(status, text.into());
    reply.headers_mut().insert(CONTENT_TYPE, TEXT);
    reply
}

pub(super) fn json(status: StatusCode, value: &Value) -> Response<Body> {
    let mut reply = bytes(status, value.to_string().into());
    reply.headers_mut().insert(CONTENT_TYPE, JSON);
    let no_store = HeaderValue::from_static("no-store");
    reply.headers_mut().insert(CACHE_CONTROL, no_store);
    reply
}

/// A page that consists of itself alone: whatever got into it, nothing is run, loaded or sent.
pub(super) fn html(text: String) -> Response<Body> {
    let mut reply = bytes(StatusCode::OK, text.into());
    let policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; \
                  form-action 'none'; frame-ancestors 'none'";
    for (name, value) in [
        (CONTENT_TYPE, "text/html; charset=utf-8"),
        (CACHE_CONTROL, "no-store"),
        (CONTENT_SECURITY_POLICY, policy),
        (REFERRER_POLICY, "no-referrer"),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ] {
        let value = HeaderValue::from_static(value);
        reply.headers_mut().insert(name, value);
    }
    reply
}

pub(super) fn metrics(registry: &Registry) -> Response<Body> {
    let mut reply = bytes(StatusCode::OK, registry.render().into());
    reply.headers_mut().insert(CONTENT_TYPE, METRICS);
    reply
}

/// An answer without a type.
pub(super) fn bytes(status: StatusCode, body: Bytes) -> Response<Body> {
    let body = Full::new(body).map_err(|never| match never {});
    let mut reply = Response::new(body.boxed_unsync());
    *reply.status_mut() = status;
    reply
}

pub(super) fn moved(to: &str) -> Response<Body> {
    let mut reply = plain(StatusCode::MOVED_PERMANENTLY, format!("see {to}\n"));
    match HeaderValue::from_str(to) {
        Ok(to) => {
            reply.headers_mut().insert(LOCATION, to);
            reply
        }
        Err(_) => not_found(),
    }
}

pub(super) fn not_found() -> Response<Body> {
    refusal(StatusCode::NOT_FOUND, "404 page not found\n")
}

pub(super) fn forbidden() -> Response<Body> {
    let why = "Only requests from localhost are allowed\n";
    refusal(StatusCode::FORBIDDEN, why)
}

pub(super) fn method_not_allowed() -> Response<Body> {
    refusal(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed\n")
}

/// An error that is not to be taken for anything but text.
pub(super) fn refusal(status: StatusCode, text: impl Into<Bytes>) -> Response<Body> {
    let mut reply = plain(status, text);
    let no_sniff = HeaderValue::from_static("nosniff");
    reply.headers_mut().insert(X_CONTENT_TYPE_OPTIONS, no_sniff);
    reply
}
