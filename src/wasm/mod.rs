//! Fetches the Wasm modules of Envoy's filters, and hands them to Envoy as files.
//!
//! [`Wasm::convert`] takes the resources of an ECDS response. One whose module cannot be fetched
//! becomes a filter that allows or denies everything, as its failure policy says, so that Envoy's
//! answer is deliberate; the caller converts it again later.

mod cache;
mod convert;
mod fetch;
mod metrics;
mod modules;
mod snapshot;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use tokio::time::{Instant, MissedTickBehavior, interval_at};

use crate::executor::ConnectionTasks;
use crate::metrics::Registry;
use cache::Cache;
pub(crate) use convert::wire;
use convert::{Filter, Unusable};
pub use fetch::Config as FetchConfig;
use metrics::Metrics;
use modules::Modules;
pub use snapshot::Snapshot;

/// Settings of modules.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where modules are kept. Envoy reads them there.
    pub directory: PathBuf,
    pub fetch: FetchConfig,
    /// How long unused modules are kept.
    pub expiry: Duration,
    pub purge_interval: Duration,
    /// The most bytes of all modules together, but for those in use.
    pub max_cache_bytes: u64,
    /// Whether modules that are not pinned by a digest are refused.
    pub requires_digest: bool,
    /// Prefixes of host and path that modules may come from; empty is any.
    pub allowed: Vec<String>,
}

/// Converts resources. Clones share the modules.
#[derive(Clone, Debug)]
pub struct Wasm {
    modules: Arc<Modules>,
    metrics: Metrics,
}

/// The resources of a response once they are converted.
#[derive(Debug, Default)]
pub(crate) struct Converted {
    /// In place of each resource; None where it stays as it is.
    pub(crate) resources: Vec<Option<Bytes>>,
    /// How many modules may be had later, and when to convert the resources again for that.
    pub(crate) missing: usize,
    pub(crate) retry_at: Option<Instant>,
}

/// A module that a resource does not get, and when to ask for it again.
struct Replaced {
    resource: Bytes,
    retry_at: Option<Instant>,
}

impl Wasm {
    /// The future fetches modules and removes old ones. It never ends; dropping it ends all fetches.
    pub fn new(
        config: Config,
        registry: &Registry,
    ) -> (Self, impl Future<Output = ()> + Send + use<>) {
        let cache = Cache::new(config.directory.clone(), config.max_cache_bytes, registry);
        let (cache, fetches) = (Arc::new(cache), ConnectionTasks::default());
        let (expiry, purge_interval) = (config.expiry, config.purge_interval);
        let modules = Modules::new(config, cache.clone(), fetches.executor(), registry);
        let metrics = Metrics::new(registry);
        let modules = Arc::new(modules);
        let wasm = Self { modules, metrics };
        let purging = async move {
            let _fetches = fetches;
            let mut ticks = interval_at(Instant::now() + purge_interval, purge_interval);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                ticks.tick().await;
                cache.clone().purge(expiry).await;
            }
        };
        (wasm, purging)
    }

    /// Converts resources, each an encoded `Any`, and waits for their modules. An error means that
    /// the response cannot be used.
    pub(crate) async fn convert(&self, resources: &[Bytes]) -> Result<Converted, String> {
        let began = Instant::now();
        let filters = self.filters(resources);
        let converted = match filters {
            Ok(filters) => {
                let replacing = filters.iter().map(|filter| self.replace(filter.as_ref()));
                let replaced: Result<Vec<_>, _> = join_all(replacing).await.into_iter().collect();
                replaced.map(Converted::new)
            }
            Err(problem) => Err(problem),
        };
        self.metrics
            .duration
            .observe(began.elapsed().as_secs_f64() * 1000.0);
        converted.inspect_err(|problem| {
            tracing::error!(target: "wasm", "error in applying failopen rbac config: {problem}");
        })
    }

    /// The filters among the resources. The error is that of all that cannot be read.
    fn filters(&self, resources: &[Bytes]) -> Result<Vec<Option<Filter>>, String> {
        let (mut filters, mut problems) = (Vec::new(), Vec::new());
        for resource in resources {
            match convert::filter(resource) {
                Ok(filter) => {
                    if filter.is_none() {
                        self.metrics.conversions.with(["no_remote_load"]).inc();
                    }
                    filters.push(filter);
                }
                Err(problem) => {
                    self.metrics.conversions.with(["unmarshal_failure"]).inc();
                    problems.push(problem);
                }
            }
        }
        match problems.as_slice() {
            [] => Ok(filters),
            [one] => Err(one.clone()),
            many => {
                let count = many.len();
                Err(format!(
                    "{count} errors occurred:\n\t* {}",
                    many.join("\n\t* ")
                ))
            }
        }
    }

    async fn replace(&self, filter: Option<&Filter>) -> Result<Option<Replaced>, String> {
        let Some(filter) = filter else {
            return Ok(None);
        };
        let (result, problem, is_known, retry_at) = match &filter.module {
            Err(unusable @ Unusable::NoUri(_)) => {
                ("miss_remote_fetch_hint", unusable.to_string(), false, None)
            }
            Err(unusable) => ("fetch_failure", unusable.to_string(), false, None),
            Ok(request) => match self.modules.get(&filter.name, request).await {
                Ok(path) => match filter.with_module(&path.to_string_lossy()) {
                    Ok(resource) => {
                        self.metrics.conversions.with(["success"]).inc();
                        let retry_at = None;
                        return Ok(Some(Replaced { resource, retry_at }));
                    }
                    Err(error) => ("marshal_failure", error.to_string(), false, None),
                },
                Err(missing) => {
                    let problem = format!("cannot fetch Wasm module {}", missing.error);
                    ("fetch_failure", problem, missing.is_known, missing.retry_at)
                }
            },
        };
        self.metrics.conversions.with([result]).inc();
        if !is_known {
            tracing::error!(
                target: "wasm",
                "error in converting the wasm config to local: {}: {problem}. applying {} RBAC filter",
                filter.name,
                filter.policy()
            );
        }
        let resource = filter.fallback().map_err(|error| error.to_string())?;
        Ok(Some(Replaced { resource, retry_at }))
    }
}

impl Converted {
    fn new(replaced: Vec<Option<Replaced>>) -> Self {
        let mut converted = Self::default();
        for replaced in replaced {
            let retry_at = replaced.as_ref().and_then(|replaced| replaced.retry_at);
            converted.missing += usize::from(retry_at.is_some());
            converted.retry_at = converted.retry_at.into_iter().chain(retry_at).min();
            converted
                .resources
                .push(replaced.map(|replaced| replaced.resource));
        }
        converted
    }
}

#[cfg(test)]
mod tests;
