//! Answers: text, JSON, HTML and the errors all pages share.

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

pub(super) fn json(value: &Value) -> Response<Body> {
    let mut reply = bytes(StatusCode::OK, value.to_string().into());
    reply.headers_mut().insert(CONTENT_TYPE, JSON);
    let no_store = HeaderValue::from_static("no-store");
    reply.headers_mut().insert(CACHE_CONTROL, no_store);
    reply
}

/// 404 where JSON is expected.
pub(super) fn no_json() -> Response<Body> {
    let mut reply = json(&Value::Object(serde_json::Map::new()));
    *reply.status_mut() = StatusCode::NOT_FOUND;
    reply
}

/// A page that may run, load and send nothing, whatever got into it.
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

/// `body`, which drops `guard` once it has been sent or given up.
pub(super) fn holding(body: Body, guard: impl Send + 'static) -> Body {
    let holding = body.map_err(move |error| {
        let _held = &guard;
        error
    });
    holding.boxed_unsync()
}

/// An answer without a content type.
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

/// An error as text, which browsers must not take for another type.
pub(super) fn refusal(status: StatusCode, text: impl Into<Bytes>) -> Response<Body> {
    let mut reply = plain(status, text);
    let no_sniff = HeaderValue::from_static("nosniff");
    reply.headers_mut().insert(X_CONTENT_TYPE_OPTIONS, no_sniff);
    reply
}
