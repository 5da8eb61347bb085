//! Counts queries, responses by code, and hosts of the name table; and forwarded queries.
//!
//! The series of responses are looked up at the start, so that counting takes no lock. Messages that are
//! not valid queries are not counted.

use super::wire;
use crate::metrics::{Counter, Counters, Gauge, Histogram, Registry};

const RCODES: [&str; 6] = ["NOERROR", "FORMERR", "SERVFAIL", "NXDOMAIN", "NOTIMP", "REFUSED"];

/// Returns the name of a response code, `other` if it has none here.
pub(super) fn rcode_name(rcode: usize) -> &'static str {
    RCODES.get(rcode).copied().unwrap_or("other")
}

/// The author of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// The name table, or the agent itself for errors.
    Agent,
    Upstream,
}

/// Clones share the counters.
#[derive(Clone, Debug)]
pub(super) struct Metrics {
    pub(super) requests: Counter,
    /// Responses by [`Source`], then by the index in [`RCODES`]; the last one counts all other codes.
    responses: [[Counter; RCODES.len() + 1]; 2],
    pub(super) hosts: Gauge,
}

impl Metrics {
    pub(super) fn new(registry: &Registry) -> Self {
        let responses = registry.counters(
            "istio_agent_dns_responses_total",
            "DNS responses, by code and by source.",
            &["rcode", "source"],
        );
        Self {
            requests: registry.counter("istio_agent_dns_requests_total", "DNS requests."),
            responses: ["agent", "upstream"].map(|source| {
                std::array::from_fn(|rcode| responses.with([rcode_name(rcode), source]))
            }),
            hosts: registry.gauge("istio_agent_dns_name_table_hosts", "Hosts in the name table."),
        }
    }

    /// Counts a response.
    pub(super) fn count_response(&self, message: &[u8], source: Source) {
        self.responses[source as usize][usize::from(wire::rcode(message)).min(RCODES.len())].inc();
    }
}

/// Metrics of forwarding: pilot-agent's three, and their causes. Clones share the counters.
#[derive(Clone, Debug)]
pub(super) struct ForwardMetrics {
    pub(super) requests: Counter,
    pub(super) failures: Counter,
    pub(super) duration: Histogram,
    pub(super) retries: Counter,
    pub(super) refused: Counters<1>,
    pub(super) cache: Counters<1>,
}

impl ForwardMetrics {
    pub(super) fn new(registry: &Registry) -> Self {
        Self {
            requests: registry.counter(
                "istio_agent_dns_upstream_requests_total",
                "Total number of DNS requests forwarded to upstream.",
            ),
            failures: registry.counter(
                "istio_agent_dns_upstream_failures_total",
                "Total number of DNS requests no upstream answered.",
            ),
            duration: registry.histogram(
                "istio_agent_dns_upstream_request_duration_seconds",
                "Total time in seconds Istio takes to get DNS response from upstream.",
                &[0.001, 0.005, 0.01, 0.1, 1.0, 5.0],
            ),
            retries: registry.counter(
                "istio_agent_dns_upstream_retries_total",
                "Queries sent again, to the same server or the next.",
            ),
            refused: registry.counters(
                "istio_agent_dns_forward_refused_total",
                "Queries not forwarded, by reason.",
                &["reason"],
            ),
            cache: registry.counters(
                "istio_agent_dns_cache_total",
                "Lookups in the cache, by result.",
                &["result"],
            ),
        }
    }
}
