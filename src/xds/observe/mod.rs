//! Records per type URL what the relay has passed on, for `/debug/xdsz` and the metrics.
//!
//! The relay reports each message to its [`Observer`] when it is complete. Up to [`MAX_TYPES`] types
//! have a record of their own; further ones, and those without a usable name, share one. A response
//! has its ACK when a request carries its nonce: from Envoy, or from the agent for what it consumes.

mod record;
mod services;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use parking_lot::Mutex;

use super::Protocol;
use super::end::End;
use super::last_known_good::LastKnownGood;
use super::metrics::Metrics;
use super::request::Request;
use super::response::Received;
use crate::clock::{Clock, rfc3339};
use crate::metrics::{Kind, Registry};
use record::Type;
pub use record::{
    AckSnapshot, EndSnapshot, NackSnapshot, PushSnapshot, Snapshot, StreamSnapshot, TypeSnapshot,
};
pub(super) use services::Services;

/// How many types have a record of their own. A mesh has about ten.
const MAX_TYPES: usize = 64;

/// A type with a longer name is counted with the others.
const MAX_TYPE: usize = 256;

/// How much is kept of a version, a nonce or the reason of an end, in bytes.
const MAX_TEXT: usize = 256;

const OTHER: &str = "other";

/// Records what passes. Clones share the record.
#[derive(Clone, Debug)]
pub struct Observer {
    table: Arc<Mutex<Table>>,
    pub(super) metrics: Metrics,
    kept: Option<LastKnownGood>,
}

/// Where responses come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    Istiod,
    /// What this Envoy or one before it has accepted.
    Kept,
}

#[derive(Debug, Default)]
struct Table {
    types: BTreeMap<String, Type>,
    streams: u64,
    /// By their numbers.
    open: BTreeMap<u32, StreamSnapshot>,
    last_end: Option<EndSnapshot>,
    /// Since when Envoy has served stored configuration, as istiod has not answered since.
    served_since: Option<SystemTime>,
}

type Value = fn(&Type) -> Option<f64>;

/// The metrics per type: name, meaning, kind, and where the value is.
const FAMILIES: [(&str, &str, Kind, Value); 5] = [
    (
        "istio_agent_xds_pushes_total",
        "Discovery responses from istiod",
        Kind::Counter,
        |entry| Some(entry.seen.responses as f64),
    ),
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
        "When the last discovery response came, as seconds of Unix time",
        Kind::Gauge,
        |entry| entry.last.map(|(at, _)| unix_seconds(at)),
    ),
];

impl Observer {
    pub(crate) fn new(registry: &Registry, kept: Option<LastKnownGood>) -> Self {
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
        if kept.is_some() {
            let table = table.clone();
            let (name, help) = (
                "istio_agent_xds_kept_served_since_timestamp_seconds",
                "Since when Envoy has served stored configuration, as seconds of Unix time",
            );
            registry.computed(name, help, Kind::Gauge, &[], move |series| {
                if let Some(since) = table.lock().served_since {
                    series(&[], unix_seconds(since));
                }
            });
        }
        let metrics = Metrics::new(registry);
        Self {
            table,
            metrics,
            kept,
        }
    }

    /// What has been recorded so far.
    pub fn snapshot(&self) -> Snapshot {
        let kept = self.kept.as_ref().and_then(LastKnownGood::snapshot);
        let after_nack = self.kept.as_ref().map(LastKnownGood::after_nack);
        let table = self.table.lock();
        Snapshot {
            kept,
            after_nack: after_nack.unwrap_or_default(),
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

    pub(super) fn stream_began(&self, id: u32, protocol: Protocol) {
        let mut table = self.table.lock();
        table.streams += 1;
        let stream = StreamSnapshot {
            id,
            protocol: match protocol {
                Protocol::Sotw => "SotW",
                Protocol::Delta => "delta",
            },
            since: rfc3339(now()),
            connected: false,
            source: Source::Istiod,
        };
        table.open.insert(id, stream);
    }

    fn change(&self, id: u32, change: impl FnOnce(&mut StreamSnapshot)) {
        self.table.lock().open.get_mut(&id).map(change);
    }

    pub(super) fn istiod_answered(&self, id: u32) {
        self.change(id, |stream| stream.connected = true);
        self.table.lock().served_since = None;
    }

    /// Istiod's stream has ended.
    pub(super) fn istiod_ended(&self, end: &End) {
        self.metrics.istiod_ends.with([end.classes().0]).inc();
    }

    /// From now on what is kept answers.
    pub(super) fn serves_kept(&self, id: u32) {
        self.change(id, |stream| stream.source = Source::Kept);
        self.table.lock().served_since.get_or_insert_with(now);
    }

    pub(super) fn stream_ended(&self, id: u32, end: &End) {
        self.metrics.envoy_ends.with([end.classes().1]).inc();
        let mut table = self.table.lock();
        table.open.remove(&id);
        table.last_end = Some(EndSnapshot {
            id,
            at: rfc3339(now()),
            reason: cut(end.reason()),
        });
    }

    pub(super) fn received(&self, received: Received, source: Source) {
        self.metrics.responses.inc();
        let mut table = self.table.lock();
        table.of(&received.type_url).received(received, source);
    }

    /// Records a request, and the number of services after it, if it changes.
    pub(super) fn requested(&self, request: &Request, services: Option<usize>) {
        if let Some(services) = services {
            self.metrics.services.set(services as f64);
        }
        let bytes = request.frame.len().saturating_sub(super::request::HEAD);
        self.metrics.largest_request.raise(bytes as f64);
        self.table.lock().of(&request.type_url).seen.requests += 1;
        self.answered(&request.type_url, &request.nonce, request.nack.as_deref());
    }

    /// Records the ACK of the response of this nonce, or its NACK with the reason.
    pub(super) fn answered(&self, type_url: &str, nonce: &str, nack: Option<&str>) {
        if nonce.is_empty() {
            return;
        }
        let took = self.table.lock().of(type_url).answered(nonce, nack);
        if let Some(took) = took {
            self.metrics.push_to_ack.observe(took.as_secs_f64());
        }
    }
}

impl Table {
    /// The entry of a type, or that of all others.
    fn of(&mut self, type_url: &str) -> &mut Type {
        let is_named = (1..=MAX_TYPE).contains(&type_url.len());
        let has_room = self.types.len() < MAX_TYPES;
        let name = match is_named && (has_room || self.types.contains_key(type_url)) {
            true => type_url,
            false => OTHER,
        };
        self.types.entry(name.to_owned()).or_default()
    }
}

pub(super) fn now() -> SystemTime {
    Clock::system().now()
}

pub(super) fn unix_seconds(at: SystemTime) -> f64 {
    let since = at.duration_since(SystemTime::UNIX_EPOCH);
    since.unwrap_or_default().as_secs_f64()
}

/// What is kept of a text.
fn beginning(text: &str) -> &str {
    let end = (0..=MAX_TEXT.min(text.len())).rfind(|&end| text.is_char_boundary(end));
    &text[..end.unwrap_or(0)]
}

fn cut(mut text: String) -> String {
    text.truncate(beginning(&text).len());
    text
}
