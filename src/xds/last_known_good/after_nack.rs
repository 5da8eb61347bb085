//! Sends stored versions of resources that a new Envoy has refused, because it has no earlier version of them.
//!
//! The writer knows which resources Envoy has refused, and asks the stream for their stored versions
//! ([`LookupRequest`]). The stream asks Envoy which of them it has, reads the others from the store, and sends them
//! in one response ([`Stored`]) while no response of the type is unanswered. Other resources that a stored one
//! needs come from istiod, or from the store after a delay ([`STORED_VERSION_DELAY`]). istiod does not get Envoy's
//! ACK or NACK of the response.
//!
//! [`STORED_VERSION_DELAY`]: super::file::STORED_VERSION_DELAY

use std::collections::HashSet;
use std::io;
use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use futures_util::stream::BoxStream;
use prost::Message;
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;

use super::file::{Index, LookupRequest, TypeFile, file_name, refused_names, unix_rfc3339};
use super::{DIRECTORY, Shared, Type};
use crate::envoy::inspect;
use crate::files::directory::Directory;
use crate::problem::{Problem, codes};
use crate::runtime::clock::rfc3339;
use crate::xds::request::{HEAD, shortened};
use crate::xds::wire::digest;

/// The nonce of responses with stored versions. istiod uses UUIDs.
pub(crate) const NONCE: &str = "kept-after-nack";

/// The most requests of the writer that wait for the stream.
pub(super) const MAX_WAITING: usize = 16;

/// The most resources that a log line or a problem names.
const MAX_NAMES: usize = 5;

/// Stored versions of the resources that Envoy lacks.
#[derive(Debug)]
pub(crate) struct Stored {
    pub(super) request: LookupRequest,
    /// The response for Envoy, if there is a stored version of any resource.
    pub(super) frame: Option<Bytes>,
    pub(super) resources: Vec<StoredResource>,
}

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

/// The stored versions, for each request of the writer.
pub(crate) type StoredStream = BoxStream<'static, Stored>;

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

/// Looks up the stored versions that the writer asks for, one request after the other.
pub(super) fn look_up_each(
    shared: Arc<Shared>,
    requests: mpsc::Receiver<LookupRequest>,
) -> StoredStream {
    let requests = ReceiverStream::new(requests);
    let stored = requests.then(move |request| look_up(shared.clone(), request));
    Box::pin(stored.filter_map(|stored| stored))
}

/// Asks Envoy which resources it has, and reads the stored versions of those it lacks. Logs an error and returns
/// None if either fails; the writer asks again later.
async fn look_up(shared: Arc<Shared>, request: LookupRequest) -> Option<Stored> {
    let type_url = request.type_url;
    let accepted = inspect::accepted_names(shared.admin?, type_url).await;
    let read = spawn_blocking(move || {
        let names = accepted.map_err(io::Error::other)?;
        let accepted = names.iter().map(|name| digest(name.as_bytes())).collect();
        read_stored(&shared, request, &accepted)
    });
    let stored = read.await.unwrap_or_else(|panic| Err(panic.into()));
    stored
        .inspect_err(|error| {
            tracing::warn!(target: "xdsproxy", "cannot look for stored versions of {type_url}: {error}");
        })
        .ok()
}

/// Reads the stored versions of requested resources of which Envoy has accepted no version.
pub(super) fn read_stored(
    shared: &Shared,
    request: LookupRequest,
    accepted: &HashSet<u64>,
) -> io::Result<Stored> {
    let mut stored = Stored { request, frame: None, resources: Vec::new() };
    let (type_url, reasons) = (stored.request.type_url, &stored.request.reasons);
    let names = reasons.keys();
    let lacking: Vec<_> = names.filter(|name| !accepted.contains(name)).collect();
    // A running Envoy has an earlier version of nearly every resource that it refuses.
    if lacking.is_empty() {
        return Ok(stored);
    }
    // A file that has not been published is another node's.
    if !shared.types.lock().contains_key(type_url) {
        return Ok(stored);
    }
    let directory = Directory::private(&shared.config.volume.directory, DIRECTORY, false)?;
    let Some(index) = Index::open(&directory, type_url)? else {
        return Ok(stored);
    };
    let found = lacking.into_iter().filter_map(|it| index.resources.get(it));
    let ranges: Vec<_> = found.cloned().collect();
    if ranges.is_empty() {
        return Ok(stored);
    }
    let mut frame = Vec::new();
    index.respond(ranges, type_url, NONCE, |bytes| {
        frame.extend_from_slice(bytes);
        Ok(())
    })?;
    let current = unix_rfc3339(index.header.refused_current_at());
    let names = Names::decode(&frame[HEAD..])?.resources.into_iter();
    let resources = names.map(|Name { name }| StoredResource {
        reason: {
            let reason = reasons.get(&digest(name.as_bytes()));
            reason.map_or("", |reason| reason).to_owned()
        },
        name,
        since: rfc3339(SystemTime::now()),
        current: current.clone(),
    });
    stored.resources = resources.collect();
    stored.resources.sort_by(|a, b| a.name.cmp(&b.name));
    stored.frame = Some(frame.into());
    Ok(stored)
}

impl Shared {
    /// Records and logs that Envoy has stored versions instead of istiod's, or that it has refused them as well.
    pub(super) fn record_stored_ack_or_nack(&self, stored: Stored, refusal: Option<&str>) {
        let type_url = stored.request.type_url;
        let named = refusal.map(refused_names).unwrap_or_default();
        let (refused, accepted): (Vec<_>, Vec<_>) = stored.resources.into_iter().partition(|it| {
            let is_named = named.is_empty() || named.contains(&digest(it.name.as_bytes()));
            refusal.is_some() && is_named
        });
        if let Some(reason) = refusal {
            let reason = shortened(reason);
            let subject = subject(type_url, &refused);
            tracing::error!(target: "xdsproxy", "Envoy refuses the stored version of {subject} as well: {reason}");
        }
        if !accepted.is_empty() {
            tracing::error!(target: "xdsproxy", "{}", problem(type_url, &accepted));
            let mut after_nack = self.after_nack.lock();
            let resources = after_nack.entry(type_url).or_default();
            resources.retain(|old| accepted.iter().all(|new| new.name != old.name));
            resources.extend(accepted);
        }
    }

    /// Removes resources of which Envoy has istiod's version again, or that istiod has removed.
    pub(super) fn end_after_nack(&self, type_url: Type, file: &TypeFile) {
        let mut after_nack = self.after_nack.lock();
        let Some(resources) = after_nack.get_mut(type_url) else {
            return;
        };
        let ended: Vec<_> = resources
            .extract_if(.., |it| !file.missing.contains_key(&digest(it.name.as_bytes())))
            .collect();
        if resources.is_empty() {
            after_nack.remove(type_url);
        }
        if !ended.is_empty() {
            let subject = subject(type_url, &ended);
            tracing::info!(
                target: "xdsproxy",
                "Envoy no longer has the stored version of {subject}: istiod has removed it or sent an acceptable one"
            );
        }
    }
}

/// Describes the resources of a type that Envoy has in their stored versions.
pub(crate) fn problem(type_url: &str, resources: &[StoredResource]) -> Problem {
    let first = resources.first();
    let (reason, current) = first.map_or(("", ""), |it| (&it.reason, &it.current));
    let reason = reason.trim_end_matches([' ', '\n', ':']);
    let found = format!("{reason}; stored version current at {current}");
    let code = codes::RESOURCE_REFUSED_STORED_SERVED;
    Problem::new(code, subject(type_url, resources), found)
}

/// Names the type and the first resources.
fn subject(type_url: &str, resources: &[StoredResource]) -> String {
    let first = resources.iter().map(|it| &*it.name).take(MAX_NAMES);
    let names = first.collect::<Vec<_>>().join(", ");
    let more = match resources.len().saturating_sub(MAX_NAMES) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("{} {names}{more}", file_name(type_url))
}
