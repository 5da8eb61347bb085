//! Describes the end of a relay's streams: the side that ended them, the status for Envoy, the log line.
//!
//! Envoy gets a status of istiod unchanged, details included.

use std::error::Error as _;
use std::fmt;
use std::io;
use std::time::Duration;

use http::{HeaderMap, HeaderValue};
use hyper::body::Incoming;
use tonic::{Code, Status};

use crate::istiod::refusal::code_name;
use crate::problem::Problem;
use crate::runtime::duration::rounded;
use crate::runtime::lifecycle::with_causes;

/// The headers that make up a gRPC status. Source: gRPC over HTTP/2, Status.
const STATUS_HEADERS: [&str; 3] = ["grpc-status", "grpc-message", "grpc-status-details-bin"];

/// The most characters of a status message in the log and in `/debug/xdsz`.
const MAX_REASON: usize = 1024;

/// The end of a relay's streams.
#[derive(Debug)]
pub(crate) struct End {
    side: Side,
    /// True if the end is part of ordinary operation.
    is_expected: bool,
    /// The reason, a line for the log and `/debug/xdsz`.
    reason: String,
    /// The code and the shortened message of the side that ended the streams.
    pub(super) status: Status,
    /// The status for Envoy; None if Envoy no longer reads.
    trailers: Option<Box<HeaderMap>>,
}

/// The side that ended the streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Istiod,
    /// Envoy, or another client.
    Envoy,
    Agent,
}

/// Values of the label `type` of the metrics that count ends of streams.
pub(super) const CANCELLED: &str = "cancelled";
pub(super) const ERROR: &str = "error";

impl End {
    fn new(side: Side, is_expected: bool, status: &Status) -> Self {
        let message: String = status.message().chars().take(MAX_REASON).collect();
        Self {
            side,
            is_expected,
            reason: format!("{}: {message}", code_name(status.code())),
            status: Status::new(status.code(), message),
            trailers: Some(Box::new(trailers(status))),
        }
    }

    /// Ends both streams with OK.
    fn ok(side: Side, reason: &str) -> Self {
        Self { reason: reason.to_owned(), ..Self::new(side, true, &Status::ok("")) }
    }

    /// Istiod ended the stream with these trailers, or with the headers of a response without a body.
    pub(crate) fn istiod(mut headers: HeaderMap) -> Self {
        let Some(status) = Status::from_header_map(&headers) else {
            let status = Status::unavailable("istiod ended the stream without a status");
            return Self::bad_response(&status);
        };
        let is_expected =
            matches!(status.code(), Code::Ok | Code::Cancelled | Code::DeadlineExceeded);
        let mut trailers = HeaderMap::new();
        for name in STATUS_HEADERS {
            if let Some(value) = headers.remove(name) {
                trailers.insert(name, value);
            }
        }
        Self { trailers: Some(Box::new(trailers)), ..Self::new(Side::Istiod, is_expected, &status) }
    }

    /// The stream to istiod broke. The code is UNAVAILABLE, unless istiod reset the stream with another.
    pub(crate) fn broken(error: hyper::Error) -> Self {
        let text = format!("the connection broke: {}", with_causes(&error));
        let is_expected = is_ordinary(&error);
        let code = match Status::from_error(Box::new(error)).code() {
            Code::Unknown | Code::Cancelled | Code::Internal => Code::Unavailable,
            code => code,
        };
        Self::new(Side::Istiod, is_expected, &Status::new(code, text))
    }

    /// Istiod sent bytes that cannot be relayed, or no status.
    pub(crate) fn bad_response(status: &Status) -> Self {
        // The source of the status explains it.
        Self { status: status.clone(), ..Self::new(Side::Istiod, false, status) }
    }

    /// Envoy sent bytes that cannot be relayed.
    pub(crate) fn bad_request(status: &Status) -> Self {
        Self::new(Side::Envoy, false, status)
    }

    /// Envoy closed its side and waits for the status.
    pub(crate) fn envoy_done() -> Self {
        Self::ok(Side::Envoy, "OK: closed its stream")
    }

    /// Envoy no longer reads: it closed its stream, or reset it with this error.
    pub(crate) fn envoy_gone(error: Option<hyper::Error>) -> Self {
        let mut end = Self::envoy_done();
        end.trailers = None;
        if let Some(error) = error {
            end.reason = error.to_string();
        }
        end
    }

    /// A newer stream replaced this one, or the agent stops.
    pub(crate) fn stopped() -> Self {
        Self::ok(Side::Agent, "replaced by a newer stream, or the agent stops")
    }

    /// Envoy's next stream goes to another control plane.
    pub(crate) fn moved() -> Self {
        Self::ok(Side::Agent, "the first control plane answers again")
    }

    /// The agent ends the stream that it served with stored configuration.
    pub(crate) fn agent(why: impl Into<String>) -> Self {
        Self::new(Side::Agent, true, &Status::unavailable(why))
    }

    /// Istiod has not begun to respond on a new stream in time.
    pub(crate) fn no_first_response(limit: Duration) -> Self {
        let why = format!("no first response within {}", rounded(limit));
        Self::bad_response(&Status::deadline_exceeded(why))
    }

    /// Returns the metric labels of the end, for istiod's stream and for Envoy's.
    pub(super) fn classes(&self) -> (&'static str, &'static str) {
        match (self.side, self.is_expected) {
            (Side::Istiod, false) => (ERROR, CANCELLED),
            (Side::Envoy, false) => (CANCELLED, ERROR),
            _ => (CANCELLED, CANCELLED),
        }
    }

    /// Names the side that ended the streams, and the reason, in one line.
    pub(crate) fn reason(&self) -> String {
        match self.side {
            Side::Istiod => format!("istiod: {}", self.reason),
            Side::Envoy => format!("Envoy: {}", self.reason),
            Side::Agent => self.reason.clone(),
        }
    }

    /// Returns the status code if istiod caused the end: it ended its stream, sent unusable bytes, or was silent.
    pub(crate) fn istiod_code(&self) -> Option<Code> {
        (self.side == Side::Istiod).then_some(self.status.code())
    }

    /// Returns the status for Envoy; None if Envoy no longer reads.
    pub(crate) fn trailers(self) -> Option<HeaderMap> {
        self.trailers.map(|trailers| *trailers)
    }

    /// Logs unexpected ends as warnings, the others at debug level. `problem` describes an end by istiod.
    pub(crate) fn log(&self, id: u32, problem: &Problem) {
        let (side, reason): (_, &dyn fmt::Display) = match self.side {
            Side::Istiod if !self.is_expected => ("upstream", problem),
            Side::Istiod => ("upstream", &self.reason),
            Side::Envoy => ("downstream", &self.reason),
            Side::Agent => {
                tracing::debug!(target: "xdsproxy", id, "upstream stopped");
                return;
            }
        };
        if self.is_expected {
            tracing::debug!(target: "xdsproxy", id, "{side} terminated with status {reason}");
        } else {
            tracing::warn!(target: "xdsproxy", id, "{side} terminated with unexpected error {reason}");
        }
    }
}

/// Returns the body of istiod's response. Fails if the headers alone end the stream.
pub(crate) fn grpc_body(response: http::Response<Incoming>) -> Result<Incoming, End> {
    let (head, body) = response.into_parts();
    if head.headers.contains_key("grpc-status") {
        return Err(End::istiod(head.headers));
    }
    Ok(body)
}

/// Returns true if istiod exits or closes a connection at its maximum age, which deserves no warning.
fn is_ordinary(error: &hyper::Error) -> bool {
    use h2::Reason;
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    let Some(cause) = error.source().and_then(|it| it.downcast_ref::<h2::Error>()) else {
        return error.is_canceled() || error.is_closed();
    };
    let io_error = cause.get_io().map(io::Error::kind);
    matches!(io_error, Some(BrokenPipe | ConnectionReset | UnexpectedEof))
        || matches!(cause.reason(), Some(Reason::NO_ERROR | Reason::CANCEL))
}

/// Encodes a status as trailers.
pub(crate) fn trailers(status: &Status) -> HeaderMap {
    let mut trailers = HeaderMap::new();
    if status.add_header(&mut trailers).is_err() {
        // The message is not a valid header value; the code is.
        trailers.clear();
        trailers.insert("grpc-status", HeaderValue::from(status.code() as i32));
    }
    trailers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn istiods_status_reaches_envoy_unchanged() {
        for code in 0..=16 {
            let mut trailers = HeaderMap::new();
            trailers.insert("grpc-status", HeaderValue::from(code));
            trailers.insert("grpc-message", HeaderValue::from_static("caf%C3%A9 %25"));
            trailers.insert("grpc-status-details-bin", HeaderValue::from_static("CAQ"));
            let expected = trailers.clone();
            trailers.insert("x-other", HeaderValue::from_static("dropped"));
            assert_eq!(End::istiod(trailers).trailers(), Some(expected));
        }
    }

    #[test]
    fn ordinary_ends_count_as_cancelled_and_others_as_errors_of_their_side() {
        let istiod = |code: Code| End::istiod(trailers(&Status::new(code, "why")));
        let bad = Status::internal("bad");
        for (end, expected, reason) in [
            (istiod(Code::Ok), (CANCELLED, CANCELLED), "istiod: Ok: why"),
            (
                istiod(Code::DeadlineExceeded),
                (CANCELLED, CANCELLED),
                "istiod: DeadlineExceeded: why",
            ),
            (istiod(Code::Unauthenticated), (ERROR, CANCELLED), "istiod: Unauthenticated: why"),
            (
                End::stopped(),
                (CANCELLED, CANCELLED),
                "replaced by a newer stream, or the agent stops",
            ),
            (End::bad_response(&bad), (ERROR, CANCELLED), "istiod: Internal: bad"),
            (End::bad_request(&bad), (CANCELLED, ERROR), "Envoy: Internal: bad"),
            (End::envoy_gone(None), (CANCELLED, CANCELLED), "Envoy: OK: closed its stream"),
        ] {
            assert_eq!(end.classes(), expected, "{end:?}");
            assert_eq!(end.reason(), reason);
        }
    }

    #[test]
    fn a_long_text_reaches_envoy_whole_and_the_log_in_part() {
        let text = "x".repeat(100_000);
        let end = End::istiod(trailers(&Status::permission_denied(&text)));
        assert_eq!(end.reason().len(), "istiod: PermissionDenied: ".len() + MAX_REASON);
        assert_eq!(end.trailers().unwrap()["grpc-message"], text);
    }

    #[test]
    fn a_stream_without_a_status_is_unavailable() {
        let trailers = End::istiod(HeaderMap::new()).trailers().unwrap();
        assert_eq!(trailers["grpc-status"], "14");
    }

    #[test]
    fn envoy_is_told_ok_when_a_newer_stream_replaces_its_own() {
        assert_eq!(End::stopped().trailers().unwrap()["grpc-status"], "0");
        assert!(End::envoy_gone(None).trailers().is_none());
    }
}
