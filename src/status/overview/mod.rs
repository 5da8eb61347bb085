//! The overview: a snapshot of Envoy, istiod, certificates, discovery and recent warnings, as JSON
//! and as an HTML page.
//!
//! Snapshots hold neither keys nor tokens.

mod page;

use std::time::SystemTime;

use serde::Serialize;

use super::Sources;
use super::startup::Reached;
use crate::clock::{Clock, rfc3339};
use crate::envoy::handle::{Envoy, Report};
use crate::health::Health;
use crate::istiod::status::Status;
use crate::logging;
use crate::secrets::Secrets;
use crate::secrets::observe::Snapshot as Certificates;
use crate::version;
use crate::wasm::Snapshot as Wasm;
use crate::xds::observe::Snapshot as Discovery;

#[derive(Debug, Serialize)]
pub(super) struct Overview {
    now: String,
    agent: Agent,
    ready: bool,
    /// Why the pod is not ready.
    missing: Option<String>,
    /// None if the agent runs without Envoy.
    envoy: Option<Report>,
    envoy_uptime_seconds: Option<f64>,
    istiod: Status,
    /// None if another process serves certificates.
    certificates: Option<Certificates>,
    discovery: Discovery,
    /// None if the agent does not answer DNS.
    dns: Option<Dns>,
    /// None if the workload is not checked.
    health: Option<Health>,
    /// None if Envoy fetches Wasm modules itself.
    wasm: Option<Wasm>,
    start_up: Vec<Reached>,
    /// The newest first.
    warnings: Vec<logging::Entry>,
}

#[derive(Debug, Serialize)]
struct Agent {
    node: String,
    version: String,
    uptime_seconds: f64,
}

#[derive(Debug, Serialize)]
struct Dns {
    ready: bool,
}

impl Overview {
    /// What is known now. `ready` is the result of a readiness check.
    pub(super) fn new(sources: &Sources, ready: Result<(), String>) -> Self {
        let now = Clock::system().now();
        let envoy = sources.envoy.as_ref();
        let envoy = envoy.map(Envoy::snapshot);
        Self {
            now: rfc3339(now),
            agent: Agent {
                node: sources.node.clone(),
                version: version::full(&sources.istio_version),
                uptime_seconds: sources.milestones.elapsed().as_secs_f64(),
            },
            ready: ready.is_ok(),
            missing: ready.err(),
            envoy_uptime_seconds: envoy.as_ref().and_then(|envoy| uptime(envoy, now)),
            envoy,
            istiod: sources.istiod.status(),
            certificates: sources.secrets.as_ref().map(Secrets::snapshot),
            discovery: sources.discovery.snapshot(),
            dns: sources.dns.as_ref().map(|dns| Dns {
                ready: *dns.ready().borrow(),
            }),
            health: sources.health.clone(),
            wasm: sources.wasm.as_ref().map(crate::wasm::Wasm::snapshot),
            start_up: sources.milestones.reached(),
            warnings: logging::recent(),
        }
    }

    pub(super) fn html(&self) -> String {
        page::page(self)
    }
}

/// The age of Envoy's process, while there is one. After the clock was set back it is zero.
fn uptime(envoy: &Report, now: SystemTime) -> Option<f64> {
    let started = envoy.pid.and(envoy.started)?;
    let uptime = now.duration_since(started).unwrap_or_default();
    Some(uptime.as_secs_f64())
}

#[cfg(test)]
mod tests;
