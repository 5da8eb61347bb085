//! Fetches modules from OCI registries: the manifest, of an index the right one, and the layer with the
//! module.
//!
//! Sources: the OCI Distribution Specification 1.1, and the token authentication of Docker's registry.

mod challenge;
mod credentials;
mod manifest;
pub(crate) mod reference;
mod registry;

use std::path::Path;

use http::header;
use tokio::time::Instant;

use super::download::{Download, Plan};
use super::{Config, Error, Url, http::unusable};
use manifest::{Layer, Manifest};
use reference::{Reference, sha256};
use registry::Registry;

/// Registries take manifests of up to 4 MiB.
const LARGEST_MANIFEST: usize = 4 << 20;

/// An image whose manifest is known.
#[derive(Debug)]
pub(crate) struct Image {
    registry: Registry,
    layer: Layer,
    /// That of the manifest, hexadecimal.
    pub(crate) digest: String,
    /// That of the index the manifest is in.
    index: Option<String>,
}

impl Config {
    /// Fetches the manifest of an image. `expected` helps to choose among those of an index. Attempts
    /// end by `deadline`.
    pub(crate) async fn image(
        &self,
        url: &Url,
        reference: &Reference,
        pull_secret: Option<&str>,
        expected: Option<&str>,
        deadline: Instant,
    ) -> Result<Image, Error> {
        let credentials = match pull_secret {
            Some(secret) => credentials::read(secret.as_bytes(), &reference.registry),
            None => credentials::from_files(&self.credentials, &reference.registry).await,
        };
        let credentials = credentials.map_err(Error::Manifest)?;
        let registry = Registry::new(self, url.authority(), reference, credentials, deadline).await;
        let mut registry = registry.map_err(Error::Manifest)?;
        let found = registry.image(reference, expected, self.max_bytes).await;
        let (digest, index, layer) = found.map_err(Error::Manifest)?;
        Ok(Image {
            registry,
            layer,
            digest,
            index,
        })
    }

    /// Downloads the module of an image into `directory`.
    pub(crate) async fn module(
        &self,
        url: &Url,
        mut image: Image,
        directory: &Path,
    ) -> Result<Download, Error> {
        let Layer {
            digest,
            size,
            packing,
        } = image.layer;
        let problem = "could not fetch Wasm binary";
        let response = image
            .registry
            .get(&format!("blobs/sha256:{digest}"), "*/*")
            .await;
        let response = response.map_err(|error| Error::Download(format!("{problem}: {error}")))?;
        let plan = Plan {
            packing,
            limit: self.max_bytes,
            directory: directory.to_owned(),
            expected: Some((size, digest)),
        };
        let carried_out = plan.carry_out(&mut response.into_body()).await;
        carried_out.map_err(|error| unusable(error, url))
    }
}

impl Image {
    /// Whether a configured checksum means this image: its manifest, or the index of all platforms.
    pub(crate) fn is(&self, checksum: &str) -> bool {
        self.digest == checksum || self.index.as_deref() == Some(checksum)
    }
}

impl Registry {
    /// Digests of the manifest and its index, and the layer.
    async fn image(
        &mut self,
        reference: &Reference,
        expected: Option<&str>,
        limit: u64,
    ) -> Result<(String, Option<String>, Layer), String> {
        let mut manifest = self.manifest(&reference.version).await?;
        let mut index = None;
        if manifest.is_index() {
            let child = manifest.choose(expected)?;
            index = Some(std::mem::take(&mut manifest.digest));
            manifest = self.manifest(&format!("sha256:{child}")).await?;
            if manifest.is_index() {
                return Err("its index leads to another index".to_owned());
            }
        }
        let layer = manifest.layer(limit)?;
        Ok((manifest.digest, index, layer))
    }

    async fn manifest(&mut self, version: &str) -> Result<Manifest, String> {
        let mut response = self
            .get(&format!("manifests/{version}"), manifest::ACCEPT)
            .await?;
        let content_type = response.headers().get(header::CONTENT_TYPE).cloned();
        let content_type = content_type.as_ref().and_then(|value| value.to_str().ok());
        let body = response.body_mut().collect(LARGEST_MANIFEST).await;
        let body = body.map_err(|error| crate::lifecycle::with_causes(&error))?;
        let manifest = Manifest::parse(&body, content_type.unwrap_or_default())?;
        match sha256(version) {
            Some(digest) if digest != manifest.digest => {
                let found = &manifest.digest;
                Err(format!(
                    "manifest digest sha256:{found} does not match requested {version}"
                ))
            }
            _ => Ok(manifest),
        }
    }
}
