//! Counts certificate requests as pilot-agent does, and shows the dates of the latest certificate as gauges.
//!
//! Gauges are computed when the metrics page is written. They stay once the certificate has expired:
//! the time to its expiry is negative then.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime};

use tonic::Code;

use super::schedule::signed_seconds;
use super::{Dates, Secrets};
use crate::ca::SignError;
use crate::metrics::{Counter, Kind, Registry};

/// The attempts that count as one request, as pilot-agent makes them.
const MAX_ATTEMPTS: u32 = 5;

#[derive(Clone, Debug)]
pub(super) struct Metrics {
    /// The attempts of the current request.
    attempts: Arc<AtomicU32>,
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
        let csr = |name, help| registry.counters(name, help, &["request_type"]).with(["csr"]);
        Self {
            attempts: Arc::default(),
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

    /// Counts an attempt: as a request, or as a retry of the current one.
    pub(super) fn count_attempt(&self) {
        match self.attempts.fetch_add(1, Ordering::Relaxed) {
            0 => self.requests.inc(),
            _ => self.retries.inc(),
        }
    }

    /// Adds the time of an attempt. Counts the failure of the request if its last attempt has failed, or if
    /// pilot-agent does not retry after the error.
    pub(super) fn count_result(&self, after: Duration, error: Option<&SignError>) {
        self.latency.add(u64::try_from(after.as_millis()).unwrap_or(u64::MAX));
        let is_retried = error.is_some_and(|error| {
            matches!(
                error.code,
                Code::ResourceExhausted | Code::Aborted | Code::Internal | Code::Unavailable
            )
        });
        if is_retried && self.attempts.load(Ordering::Relaxed) < MAX_ATTEMPTS {
            return;
        }
        self.attempts.store(0, Ordering::Relaxed);
        if error.is_some() {
            self.failures.inc();
        }
    }
}

pub(super) fn register_gauges(secrets: &Secrets, registry: &Registry) {
    for (name, help, value) in GAUGES {
        let state = secrets.state.clone();
        let clock = secrets.clock.clone();
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
