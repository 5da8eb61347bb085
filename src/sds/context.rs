//! Stream context: what SotW and delta streams have in common.

use std::collections::{BTreeSet, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::google::rpc;
use tonic::{Code, Status};

use super::consumers::Entry;
use super::metrics::Metrics;
use super::names::Names;
use crate::secrets::name::{Name, UnknownName, escaped};

/// The most names one stream may ask for, and the most unknown ones it may ask for in its life.
const MAX_NAMES: usize = 10_000;

/// How many bytes of Envoy's reason for a NACK are logged.
const MAX_REASON: usize = 1024;

/// The type of a leading request that asks for nothing, as some xDS clients send it.
const HEALTH_TYPE_URL: &str = "type.googleapis.com/istio.v1.HealthInformation";

/// Names that are not served, each with the reason.
pub(super) type Unserved = Vec<(String, String)>;

#[derive(Debug)]
pub(super) struct StreamContext {
    pub(super) id: u64,
    pub(super) metrics: Metrics,
    /// Whether `default` and `ROOTCA` are served on this socket.
    serves_workload: bool,
    /// Whether a request has named the node.
    has_node: bool,
    pub(super) entry: Entry,
    pub(super) names: Names,
    /// Hashes of the unknown names that were logged.
    unknown: HashSet<u64>,
}

impl StreamContext {
    pub(super) fn new(entry: Entry, metrics: Metrics, serves_workload: bool) -> Self {
        Self {
            id: entry.id,
            entry,
            metrics,
            serves_workload,
            has_node: false,
            names: Names::default(),
            unknown: HashSet::new(),
        }
    }

    /// Whether a request is to be skipped. The first one must name the node, later ones need not.
    pub(super) fn is_skipped(
        &mut self,
        type_url: &str,
        node: Option<&Node>,
    ) -> Result<bool, Status> {
        if self.has_node {
            return Ok(false);
        }
        if type_url == HEALTH_TYPE_URL {
            tracing::warn!(target: "ads", "ADS: {} skipped a leading health report", self.id);
            return Ok(true);
        }
        if node.is_none_or(|node| node.id.is_empty()) {
            return Err(Status::invalid_argument("missing node information"));
        }
        self.has_node = true;
        Ok(false)
    }

    /// Logs and counts a NACK.
    pub(super) fn nack(&self, error: &rpc::Status) {
        let (id, code) = (self.id, error.code);
        let reason = escaped(&error.message, MAX_REASON);
        self.metrics.rejects.inc();
        self.entry.change(|it| it.refused = Some(reason.clone()));
        tracing::warn!(target: "ads", "ADS:SDS: ACK ERROR {id} {code}:{reason}");
    }

    pub(super) fn check_count(&self, names: usize) -> Result<(), Status> {
        if names <= MAX_NAMES {
            return Ok(());
        }
        Err(Status::resource_exhausted(format!(
            "{names} names in one request, expected at most {MAX_NAMES}"
        )))
    }

    /// The names of a request that are served on this socket, and the others with the reason.
    pub(super) fn parse_all(&self, texts: &[String]) -> Result<(BTreeSet<Name>, Unserved), Status> {
        self.check_count(texts.len())?;
        let (mut served, mut unserved) = (BTreeSet::new(), Unserved::new());
        for text in texts {
            match self.parse(text) {
                Ok(name) => drop(served.insert(name)),
                Err(error) => unserved.push((text.clone(), error)),
            }
        }
        Ok((served, unserved))
    }

    /// The name, or why it is not served on this socket.
    pub(super) fn parse(&self, text: &str) -> Result<Name, String> {
        let name = text
            .parse()
            .map_err(|error: UnknownName| error.to_string())?;
        match name {
            Name::Default | Name::RootCa if !self.serves_workload => Err(format!(
                "{name} is served on the workload's own socket, only secrets from files are on this one"
            )),
            _ => Ok(name),
        }
    }

    /// Logs unserved names, each once.
    pub(super) fn report(&mut self, unserved: &Unserved) -> Result<(), Status> {
        for (text, error) in unserved {
            let mut hasher = DefaultHasher::new();
            text.hash(&mut hasher);
            if !self.unknown.insert(hasher.finish()) {
                continue;
            }
            if self.unknown.len() > MAX_NAMES {
                return Err(Status::resource_exhausted(format!(
                    "more than {MAX_NAMES} unknown names on one stream"
                )));
            }
            tracing::warn!(target: "sds", "stream {}: {error}; left unanswered", self.id);
        }
        Ok(())
    }

    /// Logs how the stream ended.
    pub(super) fn report_end(&self, status: &Status) {
        let (id, code, message) = (self.id, status.code(), status.message());
        match code {
            // How it looks when Envoy goes away.
            Code::Cancelled | Code::Unavailable | Code::DeadlineExceeded => {
                tracing::info!(target: "ads", "ADS: \"\" {id} terminated {code:?}: {message}");
            }
            _ => {
                self.metrics.internal_errors.inc();
                tracing::error!(
                    target: "ads",
                    "ADS: \"\" {id} terminated with error: {code:?}: {message}"
                );
            }
        }
    }
}
