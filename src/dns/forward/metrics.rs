//! Metrics of forwarding: pilot-agent's three, and why they move.

use crate::dns::metrics::{OTHER, RCODES};
use crate::metrics::{Counter, Counters, Histogram, Registry};

#[derive(Clone, Debug)]
pub(super) struct Metrics {
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

impl Metrics {
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
