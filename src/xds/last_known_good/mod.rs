//! Stores the last known good configuration on disk, that is the resources Envoy has accepted, and serves it
//! to a new Envoy while istiod is unreachable.
//!
//! Each delta stream has a [`Recorder`], which sends requests and responses to the [`writer`]. The writer has
//! one [`file`] per type. A response is written a few seconds after Envoy has accepted it, or the agent, if the
//! agent consumes its type. A failure deletes all files, and recording starts again with the next stream.
//! [`replay`] answers requests in place of istiod, and [`after_nack`] sends stored versions of resources that a
//! new Envoy has refused. Secrets and responses of SotW are never stored.

pub(crate) mod after_nack;
mod copy;
mod file;
mod recorder;
pub(super) mod replay;
mod writer;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::OptionFuture;
use parking_lot::Mutex;
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::envoy::admin::Admin;
use crate::metrics::{Counter, Kind, Registry};
pub use after_nack::StoredResource;
use file::{Header, unix_rfc3339};
pub(super) use recorder::Recorder;
use writer::{Batch, Writer};

use super::{CLUSTER, ENDPOINTS, LISTENER, Protocol, WORKLOAD};
use crate::files::volume::{Content, Volume};

/// The directory below the configured one.
const DIRECTORY: &str = Content::Configuration.directory();

/// The types that are stored. The part after the last dot is the name of the file.
const TYPES: [Type; 8] = [
    CLUSTER,
    ENDPOINTS,
    LISTENER,
    ROUTES,
    EXTENSION,
    "type.googleapis.com/istio.mesh.v1alpha1.ProxyConfig",
    "type.googleapis.com/istio.networking.nds.v1.NameTable",
    WORKLOAD,
];

/// A type URL of [`TYPES`].
type Type = &'static str;

const ROUTES: Type = "type.googleapis.com/envoy.config.route.v3.RouteConfiguration";
/// Envoy asks for resources of these types by their names.
const BY_NAME: [Type; 3] = [ENDPOINTS, ROUTES, EXTENSION];
/// Envoy asks for all resources of these types, and serves nothing without them.
const NEEDED: [Type; 2] = [CLUSTER, LISTENER];
/// The shortest time after which an Envoy is served. It limits how often the store is checked.
const MIN_WAIT: Duration = Duration::from_millis(100);

/// Before the agent rewrites resources of this type, they may hold pull secrets of Wasm modules.
const EXTENSION: Type = "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig";

/// The most batches that wait for the writer. Each has about [`recorder::HANDOVER`] bytes, and messages that
/// the agent consumes.
const MAX_BATCHES: usize = 4;

/// Settings of the store.
#[derive(Clone, Debug)]
pub struct Config {
    pub volume: Volume,
    /// Configuration that needs more bytes is not stored.
    pub max_bytes: u64,
    /// Older configuration is not served.
    pub max_age: Duration,
    /// The time that a new Envoy waits for istiod before it is served.
    pub after: Duration,
    /// True if a new Envoy that refuses resources of istiod gets their stored versions.
    pub on_nack: bool,
}

/// A handle to the store.
#[derive(Clone, Debug)]
pub struct LastKnownGood {
    shared: Arc<Shared>,
    batches: mpsc::Sender<Batch>,
}

/// An Envoy process that has opened a delta stream.
#[derive(Clone, Debug)]
struct EnvoyGeneration {
    /// The number of such Envoys before it. A newer Envoy has a larger one.
    number: usize,
    /// True once it has answered listeners, or the store is unusable.
    no_longer_served: Arc<AtomicBool>,
}

/// The state that streams, their threads and the writer share.
#[derive(Debug)]
struct Shared {
    config: Config,
    /// Envoy's admin port, if Envoy gets stored versions of resources that it refuses.
    admin: Option<Admin>,
    /// Resources of which Envoy has the stored version, because it has refused istiod's.
    after_nack: Mutex<BTreeMap<Type, Vec<StoredResource>>>,
    /// The headers of all files.
    types: Mutex<BTreeMap<Type, Header>>,
    /// All Envoys so far, by the ids of their processes.
    envoys: Mutex<BTreeMap<i32, EnvoyGeneration>>,
    /// True after a recorder has found the writer too slow, until the writer continues.
    is_stalled: AtomicBool,
    failures: Counter,
    served: Counter,
}

impl Shared {
    /// Registers the metrics of the stored configuration.
    fn register(self: &Arc<Self>, registry: &Registry) {
        type Value = fn(&Header) -> u64;
        let families: [(_, _, Value); 2] = [
            (
                "istio_agent_xds_kept_bytes",
                "Bytes of stored configuration, for an Envoy that starts while istiod is unreachable",
                |header| header.length,
            ),
            (
                "istio_agent_xds_kept_timestamp_seconds",
                "The last time at which the stream to istiod was open, in seconds of Unix time",
                |header| header.current,
            ),
        ];
        for (name, help, value) in families {
            let shared = self.clone();
            registry.computed(name, help, Kind::Gauge, &["type"], move |series| {
                for (type_url, header) in shared.types.lock().iter() {
                    series(&[type_url], value(header) as f64);
                }
            });
        }
        let shared = self.clone();
        registry.computed(
            "istio_agent_xds_kept_after_nack",
            "Resources of which Envoy has the stored version, because it has refused istiod's",
            Kind::Gauge,
            &["type"],
            move |series| {
                let after_nack = shared.after_nack.lock();
                for type_url in [CLUSTER, LISTENER].iter().chain(&BY_NAME) {
                    let resources = after_nack.get(type_url).map_or(0, Vec::len);
                    series(&[type_url], resources as f64);
                }
            },
        );
    }
}

/// The store as one Envoy may use it.
#[derive(Clone, Debug)]
pub(crate) struct EnvoyCache {
    store: LastKnownGood,
    generation: EnvoyGeneration,
}

/// The stored configuration of a type.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StoredSnapshot {
    pub version: String,
    pub bytes: u64,
    /// The last time at which the stream to istiod was known to be open.
    pub at: String,
}

impl LastKnownGood {
    /// Returns a handle and the future that writes. The future ends at the shutdown or when all handles are
    /// dropped, after it has written all changes.
    pub fn new(
        config: Config,
        admin: Option<Admin>,
        registry: &Registry,
        shutdown: CancellationToken,
    ) -> (Self, impl Future<Output = ()> + Send + use<>) {
        let shared = Arc::new(Shared {
            admin: admin.filter(|_| config.on_nack),
            after_nack: Mutex::default(),
            config,
            types: Mutex::default(),
            envoys: Mutex::default(),
            is_stalled: AtomicBool::new(false),
            failures: registry.counter(
                "istio_agent_xds_kept_failures_total",
                "Failures to store configuration, or to serve stored configuration",
            ),
            served: registry.counter(
                "istio_agent_xds_kept_served_total",
                "Streams of Envoy that were served with stored configuration",
            ),
        });
        shared.register(registry);
        let (batches, received) = mpsc::channel(MAX_BATCHES);
        let writing = write(shared.clone(), received, shutdown);
        (Self { shared, batches }, writing)
    }

    /// Returns the store for the Envoy of this process. Only delta streams can use it.
    pub(super) fn envoy_cache(&self, pid: i32, protocol: Protocol) -> Option<EnvoyCache> {
        if protocol == Protocol::Sotw {
            if !self.shared.config.volume.is_default {
                tracing::warn!(target: "xdsproxy", "ISTIO_AGENT_KEEP_CONFIG needs delta xDS: set ISTIO_DELTA_XDS=true");
            }
            return None;
        }
        let mut envoys = self.shared.envoys.lock();
        let new = EnvoyGeneration { number: envoys.len(), no_longer_served: Arc::default() };
        Some(EnvoyCache {
            store: self.clone(),
            generation: envoys.entry(pid).or_insert(new).clone(),
        })
    }

    /// Returns the resources of which Envoy has the stored version, because it refused istiod's.
    pub(super) fn after_nack(&self) -> BTreeMap<Type, Vec<StoredResource>> {
        self.shared.after_nack.lock().clone()
    }

    /// Describes the stored configuration, by type URL. Returns None if the directory is not used.
    pub(super) fn snapshot(&self) -> Option<BTreeMap<Type, StoredSnapshot>> {
        if self.batches.is_closed() {
            return None;
        }
        let types = self.shared.types.lock();
        let snapshots = types.iter().map(|(type_url, header)| {
            let snapshot = StoredSnapshot {
                version: header.version.clone(),
                bytes: header.length,
                at: unix_rfc3339(header.current),
            };
            (*type_url, snapshot)
        });
        Some(snapshots.collect())
    }
}

/// Writes batches until the shutdown, or until all handles are dropped.
async fn write(
    shared: Arc<Shared>,
    mut batches: mpsc::Receiver<Batch>,
    shutdown: CancellationToken,
) {
    let volume = shared.config.volume.clone();
    // A disk that hangs must not delay the start of the agent.
    let prepared = spawn_blocking(move || volume.prepare(Content::Configuration));
    if !prepared.await.unwrap_or_default() {
        batches.close();
        return shutdown.cancelled().await;
    }
    let mut writer = Writer::new(shared);
    loop {
        let due = OptionFuture::from(writer.due().map(sleep_until));
        let batch = tokio::select! {
            () = shutdown.cancelled(), if !batches.is_closed() => {
                batches.close();
                continue;
            }
            batch = batches.recv() => batch,
            Some(()) = due => Some(Batch::default()),
        };
        let is_last = batch.is_none();
        // A disk that hangs delays this thread only.
        let written = spawn_blocking(move || {
            writer.apply_batch(batch.unwrap_or_default());
            if is_last || writer.due().is_some_and(|due| due <= Instant::now()) {
                writer.write(is_last);
            }
            writer
        });
        writer = match written.await {
            Ok(writer) if !is_last => writer,
            _ => return,
        };
    }
}

impl EnvoyCache {
    /// Returns how long Envoy waits for istiod's first response before it is served; None if it is no longer served.
    pub(super) fn max_wait_for_istiod(&self) -> Option<Duration> {
        let no_longer_served = &self.generation.no_longer_served;
        let is_served = !no_longer_served.load(Ordering::Relaxed);
        is_served.then(|| self.store.shared.config.after.max(MIN_WAIT))
    }

    /// Returns true if the writer has found all needed types. Their files are verified when they are served.
    pub(super) fn can_be_served(&self) -> bool {
        let types = self.store.shared.types.lock();
        NEEDED.iter().all(|it| types.contains_key(it))
    }
}

#[cfg(test)]
mod tests;
