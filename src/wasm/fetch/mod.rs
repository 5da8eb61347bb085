//! Downloads Wasm modules over HTTP, and from OCI registries.
//!
//! Addresses are checked at each connection, also those of redirects and token servers. The caller
//! bounds the time: dropping a future ends its download.

pub(crate) mod download;
mod oci;
mod server;

use std::path::{Path, PathBuf};
use std::time::Duration;

use ::http::{HeaderValue, Uri};
use percent_encoding::percent_decode_str;

use crate::address::Cidr;
use crate::dial::proxy::{self, Proxies};
use crate::problem::{Code, codes};
use crate::trust_anchors::SystemRoots;
use download::Plan;

const DOCKER_HUB: &str = "index.docker.io";

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

/// Why a module could not be fetched.
pub(crate) type Error = (&'static Code, String);

/// The results that failed fetches are counted as. Other failures are not counted.
pub(crate) const RESULTS: [(&Code, &str); 4] = [
    (codes::WASM_DOWNLOAD_FAILED, "download_failure"),
    (codes::WASM_MANIFEST_FAILED, "manifest_failure"),
    (codes::WASM_CHECKSUM, "checksum_mismatched"),
    (codes::WASM_INVALID, "fetch_failure"),
];

fn no_manifest(problem: String) -> Error {
    let found = format!("could not fetch Wasm OCI image: could not fetch manifest: {problem}");
    (codes::WASM_MANIFEST_FAILED, found)
}

impl Source {
    pub(crate) fn parse(url: &str) -> Result<Self, Error> {
        let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
        let scheme = scheme.to_ascii_lowercase();
        if !["http", "https", "oci"].contains(&scheme.as_str()) {
            let problem = "unsupported Wasm module downloading URL scheme";
            return Err((codes::WASM_CONFIGURATION, format!("{problem}: {scheme}")));
        }
        let unusable = |problem: String| {
            let found = format!("fail to parse Wasm module fetch url: {scheme}://…: {problem}");
            (codes::WASM_CONFIGURATION, found)
        };
        let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
        let (authority, path) = rest.split_at(end);
        let (authorization, host) = proxy::split_user(authority);
        let uri = format!("{scheme}://{host}{path}").parse::<Uri>();
        let uri = uri.map_err(|error| unusable(error.to_string()))?;
        if uri.host().is_none_or(str::is_empty) {
            return Err(unusable("it has no host".to_owned()));
        }
        let image = (scheme == "oci").then(|| Reference::parse(host, uri.path()));
        Ok(Self {
            authorization,
            image: image.transpose().map_err(no_manifest)?,
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

    /// Whether the URL of an image names the tag `latest`.
    pub(crate) fn is_latest(&self) -> bool {
        self.image.is_some() && self.uri.path().ends_with(":latest")
    }

    /// Whether host and path begin with those of `prefix`. A path with dots leads to another one.
    pub(crate) fn is_within(&self, prefix: &str) -> bool {
        let place = place(&match &self.image {
            None => format!("{}{}", self.authority(), self.uri.path()),
            Some(image) => image.module_name(),
        });
        let decoded = percent_decode_str(&place).decode_utf8_lossy();
        if decoded.split(['/', '\\']).any(|part| part == "..") {
            return false;
        }
        place.starts_with(&self::place(prefix))
    }
}

/// Host and path of a URL, or of the name of an image, with a slash behind them.
fn place(name: &str) -> String {
    let name = name.split_once("://").map_or(name, |(_, place)| place);
    let place = format!("{}/", name.trim_end_matches('/'));
    match place.strip_prefix("docker.io/") {
        Some(path) => format!("{DOCKER_HUB}/{path}"),
        None => place,
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
    /// Reads authority and path of an `oci` URL.
    pub(crate) fn parse(authority: &str, path: &str) -> Result<Self, String> {
        let path = percent_decode_str(path).decode_utf8_lossy();
        let name = format!("{authority}{path}");
        let (rest, digest) = match name.split_once('@') {
            Some((rest, digest)) => (rest, Some(digest)),
            None => (name.as_str(), None),
        };
        // A colon before the last slash is that of a port.
        let (rest, tag) = match rest.rsplit_once(':') {
            Some((rest, tag)) if !tag.contains('/') && rest.contains('/') => (rest, tag),
            _ => (rest, "latest"),
        };
        let (registry, repository) = match rest.split_once('/') {
            Some(("docker.io", repository)) => (DOCKER_HUB, repository),
            Some((first, _)) if !first.contains(['.', ':']) && first != "localhost" => {
                (DOCKER_HUB, rest)
            }
            Some(found) => found,
            None => (DOCKER_HUB, rest),
        };
        let is_official = registry == DOCKER_HUB && !repository.contains('/');
        let owner = if is_official { "library/" } else { "" };
        let is_letter = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
        let is_name = |part: &str| part.chars().all(is_letter) && part.contains(|c| c != '.');
        let is_part =
            |part: &str| is_name(part) && !part.contains(|c: char| c.is_ascii_uppercase());
        let is_valid = repository.split('/').all(is_part) && is_name(tag);
        if !is_valid || digest.is_some_and(|digest| sha256(digest).is_none()) {
            let expected = "expected registry/repository[:tag][@sha256:digest]";
            return Err(format!("could not parse reference {name:?}: {expected}"));
        }
        Ok(Self {
            registry: registry.to_owned(),
            repository: format!("{owner}{repository}"),
            version: digest.unwrap_or(tag).to_owned(),
        })
    }

    /// The digest, if the image is named by it.
    pub(crate) fn digest(&self) -> Option<&str> {
        sha256(&self.version)
    }

    /// The same for all versions of an image.
    pub(crate) fn module_name(&self) -> String {
        format!("oci://{}/{}", self.registry, self.repository)
    }
}

/// The hexadecimal digits of a digest.
fn sha256(digest: &str) -> Option<&str> {
    let digits = digest.strip_prefix("sha256:")?;
    let is_digit = |c: char| c.is_ascii_digit() || ('a'..='f').contains(&c);
    (digits.len() == 64 && digits.chars().all(is_digit)).then_some(digits)
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
mod reference_tests;
#[cfg(test)]
mod tests;
