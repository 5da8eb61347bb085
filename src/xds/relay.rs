//! One stream of Envoy tied to one stream of istiod.
//!
//! [`run`] feeds an [`Exchange`] and carries its bytes, in one loop that never waits for one
//! direction while the other has work. When either stream ends, the other does; Envoy dials again
//! and states its subscriptions anew.
//!
//! While istiod cannot be reached, Envoy's stream is held open instead of being failed: a failed one
//! sends Envoy into a backoff of up to 30 s, in which a returning istiod would go unnoticed.
//!
//! When istiod does not know us on a connection that lacks our client certificate, that is left:
//! the next stream dials anew.

use std::future::Future;
use std::pin::{Pin, pin};
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use http_body::Frame;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::sync::mpsc::{self, error::SendError};
use tokio::task::{JoinError, JoinSet};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::Protocol;
use super::exchange::{Event, Exchange};
use super::intercept::{Captured, Interceptors, Outcome};
use super::observe::Observer;
use super::status::{self, End};
use super::stream_body::RequestQueue;
use crate::istiod::{Closed, Connection, Istiod};

/// How many bytes of requests are kept for an istiod that is not there yet. A first round of
/// requests is far smaller; what goes on sending all the same is made to wait.
const MAX_HELD: usize = 4 << 20;

/// A response that Envoy took longer than this to accept is worth a warning.
const SLOW_SEND: Duration = Duration::from_secs(10);

/// What a relay needs beside its two streams.
#[derive(Debug)]
pub(crate) struct Relay {
    pub id: u32,
    pub protocol: Protocol,
    pub istiod: Istiod,
    pub interceptors: Interceptors,
    pub observer: Observer,
    pub max_request_bytes: usize,
    /// Fired when a newer stream takes this one's place, or the agent goes down.
    pub stop: CancellationToken,
}

/// Istiod's side of the relay, from dialing to the stream's end.
enum IstiodSide {
    Connecting(Pin<Box<dyn Future<Output = Result<Connection, Closed>> + Send>>),
    Opening(Pin<Box<dyn Future<Output = Result<http::Response<Incoming>, hyper::Error>> + Send>>),
    Open(Incoming),
}

enum FromIstiod {
    Connected(Connection),
    Opened(http::Response<Incoming>),
    Data(Bytes),
    Ended(End),
}

impl IstiodSide {
    /// What happens next. Safe to drop and call again.
    async fn next(&mut self) -> FromIstiod {
        match self {
            Self::Connecting(connection) => match connection.await {
                Ok(connection) => FromIstiod::Connected(connection),
                // The agent goes down.
                Err(closed) => FromIstiod::Ended(End::Lost {
                    status: Status::unavailable(closed.to_string()),
                    expected: true,
                }),
            },
            Self::Opening(response) => match response.await {
                Ok(response) => FromIstiod::Opened(response),
                Err(error) => FromIstiod::Ended(status::lost(error)),
            },
            Self::Open(body) => match body.frame().await {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(bytes) => FromIstiod::Data(bytes),
                    Err(frame) => {
                        let trailers = frame.into_trailers().unwrap_or_default();
                        FromIstiod::Ended(status::of_trailers(trailers))
                    }
                },
                Some(Err(error)) => FromIstiod::Ended(status::lost(error)),
                None => FromIstiod::Ended(status::of_trailers(HeaderMap::new())),
            },
        }
    }
}

/// Runs the relay until either stream has ended, and ends the other.
pub(crate) async fn run(relay: Relay, envoy: Incoming, to_envoy: mpsc::Sender<Frame<Bytes>>) {
    relay.observer.stream_began(relay.id, relay.protocol);
    let end = Carrier::new(&relay, envoy, &to_envoy).run().await;
    end.log(relay.id);
    if let Some(trailers) = end.trailers() {
        // An Envoy that takes nothing any more does not hold the relay up.
        let sent = to_envoy.send_timeout(Frame::trailers(trailers), Duration::from_secs(1));
        if sent.await.is_err() {
            tracing::debug!(target: "xdsproxy", id = relay.id, "Envoy left without its status");
        }
    }
    tracing::debug!(
        target: "xdsproxy",
        id = relay.id,
        "disconnected from {}XDS server: {}",
        relay.protocol.log_prefix(),
        relay.istiod.address()
    );
}

/// An exchange with its two streams.
struct Carrier<'a> {
    relay: &'a Relay,
    exchange: Exchange,
    envoy: Incoming,
    to_envoy: &'a mpsc::Sender<Frame<Bytes>>,
    /// Since when Envoy lets a response wait.
    waiting_since: Option<Instant>,
    istiod: IstiodSide,
    /// What istiod's stream is on, once there is one.
    connection: Option<Connection>,
    /// Requests and responses form a loop: istiod may not read requests while it waits for a large
    /// response to be taken, and Envoy may not take it before its requests are through. One of the
    /// hops must not wait, or all do. Requests are small and few, so theirs is the queue without a
    /// bound.
    to_istiod: mpsc::UnboundedSender<Bytes>,
    /// The other end of `to_istiod`, until there is a connection to send it on.
    queue: Option<RequestQueue>,
    /// Bytes in `queue` while it is here.
    held: usize,
    interceptions: Interceptions,
}

/// What moved a relay on.
enum Moved<'a> {
    Envoy(Option<Result<Frame<Bytes>, hyper::Error>>),
    /// Envoy has room for what comes next.
    Room(Result<mpsc::Permit<'a, Frame<Bytes>>, SendError<()>>),
    Intercepted(Result<Intercepted, JoinError>),
    Istiod(FromIstiod),
}

impl<'a> Carrier<'a> {
    fn new(relay: &'a Relay, envoy: Incoming, to_envoy: &'a mpsc::Sender<Frame<Bytes>>) -> Self {
        let (to_istiod, queue) = mpsc::unbounded_channel();
        let istiod = relay.istiod.clone();
        Self {
            relay,
            exchange: Exchange::new(
                relay.id,
                relay.protocol,
                relay.interceptors.clone(),
                relay.observer.clone(),
                relay.max_request_bytes,
            ),
            envoy,
            to_envoy,
            waiting_since: None,
            istiod: IstiodSide::Connecting(Box::pin(async move { istiod.connection().await })),
            connection: None,
            to_istiod,
            queue: Some(RequestQueue::new(
                queue,
                relay.observer.metrics.requests.clone(),
            )),
            held: 0,
            interceptions: Interceptions::default(),
        }
    }

    async fn run(mut self) -> End {
        let end = self.carry().await;
        if let Some(connection) = &self.connection {
            let istiod = &self.relay.istiod;
            istiod.leave_if_unknown(connection, end.code_of_istiod());
        }
        let Relay { id, observer, .. } = self.relay;
        observer.stream_ended(*id, &end, self.connection.is_some());
        end
    }

    async fn carry(&mut self) -> End {
        let mut stopped = pin!(self.relay.stop.cancelled());
        let mut envoy_gone = pin!(self.to_envoy.closed());
        loop {
            let moved = tokio::select! {
                () = &mut stopped => return End::Stopped,
                () = &mut envoy_gone => return End::EnvoyGone,
                frame = self.envoy.frame(), if self.held < MAX_HELD => Moved::Envoy(frame),
                room = self.to_envoy.reserve(), if !self.exchange.to_envoy.is_empty() => {
                    Moved::Room(room)
                }
                Some(done) = self.interceptions.running.join_next() => Moved::Intercepted(done),
                from = self.istiod.next(), if self.exchange.wants_responses() => {
                    Moved::Istiod(from)
                }
            };
            if let Err(end) = self.on(moved) {
                return end;
            }
        }
    }

    fn on(&mut self, moved: Moved<'a>) -> Result<(), End> {
        match moved {
            Moved::Envoy(None) => return Err(self.exchange.envoy_done()),
            Moved::Envoy(Some(Err(error))) => return Err(End::EnvoyFailed(error)),
            Moved::Envoy(Some(Ok(frame))) => {
                if let Ok(bytes) = frame.into_data() {
                    self.exchange.apply(Event::FromEnvoy(bytes))?;
                }
            }
            Moved::Room(room) => {
                self.send(room.map_err(|_| End::EnvoyGone)?);
                warn_if_slow(self.waiting_since.take(), self.relay);
            }
            Moved::Intercepted(Ok((index, response, outcome))) => {
                self.interceptions.busy.retain(|other| *other != index);
                self.exchange.apply(Event::Intercepted(response, outcome))?;
            }
            Moved::Intercepted(Err(panic)) => {
                return Err(End::BadResponse(Status::internal(panic.to_string())));
            }
            Moved::Istiod(from) => self.on_istiod(from)?,
        }
        self.carry_on();
        Ok(())
    }

    fn on_istiod(&mut self, from: FromIstiod) -> Result<(), End> {
        match from {
            FromIstiod::Data(bytes) => self.exchange.apply(Event::FromIstiod(bytes))?,
            FromIstiod::Ended(end) => return Err(self.exchange.istiod_done(end)),
            FromIstiod::Opened(response) => {
                self.istiod = IstiodSide::Open(status::opened(response)?);
            }
            FromIstiod::Connected(connection) => {
                if let Some(queue) = self.queue.take() {
                    self.held = 0;
                    self.relay.observer.istiod_connected(self.relay.id);
                    self.istiod = open(self.relay, connection.clone(), queue);
                    self.connection = Some(connection);
                }
            }
        }
        Ok(())
    }

    /// Hands Envoy the next bytes.
    fn send(&mut self, room: mpsc::Permit<'_, Frame<Bytes>>) {
        if let Some(bytes) = self.exchange.to_envoy.pop_front() {
            room.send(Frame::data(bytes));
        }
    }

    /// Passes on what the last event made ready.
    fn carry_on(&mut self) {
        for request in self.exchange.to_istiod.drain(..) {
            if self.queue.is_some() {
                self.held += request.len();
            }
            // The queue is gone only when istiod's stream has ended, which is about to be seen.
            let _ = self.to_istiod.send(request);
        }
        self.interceptions.start(&mut self.exchange);
        while !self.exchange.to_envoy.is_empty() {
            match self.to_envoy.try_reserve() {
                Ok(room) => self.send(room),
                // Envoy takes it later, or is gone, which is seen elsewhere.
                Err(_) => {
                    self.waiting_since.get_or_insert_with(Instant::now);
                    return;
                }
            }
        }
    }
}

type Intercepted = (usize, Captured, Outcome);

/// What interceptors are at: one response of a type at a time.
#[derive(Default)]
struct Interceptions {
    running: JoinSet<Intercepted>,
    busy: Vec<usize>,
}

impl Interceptions {
    /// Starts what waits for an interceptor that is idle.
    fn start(&mut self, exchange: &mut Exchange) {
        for (index, response) in std::mem::take(&mut exchange.captured) {
            if self.busy.contains(&index) {
                exchange.captured.push_back((index, response));
                continue;
            }
            self.busy.push(index);
            let intercepting = exchange.interceptors.intercept(index, response.clone());
            self.running
                .spawn(async move { (index, response, intercepting.await) });
        }
    }
}

/// Opens the stream to istiod. Its head may come only with the first response, so nothing waits for
/// it.
fn open(relay: &Relay, mut connection: Connection, queue: RequestQueue) -> IstiodSide {
    let body = crate::istiod::Body::new(queue);
    let request = relay.istiod.request(relay.protocol.path(), body);
    tracing::info!(
        target: "xdsproxy",
        id = relay.id,
        "connected to {}upstream XDS server: {}",
        relay.protocol.log_prefix(),
        relay.istiod.address()
    );
    IstiodSide::Opening(Box::pin(async move { connection.send(request).await }))
}

/// Warns of an Envoy that was slow to take what waited for it since then.
fn warn_if_slow(since: Option<Instant>, relay: &Relay) {
    let waited = since.map(|since| since.elapsed()).unwrap_or_default();
    if waited > SLOW_SEND {
        let call = match relay.protocol {
            Protocol::StateOfTheWorld => "sendDownstream",
            Protocol::Delta => "sendDownstreamDelta",
        };
        tracing::warn!(target: "xdsproxy", id = relay.id, "{call} took {waited:?}");
    }
}
