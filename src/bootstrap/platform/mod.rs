//! The cloud's metadata of this machine: node metadata for istiod, and the locality if no label has it.
//!
//! Google Cloud, AWS and Azure are detected at once. Discovery as a whole takes at most a second, and
//! Envoy starts without its result: locality is a preference, a pod that does not start is an outage.
//! Labels of a virtual machine, which need credentials of the cloud, are left out.

mod aws;
mod azure;
mod config;
mod gcp;
mod request;

use request::LIMIT;

pub use super::locality::Locality;
pub use config::{Choice, Config, Platform, StaticGcp};
pub(crate) use gcp::identity as google_identity;

/// Queries the clouds.
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
    match config.choice {
        Choice::None => Platform::default(),
        Choice::Aws => aws::describe(config).await,
        Choice::Azure => azure::describe().await,
        Choice::Gcp => gcp::describe(config).await,
        Choice::Detect => detect(config).await,
    }
}

async fn detect(config: &Config) -> Platform {
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

#[cfg(test)]
mod tests;
