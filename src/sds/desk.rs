//! What both forms of the protocol have in common: who asks, which names there are, and limits.
//!
//! Does not know what was sent.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::google::rpc;
use tonic::Status;

use super::metrics::Metrics;
use super::secret::Shown;
use crate::secrets::files::source::FileError;
use crate::secrets::name::{Name, UnknownName, escaped};

/// The most names one stream may ask for, and the most unknown ones it may ask for in its life.
const MOST_NAMES: usize = 10_000;

/// How many bytes of Envoy's reason for a refusal are logged.
const LONGEST_REASON: usize = 1024;

/// A request some clients of the shared discovery engine begin with; it asks for nothing.
const HEALTH_TYPE_URL: &str = "type.googleapis.com/istio.v1.HealthInformation";

/// One stream's part of the protocol that has nothing to do with its form.
#[derive(Debug)]
pub(super) struct Desk {
    pub(super) id: u64,
    pub(super) metrics: Metrics,
    /// Whether the workload's own names are served here.
    serves_workload: bool,
    /// Whether a request has said which node this is.
    introduced: bool,
    /// Hashes of the unknown names that were logged.
    unknown: HashSet<u64>,
}

/// A name nothing is served under on this socket.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(super) enum Unserved {
    #[error(transparent)]
    Unknown(#[from] UnknownName),
    #[error("{0} is served on the workload's own socket, only secrets from files are on this one")]
    Elsewhere(Name),
}

/// What keeps the answer for names that were asked for.
#[derive(Clone, Debug, Default)]
pub(super) struct Waits {
    pub(super) authority: bool,
    pub(super) reading: bool,
    /// Why the first of those from files that are no good is not.
    pub(super) missing: Option<Arc<FileError>>,
}

impl Waits {
    pub(super) fn of(shown: impl Iterator<Item = Shown>) -> Self {
        let mut waits = Self::default();
        for shown in shown {
            match shown {
                Shown::NotYet => waits.authority = true,
                Shown::Pending => waits.reading = true,
                Shown::Missing(error) => {
                    waits.missing.get_or_insert(error);
                }
                Shown::There(_) => {}
            }
        }
        waits
    }
}

impl Desk {
    pub(super) fn new(id: u64, metrics: Metrics, serves_workload: bool) -> Self {
        Self {
            id,
            metrics,
            serves_workload,
            introduced: false,
            unknown: HashSet::new(),
        }
    }

    /// Whether a request is none. Envoy says which node it is in the first request only.
    pub(super) fn is_skipped(
        &mut self,
        type_url: &str,
        node: Option<&Node>,
    ) -> Result<bool, Status> {
        if self.introduced {
            return Ok(false);
        }
        if type_url == HEALTH_TYPE_URL {
            tracing::warn!(target: "ads", "ADS: {} skipped a leading health report", self.id);
            return Ok(true);
        }
        if node.is_none_or(|node| node.id.is_empty()) {
            return Err(Status::invalid_argument("missing node information"));
        }
        self.introduced = true;
        Ok(false)
    }

    pub(super) fn refused(&self, refusal: &rpc::Status) {
        let (id, code) = (self.id, refusal.code);
        let reason = escaped(&refusal.message, LONGEST_REASON);
        self.metrics.rejects.inc();
        tracing::warn!(target: "ads", "ADS:SDS: ACK ERROR {id} {code}:{reason}");
    }

    pub(super) fn bound(&self, names: usize) -> Result<(), Status> {
        if names <= MOST_NAMES {
            return Ok(());
        }
        Err(Status::resource_exhausted(format!(
            "{names} names in one request, expected at most {MOST_NAMES}"
        )))
    }

    pub(super) fn parse(&self, text: &str) -> Result<Name, Unserved> {
        let name = text.parse()?;
        match name {
            Name::Default | Name::RootCa if !self.serves_workload => Err(Unserved::Elsewhere(name)),
            _ => Ok(name),
        }
    }

    pub(super) fn warn_once(&mut self, text: &str, error: &Unserved) -> Result<(), Status> {
        let mut hasher = DefaultHasher::new();
        text.hash(&mut hasher);
        if !self.unknown.insert(hasher.finish()) {
            return Ok(());
        }
        if self.unknown.len() > MOST_NAMES {
            return Err(Status::resource_exhausted(format!(
                "more than {MOST_NAMES} unknown names on one stream"
            )));
        }
        tracing::warn!(target: "sds", "stream {}: {error}; left unanswered", self.id);
        Ok(())
    }
}
