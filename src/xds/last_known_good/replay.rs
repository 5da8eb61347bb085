//! Answers the requests of an Envoy with stored configuration, on a separate thread.
//!
//! A subscription gets the stored resources that it names; ACKs and NACKs get no response.

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use super::file::Index;
use super::recorder::identity;
use super::writer::{OTHER_NODE, with_path};
use super::{Config, DIRECTORY, EnvoyCache, NEEDED, Protocol, Shared, TYPES, Type};
use crate::files::directory::Directory;
use crate::problem::{Problem, codes};
use crate::runtime::clock::after;
use crate::runtime::duration::rounded;
use crate::xds::end::End;
use crate::xds::request::{Request, Subscription};
use crate::xds::wire::digest;

/// The most blocks that wait for Envoy.
const BLOCKS: usize = 4;

/// The time without a request of Envoy, after it has answered its listeners, after which its next stream goes to istiod.
const SETTLING: Duration = Duration::from_secs(2);
/// The longest time of a stream. An Envoy that has little CPU time may need seconds between two types.
const MAX_TIME: Duration = Duration::from_secs(60);

/// The requests of one stream, and the responses to them.
pub(crate) struct Replay {
    /// The queue of requests, which are gRPC frames.
    pub(crate) requests: mpsc::Sender<Bytes>,
    responses: mpsc::Receiver<io::Result<Bytes>>,
    cache: EnvoyCache,
    end: Instant,
}

impl Replay {
    /// Starts the thread that answers requests until the stream ends. If it fails, Envoy is no longer served.
    pub(crate) fn start(cache: EnvoyCache) -> Self {
        let (requests, queue) = mpsc::channel(1);
        let (out, responses) = mpsc::channel(BLOCKS);
        let replay = Self { requests, responses, cache: cache.clone(), end: after(MAX_TIME) };
        tokio::task::spawn_blocking(move || {
            if let Err(error) = answer(&cache.store.shared, queue, &out)
                && !out.is_closed()
            {
                cache.store.shared.failures.inc();
                let no_longer_served = &cache.generation.no_longer_served;
                no_longer_served.store(true, Ordering::Relaxed);
                let _ = out.blocking_send(Err(error)); // The stream may have ended.
            }
        });
        replay
    }

    /// Waits for the next bytes. Fails after [`SETTLING`] without any once Envoy has answered its listeners, at the latest
    /// after [`MAX_TIME`], and if stored configuration is unusable. Cancel safe.
    pub(crate) async fn next(&mut self) -> Result<Bytes, End> {
        let end = match self.cache.max_wait_for_istiod() {
            Some(_) => self.end,
            None => after(SETTLING).min(self.end),
        };
        match timeout_at(end, self.responses.recv()).await {
            Ok(Some(Ok(bytes))) => Ok(bytes),
            Ok(Some(Err(error))) => {
                let code = codes::KEPT_CONFIG_UNUSABLE;
                let problem = Problem::new(code, "stored configuration", &error);
                tracing::warn!(target: "xdsproxy", "{problem}");
                Err(End::agent(error.to_string()))
            }
            Ok(None) | Err(_) => {
                let why = "stored configuration served; Envoy's next stream goes to istiod";
                tracing::info!(target: "xdsproxy", "{why}");
                Err(End::agent(why))
            }
        }
    }
}

/// Answers requests until `requests` ends. Fails for stored configuration that is unusable, too old or another
/// node's, for a malformed request, and if nobody takes the responses.
pub(super) fn answer(
    shared: &Shared,
    mut requests: mpsc::Receiver<Bytes>,
    out: &mpsc::Sender<io::Result<Bytes>>,
) -> io::Result<()> {
    let (mut types, mut subscribed) = (None, HashSet::new());
    while let Some(frame) = requests.blocking_recv() {
        let request = Request::decode(Protocol::Delta, frame)?;
        let subscription = request.subscription()?;
        let types = match &mut types {
            Some(types) => types,
            None => types.insert(open_all(shared, &subscription)?),
        };
        if let Some(index) = types.get(&*request.type_url) {
            check_age(&shared.config, index.age())?;
            let is_first = subscribed.insert(request.type_url.clone());
            answer_one(index, &request.type_url, &subscription, is_first, out)?;
        }
    }
    Ok(())
}

/// Reads and verifies all files, for the node in the first request.
fn open_all(shared: &Shared, first: &Subscription) -> io::Result<HashMap<Type, Index>> {
    let (mut types, config) = (HashMap::<_, Index>::new(), &shared.config);
    let directory = Directory::private(&config.volume.directory, DIRECTORY, false)
        .map_err(|error| with_path(config, "", error))?;
    let identity = identity(first);
    for type_url in TYPES {
        let opened = Index::open(&directory, type_url);
        let Some(index) = opened.map_err(|error| with_path(config, type_url, error))? else {
            continue;
        };
        if identity.as_ref() != Some(&index.header.identity) {
            return Err(with_path(config, type_url, OTHER_NODE));
        }
        types.insert(type_url, index);
    }
    let ages = NEEDED.map(|it| types.get(it).map(Index::age));
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

/// Answers a request if it changes the subscription.
fn answer_one(
    index: &Index,
    type_url: &str,
    subscription: &Subscription,
    is_first: bool,
    out: &mpsc::Sender<io::Result<Bytes>>,
) -> io::Result<()> {
    let (names, resources) = (&subscription.names, &index.resources);
    let is_all = is_first && names.is_empty() || names.iter().any(|it| it == "*");
    let ranges: Vec<_> = if is_all {
        resources.values().cloned().collect()
    } else {
        let found = names.iter().filter_map(|it| resources.get(&digest(it)));
        found.cloned().collect()
    };
    if ranges.is_empty() && !is_all {
        return Ok(());
    }
    index.respond(ranges, type_url, "kept", |bytes| {
        let sent = out.blocking_send(Ok(Bytes::copy_from_slice(bytes)));
        sent.map_err(|_| io::Error::other("the stream has ended"))
    })
}
