//! One stream of Envoy tied to one stream of istiod.
//!
//! [`run`] feeds a [`StreamState`] and sends its bytes, in one loop that never waits for one direction
//! while the other has work. When either stream ends, the other does; Envoy connects again and sends
//! its subscriptions anew.
//!
//! Until istiod has answered, Envoy's stream stays open, whatever istiod does: a failed one sends Envoy
//! into a backoff of up to 30 s, in which a returning istiod would go unnoticed. Istiod gets Envoy's
//! requests again on another stream of its own, after a backoff of up to [`MAX_WAIT`] or as soon as the
//! token changes. Streams of other clients end with istiod's.
//!
//! After UNAUTHENTICATED on a connection without our client certificate, the next stream uses a new
//! connection.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::{Future, pending};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::OptionFuture;
use http::HeaderMap;
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Incoming;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::time::{Instant, sleep, sleep_until};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::Protocol;
use super::end::{self, End};
use super::intercept::Interceptors;
use super::interceptions::Interceptions;
use super::last_known_good::EnvoyCache;
use super::last_known_good::replay::Replay;
use super::observe::{Observer, Services, Source};
use super::stream::StreamState;
use crate::backoff::Backoff;
use crate::clock::later;
use crate::istiod::{Closed, Connection, Istiod, MAX_SILENCE};
use crate::problem::{Problem, Repetition, codes};

/// How many bytes of requests are kept for an istiod that has not answered yet. A first round of
/// requests is far smaller; what goes on sending all the same is made to wait for a stream of istiod,
/// and ends with it.
const MAX_HELD: usize = 16 << 20;

/// How much may wait for istiod before no more is read from a client other than the agent's Envoy, and
/// before the stream ends: of an Envoy, or of all other clients together.
const MAX_WAITING: usize = 1 << 20;
pub(super) const MAX_QUEUED: usize = 64 << 20;

/// Upper bounds of the first and of any wait after a stream that istiod has ended without an answer.
const FIRST_WAIT: Duration = Duration::from_millis(500);
const MAX_WAIT: Duration = Duration::from_secs(4);

/// Frames between the relay and Envoy's socket: 256 KiB.
const FRAMES: usize = 16;

/// A frame of a response to Envoy: bytes as they came, then the status.
pub(super) type ToEnvoy = Result<Frame<Bytes>, Infallible>;

/// The body of the response to Envoy.
pub(super) type ResponseBody = StreamBody<ReceiverStream<ToEnvoy>>;

/// A body fed through a bounded channel: more is read from istiod only when Envoy has taken these.
pub(super) fn response_body() -> (mpsc::Sender<ToEnvoy>, ResponseBody) {
    let (sender, receiver) = mpsc::channel(FRAMES);
    (sender, StreamBody::new(ReceiverStream::new(receiver)))
}

/// Whether the workload is healthy, or why not; None while that is not known.
pub(crate) type Health = watch::Receiver<Option<Result<(), String>>>;

/// What a relay needs beside its two streams.
#[derive(Debug)]
pub(crate) struct Relay {
    pub id: u32,
    pub protocol: Protocol,
    pub istiod: Istiod,
    pub is_envoy: bool,
    /// The memory for requests of all other clients, unless the client is an Envoy of this agent.
    pub shared: Option<Arc<Semaphore>>,
    pub interceptors: Interceptors,
    pub observer: Observer,
    pub max_request_bytes: usize,
    pub health: Option<Health>,
    /// The Envoy, if configuration is kept for it.
    pub kept: Option<EnvoyCache>,
    /// Fired when a newer stream takes this one's place, or the agent stops.
    pub stop: CancellationToken,
}

/// Istiod's side of the relay, from dialing to the stream's end.
enum IstiodSide {
    Connecting(Pin<Box<dyn Future<Output = Result<Connection, Closed>> + Send>>),
    Opening(Pin<Box<dyn Future<Output = Result<http::Response<Incoming>, hyper::Error>> + Send>>),
    Open(Incoming),
    /// What is kept answers in istiod's place.
    Kept(Replay),
}

/// What came from istiod.
enum IstiodEvent {
    Connected(Connection),
    Opened(http::Response<Incoming>),
    Data(Bytes),
}

impl IstiodSide {
    /// Connects after a wait, which another token ends.
    fn connect(istiod: Istiod, wait: Duration) -> Self {
        Self::Connecting(Box::pin(async move {
            tokio::select! {
                () = sleep(wait) => {}
                () = istiod.token_changed(), if !wait.is_zero() => {}
            }
            istiod.connection().await
        }))
    }

    /// Waits for the next event or the end. Cancel safe.
    async fn next(&mut self) -> Result<IstiodEvent, End> {
        match self {
            Self::Connecting(connection) => match connection.await {
                Ok(connection) => Ok(IstiodEvent::Connected(connection)),
                // The agent stops.
                Err(Closed) => Err(End::stopped()),
            },
            Self::Opening(response) => {
                let response = response.await.map_err(End::broken)?;
                Ok(IstiodEvent::Opened(response))
            }
            Self::Open(body) => {
                let frame = body.frame().await.transpose().map_err(End::broken)?;
                match frame.map(Frame::into_data) {
                    Some(Ok(bytes)) => Ok(IstiodEvent::Data(bytes)),
                    Some(Err(frame)) => Err(End::istiod(frame.into_trailers().unwrap_or_default())),
                    None => Err(End::istiod(HeaderMap::new())),
                }
            }
            Self::Kept(replay) => replay.next().await.map(IstiodEvent::Data),
        }
    }
}

/// Runs the relay until either stream has ended, and ends the other.
pub(crate) async fn run(relay: Relay, envoy: Incoming, to_envoy: mpsc::Sender<ToEnvoy>) {
    relay.observer.stream_began(relay.id, relay.protocol);
    let end = Session::new(&relay, envoy, &to_envoy).run().await;
    if let Some(trailers) = end.trailers() {
        // An Envoy that reads no more does not block the relay.
        let sent = to_envoy.send_timeout(Ok(Frame::trailers(trailers)), Duration::from_secs(1));
        if sent.await.is_err() {
            tracing::debug!(target: "xdsproxy", id = relay.id, "Envoy closed its stream before its status was sent");
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

/// The stream state with its two streams.
struct Session<'a> {
    relay: &'a Relay,
    state: StreamState,
    envoy: Incoming,
    to_envoy: &'a mpsc::Sender<ToEnvoy>,
    waits_since: Instant,
    istiod: IstiodSide,
    /// What istiod's stream is on, once there is one.
    connection: Option<Connection>,
    /// Whether istiod's stream should move to another connection.
    left: Pin<Box<dyn Future<Output = ()> + Send>>,
    /// Requests and responses form a loop: istiod may not read requests while it waits for a large
    /// response to be taken, and Envoy may not take it before its requests are through. One of the
    /// hops must not wait, or all do. So those of Envoy do not wait for room here, but in the queue.
    /// None while istiod has no stream.
    to_istiod: Option<mpsc::Sender<Bytes>>,
    /// Requests that wait for istiod, and their memory.
    queue: VecDeque<Bytes>,
    queued: usize,
    /// All requests, for the next stream of istiod, until it has answered; and their memory.
    held: Option<Vec<Bytes>>,
    held_bytes: usize,
    /// The shared memory that is taken.
    memory: Option<OwnedSemaphorePermit>,
    is_answered: bool,
    backoff: Backoff,
    /// Streams in a row that istiod has not answered.
    failures: Repetition,
    /// Since when istiod owes an answer, if there is another control plane.
    owed_since: Option<Instant>,
    interceptions: Interceptions,
    /// Marked as changed with each stream of istiod, which so begins with the present verdict.
    health: Option<Health>,
}

impl<'a> Session<'a> {
    fn new(relay: &'a Relay, envoy: Incoming, to_envoy: &'a mpsc::Sender<ToEnvoy>) -> Self {
        let mut state = StreamState::new(
            relay.id,
            relay.protocol,
            relay.interceptors.clone(),
            relay.observer.clone(),
            relay.max_request_bytes,
            relay.kept.clone(),
        );
        state.services = relay.is_envoy.then(Services::default);
        Self {
            relay,
            state,
            envoy,
            to_envoy,
            waits_since: Instant::now(),
            istiod: IstiodSide::connect(relay.istiod.clone(), Duration::ZERO),
            connection: None,
            left: Box::pin(pending()),
            to_istiod: None,
            queue: VecDeque::new(),
            queued: 0,
            held: Some(Vec::new()),
            held_bytes: 0,
            memory: None,
            is_answered: false,
            backoff: Backoff::new(FIRST_WAIT, MAX_WAIT),
            failures: Repetition::default(),
            owed_since: None,
            interceptions: Interceptions::default(),
            health: relay.health.clone(),
        }
    }

    async fn run(mut self) -> End {
        let Err(end) = self.relay().await;
        let problem = self.problem(end.status());
        self.leave_istiod(&end, &problem, false);
        let Relay { id, observer, .. } = self.relay;
        observer.stream_ended(*id, &end);
        end.log(*id, &problem);
        end
    }

    async fn relay(&mut self) -> Result<Infallible, End> {
        let mut stopped = pin!(self.relay.stop.cancelled());
        let mut envoy_gone = pin!(self.to_envoy.closed());
        loop {
            let due = self.due();
            let to_istiod = self.to_istiod.clone().map(mpsc::Sender::reserve_owned);
            let silent_at = self.owed_since.map(|since| later(since, MAX_SILENCE));
            tokio::select! {
                () = &mut stopped => return Err(End::stopped()),
                () = &mut self.left => return Err(End::moved()),
                () = &mut envoy_gone => return Err(End::envoy_gone(None)),
                frame = self.envoy.frame(), if self.wants_requests() => match frame {
                    Some(Ok(frame)) => {
                        if let Ok(bytes) = frame.into_data() {
                            self.state.read_requests(bytes)?;
                        }
                    }
                    Some(Err(error)) => return Err(End::envoy_gone(Some(error))),
                    None => return Err(self.state.envoy_done()),
                },
                room = self.to_envoy.reserve(), if !self.state.to_envoy.is_empty() => {
                    self.send(room.map_err(|_| End::envoy_gone(None))?);
                }
                Some(done) = self.interceptions.next() => {
                    let (response, outcome) = done.map_err(|panic| {
                        End::bad_response(&Status::internal(panic.to_string()))
                    })?;
                    if let Some(later) = self.state.intercepted(&response, outcome) {
                        self.interceptions.follow(response, later);
                    }
                }
                // The present verdict only: one that waited for istiod may be no longer true.
                health = changed(&mut self.health),
                    if self.to_istiod.is_some() && self.state.is_subscribed =>
                {
                    // Not held, as it may be no longer true when another stream opens.
                    self.enqueue(self.state.health_report(&health));
                }
                // It is closed only when istiod's stream has ended, which is about to be seen.
                Some(Ok(room)) = OptionFuture::from(to_istiod), if self.queued > 0 => {
                    let request = self.queue.pop_front().unwrap_or_default();
                    self.queued -= memory(&request);
                    room.send(request);
                }
                Some(()) = OptionFuture::from(due.map(sleep_until)) => self.serve_kept(),
                event = self.istiod.next(), if self.state.wants_responses() => {
                    self.owed_since = None;
                    let done = event.and_then(|event| self.istiod_event(event));
                    done.or_else(|end| self.istiod_done(end, false))?;
                }
                Some(()) = OptionFuture::from(silent_at.map(sleep_until)) => {
                    self.istiod_done(End::unanswered(), true)?;
                }
            }
            self.state.recorder.flush().await;
            self.pass_on();
            self.bound_memory()?;
            let is_owed = self.connection.is_some()
                && self.held_bytes > 0
                && self.relay.is_envoy
                && self.relay.istiod.has_others();
            self.owed_since = is_owed.then(|| self.owed_since.unwrap_or_else(Instant::now));
        }
    }

    fn istiod_event(&mut self, event: IstiodEvent) -> Result<(), End> {
        match event {
            IstiodEvent::Data(bytes) => {
                self.state.read_responses(bytes)?;
                if self.state.is_answered
                    && !std::mem::replace(&mut self.is_answered, true)
                    && let Some(connection) = &self.connection
                {
                    (self.held, self.held_bytes) = (None, 0);
                    self.relay.observer.istiod_answered(self.relay.id);
                    self.relay.istiod.answered(connection);
                    if let Some(failures) = self.failures.end() {
                        let id = self.relay.id;
                        tracing::info!(target: "xdsproxy", id, "istiod answers again; {failures}");
                    }
                }
            }
            IstiodEvent::Opened(response) => {
                self.istiod = IstiodSide::Open(end::opened(response)?);
            }
            IstiodEvent::Connected(connection) => {
                self.health.iter_mut().for_each(Health::mark_changed);
                let queue = self.queue();
                self.istiod = open(self.relay, connection.clone(), queue);
                self.left = Box::pin(connection.left());
                self.connection = Some(connection);
            }
        }
        Ok(())
    }

    /// The requests of a new stream: those held, and all that follow.
    fn queue(&mut self) -> mpsc::Receiver<Bytes> {
        self.queue = self.held.iter().flatten().cloned().collect();
        self.queued = self.held_bytes;
        let (sender, queue) = mpsc::channel(1);
        self.to_istiod = Some(sender);
        queue
    }

    fn enqueue(&mut self, request: Bytes) {
        self.queued += memory(&request);
        self.queue.push_back(request);
    }

    /// Whether there is room for requests.
    fn wants_requests(&self) -> bool {
        match self.relay.shared {
            Some(_) => self.queued < MAX_WAITING,
            None => self.to_istiod.is_some() || self.held_bytes < MAX_HELD,
        }
    }

    /// Fails if requests need more memory than they may.
    fn bound_memory(&mut self) -> Result<(), End> {
        let needed = self.queued.max(self.held_bytes) + self.state.requests.held.len();
        self.memory = None;
        let shared = self.relay.shared.clone();
        self.memory = shared.and_then(|it| it.try_acquire_many_owned(needed as u32).ok());
        if self.memory.is_some() || self.relay.shared.is_none() && self.queued <= MAX_QUEUED {
            return Ok(());
        }
        let problem = format!("more than {MAX_QUEUED} bytes of requests wait for istiod");
        Err(End::bad_request(&Status::resource_exhausted(problem)))
    }

    /// Istiod's stream has ended, or is silent. Envoy's is held if istiod has never answered on it, and
    /// ends else.
    fn istiod_done(&mut self, end: End, is_silent: bool) -> Result<(), End> {
        let end = self.state.istiod_done(end);
        let problem = self.problem(end.status());
        let has_moved = self.leave_istiod(&end, &problem, is_silent);
        if end.code_of_istiod().is_none() || self.held.is_none() || !self.relay.is_envoy {
            return Err(end);
        }
        if let Some(count) = self.failures.failed(&problem) {
            let problem = problem.consequence("Envoy's stream is held, and istiod is asked again");
            let id = self.relay.id;
            tracing::warn!(target: "xdsproxy", id, "upstream terminated with unexpected error {problem}{count}");
        }
        let wait = match has_moved {
            true => Duration::ZERO,
            false => self.backoff.next_wait(),
        };
        self.istiod = IstiodSide::connect(self.relay.istiod.clone(), wait);
        self.state.restart();
        (self.to_istiod, self.left) = (None, Box::pin(pending()));
        Ok(())
    }

    /// The problem with istiod's stream if it ends so.
    fn problem(&self, status: &Status) -> Problem {
        let unimplemented = match self.relay.protocol {
            Protocol::Sotw => codes::ISTIOD_ERROR,
            Protocol::Delta => codes::ISTIOD_WITHOUT_DELTA,
        };
        self.relay.istiod.explain(unimplemented, status)
    }

    /// Records how istiod's stream ended, if there was one. Returns whether another control plane is in
    /// use now.
    fn leave_istiod(&mut self, end: &End, problem: &Problem, is_silent: bool) -> bool {
        let Some(connection) = self.connection.take() else {
            return false;
        };
        let istiod = &self.relay.istiod;
        self.relay.observer.istiod_ended(end);
        let code = end.code_of_istiod();
        istiod.leave_if_unauthenticated(&connection, code);
        let is_failure = code.is_some() && !self.is_answered;
        is_failure && istiod.failed(&connection, is_silent, problem)
    }

    /// When Envoy is to be served what is kept, if istiod does not answer before.
    fn due(&self) -> Option<Instant> {
        let envoy = self.relay.kept.as_ref().filter(|_| self.held.is_some())?;
        Some(later(self.waits_since, envoy.patience()?))
    }

    /// Answers Envoy from what is kept, if anything is.
    fn serve_kept(&mut self) {
        let kept = self.relay.kept.as_ref();
        let Some(envoy) = kept.filter(|envoy| envoy.can_be_served()) else {
            self.waits_since = Instant::now();
            return;
        };
        let envoy = envoy.clone();
        if let Some(connection) = self.connection.take() {
            let status =
                Status::deadline_exceeded("no answer before stored configuration was served");
            let problem = self.problem(&status);
            self.relay.istiod.failed(&connection, false, &problem);
        }
        let queue = self.queue();
        (self.held, self.held_bytes) = (None, 0);
        self.left = Box::pin(pending());
        self.istiod = IstiodSide::Kept(Replay::start(envoy, queue));
        self.state.recorder.stop();
        self.state.source = Source::Kept;
        self.relay.observer.serves_kept(self.relay.id);
    }

    /// Hands Envoy the next bytes.
    fn send(&mut self, room: mpsc::Permit<'_, ToEnvoy>) {
        if let Some(bytes) = self.state.to_envoy.pop_front() {
            room.send(Ok(Frame::data(bytes)));
        }
    }

    /// Passes on what is ready.
    fn pass_on(&mut self) {
        for request in std::mem::take(&mut self.state.to_istiod) {
            if let Some(held) = &mut self.held {
                self.held_bytes += memory(&request);
                held.push(request.clone());
            }
            self.enqueue(request);
        }
        if self.to_istiod.is_some() && self.held_bytes > MAX_HELD {
            (self.held, self.held_bytes) = (None, 0);
        }
        self.interceptions
            .start(&mut self.state, self.relay.protocol);
        while !self.state.to_envoy.is_empty() {
            match self.to_envoy.try_reserve() {
                Ok(room) => self.send(room),
                // Envoy takes it later, or is gone, which is seen elsewhere.
                Err(_) => return,
            }
        }
    }
}

/// The memory of a request. A flood of small ones is mostly handles.
fn memory(request: &Bytes) -> usize {
    request.len() + size_of::<Bytes>()
}

/// The next verdict. Cancel safe.
async fn changed(health: &mut Option<Health>) -> Result<(), String> {
    if let Some(receiver) = health {
        while receiver.changed().await.is_ok() {
            if let Some(verdict) = receiver.borrow_and_update().clone() {
                return verdict;
            }
        }
    }
    pending().await
}

/// Opens the stream to istiod. Its head may come only with the first response, so nothing waits for
/// it.
fn open(relay: &Relay, mut connection: Connection, queue: mpsc::Receiver<Bytes>) -> IstiodSide {
    let sent = relay.observer.metrics.requests.clone();
    let frames = ReceiverStream::new(queue).map(move |request| {
        sent.inc();
        Ok::<_, Infallible>(Frame::data(request))
    });
    let body = crate::istiod::Body::new(StreamBody::new(frames));
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
