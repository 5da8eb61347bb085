//! The state of all modules, for the debug page. It holds no secret.

use serde::Serialize;
use tokio::time::Instant;

use super::Wasm;
use super::cache::CachedModule;

#[derive(Clone, Debug, Serialize)]
pub struct Snapshot {
    pub modules: Vec<CachedModule>,
    /// URLs of fetches under way.
    pub fetching: Vec<String>,
    pub failures: Vec<FailureSnapshot>,
}

/// A resource without its module.
#[derive(Clone, Debug, Serialize)]
pub struct FailureSnapshot {
    pub resource: String,
    pub url: String,
    pub error: String,
    /// Until the module is fetched again.
    pub retry_seconds: f64,
}

impl Wasm {
    /// What is known now.
    pub fn snapshot(&self) -> Snapshot {
        let failures = self.modules.failures().into_iter();
        let failures = failures.map(|(resource, url, error, until)| FailureSnapshot {
            resource,
            url,
            error,
            retry_seconds: until.duration_since(Instant::now()).as_secs_f64(),
        });
        Snapshot {
            modules: self.modules.cache.snapshot(),
            fetching: self.modules.running(),
            failures: failures.collect(),
        }
    }
}
