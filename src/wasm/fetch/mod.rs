//! Downloads Wasm modules over HTTP, and from OCI registries.
//!
//! Addresses are checked at each connection, also those of redirects and token servers. The caller
//! bounds the time: dropping a future ends its download.

mod address;
pub(crate) mod download;
mod http;
pub(crate) mod oci;
mod unpack;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ::http::{HeaderValue, Uri};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use crate::compliance::Policy;
use crate::dial::Dialer;
use crate::dial::proxy::Proxies;
use crate::http_client::{self, Client, Redirects};
use crate::trust_anchors::{self, Roots, SystemRoots};
use crate::unverified_tls;
use address::Blocked;
pub use address::Network;
pub(crate) use download::Download;
use oci::reference::{DOCKER_HUB, Reference};
pub(crate) use unpack::hexadecimal;

/// Settings of fetches.
#[derive(Clone, Debug)]
pub struct Config {
    /// Host and port, as URLs have them, of servers whose certificates are not verified; `*` is all.
    pub insecure: Vec<String>,
    /// Networks that are never connected to, beside the link-local ones.
    pub blocked: Vec<Network>,
    pub proxies: Proxies,
    /// Of one HTTP request.
    pub request_limit: Duration,
    /// Over HTTP.
    pub attempts: u32,
    /// The most bytes of a module.
    pub max_bytes: u64,
    /// Docker's configuration files, of which the first that exists is used where a filter brings no
    /// pull secret.
    pub credentials: Vec<PathBuf>,
    /// For servers whose certificates are verified.
    pub roots: SystemRoots,
}

/// Where a module comes from.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    Http(Url),
    Oci(Url, Reference),
}

/// A URL without its user.
#[derive(Clone, Debug)]
pub(crate) struct Url {
    uri: Uri,
    /// The user and password in it, as a header.
    authorization: Option<HeaderValue>,
}

/// Why a module could not be fetched, by the result that is counted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Error {
    #[error("fail to parse Wasm module fetch url: {0}")]
    Url(String),
    #[error("unsupported Wasm module downloading URL scheme: {0}")]
    Scheme(String),
    /// Refused by the configuration of this agent.
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
    #[error("{0}")]
    Disk(String),
}

impl Source {
    pub(crate) fn parse(url: &str) -> Result<Self, Error> {
        let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
        let scheme = scheme.to_ascii_lowercase();
        if !["http", "https", "oci"].contains(&scheme.as_str()) {
            return Err(Error::Scheme(scheme));
        }
        let parsed = Url::parse(&scheme, rest);
        let url = parsed.map_err(|problem| Error::Url(format!("{scheme}://…: {problem}")))?;
        if scheme != "oci" {
            return Ok(Self::Http(url));
        }
        let reference = Reference::parse(url.authority(), url.uri.path());
        let reference = reference.map_err(Error::Manifest)?;
        Ok(Self::Oci(url, reference))
    }

    pub(crate) fn url(&self) -> &Url {
        match self {
            Self::Http(url) | Self::Oci(url, _) => url,
        }
    }

    /// The digest that pins an image.
    pub(crate) fn digest(&self) -> Option<&str> {
        match self {
            Self::Http(_) => None,
            Self::Oci(_, reference) => reference.digest(),
        }
    }

    /// Whether the URL of an image names the tag `latest`.
    pub(crate) fn is_latest(&self) -> bool {
        matches!(self, Self::Oci(url, _) if url.uri.path().ends_with(":latest"))
    }

    /// Whether host and path begin with those of `prefix`. A path with dots leads to another one.
    pub(crate) fn is_within(&self, prefix: &str) -> bool {
        let place = match self {
            Self::Http(url) => format!("{}{}", url.authority(), url.uri.path()),
            Self::Oci(_, reference) => reference.module_name().replacen("oci://", "", 1),
        };
        let decoded = percent_encoding::percent_decode_str(&place).decode_utf8_lossy();
        if decoded.split(['/', '\\']).any(|part| part == "..") {
            return false;
        }
        let prefix = prefix.split_once("://").map_or(prefix, |(_, rest)| rest);
        let prefix = prefix.trim_end_matches('/');
        let hub = prefix
            .strip_prefix("docker.io")
            .map(|rest| format!("{DOCKER_HUB}{rest}"));
        let rest = place.strip_prefix(hub.as_deref().unwrap_or(prefix));
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }

    /// What distinguishes the module from others in the cache: all tags of a repository are one.
    pub(crate) fn module_name<'a>(&self, url: &'a str) -> std::borrow::Cow<'a, str> {
        match self {
            Self::Http(_) => url.into(),
            Self::Oci(_, reference) => reference.module_name().into(),
        }
    }
}

impl Url {
    fn parse(scheme: &str, rest: &str) -> Result<Self, String> {
        let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
        let (authority, path) = rest.split_at(end);
        let (user, host) = match authority.rsplit_once('@') {
            Some((user, host)) => (Some(user), host),
            None => (None, authority),
        };
        let uri: Uri = format!("{scheme}://{host}{path}")
            .parse()
            .map_err(|error: ::http::uri::InvalidUri| error.to_string())?;
        if uri.host().is_none_or(str::is_empty) {
            return Err("it has no host".to_owned());
        }
        let authorization = user.map(|user| {
            let (name, password) = user.split_once(':').unwrap_or((user, ""));
            let decoded = |text| percent_encoding::percent_decode_str(text).collect::<Vec<u8>>();
            basic(&decoded(name), &decoded(password))
        });
        let authorization = authorization.transpose()?;
        Ok(Self { uri, authorization })
    }

    /// Host and port.
    pub(crate) fn authority(&self) -> &str {
        self.uri
            .authority()
            .map_or("", |authority| authority.as_str())
    }

    /// Without user and query, which may be secrets.
    pub(crate) fn redacted(&self) -> String {
        let scheme = self.uri.scheme_str().unwrap_or_default();
        format!("{scheme}://{}{}", self.authority(), self.uri.path())
    }
}

/// The header of the Basic scheme.
fn basic(user: &[u8], password: &[u8]) -> Result<HeaderValue, String> {
    let encoded = STANDARD.encode([user, b":", password].concat());
    secret(format!("Basic {encoded}"))
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

    /// A client for the server of a URL. Trust anchors are read now, as fetches are rare.
    async fn client(&self, authority: &str, redirects: Redirects) -> Result<Client, String> {
        let unusable = |error: rustls::Error| format!("cannot set up TLS: {error}");
        let tls = if self.is_insecure(authority) {
            unverified_tls::config(false).map_err(unusable)?
        } else {
            let roots = trust_anchors::load(&Roots::System(self.roots.clone())).await?;
            let builder = Policy::None.builder().map_err(unusable)?;
            let mut tls = builder.with_root_certificates(roots).with_no_client_auth();
            tls.alpn_protocols = vec![b"http/1.1".to_vec()];
            Arc::new(tls)
        };
        Ok(Client::new(http_client::Config {
            dialer: Dialer::with_filter(Arc::new(Blocked(self.blocked.clone()))),
            tls: Some(tls),
            proxies: self.proxies.clone(),
            redirects,
            keeps_connections: false,
        }))
    }
}

#[cfg(test)]
pub(crate) mod fake_server;
#[cfg(test)]
mod tests;
