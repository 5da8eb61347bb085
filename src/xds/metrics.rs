//! The relay's metrics without a type URL; [`super::observe`] has those with one.

use crate::metrics::{Counter, Counters, Gauge, Histogram, Registry};

/// Bounds from a few milliseconds to the minutes that an Envoy may take to warm up.
const ACK_BUCKETS: &[f64] = &[0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0];

/// Bounds from a first request that finds its endpoints in the ledger to the timeout of Envoy's filter.
const WAIT_BUCKETS: &[f64] = &[0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0];

/// Counters of clusters on demand.
#[derive(Clone, Debug)]
pub(super) struct OnDemandMetrics {
    pub(super) requests: Counter,
    pub(super) wait: Histogram,
    /// Answers that have not come in time, by what was awaited.
    pub(super) timeouts: Counters<1>,
}

impl OnDemandMetrics {
    fn new(registry: &Registry) -> Self {
        Self {
            requests: registry.counter(
                "istio_agent_on_demand_requests_total",
                "Clusters that Envoy has asked for, because a request needed them",
            ),
            wait: registry.histogram(
                "istio_agent_on_demand_wait_seconds",
                "Time from Envoy's request for a cluster to the response with it",
                WAIT_BUCKETS,
            ),
            timeouts: registry.counters(
                "istio_agent_on_demand_timeouts_total",
                "Responses with clusters that Envoy has not answered within 1 s, and requests for endpoints that istiod has not",
                &["type"],
            ),
        }
    }
}

/// The relay's counters.
#[derive(Clone, Debug)]
pub(super) struct Metrics {
    pub(super) requests: Counter,
    pub(super) responses: Counter,
    pub(super) largest_request: Gauge,
    pub(super) push_to_ack: Histogram,
    pub(super) services: Gauge,
    pub(super) on_demand: OnDemandMetrics,
    /// Problems of istiod's streams, by code.
    pub(super) alarms: Counters<1>,
    /// Ends of istiod's streams, by class.
    pub(super) istiod_ends: Counters<1>,
    /// Ends of Envoy's streams, by class.
    pub(super) envoy_ends: Counters<1>,
}

impl Metrics {
    pub(super) fn new(registry: &Registry) -> Self {
        Self {
            requests: registry.counter(
                "istio_agent_xds_proxy_requests",
                "The total number of Xds Proxy Requests",
            ),
            responses: registry.counter(
                "istio_agent_xds_proxy_responses",
                "The total number of Xds Proxy Responses",
            ),
            // The secret discovery service raises it too.
            largest_request: registry.gauge(
                "istio_agent_pilot_xds_recv_max",
                "The maximum size request we have received so far.",
            ),
            push_to_ack: registry.histogram(
                "istio_agent_xds_push_to_ack_seconds",
                "Time from the end of a discovery response to its acknowledgement",
                ACK_BUCKETS,
            ),
            on_demand: OnDemandMetrics::new(registry),
            services: registry.gauge(
                "istio_agent_xds_services",
                "Services that Envoy was sent, by its subscriptions to endpoints",
            ),
            alarms: registry.counters(
                "istio_agent_xds_alarms_total",
                "Streams on which istiod did not answer the agent, or a subscription of Envoy",
                &["code"],
            ),
            istiod_ends: registry.counters(
                "istio_agent_istiod_connection_terminations",
                "The total number of connection errors to Istiod",
                &["type"],
            ),
            envoy_ends: registry.counters(
                "istio_agent_envoy_connection_terminations",
                "The total number of connection errors from envoy",
                &["type"],
            ),
        }
    }
}
