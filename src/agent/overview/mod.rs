//! Everything at one glance: what the rooms say of themselves, gathered when somebody asks.
//!
//! [`Rooms`] holds the handles; an [`Overview`] is what they say at one moment, which is shown as
//! JSON, or as a page by [`page`].
//!
//! Does not hold keys or tokens, as the rooms do not tell them.

mod html;
mod page;
mod words;

use std::time::SystemTime;

use serde::Serialize;
use serde_json::{Value, json};

use crate::cli::version;
use crate::clock::{Clock, rfc3339};
use crate::envoy::handle::{Envoy, Report};
use crate::istiod::Istiod;
use crate::istiod::status::Status;
use crate::secrets::Secrets;
use crate::secrets::observe::Snapshot as Certificates;
use crate::status::{Glance, Ready};
use crate::timeline::{Reached, Timeline};
use crate::xds::observe::{Observer, Snapshot as Discovery};
use crate::{dns, logging};

/// Who is asked.
pub(super) struct Rooms {
    /// Envoy's name in the mesh.
    pub(super) node: String,
    pub(super) timeline: Timeline,
    /// None where the agent runs without Envoy.
    pub(super) envoy: Option<Envoy>,
    pub(super) istiod: Istiod,
    /// None where somebody else serves certificates.
    pub(super) secrets: Option<Secrets>,
    pub(super) discovery: Observer,
    /// None where the agent does not answer DNS.
    pub(super) dns: Option<dns::Dns>,
}

/// What they say.
#[derive(Debug, Serialize)]
struct Overview {
    now: String,
    agent: About,
    ready: bool,
    /// What is missing for that.
    missing: Option<String>,
    envoy: Option<Report>,
    envoy_uptime_seconds: Option<f64>,
    istiod: Status,
    certificates: Option<Certificates>,
    discovery: Discovery,
    dns: Option<Dns>,
    start_up: Vec<Reached>,
    /// The newest first.
    warnings: Vec<logging::Entry>,
}

#[derive(Debug, Serialize)]
struct About {
    node: String,
    version: String,
    uptime_seconds: f64,
}

#[derive(Debug, Serialize)]
struct Dns {
    ready: bool,
}

impl Rooms {
    fn overview(&self, ready: Ready) -> Overview {
        let now = Clock::system().now();
        let envoy = self.envoy.as_ref();
        let envoy = envoy.map(|envoy| envoy.report().borrow().clone());
        Overview {
            now: rfc3339(now),
            agent: About {
                node: self.node.clone(),
                version: version::full(),
                uptime_seconds: self.timeline.elapsed().as_secs_f64(),
            },
            ready: ready.is_ok(),
            missing: ready.err(),
            envoy_uptime_seconds: envoy.as_ref().and_then(|envoy| uptime(envoy, now)),
            envoy,
            istiod: self.istiod.status(),
            certificates: self.secrets.as_ref().map(Secrets::snapshot),
            discovery: self.discovery.snapshot(),
            dns: self.dns.as_ref().map(|dns| Dns {
                ready: *dns.ready().borrow(),
            }),
            start_up: self.timeline.reached(),
            warnings: logging::recent(),
        }
    }
}

impl Glance for Rooms {
    fn json(&self, ready: Ready) -> Value {
        json!(self.overview(ready))
    }

    fn html(&self, ready: Ready) -> String {
        page::page(&self.overview(ready))
    }
}

/// How long the Envoy that is there has been.
fn uptime(envoy: &Report, now: SystemTime) -> Option<f64> {
    let started = envoy.pid.and(envoy.started)?;
    // A clock that was set back makes it new.
    Some(
        now.duration_since(started)
            .unwrap_or_default()
            .as_secs_f64(),
    )
}
