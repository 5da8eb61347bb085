//! What the cloud knows of the machine: metadata for istiod, and the locality when no label has it.
//!
//! Google Cloud, AWS and Azure are asked at once; the first that answers is it. All of it together
//! has [`LIMIT`], and Envoy starts without the answer when there is none by then: locality is a
//! preference, a pod that does not start is an outage. `CLOUD_PLATFORM` names the one to ask, or
//! none; a static `GCP_METADATA` needs no network.
//!
//! Does not ask for the labels of a virtual machine, which needs credentials of the cloud.

mod aws;
mod azure;
mod gcp;
mod http;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

pub use super::locality::Locality;
pub use gcp::Static as StaticGcp;
pub(crate) use gcp::identity as google_identity;

/// The longest the clouds may take.
const LIMIT: Duration = Duration::from_secs(1);
/// How long a metadata service of this very machine may take for one answer.
const CALL: Duration = Duration::from_millis(100);
/// The address of every cloud's metadata service.
const SERVICE: SocketAddr = SocketAddr::new(
    std::net::IpAddr::V4(std::net::Ipv4Addr::new(169, 254, 169, 254)),
    80,
);

/// Which cloud to ask, and where.
#[derive(Clone, Debug)]
pub struct Config {
    pub choice: Choice,
    /// What is known of Google Cloud without asking.
    pub gcp: Option<StaticGcp>,
    /// Where Google's metadata service is, when it is not where it always is.
    pub gcp_host: Option<String>,
    /// Where files of the system are.
    pub root: PathBuf,
    /// Where AWS is asked over IPv6, in pods that have it.
    pub v6: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    Find,
    Aws,
    Azure,
    Gcp,
    None,
}

/// What was found; empty when nothing was.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Platform {
    pub metadata: BTreeMap<String, String>,
    pub locality: Locality,
}

impl Choice {
    /// The value of `CLOUD_PLATFORM`. What it does not name is looked for.
    pub fn parse(text: &str) -> Self {
        match text.to_ascii_lowercase().as_str() {
            "aws" => Self::Aws,
            "azure" => Self::Azure,
            "gcp" => Self::Gcp,
            "none" => Self::None,
            _ => Self::Find,
        }
    }
}

/// Asks the clouds.
pub async fn discover(config: &Config) -> Platform {
    let asked = tokio::time::timeout(LIMIT, ask(config)).await;
    asked.unwrap_or_else(|_| {
        tracing::info!("no cloud told within {LIMIT:?} where this is; going on without");
        Platform::default()
    })
}

async fn ask(config: &Config) -> Platform {
    match config.choice {
        Choice::None => Platform::default(),
        Choice::Aws => aws::describe(config).await,
        Choice::Azure => azure::describe().await,
        Choice::Gcp => gcp::describe(config).await,
        Choice::Find => find(config).await,
    }
}

async fn find(config: &Config) -> Platform {
    if config.gcp.is_some() {
        return gcp::describe(config).await;
    }
    if azure::detected(config) {
        return azure::describe().await;
    }
    let (aws, gcp) = (aws::detected(config), gcp::detected(config));
    tokio::pin!(aws, gcp);
    // Both say no soon when they are not here, so waiting for the second costs little.
    tokio::select! {
        true = &mut aws => aws::describe(config).await,
        true = &mut gcp => gcp::describe(config).await,
        else => Platform::default(),
    }
}

/// Pairs that have a value.
fn present<const N: usize>(pairs: [(&str, Option<String>); N]) -> BTreeMap<String, String> {
    let found = pairs.into_iter().filter_map(|(name, value)| {
        Some((name.to_owned(), value.filter(|value| !value.is_empty())?))
    });
    found.collect()
}

#[cfg(test)]
mod tests;
