//! Answers the requests of an Envoy with stored configuration, on a separate thread.
//!
//! A subscription gets the stored resources that it names; ACKs and NACKs get no response.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryResponse;
use prost::Message;
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::file::{BLOCK, Index};
use super::recorder::Subscription;
use super::writer::{OTHER_NODE, open, with_path};
use super::{Config, DIRECTORY, EnvoyCache, NEEDED, Shared, TYPES, Type};
use crate::directory::Directory;
use crate::duration::rounded;
use crate::problem::{Problem, codes};
use crate::xds::end::End;
use crate::xds::observe::{now, unix_seconds};
use crate::xds::request::HEAD;
use crate::xds::wire::digest;

/// The most blocks that wait for Envoy.
const BLOCKS: usize = 4;

/// The time without a request of Envoy after which its next stream goes to istiod. If that one is served too,
/// Envoy continues with the resources it has.
const SETTLING: Duration = Duration::from_secs(2);

/// The responses to the requests of one stream.
pub(crate) struct Replay(mpsc::Receiver<io::Result<Bytes>>);

impl Replay {
    /// Starts the thread that answers requests, which are gRPC frames, until the stream ends.
    pub(crate) fn start(envoy: EnvoyCache, requests: mpsc::Receiver<Bytes>) -> Self {
        let (out, answers) = mpsc::channel(BLOCKS);
        tokio::task::spawn_blocking(move || {
            if let Err(error) = answer(&envoy.store.shared, requests, &out)
                && !out.is_closed()
            {
                envoy.store.shared.failures.inc();
                envoy.is_over.store(true, Ordering::Relaxed);
                let _ = out.blocking_send(Err(error)); // The stream may have ended.
            }
        });
        Self(answers)
    }

    /// Waits for the next bytes. Fails after [`SETTLING`] without any, and if stored configuration is unusable.
    /// Cancel safe.
    pub(crate) async fn next(&mut self) -> Result<Bytes, End> {
        match timeout(SETTLING, self.0.recv()).await {
            Ok(Some(Ok(bytes))) => Ok(bytes),
            Ok(Some(Err(error))) => {
                let code = codes::KEPT_CONFIG_UNUSABLE;
                let problem = Problem::new(code, "stored configuration", &error);
                tracing::warn!(target: "xdsproxy", "{problem}");
                Err(End::unusable(&error))
            }
            Ok(None) | Err(_) => {
                let end = End::handed_over();
                tracing::info!(target: "xdsproxy", "{}", end.status.message());
                Err(end)
            }
        }
    }
}

/// Answers requests until `requests` ends.
pub(super) fn answer(
    shared: &Shared,
    mut requests: mpsc::Receiver<Bytes>,
    out: &mpsc::Sender<io::Result<Bytes>>,
) -> io::Result<()> {
    let mut types = None;
    while let Some(request) = requests.blocking_recv() {
        let request = Subscription::decode(request.slice(HEAD..))?;
        let types = match &mut types {
            Some(types) => types,
            None => types.insert(open_all(shared, &request)?),
        };
        if let Some(stored) = types.get_mut(&*request.type_url) {
            check_age(&shared.config, stored.age)?;
            stored.answer(&request, out)?;
        }
    }
    Ok(())
}

/// A stored type, and the stream's subscription to it.
struct StoredType {
    version: String,
    /// The time since istiod's stream was last open.
    age: Duration,
    index: Index,
    is_subscribed: bool,
}

/// Reads and verifies all files, for the node in the first request.
fn open_all(shared: &Shared, first: &Subscription) -> io::Result<HashMap<Type, StoredType>> {
    let (mut types, config) = (HashMap::<_, StoredType>::new(), &shared.config);
    let directory = Directory::private(&config.volume.directory, DIRECTORY, false)
        .map_err(|error| with_path(config, "", error))?;
    let identity = first.identity();
    for type_url in TYPES {
        let error_of_type = |error| with_path(config, type_url, error);
        let Some((file, header)) = open(&directory, type_url).map_err(error_of_type)? else {
            continue;
        };
        if identity.as_ref() != Some(&header.identity) {
            return Err(with_path(config, type_url, OTHER_NODE));
        }
        let age = (unix_seconds(now()) as u64).saturating_sub(header.current);
        let index = Index::read(&header, file).map_err(error_of_type)?;
        let stored = StoredType {
            version: header.version,
            age: Duration::from_secs(age),
            index,
            is_subscribed: false,
        };
        types.insert(type_url, stored);
    }
    let ages = NEEDED.map(|it| types.get(it).map(|stored| stored.age));
    let [Some(clusters), Some(listeners)] = ages else {
        return Err(with_path(config, "", "it has no clusters or no listeners"));
    };
    let age = clusters.max(listeners);
    check_age(config, age)?;
    let [age, after] = [age, config.after].map(rounded);
    tracing::warn!(
        target: "xdsproxy",
        "istiod has not answered for {after}: Envoy is served the configuration it had {age} ago"
    );
    shared.served.inc();
    Ok(types)
}

/// Fails for configuration that is too old. Types other than [`NEEDED`] are checked when Envoy subscribes.
fn check_age(config: &Config, age: Duration) -> io::Result<()> {
    if age <= config.max_age {
        return Ok(());
    }
    let [age, max_age] = [age, config.max_age].map(rounded);
    let problem = format!("it is {age} old, and ISTIO_AGENT_KEEP_CONFIG_MAX_AGE is {max_age}");
    Err(with_path(config, "", problem))
}

impl StoredType {
    /// Answers a request if it changes the subscription.
    fn answer(
        &mut self,
        request: &Subscription,
        out: &mpsc::Sender<io::Result<Bytes>>,
    ) -> io::Result<()> {
        let is_first = !std::mem::replace(&mut self.is_subscribed, true);
        let is_all =
            is_first && request.names.is_empty() || request.names.iter().any(|it| it == "*");
        let resources = &self.index.resources;
        let ranges: Vec<_> = if is_all {
            resources.values().cloned().collect()
        } else {
            let names = request.names.iter();
            let found = names.filter_map(|name| resources.get(&digest(name)));
            found.cloned().collect()
        };
        if ranges.is_empty() && !is_all {
            return Ok(());
        }
        let (version, type_url) = (&self.version, &request.type_url);
        respond(&self.index, ranges, type_url, version, "kept", |bytes| {
            let sent = out.blocking_send(Ok(Bytes::copy_from_slice(bytes)));
            sent.map_err(|_| io::Error::other("the stream has ended"))
        })
    }
}

/// Sends a response with the resources in these ranges, as a gRPC frame.
pub(super) fn respond(
    index: &Index,
    ranges: Vec<Range<u64>>,
    type_url: &str,
    version: &str,
    nonce: &str,
    mut send: impl FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let rest = DeltaDiscoveryResponse {
        system_version_info: version.to_owned(),
        type_url: type_url.to_owned(),
        nonce: nonce.to_owned(),
        ..Default::default()
    }
    .encode_to_vec();
    let resources: u64 = ranges.iter().map(|range| range.end - range.start).sum();
    let length = u32::try_from(resources + rest.len() as u64).map_err(io::Error::other)?;
    send(&[&[0], &length.to_be_bytes()[..]].concat())?;
    index.copy(ranges, &mut send)?;
    rest.chunks(BLOCK).try_for_each(send)
}
