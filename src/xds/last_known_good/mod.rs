//! Keeps the last known good configuration on disk, that is what Envoy has accepted, and answers a new
//! Envoy from it while istiod is unreachable.
//!
//! A [`Recorder`] beside each delta stream hands what passes to the [`writer`], which keeps it in a
//! [`file`] for each type. A response is written a few seconds after Envoy has accepted it, or the agent, if the
//! agent consumes its type. A failure deletes all files, and recording starts again with the next stream.
//! [`replay`] answers requests in istiod's place, and [`after_nack`] sends stored versions of resources that a
//! new Envoy has refused. Secrets and responses of SotW are never stored.

pub(crate) mod after_nack;
mod file;
mod recorder;
pub(super) mod replay;
mod writer;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use futures_util::future::OptionFuture;
use parking_lot::Mutex;
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::clock::rfc3339;
use crate::envoy::admin::Admin;
use crate::metrics::{Counter, Kind, Registry};
pub use after_nack::StoredResource;
use file::Header;
pub(super) use recorder::Recorder;
use writer::{Batch, Writer};

use super::Protocol;
use super::stream::LISTENER;
use crate::volume::{Content, Volume};

/// The directory below the configured one.
const DIRECTORY: &str = Content::Configuration.directory();

/// The types that are kept. What follows the last dot is the name of the file.
const TYPES: [Type; 8] = [
    CLUSTER,
    ENDPOINTS,
    LISTENER,
    ROUTES,
    EXTENSION,
    "type.googleapis.com/istio.mesh.v1alpha1.ProxyConfig",
    "type.googleapis.com/istio.networking.nds.v1.NameTable",
    "type.googleapis.com/istio.workload.Workload",
];

/// One of [`TYPES`].
type Type = &'static str;

const CLUSTER: Type = "type.googleapis.com/envoy.config.cluster.v3.Cluster";
const ENDPOINTS: Type = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment";
const ROUTES: Type = "type.googleapis.com/envoy.config.route.v3.RouteConfiguration";
/// Envoy asks for resources of these types by their names.
const BY_NAME: [Type; 3] = [ENDPOINTS, ROUTES, EXTENSION];
/// Envoy asks for all resources of these types, and serves nothing without them.
const NEEDED: [Type; 2] = [CLUSTER, LISTENER];
/// Until it is seen again whether anything is kept.
const MIN_PATIENCE: Duration = Duration::from_millis(100);

/// As it came it may hold pull secrets of Wasm modules.
const EXTENSION: Type = "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig";

/// Batches that wait for the writer. Each has about [`recorder::HANDOVER`] bytes, and messages that the
/// agent consumes.
const MAX_BATCHES: usize = 4;

/// Where configuration is kept, and when it is served.
#[derive(Clone, Debug)]
pub struct Config {
    pub volume: Volume,
    /// What needs more is not kept.
    pub max_bytes: u64,
    /// Older configuration is not served.
    pub max_age: Duration,
    /// How long a new Envoy waits for istiod before it is served what is kept.
    pub after: Duration,
    /// Whether a new Envoy that refuses resources of istiod is sent the stored versions of these.
    pub on_nack: bool,
}

/// A handle to what is kept.
#[derive(Clone, Debug)]
pub struct LastKnownGood {
    shared: Arc<Shared>,
    batches: mpsc::Sender<Batch>,
}

/// How many were before it, and whether it is to be served no more.
type Envoy = (usize, Arc<AtomicBool>);

/// What streams, their threads and the writer share.
#[derive(Debug)]
struct Shared {
    config: Config,
    /// Envoy's admin port, if Envoy gets stored versions of resources that it refuses.
    admin: Option<Admin>,
    /// Resources of which Envoy has the stored version, because it refused istiod's.
    after_nack: Mutex<BTreeMap<Type, Vec<StoredResource>>>,
    /// What is kept.
    types: Mutex<BTreeMap<Type, Header>>,
    /// By the ids of their processes.
    envoys: Mutex<BTreeMap<i32, Envoy>>,
    /// Whether a recorder has found the writer too slow, until the writer goes on.
    is_stalled: AtomicBool,
    failures: Counter,
    served: Counter,
}

/// An Envoy that may be served what is kept.
#[derive(Clone, Debug)]
pub(crate) struct EnvoyCache {
    kept: LastKnownGood,
    /// Larger if it was started later.
    generation: usize,
    /// Whether it has answered listeners, or nothing usable is kept.
    is_over: Arc<AtomicBool>,
}

/// What is kept of a type.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KeptSnapshot {
    pub version: String,
    pub bytes: u64,
    /// When the stream to istiod was last known to be open.
    pub at: String,
}

impl LastKnownGood {
    /// A handle, and the writing, which ends at the shutdown or when all handles are gone, once all is written.
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
                "Streams that could not be kept, and kept configuration that could not be served",
            ),
            served: registry.counter(
                "istio_agent_xds_kept_served_total",
                "Streams of Envoy that were served from the kept configuration",
            ),
        });
        type Value = fn(&Header) -> u64;
        let families: [(_, _, Value); 2] = [
            (
                "istio_agent_xds_kept_bytes",
                "Bytes of discovery responses kept for an Envoy that istiod does not answer",
                |header| header.length,
            ),
            (
                "istio_agent_xds_kept_timestamp_seconds",
                "When the stream to istiod was last known to be open, as seconds of Unix time",
                |header| header.current,
            ),
        ];
        for (name, help, value) in families {
            let shared = shared.clone();
            registry.computed(name, help, Kind::Gauge, &["type"], move |series| {
                for (type_url, header) in shared.types.lock().iter() {
                    series(&[type_url], value(header) as f64);
                }
            });
        }
        let after_nack = shared.clone();
        registry.computed(
            "istio_agent_xds_kept_after_nack",
            "Resources that Envoy has in the stored version, as it has refused istiod's",
            Kind::Gauge,
            &["type"],
            move |series| {
                let after_nack = after_nack.after_nack.lock();
                for type_url in [CLUSTER, LISTENER].iter().chain(&BY_NAME) {
                    let resources = after_nack.get(type_url).map_or(0, Vec::len);
                    series(&[type_url], resources as f64);
                }
            },
        );
        let (batches, mut received) = mpsc::channel(MAX_BATCHES);
        let mut writer = Writer::new(shared.clone());
        let volume = shared.config.volume.clone();
        let writing = async move {
            // A disk that hangs must not delay the start.
            let prepared = spawn_blocking(move || volume.is_used(Content::Configuration));
            if !prepared.await.unwrap_or_default() {
                received.close();
                return shutdown.cancelled().await;
            }
            loop {
                let due = OptionFuture::from(writer.due().map(sleep_until));
                let batch = tokio::select! {
                    () = shutdown.cancelled(), if !received.is_closed() => {
                        received.close();
                        continue;
                    }
                    batch = received.recv() => batch,
                    Some(()) = due => Some(Batch::default()),
                };
                let is_last = batch.is_none();
                // A disk that hangs delays nothing but this thread.
                let written = spawn_blocking(move || {
                    writer.take(batch.unwrap_or_default());
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
        };
        (Self { shared, batches }, writing)
    }

    /// What is kept for the Envoy of this process. It is kept for delta only.
    pub(super) fn envoy_cache(&self, pid: i32, protocol: Protocol) -> Option<EnvoyCache> {
        if protocol == Protocol::Sotw {
            if !self.shared.config.volume.is_default {
                tracing::warn!(target: "xdsproxy", "ISTIO_AGENT_KEEP_CONFIG needs delta xDS: set ISTIO_DELTA_XDS=true");
            }
            return None;
        }
        let mut envoys = self.shared.envoys.lock();
        let new = (envoys.len(), Arc::default());
        let (generation, is_over) = envoys.entry(pid).or_insert(new).clone();
        Some(EnvoyCache {
            kept: self.clone(),
            generation,
            is_over,
        })
    }

    /// Returns the resources of which Envoy has the stored version, because it refused istiod's.
    pub(super) fn after_nack(&self) -> BTreeMap<String, Vec<StoredResource>> {
        let after_nack = self.shared.after_nack.lock();
        let owned = after_nack
            .iter()
            .map(|(type_url, it)| ((*type_url).to_owned(), it.clone()));
        owned.collect()
    }

    /// What is kept, by type URL; None if the directory is not used.
    pub(super) fn snapshot(&self) -> Option<BTreeMap<String, KeptSnapshot>> {
        if self.batches.is_closed() {
            return None;
        }
        let types = self.shared.types.lock();
        let snapshot = |(type_url, header): (&Type, &Header)| {
            let current = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(header.current));
            let snapshot = KeptSnapshot {
                version: header.version.clone(),
                bytes: header.length,
                at: rfc3339(current.unwrap_or(SystemTime::UNIX_EPOCH)),
            };
            ((*type_url).to_owned(), snapshot)
        };
        Some(types.iter().map(snapshot).collect())
    }
}

impl EnvoyCache {
    /// How long it waits for the first response of a stream before it is served what is kept, if it is.
    pub(super) fn patience(&self) -> Option<Duration> {
        let is_over = self.is_over.load(Ordering::Relaxed);
        (!is_over).then(|| self.kept.shared.config.after.max(MIN_PATIENCE))
    }

    /// Whether enough is known to be kept, which a thread finds out. What it is worth is seen when it is
    /// read.
    pub(super) fn can_be_served(&self) -> bool {
        let types = self.kept.shared.types.lock();
        NEEDED.iter().all(|it| types.contains_key(it))
    }
}

#[cfg(test)]
mod tests;
