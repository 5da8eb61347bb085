//! Reads the cloud's metadata of this machine: node metadata for istiod, and the locality if no label has it.
//!
//! Google Cloud, AWS and Azure are detected concurrently. [`discover`] takes at most five seconds, like
//! pilot-agent; then Envoy starts without the result, because a missing locality costs less than a pod that does
//! not start. Labels of a virtual machine, which need credentials of the cloud, are not read.

mod aws;
mod azure;
mod gcp;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use http::{Method, Request, Response};

pub use super::node::Locality;
use crate::net::http_client::Client;
use crate::runtime::lifecycle::with_causes;
pub(crate) use gcp::identity as google_identity;
pub use gcp::known as known_google;

/// The limit of discovery as a whole, and of a response that has no shorter limit.
const LIMIT: Duration = Duration::from_secs(5);
/// The link-local address of every cloud's metadata service.
const SERVICE: &str = "169.254.169.254";
const MAX_RESPONSE: usize = 1 << 20;

/// Members of node metadata by name; empty ones are left out.
pub type Metadata = BTreeMap<String, String>;

/// Selects the cloud whose metadata service is queried, and its address.
#[derive(Clone, Debug)]
pub struct Config {
    /// `aws`, `azure`, `gcp` or `none` in any case; the platform is detected for other texts.
    pub choice: String,
    /// Google's metadata, if it is known without a query.
    pub gcp: Option<Metadata>,
    /// Host or `host:port` of Google's metadata service, if it is not the usual one.
    pub gcp_host: Option<String>,
    /// The root of the file system.
    pub root: PathBuf,
    /// Queries AWS over IPv6.
    pub v6: bool,
}

/// The metadata and locality of the cloud; empty if no metadata service has answered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Platform {
    pub metadata: Metadata,
    pub locality: Locality,
}

pub async fn discover(config: &Config) -> Platform {
    let platform = tokio::time::timeout(LIMIT, describe(config)).await;
    platform.unwrap_or_else(|_| {
        tracing::info!(
            "no metadata service answered within {LIMIT:?}; continuing without platform metadata"
        );
        Platform::default()
    })
}

async fn describe(config: &Config) -> Platform {
    match config.choice.to_ascii_lowercase().as_str() {
        "none" => Platform::default(),
        "aws" => aws::describe(config).await,
        "azure" => azure::describe().await,
        "gcp" => gcp::describe(config).await,
        _ if config.gcp.is_some() => gcp::describe(config).await,
        _ if azure::detect(config) => azure::describe().await,
        _ => {
            let aws = aws::detect(config);
            let gcp = gcp::detect(config);
            tokio::pin!(aws, gcp);
            // Both fail soon on another machine, so waiting for the second costs little.
            tokio::select! {
                true = &mut aws => aws::describe(config).await,
                true = &mut gcp => gcp::describe(config).await,
                else => Platform::default(),
            }
        }
    }
}

/// Sends a request with one header to `host`, a host or `host:port`. Returns None if no response arrives within
/// `limit`, as on a machine of another cloud.
async fn request(
    host: &str,
    method: Method,
    path: &str,
    (name, value): (&str, &str),
    limit: Duration,
) -> Option<Response<Bytes>> {
    let request = Request::builder()
        .method(method)
        .uri(format!("http://{host}{path}"))
        .header(name, value)
        .body(Bytes::new())
        .ok()?;
    Client::default()
        .fetch(request, limit, MAX_RESPONSE)
        .await
        .inspect_err(|error| {
            let error = with_causes(error);
            tracing::debug!(error, path, "a metadata service did not answer");
        })
        .ok()
}

/// Returns the body of a successful response.
fn success(response: Option<Response<Bytes>>) -> Option<String> {
    let response = response.filter(|response| response.status().is_success())?;
    Some(String::from_utf8_lossy(response.body()).into_owned())
}

/// Queries all members, given by name and path, concurrently.
async fn query<F>(members: &[(&str, &'static str)], get: impl Fn(&'static str) -> F) -> Metadata
where
    F: Future<Output = Option<String>>,
{
    let responses = join_all(members.iter().map(|(_, path)| get(path))).await;
    let values = responses.into_iter().map(Option::unwrap_or_default);
    present(members.iter().map(|(name, _)| *name).zip(values))
}

/// Leaves out empty values.
fn present<'n>(pairs: impl IntoIterator<Item = (&'n str, String)>) -> Metadata {
    let pairs = pairs.into_iter().filter(|(_, value)| !value.is_empty());
    pairs.map(|(name, value)| (name.to_owned(), value)).collect()
}

#[cfg(test)]
mod tests;
