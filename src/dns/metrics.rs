//! What the room counts: queries by type, answers by code, and how large the table is.
//!
//! Every series is made at the start, so that counting takes no lock. Messages that are no proper
//! question, which are refused or dropped, are no requests, and refusals no responses: they are
//! counted apart. What is asked of resolvers is counted where they are asked.

use crate::metrics::{Counter, Gauge, Kind, Registry};

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

const RCODES: [&str; 6] = [
    "NOERROR", "FORMERR", "SERVFAIL", "NXDOMAIN", "NOTIMP", "REFUSED",
];

const OTHER: &str = "other";

/// Where an answer came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// The table, or the agent's own judgement.
    Agent,
    Upstream,
}

/// The room's counters. Clones share them.
#[derive(Clone, Debug)]
pub(super) struct Metrics {
    /// As in [`TYPES`], and all others.
    by_type: [Counter; TYPES.len() + 1],
    /// As in [`RCODES`], and all others.
    agent: [Counter; RCODES.len() + 1],
    upstream: [Counter; RCODES.len() + 1],
    refusals: Counter,
    overflows: Counter,
    hosts: Gauge,
    tables: [Counter; 3],
}

/// What became of a name table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Update {
    Taken,
    Same,
    Refused,
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
        let of = |source| {
            let named = |index| RCODES.get(index).copied().unwrap_or(OTHER);
            std::array::from_fn(|index| responses.with([named(index), source]))
        };
        let tables = registry.counters(
            "istio_agent_dns_name_tables_total",
            "Name tables received, by what became of them.",
            &["result"],
        );
        let by_type: [Counter; TYPES.len() + 1] = std::array::from_fn(|index| {
            by_type.with([TYPES.get(index).map_or(OTHER, |(_, name)| *name)])
        });
        let summed = by_type.clone();
        registry.computed(
            "istio_agent_dns_requests_total",
            "DNS requests.",
            Kind::Counter,
            &[],
            move |publish| {
                let sum: u64 = summed.iter().map(Counter::get).sum();
                // It appears with the first, as others do.
                if sum > 0 {
                    publish(&[], sum as f64);
                }
            },
        );
        Self {
            by_type,
            agent: of("agent"),
            upstream: of("upstream"),
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
            tables: ["taken", "same", "refused"].map(|result| tables.with([result])),
        }
    }

    pub(super) fn request(&self, kind: u16) {
        let index = TYPES.iter().position(|(number, _)| *number == kind);
        self.by_type[index.unwrap_or(TYPES.len())].inc();
    }

    /// Counts an answer to a message that is no request.
    pub(super) fn refusal(&self) {
        self.refusals.inc();
    }

    /// Counts an answer to a request.
    pub(super) fn response(&self, message: &[u8], source: Source) {
        let code = message.get(3).map_or(0, |flags| usize::from(flags & 0xf));
        let counters = match source {
            Source::Agent => &self.agent,
            Source::Upstream => &self.upstream,
        };
        counters[code.min(RCODES.len())].inc();
    }

    pub(super) fn overflow(&self) {
        self.overflows.inc();
    }

    pub(super) fn table(&self, update: Update) {
        self.tables[update as usize].inc();
    }

    pub(super) fn hosts(&self, hosts: usize) {
        self.hosts.set(hosts as f64);
    }
}
