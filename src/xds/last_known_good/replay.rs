//! Answers the requests of an Envoy from what is kept, on a thread of its own.
//!
//! A subscription gets the kept resources it names; ACKs and NACKs get no answer. Envoy starts only
//! when it has endpoints for each cluster and routes for each listener, so where these are kept in
//! general but not those of one name, it gets empty ones.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::future::Future;
use std::io;
use std::ops::Range;
use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::OptionFuture;
use prost::Message;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use super::file::{BLOCK, Index, head, joined};
use super::store::{self, Manifest};
use super::subscription::Subscription;
use super::{Config, EnvoyCache, LastKnownGood};
use crate::clock::later;
use crate::istiod::{Closed, Istiod};
use crate::xds::Protocol;
use crate::xds::end::End;
use crate::xds::stream::LISTENER;

pub(super) const CLUSTER: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";

/// The types whose missing resources are empty ones.
const MAY_BE_EMPTY: [&str; 2] = [
    "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
    "type.googleapis.com/envoy.config.route.v3.RouteConfiguration",
];

/// Blocks that wait for Envoy.
const BLOCKS: usize = 4;

/// How long an Envoy that has listeners may go on asking for what they refer to before it is handed
/// over to istiod.
const SETTLING: Duration = Duration::from_millis(500);

/// How long an Envoy may take to answer the kept listeners before it is handed over all the same.
const MAX_START: Duration = Duration::from_secs(10);

/// Answers the requests of one stream.
pub(in crate::xds) struct Replay {
    envoy: EnvoyCache,
    answers: mpsc::Receiver<io::Result<Bytes>>,
    began: Instant,
    istiod: Istiod,
    /// None once there is a connection.
    connecting: Option<Connecting>,
}

type Connecting = Pin<Box<dyn Future<Output = Result<(), Closed>> + Send>>;

impl Replay {
    /// Answers requests, framed as they came, until the stream ends or istiod is there.
    pub(in crate::xds) fn start(
        envoy: EnvoyCache,
        protocol: Protocol,
        requests: mpsc::UnboundedReceiver<Bytes>,
        istiod: Istiod,
    ) -> Self {
        let (out, answers) = mpsc::channel(BLOCKS);
        let kept = envoy.kept.clone();
        tokio::task::spawn_blocking(move || {
            if let Err(error) = answer(&kept, protocol, requests, &out)
                && !out.is_closed()
            {
                kept.status.failures.inc();
                let _ = out.blocking_send(Err(error)); // The stream may have ended.
            }
        });
        Self {
            envoy,
            answers,
            began: Instant::now(),
            connecting: Some(connecting(&istiod)),
            istiod,
        }
    }

    /// Waits for the next bytes, or until Envoy is to have istiod's. `settling_since` is Envoy's last
    /// request after it has answered listeners. Cancel safe.
    pub(in crate::xds) async fn next(
        &mut self,
        settling_since: Option<Instant>,
    ) -> Result<Bytes, End> {
        let end = match settling_since {
            Some(since) => later(since, SETTLING),
            None => later(self.began, MAX_START),
        };
        loop {
            let is_connected = self.connecting.is_none();
            tokio::select! {
                answer = self.answers.recv() => {
                    let ended = || Err(io::Error::other("its thread has ended"));
                    return answer.unwrap_or_else(ended).map_err(|error| {
                        self.envoy.end_waiting();
                        End::unusable(&error)
                    });
                }
                Some(connected) = OptionFuture::from(self.connecting.as_mut()) => {
                    connected.map_err(|Closed| End::stopped())?;
                    self.connecting = None;
                }
                () = sleep_until(end), if is_connected => {
                    let mut connecting = connecting(&self.istiod);
                    if futures_util::poll!(&mut connecting).is_ready() {
                        // Without listeners it is served again if istiod does not answer in time.
                        self.envoy.heard_of_istiod(true);
                        return Err(End::handed_over());
                    }
                    // The connection has ended.
                    self.connecting = Some(connecting);
                }
            }
        }
    }
}

fn connecting(istiod: &Istiod) -> Connecting {
    let istiod = istiod.clone();
    Box::pin(async move { istiod.connection().await.map(drop) })
}

pub(super) fn answer(
    kept: &LastKnownGood,
    protocol: Protocol,
    mut requests: mpsc::UnboundedReceiver<Bytes>,
    out: &mpsc::Sender<io::Result<Bytes>>,
) -> io::Result<()> {
    let mut types = None;
    while let Some(request) = requests.blocking_recv() {
        let Ok(request) = Subscription::read(protocol, &request) else {
            continue; // It has been decoded before.
        };
        let types = match &mut types {
            Some(types) => types,
            None => {
                let opened = open(&kept.config, protocol, &request)?;
                kept.status.served.inc();
                types.insert(opened)
            }
        };
        if let Some(of) = types.get_mut(&request.type_url) {
            of.answer(protocol, &request, out)?;
        }
        if out.is_closed() {
            break;
        }
    }
    Ok(())
}

/// One kept type, and the stream's subscription to it.
struct Type {
    version: String,
    index: Index,
    /// The names of the last subscription in SotW.
    names: Option<Vec<Bytes>>,
    answers: u64,
}

/// Reads and checks all that is kept, for the node in the first request.
fn open(
    config: &Config,
    protocol: Protocol,
    first: &Subscription,
) -> io::Result<HashMap<String, Type>> {
    let manifest = Manifest::read(&config.directory)?;
    let manifest = manifest.ok_or_else(|| io::Error::other("nothing is kept"))?;
    if first.identity(protocol).as_ref() != Some(&manifest.identity) {
        let problem = "it is of another node, another Envoy or the other protocol";
        return Err(io::Error::other(problem));
    }
    let age = manifest.age();
    if age > config.max_age {
        let problem = format!("it is {age:?} old, expected at most {:?}", config.max_age);
        return Err(io::Error::other(problem));
    }
    if ![CLUSTER, LISTENER]
        .iter()
        .all(|it| manifest.types.contains_key(*it))
    {
        return Err(io::Error::other("it has no clusters or no listeners"));
    }
    let mut summary = String::new();
    let types = manifest.types.into_iter().map(|(type_url, of)| {
        let index = store::read(&config.directory, protocol, &of.file)?;
        let name = type_url.rsplit('.').next().unwrap_or_default();
        let _ = write!(summary, ", {} {name}", index.resources().len());
        let of = Type {
            version: of.version,
            index,
            names: None,
            answers: 0,
        };
        Ok((type_url, of))
    });
    let types = types.collect::<io::Result<_>>()?;
    tracing::warn!(
        target: "xdsproxy",
        "istiod has not answered for {:?}: Envoy is served the configuration it accepted {} s ago{summary}",
        config.after,
        age.as_secs()
    );
    Ok(types)
}

impl Type {
    /// Answers a request if it changes the subscription.
    fn answer(
        &mut self,
        protocol: Protocol,
        request: &Subscription,
        out: &mpsc::Sender<io::Result<Bytes>>,
    ) -> io::Result<()> {
        let is_first = self.names.is_none();
        let is_new = match protocol {
            Protocol::Sotw => self.names.as_ref() != Some(&request.names),
            Protocol::Delta => is_first || !request.names.is_empty(),
        };
        self.names = Some(request.names.clone());
        if !is_new {
            return Ok(());
        }
        let is_all =
            is_first && request.names.is_empty() || request.names.iter().any(|it| it == "*");
        let (places, missing) = match is_all {
            true => (self.index.resources().collect(), Vec::new()),
            false => self.find(&request.names),
        };
        let may_be_empty = MAY_BE_EMPTY.contains(&&*request.type_url);
        let missing = missing.into_iter().filter(|_| may_be_empty);
        let resources: Vec<_> = missing
            .map(|name| empty(protocol, &request.type_url, name))
            .collect();
        if !is_all && places.is_empty() && resources.is_empty() {
            return Ok(());
        }
        self.answers += 1;
        let rest = Rest {
            version: self.version.clone(),
            resources,
            type_url: request.type_url.clone(),
            nonce: format!("kept-{}", self.answers),
        };
        self.send(places, rest.encode_to_vec().into(), out)
    }

    /// Where the resources of these names are, and which names have none.
    fn find<'a>(&self, names: &'a [Bytes]) -> (Vec<Range<u64>>, Vec<&'a Bytes>) {
        let (mut places, mut missing) = (Vec::new(), Vec::new());
        for name in names {
            match self.index.get(name) {
                Some(place) => places.push(place),
                None => missing.push(name),
            }
        }
        (places, missing)
    }

    /// Sends a message of these resources and the rest.
    fn send(
        &self,
        places: Vec<Range<u64>>,
        rest: Bytes,
        out: &mpsc::Sender<io::Result<Bytes>>,
    ) -> io::Result<()> {
        let closed = |_| io::Error::other("the stream has ended");
        let send = |bytes: Bytes| out.blocking_send(Ok(bytes)).map_err(closed);
        let places = joined(places);
        let resources: u64 = places.iter().map(|place| place.end - place.start).sum();
        send(Bytes::copy_from_slice(&head(
            resources + rest.len() as u64,
        )?))?;
        for place in places {
            self.index
                .copy(place, |block| send(Bytes::copy_from_slice(block)))?;
        }
        (0..rest.len())
            .step_by(BLOCK)
            .try_for_each(|at| send(rest.slice(at..rest.len().min(at + BLOCK))))
    }
}

/// What a response of either protocol has beside the kept resources.
#[derive(Clone, PartialEq, Message)]
struct Rest {
    #[prost(string, tag = "1")]
    version: String,
    #[prost(bytes = "vec", repeated, tag = "2")]
    resources: Vec<Vec<u8>>,
    #[prost(string, tag = "4")]
    type_url: String,
    #[prost(string, tag = "5")]
    nonce: String,
}

/// A resource of delta.
#[derive(Clone, PartialEq, Message)]
struct Resource {
    #[prost(message, optional, tag = "2")]
    resource: Option<prost_types::Any>,
    #[prost(bytes = "bytes", tag = "3")]
    name: Bytes,
}

/// The name of a resource of Envoy, which is its first field.
#[derive(Clone, PartialEq, Message)]
struct Named {
    #[prost(bytes = "bytes", tag = "1")]
    name: Bytes,
}

/// A resource that has nothing but its name.
fn empty(protocol: Protocol, type_url: &str, name: &Bytes) -> Vec<u8> {
    let name = name.clone();
    let any = prost_types::Any {
        type_url: type_url.to_owned(),
        value: Named { name: name.clone() }.encode_to_vec(),
    };
    match protocol {
        Protocol::Sotw => any.encode_to_vec(),
        Protocol::Delta => Resource {
            resource: Some(any),
            name,
        }
        .encode_to_vec(),
    }
}
