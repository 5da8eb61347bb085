//! Takes modules from the cache, or fetches them.
//!
//! A module is fetched once for all resources that need it, and at most [`MAX_FETCHES`] at the same time.
//! A fetch continues when its callers are dropped. A failed fetch is repeated after a growing wait; until
//! then, callers get its error.

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
use crate::metrics::{Counters, Gauge, Histogram, Registry};
use crate::net::executor::Executor;
use crate::problem::{Code, Problem};
use crate::runtime::backoff::Backoff;
use crate::runtime::clock::after;
use crate::runtime::duration::rounded;

const MAX_FETCHES: usize = 4;
/// Waits after failed fetches are drawn from zero to 2 s, 4 s, … 5 min, but last at least a second.
const FIRST_WAIT: Duration = Duration::from_secs(2);
const MAX_WAIT: Duration = Duration::from_secs(300);
const MIN_WAIT: Duration = Duration::from_secs(1);
/// The time limit for finding or storing a module on disk.
const DISK_LIMIT: Duration = Duration::from_secs(30);

/// The most resources that are remembered. Older ones are forgotten, because delta does not always report removed
/// resources.
pub(super) const MAX_RESOURCES: usize = 1000;

/// The result of the last request of a resource. It contains no secret.
#[derive(Debug)]
struct Resource {
    /// [`Request::id`].
    request: u64,
    url: String,
    result: Result<Module, Failure>,
}

/// The error of a failed fetch, and the state of its retries.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    pub(super) error: Error,
    /// The time of the next attempt.
    pub(super) retry_at: Instant,
    backoff: Backoff,
}

/// The modules of all resources.
#[derive(Debug)]
pub(super) struct Modules {
    pub(super) config: Config,
    /// Locked during disk access, so that a disk that hangs blocks one thread only.
    pub(super) cache: Arc<sync::Mutex<Cache>>,
    executor: Executor,
    slots: Semaphore,
    /// Resources by name, in the order of their last conversion.
    resources: Mutex<IndexMap<String, Resource>>,
    /// Fetches by [`Request::fetch_id`], with the URL. A fetch has ended when its channel is closed.
    fetches: Mutex<HashMap<u64, (String, Fetching)>>,
    pub(super) metrics: Metrics,
    /// Filters that replace missing modules, by name: whether requests pass, and the problem.
    pub(super) replaced: Mutex<BTreeMap<String, (bool, Problem)>>,
}

type Fetched = Result<(), Error>;
/// Changes once, to the result.
type Fetching = watch::Receiver<Fetched>;

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

    /// Forgets all resources but those whose name `remains`. Modules that only the others used may be
    /// removed then.
    pub(super) fn retain(&self, remains: impl Fn(&str) -> bool) {
        self.resources.lock().retain(|name, _| remains(name));
        self.replaced.lock().retain(|name, _| remains(name));
    }

    /// Returns the file of the requested module, from the cache or by a fetch. Fails with the last error until it is
    /// time for the next attempt.
    pub(super) async fn get(self: &Arc<Self>, request: &Arc<Request>) -> Result<PathBuf, Failure> {
        let last = self.last_result(request);
        let mut cached = None;
        if request.ignores_version || matches!(last, Some(Ok(_))) {
            cached = self.use_cached(request, &request.key).await.ok().flatten();
        }
        self.count_lookup(cached.is_some());
        if let Some(module) = cached {
            return Ok(module.path);
        }
        let mut backoff = Backoff::new(FIRST_WAIT, MAX_WAIT);
        if let Some(Err(failure)) = last {
            if Instant::now() < failure.retry_at {
                return Err(failure);
            }
            backoff = failure.backoff;
        }
        match self.wait_for_module(request).await {
            Ok(module) => Ok(module.path),
            Err(error) => {
                let retry_at = after(backoff.next_wait().max(MIN_WAIT));
                let failure = Failure { error, retry_at, backoff };
                self.record(request, Err(failure.clone()));
                Err(failure)
            }
        }
    }

    /// Returns the last result of the same request.
    fn last_result(&self, request: &Request) -> Option<Result<Module, Failure>> {
        let resources = self.resources.lock();
        let last = resources.get(&request.name).filter(|last| last.request == request.id)?;
        Some(last.result.clone())
    }

    /// Makes this the last result of the resource.
    fn record(&self, request: &Request, result: Result<Module, Failure>) {
        let mut resources = self.resources.lock();
        resources.shift_remove(&request.name);
        if resources.len() >= MAX_RESOURCES {
            resources.shift_remove_index(0);
        }
        let resource = Resource { request: request.id, url: request.source.redacted(), result };
        resources.insert(request.name.clone(), resource);
    }

    /// Looks up a module in the cache. If it is there, the resource uses it from then on, also by its own key.
    async fn use_cached(
        self: &Arc<Self>,
        request: &Arc<Request>,
        key: &str,
    ) -> Result<Option<Module>, Error> {
        let request = request.clone();
        let key = key.to_owned();
        self.on_disk(move |modules, cache| {
            let Some(module) = cache.find(&key) else {
                return Ok(None);
            };
            if key != request.key {
                cache.link(&request.key, &module)?;
            }
            modules.record(&request, Ok(module.clone()));
            Ok(Some(module))
        })
        .await
    }

    /// Waits for the fetch of a module, and returns the module from the cache.
    async fn wait_for_module(self: &Arc<Self>, request: &Arc<Request>) -> Result<Module, Error> {
        let mut fetching = self.join(request);
        // It fails if the agent stops. The first value is the error for that case.
        let _ = fetching.changed().await;
        fetching.borrow().clone()?;
        let module = self.use_cached(request, &request.key).await?;
        module.ok_or_else(|| (Code::WasmCache, "the module vanished".to_owned()))
    }

    /// Joins the fetch of a module, or starts it.
    fn join(self: &Arc<Self>, request: &Arc<Request>) -> Fetching {
        let mut fetches = self.fetches.lock();
        fetches.retain(|_, (_, result)| result.has_changed().is_ok());
        if let Some((_, result)) = fetches.get(&request.fetch_id) {
            return result.clone();
        }
        let stopped = (Code::WasmDownloadFailed, "the agent stops".to_owned());
        let (done, result) = watch::channel(Err(stopped));
        let url = request.source.redacted();
        fetches.insert(request.fetch_id, (url.clone(), result.clone()));
        let modules = self.clone();
        let request = request.clone();
        self.executor.spawn(async move {
            // The semaphore is never closed.
            let _slot = modules.slots.acquire().await;
            let limit = request.time_limit;
            let fetched = timeout(limit, modules.fetch(&request)).await.unwrap_or_else(|_| {
                let found = format!("{url} is not complete within {}", rounded(limit));
                Err((Code::WasmDownloadFailed, found))
            });
            if let Err((code, _)) = &fetched
                && let Some((_, result)) = RESULTS.iter().find(|(counted, _)| counted == code)
            {
                modules.metrics.fetches.with([result]).inc();
            }
            let _ = done.send(fetched);
        });
        result
    }

    /// Downloads a module into the cache, unless it is the image of another tag that is there. Counts successes.
    async fn fetch(self: &Arc<Self>, request: &Arc<Request>) -> Fetched {
        let deadline = after(request.time_limit);
        self.on_disk(|_, cache| cache.prepare()).await?;
        let directory = &self.config.directory;
        let config = &self.config.fetch;
        let pinned = request.pinned.as_deref();
        let source = &request.source;
        tracing::debug!(target: "wasm", "fetching {}", source.redacted());
        let (found, download) = match &source.image {
            None => {
                let download = config.download(source, directory, deadline).await?;
                request.check_digest(std::slice::from_ref(&download.sha256))?;
                (download.sha256.clone(), download)
            }
            Some(reference) => {
                let secret = request.pull_secret.as_deref().map(String::as_str);
                let image = config.image(source, reference, secret, pinned, deadline).await?;
                request.check_digest(&image.digests)?;
                let found = image.digests[0].clone();
                if pinned.is_none() {
                    let cached = self.use_cached(request, &request.key_of(&found)).await?;
                    self.count_lookup(cached.is_some());
                    if cached.is_some() {
                        return Ok(());
                    }
                }
                (found, config.module(source, image, directory).await?)
            }
        };
        self.metrics.fetches.with(["success"]).inc();
        // An image may be pinned to the digest of its index.
        let by_digest = request.key_of(pinned.unwrap_or(&found));
        let key = request.key.clone();
        self.on_disk(move |modules, cache| {
            let module = cache.add(download, &[by_digest, key])?;
            modules.tidy_now(cache, Some(module.path));
            Ok(())
        })
        .await
    }

    /// Runs `work` on the cache on a blocking thread, within [`DISK_LIMIT`].
    async fn on_disk<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self, &Cache) -> io::Result<T> + Send + 'static,
    ) -> Result<T, Error> {
        let modules = self.clone();
        let working = async move {
            let cache = modules.cache.clone().lock_owned().await;
            tokio::task::spawn_blocking(move || work(&modules, &cache)).await?
        };
        let done = timeout(DISK_LIMIT, working).await;
        done.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())).map_err(|error| {
            let directory = self.config.directory.display();
            (Code::WasmCache, format!("cannot store modules in {directory}: {error}"))
        })
    }

    /// Removes modules that are not used any more.
    pub(super) async fn tidy(self: &Arc<Self>) {
        let tidying = self.on_disk(|modules, cache| {
            modules.tidy_now(cache, None);
            Ok(())
        });
        // The next purge repeats a failed one.
        let _ = tidying.await;
    }

    /// Removes modules that no resource uses, except for the `newest`.
    fn tidy_now(&self, cache: &Cache, newest: Option<PathBuf>) {
        let mut used: HashSet<_> = newest.into_iter().collect();
        for resource in self.resources.lock().values() {
            used.extend(resource.result.iter().map(|module| module.path.clone()));
        }
        match cache.tidy(&used, self.config.expiry, self.config.max_cache_bytes) {
            Ok(remaining) => self.metrics.entries.set(remaining as f64),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                tracing::warn!(target: "wasm", "cannot remove old Wasm modules: {error}");
            }
        }
    }

    fn count_lookup(&self, is_hit: bool) {
        self.metrics.lookups.with([if is_hit { "true" } else { "false" }]).inc();
    }

    /// Returns all resources, each with its module or an error, and the URLs of running fetches.
    pub(super) fn snapshot(&self) -> Value {
        let mut fetches = self.fetches.lock();
        fetches.retain(|_, (_, result)| result.has_changed().is_ok());
        let fetching: Vec<_> = fetches.values().map(|(url, _)| url).collect();
        let resources = self.resources.lock();
        let shown = resources.iter().map(|(name, resource)| {
            let module = resource.result.as_ref().ok();
            let failure = resource.result.as_ref().err();
            let wait = failure.map(|failure| failure.retry_at.duration_since(Instant::now()));
            json!({
                "name": name,
                "url": resource.url,
                "sha256": module.map(|module| &module.sha256),
                "size_bytes": module.map(|module| module.size),
                "error": failure.map(|failure| &failure.error.1),
                "retry_seconds": wait.map(|wait| wait.as_secs_f64()),
            })
        });
        json!({ "resources": shown.collect::<Vec<_>>(), "fetching": fetching })
    }
}

/// The bounds of the histograms: powers of two, in milliseconds.
const MILLISECONDS: &[f64] = &[
    1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0,
    16384.0,
];

#[derive(Clone, Debug)]
pub(super) struct Metrics {
    /// Conversions by result.
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
