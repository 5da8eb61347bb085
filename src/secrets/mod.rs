//! Secret manager: the workload's certificate and roots, and secrets from files.
//!
//! One task has a certificate signed at once and renews it before expiry. It publishes each outcome
//! on a watch, which [`Secrets`] reads. The last good certificate stays published until a new one is
//! signed or until it expires. The mesh's trust bundle ([`Secrets::set_mesh_bundle`]) joins the
//! authority's roots. [`files`] are the other source, a [`Subscription`] reads both, and [`output`]
//! writes both to a directory.

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
use crate::clock::{Clock, in_utc, rfc3339};
use crate::identity::SpiffeId;
use crate::metrics::Registry;
use crate::problem::{self, Problem, codes};
use crate::volume::{Content, Volume};
use cache::CertificateCache;
pub use certificate::{Roots, Secret};
pub use files::{SecretState, Subscription};
use metrics::Metrics;
use name::Name;
use observe::{Dates, Snapshot};
use renewal::Renewal;
use trust::MeshBundle;
pub(crate) use x509::{Facts, MAX_NAMES};

/// What to have signed, and when to renew it.
#[derive(Clone, Debug)]
pub struct Config {
    pub identity: SpiffeId,
    pub key_type: KeyType,
    /// Whether an authority that refuses `key_type` is asked for RSA instead.
    pub falls_back_to_rsa: bool,
    pub encoding: Encoding,
    /// The lifetime to ask for.
    pub ttl: Duration,
    /// The part of its lifetime a certificate has left when it is renewed, 0 to 1.
    pub grace_ratio: f64,
    /// How far each renewal moves `grace_ratio` at random, either way.
    pub grace_jitter: f64,
    /// Bounds of the pause between two renewals, a tenth of the lifetime, that no ratio can shorten.
    pub least_pause: RangeInclusive<Duration>,
    /// What renewals are spread by, such as the name of the pod.
    pub spread_by: String,
    /// A directory in memory that holds key and certificate across restarts.
    pub cache: Option<Volume>,
}

pub const WORKLOAD: &str = "workload certificate";

/// The bounds an authority can live with.
pub const MIN_PAUSE: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(5);

/// Reads the latest secrets. Each clone waits for changes on its own.
#[derive(Clone, Debug)]
pub struct Secrets {
    state: watch::Receiver<State>,
    mesh: MeshBundle,
    clock: Clock,
}

/// What the authority has signed, at one moment.
#[derive(Clone, Debug, Default)]
pub struct State {
    /// None before the first answer.
    pub workload: Option<Arc<certificate::Workload>>,
    /// For a moment newer than `workload`: changed roots are published first.
    pub roots: Option<Roots>,
    /// The dates of the latest certificate, also once it has expired.
    pub dates: Option<Dates>,
    /// Why the latest attempt failed; None after a success.
    pub failure: Option<Failure>,
}

/// A failed attempt and what happens next.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Failure {
    #[serde(flatten, serialize_with = "problem::error")]
    pub problem: Problem,
    /// How many attempts in a row have failed, and since when.
    pub failures: u32,
    #[serde(skip)]
    pub since: SystemTime,
    #[serde(serialize_with = "in_utc")]
    pub next_attempt: SystemTime,
}

/// Returns the handle and the task that renews until it is dropped. It asks for the first certificate
/// as soon as it runs, whether or not a client subscribes.
pub fn new<C: Ca>(
    config: Config,
    ca: C,
    clock: Clock,
    registry: &Registry,
) -> (Secrets, impl Future<Output = ()> + Send + use<C>) {
    let (state, published) = watch::channel(State::default());
    let mesh = MeshBundle::default();
    let secrets = Secrets {
        state: published,
        mesh,
        clock: clock.clone(),
    };
    metrics::publish(&secrets, registry);
    let cache = config.cache.as_ref();
    let cache = cache.filter(|volume| volume.is_used(Content::Certificate));
    let cache = cache.map(|volume| {
        let kind = format!("{:?} {:?}", config.key_type, config.encoding);
        CertificateCache::new(&volume.directory, &config.identity, kind)
    });
    let renewal = Renewal {
        key_type: Mutex::new(config.key_type),
        config,
        ca,
        clock,
        state,
        metrics: Metrics::new(registry),
        authority_roots: Mutex::default(),
        mesh: secrets.mesh.clone(),
        cache,
    };
    (secrets, renewal.run())
}

impl State {
    /// When the certificate is to be withdrawn. Never if it had expired when it came: there was no other.
    fn expiry(&self) -> Option<SystemTime> {
        let not_after = self.workload.as_ref()?.certificate.not_after();
        let dates = self.dates?;
        (dates.issued < not_after).then_some(not_after)
    }

    /// The workload's own secrets; None for other names, and before there is one.
    pub fn secret(&self, name: &Name) -> Option<Secret> {
        match name {
            Name::Default => {
                let workload = self.workload.as_ref()?;
                Some(Secret::Certificate(workload.certificate.clone()))
            }
            Name::RootCa => self.roots.clone().map(Secret::Roots),
            Name::SystemRoots | Name::FileRoot(_) | Name::FileCert { .. } => None,
        }
    }
}

impl Secrets {
    /// The state, without a certificate that has expired. Its roots stay: peers still prove themselves
    /// with them.
    pub fn latest(&self) -> State {
        let mut state = self.state.borrow().clone();
        if state
            .expiry()
            .is_some_and(|expiry| expiry <= self.clock.now())
        {
            state.workload = None;
        }
        state
    }

    /// Replaces the mesh's trust bundle, PEM; an empty one is none.
    pub fn set_mesh_bundle(&self, bundle: &str) -> Result<(), Problem> {
        self.mesh.replace(bundle).map(drop)
    }

    /// Why the latest attempt brought no certificate, or that none has ended yet. That the last certificate
    /// has expired is worse.
    pub fn problem(&self) -> Option<Problem> {
        let state = self.latest();
        let Some(failure) = state.failure else {
            let code = codes::CERTIFICATE_NOT_ISSUED;
            let is_first = state.workload.is_none();
            return is_first.then(|| Problem::new(code, WORKLOAD, code.cause));
        };
        let (mut problem, failures) = (failure.problem, failure.failures);
        let [since, next] = [failure.since, failure.next_attempt].map(rfc3339);
        if let (Some(dates), None) = (state.dates, &state.workload) {
            let end = rfc3339(dates.not_after);
            problem.found = format!("expired at {end}; renewals fail: {}", problem.found);
            (problem.code, problem.subject) = (codes::CERTIFICATE_EXPIRED, WORKLOAD.to_owned());
        }
        problem.found += &format!(" ({failures} failures since {since}, next attempt at {next})");
        Some(problem)
    }

    /// For the debug page.
    pub fn snapshot(&self) -> Snapshot {
        observe::snapshot(&self.latest(), self.clock.now())
    }

    /// Returns when there is a state this handle has not returned for yet. Once the renewal task is
    /// dropped it never returns: the last state stays in force.
    pub async fn changed(&mut self) {
        if self.state.changed().await.is_err() {
            std::future::pending().await
        }
    }
}
