//! Counts certificate requests, and shows the dates of the latest certificate as gauges.
//!
//! Gauges are computed when the metrics page is written. They stay once the certificate has expired:
//! the time to its expiry is negative then.

use std::time::{Duration, SystemTime};

use super::schedule::signed_seconds;
use super::{Dates, Secrets};
use crate::metrics::{Counter, Kind, Registry};

/// The counters of certificate requests.
#[derive(Clone, Debug)]
pub(super) struct Metrics {
    requests: Counter,
    failures: Counter,
    retries: Counter,
    /// The total duration of the requests, in milliseconds.
    latency: Counter,
}

type Value = fn(&Dates, now: SystemTime) -> f64;

/// The gauges of the certificate: name, meaning, and value.
const GAUGES: [(&str, &str, Value); 5] = [
    (
        "istio_agent_cert_expiry_seconds",
        "The time remaining, in seconds, before the certificate chain will expire. A negative \
         value indicates the cert is expired.",
        |dates, now| signed_seconds(dates.not_after, now),
    ),
    (
        "istio_agent_cert_not_before_timestamp_seconds",
        "The time when the certificate becomes valid, in seconds of Unix time",
        |dates, _| unix(dates.not_before),
    ),
    (
        "istio_agent_cert_not_after_timestamp_seconds",
        "The time when the certificate expires, in seconds of Unix time",
        |dates, _| unix(dates.not_after),
    ),
    (
        "istio_agent_cert_issued_timestamp_seconds",
        "The time when the agent began to use the certificate, in seconds of Unix time",
        |dates, _| unix(dates.issued),
    ),
    (
        "istio_agent_cert_next_renewal_timestamp_seconds",
        "The time when the next certificate will be requested, in seconds of Unix time",
        |dates, _| unix(dates.due),
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

    pub(super) fn count_request(&self, is_retry: bool) {
        self.requests.inc();
        if is_retry {
            self.retries.inc();
        }
    }

    pub(super) fn count_response(&self, after: Duration, is_success: bool) {
        self.latency
            .add(u64::try_from(after.as_millis()).unwrap_or(u64::MAX));
        if !is_success {
            self.failures.inc();
        }
    }
}

/// Registers the gauges of the certificate's dates.
pub(super) fn register_gauges(secrets: &Secrets, registry: &Registry) {
    for (name, help, value) in GAUGES {
        let (state, clock) = (secrets.state.clone(), secrets.clock.clone());
        registry.computed(name, help, Kind::Gauge, &["resource_name"], move |series| {
            // The dates are copied, so that the state is not locked while the page is written.
            let dates = state.borrow().dates;
            if let Some(dates) = dates {
                series(&["default"], value(&dates, clock.now()));
            }
        });
    }
}

fn unix(time: SystemTime) -> f64 {
    signed_seconds(time, SystemTime::UNIX_EPOCH)
}
