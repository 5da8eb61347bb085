//! Keeps on disk the configuration that Envoy has accepted, and answers a new Envoy from it while
//! istiod is away.
//!
//! A [`Recorder`] beside each stream hands what passes to the [`writer`]'s thread. It becomes part of
//! what is kept once Envoy (or, of what the agent consumes, the agent) has accepted it: [`store`].
//! [`replay`] answers requests in istiod's place. Secrets are never kept.

mod file;
mod recorder;
pub(super) mod replay;
mod store;
mod subscription;
mod writer;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::clock::rfc3339;
use crate::metrics::{Counter, Kind, Registry};
pub(super) use recorder::Recorder;
use store::Manifest;
use writer::{WriteOp, Writer};

use super::stream::LISTENER;

/// Operations that wait for the writer. Each has up to [`recorder::BATCH`] bytes, or a message that the agent
/// consumes.
const MAX_OPS: usize = 8;

/// Envoys whose state is remembered. More do not run at once.
const MAX_ENVOYS: usize = 16;

/// Where configuration is kept, and when it is served.
#[derive(Clone, Debug)]
pub struct Config {
    pub directory: PathBuf,
    /// Older configuration is not served.
    pub max_age: Duration,
    /// How long a new Envoy waits for istiod before it is served what is kept.
    pub after: Duration,
}

/// Fails if what is kept in the directory cannot be used, or nothing can be kept there.
pub(crate) fn check(directory: &Path) -> io::Result<()> {
    store::check(directory)
}

/// A handle to what is kept.
#[derive(Clone, Debug)]
pub struct LastKnownGood {
    config: Arc<Config>,
    ops: mpsc::Sender<(u32, WriteOp)>,
    has_lost: Arc<AtomicBool>,
    ended: Ended,
    status: Status,
    /// By pid.
    envoys: Arc<Mutex<BTreeMap<i32, Arc<Mutex<Waiting>>>>>,
}

/// Streams that have ended, for the writer.
type Ended = Arc<Mutex<Vec<u32>>>;

/// What is kept of a type.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KeptSnapshot {
    pub version: String,
    pub bytes: u64,
    /// When the last response was accepted.
    pub at: String,
    #[serde(skip)]
    accepted: u64,
}

/// What `/debug/xdsz` and the metrics say.
#[derive(Clone, Debug)]
struct Status {
    types: Arc<Mutex<BTreeMap<String, KeptSnapshot>>>,
    failures: Counter,
    served: Counter,
    is_failing: Arc<AtomicBool>,
}

/// How long an Envoy has waited for its configuration.
#[derive(Clone, Copy, Debug, Default)]
struct Waiting {
    /// Its oldest request without a response, or the last byte of istiod's while there is one.
    since: Option<Instant>,
    /// Whether it has answered listeners, or nothing usable is kept.
    is_over: bool,
}

/// An Envoy that may be served what is kept.
#[derive(Clone, Debug)]
pub(crate) struct EnvoyCache {
    pub(super) kept: LastKnownGood,
    waiting: Arc<Mutex<Waiting>>,
}

impl LastKnownGood {
    /// A handle, and the work of the writer's thread, which ends when all handles are gone.
    pub fn new(config: Config, registry: &Registry) -> (Self, impl FnOnce() + Send + use<>) {
        let status = Status::new(registry);
        let (ops, received) = mpsc::channel(MAX_OPS);
        let (has_lost, ended) = (Arc::<AtomicBool>::default(), Ended::default());
        let writer = Writer::new(config.directory.clone(), status.clone());
        let kept = Self {
            config: Arc::new(config),
            ops,
            has_lost: has_lost.clone(),
            ended: ended.clone(),
            status,
            envoys: Arc::default(),
        };
        (kept, move || writer.run(received, &has_lost, &ended))
    }

    pub(super) fn envoy_cache(&self, pid: i32) -> EnvoyCache {
        let mut envoys = self.envoys.lock();
        let waiting = envoys.entry(pid).or_default().clone();
        if envoys.len() > MAX_ENVOYS {
            let other = envoys.keys().copied().find(|other| *other != pid);
            other.map(|other| envoys.remove(&other));
        }
        EnvoyCache {
            kept: self.clone(),
            waiting,
        }
    }

    /// What is kept, by type URL.
    pub(super) fn snapshot(&self) -> BTreeMap<String, KeptSnapshot> {
        self.status.types.lock().clone()
    }
}

impl EnvoyCache {
    /// When it is to be served what is kept, unless istiod answers before.
    pub(super) fn due(&self) -> Option<Instant> {
        let waiting = *self.waiting.lock();
        let since = waiting.since.filter(|_| !waiting.is_over)?;
        since.checked_add(self.kept.config.after)
    }

    pub(super) fn requested(&self) {
        self.waiting.lock().since.get_or_insert_with(Instant::now);
    }

    /// Gives istiod its time anew while it has a request to answer.
    pub(super) fn heard_of_istiod(&self, has_request: bool) {
        self.waiting.lock().since = has_request.then(Instant::now);
    }

    /// Whether something is kept that Envoy starts with. If not it waits for istiod. What it is worth is
    /// seen when it is read.
    pub(super) fn can_be_served(&self) -> bool {
        let types = self.kept.status.types.lock();
        let mut needed = [replay::CLUSTER, LISTENER].iter();
        let can_start = needed.all(|it| types.contains_key(*it));
        if !can_start {
            tracing::warn!(
                target: "xdsproxy",
                "istiod has not answered for {:?}, and no clusters or no listeners are kept: Envoy waits",
                self.kept.config.after
            );
            self.end_waiting();
        }
        can_start
    }

    /// From now on only istiod's configuration is for it.
    pub(super) fn end_waiting(&self) {
        self.waiting.lock().is_over = true;
    }
}

impl Status {
    fn new(registry: &Registry) -> Self {
        let types = Arc::<Mutex<BTreeMap<String, KeptSnapshot>>>::default();
        type Value = fn(&KeptSnapshot) -> f64;
        let families: [(_, _, Value); 2] = [
            (
                "istio_agent_xds_kept_bytes",
                "Bytes of discovery responses kept for an Envoy that istiod does not answer",
                |of| of.bytes as f64,
            ),
            (
                "istio_agent_xds_kept_timestamp_seconds",
                "When the last discovery response that is kept was accepted, as seconds of Unix time",
                |of| of.accepted as f64,
            ),
        ];
        for (name, help, value) in families {
            let types = types.clone();
            registry.computed(name, help, Kind::Gauge, &["type"], move |series| {
                for (type_url, of) in types.lock().iter() {
                    series(&[type_url], value(of));
                }
            });
        }
        Self {
            types,
            failures: registry.counter(
                "istio_agent_xds_kept_failures_total",
                "Discovery responses that could not be kept, and kept configuration that could not be served",
            ),
            served: registry.counter(
                "istio_agent_xds_kept_served_total",
                "Streams of Envoy that were served from the kept configuration",
            ),
            is_failing: Arc::default(),
        }
    }

    fn publish(&self, manifest: Option<&Manifest>) {
        let types = manifest.into_iter().flat_map(|manifest| &manifest.types);
        let snapshot = types.map(|(type_url, of)| {
            let accepted = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(of.accepted));
            let snapshot = KeptSnapshot {
                version: of.version.clone(),
                bytes: of.file.length,
                at: rfc3339(accepted.unwrap_or(SystemTime::UNIX_EPOCH)),
                accepted: of.accepted,
            };
            (type_url.clone(), snapshot)
        });
        *self.types.lock() = snapshot.collect();
    }

    /// Records what can no longer be kept: a type, or all. Logs the first failure in a row.
    fn give_up(&self, directory: &Path, what: &str, error: &io::Error) {
        self.failures.inc();
        if !self.is_failing.swap(true, Ordering::Relaxed) {
            tracing::error!(
                target: "xdsproxy",
                "{what} cannot be kept in {}: {error}; an Envoy that starts while istiod is away waits for it",
                directory.display()
            );
        }
    }
}

#[cfg(test)]
mod tests;
