//! Takes modules from the cache, or has them fetched.
//!
//! A module is fetched once however many resources ask for it, and [`MAX_FETCHES`] are fetched at a
//! time. A fetch goes on when those who asked for it are gone. A failed one is tried again after a
//! wait that grows; until then, those who ask get its error.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use indexmap::IndexMap;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::{self, Semaphore, watch};
use tokio::time::{Instant, timeout};

use super::Config;
use super::cache::{Cache, Module};
use super::fetch::{Error, RESULTS};
use super::request::Request;
use crate::backoff::Backoff;
use crate::clock::after;
use crate::duration::rounded;
use crate::executor::Executor;
use crate::metrics::{Counters, Gauge, Histogram, Registry};
use crate::problem::{Problem, codes};

const MAX_FETCHES: usize = 4;
/// Waits after failed fetches are drawn from zero to 2 s, 4 s, … 5 min, but last at least a second.
const FIRST_WAIT: Duration = Duration::from_secs(2);
const MAX_WAIT: Duration = Duration::from_secs(300);
const MIN_WAIT: Duration = Duration::from_secs(1);
/// The time the disk has to find a module, or take one in.
const DISK_LIMIT: Duration = Duration::from_secs(30);

/// Delta does not always say which resources are gone. Those converted last are remembered.
pub(super) const MAX_RESOURCES: usize = 1000;

/// What came of the module that a resource asked for last. It holds no secret.
#[derive(Debug)]
struct Resource {
    /// [`Request::id`].
    request: u64,
    url: String,
    since: Instant,
    result: Result<Module, Failure>,
}

/// Why a resource is without its module.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    pub(super) error: Error,
    /// When to ask again.
    pub(super) retry_at: Instant,
    backoff: Backoff,
}

/// The modules of all resources.
#[derive(Debug)]
pub(super) struct Modules {
    pub(super) config: Config,
    /// Locked during work on disk, so that a disk that hangs holds up one thread.
    pub(super) cache: Arc<sync::Mutex<Cache>>,
    executor: Executor,
    slots: Semaphore,
    /// By name, the one converted last at the end.
    resources: Mutex<IndexMap<String, Resource>>,
    /// By [`Request::fetch_id`], with its URL. A fetch has ended when its channel is closed.
    fetches: Mutex<HashMap<u64, (String, Fetching)>>,
    pub(super) metrics: Metrics,
    /// Filters that stand in for missing modules, by name: whether requests pass, and why.
    pub(super) replaced: Mutex<BTreeMap<String, (bool, Problem)>>,
}

type Fetched = Result<(), Error>;
type Fetching = watch::Receiver<Option<Fetched>>;

impl Modules {
    pub(super) fn new(config: Config, executor: Executor, metrics: Metrics) -> Self {
        let cache = Cache::new(config.directory.clone());
        Self {
            config,
            cache: Arc::new(sync::Mutex::new(cache)),
            executor,
            slots: Semaphore::new(MAX_FETCHES),
            resources: Mutex::default(),
            fetches: Mutex::default(),
            metrics,
            replaced: Mutex::default(),
        }
    }

    /// Forgets all resources but those that `is_left` names. Modules that were used by others alone
    /// may be removed then.
    pub(super) fn retain(&self, is_left: impl Fn(&str) -> bool) {
        self.resources.lock().retain(|name, _| is_left(name));
        self.replaced.lock().retain(|name, _| is_left(name));
    }

    /// The file of the module that the resource `name` asks for.
    pub(super) async fn get(
        self: &Arc<Self>,
        name: &str,
        request: &Arc<Request>,
    ) -> Result<PathBuf, Failure> {
        let last = self.last(name, request);
        let known = match request.ignores_version || matches!(last, Some(Ok(_))) {
            true => self.find(name, request, request.key.clone()).await,
            false => Ok(None),
        };
        self.count_lookup(matches!(known, Ok(Some(_))));
        if let Ok(Some(module)) = known {
            return Ok(module.path);
        }
        let mut backoff = Backoff::new(FIRST_WAIT, MAX_WAIT);
        if let Some(Err(failure)) = last {
            if Instant::now() < failure.retry_at {
                return Err(failure);
            }
            backoff = failure.backoff;
        }
        let found = match self.fetched(name, request).await {
            Ok(()) => self.find(name, request, request.key.clone()).await,
            Err(error) => Err(error),
        };
        let gone = || (codes::WASM_CACHE, "the module vanished".to_owned());
        let found = found.and_then(|found| found.ok_or_else(gone));
        found.map(|module| module.path).map_err(|error| {
            let failure = Failure {
                error,
                retry_at: after(backoff.next_wait().max(MIN_WAIT)),
                backoff,
            };
            self.set(name, request, Err(failure.clone()));
            failure
        })
    }

    /// What came of the same request before.
    fn last(&self, name: &str, request: &Request) -> Option<Result<Module, Failure>> {
        let resources = self.resources.lock();
        let last = resources.get(name).filter(|it| it.request == request.id)?;
        Some(last.result.clone())
    }

    fn set(&self, name: &str, request: &Request, result: Result<Module, Failure>) {
        let mut resources = self.resources.lock();
        let last = resources.shift_remove(name);
        let last = last.filter(|last| last.result.as_ref().ok() == result.as_ref().ok());
        if resources.len() >= MAX_RESOURCES {
            resources.shift_remove_index(0);
        }
        let resource = Resource {
            request: request.id,
            url: request.source.redacted(),
            since: last.map_or_else(Instant::now, |last| last.since),
            result,
        };
        resources.insert(name.to_owned(), resource);
    }

    /// Looks a module up. The resource uses it from then on.
    async fn find(
        self: &Arc<Self>,
        name: &str,
        request: &Arc<Request>,
        key: String,
    ) -> Result<Option<Module>, Error> {
        let (name, request) = (name.to_owned(), request.clone());
        self.on_disk(move |modules, cache| {
            let Some(module) = cache.find(&key) else {
                return Ok(None);
            };
            if key != request.key {
                cache.link(&request.key, &module)?;
            }
            modules.set(&name, &request, Ok(module.clone()));
            Ok(Some(module))
        })
        .await
    }

    /// Joins the fetch of a module, or starts it.
    async fn fetched(self: &Arc<Self>, name: &str, request: &Arc<Request>) -> Fetched {
        let mut result = self.join(name, request);
        let result = result.wait_for(Option::is_some).await;
        let fetched = result.ok().and_then(|fetched| fetched.clone());
        fetched.unwrap_or_else(|| Err((codes::WASM_DOWNLOAD_FAILED, "the agent stops".to_owned())))
    }

    fn join(self: &Arc<Self>, name: &str, request: &Arc<Request>) -> Fetching {
        let mut fetches = self.fetches.lock();
        fetches.retain(|_, (_, result)| result.has_changed().is_ok());
        if let Some((_, result)) = fetches.get(&request.fetch_id) {
            return result.clone();
        }
        let (done, result) = watch::channel(None);
        let url = request.source.redacted();
        fetches.insert(request.fetch_id, (url.clone(), result.clone()));
        let (modules, name, request) = (self.clone(), name.to_owned(), request.clone());
        self.executor.spawn(async move {
            // The semaphore is never closed.
            let _slot = modules.slots.acquire().await;
            let limit = request.time_limit;
            let fetched = timeout(limit, modules.fetch(&name, &request)).await;
            let fetched = fetched.unwrap_or_else(|_| {
                let limit = rounded(limit);
                let found = format!("{url} is not complete within {limit}");
                Err((codes::WASM_DOWNLOAD_FAILED, found))
            });
            if let Err((code, _)) = &fetched
                && let Some((_, result)) = RESULTS.iter().find(|(counted, _)| counted == code)
            {
                modules.metrics.fetches.with([result]).inc();
            }
            let _ = done.send(Some(fetched));
        });
        result
    }

    /// Brings a module into the cache.
    async fn fetch(self: &Arc<Self>, name: &str, request: &Arc<Request>) -> Fetched {
        let deadline = after(request.time_limit);
        self.on_disk(|_, cache| cache.prepare()).await?;
        let (directory, config) = (&self.config.directory, &self.config.fetch);
        let pinned = request.pinned.as_deref();
        let source = &request.source;
        let (found, download) = match &source.image {
            None => {
                let download = config.download(source, directory, deadline).await?;
                request.compare(std::slice::from_ref(&download.sha256))?;
                (download.sha256.clone(), download)
            }
            Some(reference) => {
                let secret = request.pull_secret.as_deref().map(String::as_str);
                let image = config.image(source, reference, secret, pinned, deadline);
                let image = image.await?;
                request.compare(&image.digests)?;
                let found = image.digests[0].clone();
                if pinned.is_none() {
                    let known = self.find(name, request, request.key_of(&found)).await?;
                    self.count_lookup(known.is_some());
                    if known.is_some() {
                        return Ok(());
                    }
                }
                (found, config.module(source, image, directory).await?)
            }
        };
        self.metrics.fetches.with(["success"]).inc();
        // That of an index, if the module was asked for by it.
        let by_digest = request.key_of(pinned.unwrap_or(&found));
        let key = request.key.clone();
        self.on_disk(move |modules, cache| {
            let module = cache.add(download, &[by_digest, key])?;
            modules.tidy_now(cache, Some(module.path));
            Ok(())
        })
        .await
    }

    /// Works on the cache on a thread of its own.
    async fn on_disk<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self, &Cache) -> io::Result<T> + Send + 'static,
    ) -> Result<T, Error> {
        let modules = self.clone();
        let working = async move {
            let cache = modules.cache.clone().lock_owned().await;
            let working = tokio::task::spawn_blocking(move || work(&modules, &cache));
            working.await.unwrap_or_else(|ended| Err(ended.into()))
        };
        let late = |_| Err(io::Error::from(io::ErrorKind::TimedOut));
        let done = timeout(DISK_LIMIT, working).await.unwrap_or_else(late);
        done.map_err(|error| {
            let directory = self.config.directory.display();
            let found = format!("cannot store modules in {directory}: {error}");
            (codes::WASM_CACHE, found)
        })
    }

    /// Removes modules that are not used any more.
    pub(super) async fn tidy(self: &Arc<Self>) {
        let tidying = self.on_disk(|modules, cache| {
            modules.tidy_now(cache, None);
            Ok(())
        });
        // The next time removes what this one did not.
        let _ = tidying.await;
    }

    fn tidy_now(&self, cache: &Cache, newest: Option<PathBuf>) {
        let mut used: HashSet<_> = newest.into_iter().collect();
        for resource in self.resources.lock().values() {
            used.extend(resource.result.iter().map(|module| module.path.clone()));
        }
        match cache.tidy(&used, self.config.expiry, self.config.max_cache_bytes) {
            Ok(left) => self.metrics.entries.set(left as f64),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                tracing::warn!(target: "wasm", "cannot remove old Wasm modules: {error}");
            }
        }
    }

    fn count_lookup(&self, is_hit: bool) {
        let hit = if is_hit { "true" } else { "false" };
        self.metrics.lookups.with([hit]).inc();
    }

    /// All resources, each with its module or without it and with an error, and the URLs of fetches under
    /// way.
    pub(super) fn snapshot(&self) -> Value {
        let fetches = self.fetches.lock();
        let running = fetches.values();
        let running = running.filter(|(_, result)| result.has_changed().is_ok());
        let fetching: Vec<_> = running.map(|(url, _)| url).collect();
        let resources = self.resources.lock();
        let resources = resources.iter().map(|(name, resource)| {
            let result = resource.result.as_ref();
            let (module, failure) = (result.ok(), result.err());
            let left = |at: Instant| at.duration_since(Instant::now()).as_secs_f64();
            json!({
                "name": name,
                "url": resource.url,
                "age_seconds": resource.since.elapsed().as_secs_f64(),
                "sha256": module.map(|module| &module.sha256),
                "size_bytes": module.map(|module| module.size),
                "error": failure.map(|failure| &failure.error.1),
                "retry_seconds": failure.map(|failure| left(failure.retry_at)),
            })
        });
        let resources: Vec<_> = resources.collect();
        json!({ "resources": resources, "fetching": fetching })
    }
}

/// Powers of two, in milliseconds.
const MILLISECONDS: &[f64] = &[
    1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0,
    16384.0,
];

#[derive(Clone, Debug)]
pub(super) struct Metrics {
    /// By result.
    pub(super) conversions: Counters<1>,
    pub(super) duration: Histogram,
    fetches: Counters<1>,
    lookups: Counters<1>,
    pub(super) entries: Gauge,
}

impl Metrics {
    pub(super) fn new(registry: &Registry) -> Self {
        Self {
            conversions: registry.counters(
                "istio_agent_wasm_config_conversion_count",
                "number of Wasm config conversion count and results, including success, no remote \
                 load, marshal failure, remote fetch failure, miss remote fetch hint.",
                &["result"],
            ),
            duration: registry.histogram(
                "istio_agent_wasm_config_conversion_duration",
                "Total time in milliseconds istio-agent spends on converting remote load in Wasm \
                 config.",
                MILLISECONDS,
            ),
            fetches: registry.counters(
                "istio_agent_wasm_remote_fetch_count",
                "number of Wasm remote fetches and results, including success, download failure, and \
                 checksum mismatch.",
                &["result"],
            ),
            lookups: registry.counters(
                "istio_agent_wasm_cache_lookup_count",
                "number of Wasm remote fetch cache lookups.",
                &["hit"],
            ),
            entries: registry.gauge(
                "istio_agent_wasm_cache_entries",
                "number of Wasm remote fetch cache entries.",
            ),
        }
    }
}
