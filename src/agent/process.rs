//! Limits of the agent's own process.

use rustix::process::{DumpableBehavior, Resource, Rlimit, getrlimit, setrlimit};

/// Bars core dumps of the agent, whose memory holds private keys. Envoy, a new program, may dump.
pub(super) fn bar_core_dumps() {
    let barred = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable);
    if let Err(error) = barred {
        tracing::warn!("core dumps cannot be barred: {error}; one would hold private keys");
    }
}

/// Raises the soft limit of open files to the hard one, as Go's runtime does. Envoy inherits it.
pub(super) fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    let current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current, ..limit }) {
        tracing::warn!(
            "the limit of open files stays at {:?}: {error}",
            limit.current
        );
    }
}
