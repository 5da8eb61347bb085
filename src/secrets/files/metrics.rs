//! Counters of secrets from files: pilot-agent's two totals, and failures and reloads by secret.
//!
//! A gateway may have thousands of secrets: the first [`MAX_LABELS`] have their own series, the others
//! share one.

use std::collections::HashSet;
use std::time::SystemTime;

use parking_lot::Mutex;

use super::source::Source;
use crate::metrics::{Counter, Counters, Gauges, Registry};

const MAX_LABELS: usize = 100;

#[derive(Debug)]
pub(super) struct Metrics {
    pub(super) watcher_failures: Counter,
    secret_failures: Counter,
    failures: Counters<1>,
    reloads: Gauges<1>,
    labels: Mutex<HashSet<Source>>,
}

impl Metrics {
    pub(super) fn new(registry: &Registry) -> Self {
        Self {
            watcher_failures: registry.counter(
                "istio_agent_num_file_watcher_failures_total",
                "Number of times file watcher failed to add watchers",
            ),
            secret_failures: registry.counter(
                "istio_agent_num_file_secret_failures_total",
                "Number of times secret generation failed for files",
            ),
            failures: registry.counters(
                "istio_agent_file_secret_read_failures_total",
                "Number of times the files of a secret could not be used",
                &["resource_name"],
            ),
            reloads: registry.gauges(
                "istio_agent_file_secret_last_reload_timestamp_seconds",
                "When other content was last taken from the files of a secret, as seconds of Unix \
                 time",
                &["resource_name"],
            ),
            labels: Mutex::default(),
        }
    }

    pub(super) fn failed(&self, source: &Source) {
        self.secret_failures.inc();
        let label = self.label(source);
        self.failures.with([&label]).inc();
    }

    pub(super) fn reloaded(&self, source: &Source, now: SystemTime) {
        let now = now.duration_since(SystemTime::UNIX_EPOCH);
        let label = self.label(source);
        self.reloads
            .with([&label])
            .set(now.unwrap_or_default().as_secs_f64());
    }

    pub(super) fn dropped(&self, source: &Source) {
        if self.labels.lock().contains(source) {
            self.reloads.forget([&source.to_string()]);
        }
    }

    fn label(&self, source: &Source) -> String {
        let mut labels = self.labels.lock();
        if labels.len() < MAX_LABELS {
            labels.insert(source.clone());
        }
        match labels.contains(source) {
            true => source.to_string(),
            false => "other".to_owned(),
        }
    }
}
