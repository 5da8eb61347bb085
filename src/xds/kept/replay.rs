//! Answers the requests of an Envoy from what is kept, on a thread of its own.
//!
//! A subscription gets the kept resources it names; ACKs and NACKs get no answer. Envoy starts only
//! when it has endpoints for each cluster and routes for each listener, so where these are kept in
//! general but not those of one name, it gets empty ones.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use super::request::Subscription;
use super::segment::{
    BLOCK, Index, NAME, NAME_IN_VALUE, NONCE, Place, RESOURCE, RESOURCES, TYPE_OF_ANY, TYPE_URL,
    VALUE, VERSION, field, head, sorted,
};
use super::store::{self, Manifest};
use super::{Config, Kept, OfEnvoy};
use crate::istiod::{Closed, Istiod};
use crate::xds::Protocol;
use crate::xds::end::End;
use crate::xds::stream::LISTENER;

const CLUSTER: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";

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
const LONGEST_START: Duration = Duration::from_secs(10);

/// Answers the requests of one stream.
pub(in crate::xds) struct Replay {
    envoy: OfEnvoy,
    answers: mpsc::Receiver<io::Result<Bytes>>,
    began: Instant,
    /// None once there is a connection.
    connecting: Option<Connecting>,
}

type Connecting = Pin<Box<dyn Future<Output = Result<(), Closed>> + Send>>;

impl Replay {
    /// Answers requests, framed as they came, until the stream ends or istiod is there.
    pub(in crate::xds) fn start(
        envoy: OfEnvoy,
        protocol: Protocol,
        requests: mpsc::UnboundedReceiver<Bytes>,
        istiod: Istiod,
    ) -> Self {
        let (out, answers) = mpsc::channel(BLOCKS);
        let kept = envoy.kept.clone();
        tokio::task::spawn_blocking(move || {
            if let Err(error) = answer(&kept, protocol, requests, &out) {
                kept.status.failures.inc();
                let _ = out.blocking_send(Err(error)); // The stream may have ended.
            }
        });
        Self {
            envoy,
            answers,
            began: Instant::now(),
            connecting: Some(Box::pin(async move { istiod.connection().await.map(drop) })),
        }
    }

    /// Waits for the next bytes, or until Envoy is to have istiod's. `settling_since` is Envoy's last
    /// request after it has answered listeners. Cancel safe.
    pub(in crate::xds) async fn next(
        &mut self,
        settling_since: Option<Instant>,
    ) -> Result<Bytes, End> {
        let end = match settling_since {
            Some(since) => since + SETTLING,
            None => self.began + LONGEST_START,
        };
        loop {
            let Self {
                answers,
                connecting,
                ..
            } = self;
            let connected = async {
                match connecting {
                    Some(connecting) => connecting.await?,
                    None => sleep_until(end).await,
                }
                Ok(())
            };
            tokio::select! {
                answer = answers.recv() => {
                    let ended = || Err(io::Error::other("its thread has ended"));
                    return answer.unwrap_or_else(ended).map_err(|error| {
                        self.envoy.end_waiting();
                        End::unusable(&error)
                    });
                }
                connected = connected => {
                    connected.map_err(|Closed| End::stopped())?;
                    if self.connecting.take().is_none() {
                        self.envoy.end_waiting();
                        return Err(End::handed_over());
                    }
                }
            }
        }
    }
}

pub(super) fn answer(
    kept: &Kept,
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
        let open = |file| store::open(&config.directory, file);
        let index = Index::read(protocol, &of.segments, open)?;
        let name = type_url.rsplit('.').next().unwrap_or_default();
        let _ = write!(summary, ", {} {name}", index.resources().count());
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
        let mut tail = Vec::new();
        for name in missing.iter().filter(|_| may_be_empty) {
            field(
                RESOURCES,
                &empty(protocol, &request.type_url, name),
                &mut tail,
            );
        }
        if !is_all && places.is_empty() && tail.is_empty() {
            return Ok(());
        }
        self.answers += 1;
        field(TYPE_URL, request.type_url.as_bytes(), &mut tail);
        field(
            NONCE,
            format!("kept-{}", self.answers).as_bytes(),
            &mut tail,
        );
        let mut version = Vec::new();
        field(VERSION, self.version.as_bytes(), &mut version);
        self.send(&version, places, &tail, out)
    }

    /// Where the resources of these names are, and which names have none.
    fn find<'a>(&self, names: &'a [Bytes]) -> (Vec<Place>, Vec<&'a Bytes>) {
        let (mut places, mut missing) = (Vec::new(), Vec::new());
        for name in names {
            match self.index.get(name) {
                Some(place) => places.push(place),
                None => missing.push(name),
            }
        }
        (places, missing)
    }

    /// Sends a message of these resources and what is before and behind them.
    fn send(
        &self,
        version: &[u8],
        places: Vec<Place>,
        tail: &[u8],
        out: &mpsc::Sender<io::Result<Bytes>>,
    ) -> io::Result<()> {
        let closed = |_| io::Error::other("the stream has ended");
        let send = |bytes: Bytes| out.blocking_send(Ok(bytes)).map_err(closed);
        let places = sorted(places);
        let resources: u64 = places.iter().map(|place| place.length).sum();
        let head = head(resources + (version.len() + tail.len()) as u64)?;
        send([&head[..], version].concat().into())?;
        for place in places {
            self.index
                .copy(place, |block| send(Bytes::copy_from_slice(block)))?;
        }
        let tail = Bytes::copy_from_slice(tail);
        (0..tail.len())
            .step_by(BLOCK)
            .try_for_each(|at| send(tail.slice(at..tail.len().min(at + BLOCK))))
    }
}

/// A resource that has nothing but its name.
fn empty(protocol: Protocol, type_url: &str, name: &[u8]) -> Vec<u8> {
    let (mut value, mut any) = (Vec::new(), Vec::new());
    field(NAME_IN_VALUE, name, &mut value);
    field(TYPE_OF_ANY, type_url.as_bytes(), &mut any);
    field(VALUE, &value, &mut any);
    match protocol {
        Protocol::Sotw => any,
        Protocol::Delta => {
            let mut resource = Vec::new();
            field(RESOURCE, &any, &mut resource);
            field(NAME, name, &mut resource);
            resource
        }
    }
}
