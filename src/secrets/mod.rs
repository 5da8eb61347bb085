//! Keeps the workload's certificate and roots fresh.
//!
//! One task signs at once and renews before expiry; it publishes every outcome on a watch, of which
//! [`Secrets`] is the reading end. The last good certificate stays published until a new one is in
//! hand or until it expires. Roots of the mesh ([`Secrets::trust`]) join those of the authority.
//! [`files`] are the other source, and [`output`] writes what is served of both to a directory.
//!
//! Does not know Envoy, nor how a certificate authority is reached.

pub mod certificate;
#[cfg(test)]
pub(crate) mod fake_authority;
pub mod files;
pub mod keep;
mod metrics;
pub mod name;
pub mod observe;
pub mod output;
pub mod renewal;
mod schedule;
#[cfg(test)]
mod tests;
mod trust;

use std::future::Future;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::watch;

use crate::ca::Ca;
use crate::ca::csr::KeyType;
use crate::ca::key::Encoding;
use crate::clock::Clock;
use crate::identity::SpiffeId;
use crate::metrics::Registry;
pub use certificate::Roots;
use keep::Keep;
use metrics::Metrics;
use observe::{Record, Snapshot};
use renewal::{IssueError, Renewal};
pub use trust::BundleError;
use trust::{Mesh, Trust};

/// What to have signed, and when to renew it.
#[derive(Clone, Debug)]
pub struct Config {
    pub identity: SpiffeId,
    pub key_type: KeyType,
    pub encoding: Encoding,
    /// The life to ask for.
    pub ttl: Duration,
    /// The part of its life a certificate has left when it is renewed, 0 to 1.
    pub grace_ratio: f64,
    /// How far each renewal moves `grace_ratio` at random, either way.
    pub grace_jitter: f64,
    /// Bounds of the pause between two renewals, a tenth of the life, that no ratio can shorten.
    pub least_pause: RangeInclusive<Duration>,
    /// Whom renewals are spread by, such as the name of the pod.
    pub spread_by: String,
    /// A directory in memory to keep key and certificate in over a restart.
    pub keep: Option<PathBuf>,
}

/// The bounds an authority can live with.
pub const LEAST_PAUSE: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(5);

/// Reads the latest secrets. Each clone waits for changes on its own.
#[derive(Clone, Debug)]
pub struct Secrets {
    state: watch::Receiver<State>,
    mesh: Mesh,
    record: Record,
}

/// What there is to serve at one moment.
#[derive(Clone, Debug, Default)]
pub struct State {
    /// None before the first answer, and once the last certificate has expired.
    pub workload: Option<Arc<certificate::Workload>>,
    /// For a moment newer than `workload`: changed roots are published first.
    pub roots: Option<Roots>,
    /// Why the latest attempt failed; None after a success.
    pub problem: Option<Problem>,
}

/// A failed attempt and what happens next.
#[derive(Clone, Debug)]
pub struct Problem {
    pub error: Arc<IssueError>,
    /// How many attempts in a row have failed.
    pub failures: u32,
    pub next_attempt: SystemTime,
}

/// The reading end and the task that renews for ever. The first certificate is asked for as soon as
/// the task runs, whether or not anybody reads.
pub fn new<C: Ca>(
    config: Config,
    ca: C,
    clock: Clock,
    registry: &Registry,
) -> (Secrets, impl Future<Output = ()> + Send + use<C>) {
    let (state, published) = watch::channel(State::default());
    let mesh = Mesh::default();
    let mesh_roots = mesh.watch();
    let record = Record::new(clock.clone());
    metrics::publish(&record, registry);
    let secrets = Secrets {
        state: published,
        mesh,
        record: record.clone(),
    };
    let keep = config.keep.as_ref().map(|parent| {
        let kind = format!("{:?} {:?}", config.key_type, config.encoding);
        Keep::new(parent, &config.identity, kind)
    });
    let renewal = Renewal {
        config,
        ca,
        clock,
        state,
        metrics: Metrics::new(registry),
        record,
        trust: Trust::new(mesh_roots),
        keep,
    };
    (secrets, renewal.run())
}

impl Problem {
    /// The error and what caused it, in one line.
    pub fn cause(&self) -> String {
        crate::lifecycle::with_causes(&*self.error)
    }
}

impl Secrets {
    pub fn latest(&self) -> State {
        self.state.borrow().clone()
    }

    /// Takes the trust bundle of the mesh, PEM, in place of the last. An empty one is none.
    pub fn trust(&self, bundle: &str) -> Result<(), BundleError> {
        self.mesh.take(bundle).map(drop)
    }

    /// What there is, for people to read.
    pub fn snapshot(&self) -> Snapshot {
        self.record.snapshot(&self.latest())
    }

    /// Returns when there is a state this handle has not waited for yet; never again once the
    /// renewal task has gone, as what it published last stays in force.
    pub async fn changed(&mut self) {
        if self.state.changed().await.is_err() {
            std::future::pending().await
        }
    }
}
