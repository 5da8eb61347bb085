//! The metrics of modules, as pilot-agent has them.

use super::fetch::Error;
use crate::metrics::{Counters, Gauge, Histogram, Registry};

/// Powers of two, in milliseconds.
const MILLISECONDS: &[f64] = &[
    1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0,
    16384.0,
];

#[derive(Clone, Debug)]
pub(super) struct Metrics {
    /// By result.
    pub(super) conversions: Counters<1>,
    pub(super) duration: Histogram,
    fetches: Counters<1>,
    lookups: Counters<1>,
    pub(super) entries: Gauge,
}

impl Metrics {
    pub(super) fn new(registry: &Registry) -> Self {
        Self {
            conversions: registry.counters(
                "istio_agent_wasm_config_conversion_count",
                "number of Wasm config conversion count and results, including success, no remote \
                 load, marshal failure, remote fetch failure, miss remote fetch hint.",
                &["result"],
            ),
            duration: registry.histogram(
                "istio_agent_wasm_config_conversion_duration",
                "Total time in milliseconds istio-agent spends on converting remote load in Wasm \
                 config.",
                MILLISECONDS,
            ),
            fetches: registry.counters(
                "istio_agent_wasm_remote_fetch_count",
                "number of Wasm remote fetches and results, including success, download failure, and \
                 checksum mismatch.",
                &["result"],
            ),
            lookups: registry.counters(
                "istio_agent_wasm_cache_lookup_count",
                "number of Wasm remote fetch cache lookups.",
                &["hit"],
            ),
            entries: registry.gauge(
                "istio_agent_wasm_cache_entries",
                "number of Wasm remote fetch cache entries.",
            ),
        }
    }

    pub(super) fn count_lookup(&self, is_hit: bool) {
        let hit = if is_hit { "true" } else { "false" };
        self.lookups.with([hit]).inc();
    }

    pub(super) fn count_success(&self) {
        self.fetches.with(["success"]).inc();
    }

    pub(super) fn count_failure(&self, fetched: &Result<(), Error>) {
        let result = match fetched {
            Err(Error::Manifest(_)) => "manifest_failure",
            Err(Error::Download(_)) => "download_failure",
            Err(Error::Checksum { .. }) => "checksum_mismatched",
            Err(Error::Invalid { .. }) => "fetch_failure",
            Ok(()) | Err(_) => return,
        };
        self.fetches.with([result]).inc();
    }
}
