//! Fetches the Wasm modules of Envoy's filters, and passes them to Envoy as files.
//!
//! [`Wasm::convert`] rewrites the resources of an ECDS response. A filter whose module cannot be fetched
//! becomes one that allows or denies all requests, according to its failure policy, so that the operator
//! decides how Envoy treats them; the caller converts it again later.

mod cache;
mod convert;
mod fetch;
mod modules;
mod request;

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use serde_json::Value;
use tokio::time::{Instant, MissedTickBehavior, interval_at};

use crate::metrics::Registry;
use crate::net::executor::ConnectionTasks;
use crate::problem::{Code, Problem};
use convert::Filter;
pub(crate) use convert::{Rejected, wire};
pub use fetch::Config as FetchConfig;
use modules::{MAX_RESOURCES, Metrics, Modules};
use request::{Request, Unusable};

/// Settings of modules.
#[derive(Clone, Debug)]
pub struct Config {
    /// The directory of modules, where Envoy reads them.
    pub directory: PathBuf,
    pub fetch: FetchConfig,
    /// Time after which unused modules are removed.
    pub expiry: Duration,
    pub purge_interval: Duration,
    /// The most bytes of all modules together. Modules in use may exceed it.
    pub max_cache_bytes: u64,
    /// True if modules that are not pinned by a digest are refused.
    pub requires_digest: bool,
    /// Prefixes of host and path that modules may come from. If it is empty, all are allowed.
    pub allowed: Vec<String>,
}

/// Converts resources. Clones share the modules.
#[derive(Clone, Debug)]
pub struct Wasm(Arc<Modules>);

/// The converted resources of a response.
#[derive(Debug, Default)]
pub(crate) struct Converted {
    /// The replacement of each resource; `None` if it does not change.
    pub(crate) resources: Vec<Option<Bytes>>,
    /// Number of modules that another attempt may fetch.
    pub(crate) retryable: usize,
    /// The time to convert the resources again.
    pub(crate) retry_at: Option<Instant>,
}

impl Wasm {
    /// Returns a handle, and a future that removes unused modules. It never ends; dropping it ends all
    /// fetches.
    pub fn new(
        config: Config,
        registry: &Registry,
    ) -> (Self, impl Future<Output = ()> + Send + use<>) {
        let interval = config.purge_interval;
        tracing::debug!(
            target: "wasm",
            "LocalFileCache is created in {}, purged every {interval:?}",
            config.directory.display()
        );
        let fetches = ConnectionTasks::default();
        let modules = Arc::new(Modules::new(config, fetches.executor(), Metrics::new(registry)));
        let wasm = Self(modules.clone());
        let purging = async move {
            let _fetches = fetches;
            let mut ticks = interval_at(crate::runtime::clock::after(interval), interval);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                ticks.tick().await;
                modules.tidy().await;
            }
        };
        (wasm, purging)
    }

    /// Converts resources, each an encoded `Any`, and waits for their modules. If they are `complete`,
    /// all others are forgotten. Fails if the response must be rejected.
    pub(crate) async fn convert(
        &self,
        resources: &[Bytes],
        complete: bool,
    ) -> Result<Converted, Rejected> {
        let started = Instant::now();
        let converted = self.convert_all(resources, complete).await;
        self.0.metrics.duration.observe(started.elapsed().as_secs_f64() * 1000.0);
        converted.inspect_err(|problem| {
            tracing::error!(target: "wasm", "error in applying failopen rbac config: {problem}");
        })
    }

    /// Returns true if a resource, an encoded `Any`, has a module to fetch. Fails if the resource cannot be read.
    pub(crate) fn has_module(resource: &Bytes) -> Result<bool, Rejected> {
        let filter = convert::read_filter(resource)?;
        Ok(filter.is_some_and(|filter| filter.module.is_ok()))
    }

    /// Forgets a resource, so that its module may be removed.
    pub(crate) fn forget(&self, name: &[u8]) {
        self.0.retain(|other| other.as_bytes() != name);
    }

    /// Converts the resources at the same time.
    async fn convert_all(
        &self,
        resources: &[Bytes],
        complete: bool,
    ) -> Result<Converted, Rejected> {
        let filters = self.filters(resources)?;
        if complete {
            let listed: HashSet<&str> =
                filters.iter().flatten().map(|filter| &*filter.name).collect();
            self.0.retain(|name| listed.contains(name));
        }
        let replacing = filters.iter().map(async |filter| match filter {
            Some(filter) => self.replace(filter).await.map(Some),
            None => Ok(None),
        });
        let mut converted = Converted::default();
        for replaced in join_all(replacing).await {
            let (resource, retry) = replaced?.unzip();
            let retry_at = retry.flatten();
            converted.retryable += usize::from(retry_at.is_some());
            converted.retry_at = converted.retry_at.into_iter().chain(retry_at).min();
            converted.resources.push(resource);
        }
        Ok(converted)
    }

    /// Returns the filter in each resource, if there is one. The error lists all resources that cannot be
    /// read.
    fn filters(&self, resources: &[Bytes]) -> Result<Vec<Option<Filter>>, Rejected> {
        let mut filters = Vec::new();
        let mut problems = Vec::new();
        for resource in resources {
            let filter = match convert::read_filter(resource) {
                Ok(filter) => filter,
                Err(problem) => {
                    self.0.metrics.conversions.with(["unmarshal_failure"]).inc();
                    problems.push(problem);
                    continue;
                }
            };
            if filter.is_none() {
                self.0.metrics.conversions.with(["no_remote_load"]).inc();
                let extension = wire::last(resource, 2).ok().flatten();
                if let Some(name) = extension.and_then(|it| wire::last(&it, 1).ok()?) {
                    let shown = String::from_utf8_lossy(&name);
                    tracing::debug!(target: "wasm", "no remote load found in extension {shown}");
                    self.forget(&name);
                }
            }
            filters.push(filter);
        }
        if problems.is_empty() { Ok(filters) } else { Err(Rejected::Several(problems)) }
    }

    /// Returns the replacement of a filter's resource, and when to retry if its module is missing.
    async fn replace(&self, filter: &Filter) -> Result<(Bytes, Option<Instant>), Rejected> {
        let unusable = match self.with_module(filter).await {
            Ok(resource) => {
                self.0.metrics.conversions.with(["success"]).inc();
                self.0.replaced.lock().remove(&filter.name);
                return Ok((resource, None));
            }
            Err(unusable) => unusable,
        };
        self.0.metrics.conversions.with([unusable.result]).inc();
        let (policy, consequence) = if filter.fails_open {
            ("allow", "requests pass without the filter")
        } else {
            ("deny", "everything is refused, HTTP requests with 403")
        };
        let (code, found) = unusable.error;
        let url = filter.module.as_ref().map(|it| it.source.redacted());
        let subject = format!("Wasm filter {} ({})", filter.name, url.unwrap_or_default());
        let problem = Problem::new(code, subject, found).consequence(consequence);
        tracing::error!(
            target: "wasm",
            "error in converting the wasm config to local: {problem}. applying {policy} RBAC filter"
        );
        let mut replaced = self.0.replaced.lock();
        if replaced.len() < MAX_RESOURCES {
            replaced.insert(filter.name.clone(), (filter.fails_open, problem));
        }
        Ok((filter.fallback()?, unusable.retry_at))
    }

    /// Returns the resource with its module.
    async fn with_module(&self, filter: &Filter) -> Result<Bytes, Unusable> {
        let request = filter.module.as_ref().map_err(Clone::clone)?;
        self.0.config.check_allowed(request)?;
        let module = self.0.get(request).await.map_err(|failure| Unusable {
            retry_at: Some(failure.retry_at),
            ..Unusable::fetch(failure.error)
        })?;
        let name = &filter.name;
        let path = module.to_string_lossy();
        tracing::debug!(target: "wasm", "new extension config resource {name}, with module {path}");
        filter.with_module(&path).map_err(|error| {
            Unusable::new("marshal_failure", (Code::WasmConfiguration, error.to_string()))
        })
    }

    /// Returns the problems of missing modules, each with true if requests pass without the module.
    pub fn missing_modules(&self) -> Vec<(bool, Problem)> {
        self.0.replaced.lock().values().cloned().collect()
    }

    /// Returns the state of all modules for the debug page.
    pub fn snapshot(&self) -> Value {
        self.0.snapshot()
    }
}

impl Config {
    /// Fails if the operator's rules forbid a module.
    fn check_allowed(&self, request: &Request) -> Result<(), Unusable> {
        let is_listed = |prefix: &String| request.source.is_within(prefix);
        let rule = if self.requires_digest && request.pinned.is_none() {
            "is not pinned by a digest, and ISTIO_AGENT_WASM_REQUIRE_DIGEST is set"
        } else if !self.allowed.is_empty() && !self.allowed.iter().any(is_listed) {
            "is not listed in ISTIO_AGENT_WASM_ALLOWED_REGISTRIES"
        } else {
            return Ok(());
        };
        let found = format!("{} {rule}", request.source.redacted());
        Err(Unusable::fetch((Code::WasmNotAllowed, found)))
    }
}

#[cfg(test)]
mod tests;
