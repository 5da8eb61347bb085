//! Sends stored versions of resources that a new Envoy has refused, as it has no version that it could keep.
//!
//! The writer knows which resources Envoy has refused, and asks the stream for their stored versions
//! ([`Missing`]). The stream asks Envoy which of them it has, reads the others from the store, and sends them
//! in one response ([`Stored`]) while no response of the type is unanswered. What a stored resource needs comes
//! from istiod, or after [`PATIENCE`] from the store. Envoy's answer to the response does not reach istiod.

use std::collections::{HashMap, HashSet};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::{BufMut as _, Bytes};
use prost::Message;
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt as _};

use super::file::{Index, TypeFile, named};
use super::replay::respond;
use super::{DIRECTORY, Shared, Type, writer};
use crate::clock::rfc3339;
use crate::directory::Directory;
use crate::envoy::inspect;
use crate::problem::{Problem, codes};
use crate::xds::observe::now;
use crate::xds::request::HEAD;
use crate::xds::wire::digest;

/// The nonce of responses with stored versions. istiod uses UUIDs.
pub(crate) const NONCE: &str = "kept-after-nack";

/// Time that istiod has to send what a stored resource needs.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// Requests of the writer that wait for the stream.
pub(super) const MAX_WAITING: usize = 16;

/// How many resources a log line and a finding name.
const MAX_NAMES: usize = 5;

/// Resources of a type of which Envoy may have no version.
#[derive(Clone, Debug)]
pub(super) struct Missing {
    pub(super) type_url: Type,
    /// How many responses of the type Envoy had answered on the stream.
    pub(super) answered: u32,
    /// Why Envoy has no version, by the digests of the names.
    pub(super) names: HashMap<u64, Arc<str>>,
}

/// Stored versions of the resources that Envoy lacks.
#[derive(Debug)]
pub(crate) struct Stored {
    pub(super) missing: Missing,
    /// The response for Envoy, if there is a stored version of any resource.
    pub(super) frame: Option<Bytes>,
    pub(super) resources: Vec<StoredResource>,
}

/// A resource that Envoy has in its stored version.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StoredResource {
    pub name: String,
    /// Why Envoy does not have istiod's version.
    pub reason: String,
    /// When Envoy got the stored version.
    pub since: String,
    /// When the stored version was last known to be current.
    pub current: String,
}

/// What is stored of resources, for each request of the writer.
pub(crate) type StoredStream = Pin<Box<dyn Stream<Item = Stored> + Send>>;

/// The names in a response.
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

/// Looks for the stored versions that the writer asks for, one request after the other.
pub(super) fn stored(shared: Arc<Shared>, missing: mpsc::Receiver<Missing>) -> StoredStream {
    let stored = ReceiverStream::new(missing).then(move |missing| look(shared.clone(), missing));
    Box::pin(stored.filter_map(|stored| stored))
}

async fn look(shared: Arc<Shared>, missing: Missing) -> Option<Stored> {
    let type_url = missing.type_url;
    let read = async {
        let held = inspect::held(shared.admin?, type_url).await;
        let held: io::Result<HashSet<_>> = held.map_err(io::Error::other).map(|names| {
            let digests = names.iter().map(|name| digest(name.as_bytes()));
            digests.collect()
        });
        let read = spawn_blocking(move || read(&shared, missing, &held?));
        Some(read.await.unwrap_or_else(|panic| Err(panic.into())))
    };
    match read.await? {
        Ok(stored) => Some(stored),
        Err(error) => {
            tracing::warn!(target: "xdsproxy", "cannot look for stored versions of {type_url}: {error}");
            None
        }
    }
}

/// Reads the stored versions of resources that Envoy does not have.
pub(super) fn read(shared: &Shared, missing: Missing, held: &HashSet<u64>) -> io::Result<Stored> {
    let mut stored = Stored {
        missing,
        frame: None,
        resources: Vec::new(),
    };
    let type_url = stored.missing.type_url;
    let names = stored.missing.names.keys();
    let lacking: Vec<_> = names.filter(|name| !held.contains(name)).collect();
    // An Envoy that runs has a version of nearly everything that it refuses.
    if lacking.is_empty() {
        return Ok(stored);
    }
    let directory = Directory::private(&shared.config.volume.directory, DIRECTORY, false)?;
    let (file, header) = match writer::open(&directory, type_url) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(stored),
        found => found?,
    };
    let index = Index::read(&header, file)?;
    let places = lacking
        .into_iter()
        .filter_map(|name| index.resources.get(name));
    let places: Vec<_> = places.cloned().collect();
    if places.is_empty() {
        return Ok(stored);
    }
    let mut frame = Vec::new();
    respond(&index, places, type_url, &header.version, NONCE, |bytes| {
        frame.put_slice(bytes);
        Ok(())
    })?;
    let current = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(header.missing_current()));
    let current = rfc3339(current.unwrap_or(SystemTime::UNIX_EPOCH));
    let names = Names::decode(&frame[HEAD..])?.resources;
    let resources = names.into_iter().map(|Name { name }| StoredResource {
        reason: stored.reason(&name).to_owned(),
        name,
        since: rfc3339(now()),
        current: current.clone(),
    });
    stored.resources = resources.collect();
    stored.resources.sort_by(|a, b| a.name.cmp(&b.name));
    stored.frame = Some(frame.into());
    Ok(stored)
}

impl Stored {
    fn reason(&self, name: &str) -> &str {
        let reason = self.missing.names.get(&digest(name.as_bytes()));
        reason.map_or("", |reason| reason)
    }
}

impl Shared {
    /// Records that Envoy has stored versions in place of istiod's, unless it has refused them as well.
    pub(super) fn stored_answered(&self, stored: Stored, refusal: Option<&str>) {
        let type_url = stored.missing.type_url;
        let refused = refusal.map(named).unwrap_or_default();
        let is_refused = |it: &StoredResource| {
            refusal.is_some()
                && (refused.is_empty() || refused.contains(&digest(it.name.as_bytes())))
        };
        let (refused, accepted): (Vec<_>, Vec<_>) =
            stored.resources.into_iter().partition(is_refused);
        if let Some(reason) = refusal {
            let reason = crate::xds::request::shortened(reason);
            tracing::error!(
                target: "xdsproxy",
                "Envoy refuses the stored version of {} as well: {reason}", subject(type_url, &refused)
            );
        }
        if !accepted.is_empty() {
            tracing::error!(target: "xdsproxy", "{}", problem(type_url, &accepted));
            let mut after_nack = self.after_nack.lock();
            let of_type = after_nack.entry(type_url).or_default();
            of_type.retain(|old| accepted.iter().all(|new| new.name != old.name));
            of_type.extend(accepted);
        }
    }

    /// Forgets resources of which Envoy has istiod's version, or that istiod has removed.
    pub(super) fn end_after_nack(&self, type_url: Type, file: &TypeFile) {
        let mut after_nack = self.after_nack.lock();
        let Some(of_type) = after_nack.get_mut(type_url) else {
            return;
        };
        let ended: Vec<_> = of_type
            .extract_if(.., |it| {
                !file.missing.contains_key(&digest(it.name.as_bytes()))
            })
            .collect();
        if of_type.is_empty() {
            after_nack.remove(type_url);
        }
        if !ended.is_empty() {
            tracing::info!(
                target: "xdsproxy",
                "Envoy no longer has the stored version of {}: istiod has removed it or sent an acceptable one",
                subject(type_url, &ended)
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
    let names: Vec<_> = resources
        .iter()
        .map(|it| &*it.name)
        .take(MAX_NAMES)
        .collect();
    let more = match resources.len().saturating_sub(MAX_NAMES) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let kind = type_url.rsplit('.').next().unwrap_or(type_url);
    format!("{kind} {}{more}", names.join(", "))
}
