//! The cloud's metadata of this machine: node metadata for istiod, and the locality if no label has it.
//!
//! Google Cloud, AWS and Azure are detected at once. Discovery as a whole takes at most five seconds, as in
//! pilot-agent, and then Envoy starts without its result: locality is a preference, a pod that does not
//! start is an outage.
//! Labels of a virtual machine, which need credentials of the cloud, are left out.

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
use crate::http_client::Client;
use crate::lifecycle::with_causes;
pub(crate) use gcp::identity as google_identity;
pub use gcp::known as known_google;

/// Bounds discovery as a whole, and one answer of a service that has no shorter bound.
const LIMIT: Duration = Duration::from_secs(5);
/// The link-local address of every cloud's metadata service.
const SERVICE: &str = "169.254.169.254";
const MAX_ANSWER: usize = 1 << 20;

/// Members of node metadata by name; none is empty.
pub type Metadata = BTreeMap<String, String>;

/// Which cloud's metadata service is queried, and where.
#[derive(Clone, Debug)]
pub struct Config {
    /// `aws`, `azure`, `gcp` or `none` in any case; the platform is detected for other texts.
    pub choice: String,
    /// Google's metadata where it is known without a query.
    pub gcp: Option<Metadata>,
    /// Host or `host:port` of Google's metadata service, if it is not the usual one.
    pub gcp_host: Option<String>,
    pub root: PathBuf,
    /// Whether AWS is queried over IPv6.
    pub v6: bool,
}

/// Metadata and locality; empty if no cloud answered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Platform {
    pub metadata: Metadata,
    pub locality: Locality,
}

pub async fn discover(config: &Config) -> Platform {
    let found = tokio::time::timeout(LIMIT, describe(config)).await;
    found.unwrap_or_else(|_| {
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
        _ if azure::detected(config) => azure::describe().await,
        _ => {
            let (aws, gcp) = (aws::detected(config), gcp::detected(config));
            tokio::pin!(aws, gcp);
            // Both say no soon when they are not here, so waiting for the second costs little.
            tokio::select! {
                true = &mut aws => aws::describe(config).await,
                true = &mut gcp => gcp::describe(config).await,
                else => Platform::default(),
            }
        }
    }
}

/// Sends a request with one header to `host`, a host or `host:port`. None if no answer arrives within
/// `limit`: then this is another cloud.
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
    let client = Client::default();
    let answer = client.fetch(request, limit, MAX_ANSWER).await;
    let answer = answer.inspect_err(|error| {
        let error = with_causes(error);
        tracing::debug!(error, path, "a metadata service did not answer");
    });
    answer.ok()
}

fn success(answer: Option<Response<Bytes>>) -> Option<String> {
    let answer = answer.filter(|answer| answer.status().is_success())?;
    Some(String::from_utf8_lossy(answer.body()).into_owned())
}

/// Queries all members, of which each has a name and a path, at once.
async fn query<F>(members: &[(&str, &'static str)], get: impl Fn(&'static str) -> F) -> Metadata
where
    F: Future<Output = Option<String>>,
{
    let values = join_all(members.iter().map(|(_, path)| get(path))).await;
    let values = values.into_iter().map(Option::unwrap_or_default);
    present(members.iter().map(|(name, _)| *name).zip(values))
}

fn present<'n>(pairs: impl IntoIterator<Item = (&'n str, String)>) -> Metadata {
    let pairs = pairs.into_iter().filter(|(_, value)| !value.is_empty());
    pairs
        .map(|(name, value)| (name.to_owned(), value))
        .collect()
}

#[cfg(test)]
mod tests;
