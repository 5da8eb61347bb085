//! How a relay's streams end: who ended them, what the other side is told, what the log says.
//!
//! A status that istiod gave reaches Envoy as it came, details included.

use http::{HeaderMap, HeaderValue};
use hyper::body::Incoming;
use tonic::{Code, Status};

/// The headers that make up a gRPC status. Source: gRPC over HTTP/2, Status.
const STATUS_HEADERS: [&str; 3] = ["grpc-status", "grpc-message", "grpc-status-details-bin"];

/// Why a relay ended.
#[derive(Debug)]
pub(crate) enum End {
    /// Istiod ended the stream with these trailers.
    Istiod(HeaderMap),
    /// The connection to istiod, or the stream on it, broke.
    Lost { status: Status, expected: bool },
    /// Istiod sent what cannot be relayed.
    BadResponse(Status),
    /// Envoy sent what cannot be relayed.
    BadRequest(Status),
    /// Envoy closed its side.
    EnvoyDone,
    /// Envoy reset the stream while it was being read.
    EnvoyFailed(hyper::Error),
    /// Envoy takes nothing any more.
    EnvoyGone,
    /// A newer stream took this one's place, or the agent goes down.
    Stopped,
}

/// What the end of a stream counts as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    /// It belongs to ordinary life, or the other stream's end was the cause.
    Cancelled,
    Error,
}

impl End {
    /// What it counts as for istiod's stream and for Envoy's.
    pub(crate) fn classes(&self) -> (Class, Class) {
        match self {
            Self::BadRequest(_) => (Class::Cancelled, Class::Error),
            Self::BadResponse(_) => (Class::Error, Class::Cancelled),
            Self::Lost {
                expected: false, ..
            } => (Class::Error, Class::Cancelled),
            Self::Istiod(trailers) if !expected(status_of(trailers).code()) => {
                (Class::Error, Class::Cancelled)
            }
            _ => (Class::Cancelled, Class::Cancelled),
        }
    }

    /// Who ended the streams and why, in one line.
    pub(crate) fn reason(&self) -> String {
        match self {
            Self::Istiod(trailers) => format!("istiod: {}", text(&status_of(trailers))),
            Self::Lost { status, .. } | Self::BadResponse(status) => {
                format!("istiod: {}", text(status))
            }
            Self::BadRequest(status) => format!("Envoy: {}", text(status)),
            Self::EnvoyFailed(error) => format!("Envoy: {error}"),
            Self::EnvoyDone | Self::EnvoyGone => "Envoy closed its stream".to_owned(),
            Self::Stopped => "replaced by a newer stream, or the agent stops".to_owned(),
        }
    }

    /// Whether istiod said that all went well.
    pub(crate) fn is_success(&self) -> bool {
        matches!(self, Self::Istiod(trailers) if trailers.get("grpc-status").is_some_and(|s| s == "0"))
    }

    /// The code istiod ended the stream with, if it was istiod.
    pub(crate) fn code_of_istiod(&self) -> Option<Code> {
        match self {
            Self::Istiod(trailers) => Some(status_of(trailers).code()),
            Self::BadResponse(status) => Some(status.code()),
            _ => None,
        }
    }

    /// The status for Envoy; `None` if it is not there to read one.
    pub(crate) fn trailers(&self) -> Option<HeaderMap> {
        match self {
            Self::Istiod(trailers) => Some(trailers.clone()),
            Self::Lost { status, .. } | Self::BadResponse(status) | Self::BadRequest(status) => {
                Some(trailers_of(status))
            }
            Self::EnvoyDone | Self::Stopped => Some(trailers_of(&Status::ok(""))),
            Self::EnvoyFailed(_) | Self::EnvoyGone => None,
        }
    }

    /// Logs ends nobody asked for as warnings, the rest for debugging.
    pub(crate) fn log(&self, id: u32) {
        match self {
            Self::Stopped => tracing::debug!(target: "xdsproxy", id, "upstream stopped"),
            Self::EnvoyDone | Self::EnvoyGone => {
                tracing::debug!(target: "xdsproxy", id, "downstream terminated with status OK");
            }
            Self::EnvoyFailed(error) => {
                tracing::debug!(target: "xdsproxy", id, "downstream terminated with status {error}");
            }
            Self::BadRequest(status) => tracing::warn!(
                target: "xdsproxy", id,
                "downstream terminated with unexpected error {}", text(status)
            ),
            Self::BadResponse(status) => warn_istiod(id, status),
            Self::Lost {
                status,
                expected: true,
            } => debug_istiod(id, status),
            Self::Lost { status, .. } => warn_istiod(id, status),
            Self::Istiod(trailers) => {
                let status = status_of(trailers);
                if expected(status.code()) {
                    debug_istiod(id, &status);
                } else {
                    warn_istiod(id, &status);
                }
            }
        }
    }
}

fn status_of(trailers: &HeaderMap) -> Status {
    Status::from_header_map(trailers)
        .unwrap_or_else(|| Status::unknown("a status that cannot be read"))
}

fn warn_istiod(id: u32, status: &Status) {
    let status = text(status);
    tracing::warn!(target: "xdsproxy", id, "upstream terminated with unexpected error {status}");
}

fn debug_istiod(id: u32, status: &Status) {
    tracing::debug!(target: "xdsproxy", id, "upstream terminated with status {}", text(status));
}

/// Ends that belong to a control plane's ordinary life.
fn expected(code: Code) -> bool {
    matches!(code, Code::Ok | Code::Cancelled | Code::DeadlineExceeded)
}

fn text(status: &Status) -> String {
    format!("{:?}: {}", status.code(), status.message())
}

/// The body of istiod's answer, or the end it already is.
pub(crate) fn opened(response: http::Response<Incoming>) -> Result<Incoming, End> {
    let (head, body) = response.into_parts();
    if head.headers.contains_key("grpc-status") {
        return Err(of_trailers(head.headers));
    }
    if head.status != http::StatusCode::OK {
        return Err(End::BadResponse(Status::new(
            of_http(head.status),
            format!("istiod answered with HTTP status {}", head.status),
        )));
    }
    match head.headers.get(http::header::CONTENT_TYPE) {
        Some(kind) if kind.as_bytes().starts_with(b"application/grpc") => Ok(body),
        kind => Err(End::BadResponse(Status::unknown(format!(
            "istiod answered with content type {kind:?}, expected application/grpc"
        )))),
    }
}

/// The end that trailers, or a head that is all, stand for.
pub(crate) fn of_trailers(mut trailers: HeaderMap) -> End {
    if !trailers.contains_key("grpc-status") {
        return End::Lost {
            status: Status::unavailable("istiod ended the stream without a status"),
            expected: false,
        };
    }
    let mut kept = HeaderMap::new();
    for name in STATUS_HEADERS {
        if let Some(value) = trailers.remove(name) {
            kept.insert(name, value);
        }
    }
    End::Istiod(kept)
}

/// A stream that broke: unavailable, unless its reset says more.
///
/// That a connection reaches its greatest age, that istiod goes away or comes to an end of its own,
/// is a control plane's ordinary life and no warning.
pub(crate) fn lost(error: hyper::Error) -> End {
    let text = match std::error::Error::source(&error) {
        Some(source) => format!("connection to istiod: {error}: {source}"),
        None => format!("connection to istiod: {error}"),
    };
    let expected = is_ordinary(&error);
    let code = match Status::from_error(Box::new(error)).code() {
        Code::Unknown | Code::Cancelled | Code::Internal => Code::Unavailable,
        code => code,
    };
    End::Lost {
        status: Status::new(code, text),
        expected,
    }
}

fn is_ordinary(error: &hyper::Error) -> bool {
    let cause =
        std::error::Error::source(error).and_then(|cause| cause.downcast_ref::<h2::Error>());
    match cause {
        Some(cause) if cause.is_io() => cause.get_io().is_some_and(is_end_of_connection),
        Some(cause) => {
            matches!(
                cause.reason(),
                Some(h2::Reason::NO_ERROR | h2::Reason::CANCEL)
            )
        }
        None => error.is_canceled() || error.is_closed(),
    }
}

fn is_end_of_connection(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}

pub(crate) fn trailers_of(status: &Status) -> HeaderMap {
    let mut trailers = HeaderMap::new();
    if status.add_header(&mut trailers).is_err() {
        // The message cannot stand in a header; the code still can.
        trailers.clear();
        trailers.insert("grpc-status", HeaderValue::from(status.code() as i32));
    }
    trailers
}

/// Source: gRPC, "HTTP to gRPC Status Code Mapping".
fn of_http(status: http::StatusCode) -> Code {
    match status.as_u16() {
        400 => Code::Internal,
        401 => Code::Unauthenticated,
        403 => Code::PermissionDenied,
        404 => Code::Unimplemented,
        429 | 502 | 503 | 504 => Code::Unavailable,
        _ => Code::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn istiods_status_reaches_envoy_as_it_came() {
        for code in 0..=16 {
            let mut trailers = HeaderMap::new();
            trailers.insert("grpc-status", HeaderValue::from(code));
            trailers.insert("grpc-message", HeaderValue::from_static("caf%C3%A9 %25"));
            trailers.insert("grpc-status-details-bin", HeaderValue::from_static("CAQ"));
            let expected = trailers.clone();
            trailers.insert("x-other", HeaderValue::from_static("dropped"));
            assert_eq!(of_trailers(trailers).trailers(), Some(expected));
        }
    }

    #[test]
    fn ordinary_ends_count_as_cancelled_and_others_as_errors_of_who_made_them() {
        let (cancelled, error) = (Class::Cancelled, Class::Error);
        let of_istiod = |code: Code| End::Istiod(trailers_of(&Status::new(code, "why")));
        let lost = |expected| End::Lost {
            status: Status::unavailable("gone"),
            expected,
        };
        let bad = || Status::internal("bad");
        for (end, expected, reason) in [
            (
                of_istiod(Code::Ok),
                (cancelled, cancelled),
                "istiod: Ok: why",
            ),
            (
                of_istiod(Code::DeadlineExceeded),
                (cancelled, cancelled),
                "istiod: DeadlineExceeded: why",
            ),
            (
                of_istiod(Code::Unauthenticated),
                (error, cancelled),
                "istiod: Unauthenticated: why",
            ),
            (
                lost(true),
                (cancelled, cancelled),
                "istiod: Unavailable: gone",
            ),
            (lost(false), (error, cancelled), "istiod: Unavailable: gone"),
            (
                End::BadResponse(bad()),
                (error, cancelled),
                "istiod: Internal: bad",
            ),
            (
                End::BadRequest(bad()),
                (cancelled, error),
                "Envoy: Internal: bad",
            ),
            (
                End::EnvoyGone,
                (cancelled, cancelled),
                "Envoy closed its stream",
            ),
        ] {
            assert_eq!(end.classes(), expected, "{end:?}");
            assert_eq!(end.reason(), reason);
        }
    }

    #[test]
    fn a_stream_without_a_status_is_unavailable() {
        let trailers = of_trailers(HeaderMap::new()).trailers().unwrap();
        assert_eq!(trailers["grpc-status"], "14");
    }

    #[test]
    fn envoy_is_told_ok_when_a_newer_stream_replaces_its_own() {
        assert_eq!(End::Stopped.trailers().unwrap()["grpc-status"], "0");
        assert!(End::EnvoyGone.trailers().is_none());
    }
}
