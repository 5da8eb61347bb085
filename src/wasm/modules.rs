//! Decides whether a module is fetched or taken from the cache.
//!
//! A module is fetched once however many resources ask for it, and [`MOST_FETCHES`] are fetched at a
//! time. A fetch goes on when those who asked for it are gone. A failed one is tried again after a
//! wait that grows; until then, those who ask get its error.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, timeout};
use zeroize::Zeroizing;

use super::Config;
use super::cache::{Cache, Key};
use super::convert::{PullPolicy, Request};
use super::fetch::{Error, Source};
use crate::backoff::Backoff;
use crate::executor::Executor;
use crate::metrics::{Counters, Registry};

const MOST_FETCHES: usize = 4;
/// Waits after failed fetches are drawn from zero to 2 s, 4 s, … 5 min, but last at least a second.
const FIRST_WAIT: Duration = Duration::from_secs(2);
const LONGEST_WAIT: Duration = Duration::from_secs(300);
const SHORTEST_WAIT: Duration = Duration::from_secs(1);

/// The modules of all resources.
#[derive(Debug)]
pub(super) struct Modules {
    config: Config,
    pub(super) cache: Arc<Cache>,
    executor: Executor,
    slots: Semaphore,
    state: Mutex<State>,
    fetches: Counters<1>,
}

#[derive(Debug, Default)]
struct State {
    running: Vec<(Fetch, watch::Receiver<Option<Fetched>>)>,
    failures: Vec<Failure>,
}

/// What distinguishes fetches.
#[derive(Clone, PartialEq, Eq)]
struct Fetch {
    url: String,
    expected: Option<String>,
    pull_secret: Option<Zeroizing<String>>,
}

type Fetched = Result<Key, Error>;

/// The last fetch of a resource's module, which failed.
#[derive(Debug)]
struct Failure {
    resource: String,
    request: Request,
    error: Error,
    backoff: Backoff,
    until: Instant,
}

/// A module that a resource does not get.
#[derive(Clone, Debug)]
pub(super) struct Missing {
    pub(super) error: Error,
    /// Whether this is the error of an earlier attempt.
    pub(super) is_known: bool,
    /// When to ask again. None if that leads to nothing else.
    pub(super) retry_at: Option<Instant>,
}

impl Modules {
    pub(super) fn new(
        config: Config,
        cache: Arc<Cache>,
        executor: Executor,
        registry: &Registry,
    ) -> Self {
        Self {
            config,
            cache,
            executor,
            slots: Semaphore::new(MOST_FETCHES),
            state: Mutex::default(),
            fetches: registry.counters(
                "istio_agent_wasm_remote_fetch_count",
                "number of Wasm remote fetches and results, including success, download failure, and \
                 checksum mismatch.",
                &["result"],
            ),
        }
    }

    /// The file of the module that `resource` asks for.
    pub(super) async fn get(
        self: &Arc<Self>,
        resource: &str,
        request: &Request,
    ) -> Result<PathBuf, Missing> {
        let found = self.find_or_fetch(resource, request).await;
        if found.is_ok() {
            let failures = &mut self.state.lock().failures;
            failures.retain(|failure| failure.resource != resource);
        } else {
            self.cache.release(resource);
        }
        found
    }

    async fn find_or_fetch(
        self: &Arc<Self>,
        resource: &str,
        request: &Request,
    ) -> Result<PathBuf, Missing> {
        let source = self.permitted(request).map_err(Missing::finally)?;
        let name = source.module_name(&request.url);
        let pinned = pinned(request, &source);
        let known = match pinned {
            Some(checksum) => Some(Key::new(&name, checksum)),
            None => self.remembered(resource, request, &source),
        };
        if let Some(key) = known
            && let Some(path) = self.cache.find(&key, resource).await
        {
            self.remember(resource, request, &source, &key).await;
            return Ok(path);
        }
        if let Some(failure) = self.recent_failure(resource, request) {
            return Err(failure);
        }
        let key = self.fetched(&source, request, pinned).await;
        let key = key.map_err(|error| self.failed(resource, request, error))?;
        let gone = || Error::Refused("the module vanished from the cache".to_owned());
        let path = self.cache.find(&key, resource).await;
        let path = path.ok_or_else(|| self.failed(resource, request, gone()))?;
        self.remember(resource, request, &source, &key).await;
        Ok(path)
    }

    /// The source of a module, unless the operator's rules refuse it.
    fn permitted(&self, request: &Request) -> Result<Source, Error> {
        let source = Source::parse(&request.url)?;
        if self.config.requires_digest && pinned(request, &source).is_none() {
            let variable = "ISTIO_AGENT_WASM_REQUIRE_DIGEST";
            let problem = format!("{variable} is set, and the module is not pinned by a digest");
            return Err(Error::Refused(problem));
        }
        let allowed = &self.config.allowed;
        if !allowed.is_empty() && !allowed.iter().any(|prefix| source.is_within(prefix)) {
            let variable = "ISTIO_AGENT_WASM_ALLOWED_REGISTRIES";
            let url = source.redacted();
            return Err(Error::Refused(format!("{variable} does not list {url}")));
        }
        Ok(source)
    }

    fn remembered(&self, resource: &str, request: &Request, source: &Source) -> Option<Key> {
        let ignores_version = match request.pull_policy {
            PullPolicy::Always => false,
            PullPolicy::IfNotPresent => true,
            PullPolicy::Unspecified => !source.is_latest(),
        };
        let (url, version) = (&request.url, &request.resource_version);
        self.cache
            .remembered(url, resource, version, ignores_version)
    }

    async fn remember(&self, resource: &str, request: &Request, source: &Source, key: &Key) {
        if source.digest().is_none() {
            let (url, version) = (&request.url, &request.resource_version);
            self.cache.remember(url, key, resource, version).await;
        }
    }

    /// The error of the last fetch, if it is too early for another one.
    fn recent_failure(&self, resource: &str, request: &Request) -> Option<Missing> {
        let state = self.state.lock();
        let mut failures = state.failures.iter();
        let failure = failures.find(|failure| failure.resource == resource)?;
        let is_recent = failure.request == *request && Instant::now() < failure.until;
        is_recent.then(|| Missing {
            error: failure.error.clone(),
            is_known: true,
            retry_at: Some(failure.until),
        })
    }

    fn failed(&self, resource: &str, request: &Request, error: Error) -> Missing {
        let mut state = self.state.lock();
        let mut failures = state.failures.iter();
        let before = failures.position(|failure| failure.resource == resource);
        let before = before.map(|index| state.failures.swap_remove(index));
        let mut backoff = match before {
            Some(before) if before.request == *request => before.backoff,
            _ => Backoff::new(FIRST_WAIT, LONGEST_WAIT),
        };
        let until = Instant::now() + backoff.next_wait().max(SHORTEST_WAIT);
        state.failures.push(Failure {
            resource: resource.to_owned(),
            request: request.clone(),
            error: error.clone(),
            backoff,
            until,
        });
        Missing {
            error,
            is_known: false,
            retry_at: Some(until),
        }
    }

    /// Joins the fetch of a module, or starts it.
    async fn fetched(
        self: &Arc<Self>,
        source: &Source,
        request: &Request,
        pinned: Option<&str>,
    ) -> Fetched {
        let fetch = Fetch {
            url: request.url.clone(),
            expected: pinned.map(str::to_owned),
            pull_secret: request.pull_secret.clone(),
        };
        let mut result = self.join(fetch, source, request.time_limit);
        let result = result.wait_for(Option::is_some).await;
        let fetched = result.ok().and_then(|fetched| fetched.clone());
        fetched.unwrap_or_else(|| Err(Error::Download("the agent stops".to_owned())))
    }

    fn join(
        self: &Arc<Self>,
        fetch: Fetch,
        source: &Source,
        limit: Duration,
    ) -> watch::Receiver<Option<Fetched>> {
        let mut state = self.state.lock();
        // A panic would have left its entry behind.
        state
            .running
            .retain(|(_, result)| result.has_changed().is_ok());
        if let Some((_, result)) = state.running.iter().find(|(running, _)| *running == fetch) {
            return result.clone();
        }
        let (done, result) = watch::channel(None);
        state.running.push((fetch.clone(), result.clone()));
        let (modules, source) = (self.clone(), source.clone());
        self.executor.spawn(async move {
            // The semaphore is never closed.
            let _slot = modules.slots.acquire().await;
            let fetched = modules.fetch_within(limit, &fetch, &source).await;
            modules.count(&fetched);
            let running = &mut modules.state.lock().running;
            running.retain(|(running, _)| *running != fetch);
            let _ = done.send(Some(fetched));
        });
        result
    }

    async fn fetch_within(&self, limit: Duration, fetch: &Fetch, source: &Source) -> Fetched {
        let late = || Error::Download(format!("not complete within {limit:?}"));
        if limit.is_zero() {
            return Err(late());
        }
        let fetched = timeout(limit, self.fetch(fetch, source, Instant::now() + limit)).await;
        fetched.unwrap_or_else(|_| Err(late()))
    }

    async fn fetch(&self, fetch: &Fetch, source: &Source, deadline: Instant) -> Fetched {
        self.cache.prepare().map_err(Error::Refused)?;
        let (directory, config) = (self.cache.directory(), &self.config.fetch);
        let name = source.module_name(&fetch.url);
        let (key, download) = match &source.image {
            None => {
                let download = config.download(source, directory, deadline).await?;
                let found = download.sha256.clone();
                fetch.compare(source, &found, |expected| expected == found)?;
                (Key::new(&name, &found), download)
            }
            Some(reference) => {
                let expected = fetch.expected.as_deref();
                let secret = fetch.pull_secret.as_deref().map(String::as_str);
                let image = config
                    .image(source, reference, secret, expected, deadline)
                    .await?;
                fetch.compare(source, &image.digest, |expected| image.is(expected))?;
                // Under the digest of an index, if it was asked for by that.
                let key = Key::new(&name, expected.unwrap_or(&image.digest));
                if expected.is_none() && self.cache.has(&key).await {
                    return Ok(key);
                }
                (key, config.module(source, image, directory).await?)
            }
        };
        let stored = self.cache.store(&key, source.redacted(), download).await;
        stored.map_err(Error::Refused)?;
        self.fetches.with(["success"]).inc();
        Ok(key)
    }

    /// Counts a failure.
    fn count(&self, fetched: &Fetched) {
        let result = match fetched {
            Err(Error::Manifest(_)) => "manifest_failure",
            Err(Error::Download(_)) => "download_failure",
            Err(Error::Checksum { .. }) => "checksum_mismatched",
            Err(Error::Invalid { .. }) => "fetch_failure",
            Ok(_) | Err(_) => return,
        };
        self.fetches.with([result]).inc();
    }

    /// Resources without their module: name, URL, error, and when it is fetched again.
    pub(super) fn failures(&self) -> Vec<(String, String, String, Instant)> {
        let state = self.state.lock();
        let failures = state.failures.iter().map(|failure| {
            let url = Source::parse(&failure.request.url);
            let url = url.map_or_else(|_| String::new(), |source| source.redacted());
            let error = failure.error.to_string();
            (failure.resource.clone(), url, error, failure.until)
        });
        failures.collect()
    }

    /// URLs of fetches under way.
    pub(super) fn running(&self) -> Vec<String> {
        let state = self.state.lock();
        let urls = state
            .running
            .iter()
            .map(|(fetch, _)| Source::parse(&fetch.url));
        urls.flatten().map(|source| source.redacted()).collect()
    }
}

/// The checksum that a configuration or a URL pins the module to.
fn pinned<'a>(request: &'a Request, source: &'a Source) -> Option<&'a str> {
    match request.checksum.as_str() {
        "" => source.digest(),
        checksum => Some(checksum),
    }
}

impl Fetch {
    fn compare(
        &self,
        source: &Source,
        found: &str,
        is: impl Fn(&str) -> bool,
    ) -> Result<(), Error> {
        match &self.expected {
            Some(expected) if !is(expected) => Err(Error::Checksum {
                url: source.redacted(),
                found: found.to_owned(),
                expected: expected.clone(),
            }),
            _ => Ok(()),
        }
    }
}

impl std::fmt::Debug for Fetch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fetch").finish_non_exhaustive()
    }
}

impl Missing {
    fn finally(error: Error) -> Self {
        Self {
            error,
            is_known: false,
            retry_at: None,
        }
    }
}
