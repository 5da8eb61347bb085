//! Counts scrapes, what failed, and what was left out of a page.

use super::source::Origin;
use crate::metrics::{Counter, Counters, Registry};

#[derive(Clone)]
pub(super) struct Counts {
    pub scrapes: Counter,
    failures: Counters<1>,
    duplicates: Counters<1>,
    malformed: Counters<1>,
}

impl Counts {
    pub(super) fn new(registry: &Registry) -> Self {
        Self {
            scrapes: registry.counter("istio_agent_scrapes_total", "The total number of scrapes."),
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
                "Lines left out of the page because they are malformed or longer than 1 MiB.",
                &["source"],
            ),
        }
    }

    pub(super) fn failure(&self, origin: Origin) {
        self.failures.with([origin.name()]).inc();
    }

    pub(super) fn left_out(&self, origin: Origin, duplicates: u64, malformed: u64) {
        for (counters, lines) in [(&self.duplicates, duplicates), (&self.malformed, malformed)] {
            if lines > 0 {
                counters.with([origin.name()]).add(lines);
            }
        }
    }
}
