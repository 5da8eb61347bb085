//! Manages the workload's certificate and roots, and secrets from files.
//!
//! One task requests a certificate at once and renews it before expiry. It publishes each outcome on a
//! watch, which [`Secrets`] reads. The last good certificate stays published until a new one is signed or
//! until it expires. The mesh's trust bundle ([`Secrets::set_mesh_bundle`]) is merged with the authority's
//! roots. [`files`] is the other source, a [`Subscription`] reads both, and [`output`] writes both to a
//! directory.

mod cache;
pub mod certificate;
#[cfg(test)]
pub(crate) mod fake_authority;
pub mod files;
mod metrics;
pub mod name;
pub mod observe;
pub mod output;
pub mod renewal;
mod schedule;
#[cfg(test)]
mod tests;
mod trust;
mod x509;

use std::future::Future;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use serde::Serialize;
use tokio::sync::watch;

use crate::ca::Ca;
use crate::ca::key::{Encoding, KeyType};
use crate::files::volume::Volume;
use crate::metrics::Registry;
use crate::problem::{self, Code, Problem};
use crate::runtime::clock::{Clock, in_utc, rfc3339};
use crate::trust::identity::SpiffeId;
use cache::CertificateCache;
pub use certificate::Secret;
pub use files::{SecretState, Subscription};
use metrics::Metrics;
use name::Name;
use observe::Snapshot;
use renewal::Renewal;
use trust::MeshBundle;
pub use trust::Roots;
pub(crate) use x509::{Facts, MAX_NAMES};

/// The certificate to request, and when to renew it.
#[derive(Clone, Debug)]
pub struct Config {
    pub identity: SpiffeId,
    pub key_type: KeyType,
    /// Requests RSA from an authority that rejects `key_type`.
    pub falls_back_to_rsa: bool,
    pub encoding: Encoding,
    /// The requested lifetime.
    pub ttl: Duration,
    /// The part of its lifetime that is left when a certificate is renewed, 0 to 1.
    pub grace_ratio: f64,
    /// The amount by which each renewal moves `grace_ratio` at random, in either direction.
    pub grace_jitter: f64,
    /// Bounds of the shortest pause between two renewals, which is a tenth of the lifetime.
    pub least_pause: RangeInclusive<Duration>,
    /// A directory in memory that holds key and certificate across restarts.
    pub cache: Option<Volume>,
}

pub const WORKLOAD: &str = "workload certificate";

/// The bounds for [`Config::least_pause`] that do not overload an authority.
pub const MIN_PAUSE: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(5);

/// Reads the latest secrets. Each clone waits for changes on its own.
#[derive(Clone, Debug)]
pub struct Secrets {
    state: watch::Receiver<State>,
    mesh: MeshBundle,
    clock: Clock,
}

/// The workload's secrets at one moment.
#[derive(Clone, Debug, Default)]
pub struct State {
    /// None before the first certificate.
    pub workload: Option<Arc<certificate::Workload>>,
    /// The roots. They are newer than `workload` for a moment, because changed roots are published first.
    pub roots: Option<Roots>,
    /// The dates of the latest certificate, also once it has expired.
    pub dates: Option<Dates>,
    /// The failure of the latest attempt; None after a success.
    pub failure: Option<Failure>,
    /// The reason why the certificate is not stored for the next container.
    pub uncached: Option<Problem>,
}

#[derive(Clone, Copy, Debug)]
pub struct Dates {
    pub not_before: SystemTime,
    pub not_after: SystemTime,
    /// The time when the agent began to use the certificate.
    pub issued: SystemTime,
    /// The time when the next certificate will be requested.
    pub due: SystemTime,
}

/// A failed attempt, those before it, and the next one.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Failure {
    #[serde(flatten, serialize_with = "problem::error")]
    pub problem: Problem,
    pub failures: u32,
    /// The time of the first of these failures.
    #[serde(skip)]
    pub since: SystemTime,
    #[serde(serialize_with = "in_utc")]
    pub next_attempt: SystemTime,
}

/// Returns the handle and the task that renews until it is dropped. The task requests the first certificate
/// as soon as it runs, even without a subscriber.
pub fn new<C: Ca>(
    config: Config,
    ca: C,
    clock: Clock,
    registry: &Registry,
) -> (Secrets, impl Future<Output = ()> + Send + use<C>) {
    let (state, published) = watch::channel(State::default());
    let secrets = Secrets { state: published, mesh: MeshBundle::default(), clock: clock.clone() };
    metrics::register_gauges(&secrets, registry);
    let renewal = Renewal {
        cache: CertificateCache::new(&config),
        key_type: Mutex::new(config.key_type),
        config,
        ca,
        clock,
        state,
        metrics: Metrics::new(registry),
        authority_roots: Mutex::default(),
        mesh: secrets.mesh.clone(),
    };
    (secrets, renewal.run())
}

impl State {
    /// Returns when the certificate is to be withdrawn. It stays if it had expired when it was issued, because
    /// there was no other.
    fn expiry(&self) -> Option<SystemTime> {
        let not_after = self.workload.as_ref()?.certificate.not_after();
        (self.dates?.issued < not_after).then_some(not_after)
    }

    /// Returns a secret of the workload; None for other names, and before there is one.
    pub fn secret(&self, name: &Name) -> Option<Secret> {
        let workload = self.workload.as_ref();
        match name {
            Name::Default => workload.map(|it| Secret::Certificate(it.certificate.clone())),
            Name::RootCa => self.roots.clone().map(Secret::Roots),
            Name::SystemRoots | Name::FileRoot(_) | Name::FileCert { .. } => None,
        }
    }
}

impl Secrets {
    /// Returns the state, without a certificate that has expired. Its roots stay, because peers are still
    /// verified with them.
    pub fn latest(&self) -> State {
        let mut state = self.state.borrow().clone();
        if state.expiry().is_some_and(|expiry| expiry <= self.clock.now()) {
            state.workload = None;
        }
        state
    }

    /// Replaces the mesh's trust bundle, PEM; an empty text removes it.
    pub fn set_mesh_bundle(&self, bundle: &str) -> Result<(), Problem> {
        self.mesh.replace(bundle).map(drop)
    }

    /// Returns the problem of the latest attempt, or that the first one has not ended. If the certificate has
    /// expired, the problem says so first.
    pub fn problem(&self) -> Option<Problem> {
        let state = self.latest();
        let Some(failure) = state.failure else {
            let code = Code::CertificateNotIssued;
            return state.workload.is_none().then(|| Problem::new(code, WORKLOAD, code.cause()));
        };
        let mut problem = failure.problem;
        let failures = failure.failures;
        let [since, next] = [failure.since, failure.next_attempt].map(rfc3339);
        if let (Some(dates), None) = (state.dates, &state.workload) {
            let end = rfc3339(dates.not_after);
            problem.found = format!("expired at {end}; renewals fail: {}", problem.found);
            (problem.code, problem.subject) = (Code::CertificateExpired, WORKLOAD.to_owned());
        }
        problem.found += &format!(" ({failures} failures since {since}, next attempt at {next})");
        Some(problem)
    }

    pub fn snapshot(&self) -> Snapshot {
        observe::snapshot(&self.latest(), self.clock.now())
    }

    /// Waits for a state that this handle has not reported yet. Waits forever once the renewal task is dropped,
    /// because the last state stays in force.
    pub async fn changed(&mut self) {
        if self.state.changed().await.is_err() {
            std::future::pending().await
        }
    }
}
