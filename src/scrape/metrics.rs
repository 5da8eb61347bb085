//! Counts scrapes, failures of sources, and the lines that pages lack.

use super::source::Source;
use crate::metrics::{Counter, Counters, Registry};

#[derive(Clone)]
pub(super) struct Metrics {
    pub scrapes: Counter,
    /// By format of the page, and by whether a source has protobuf and the page has not.
    pub formats: Counters<2>,
    failures: Counters<1>,
    pub duplicates: Counters<1>,
    pub malformed: Counters<1>,
}

impl Metrics {
    pub(super) fn new(registry: &Registry) -> Self {
        Self {
            scrapes: registry.counter("istio_agent_scrapes_total", "The total number of scrapes."),
            formats: registry.counters(
                "istio_agent_scrape_format_total",
                "The total number of scrapes by the format of the merged page.",
                &["format", "downgrade"],
            ),
            failures: registry.counters(
                "istio_agent_scrape_failures_total",
                "The total number of failed scrapes.",
                &["type"],
            ),
            duplicates: registry.counters(
                "istio_agent_scrape_duplicate_series_total",
                "Samples left out of the page because an earlier source has the same series.",
                &["source"],
            ),
            malformed: registry.counters(
                "istio_agent_scrape_malformed_lines_total",
                "Lines left out of the page because they are malformed or longer than 1 MiB, and malformed metrics in protobuf.",
                &["source"],
            ),
        }
    }

    /// Logs and counts the failure of a source, if it has failed.
    pub(super) fn report(&self, source: &Source) {
        if let Some(problem) = &source.failure {
            self.failures.with([source.origin.name()]).inc();
            tracing::error!("{problem}");
        }
    }
}
