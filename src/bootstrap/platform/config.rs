//! Which cloud is queried, and the metadata it has.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::bootstrap::locality::Locality;

/// Which cloud's metadata service is queried, and where.
#[derive(Clone, Debug)]
pub struct Config {
    pub choice: Choice,
    /// Known without a query.
    pub gcp: Option<StaticGcp>,
    /// Host or `host:port` of Google's metadata service, if it is not the usual one.
    pub gcp_host: Option<String>,
    /// The root of system files.
    pub root: PathBuf,
    /// Whether AWS is queried over IPv6.
    pub v6: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    Detect,
    Aws,
    Azure,
    Gcp,
    None,
}

/// Metadata and locality; empty if no cloud answered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Platform {
    pub metadata: BTreeMap<String, String>,
    pub locality: Locality,
}

impl Choice {
    /// Reads `CLOUD_PLATFORM`. An unknown value means detection.
    pub fn parse(text: &str) -> Self {
        match text.to_ascii_lowercase().as_str() {
            "aws" => Self::Aws,
            "azure" => Self::Azure,
            "gcp" => Self::Gcp,
            "none" => Self::None,
            _ => Self::Detect,
        }
    }
}

/// Metadata of Google Cloud from `GCP_METADATA` and other variables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StaticGcp {
    pub project: String,
    pub project_number: String,
    pub cluster: String,
    pub location: String,
    pub quota_project: String,
    pub zone: String,
}

impl StaticGcp {
    /// Reads `project|number|cluster|location`.
    pub fn parse(text: &str, quota_project: String, zone: String) -> Option<Self> {
        let mut parts = text.split('|').map(str::to_owned);
        let metadata = Self {
            project: parts.next()?,
            project_number: parts.next()?,
            cluster: parts.next()?,
            location: parts.next()?,
            quota_project,
            zone,
        };
        parts.next().is_none().then_some(metadata)
    }
}
