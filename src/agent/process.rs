//! Limits of the agent's own process, and its reports to systemd.

use rustix::process::{DumpableBehavior, Resource, Rlimit, getrlimit, setrlimit};

use super::Agent;
use crate::runtime::lifecycle::Stop;
use crate::status::startup::{Milestones, READY, SOCKETS_BOUND};

impl Agent {
    /// Reports to systemd when the pod is ready. Without a status port, which checks readiness, reports as soon as
    /// Envoy and applications can connect.
    pub(super) fn report_to_systemd(&mut self, milestones: &Milestones, stop: &Stop) {
        let Some(systemd) = self.config.systemd.clone() else { return };
        let milestone = match self.config.status {
            Some(_) => READY,
            None => SOCKETS_BOUND,
        };
        let milestones = milestones.clone();
        let stop = stop.clone();
        let report = async move {
            systemd.report(milestones.wait_for(milestone), stop.first_request()).await;
        };
        self.spawn_until_shutdown("reports to systemd", report);
    }
}

/// Disables core dumps of the agent, whose memory contains private keys. Envoy, a new program, may dump core.
pub(super) fn disable_core_dumps() {
    if let Err(error) = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable) {
        tracing::warn!("cannot disable core dumps; they would contain private keys: {error}");
    }
}

/// Raises the soft limit of open files to the hard one, as Go's runtime does. Envoy inherits it.
pub(super) fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        tracing::warn!("cannot raise the limit of open files: {error}");
    }
}
