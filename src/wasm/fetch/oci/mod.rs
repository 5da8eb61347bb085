//! Fetches modules from OCI registries: the manifest, if necessary by way of an index, and then the layer
//! with the module. That is the last layer of a Docker or OCI image, a tar.gz with a file `plugin.wasm`, or
//! the layer of an artifact that is the module itself.
//!
//! Sources: OCI Distribution Specification 1.1, token authentication of Docker's registry.

mod registry;

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::iter;
use std::path::{Path, PathBuf};

use aws_lc_rs::digest::{SHA256, digest};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::HeaderValue;
use serde::Deserialize;
use serde_json::Value;
use tokio::time::Instant;

use super::download::{Download, Plan, hexadecimal, unusable};
use super::error::FetchError;
use super::{Config, Error, Reference, Source, location, no_manifest, secret, sha256};
use crate::files::regular_file;
use crate::json;
use crate::net::dial::proxy::basic;
use registry::Registry;

/// The size limit of a manifest, in bytes. Registries accept manifests of up to 4 MiB.
const MAX_MANIFEST: usize = 4 << 20;
/// The most bytes of a Docker configuration.
const MAX_CONFIG: u64 = 1 << 20;

pub(super) const IMAGE_LAYERS: [&str; 2] = [
    "application/vnd.docker.image.rootfs.diff.tar.gzip",
    "application/vnd.oci.image.layer.v1.tar+gzip",
];
pub(super) const MODULE_LAYER: &str = "application/vnd.module.wasm.content.layer.v1+wasm";

/// The accepted media types: manifests and indexes of Docker and OCI.
const ACCEPT: &str = "application/vnd.docker.distribution.manifest.v2+json, \
     application/vnd.docker.distribution.manifest.list.v2+json, \
     application/vnd.oci.image.manifest.v1+json, application/vnd.oci.image.index.v1+json";

/// An image whose manifest is known.
#[derive(Debug)]
pub(crate) struct Image {
    registry: Registry,
    /// Digest and size of the layer with the module.
    layer: (String, u64),
    /// The digests, in hexadecimal, of the manifest and of the index that contains it.
    pub(crate) digests: Vec<String>,
}

impl Config {
    /// Fetches the manifest of an image. From an index, it chooses the one with the `expected` digest, if
    /// there is one. The attempts end at `deadline`.
    pub(crate) async fn image(
        &self,
        source: &Source,
        reference: &Reference,
        pull_secret: Option<&str>,
        expected: Option<&str>,
        deadline: Instant,
    ) -> Result<Image, Error> {
        let fetching = async {
            let image = reference.module_name();
            let credentials = match pull_secret {
                Some(secret) => read_credentials(secret.as_bytes(), &image)?,
                None => credentials_in_files(&self.credentials, &image).await?,
            };
            let authority = source.authority();
            let registry = Registry::new(self, authority, reference, credentials, deadline).await?;
            registry.image(&reference.version, expected, self.max_bytes).await
        };
        fetching.await.map_err(no_manifest)
    }

    /// Downloads the module of an image into `directory`.
    pub(crate) async fn module(
        &self,
        source: &Source,
        mut image: Image,
        directory: &Path,
    ) -> Result<Download, Error> {
        let (digest, size) = image.layer;
        let response = image.registry.get(&format!("blobs/sha256:{digest}"), "*/*").await;
        let response = response.map_err(|error| unusable(&source.redacted(), &error))?;
        let plan = Plan {
            file: Some("plugin.wasm"),
            max_received: size,
            digest: Some(digest),
            ..self.plan(source, directory)
        };
        plan.download(response.into_body()).await
    }
}

impl Registry {
    /// Fetches the manifest of an image, by way of its index if it has one.
    async fn image(
        mut self,
        version: &str,
        expected: Option<&str>,
        limit: u64,
    ) -> Result<Image, FetchError> {
        let mut manifest = self.manifest(version).await?;
        let mut index = None;
        if let Some(child) = manifest.child(expected)? {
            index = Some(manifest.digest);
            manifest = self.manifest(&format!("sha256:{child}")).await?;
            if manifest.child(None)?.is_some() {
                return Err(FetchError::NestedIndex);
            }
        }
        Ok(Image {
            registry: self,
            layer: manifest.layer(limit)?,
            digests: iter::once(manifest.digest).chain(index).collect(),
        })
    }

    /// Fetches a manifest or an index. Fails if its digest is not the requested one.
    async fn manifest(&mut self, version: &str) -> Result<Manifest, FetchError> {
        let mut response = self.get(&format!("manifests/{version}"), ACCEPT).await?;
        let manifest = Manifest::parse(&response.body_mut().collect(MAX_MANIFEST).await?)?;
        if sha256(version).is_some_and(|digest| digest != manifest.digest) {
            let version = version.to_owned();
            return Err(FetchError::OtherManifest { found: manifest.digest, version });
        }
        Ok(manifest)
    }
}

/// A manifest, or an index of manifests.
#[derive(Debug, Deserialize)]
struct Manifest {
    #[serde(default)]
    layers: Vec<Descriptor>,
    /// The manifests of an index; None in a manifest.
    manifests: Option<Vec<Descriptor>>,
    /// The digest of its encoding.
    #[serde(skip)]
    digest: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    #[serde(default)]
    media_type: String,
    digest: String,
    #[serde(default)]
    size: u64,
    #[serde(default)]
    platform: Value,
}

impl Manifest {
    fn parse(bytes: &[u8]) -> Result<Self, FetchError> {
        let mut manifest: Self = json::read(bytes)?;
        manifest.digest = hexadecimal(digest(&SHA256, bytes).as_ref());
        Ok(manifest)
    }

    /// Returns the digest of the manifest to use, if this is an index: the expected one if it is listed,
    /// else the one for linux/amd64, which is the platform of published modules. A manifest without a
    /// platform counts as such.
    fn child(&self, expected: Option<&str>) -> Result<Option<String>, FetchError> {
        let Some(manifests) = &self.manifests else {
            return Ok(None);
        };
        manifests
            .iter()
            .find(|child| expected.is_some() && sha256(&child.digest) == expected)
            .or_else(|| manifests.iter().find(|child| child.is_usual()))
            .ok_or(FetchError::Platform)?
            .hexadecimal()
            .map(Some)
    }

    /// Returns digest and size of the layer with the module, which may have at most `limit` bytes.
    fn layer(&self, limit: u64) -> Result<(String, u64), FetchError> {
        let layers = &self.layers;
        let layer = layers
            .last()
            .filter(|last| IMAGE_LAYERS.contains(&&*last.media_type))
            .or_else(|| layers.iter().find(|layer| layer.media_type == MODULE_LAYER))
            .ok_or_else(|| {
                let types: Vec<_> = layers.iter().map(|layer| &*layer.media_type).collect();
                FetchError::Layers { found: types.join(", ") }
            })?;
        if layer.size > limit {
            return Err(FetchError::LayerTooLarge { size: layer.size, limit });
        }
        Ok((layer.hexadecimal()?, layer.size))
    }
}

impl Descriptor {
    fn is_usual(&self) -> bool {
        let platform = &self.platform;
        platform.is_null() || platform["os"] == "linux" && platform["architecture"] == "amd64"
    }

    fn hexadecimal(&self) -> Result<String, FetchError> {
        match sha256(&self.digest) {
            Some(digits) => Ok(digits.to_owned()),
            None => Err(FetchError::Digest { found: self.digest.clone() }),
        }
    }
}

/// Credentials from Docker's configuration. Its helper programs (`credHelpers`, `credsStore`) are not run,
/// because a pull secret could name any program. The headers are marked as sensitive, so they are not logged.
#[derive(Debug, PartialEq, Eq)]
enum Credentials {
    /// A header for the registry or its token server.
    Password(HeaderValue),
    /// An OAuth 2 refresh token for the token server.
    Identity(HeaderValue),
    /// A header for the registry itself.
    Token(HeaderValue),
}

#[derive(Deserialize)]
struct DockerConfig {
    #[serde(default)]
    auths: BTreeMap<String, Entry>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Entry {
    username: String,
    password: String,
    auth: String,
    identitytoken: String,
    registrytoken: String,
}

/// Returns the credentials for an image from Docker's configuration. Of the keys that are the repository
/// or a part of the path to it, such as the host, the longest one counts. `None` means anonymous access.
fn read_credentials(config: &[u8], image: &str) -> Result<Option<Credentials>, FetchError> {
    let config: DockerConfig =
        json::read(config).map_err(|error| FetchError::DockerConfig(error.classify()))?;
    let image = location(image);
    let ranked = config.auths.into_iter().filter_map(|(key, entry)| {
        // The key may be a URL of the registry's API.
        let key_location = location(&key);
        let (host, path) = key_location.split_once('/')?;
        let api = path.strip_prefix("v1/").or(path.strip_prefix("v2/"));
        let rest = image.strip_prefix(&format!("{host}/{}", api.unwrap_or(path)))?;
        Some(((rest.len(), key.len()), entry))
    });
    match ranked.min_by_key(|(rank, _)| *rank) {
        Some((_, nearest)) => nearest.credentials(),
        None => Ok(None),
    }
}

/// Reads the credentials from the first of these files that exists.
async fn credentials_in_files(
    paths: &[PathBuf],
    image: &str,
) -> Result<Option<Credentials>, FetchError> {
    for path in paths {
        let found = match regular_file::read_blocking(path.clone(), MAX_CONFIG).await {
            Ok(config) => read_credentials(&config, image),
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) => Err(error.into()),
        };
        return found.map_err(|error| FetchError::CredentialsIn {
            path: path.clone(),
            source: error.into(),
        });
    }
    Ok(None)
}

impl Entry {
    /// Returns the credentials of an entry: its registry token, else its identity token, else its password.
    fn credentials(self) -> Result<Option<Credentials>, FetchError> {
        if !self.registrytoken.is_empty() {
            let token = secret(format!("Bearer {}", self.registrytoken))?;
            return Ok(Some(Credentials::Token(token)));
        }
        if !self.identitytoken.is_empty() {
            return Ok(Some(Credentials::Identity(secret(self.identitytoken)?)));
        }
        let mut password = format!("{}:{}", self.username, self.password).into_bytes();
        if !self.auth.is_empty() {
            password = STANDARD.decode(self.auth.trim()).map_err(|_| FetchError::Auth)?;
            if !password.contains(&b':') {
                return Err(FetchError::Auth);
            }
            // Docker pads it with zeros.
            while password.pop_if(|byte| *byte == 0).is_some() {}
        }
        if password == b":" {
            return Ok(None);
        }
        Ok(basic(&password).map(Credentials::Password))
    }
}

#[cfg(test)]
mod credentials_tests;
#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::lifecycle::with_causes;
    use serde_json::{Value, json};

    fn hex(digit: &str) -> String {
        digit.repeat(64)
    }

    fn parse(document: &Value) -> Result<Manifest, FetchError> {
        Manifest::parse(document.to_string().as_bytes())
    }

    #[test]
    fn the_three_layouts_are_found_and_others_refused() {
        let [docker, oci] = IMAGE_LAYERS;
        let zstd = "application/vnd.oci.image.layer.v1.tar+zstd";
        for (what, types, expected) in [
            ("docker", &["x", docker][..], Some("b")),
            ("oci", &["x", "y", oci], Some("c")),
            ("artifact", &["config", MODULE_LAYER], Some("b")),
            ("artifact without a config", &[MODULE_LAYER], Some("a")),
            ("no layer", &[], None),
            ("not the last", &[oci, "x"], None),
            ("zstd", &["x", zstd], None),
        ] {
            let layers = types.iter().zip(["a", "b", "c"]).map(|(media_type, digit)| {
                let digest = format!("sha256:{}", hex(digit));
                json!({"mediaType": media_type, "digest": digest, "size": 7})
            });
            let layers: Vec<_> = layers.collect();
            let manifest = parse(&json!({"schemaVersion": 2, "layers": layers}));
            let found = manifest.expect("a manifest").layer(7);
            match (found, expected) {
                (Ok(found), Some(digit)) => assert_eq!(found, (hex(digit), 7), "{what}"),
                (Err(error), None) => {
                    let error = error.to_string();
                    let named = types.iter().all(|found| error.contains(found));
                    assert!(named && error.contains("invalid format"), "{what}: {error}");
                }
                (found, _) => panic!("{what}: {found:?}"),
            }
        }
    }

    #[test]
    fn an_index_gives_the_expected_manifest_or_that_of_a_platform() {
        let child = |digit: &str, platform: Option<(&str, &str)>| {
            let digest = format!("sha256:{}", hex(digit));
            let platform = platform.map(|(os, arch)| json!({"os": os, "architecture": arch}));
            json!({"digest": digest, "platform": platform})
        };
        let (windows, s390x) =
            (child("a", Some(("windows", "amd64"))), child("b", Some(("linux", "s390x"))));
        let amd64 = child("c", Some(("linux", "amd64")));
        let plain = child("e", None);
        let b = hex("b");
        for (children, expected, found) in [
            (vec![&windows, &s390x, &amd64], None, Some("c")),
            (vec![&windows, &plain], None, Some("e")),
            (vec![&amd64, &s390x], Some(b.as_str()), Some("b")),
            (vec![&windows, &s390x], None, None),
            (vec![], None, None),
        ] {
            let index =
                parse(&json!({"schemaVersion": 2, "manifests": children})).expect("an index");
            assert_eq!(index.child(expected).ok(), found.map(|digit| Some(hex(digit))));
        }
    }

    #[test]
    fn a_member_that_is_null_is_absent() {
        let layer = json!({
            "mediaType": MODULE_LAYER, "digest": format!("sha256:{}", hex("a")), "size": null, "platform": null,
        });
        let manifest =
            parse(&json!({"layers": [null, layer], "manifests": null})).expect("a manifest");
        assert_eq!(manifest.child(None).ok(), Some(None));
        assert_eq!(manifest.layer(7).ok(), Some((hex("a"), 0)));
        let index = json!({"layers": null, "manifests": [{"mediaType": null, "digest": format!("sha256:{}", hex("b"))}]});
        assert_eq!(parse(&index).expect("an index").child(None).ok(), Some(Some(hex("b"))));
    }

    #[test]
    fn the_error_for_an_invalid_manifest_gives_the_reason() {
        for (document, expected) in [
            ("<html>", "not a manifest"),
            ("null", "not a manifest"),
            (r#"{"schemaVersion":2,"layers":[{"mediaType":"x"}]}"#, "missing field `digest`"),
        ] {
            let error = with_causes(&Manifest::parse(document.as_bytes()).expect_err(document));
            assert!(error.contains(expected), "{error}");
        }
        let layer = |digest: &str, size: u64| {
            let layer = json!({"mediaType": IMAGE_LAYERS[1], "digest": digest, "size": size});
            let manifest = parse(&json!({"schemaVersion": 2, "layers": [layer]}));
            manifest.and_then(|manifest| manifest.layer(7)).expect_err("an error").to_string()
        };
        assert!(layer("sha256:../..", 7).contains("expected sha256 in hexadecimal"));
        assert!(layer(&format!("sha256:{}", hex("a")), 8).contains("8 bytes, limit 7"));
    }
}
