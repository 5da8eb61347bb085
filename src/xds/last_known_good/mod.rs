//! Keeps the last known good configuration on disk, that is what Envoy has accepted, and answers a new
//! Envoy from it while istiod is unreachable.
//!
//! A [`Recorder`] beside each stream hands what passes to the [`writer`]'s thread, which keeps it in a
//! [`file`] for each type. It counts once Envoy (or, of what the agent consumes, the agent) has accepted
//! it. [`replay`] answers requests in istiod's place. Secrets are never kept.

mod file;
mod recorder;
pub(super) mod replay;
mod subscription;
mod writer;

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use parking_lot::{Mutex, RwLock};
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::clock::rfc3339;
use crate::metrics::{Counter, Kind, Registry};
use file::Header;
pub(super) use recorder::Recorder;
pub(crate) use writer::check;
use writer::{Batch, Writer};

use super::stream::LISTENER;

/// The directory below the configured one.
const DIRECTORY: &str = "istio-agent-config";

/// The types that are kept. What follows the last dot is the name of the file.
const TYPES: [Type; 11] = [
    CLUSTER,
    ENDPOINTS,
    LISTENER,
    ROUTES,
    "type.googleapis.com/envoy.config.route.v3.ScopedRouteConfiguration",
    "type.googleapis.com/envoy.config.route.v3.VirtualHost",
    EXTENSION,
    "type.googleapis.com/envoy.service.runtime.v3.Runtime",
    "type.googleapis.com/istio.mesh.v1alpha1.ProxyConfig",
    "type.googleapis.com/istio.networking.nds.v1.NameTable",
    WORKLOAD,
];

/// One of [`TYPES`].
type Type = &'static str;

const CLUSTER: Type = "type.googleapis.com/envoy.config.cluster.v3.Cluster";
const ENDPOINTS: Type = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment";
const ROUTES: Type = "type.googleapis.com/envoy.config.route.v3.RouteConfiguration";

/// As it came it may hold pull secrets of Wasm modules.
const EXTENSION: Type = "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig";

/// Resources of this type do not begin with their name, which SotW needs.
const WORKLOAD: Type = "type.googleapis.com/istio.workload.Workload";

/// Batches that wait for the writer. Each has about [`recorder::BATCH`] bytes, and messages that the
/// agent consumes.
const MAX_BATCHES: usize = 8;

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

/// A handle to what is kept.
#[derive(Clone, Debug)]
pub struct LastKnownGood {
    config: Arc<Config>,
    batches: mpsc::Sender<Batch>,
    /// Whether the writer was too slow for the last operation.
    is_stalled: Arc<AtomicBool>,
    /// The last of streams that have ended.
    ended: Arc<Mutex<Vec<Batch>>>,
    status: Status,
    /// In the order of their start.
    envoys: Arc<Mutex<VecDeque<Envoy>>>,
}

#[derive(Clone, Debug)]
struct Envoy {
    pid: i32,
    generation: u64,
    waiting: Arc<Mutex<Waiting>>,
}

/// What is kept of a type.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KeptSnapshot {
    pub version: String,
    pub bytes: u64,
    /// When the last response was accepted.
    pub at: String,
}

/// What `/debug/xdsz` and the metrics say.
#[derive(Clone, Debug)]
struct Status {
    types: Arc<Mutex<BTreeMap<Type, Header>>>,
    failures: Counter,
    served: Counter,
    is_failing: Arc<AtomicBool>,
    /// Locked while Envoy is served.
    reading: Arc<RwLock<()>>,
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
    envoy: Envoy,
}

impl LastKnownGood {
    /// A handle, and the work of the writer's thread, which ends when all handles are gone.
    pub fn new(config: Config, registry: &Registry) -> (Self, impl FnOnce() + Send + use<>) {
        let status = Status::new(registry);
        let (batches, received) = mpsc::channel(MAX_BATCHES);
        let writer = Writer::new(config.directory.clone(), status.clone());
        let ended = Arc::<Mutex<Vec<Batch>>>::default();
        let kept = Self {
            config: Arc::new(config),
            batches,
            is_stalled: Arc::default(),
            ended: ended.clone(),
            status,
            envoys: Arc::default(),
        };
        (kept, move || writer.run(received, &ended))
    }

    pub(super) fn envoy_cache(&self, pid: i32) -> EnvoyCache {
        let mut envoys = self.envoys.lock();
        let known = envoys.iter().find(|envoy| envoy.pid == pid).cloned();
        let envoy = known.unwrap_or_else(|| {
            let generation = envoys.back().map_or(1, |last| last.generation + 1);
            let waiting = Arc::default();
            let envoy = Envoy {
                pid,
                generation,
                waiting,
            };
            if envoys.len() == MAX_ENVOYS {
                envoys.pop_front();
            }
            envoys.push_back(envoy.clone());
            envoy
        });
        EnvoyCache {
            kept: self.clone(),
            envoy,
        }
    }

    /// What is kept, by type URL.
    pub(super) fn snapshot(&self) -> BTreeMap<String, KeptSnapshot> {
        let types = self.status.types.lock();
        let snapshot = |(type_url, header): (&Type, &Header)| {
            let accepted = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(header.accepted));
            let snapshot = KeptSnapshot {
                version: header.version.clone(),
                bytes: header.length,
                at: rfc3339(accepted.unwrap_or(SystemTime::UNIX_EPOCH)),
            };
            ((*type_url).to_owned(), snapshot)
        };
        types.iter().map(snapshot).collect()
    }
}

impl EnvoyCache {
    /// When it is to be served what is kept, unless istiod answers before.
    pub(super) fn due(&self) -> Option<Instant> {
        let waiting = *self.envoy.waiting.lock();
        let since = waiting.since.filter(|_| !waiting.is_over)?;
        since.checked_add(self.kept.config.after)
    }

    pub(super) fn requested(&self) {
        let mut waiting = self.envoy.waiting.lock();
        waiting.since.get_or_insert_with(Instant::now);
    }

    /// Gives istiod its time anew while it has a request to answer.
    pub(super) fn heard_of_istiod(&self, has_request: bool) {
        self.envoy.waiting.lock().since = has_request.then(Instant::now);
    }

    /// Whether something is kept that Envoy starts with. If not it waits for istiod. What it is worth is
    /// seen when it is read.
    pub(super) fn can_be_served(&self) -> bool {
        let types = self.kept.status.types.lock();
        let can_start = [CLUSTER, LISTENER].iter().all(|it| types.contains_key(it));
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
        self.envoy.waiting.lock().is_over = true;
    }
}

impl Status {
    fn new(registry: &Registry) -> Self {
        let types = Arc::<Mutex<BTreeMap<Type, Header>>>::default();
        type Value = fn(&Header) -> u64;
        let families: [(_, _, Value); 2] = [
            (
                "istio_agent_xds_kept_bytes",
                "Bytes of discovery responses kept for an Envoy that istiod does not answer",
                |header| header.length,
            ),
            (
                "istio_agent_xds_kept_timestamp_seconds",
                "When the last discovery response that is kept was accepted, as seconds of Unix time",
                |header| header.accepted,
            ),
        ];
        for (name, help, value) in families {
            let types = types.clone();
            registry.computed(name, help, Kind::Gauge, &["type"], move |series| {
                for (type_url, header) in types.lock().iter() {
                    series(&[type_url], value(header) as f64);
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
            reading: Arc::default(),
        }
    }

    /// Records that a type can no longer be kept, or nothing. Logs the first failure in a row.
    fn give_up(&self, directory: &Path, type_url: &str, error: &io::Error) {
        self.failures.inc();
        if !self.is_failing.swap(true, Ordering::Relaxed) {
            tracing::error!(
                target: "xdsproxy",
                "configuration {type_url} cannot be kept in {}: {error}; an Envoy that starts while istiod is \
                 unreachable waits for it",
                directory.display()
            );
        }
    }
}

#[cfg(test)]
mod tests;
