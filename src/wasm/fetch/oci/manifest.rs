//! Reads manifests and indexes of images, and finds the layer with the module.
//!
//! Three layouts are known: an image of Docker and an image of OCI, whose last layer is a tar.gz with
//! a file `plugin.wasm`, and an artifact with a config and a layer that is the module.

use aws_lc_rs::digest::{SHA256, digest};
use serde::Deserialize;

use super::reference::sha256;
use crate::wasm::fetch::unpack::{Packing, hexadecimal};

const DOCKER: &str = "application/vnd.docker.distribution.manifest.v2+json";
const DOCKER_LAYER: &str = "application/vnd.docker.image.rootfs.diff.tar.gzip";
const OCI_LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
const MODULE_LAYER: &str = "application/vnd.module.wasm.content.layer.v1+wasm";

/// What is asked for: manifests and indexes of Docker and OCI.
pub(super) const ACCEPT: &str = "application/vnd.docker.distribution.manifest.v2+json, \
     application/vnd.docker.distribution.manifest.list.v2+json, \
     application/vnd.oci.image.manifest.v1+json, application/vnd.oci.image.index.v1+json";

/// A manifest, or an index of some.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Manifest {
    #[serde(default)]
    schema_version: u32,
    media_type: Option<String>,
    layers: Option<Vec<Descriptor>>,
    /// Of an index only.
    manifests: Option<Vec<Descriptor>>,
    /// Of the bytes it was read from.
    #[serde(skip)]
    pub(super) digest: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    #[serde(default)]
    media_type: String,
    digest: String,
    #[serde(default)]
    size: u64,
    platform: Option<Platform>,
}

#[derive(Debug, Deserialize)]
struct Platform {
    #[serde(default)]
    os: String,
    #[serde(default)]
    architecture: String,
}

/// Where the module is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Layer {
    /// Hexadecimal.
    pub(super) digest: String,
    pub(super) size: u64,
    pub(super) packing: Packing,
}

impl Manifest {
    /// `content_type` is that of the answer, for manifests that do not name their own.
    pub(super) fn parse(bytes: &[u8], content_type: &str) -> Result<Self, String> {
        let parsed = serde_json::from_slice(bytes);
        let mut manifest: Self = parsed.map_err(|error| format!("it is no manifest: {error}"))?;
        let media_type = manifest.media_type.get_or_insert(content_type.to_owned());
        if manifest.schema_version != 2 || media_type.contains("docker.distribution.manifest.v1") {
            let version = manifest.schema_version;
            return Err(format!(
                "unsupported manifest: schema {version}, expected 2"
            ));
        }
        manifest.digest = hexadecimal(digest(&SHA256, bytes).as_ref());
        Ok(manifest)
    }

    pub(super) fn is_index(&self) -> bool {
        self.manifests.is_some()
    }

    /// The digest of the manifest to use of an index: the expected one if it is there, that of this
    /// machine's architecture, or that for amd64, which most modules are published for.
    pub(super) fn choose(&self, expected: Option<&str>) -> Result<String, String> {
        let manifests = self.manifests.as_deref().unwrap_or_default();
        let is_of = |descriptor: &&Descriptor, architecture: &str| match &descriptor.platform {
            Some(platform) => platform.os == "linux" && platform.architecture == architecture,
            None => architecture == "amd64",
        };
        let own = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        };
        let of_architecture = |name| manifests.iter().find(|one| is_of(one, name));
        let pinned = |one: &&Descriptor| expected.is_some() && sha256(&one.digest) == expected;
        let found = manifests.iter().find(pinned);
        let found = found.or_else(|| of_architecture(own).or_else(|| of_architecture("amd64")));
        let found = found.ok_or_else(|| {
            format!("no child with platform linux/{own} or linux/amd64 in the index")
        })?;
        found.hexadecimal().map(str::to_owned)
    }

    /// The layer with the module, of at most `limit` bytes.
    pub(super) fn layer(&self, limit: u64) -> Result<Layer, String> {
        let layers = self.layers.as_deref().unwrap_or_default();
        let invalid = |compat: &str, oci: &str| {
            let problem = "the given image is in invalid format as an OCI image";
            let compat = format!("could not parse as compat variant: {compat}");
            format!("{problem}: {compat}; could not parse as oci variant: {oci}")
        };
        let Some(last) = layers.last() else {
            return Err("the image has no layers".to_owned());
        };
        let found = &last.media_type;
        if self.media_type.as_deref() == Some(DOCKER) {
            return match found == DOCKER_LAYER {
                true => last.layer(Packing::Layer, limit),
                false => Err(format!(
                    "invalid media type {found} (expect {DOCKER_LAYER})"
                )),
            };
        }
        if found == OCI_LAYER {
            return last.layer(Packing::Layer, limit);
        }
        let compat = format!("invalid media type {found} (expect {OCI_LAYER})");
        if layers.len() != 2 {
            let count = layers.len();
            return Err(invalid(
                &compat,
                &format!("number of layers must be 2 but got {count}"),
            ));
        }
        match layers.iter().find(|layer| layer.media_type == MODULE_LAYER) {
            Some(layer) => layer.layer(Packing::Plain, limit),
            None => Err(invalid(
                &compat,
                &format!("no layer has media type {MODULE_LAYER}"),
            )),
        }
    }
}

impl Descriptor {
    fn hexadecimal(&self) -> Result<&str, String> {
        let found = &self.digest;
        sha256(found)
            .ok_or_else(|| format!("found digest {found:?}, expected sha256 in hexadecimal"))
    }

    fn layer(&self, packing: Packing, limit: u64) -> Result<Layer, String> {
        if self.size > limit {
            return Err(format!("the layer has {} bytes, over {limit}", self.size));
        }
        Ok(Layer {
            digest: self.hexadecimal()?.to_owned(),
            size: self.size,
            packing,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn hex(digit: &str) -> String {
        digit.repeat(64)
    }

    fn parse(document: &Value) -> Result<Manifest, String> {
        Manifest::parse(document.to_string().as_bytes(), "")
    }

    fn layers(media_type: &str, layers: &[&str]) -> Result<Layer, String> {
        let digits = ["a", "b", "c"];
        let layers = layers.iter().zip(digits).map(|(media_type, digit)| {
            let digest = format!("sha256:{}", hex(digit));
            json!({"mediaType": media_type, "digest": digest, "size": 7})
        });
        let layers: Vec<_> = layers.collect();
        let document = json!({"schemaVersion": 2, "mediaType": media_type, "layers": layers});
        parse(&document)?.layer(7)
    }

    #[test]
    fn the_three_layouts_are_found_and_others_refused() {
        let oci = "application/vnd.oci.image.manifest.v1+json";
        let config = "application/vnd.module.wasm.config.v1+json";
        let layer = |digit, packing| {
            Ok(Layer {
                digest: hex(digit),
                size: 7,
                packing,
            })
        };
        for (what, media_type, of, expected) in [
            (
                "docker",
                DOCKER,
                &["x", DOCKER_LAYER][..],
                layer("b", Packing::Layer),
            ),
            ("compat", oci, &[OCI_LAYER], layer("a", Packing::Layer)),
            (
                "no media type",
                "",
                &["x", "y", OCI_LAYER],
                layer("c", Packing::Layer),
            ),
            (
                "artifact",
                oci,
                &[config, MODULE_LAYER],
                layer("b", Packing::Plain),
            ),
            (
                "artifact first",
                oci,
                &[MODULE_LAYER, "x"],
                layer("a", Packing::Plain),
            ),
            ("no layer", oci, &[], Err("no layers")),
            (
                "docker with another",
                DOCKER,
                &[OCI_LAYER],
                Err("(expect application/vnd.docker"),
            ),
            (
                "artifact of one",
                oci,
                &[MODULE_LAYER],
                Err("must be 2 but got 1"),
            ),
            (
                "zstd",
                oci,
                &["x", "application/vnd.oci.image.layer.v1.tar+zstd"],
                Err("could not parse as oci"),
            ),
        ] {
            match (layers(media_type, of), expected) {
                (Ok(found), Ok(expected)) => assert_eq!(found, expected, "{what}"),
                (Err(error), Err(part)) => assert!(error.contains(part), "{what}: {error}"),
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
        let own = match std::env::consts::ARCH {
            "aarch64" => "arm64",
            _ => "amd64",
        };
        let (windows, s390x) = (
            child("a", Some(("windows", own))),
            child("b", Some(("linux", "s390x"))),
        );
        let (amd64, native) = (
            child("c", Some(("linux", "amd64"))),
            child("d", Some(("linux", own))),
        );
        let plain = child("e", None);
        let b = hex("b");
        for (children, expected, found) in [
            (vec![&windows, &s390x, &native, &amd64], None, Some("d")),
            (vec![&windows, &s390x, &amd64], None, Some("c")),
            (vec![&windows, &plain], None, Some("e")),
            (vec![&native, &s390x], Some(b.as_str()), Some("b")),
            (vec![&windows, &s390x], None, None),
            (vec![], None, None),
        ] {
            let index =
                parse(&json!({"schemaVersion": 2, "manifests": children})).expect("an index");
            assert!(index.is_index());
            assert_eq!(index.choose(expected).ok(), found.map(hex));
        }
    }

    #[test]
    fn what_is_no_manifest_is_an_error_that_says_why() {
        for (document, expected) in [
            ("<html>", "it is no manifest"),
            ("null", "it is no manifest"),
            (
                r#"{"schemaVersion":1,"fsLayers":[]}"#,
                "schema 1, expected 2",
            ),
            (
                r#"{"schemaVersion":2,"mediaType":"application/vnd.docker.distribution.manifest.v1+json"}"#,
                "unsupported",
            ),
            (
                r#"{"schemaVersion":2,"layers":[{"mediaType":"x"}]}"#,
                "missing field `digest`",
            ),
        ] {
            let error = Manifest::parse(document.as_bytes(), "").expect_err(document);
            assert!(error.contains(expected), "{error}");
        }
        let layer = |digest: &str, size: u64| {
            let layer = json!({"mediaType": OCI_LAYER, "digest": digest, "size": size});
            let manifest = parse(&json!({"schemaVersion": 2, "layers": [layer]}));
            manifest
                .and_then(|manifest| manifest.layer(7))
                .expect_err("an error")
        };
        assert!(layer("sha256:../..", 7).contains("expected sha256 in hexadecimal"));
        assert!(layer(&format!("sha256:{}", hex("a")), 8).contains("8 bytes, over 7"));
    }
}
