//! Records the requests and responses of the relay per type URL, for `/debug/xdsz` and the metrics.
//!
//! The relay reports each complete message to its [`Observer`]. Up to [`MAX_TYPES`] types have a separate
//! record; all others, and types without a usable name, share one. The ACK of a response is the request with
//! its nonce, from Envoy, or from the agent for a response that the agent consumes.

mod record;
mod services;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::Protocol;
use super::end::End;
use super::ledger::Ledger;
use super::liveness::History;
use super::metrics::Metrics;
use super::request::{Request, shortened};
use super::response::Received;
use crate::metrics::{Kind, Registry};
use crate::problem::Problem;
use crate::runtime::clock::rfc3339;
use record::Type;
pub use record::{
    AckSnapshot, EndSnapshot, NackSnapshot, PushSnapshot, Snapshot, StreamSnapshot, TypeSnapshot,
};
pub(super) use services::Services;

pub use super::on_demand::OnDemandSnapshot;

/// The most types with a separate record. A mesh has about ten.
const MAX_TYPES: usize = 64;

/// The longest name of a type with a separate record, in bytes.
const MAX_TYPE: usize = 256;

/// The most bytes of a version, a nonce or the reason of an end that are recorded.
const MAX_TEXT: usize = 256;

/// The name of the record that all other types share.
const OTHER: &str = "other";

/// Records requests and responses. Clones share the record.
#[derive(Clone, Debug)]
pub struct Observer {
    table: Arc<Mutex<Table>>,
    pub(super) metrics: Metrics,
    pub(super) history: Arc<Mutex<History>>,
    store: Option<Ledger>,
}

/// The origin of responses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    Istiod,
    /// Stored responses, which this Envoy or an earlier one has accepted. `/debug/xdsz` calls them `kept`.
    #[serde(rename = "kept")]
    Stored,
}

#[derive(Debug, Default)]
struct Table {
    types: BTreeMap<String, Type>,
    streams: u64,
    /// The open streams, by their ids.
    open: BTreeMap<u32, StreamSnapshot>,
    last_end: Option<EndSnapshot>,
    /// The time since which Envoy has stored configuration, without a response of istiod.
    served_since: Option<SystemTime>,
}

type Value = fn(&Type) -> Option<f64>;

/// The metrics per type: name, help, kind and value.
const FAMILIES: [(&str, &str, Kind, Value); 5] = [
    ("istio_agent_xds_pushes_total", "Discovery responses from istiod", Kind::Counter, |entry| {
        Some(entry.seen.responses as f64)
    }),
    (
        "istio_agent_xds_push_bytes_total",
        "Bytes of discovery responses from istiod",
        Kind::Counter,
        |entry| Some(entry.seen.bytes as f64),
    ),
    (
        "istio_agent_xds_acks_total",
        "Discovery responses that were accepted",
        Kind::Counter,
        |entry| Some(entry.seen.acks as f64),
    ),
    (
        "istio_agent_xds_nacks_total",
        "Discovery responses that were refused",
        Kind::Counter,
        |entry| Some(entry.seen.nacks as f64),
    ),
    (
        "istio_agent_xds_last_push_timestamp_seconds",
        "The time of the last discovery response, in seconds of Unix time",
        Kind::Gauge,
        |entry| entry.last.map(|(at, _)| unix_seconds(at)),
    ),
];

impl Observer {
    pub(crate) fn new(registry: &Registry, store: Option<Ledger>) -> Self {
        let table = Arc::<Mutex<Table>>::default();
        for (name, help, kind, value) in FAMILIES {
            let table = table.clone();
            registry.computed(name, help, kind, &["type"], move |series| {
                for (type_url, entry) in &table.lock().types {
                    if let Some(value) = value(entry) {
                        series(&[type_url], value);
                    }
                }
            });
        }
        if store.is_some() {
            let table = table.clone();
            let name = "istio_agent_xds_kept_served_since_timestamp_seconds";
            let help = "The time since which Envoy has served stored configuration, in seconds of Unix time";
            registry.computed(name, help, Kind::Gauge, &[], move |series| {
                if let Some(since) = table.lock().served_since {
                    series(&[], unix_seconds(since));
                }
            });
        }
        Self { table, metrics: Metrics::new(registry), history: Arc::default(), store }
    }

    /// Returns everything that has been recorded so far.
    pub fn snapshot(&self) -> Snapshot {
        let kept = self.store.as_ref().and_then(Ledger::snapshot);
        let after_nack = self.store.as_ref().map(Ledger::after_nack);
        let accepted = self.store.as_ref().map(Ledger::accepted);
        let rejected = self.store.as_ref().map(Ledger::rejected);
        let on_demand = self.store.as_ref().and_then(Ledger::on_demand);
        let table = self.table.lock();
        Snapshot {
            kept,
            write_failure: self.store.as_ref().and_then(Ledger::write_failure),
            on_demand,
            after_nack: after_nack.unwrap_or_default(),
            accepted: accepted.unwrap_or_default(),
            rejected: rejected.unwrap_or_default(),
            served_since: table.served_since.map(rfc3339),
            streams: table.streams,
            stream: table.open.values().next_back().cloned(),
            last_end: table.last_end.clone(),
            types: table
                .types
                .iter()
                .map(|(type_url, entry)| (type_url.clone(), entry.snapshot()))
                .collect(),
        }
    }

    /// Records the beginning of a client's stream.
    pub(super) fn record_stream_begin(&self, id: u32, protocol: Protocol) {
        let mut table = self.table.lock();
        table.streams += 1;
        let stream = StreamSnapshot {
            id,
            protocol: match protocol {
                Protocol::Sotw => "SotW",
                Protocol::Delta => "delta",
            },
            since: rfc3339(SystemTime::now()),
            began: Instant::now(),
            connected: false,
            source: Source::Istiod,
            problem: None,
        };
        table.open.insert(id, stream);
    }

    /// Records the first response of istiod on a stream.
    pub(super) fn record_first_response(&self, id: u32) {
        let mut table = self.table.lock();
        table.served_since = None;
        if let Some(stream) = table.open.get_mut(&id) {
            stream.connected = true;
        }
    }

    /// Records what does not work on a stream.
    pub(super) fn record_problem(&self, id: u32, problem: Option<&Problem>) {
        if let Some(stream) = self.table.lock().open.get_mut(&id) {
            stream.problem = problem.cloned();
        }
    }

    /// Counts the end of istiod's stream.
    pub(super) fn record_istiod_end(&self, end: &End) {
        self.metrics.istiod_ends.with([end.classes().0]).inc();
    }

    /// Records that stored configuration is served on a stream.
    pub(super) fn record_stored_served(&self, id: u32) {
        let mut table = self.table.lock();
        table.served_since.get_or_insert_with(SystemTime::now);
        if let Some(stream) = table.open.get_mut(&id) {
            stream.source = Source::Stored;
        }
    }

    /// Records the end of the client's stream.
    pub(super) fn record_stream_end(&self, id: u32, end: &End) {
        self.metrics.envoy_ends.with([end.classes().1]).inc();
        let mut table = self.table.lock();
        table.open.remove(&id);
        table.last_end =
            Some(EndSnapshot { id, at: rfc3339(SystemTime::now()), reason: cut(end.reason()) });
    }

    /// Records a response.
    pub(super) fn record_response(&self, received: Received, source: Source) {
        self.metrics.responses.inc();
        self.table.lock().entry(&received.type_url).record_response(received, source);
    }

    /// Records a request of the client, and the ACK or NACK in it.
    pub(super) fn record_request(&self, request: &Request) {
        let bytes = request.frame.len().saturating_sub(super::request::HEAD);
        self.metrics.largest_request.raise(bytes as f64);
        self.table.lock().entry(&request.type_url).seen.requests += 1;
        let nack = request.rejection.as_deref().map(shortened);
        self.record_ack_or_nack(&request.type_url, &request.nonce, nack.as_deref());
    }

    /// Records the ACK of the response with this nonce, or its NACK with the reason.
    pub(super) fn record_ack_or_nack(&self, type_url: &str, nonce: &str, nack: Option<&str>) {
        if nonce.is_empty() {
            return;
        }
        let latency = self.table.lock().entry(type_url).record_ack_or_nack(nonce, nack);
        if let Some(latency) = latency {
            self.metrics.push_to_ack.observe(latency.as_secs_f64());
        }
    }
}

impl Table {
    /// Returns the record of a type, or the shared one. Creates it if it does not exist.
    fn entry(&mut self, type_url: &str) -> &mut Type {
        let is_usable = (1..=MAX_TYPE).contains(&type_url.len());
        let has_room = self.types.len() < MAX_TYPES || self.types.contains_key(type_url);
        let name = if is_usable && has_room { type_url } else { OTHER };
        self.types.entry(name.to_owned()).or_default()
    }
}

/// Converts a time to seconds of Unix time, at least 0.
fn unix_seconds(time: SystemTime) -> f64 {
    time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// Returns the beginning of a text, at most [`MAX_TEXT`] bytes.
fn beginning(text: &str) -> &str {
    let end = (0..=MAX_TEXT.min(text.len())).rfind(|&end| text.is_char_boundary(end));
    &text[..end.unwrap_or(0)]
}

/// Cuts a text after at most [`MAX_TEXT`] bytes.
fn cut(mut text: String) -> String {
    text.truncate(beginning(&text).len());
    text
}
