//! Follows what istiod has sent and what each Envoy has accepted (the ledger), stores it on disk, and serves it to a new
//! Envoy while istiod is unreachable: the last known good configuration.
//!
//! A [`store`] has, for each type and name, the version that an Envoy of this agent has accepted last. A [`view`] follows
//! one Envoy process. The [`Recorder`] of a delta stream feeds both while bytes pass; nothing waits for the disk. A task
//! writes changes to the [`file`] every few seconds, only at a moment at which Envoy has what istiod has sent. [`replay`]
//! answers requests in place of istiod, and [`rejected`] sends stored versions of resources that a new Envoy has rejected.
//! Secrets and responses of SotW are never stored.

mod file;
mod recorder;
pub(crate) mod rejected;
pub(super) mod replay;
mod state;
mod store;
mod view;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::future::OptionFuture;
use parking_lot::{Mutex, MutexGuard};
use serde::Serialize;
use tokio::sync::Notify;
use tokio::task::{spawn_blocking, yield_now};
use tokio::time::sleep_until;
use tokio_util::sync::CancellationToken;

use super::on_demand::OnDemandSnapshot;
use super::{CLUSTER, ENDPOINTS, EXTENSION, LISTENER, Protocol, ROUTES, WORKLOAD};
use crate::envoy::admin::Admin;
use crate::files::directory::Directory;
use crate::files::regular_file::{self, MAX_SETTINGS};
use crate::files::volume::{Content, Volume};
use crate::metrics::{Counter, Kind, Registry};
use crate::runtime::clock::rfc3339;
pub(super) use recorder::Recorder;
pub use rejected::StoredResource;
pub(super) use state::State;
pub(super) use view::{Field, Response};

/// The directory below the configured one, and the file in it.
const DIRECTORY: &str = Content::Configuration.directory();
const FILE: &str = "configuration";

/// A type of resources that are stored.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(super) struct Type(&'static str);

impl Type {
    pub(super) const CLUSTER: Self = Self(CLUSTER);
    pub(super) const LISTENER: Self = Self(LISTENER);
    pub(super) const ENDPOINTS: Self = Self(ENDPOINTS);
    const ROUTES: Self = Self(ROUTES);
    /// Before the agent rewrites resources of this type, they may hold pull secrets of Wasm modules.
    const EXTENSION: Self = Self(EXTENSION);

    /// Returns the type of this URL if it is stored. Secrets are not.
    fn of(url: &str) -> Option<Self> {
        TYPES.into_iter().find(|it| it.0 == url)
    }

    fn url(self) -> &'static str {
        self.0
    }

    /// Returns the last part of the URL.
    fn name(self) -> &'static str {
        self.0.rsplit('.').next().unwrap_or(self.0)
    }
}

/// The types that are stored. The file refers to them by their places in this list.
const TYPES: [Type; 8] = [
    Type::CLUSTER,
    Type::ENDPOINTS,
    Type::LISTENER,
    Type::ROUTES,
    Type::EXTENSION,
    Type("type.googleapis.com/istio.mesh.v1alpha1.ProxyConfig"),
    Type("type.googleapis.com/istio.networking.nds.v1.NameTable"),
    Type(WORKLOAD),
];
/// Envoy asks for resources of these types by their names.
const BY_NAME: [Type; 3] = [Type::ENDPOINTS, Type::ROUTES, Type::EXTENSION];
/// Envoy asks for all resources of these types, and serves nothing without them.
const NEEDED: [Type; 2] = [Type::CLUSTER, Type::LISTENER];

/// The shortest time after which an Envoy is served. It limits how often the ledger is checked.
const MIN_WAIT: Duration = Duration::from_millis(100);

const OTHER_NODE: &str = "it is stored for another node";

/// Settings of the ledger.
#[derive(Clone, Debug)]
pub struct Config {
    /// The directory of the file. If None, nothing is stored, and the ledger is in memory only.
    pub volume: Option<Volume>,
    /// The directory of the container that has served last, if it is another one. Its configuration is read, if there is
    /// any, in place of this container's.
    pub former: Option<PathBuf>,
    /// The name of this container's directory in a volume that two containers share.
    pub own: Option<String>,
    /// The most bytes of compressed configuration and its index. Configuration that needs more is not stored.
    pub max_bytes: u64,
    /// Older configuration is not served.
    pub max_age: Duration,
    /// The time that a new Envoy waits for istiod before it is served.
    pub after: Duration,
    /// True if a new Envoy that rejects resources of istiod gets their stored versions.
    pub on_nack: bool,
    /// True if Envoy gets clusters on demand. The ledger is used then, even if nothing can be stored.
    pub on_demand: bool,
}

impl Config {
    /// Makes `own` the directory of stored configuration, and reads the configuration in the directory `former`. Both are
    /// directories of the volume. The task that writes creates `own`, because a volume may hang.
    pub fn continue_in(&mut self, own: &str, former: Option<String>) {
        let Some(volume) = &mut self.volume else { return };
        self.former = former.map(|former| volume.directory.join(former));
        volume.directory.push(own);
        self.own = Some(own.to_owned());
    }

    /// Creates the directory of this container in the volume, and prepares the directory of the file. Logs a failure.
    /// Returns true if configuration is to be stored. May block.
    fn prepare(&self) -> bool {
        let Some(volume) = &self.volume else { return false };
        if let (Some(own), Some(parent)) = (&self.own, volume.directory.parent())
            && let Err(error) = Directory::private(parent, own, true)
        {
            let path = volume.directory.display();
            tracing::warn!("cannot create the directory of stored configuration: {path}: {error}");
        }
        volume.prepare(Content::Configuration)
    }
}

/// A handle to the ledger.
#[derive(Clone, Debug)]
pub struct Ledger(Arc<Shared>);

/// The state that streams and the task that writes share.
#[derive(Debug)]
struct Shared {
    config: Config,
    admin: Option<Admin>,
    state: Mutex<State>,
    /// Wakes the task that writes after the first change.
    changed: Notify,
    failures: Counter,
    served: Counter,
}

/// The ledger as one Envoy process may use it.
#[derive(Clone, Debug)]
pub(crate) struct EnvoyCache {
    ledger: Ledger,
    pid: i32,
}

/// The stored configuration of a type.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StoredSnapshot {
    pub version: String,
    /// The bytes in the file, compressed.
    pub bytes: u64,
    /// The last time at which the stream to istiod was known to be open.
    pub at: String,
}

impl Shared {
    /// Registers the metrics of the stored configuration.
    fn register(self: &Arc<Self>, registry: &Registry) {
        type Value = fn(&state::Written) -> f64;
        let families: [(_, _, Value); 2] = [
            (
                "istio_agent_xds_kept_bytes",
                "Compressed bytes of stored configuration, for an Envoy that starts while istiod is unreachable",
                |written| written.bytes as f64,
            ),
            (
                "istio_agent_xds_kept_timestamp_seconds",
                "The last time at which the stream to istiod was open, in seconds of Unix time",
                |written| written.current as f64,
            ),
        ];
        for (name, help, value) in families {
            let shared = self.clone();
            registry.computed(name, help, Kind::Gauge, &["type"], move |series| {
                for (type_of, written) in &shared.state.lock().written {
                    series(&[type_of.url()], value(written));
                }
            });
        }
        let shared = self.clone();
        registry.computed(
            "istio_agent_on_demand_clusters",
            "Clusters of an Envoy that gets them on demand, by state",
            Kind::Gauge,
            &["state"],
            move |series| {
                let states =
                    shared.state.lock().catalog.snapshot.as_ref().map(OnDemandSnapshot::by_state);
                for (name, count) in states.iter().flatten() {
                    series(&[name], *count as f64);
                }
            },
        );
        let shared = self.clone();
        registry.computed(
            "istio_agent_xds_kept_after_nack",
            "Resources of which Envoy has the stored version, because it has refused istiod's",
            Kind::Gauge,
            &["type"],
            move |series| {
                let state = shared.state.lock();
                for type_of in NEEDED.iter().chain(&BY_NAME) {
                    let resources = state.after_nack.get(type_of).map_or(0, Vec::len);
                    series(&[type_of.url()], resources as f64);
                }
            },
        );
    }

    /// Adds the path of the file to an error.
    fn with_path(&self, error: impl std::fmt::Display) -> io::Error {
        let directory = self.config.volume.as_ref().map(|it| it.directory.join(DIRECTORY));
        let path = directory.unwrap_or_default().join(FILE);
        io::Error::other(format!("{}: {error}", path.display()))
    }
}

impl Ledger {
    /// Returns a handle and the future that reads and writes the file. The future ends at the shutdown, after it has
    /// written all changes.
    ///
    /// `admin` is Envoy's admin port. It is asked if Envoy rejects some resources without naming them.
    pub fn new(
        config: Config,
        admin: Option<Admin>,
        registry: &Registry,
        shutdown: CancellationToken,
    ) -> (Self, impl Future<Output = ()> + Send + use<>) {
        let shared = Arc::new(Shared {
            state: Mutex::new(State::new(config.max_bytes, config.on_nack, config.on_demand)),
            config,
            admin,
            changed: Notify::new(),
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
        (Self(shared.clone()), write(shared, shutdown))
    }

    /// Notes the clusters that a bootstrap names, which Envoy does not discover on demand. May block.
    pub(crate) fn note_bootstrap(&self, path: &Path) {
        if self.0.config.on_demand
            // Envoy says what is wrong with the file.
            && let Ok(bootstrap) = regular_file::read(path, MAX_SETTINGS)
        {
            self.0.state.lock().catalog.add_mentions_in(&bootstrap);
        }
    }

    /// Returns the ledger for the Envoy of this process. Only delta streams can use it.
    pub(super) fn envoy_cache(&self, pid: i32, protocol: Protocol) -> Option<EnvoyCache> {
        if protocol == Protocol::Sotw {
            if self.0.config.volume.as_ref().is_some_and(|it| !it.is_default) {
                tracing::warn!(target: "xdsproxy", "ISTIO_AGENT_KEEP_CONFIG needs delta xDS: set ISTIO_DELTA_XDS=true");
            }
            return None;
        }
        self.0.state.lock().add_view(pid);
        Some(EnvoyCache { ledger: self.clone(), pid })
    }

    /// Returns the resources of which Envoy has the stored version, because it rejected istiod's.
    pub(super) fn after_nack(&self) -> BTreeMap<&'static str, Vec<StoredResource>> {
        let state = self.0.state.lock();
        state.after_nack.iter().map(|(type_of, it)| (type_of.url(), it.clone())).collect()
    }

    /// Returns the first names of the resources in the last NACK of each type, by type URL.
    pub(super) fn rejected(&self) -> BTreeMap<&'static str, Vec<String>> {
        let state = self.0.state.lock();
        state.rejected.iter().map(|(type_of, names)| (type_of.url(), names.clone())).collect()
    }

    /// Describes the clusters of the newest Envoy. Returns None unless it gets clusters on demand.
    pub(super) fn on_demand(&self) -> Option<OnDemandSnapshot> {
        self.0.state.lock().catalog.snapshot.clone()
    }

    /// Returns the number of resources that the newest Envoy has, by type URL. Empty if the ledger is not used.
    pub(super) fn accepted(&self) -> BTreeMap<&'static str, usize> {
        self.0.state.lock().accepted()
    }

    /// Returns the error of the last write; None after a success.
    pub(super) fn write_failure(&self) -> Option<String> {
        self.0.state.lock().write_failure.clone()
    }

    /// Describes the stored configuration, by type URL. Returns None if the directory is not used.
    pub(super) fn snapshot(&self) -> Option<BTreeMap<&'static str, StoredSnapshot>> {
        let state = self.0.state.lock();
        let snapshots = state.written.iter().map(|(type_of, written)| {
            let snapshot = StoredSnapshot {
                version: written.version.clone(),
                bytes: written.bytes,
                at: unix_rfc3339(written.current),
            };
            (type_of.url(), snapshot)
        });
        state.is_on.then(|| snapshots.collect())
    }
}

/// Reads the file, and writes changes until the shutdown.
async fn write(shared: Arc<Shared>, shutdown: CancellationToken) {
    let config = shared.config.clone();
    // A disk that hangs must not delay the start of the agent.
    let prepared = spawn_blocking(move || config.prepare());
    let is_used = tokio::select! {
        prepared = prepared => prepared.unwrap_or_default(),
        () = shutdown.cancelled() => return,
    };
    if !is_used {
        shared.state.lock().turn_off();
        if !shared.config.on_demand {
            return shutdown.cancelled().await;
        }
    }
    let reading = spawn_blocking({
        let shared = shared.clone();
        move || read(&shared)
    });
    tokio::select! {
        found = reading => {
            if let Some((store, record)) = found.unwrap_or_default() {
                shared.state.lock().install(store, record);
            }
        }
        () = shutdown.cancelled() => return,
    }
    let volume = shared.config.volume.as_ref();
    let mut writer = volume.map(|it| file::Writer::new(it.directory.clone()));
    loop {
        let due = OptionFuture::from(shared.state.lock().write_due().map(sleep_until));
        let is_last = tokio::select! {
            () = shutdown.cancelled() => true,
            () = shared.changed.notified() => continue,
            Some(()) = due => false,
        };
        while shared.state.lock().compact() {
            yield_now().await;
        }
        let (batch, is_removed) = {
            let mut state = shared.state.lock();
            (state.take_batch(is_last), state.take_removal())
        };
        if let Some(mut taken) = writer.take_if(|_| batch.is_some() || is_removed) {
            // A disk that hangs delays this task only.
            let written = spawn_blocking(move || {
                if is_removed {
                    taken.remove();
                }
                let written =
                    batch.map(|batch| taken.write(&batch).map(|length| (batch.record, length)));
                (taken, written)
            });
            let Ok((returned, written)) = written.await else { return };
            writer = Some(returned);
            if let Some(error) = written.and_then(|written| shared.state.lock().conclude(written)) {
                shared.failures.inc();
                let error = shared.with_path(error);
                tracing::error!(
                    target: "xdsproxy",
                    "cannot store configuration in {error}; an Envoy that starts while istiod is unreachable will get none"
                );
            }
        }
        if is_last {
            return;
        }
    }
}

/// Reads the file of the container that has served last, or of this one. Logs an error.
fn read(shared: &Shared) -> Option<(store::Store, file::Record)> {
    let Config { volume, former, max_bytes, .. } = &shared.config;
    for directory in former.iter().chain(volume.as_ref().map(|it| &it.directory)) {
        // A file grows to twice its size before it is replaced.
        match file::read(directory, max_bytes.saturating_mul(3)) {
            Ok(None) => {}
            Ok(found) => return found,
            Err(error) => {
                shared.failures.inc();
                let path = directory.join(DIRECTORY).join(FILE);
                tracing::error!(target: "xdsproxy", "stored configuration is not used: {}: {error}", path.display());
                return None;
            }
        }
    }
    None
}

impl EnvoyCache {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.ledger.0.state.lock()
    }

    /// Returns the id of Envoy's process.
    pub(super) fn pid(&self) -> i32 {
        self.pid
    }

    /// Returns true if Envoy gets clusters on demand.
    pub(super) fn is_on_demand(&self) -> bool {
        self.ledger.0.config.on_demand && !self.lock().view(self.pid).gets_all_clusters
    }

    /// Returns how long Envoy waits for istiod's first response before it is served; None if it is no longer served.
    pub(super) fn max_wait_for_istiod(&self) -> Option<Duration> {
        if self.lock().view(self.pid).no_longer_served {
            return None;
        }
        Some(self.ledger.0.config.after.max(MIN_WAIT))
    }

    /// Returns true if resources of all needed types are stored.
    pub(super) fn can_be_served(&self) -> bool {
        self.lock().can_serve()
    }
}

/// Returns the seconds of Unix time, at least 0.
fn unix_now() -> u64 {
    SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs()
}

/// Formats seconds of Unix time. The epoch stands for a time out of range.
fn unix_rfc3339(seconds: u64) -> String {
    let time = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds));
    rfc3339(time.unwrap_or(SystemTime::UNIX_EPOCH))
}

#[cfg(test)]
mod tests;
