//! Answers the requests of an Envoy from what is kept, on a thread of its own.
//!
//! A subscription gets the kept resources it names; ACKs and NACKs get no answer.

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
use super::writer::{OTHER_NODE, named, open};
use super::{Config, DIRECTORY, EnvoyCache, LastKnownGood, NEEDED, Shared, TYPES};
use crate::directory::Directory;
use crate::duration::approximate;
use crate::problem::{Problem, codes};
use crate::xds::end::End;
use crate::xds::observe::{now, unix_seconds};
use crate::xds::request::HEAD;
use crate::xds::wire::digest;

/// Blocks that wait for Envoy.
const BLOCKS: usize = 4;

/// After so long without a request of Envoy, its next stream is relayed. Served again it goes on where it
/// was.
const SETTLING: Duration = Duration::from_secs(2);

/// Answers the requests of one stream.
pub(crate) struct Replay(mpsc::Receiver<io::Result<Bytes>>);

impl Replay {
    /// Answers requests, framed as they came, until the stream ends.
    pub(crate) fn start(envoy: EnvoyCache, requests: mpsc::Receiver<Bytes>) -> Self {
        let (out, answers) = mpsc::channel(BLOCKS);
        tokio::task::spawn_blocking(move || {
            if let Err(error) = answer(&envoy.kept, requests, &out)
                && !out.is_closed()
            {
                envoy.kept.shared.failures.inc();
                envoy.is_over.store(true, Ordering::Relaxed);
                let _ = out.blocking_send(Err(error)); // The stream may have ended.
            }
        });
        Self(answers)
    }

    /// Waits for the next bytes, or until Envoy is to wait for istiod's: each request begins that anew.
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
                tracing::info!(target: "xdsproxy", "{}", end.status().message());
                Err(end)
            }
        }
    }
}

pub(super) fn answer(
    kept: &LastKnownGood,
    mut requests: mpsc::Receiver<Bytes>,
    out: &mpsc::Sender<io::Result<Bytes>>,
) -> io::Result<()> {
    let mut types = None;
    while let Some(request) = requests.blocking_recv() {
        let request = Subscription::decode(request.slice(HEAD..))?;
        let types = match &mut types {
            Some(types) => types,
            None => types.insert(open_all(&kept.shared, &request)?),
        };
        if let Some(of_type) = types.get_mut(&*request.type_url) {
            check_age(&kept.shared.config, of_type.age)?;
            of_type.answer(&request, out)?;
        }
    }
    Ok(())
}

/// One kept type, and the stream's subscription to it.
struct Type {
    version: String,
    /// Since istiod's stream was last open.
    age: Duration,
    index: Index,
    is_subscribed: bool,
}

/// Reads and checks all that is kept, for the node in the first request.
fn open_all(shared: &Shared, first: &Subscription) -> io::Result<HashMap<&'static str, Type>> {
    let (mut types, config) = (HashMap::new(), &shared.config);
    let directory = Directory::private(&config.volume.directory, DIRECTORY, false);
    let directory = directory.map_err(|error| named(config, "", error))?;
    let identity = first.identity();
    for type_url in TYPES {
        let of_type = |error| named(config, type_url, error);
        let (file, header) = match open(&directory, type_url) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            found => found.map_err(of_type)?,
        };
        if identity.as_ref() != Some(&header.identity) {
            return Err(named(config, type_url, OTHER_NODE));
        }
        let age = (unix_seconds(now()) as u64).saturating_sub(header.current);
        let index = Index::read(&header, file).map_err(of_type)?;
        let kept = Type {
            version: header.version,
            age: Duration::from_secs(age),
            index,
            is_subscribed: false,
        };
        types.insert(type_url, kept);
    }
    let ages = NEEDED.map(|it| types.get(it).map(|kept: &Type| kept.age));
    let [Some(clusters), Some(listeners)] = ages else {
        return Err(named(config, "", "it has no clusters or no listeners"));
    };
    let age = clusters.max(listeners);
    check_age(config, age)?;
    let [age, after] = [age, config.after].map(|it| approximate(it.as_secs_f64()));
    tracing::warn!(
        target: "xdsproxy",
        "istiod has not answered for {after}: Envoy is served the configuration it had {age} ago"
    );
    shared.served.inc();
    Ok(types)
}

/// Fails for what is too old. The types to which Envoy subscribes are known one by one.
fn check_age(config: &Config, age: Duration) -> io::Result<()> {
    if age <= config.max_age {
        return Ok(());
    }
    let [age, most] = [age, config.max_age].map(|it| approximate(it.as_secs_f64()));
    let problem = format!("it is {age} old, and ISTIO_AGENT_KEEP_CONFIG_MAX_AGE is {most}");
    Err(named(config, "", problem))
}

impl Type {
    /// Answers a request if it changes the subscription.
    fn answer(
        &mut self,
        request: &Subscription,
        out: &mpsc::Sender<io::Result<Bytes>>,
    ) -> io::Result<()> {
        let is_first = !std::mem::replace(&mut self.is_subscribed, true);
        let is_all =
            is_first && request.names.is_empty() || request.names.iter().any(|it| it == "*");
        let kept = |name: &Bytes| self.index.resources.get(&digest(name)).cloned();
        let places: Vec<_> = match is_all {
            true => self.index.resources.values().cloned().collect(),
            false => request.names.iter().filter_map(kept).collect(),
        };
        if places.is_empty() && !is_all {
            return Ok(());
        }
        let (version, type_url) = (&self.version, &request.type_url);
        respond(&self.index, places, type_url, version, "kept", |bytes| {
            let sent = out.blocking_send(Ok(Bytes::copy_from_slice(bytes)));
            sent.map_err(|_| io::Error::other("the stream has ended"))
        })
    }
}

/// Sends a response with the resources at these places, framed for gRPC.
pub(super) fn respond(
    index: &Index,
    places: Vec<Range<u64>>,
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
    };
    let rest = rest.encode_to_vec();
    let length: u64 = places.iter().map(|place| place.end - place.start).sum();
    let length = u32::try_from(length + rest.len() as u64).map_err(io::Error::other)?;
    send(&[&[0], &length.to_be_bytes()[..]].concat())?;
    index.copy(places, &mut send)?;
    rest.chunks(BLOCK).try_for_each(send)
}
