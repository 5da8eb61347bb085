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

use tokio::time::Instant;

use super::download::{Download, Plan, unusable};
use super::{Config, Error, Source};
use crate::lifecycle::with_causes;
use manifest::Manifest;
use reference::{Reference, sha256};
use registry::Registry;

/// Registries take manifests of up to 4 MiB.
const MAX_MANIFEST: usize = 4 << 20;

/// An image whose manifest is known.
#[derive(Debug)]
pub(crate) struct Image {
    registry: Registry,
    /// Digest and size.
    layer: (String, u64),
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
        source: &Source,
        reference: &Reference,
        pull_secret: Option<&str>,
        expected: Option<&str>,
        deadline: Instant,
    ) -> Result<Image, Error> {
        let fetching = async {
            let credentials = match pull_secret {
                Some(secret) => credentials::read(secret.as_bytes(), &reference.registry),
                None => credentials::from_files(&self.credentials, &reference.registry).await,
            };
            let authority = source.authority();
            let registry = Registry::new(self, authority, reference, credentials?, deadline);
            let mut registry = registry.await?;
            let mut manifest = registry.manifest(&reference.version).await?;
            let mut index = None;
            if let Some(child) = manifest.child(expected)? {
                index = Some(manifest.digest);
                manifest = registry.manifest(&format!("sha256:{child}")).await?;
                if manifest.child(None)?.is_some() {
                    return Err("its index leads to another index".to_owned());
                }
            }
            Ok(Image {
                registry,
                layer: manifest.layer(self.max_bytes)?,
                digest: manifest.digest,
                index,
            })
        };
        fetching.await.map_err(Error::Manifest)
    }

    /// Downloads the module of an image into `directory`.
    pub(crate) async fn module(
        &self,
        source: &Source,
        mut image: Image,
        directory: &Path,
    ) -> Result<Download, Error> {
        let (digest, size) = image.layer;
        let path = format!("blobs/sha256:{digest}");
        let response = image.registry.get(&path, "*/*").await;
        let response = response.map_err(|problem| unusable(&source.redacted(), &problem))?;
        let plan = Plan {
            file: Some("plugin.wasm"),
            most_received: size,
            digest: Some(digest),
            ..self.plan(source, directory)
        };
        plan.carry_out(response.into_body()).await
    }
}

impl Image {
    /// Whether a configured checksum means this image: its manifest, or the index of all platforms.
    pub(crate) fn is(&self, checksum: &str) -> bool {
        self.digest == checksum || self.index.as_deref() == Some(checksum)
    }
}

impl Registry {
    async fn manifest(&mut self, version: &str) -> Result<Manifest, String> {
        let path = format!("manifests/{version}");
        let mut response = self.get(&path, manifest::ACCEPT).await?;
        let body = response.body_mut().collect(MAX_MANIFEST).await;
        let manifest = Manifest::parse(&body.map_err(|error| with_causes(&error))?)?;
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
