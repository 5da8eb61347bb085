//! What a filter's configuration says about its module: where it is, and when to fetch it.

use std::collections::HashMap;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use envoy_types::pb::envoy::config::core::v3::RemoteDataSource;
use envoy_types::pb::google::protobuf;
use tokio::time::Instant;
use zeroize::Zeroizing;

use super::fetch::{Error, Reference, Source};
use crate::problem::codes;

pub(super) const PULL_SECRET: &str = "ISTIO_META_WASM_IMAGE_PULL_SECRET";
pub(super) const PULL_POLICY: &str = "ISTIO_META_WASM_IMAGE_PULL_POLICY";
pub(super) const RESOURCE_VERSION: &str = "ISTIO_META_WASM_PLUGIN_RESOURCE_VERSION";

/// The time limit of a fetch without one of its own.
pub(super) const TIME_LIMIT: Duration = Duration::from_secs(5);
/// That of any fetch.
pub(super) const MAX_FETCH: Duration = Duration::from_secs(3600);

/// A module as a filter's configuration asks for it.
pub(crate) struct Request {
    pub(crate) source: Source,
    /// The digest that the configuration or the URL pins the module to.
    pub(crate) pinned: Option<String>,
    pub(crate) time_limit: Duration,
    /// Docker's configuration file as JSON.
    pub(crate) pull_secret: Option<Zeroizing<String>>,
    /// Whether the module that was found before is right for any version of the resource.
    pub(crate) ignores_version: bool,
    /// What the module is called in the cache, as all tags of its repository are. It may hold secrets, as
    /// the URL may.
    module_name: String,
    /// What leads to the module in the cache.
    pub(super) key: String,
    /// Distinguishes requests of one resource, and fetches. They show no secret.
    pub(super) id: u64,
    pub(super) fetch_id: u64,
}

/// Why a filter does not get its module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unusable {
    /// The result that is counted.
    pub(crate) result: &'static str,
    pub(crate) error: Error,
    /// When to ask again. None if another attempt would fail, too.
    pub(crate) retry_at: Option<Instant>,
}

impl Request {
    /// `name` is that of the resource, `plugin` that in the configuration.
    pub(super) fn new(
        name: &str,
        plugin: &str,
        remote: RemoteDataSource,
        variables: &HashMap<String, String>,
    ) -> Result<Self, Unusable> {
        let uri = remote.http_uri.ok_or_else(|| {
            let found =
                format!("wasm remote fetch does not have httpUri specified for config {name}");
            Unusable::new("miss_remote_fetch_hint", (codes::WASM_CONFIGURATION, found))
        })?;
        let pull_secret = variables.get(PULL_SECRET).cloned().map(Zeroizing::new);
        if pull_secret.as_ref().is_some_and(|secret| secret.is_empty()) {
            let found = format!("cannot fetch Wasm module {plugin}: missing image pulling secret");
            return Err(Unusable::fetch((codes::WASM_CONFIGURATION, found)));
        }
        let source = Source::parse(&uri.uri).map_err(Unusable::fetch)?;
        let image = source.image.as_ref();
        let pinned = match remote.sha256.as_str() {
            "" | "nil" => image.and_then(Reference::digest).map(str::to_owned),
            checksum => Some(checksum.to_owned()),
        };
        let module_name = image.map_or_else(|| uri.uri.clone(), Reference::module_name);
        let time_limit = uri.timeout.map_or(TIME_LIMIT, time_limit);
        let secret = pull_secret.as_deref();
        let fetch_id = hash((&uri.uri, &pinned, secret));
        let (policy, version) = (variables.get(PULL_POLICY), variables.get(RESOURCE_VERSION));
        Ok(Self {
            id: hash((fetch_id, time_limit, policy, version)),
            fetch_id,
            ignores_version: match policy.map(String::as_str) {
                _ if pinned.is_some() => true,
                Some("IfNotPresent") => true,
                // It is fetched again for each new version of the Kubernetes object.
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

    /// The key of a digest. All tags of a repository share it.
    pub(super) fn key_of(&self, digest: &str) -> String {
        key(digest, &self.module_name)
    }

    /// An error unless one of these digests is the one that the module is pinned to.
    pub(super) fn compare(&self, found: &[String]) -> Result<(), Error> {
        match &self.pinned {
            Some(expected) if !found.contains(expected) => {
                let (url, found) = (self.source.redacted(), &found[0]);
                let found = format!(
                    "module downloaded from {url} has checksum {found}, which does not match: {expected}"
                );
                Err((codes::WASM_CHECKSUM, found))
            }
            _ => Ok(()),
        }
    }
}

impl Unusable {
    pub(super) fn new(result: &'static str, error: Error) -> Self {
        Self {
            result,
            error,
            retry_at: None,
        }
    }

    pub(super) fn fetch(error: Error) -> Self {
        Self::new("fetch_failure", error)
    }
}

/// It begins as no URL does.
fn key(digest: &str, module_name: &str) -> String {
    format!("{digest} {module_name}")
}

/// Zero if it is negative.
fn time_limit(limit: protobuf::Duration) -> Duration {
    let (seconds, nanos) = (u64::try_from(limit.seconds), u64::try_from(limit.nanos));
    let limit = match (seconds, nanos) {
        (Ok(seconds), Ok(nanos)) => {
            Duration::from_secs(seconds).saturating_add(Duration::from_nanos(nanos))
        }
        _ => Duration::ZERO,
    };
    limit.min(MAX_FETCH)
}

fn hash(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The URL may hold a password, and the secret is one.
        f.debug_struct("Request").finish_non_exhaustive()
    }
}
