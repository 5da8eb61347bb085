//! Answers the requests of an Envoy with stored configuration.
//!
//! A subscription gets the stored resources that it names; ACKs and NACKs get no response.

use std::collections::HashSet;
use std::io;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use super::recorder::identity;
use super::rejected::head_and_rest;
use super::{EnvoyCache, OTHER_NODE, Protocol, Type};
use crate::problem::{Code, Problem};
use crate::runtime::clock::after;
use crate::runtime::duration::rounded;
use crate::xds::end::End;
use crate::xds::on_demand;
use crate::xds::request::{Request, Subscription};
use crate::xds::wire::NameDigest;

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
    responses: mpsc::Receiver<Bytes>,
    /// Answers the requests until it fails.
    answering: BoxFuture<'static, io::Error>,
    cache: EnvoyCache,
    end: Instant,
}

impl Replay {
    /// Answers requests while [`Replay::next`] is polled. If that fails, Envoy is no longer served.
    pub(crate) fn start(cache: EnvoyCache) -> Self {
        let (requests, queue) = mpsc::channel(1);
        let (out, responses) = mpsc::channel(BLOCKS);
        let answering = Box::pin(answer(cache.clone(), queue, out));
        Self { requests, responses, answering, cache, end: after(MAX_TIME) }
    }

    /// Waits for the next bytes. Fails after [`SETTLING`] without any once Envoy has answered its listeners, at the latest
    /// after [`MAX_TIME`], and if stored configuration is unusable. Cancel safe.
    pub(crate) async fn next(&mut self) -> Result<Bytes, End> {
        let end = match self.cache.max_wait_for_istiod() {
            Some(_) => self.end,
            None => after(SETTLING).min(self.end),
        };
        let next = async {
            tokio::select! {
                biased;
                Some(bytes) = self.responses.recv() => Ok(bytes),
                error = &mut self.answering => Err(error),
            }
        };
        match timeout_at(end, next).await {
            Ok(Ok(bytes)) => Ok(bytes),
            Ok(Err(error)) => {
                let shared = &self.cache.ledger.0;
                shared.failures.inc();
                shared.state.lock().view(self.cache.pid).no_longer_served = true;
                let code = Code::KeptConfigUnusable;
                let problem = Problem::new(code, "stored configuration", &error);
                tracing::warn!(target: "xdsproxy", "{problem}");
                Err(End::agent(error.to_string()))
            }
            Err(_) => {
                let why = "stored configuration served; Envoy's next stream goes to istiod";
                tracing::info!(target: "xdsproxy", "{why}");
                Err(End::agent(why))
            }
        }
    }
}

/// Answers requests. Ends for stored configuration that is unusable, too old or another node's, and for a malformed
/// request.
async fn answer(
    cache: EnvoyCache,
    mut requests: mpsc::Receiver<Bytes>,
    out: mpsc::Sender<Bytes>,
) -> io::Error {
    let mut subscribed = HashSet::new();
    while let Some(frame) = requests.recv().await {
        let answered = async {
            let request = Request::decode(Protocol::Delta, frame)?;
            let subscription = request.subscription()?;
            if subscribed.is_empty() {
                check(&cache, &subscription)?;
            }
            let is_first = subscribed.insert(request.type_url.clone());
            match Type::of(&request.type_url) {
                Some(type_of) => answer_one(&cache, type_of, &subscription, is_first, &out).await,
                None => Ok(()),
            }
        };
        if let Err(error) = answered.await {
            return error;
        }
    }
    io::Error::other("the stream has ended")
}

/// Fails if the stored configuration may not be served to the node in the first request.
fn check(cache: &EnvoyCache, first: &Subscription) -> io::Result<()> {
    let shared = &cache.ledger.0;
    let state = shared.state.lock();
    if !state.can_serve() {
        return Err(shared.with_path("it has no clusters or no listeners"));
    }
    if !state.is_of(identity(first).as_deref()) {
        return Err(shared.with_path(OTHER_NODE));
    }
    let age = state.age();
    let max_age = shared.config.max_age;
    let [shown, max_shown, after] = [age, max_age, shared.config.after].map(rounded);
    if age > max_age {
        let problem =
            format!("it is {shown} old, and ISTIO_AGENT_KEEP_CONFIG_MAX_AGE is {max_shown}");
        return Err(shared.with_path(problem));
    }
    tracing::warn!(
        target: "xdsproxy",
        "istiod has not answered for {after}: Envoy is served the configuration it had {shown} ago"
    );
    shared.served.inc();
    Ok(())
}

/// Answers a request if it changes the subscription.
async fn answer_one(
    cache: &EnvoyCache,
    type_of: Type,
    subscription: &Subscription,
    is_first: bool,
    out: &mpsc::Sender<Bytes>,
) -> io::Result<()> {
    let names = &subscription.names;
    let is_all = is_first && names.is_empty() || names.iter().any(|it| it == "*");
    let mut wanted: Vec<_> = names.iter().map(|name| NameDigest::of(name)).collect();
    let is_part = is_all && type_of == Type::CLUSTER && cache.is_on_demand();
    let (pieces, length, version) = {
        let mut state = cache.ledger.0.state.lock();
        if !state.has(type_of) {
            return Ok(());
        }
        if is_part {
            wanted.extend(on_demand::needed(&mut state));
        }
        state.read(type_of, (!is_all || is_part).then_some(&wanted))
    };
    if pieces.is_empty() && !is_all {
        return Ok(());
    }
    let (mut bytes, rest) = head_and_rest(&version, type_of, "kept", length)?;
    for piece in pieces {
        for part in piece.parts()? {
            bytes.extend_from_slice(&part?);
            send(out, std::mem::take(&mut bytes)).await?;
        }
    }
    bytes.extend_from_slice(&rest);
    send(out, bytes).await
}

async fn send(out: &mpsc::Sender<Bytes>, bytes: Vec<u8>) -> io::Result<()> {
    out.send(bytes.into()).await.map_err(|_| io::Error::other("the stream has ended"))
}
