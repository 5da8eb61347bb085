//! Makes the overview: the doctor's report, and a snapshot of Envoy, istiod, certificates, discovery and recent
//! warnings, as JSON and as an HTML page.
//!
//! Snapshots have neither keys nor tokens.

mod cards;
mod page;

use serde_json::{Value, json};

use super::{Diagnosis, Sources};
use crate::envoy::handle::Envoy;
use crate::logging;
use crate::runtime::clock::{Clock, rfc3339};
use crate::secrets::Secrets;
use crate::version;
use crate::wasm::Wasm;

/// Takes a snapshot. A part without which the agent runs is null then, see [`Sources`]; `missing` is the reason
/// why the pod is not ready.
pub(super) fn snapshot(sources: &Sources, diagnosis: &Diagnosis) -> Value {
    let Diagnosis { report, missing, .. } = diagnosis;
    json!({
        "now": rfc3339(Clock::system().now()),
        "agent": {
            "node": sources.node,
            "version": version::full(&sources.istio_version),
            "uptime_seconds": sources.milestones.elapsed().as_secs_f64(),
        },
        "ready": missing.is_none(),
        "missing": missing,
        "doctor": report,
        "envoy": sources.envoy.as_ref().map(Envoy::snapshot),
        "istiod": sources.istiod.status(),
        "certificates": sources.secrets.as_ref().map(Secrets::snapshot),
        "discovery": sources.discovery.snapshot(),
        "dns": sources.dns.as_ref().map(|dns| json!({ "ready": dns.is_ready() })),
        "health": sources.health,
        "wasm": sources.wasm.as_ref().map(Wasm::snapshot),
        "start_up": sources.milestones.reached(),
        "warnings": logging::RECENT.entries(),
    })
}

/// Renders the page, which also has the last outages of istiod and the pod's two containers.
pub(super) fn html(sources: &Sources, diagnosis: &Diagnosis) -> String {
    let mut overview = snapshot(sources, diagnosis);
    overview["istiod"]["outages"] = json!(sources.istiod.status().outages);
    overview[cards::PAIR] = diagnosis.pair.clone();
    page::page(&diagnosis.report, &overview, diagnosis.is_held)
}

#[cfg(test)]
mod tests;
