//! Makes the overview: the doctor's report, and a snapshot of Envoy, istiod, certificates, discovery and recent
//! warnings, as JSON and as an HTML page.
//!
//! Snapshots have neither keys nor tokens.

mod page;

use serde::Serialize;
use serde_json::{Value, json};

use super::Sources;
use super::startup::Reached;
use crate::clock::{Clock, rfc3339};
use crate::envoy::handle::{self, Envoy};
use crate::health::Health;
use crate::istiod::status::Status;
use crate::logging;
use crate::report::Report;
use crate::secrets::Secrets;
use crate::secrets::observe::Snapshot as Certificates;
use crate::version;
use crate::wasm::Wasm;
use crate::xds::observe::Snapshot as Discovery;

#[derive(Debug, Serialize)]
pub(super) struct Overview {
    now: String,
    agent: Agent,
    ready: bool,
    /// Why the pod is not ready.
    missing: Option<String>,
    doctor: Report,
    /// None if the agent runs without Envoy.
    envoy: Option<handle::Report>,
    istiod: Status,
    /// None if another process serves certificates.
    certificates: Option<Certificates>,
    discovery: Discovery,
    /// None if the agent does not answer DNS.
    dns: Option<Value>,
    /// None if the workload is not checked.
    health: Option<Health>,
    /// None if Envoy fetches Wasm modules itself.
    wasm: Option<Value>,
    start_up: Vec<Reached>,
    /// Warnings and errors, the newest first.
    warnings: Vec<logging::Entry>,
}

#[derive(Debug, Serialize)]
struct Agent {
    node: String,
    version: String,
    uptime_seconds: f64,
}

impl Overview {
    /// Takes a snapshot. `ready` is the result of a readiness check.
    pub(super) fn new(sources: &Sources, (doctor, ready): (Report, Result<(), String>)) -> Self {
        let dns = sources.dns.as_ref();
        Self {
            now: rfc3339(Clock::system().now()),
            agent: Agent {
                node: sources.node.clone(),
                version: version::full(&sources.istio_version),
                uptime_seconds: sources.milestones.elapsed().as_secs_f64(),
            },
            ready: ready.is_ok(),
            missing: ready.err(),
            doctor,
            envoy: sources.envoy.as_ref().map(Envoy::snapshot),
            istiod: sources.istiod.status(),
            certificates: sources.secrets.as_ref().map(Secrets::snapshot),
            discovery: sources.discovery.snapshot(),
            dns: dns.map(|dns| json!({ "ready": dns.is_ready() })),
            health: sources.health.clone(),
            wasm: sources.wasm.as_ref().map(Wasm::snapshot),
            start_up: sources.milestones.reached(),
            warnings: logging::RECENT.entries(),
        }
    }

    pub(super) fn html(&self) -> String {
        page::page(self)
    }
}

#[cfg(test)]
mod tests;
