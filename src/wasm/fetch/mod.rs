//! Downloads Wasm modules over HTTP, and from OCI registries.
//!
//! Addresses are checked for each connection, also for redirects and token servers. The caller limits the
//! time: dropping a future ends its download.

pub(crate) mod download;
mod error;
mod oci;
mod server;

use std::path::{Path, PathBuf};
use std::time::Duration;

use ::http::{HeaderValue, Uri};
use percent_encoding::percent_decode_str;

use crate::net::address::Cidr;
use crate::net::dial::proxy::{self, Proxies};
use crate::problem::Code;
use crate::runtime::lifecycle::with_causes;
use crate::trust::trust_anchors::SystemRoots;
use download::Plan;
use error::FetchError;

const DOCKER_HUB: &str = "index.docker.io";

/// Settings of fetches.
#[derive(Clone, Debug)]
pub struct Config {
    /// Servers whose certificates are not verified, each as host and port of a URL; `*` means all.
    pub insecure: Vec<String>,
    /// Networks without connections, in addition to the link-local ones.
    pub blocked: Vec<Cidr>,
    pub proxies: Proxies,
    /// The time limit of one HTTP request, until the head of the response.
    pub request_limit: Duration,
    /// The number of attempts of one HTTP request.
    pub attempts: u32,
    /// The most bytes of a module.
    pub max_bytes: u64,
    /// Docker's configuration files. If a filter has no pull secret, the first file that exists is used.
    pub credentials: Vec<PathBuf>,
    /// Trust anchors for servers whose certificates are verified.
    pub roots: SystemRoots,
}

/// The origin of a module: a URL without its user.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    uri: Uri,
    /// User and password of the URL, as a header.
    authorization: Option<HeaderValue>,
    /// The image of an `oci` URL.
    pub(crate) image: Option<Reference>,
}

/// The error of a fetch: a code, and a text.
pub(crate) type Error = (Code, String);

/// Metric labels of failed fetches. Other failures are not counted.
pub(crate) const RESULTS: [(Code, &str); 4] = [
    (Code::WasmDownloadFailed, "download_failure"),
    (Code::WasmManifestFailed, "manifest_failure"),
    (Code::WasmChecksum, "checksum_mismatched"),
    (Code::WasmInvalid, "fetch_failure"),
];

fn no_manifest(error: FetchError) -> Error {
    let problem = with_causes(&error);
    let found = format!("could not fetch Wasm OCI image: could not fetch manifest: {problem}");
    (Code::WasmManifestFailed, found)
}

impl Source {
    /// Parses a URL with scheme `http`, `https` or `oci`.
    pub(crate) fn parse(url: &str) -> Result<Self, Error> {
        let (prefix, rest) = url.split_once("://").unwrap_or(("", url));
        let scheme = prefix.to_ascii_lowercase();
        if !["http", "https", "oci"].contains(&scheme.as_str()) {
            let found = format!("unsupported Wasm module downloading URL scheme: {scheme}");
            return Err((Code::WasmConfiguration, found));
        }
        let (authority, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
        let (authorization, host) = proxy::split_user(authority);
        let problem = match format!("{scheme}://{host}{path}").parse::<Uri>() {
            Ok(uri) if uri.host().is_some_and(|host| !host.is_empty()) => {
                let image = match scheme.as_str() {
                    "oci" => Some(Reference::parse(host, uri.path()).map_err(no_manifest)?),
                    _ => None,
                };
                return Ok(Self { uri, authorization, image });
            }
            Ok(_) => "it has no host".to_owned(),
            Err(error) => error.to_string(),
        };
        let found = format!("fail to parse Wasm module fetch url: {scheme}://…: {problem}");
        Err((Code::WasmConfiguration, found))
    }

    /// Returns host and port.
    fn authority(&self) -> &str {
        self.uri.authority().map_or("", |it| it.as_str())
    }

    /// Returns the URL without the query, which may be a secret.
    pub(crate) fn redacted(&self) -> String {
        let scheme = self.uri.scheme_str().unwrap_or_default();
        format!("{scheme}://{}{}", self.authority(), self.uri.path())
    }

    /// Returns true if the URL of an image names the tag `latest`.
    pub(crate) fn is_latest(&self) -> bool {
        self.image.is_some() && self.uri.path().ends_with(":latest")
    }

    /// Returns true if host and path begin with the host and the path of `prefix`. A path with `..` may lead elsewhere.
    pub(crate) fn is_within(&self, prefix: &str) -> bool {
        let location = location(&match &self.image {
            None => format!("{}{}", self.authority(), self.uri.path()),
            Some(image) => image.module_name(),
        });
        let decoded = percent_decode_str(&location).decode_utf8_lossy();
        !decoded.split(['/', '\\']).any(|part| part == "..")
            && location.starts_with(&self::location(prefix))
    }
}

/// Returns host and path of a URL, or of the name of an image, with a slash at the end.
fn location(name: &str) -> String {
    let without_scheme = name.split_once("://").map_or(name, |(_, rest)| rest);
    let location = format!("{}/", without_scheme.trim_end_matches('/'));
    match location.strip_prefix("docker.io/") {
        Some(path) => format!("{DOCKER_HUB}/{path}"),
        None => location,
    }
}

/// The name of an image in a registry: `registry/repository[:tag][@digest]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reference {
    /// Host and port.
    registry: String,
    repository: String,
    /// A tag, or `sha256:` and a digest, as manifests are requested.
    version: String,
}

impl Reference {
    /// Parses authority and path of an `oci` URL.
    fn parse(authority: &str, path: &str) -> Result<Self, FetchError> {
        let name = format!("{authority}{}", percent_decode_str(path).decode_utf8_lossy());
        let (rest, digest) =
            name.split_once('@').map_or((&*name, None), |(rest, digest)| (rest, Some(digest)));
        // A colon before the last slash belongs to a port.
        let (rest, tag) = match rest.rsplit_once(':') {
            Some((rest, tag)) if !tag.contains('/') && rest.contains('/') => (rest, tag),
            _ => (rest, "latest"),
        };
        let (registry, repository) = match rest.split_once('/') {
            Some(("docker.io", repository)) => (DOCKER_HUB, repository),
            Some((first, _)) if !first.contains(['.', ':']) && first != "localhost" => {
                (DOCKER_HUB, rest)
            }
            Some(named) => named,
            None => (DOCKER_HUB, rest),
        };
        let is_official = registry == DOCKER_HUB && !repository.contains('/');
        let owner = if is_official { "library/" } else { "" };
        if !repository.split('/').all(is_name)
            || repository.contains(|c: char| c.is_ascii_uppercase())
            || !is_name(tag)
            || digest.is_some_and(|digest| sha256(digest).is_none())
        {
            return Err(FetchError::Reference { name });
        }
        Ok(Self {
            registry: registry.to_owned(),
            repository: format!("{owner}{repository}"),
            version: digest.unwrap_or(tag).to_owned(),
        })
    }

    /// Returns the digest if the name has one.
    pub(crate) fn digest(&self) -> Option<&str> {
        sha256(&self.version)
    }

    /// Returns the name without the version.
    pub(crate) fn module_name(&self) -> String {
        format!("oci://{}/{}", self.registry, self.repository)
    }
}

/// Returns true if the text is a tag, or a part of a repository, and not only dots.
fn is_name(text: &str) -> bool {
    text.chars().all(|c| c.is_ascii_alphanumeric() || "-._".contains(c))
        && text.contains(|c| c != '.')
}

/// Returns the hexadecimal digits of a digest.
fn sha256(digest: &str) -> Option<&str> {
    digest.strip_prefix("sha256:").filter(|digits| {
        digits.len() == 64 && digits.chars().all(|c| matches!(c, '0'..='9' | 'a'..='f'))
    })
}

/// Returns a header that is not logged.
fn secret(text: String) -> Result<HeaderValue, FetchError> {
    let mut header = HeaderValue::try_from(text).map_err(|_| FetchError::ControlCharacters)?;
    header.set_sensitive(true);
    Ok(header)
}

impl Config {
    fn is_insecure(&self, authority: &str) -> bool {
        self.insecure.iter().any(|entry| entry == "*" || entry == authority)
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
mod reference_tests;
#[cfg(test)]
mod tests;
