//! Finds the resources that Envoy has rejected, and sends their stored versions to a new Envoy, which has no earlier one.
//!
//! istiod does not get Envoy's ACK or NACK of a response with stored versions. Other resources that a stored one needs
//! come from istiod, or from the store after a delay.

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryResponse;
use prost::Message;
use serde::Serialize;

use super::store::{Piece, Store};
use super::{Type, unix_rfc3339};
use crate::problem::{Code, Problem};
use crate::runtime::clock::rfc3339;
use crate::xds::request::HEAD;
use crate::xds::wire::NameDigest;

/// The nonce of responses with stored versions. istiod uses UUIDs.
pub(crate) const NONCE: &str = "kept-after-nack";

/// The most resources that a log line or a problem names.
pub(super) const MAX_NAMES: usize = 5;

/// The beginnings of Envoy's reason for a partial NACK: it has rejected single resources and applied the others.
/// Entries of a name and a reason follow. After any other NACK nothing of the response is accepted.
const PARTIAL_NACKS: [&str; 2] =
    ["Error adding/updating cluster(s) ", "Error adding/updating listener(s) "];
/// The longest name that is looked for in a reason. A reason may be long, and each name is hashed.
const MAX_NAME: usize = 4096;
/// The end of a reason that Envoy has truncated.
const CUT: &str = "(truncated)";

/// A resource that Envoy has in its stored version.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StoredResource {
    pub name: String,
    /// The reason why Envoy does not have istiod's version.
    pub reason: String,
    /// The time at which Envoy got the stored version.
    pub since: String,
    /// The last time at which the stored version was known to be current.
    pub current: String,
}

impl StoredResource {
    pub(super) fn digest(&self) -> NameDigest {
        NameDigest::of(self.name.as_bytes())
    }
}

/// Stored versions on their way to Envoy.
#[derive(Debug)]
pub(super) struct Stored {
    pub(super) type_of: Type,
    pub(super) resources: Vec<StoredResource>,
}

/// The names in a delta response. The resources are skipped, because copies of them would take memory.
#[derive(Clone, PartialEq, Message)]
struct Names {
    #[prost(message, repeated, tag = "2")]
    resources: Vec<Name>,
}

#[derive(Clone, PartialEq, Message)]
struct Name {
    #[prost(string, tag = "3")]
    name: String,
}

/// The resources of a response that Envoy has rejected.
#[derive(Debug, PartialEq)]
pub(in crate::xds) enum Rejected {
    All,
    These(HashSet<NameDigest>),
    /// The list is cut: Envoy has accepted some resources, and does not say which.
    Unknown,
}

impl Rejected {
    pub(in crate::xds) fn contains(&self, name: &NameDigest) -> bool {
        match self {
            Self::These(names) => names.contains(name),
            Self::All | Self::Unknown => true,
        }
    }
}

/// Returns which of the resources in a response Envoy has rejected, by the names in its reason.
///
/// Envoy separates entries by commas or line feeds, and a name from its reason by a colon and a space. Names and reasons
/// may contain each of these, and a name may begin with another one: in each entry the longest name counts.
pub(in crate::xds) fn rejected(reason: &str, names: &HashSet<NameDigest>) -> Rejected {
    let Some(list) = PARTIAL_NACKS.iter().find_map(|it| reason.strip_prefix(it)) else {
        return Rejected::All;
    };
    if list.ends_with(CUT) {
        return Rejected::Unknown;
    }
    let separators = list.match_indices(", ").map(|(at, _)| at + 2);
    let lines = list.match_indices('\n').map(|(at, _)| at + 1);
    let longest = |start: usize| {
        let entry = &list[start..];
        entry
            .rmatch_indices(": ")
            .map(|(end, _)| end)
            .filter(|end| *end <= MAX_NAME)
            .map(|end| NameDigest::of(&entry.as_bytes()[..end]))
            .find(|name| names.contains(name))
    };
    let named: HashSet<_> =
        [0].into_iter().chain(separators).chain(lines).filter_map(longest).collect();
    if named.is_empty() { Rejected::All } else { Rejected::These(named) }
}

/// Returns the names of the resources in these blocks.
pub(super) fn names(pieces: Vec<Piece>) -> io::Result<Vec<String>> {
    let mut bytes = Vec::new();
    for piece in pieces {
        bytes.append(&mut piece.bytes()?);
    }
    Ok(Names::decode(&bytes[..])?.resources.into_iter().map(|Name { name }| name).collect())
}

/// Builds a response with stored resources, as a gRPC frame.
pub(super) fn respond(
    version: &str,
    type_of: Type,
    nonce: &str,
    pieces: Vec<Piece>,
    length: u64,
) -> io::Result<Bytes> {
    let (mut frame, rest) = head_and_rest(version, type_of, nonce, length)?;
    for piece in pieces {
        frame.append(&mut piece.bytes()?);
    }
    frame.extend_from_slice(&rest);
    Ok(frame.into())
}

/// Returns what comes before and after `length` bytes of resources in the gRPC frame of a response.
pub(in crate::xds) fn head_and_rest(
    version: &str,
    type_of: Type,
    nonce: &str,
    length: u64,
) -> io::Result<(Vec<u8>, Vec<u8>)> {
    let rest = DeltaDiscoveryResponse {
        system_version_info: version.to_owned(),
        type_url: type_of.url().to_owned(),
        nonce: nonce.to_owned(),
        ..Default::default()
    }
    .encode_to_vec();
    let length = u32::try_from(length + rest.len() as u64).map_err(io::Error::other)?;
    Ok(([&[0], &length.to_be_bytes()[..]].concat(), rest))
}

/// Reads the stored versions of resources, with the reasons why Envoy needs them. `current` is the time at which they
/// were last current, in seconds of Unix time.
pub(super) fn read(
    store: &mut Store,
    version: &str,
    type_of: Type,
    due: Vec<(NameDigest, Arc<str>)>,
    current: u64,
) -> io::Result<Option<(Bytes, Stored)>> {
    let places: Vec<_> = due.iter().filter_map(|(name, _)| store.get(type_of, *name)).collect();
    if places.is_empty() {
        return Ok(None);
    }
    let length = Store::length(&places);
    let frame = respond(version, type_of, NONCE, store.pieces(places), length)?;
    let reasons: HashMap<_, _> = due.into_iter().collect();
    let mut resources: Vec<_> = Names::decode(&frame[HEAD..])?
        .resources
        .into_iter()
        .map(|Name { name }| StoredResource {
            reason: {
                let reason = reasons.get(&NameDigest::of(name.as_bytes()));
                reason.map_or("", |reason| reason).to_owned()
            },
            name,
            since: rfc3339(SystemTime::now()),
            current: unix_rfc3339(current),
        })
        .collect();
    resources.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(Some((frame, Stored { type_of, resources })))
}

/// Describes the resources of a type that Envoy has in their stored versions.
pub(crate) fn problem(type_url: &str, resources: &[StoredResource]) -> Problem {
    let (reason, current) = resources.first().map_or(("", ""), |it| (&it.reason, &it.current));
    let reason = reason.trim_end_matches([' ', '\n', ':']);
    let found = format!("{reason}; stored version current at {current}");
    Problem::new(Code::ResourceRefusedStoredServed, subject(type_url, resources), found)
}

/// Names the type and the first resources.
pub(super) fn subject(type_url: &str, resources: &[StoredResource]) -> String {
    let names = resources.iter().map(|it| &*it.name).take(MAX_NAMES).collect::<Vec<_>>().join(", ");
    let more = match resources.len().saturating_sub(MAX_NAMES) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("{} {names}{more}", type_url.rsplit('.').next().unwrap_or(type_url))
}
