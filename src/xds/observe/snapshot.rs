//! The JSON form of what an [`super::Observer`] has recorded: times in UTC to the second, durations in
//! seconds.

use std::collections::BTreeMap;

use serde::Serialize;

use super::Source;
use crate::xds::last_known_good::KeptSnapshot;
use crate::xds::response::Consumer;

/// Everything an [`super::Observer`] has recorded.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Snapshot {
    /// Streams so far.
    pub streams: u64,
    /// The newest open stream.
    pub stream: Option<StreamSnapshot>,
    pub last_end: Option<EndSnapshot>,
    /// By type URL.
    pub types: BTreeMap<String, TypeSnapshot>,
    /// What is kept on disk, by type URL.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kept: Option<BTreeMap<String, KeptSnapshot>>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StreamSnapshot {
    pub id: u32,
    pub protocol: &'static str,
    pub since: String,
    /// Whether istiod has answered on it. Until then Envoy's stream is held.
    pub connected: bool,
    pub source: Source,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EndSnapshot {
    pub id: u32,
    pub at: String,
    pub reason: String,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TypeSnapshot {
    /// Where its responses go.
    pub consumer: Option<Consumer>,
    /// Requests of Envoy, ACKs and NACKs included.
    pub requests: u64,
    pub responses: u64,
    pub bytes: u64,
    pub acks: u64,
    pub nacks: u64,
    pub last_response: Option<PushSnapshot>,
    pub last_ack: Option<AckSnapshot>,
    pub last_nack: Option<NackSnapshot>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PushSnapshot {
    pub version: String,
    pub nonce: String,
    pub resources: u32,
    pub bytes: u64,
    pub at: String,
    pub age_seconds: f64,
    pub answered: bool,
    pub source: Source,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AckSnapshot {
    pub version: String,
    pub at: String,
    /// Since the response was complete.
    pub after_seconds: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NackSnapshot {
    /// Unknown if the response was forgotten or one of an earlier stream.
    pub version: Option<String>,
    pub reason: String,
    pub at: String,
}

impl TypeSnapshot {
    /// Whether the last response has a NACK. Times have whole seconds; of an ACK and a NACK within one,
    /// the one of this version is the last.
    pub fn is_refused(&self) -> bool {
        let (Some(response), Some(nack)) = (&self.last_response, &self.last_nack) else {
            return false;
        };
        let is_last = self.last_ack.as_ref().is_none_or(|ack| {
            let is_of_this = nack.version.as_ref() == Some(&response.version);
            nack.at > ack.at || (nack.at == ack.at && is_of_this && ack.version != response.version)
        });
        response.answered && is_last
    }
}
