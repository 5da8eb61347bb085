//! Metrics of the DNS server: queries by type, answers by code, and the size of the name table.
//!
//! Every series is made at the start, so that counting takes no lock. Messages that are no proper
//! question are counted apart, as neither requests nor responses.

use super::wire;
use crate::metrics::{Counter, Counters, Gauge, Histogram, Registry};

/// Types with a series of their own.
const TYPES: [(u16, &str); 12] = [
    (1, "A"),
    (28, "AAAA"),
    (33, "SRV"),
    (65, "HTTPS"),
    (64, "SVCB"),
    (12, "PTR"),
    (16, "TXT"),
    (15, "MX"),
    (5, "CNAME"),
    (2, "NS"),
    (6, "SOA"),
    (255, "ANY"),
];

pub(super) const RCODES: [&str; 6] = [
    "NOERROR", "FORMERR", "SERVFAIL", "NXDOMAIN", "NOTIMP", "REFUSED",
];

pub(super) const OTHER: &str = "other";

/// Where an answer came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// The table, or the agent's own judgement.
    Agent,
    Upstream,
}

/// Clones share the counters.
#[derive(Clone, Debug)]
pub(super) struct Metrics {
    requests: Counter,
    /// As in [`TYPES`], and all others.
    by_type: [Counter; TYPES.len() + 1],
    /// By [`Source`], then as in [`RCODES`], and all others.
    responses: [[Counter; RCODES.len() + 1]; 2],
    pub(super) refusals: Counter,
    pub(super) overflows: Counter,
    pub(super) hosts: Gauge,
    /// By what became of a name table: `taken`, `same`, `refused`.
    pub(super) name_tables: Counters<1>,
}

impl Metrics {
    pub(super) fn new(registry: &Registry) -> Self {
        let by_type = registry.counters(
            "istio_agent_dns_requests_by_type_total",
            "DNS requests by type of the question.",
            &["type"],
        );
        let responses = registry.counters(
            "istio_agent_dns_responses_total",
            "DNS responses by code and by who gave the answer.",
            &["rcode", "source"],
        );
        Self {
            requests: registry.counter("istio_agent_dns_requests_total", "DNS requests."),
            by_type: std::array::from_fn(|index| {
                by_type.with([TYPES.get(index).map_or(OTHER, |(_, name)| *name)])
            }),
            responses: ["agent", "upstream"].map(|source| {
                std::array::from_fn(|index| {
                    responses.with([RCODES.get(index).copied().unwrap_or(OTHER), source])
                })
            }),
            refusals: registry.counter(
                "istio_agent_dns_refusals_total",
                "Messages answered with an error because they are no proper DNS request.",
            ),
            overflows: registry.counter(
                "istio_agent_dns_overflows_total",
                "DNS requests failed because too many waited for an answer.",
            ),
            hosts: registry.gauge(
                "istio_agent_dns_name_table_hosts",
                "Hosts in the name table.",
            ),
            name_tables: registry.counters(
                "istio_agent_dns_name_tables_total",
                "Name tables received, by what became of them.",
                &["result"],
            ),
        }
    }

    pub(super) fn request(&self, kind: u16) {
        self.requests.inc();
        let index = TYPES.iter().position(|(number, _)| *number == kind);
        self.by_type[index.unwrap_or(TYPES.len())].inc();
    }

    /// Counts an answer to a request.
    pub(super) fn response(&self, message: &[u8], source: Source) {
        let code = usize::from(wire::rcode(message));
        self.responses[source as usize][code.min(RCODES.len())].inc();
    }
}

/// Of forwarding: pilot-agent's three, and why they move. Clones share them.
#[derive(Clone, Debug)]
pub(super) struct ForwardMetrics {
    pub(super) requests: Counter,
    pub(super) failures: Counter,
    pub(super) duration: Histogram,
    pub(super) retries: Counter,
    pub(super) ignored: Counter,
    pub(super) merged: Counter,
    pub(super) refused: Counters<1>,
    pub(super) cache: Counters<1>,
    answers: Counters<1>,
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
            ignored: registry.counter(
                "istio_agent_dns_upstream_ignored_total",
                "Messages from servers that answer no query of ours.",
            ),
            merged: registry.counter(
                "istio_agent_dns_merged_total",
                "Queries that waited for the answer to the same one.",
            ),
            refused: registry.counters(
                "istio_agent_dns_forward_refused_total",
                "Queries not forwarded, by reason.",
                &["reason"],
            ),
            cache: registry.counters(
                "istio_agent_dns_cache_total",
                "Looks into the cache, by what they gave.",
                &["result"],
            ),
            answers: registry.counters(
                "istio_agent_dns_upstream_answers_total",
                "Answers of servers, by result.",
                &["rcode"],
            ),
        }
    }

    pub(super) fn answered(&self, rcode: u8) {
        let name = RCODES.get(usize::from(rcode)).copied().unwrap_or(OTHER);
        self.answers.with([&*name.to_ascii_lowercase()]).inc();
    }
}
