//! Keeps modules on disk, and which of them a URL led to.
//!
//! A module is used again after its digest was checked: once after a restart, and whenever its file
//! has changed since. Unused ones are removed when they expire, and the ones unused longest where all
//! together are over the limit; one that a resource uses is not.

mod disk;

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde::Serialize;
use tokio::time::Instant;

use crate::metrics::{Counters, Gauge, Registry};
use crate::wasm::fetch::Download;
pub(crate) use disk::Key;
use disk::{Record, Stamp, sha256_of};

#[derive(Debug)]
pub(super) struct Cache {
    directory: PathBuf,
    max_bytes: u64,
    state: Mutex<State>,
    entries: Gauge,
    lookups: Counters<1>,
}

#[derive(Debug, Default)]
struct State {
    modules: BTreeMap<Key, Module>,
    /// By the SHA-256 of a URL: the module it led to last.
    urls: HashMap<String, Remembered>,
    /// By name of a resource: the module it uses.
    used: HashMap<String, Key>,
}

#[derive(Debug)]
struct Module {
    record: Record,
    size: u64,
    last_used: Instant,
    /// None until the digest has been checked.
    stamp: Option<Stamp>,
}

#[derive(Debug)]
struct Remembered {
    key: Key,
    /// By name of a resource: the version it had.
    versions: HashMap<String, String>,
}

/// A module, as the debug page shows it.
#[derive(Clone, Debug, Serialize)]
pub struct CachedModule {
    pub url: String,
    pub checksum: String,
    pub sha256: String,
    pub size_bytes: u64,
    pub unused_seconds: f64,
    /// The resources that use it.
    pub resources: Vec<String>,
}

impl Cache {
    /// Takes over what an earlier agent left in `directory`.
    pub(super) fn new(directory: PathBuf, max_bytes: u64, registry: &Registry) -> Self {
        let found = disk::scan(&directory).unwrap_or_else(|error| {
            if error.kind() != io::ErrorKind::NotFound {
                let directory = directory.display();
                tracing::warn!(target: "wasm", "cannot read the Wasm modules in {directory}: {error}");
            }
            Vec::new()
        });
        let mut state = State::default();
        for (key, record, size) in found {
            for url in &record.urls {
                let versions = HashMap::new();
                let key = key.clone();
                state.urls.insert(url.clone(), Remembered { key, versions });
            }
            let (last_used, stamp) = (Instant::now(), None);
            let module = Module {
                record,
                size,
                last_used,
                stamp,
            };
            state.modules.insert(key, module);
        }
        Self {
            directory,
            max_bytes,
            state: Mutex::new(state),
            entries: registry.gauge(
                "istio_agent_wasm_cache_entries",
                "number of Wasm remote fetch cache entries.",
            ),
            lookups: registry.counters(
                "istio_agent_wasm_cache_lookup_count",
                "number of Wasm remote fetch cache lookups.",
                &["hit"],
            ),
        }
    }

    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// The module a URL led to last, if it still stands for this version of the resource.
    pub(super) fn remembered(
        &self,
        url: &str,
        resource: &str,
        version: &str,
        ignores_version: bool,
    ) -> Option<Key> {
        let mut state = self.state.lock();
        let remembered = state.urls.get_mut(&sha256_of(url))?;
        let before = remembered
            .versions
            .insert(resource.to_owned(), version.to_owned());
        let is_same = before.is_some_and(|before| before == version);
        (ignores_version || is_same).then(|| remembered.key.clone())
    }

    /// The module's file, if it is there and its content is right. From now on `resource` uses it.
    pub(super) async fn find(self: &Arc<Self>, key: &Key, resource: &str) -> Option<PathBuf> {
        let (cache, key, resource) = (self.clone(), key.clone(), resource.to_owned());
        // A file is read whole where its digest has to be checked.
        let found = tokio::task::spawn_blocking(move || cache.find_now(&key, resource)).await;
        let found = found.ok().flatten();
        self.count(found.is_some());
        found
    }

    fn count(&self, is_hit: bool) {
        self.lookups
            .with([if is_hit { "true" } else { "false" }])
            .inc();
    }

    fn find_now(&self, key: &Key, resource: String) -> Option<PathBuf> {
        // Before the check, so that the module is not removed meanwhile.
        self.state.lock().used.insert(resource, key.clone());
        self.checked(key)
    }

    /// The file of a module if its content is right; otherwise it is removed.
    fn checked(&self, key: &Key) -> Option<PathBuf> {
        let path = key.path(&self.directory);
        let (known, sha256) = {
            let mut state = self.state.lock();
            let module = state.modules.get_mut(key)?;
            module.last_used = Instant::now();
            (module.stamp, module.record.sha256.clone())
        };
        let checked = disk::check(&path, known, &sha256);
        let mut state = self.state.lock();
        if let Ok(Some(stamp)) = checked {
            state.modules.get_mut(key)?.stamp = Some(stamp);
            return Some(path);
        }
        let problem =
            checked.map_or_else(|error| error.to_string(), |_| "it was changed".to_owned());
        let path = path.display();
        tracing::warn!(target: "wasm", "the Wasm module {path} is not usable, fetching it again: {problem}");
        self.remove(&mut state, key);
        None
    }

    /// Takes a download into the cache.
    pub(super) async fn store(
        self: &Arc<Self>,
        key: &Key,
        url: String,
        download: Download,
    ) -> Result<(), String> {
        let (cache, key) = (self.clone(), key.clone());
        let stored = tokio::task::spawn_blocking(move || cache.store_now(key, url, download)).await;
        stored.map_err(|error| error.to_string())?.map_err(|error| {
            let directory = self.directory.display();
            format!("cannot keep the module in {directory}: {error}")
        })
    }

    fn store_now(&self, key: Key, url: String, download: Download) -> io::Result<()> {
        let (sha256, size) = (download.sha256.clone(), download.size);
        let urls = Vec::new();
        let record = Record { sha256, url, urls };
        let stamp = Some(disk::store(&self.directory, &key, download, &record)?);
        let mut state = self.state.lock();
        let last_used = Instant::now();
        let module = Module {
            record,
            size,
            last_used,
            stamp,
        };
        state.modules.insert(key.clone(), module);
        self.make_room(&mut state, &key);
        self.entries.set(state.modules.len() as f64);
        Ok(())
    }

    /// Whether a module is there.
    pub(super) async fn has(self: &Arc<Self>, key: &Key) -> bool {
        let (cache, key) = (self.clone(), key.clone());
        let checking = tokio::task::spawn_blocking(move || cache.checked(&key).is_some());
        let found = checking.await.unwrap_or_default();
        self.count(found);
        found
    }

    /// Makes the directory that modules are downloaded to.
    pub(super) fn prepare(&self) -> Result<(), String> {
        let mut builder = fs::DirBuilder::new();
        let made = builder.recursive(true).mode(0o755).create(&self.directory);
        made.map_err(|error| format!("cannot create {}: {error}", self.directory.display()))
    }

    /// Remembers that a URL leads to a module, for this version of the resource.
    pub(super) async fn remember(
        self: &Arc<Self>,
        url: &str,
        key: &Key,
        resource: &str,
        version: &str,
    ) {
        let (cache, url, key) = (self.clone(), sha256_of(url), key.clone());
        let (resource, version) = (resource.to_owned(), version.to_owned());
        let remembering = move || cache.remember_now(url, &key, resource, version);
        // Without its end, the module is fetched again after a restart.
        let _ = tokio::task::spawn_blocking(remembering).await;
    }

    fn remember_now(&self, url: String, key: &Key, resource: String, version: String) {
        let mut state = self.state.lock();
        let before = state.urls.remove(&url);
        let is_same = before.as_ref().is_some_and(|before| before.key == *key);
        let mut remembered = before.filter(|_| is_same).unwrap_or_else(|| Remembered {
            key: key.clone(),
            versions: HashMap::new(),
        });
        remembered.versions.insert(resource, version);
        state.urls.insert(url.clone(), remembered);
        if is_same {
            return;
        }
        for (other, module) in &mut state.modules {
            let had = module.record.urls.len();
            module.record.urls.retain(|known| *known != url);
            if other == key {
                module.record.urls.push(url.clone());
            } else if module.record.urls.len() == had {
                continue;
            }
            if let Err(error) = disk::write_record(&self.directory, other, &module.record) {
                tracing::warn!(target: "wasm", "a Wasm module will be fetched again after a restart: {error}");
            }
        }
    }

    /// Ends the use of a module by a resource.
    pub(super) fn release(&self, resource: &str) {
        self.state.lock().used.remove(resource);
    }

    /// Removes modules not used for longer than `expiry`.
    pub(super) async fn purge(self: Arc<Self>, expiry: Duration) {
        // The next purge removes what this one did not.
        let _ = tokio::task::spawn_blocking(move || self.purge_now(expiry)).await;
    }

    fn purge_now(&self, expiry: Duration) {
        let mut state = self.state.lock();
        let expired = state
            .modules
            .iter()
            .filter(|(key, module)| module.last_used.elapsed() > expiry && !state.is_used(key));
        let expired: Vec<_> = expired.map(|(key, _)| key.clone()).collect();
        for key in expired {
            self.remove(&mut state, &key);
        }
        self.entries.set(state.modules.len() as f64);
    }

    /// Removes those unused longest until the rest is within the limit. `newest` stays.
    fn make_room(&self, state: &mut State, newest: &Key) {
        loop {
            let total: u64 = state.modules.values().map(|module| module.size).sum();
            let unused = state
                .modules
                .iter()
                .filter(|(key, _)| *key != newest && !state.is_used(key));
            let oldest = unused.min_by_key(|(_, module)| module.last_used);
            match oldest.map(|(key, _)| key.clone()) {
                Some(key) if total > self.max_bytes => {
                    if !self.remove(state, &key) {
                        return;
                    }
                }
                _ => return,
            }
        }
    }

    /// Removes a module and forgets which URLs led there. False if its file cannot be removed.
    fn remove(&self, state: &mut State, key: &Key) -> bool {
        let path = key.path(&self.directory);
        let path = path.display();
        if let Err(error) = disk::remove(&self.directory, key) {
            tracing::error!(target: "wasm", "failed to purge Wasm module {path}: {error}");
            return false;
        }
        tracing::debug!(target: "wasm", "successfully removed stale Wasm module {path}");
        state.modules.remove(key);
        state.urls.retain(|_, remembered| remembered.key != *key);
        true
    }

    pub(super) fn snapshot(&self) -> Vec<CachedModule> {
        let state = self.state.lock();
        let modules = state.modules.iter().map(|(key, module)| {
            let users = state.used.iter().filter(|(_, used)| *used == key);
            let mut resources: Vec<_> = users.map(|(resource, _)| resource.clone()).collect();
            resources.sort();
            CachedModule {
                url: module.record.url.clone(),
                checksum: key.checksum.clone(),
                sha256: module.record.sha256.clone(),
                size_bytes: module.size,
                unused_seconds: module.last_used.elapsed().as_secs_f64(),
                resources,
            }
        });
        modules.collect()
    }
}

impl State {
    fn is_used(&self, key: &Key) -> bool {
        self.used.values().any(|used| used == key)
    }
}
