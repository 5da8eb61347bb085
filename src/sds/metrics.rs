//! Counts events of the secret discovery service, under the names of pilot-agent's xDS server.

use super::Rejections;
use crate::metrics::{Counter, Gauge, Kind, Registry};
use crate::problem::Code;

#[derive(Clone, Debug)]
pub(super) struct Metrics {
    pub(super) expired_nonces: Counter,
    pub(super) rejects: Counter,
    pub(super) internal_errors: Counter,
    pub(super) rejections: Rejections,
    pub(super) largest_request: Gauge,
}

impl Metrics {
    pub(super) fn new(registry: &Registry, rejections: &Rejections) -> Self {
        let rejected = rejections.clone();
        registry.computed(
            "istio_agent_sds_refused_secrets",
            "Number of secrets that Envoy has refused and has no other version of",
            Kind::Gauge,
            &[],
            move |report| {
                let missing = rejected
                    .lock()
                    .values()
                    .filter(|problem| problem.code == Code::SecretRefused)
                    .count();
                report(&[], missing as f64);
            },
        );
        let sds = |name, help| registry.counters(name, help, &["type"]).with(["sds"]);
        Self {
            expired_nonces: sds(
                "istio_agent_pilot_xds_expired_nonce",
                "Total number of XDS requests with an expired nonce.",
            ),
            rejects: sds(
                "istio_agent_pilot_total_xds_rejects",
                "Total number of XDS responses from pilot rejected by proxy.",
            ),
            internal_errors: registry.counter(
                "istio_agent_pilot_total_xds_internal_errors",
                "Total number of internal XDS errors in pilot.",
            ),
            rejections: rejections.clone(),
            // The relay raises it too.
            largest_request: registry.gauge(
                "istio_agent_pilot_xds_recv_max",
                "The maximum size request we have received so far.",
            ),
        }
    }
}
