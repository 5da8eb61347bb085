//! What scraping counts about itself.
//!
//! pilot-agent's two counters, and two of our own that say what was left out of a page. The names of
//! families come from outside, so only so many of them become labels.
//!
//! Does not decide what is a failure.

use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::metrics::{Counter, Counters, Registry};

/// Most families that get a series of their own.
const MOST_FAMILIES: usize = 64;
/// Longest name that becomes a label.
const LONGEST_NAME: usize = 256;

/// Where a part of the page comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    Agent,
    Envoy,
    Application,
}

#[derive(Clone)]
pub(super) struct Counts {
    pub scrapes: Counter,
    failures: Counters<1>,
    duplicates: Counters<2>,
    malformed: Counters<1>,
    families: Arc<Mutex<BTreeSet<String>>>,
}

impl Origin {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::Envoy => "envoy",
            Self::Application => "application",
        }
    }
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
                "istio_agent_scrape_duplicate_families_total",
                "Families left out of the page, all or in part, because it had their names already.",
                &["source", "family"],
            ),
            malformed: registry.counters(
                "istio_agent_scrape_malformed_lines_total",
                "Lines left out of the page because they could not be read.",
                &["source"],
            ),
            families: Arc::default(),
        }
    }

    pub(super) fn failure(&self, origin: Origin) {
        self.failures.with([origin.name()]).inc();
    }

    pub(super) fn malformed(&self, origin: Origin, lines: u64) {
        if lines > 0 {
            self.malformed.with([origin.name()]).add(lines);
        }
    }

    pub(super) fn duplicate(&self, origin: Origin, family: &str) {
        let mut families = self.families.lock();
        let is_named = families.contains(family)
            || families.len() < MOST_FAMILIES
                && family.len() <= LONGEST_NAME
                && families.insert(family.to_owned());
        let family = if is_named { family } else { "other" };
        self.duplicates.with([origin.name(), family]).inc();
    }
}
