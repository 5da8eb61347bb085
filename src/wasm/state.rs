//! What came of the modules that resources asked for last, as the debug page shows it. It holds no
//! secret.

use std::collections::HashSet;
use std::path::PathBuf;

use indexmap::IndexMap;
use serde::Serialize;
use tokio::time::Instant;

use super::cache::Module;
use crate::backoff::Backoff;

/// Delta does not always say which resources are gone. Those converted last are remembered.
pub(super) const MAX_RESOURCES: usize = 1000;

/// By name of a resource.
#[derive(Debug, Default)]
pub(super) struct Resources(IndexMap<String, Resource>);

#[derive(Debug)]
struct Resource {
    /// [`super::request::Request::id`].
    request: u64,
    url: String,
    since: Instant,
    result: Result<Module, Failure>,
}

/// Why a resource is without its module.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    pub(super) error: String,
    /// When to ask again.
    pub(super) retry_at: Instant,
    pub(super) backoff: Backoff,
}

/// The state of all modules.
#[derive(Clone, Debug, Serialize)]
pub struct Snapshot {
    pub resources: Vec<ResourceSnapshot>,
    /// URLs of fetches under way.
    pub fetching: Vec<String>,
}

/// A resource with its module, or without it and with an error.
#[derive(Clone, Debug, Serialize)]
pub struct ResourceSnapshot {
    pub name: String,
    pub url: String,
    pub age_seconds: f64,
    pub sha256: Option<String>,
    pub size_bytes: Option<u64>,
    pub error: Option<String>,
    /// Until the module is fetched again.
    pub retry_seconds: Option<f64>,
}

impl Resources {
    pub(super) fn set(
        &mut self,
        name: &str,
        request: u64,
        url: String,
        result: Result<Module, Failure>,
    ) {
        let last = self.0.shift_remove(name);
        let last = last.filter(|last| last.result.as_ref().ok() == result.as_ref().ok());
        if self.0.len() >= MAX_RESOURCES {
            self.0.shift_remove_index(0);
        }
        let resource = Resource {
            request,
            url,
            since: last.map_or_else(Instant::now, |last| last.since),
            result,
        };
        self.0.insert(name.to_owned(), resource);
    }

    /// What came of the same request before.
    pub(super) fn last(&self, name: &str, request: u64) -> Option<Result<Module, Failure>> {
        let resource = self.0.get(name)?;
        (resource.request == request).then(|| resource.result.clone())
    }

    pub(super) fn retain(&mut self, is_left: impl Fn(&str) -> bool) {
        self.0.retain(|name, _| is_left(name));
    }

    /// The files of the modules they have.
    pub(super) fn files(&self) -> HashSet<PathBuf> {
        let modules = self.0.values().filter_map(|it| it.result.as_ref().ok());
        modules.map(|module| module.path.clone()).collect()
    }

    pub(super) fn snapshot(&self) -> Vec<ResourceSnapshot> {
        let now = Instant::now();
        let resources = self.0.iter().map(|(name, resource)| {
            let (module, failure) = match &resource.result {
                Ok(module) => (Some(module), None),
                Err(failure) => (None, Some(failure)),
            };
            ResourceSnapshot {
                name: name.clone(),
                url: resource.url.clone(),
                age_seconds: resource.since.elapsed().as_secs_f64(),
                sha256: module.map(|module| module.sha256.clone()),
                size_bytes: module.map(|module| module.size),
                error: failure.map(|failure| failure.error.clone()),
                retry_seconds: failure.map(|it| it.retry_at.duration_since(now).as_secs_f64()),
            }
        });
        resources.collect()
    }
}
