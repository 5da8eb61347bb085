//! Reads from a filter's configuration where its module is, and when to fetch it.

use std::collections::HashMap;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use envoy_types::pb::envoy::config::core::v3::RemoteDataSource;
use envoy_types::pb::google::protobuf;
use tokio::time::Instant;
use zeroize::Zeroizing;

use super::fetch::{Error, Reference, Source};
use crate::problem::Code;

pub(super) const PULL_SECRET: &str = "ISTIO_META_WASM_IMAGE_PULL_SECRET";
pub(super) const PULL_POLICY: &str = "ISTIO_META_WASM_IMAGE_PULL_POLICY";
pub(super) const RESOURCE_VERSION: &str = "ISTIO_META_WASM_PLUGIN_RESOURCE_VERSION";

/// Time limit of a fetch if the configuration has none.
pub(super) const TIME_LIMIT: Duration = Duration::from_secs(5);
/// The longest time limit of a fetch.
pub(super) const MAX_FETCH: Duration = Duration::from_secs(3600);

/// The request of a filter's configuration for a module.
pub(crate) struct Request {
    /// The name of the resource.
    pub(super) name: String,
    pub(crate) source: Source,
    /// The digest that the configuration or the URL pins the module to.
    pub(crate) pinned: Option<String>,
    pub(crate) time_limit: Duration,
    /// Docker's configuration file as JSON.
    pub(crate) pull_secret: Option<Zeroizing<String>>,
    /// True if a cached module may be used for any version of the resource.
    pub(crate) ignores_version: bool,
    /// The module's name in the cache, which all tags of its repository share. Like the URL, it may contain
    /// secrets.
    module_name: String,
    /// The key of the module in the cache.
    pub(super) key: String,
    /// An id that distinguishes requests of one resource. Like the other id, it reveals no secret.
    pub(super) id: u64,
    /// An id that distinguishes fetches.
    pub(super) fetch_id: u64,
}

/// The error of a filter that does not get its module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unusable {
    /// The label of the metric.
    pub(crate) result: &'static str,
    pub(crate) error: Error,
    /// The time of the next attempt; `None` if another attempt would fail, too.
    pub(crate) retry_at: Option<Instant>,
}

impl Request {
    /// `name` is the name of the resource, `plugin` the name in the configuration.
    pub(super) fn new(
        name: &str,
        plugin: &str,
        remote: RemoteDataSource,
        variables: &HashMap<String, String>,
    ) -> Result<Self, Unusable> {
        let uri = remote.http_uri.ok_or_else(|| {
            let found =
                format!("wasm remote fetch does not have httpUri specified for config {name}");
            Unusable::new("miss_remote_fetch_hint", (Code::WasmConfiguration, found))
        })?;
        let pull_secret = variables.get(PULL_SECRET).cloned().map(Zeroizing::new);
        if pull_secret.as_ref().is_some_and(|secret| secret.is_empty()) {
            let found = format!("cannot fetch Wasm module {plugin}: missing image pulling secret");
            return Err(Unusable::fetch((Code::WasmConfiguration, found)));
        }
        let source = Source::parse(&uri.uri).map_err(Unusable::fetch)?;
        let image = source.image.as_ref();
        let pinned = match remote.sha256.as_str() {
            "" | "nil" => image.and_then(Reference::digest).map(str::to_owned),
            checksum => Some(checksum.to_owned()),
        };
        let module_name = image.map_or_else(|| uri.uri.clone(), Reference::module_name);
        let time_limit = uri.timeout.map_or(TIME_LIMIT, time_limit);
        let fetch_id = hash((&uri.uri, &pinned, pull_secret.as_deref()));
        let policy = variables.get(PULL_POLICY);
        Ok(Self {
            name: name.to_owned(),
            id: hash((fetch_id, time_limit, policy, variables.get(RESOURCE_VERSION))),
            fetch_id,
            ignores_version: match policy.map(String::as_str) {
                _ if pinned.is_some() => true,
                Some("IfNotPresent") => true,
                // The module is fetched again for each new version of the Kubernetes object.
                Some("Always") => false,
                _ => !source.is_latest(),
            },
            key: match &pinned {
                Some(digest) => key(digest, &module_name),
                None => uri.uri,
            },
            source,
            pinned,
            time_limit,
            pull_secret,
            module_name,
        })
    }

    /// Returns the cache key of a digest, which all tags of a repository share.
    pub(super) fn key_of(&self, digest: &str) -> String {
        key(digest, &self.module_name)
    }

    /// Fails unless the module is pinned to one of these digests, or to none.
    pub(super) fn check_digest(&self, found: &[String]) -> Result<(), Error> {
        match &self.pinned {
            Some(expected) if !found.contains(expected) => {
                let found = format!(
                    "module downloaded from {} has checksum {}, which does not match: {expected}",
                    self.source.redacted(),
                    found[0]
                );
                Err((Code::WasmChecksum, found))
            }
            _ => Ok(()),
        }
    }
}

impl Unusable {
    pub(super) fn new(result: &'static str, error: Error) -> Self {
        Self { result, error, retry_at: None }
    }

    pub(super) fn fetch(error: Error) -> Self {
        Self::new("fetch_failure", error)
    }
}

/// Returns a key that begins differently from any URL.
fn key(digest: &str, module_name: &str) -> String {
    format!("{digest} {module_name}")
}

/// Converts a time limit. A negative one is zero.
fn time_limit(limit: protobuf::Duration) -> Duration {
    let protobuf::Duration { seconds, nanos } = limit;
    Duration::try_from(prost_types::Duration { seconds, nanos }).unwrap_or_default().min(MAX_FETCH)
}

fn hash(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The URL may contain a password, and the pull secret does.
        f.debug_struct("Request").finish_non_exhaustive()
    }
}
