//! Downloads Wasm modules over HTTP, and from OCI registries.
//!
//! Addresses are checked at each connection, also those of redirects and token servers. The caller
//! bounds the time: dropping a future ends its download.

pub(crate) mod download;
pub(crate) mod oci;
mod server;

use std::path::{Path, PathBuf};
use std::time::Duration;

use ::http::{HeaderValue, Uri};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use percent_encoding::percent_decode_str;

use crate::address::Cidr;
use crate::dial::proxy::Proxies;
use crate::trust_anchors::SystemRoots;
use download::Plan;
pub(crate) use download::{Download, hexadecimal};
use oci::reference::{DOCKER_HUB, Reference};

/// Settings of fetches.
#[derive(Clone, Debug)]
pub struct Config {
    /// Host and port, as URLs have them, of servers whose certificates are not verified; `*` is all.
    pub insecure: Vec<String>,
    /// Networks that are never connected to, beside the link-local ones.
    pub blocked: Vec<Cidr>,
    pub proxies: Proxies,
    /// Of one HTTP request, until the head of its answer.
    pub request_limit: Duration,
    /// Of one HTTP request.
    pub attempts: u32,
    /// The most bytes of a module.
    pub max_bytes: u64,
    /// Docker's configuration files, of which the first that exists is used where a filter brings no
    /// pull secret.
    pub credentials: Vec<PathBuf>,
    /// For servers whose certificates are verified.
    pub roots: SystemRoots,
}

/// Where a module comes from: a URL, without its user.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    uri: Uri,
    /// The user and password of the URL, as a header.
    authorization: Option<HeaderValue>,
    /// Of an `oci` URL.
    pub(crate) image: Option<Reference>,
}

/// Why a module could not be fetched, by the result that is counted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Error {
    /// Not fetched: because of its URL, the configuration of this agent, or the disk.
    #[error("{0}")]
    Refused(String),
    #[error("{0}")]
    Download(String),
    #[error("could not fetch Wasm OCI image: could not fetch manifest: {0}")]
    Manifest(String),
    #[error("module downloaded from {url} has checksum {found}, which does not match: {expected}")]
    Checksum {
        url: String,
        found: String,
        expected: String,
    },
    #[error("fetched Wasm binary from {url} is invalid: {problem}")]
    Invalid { url: String, problem: String },
}

impl Source {
    pub(crate) fn parse(url: &str) -> Result<Self, Error> {
        let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
        let scheme = scheme.to_ascii_lowercase();
        if !["http", "https", "oci"].contains(&scheme.as_str()) {
            let problem = "unsupported Wasm module downloading URL scheme";
            return Err(Error::Refused(format!("{problem}: {scheme}")));
        }
        let unusable = |problem: String| {
            let found = format!("{scheme}://…: {problem}");
            Error::Refused(format!("fail to parse Wasm module fetch url: {found}"))
        };
        let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
        let (authority, path) = rest.split_at(end);
        let (user, host) = match authority.rsplit_once('@') {
            Some((user, host)) => (Some(user), host),
            None => (None, authority),
        };
        let uri = format!("{scheme}://{host}{path}").parse::<Uri>();
        let uri = uri.map_err(|error| unusable(error.to_string()))?;
        if uri.host().is_none_or(str::is_empty) {
            return Err(unusable("it has no host".to_owned()));
        }
        let authorization = user.map(|user| {
            let colon = if user.contains(':') { "" } else { ":" };
            let decoded: Vec<u8> = percent_decode_str(&format!("{user}{colon}")).collect();
            basic(&decoded)
        });
        let image = (scheme == "oci").then(|| Reference::parse(host, uri.path()));
        Ok(Self {
            authorization: authorization.transpose().map_err(unusable)?,
            image: image.transpose().map_err(Error::Manifest)?,
            uri,
        })
    }

    /// Host and port.
    fn authority(&self) -> &str {
        self.uri.authority().map_or("", |it| it.as_str())
    }

    /// The URL without the query, which may be a secret.
    pub(crate) fn redacted(&self) -> String {
        let scheme = self.uri.scheme_str().unwrap_or_default();
        format!("{scheme}://{}{}", self.authority(), self.uri.path())
    }

    /// The digest that pins an image.
    pub(crate) fn digest(&self) -> Option<&str> {
        self.image.as_ref()?.digest()
    }

    /// Whether the URL of an image names the tag `latest`.
    pub(crate) fn is_latest(&self) -> bool {
        self.image.is_some() && self.uri.path().ends_with(":latest")
    }

    /// Whether host and path begin with those of `prefix`. A path with dots leads to another one.
    pub(crate) fn is_within(&self, prefix: &str) -> bool {
        let place = match &self.image {
            None => format!("{}{}", self.authority(), self.uri.path()),
            Some(image) => image.module_name().replacen("oci://", "", 1),
        };
        let decoded = percent_decode_str(&place).decode_utf8_lossy();
        if decoded.split(['/', '\\']).any(|part| part == "..") {
            return false;
        }
        let prefix = prefix.split_once("://").map_or(prefix, |(_, rest)| rest);
        let prefix = prefix.trim_end_matches('/');
        let hub = prefix.strip_prefix("docker.io");
        let hub = hub.map(|rest| format!("{DOCKER_HUB}{rest}"));
        let rest = place.strip_prefix(hub.as_deref().unwrap_or(prefix));
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }

    /// What distinguishes the module from others in the cache: all tags of a repository are one.
    pub(crate) fn module_name(&self, url: &str) -> String {
        let image = self.image.as_ref();
        image.map_or_else(|| url.to_owned(), Reference::module_name)
    }
}

/// The header of the Basic scheme, of a user and a password joined by a colon.
fn basic(credentials: &[u8]) -> Result<HeaderValue, String> {
    secret(format!("Basic {}", STANDARD.encode(credentials)))
}

fn secret(text: String) -> Result<HeaderValue, String> {
    let header = HeaderValue::try_from(text);
    let mut header = header.map_err(|_| "credentials with control characters".to_owned())?;
    header.set_sensitive(true);
    Ok(header)
}

impl Config {
    fn is_insecure(&self, authority: &str) -> bool {
        let listed = |entry: &String| entry == "*" || entry == authority;
        self.insecure.iter().any(listed)
    }

    fn plan(&self, source: &Source, directory: &Path) -> Plan {
        Plan {
            url: source.redacted(),
            file: None,
            max_received: self.max_bytes,
            max_unpacked: self.max_bytes,
            directory: directory.to_owned(),
            digest: None,
        }
    }
}

#[cfg(test)]
pub(crate) mod fake_server;
#[cfg(test)]
mod tests;
