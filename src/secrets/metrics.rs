//! What the keeper of secrets counts, and the dates of its certificate as gauges.
//!
//! The dates are of the last certificate that was issued, also once it has expired: the time to its
//! end is negative then. They are computed when the page is written.
//!
//! Does not decide anything.

use std::time::{Duration, SystemTime};

use super::observe::{Issued, Record};
use crate::metrics::{Counter, Kind, Registry};

/// The counters of certificate requests.
#[derive(Clone, Debug)]
pub(super) struct Metrics {
    requests: Counter,
    failures: Counter,
    retries: Counter,
    /// Milliseconds in all.
    latency: Counter,
}

type Date = fn(&Issued) -> SystemTime;

/// The dates of the certificate: name, meaning, and which.
const DATES: [(&str, &str, Date); 4] = [
    (
        "istio_agent_cert_not_before_timestamp_seconds",
        "When the certificate begins to be valid, as seconds of Unix time",
        |issued| issued.not_before,
    ),
    (
        "istio_agent_cert_not_after_timestamp_seconds",
        "When the certificate expires, as seconds of Unix time",
        |issued| issued.not_after,
    ),
    (
        "istio_agent_cert_issued_timestamp_seconds",
        "When the certificate was taken into use, as seconds of Unix time",
        |issued| issued.at,
    ),
    (
        "istio_agent_cert_next_renewal_timestamp_seconds",
        "When the next certificate is asked for, as seconds of Unix time",
        |issued| issued.due,
    ),
];

impl Metrics {
    pub(super) fn new(registry: &Registry) -> Self {
        let csr = |name, help| {
            let requests = registry.counters(name, help, &["request_type"]);
            requests.with(["csr"])
        };
        Self {
            requests: csr(
                "istio_agent_num_outgoing_requests",
                "Number of total outgoing requests (e.g. to a token exchange server, CA, etc.)",
            ),
            failures: csr(
                "istio_agent_num_failed_outgoing_requests",
                "Number of failed outgoing requests (e.g. to a token exchange server, CA, etc.)",
            ),
            retries: csr(
                "istio_agent_num_outgoing_retries",
                "Number of outgoing retry requests (e.g. to a token exchange server, CA, etc.)",
            ),
            latency: csr(
                "istio_agent_outgoing_latency",
                "The latency of outgoing requests (e.g. to a token exchange server, CA, etc.) \
                 in milliseconds.",
            ),
        }
    }

    pub(super) fn asks(&self, is_retry: bool) {
        self.requests.inc();
        if is_retry {
            self.retries.inc();
        }
    }

    pub(super) fn answered(&self, after: Duration, is_success: bool) {
        let milliseconds = u64::try_from(after.as_millis()).unwrap_or(u64::MAX);
        self.latency.add(milliseconds);
        if !is_success {
            self.failures.inc();
        }
    }
}

/// Has the dates of `record` on the page.
pub(super) fn publish(record: &Record, registry: &Registry) {
    let of = record.clone();
    gauge(
        registry,
        "istio_agent_cert_expiry_seconds",
        "The time remaining, in seconds, before the certificate chain will expire. A negative \
         value indicates the cert is expired.",
        move || {
            of.issued()
                .map(|issued| seconds(issued.not_after, of.now()))
        },
    );
    for (name, help, date) in DATES {
        let of = record.clone();
        let value = move || {
            of.issued()
                .map(|issued| seconds(date(&issued), SystemTime::UNIX_EPOCH))
        };
        gauge(registry, name, help, value);
    }
}

fn gauge(
    registry: &Registry,
    name: &'static str,
    help: &'static str,
    value: impl Fn() -> Option<f64> + Send + Sync + 'static,
) {
    registry.computed(name, help, Kind::Gauge, &["resource_name"], move |series| {
        if let Some(value) = value() {
            series(&["default"], value);
        }
    });
}

/// From `start` to `end`, negative if that is the earlier.
pub(super) fn seconds(end: SystemTime, start: SystemTime) -> f64 {
    match end.duration_since(start) {
        Ok(left) => left.as_secs_f64(),
        Err(error) => -error.duration().as_secs_f64(),
    }
}
