//! The metrics of conversions, as pilot-agent has them.

use crate::metrics::{Counters, Histogram, Registry};

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
        }
    }
}
