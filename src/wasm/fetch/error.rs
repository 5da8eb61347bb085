//! The causes of failed fetches.

use std::path::PathBuf;

use http::{StatusCode, Uri};
use serde_json::error::Category;

use super::oci::{IMAGE_LAYERS, MODULE_LAYER};
use crate::net::http_client;
use crate::problem::Problem;

/// The cause of a failed fetch. The caller adds what was fetched.
#[derive(Debug, thiserror::Error)]
pub(super) enum FetchError {
    #[error(transparent)]
    Request(#[from] http_client::Error),
    #[error("cannot set up TLS")]
    Tls(#[from] rustls::Error),
    #[error(transparent)]
    Roots(#[from] Problem),
    #[error("status code {}", .0.as_u16())]
    Status(StatusCode),
    #[error("it has more than {limit} bytes")]
    TooLarge { limit: u64 },
    #[error(transparent)]
    Unpacking(#[from] tokio::task::JoinError),
    #[error(
        "could not parse reference {name:?}: expected registry/repository[:tag][@sha256:digest]"
    )]
    Reference { name: String },
    #[error("{found:?} is not a URL")]
    Url { found: String },
    #[error("{registry} answers {path} with {status}")]
    Answer { registry: Uri, path: String, status: StatusCode },
    #[error("not a manifest")]
    Manifest(#[from] serde_json::Error),
    #[error("manifest digest sha256:{found} does not match requested {version}")]
    OtherManifest { found: String, version: String },
    #[error("its index leads to another index")]
    NestedIndex,
    #[error("no child with platform linux/amd64 in the index")]
    Platform,
    #[error(
        "the given image is in invalid format as an OCI image: found layers [{found}], \
         expected {} or {} as the last, or {MODULE_LAYER}",
        IMAGE_LAYERS[0], IMAGE_LAYERS[1]
    )]
    Layers { found: String },
    #[error("layer of {size} bytes, limit {limit}")]
    LayerTooLarge { size: u64, limit: u64 },
    #[error("found digest {found:?}, expected sha256 in hexadecimal")]
    Digest { found: String },
    #[error("{}", .path.display())]
    CredentialsIn { path: PathBuf, source: Box<Self> },
    #[error(transparent)]
    File(#[from] std::io::Error),
    /// The parser's error is left out because its text may contain a part of the secret.
    #[error("not a Docker configuration in JSON ({0:?} error)")]
    DockerConfig(Category),
    #[error("\"auth\" of the registry is not the base64 of user:password")]
    Auth,
    #[error("credentials with control characters")]
    ControlCharacters,
    #[error("{registry} asks for authorization {how}")]
    Authorization { registry: Uri, how: &'static str },
    #[error("rejected unsafe bearer realm: realm scheme {scheme:?} not allowed")]
    RealmScheme { scheme: String },
    #[error("rejected unsafe bearer realm: host {host} not allowed")]
    RealmHost { host: String },
    #[error("no token")]
    Token(#[source] http_client::Error),
    #[error("token server {host} answers with {status}")]
    TokenAnswer { host: String, status: StatusCode },
    #[error("token server {host} answers without a token")]
    TokenMissing { host: String },
}
