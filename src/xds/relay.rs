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

use std::convert::Infallible;
use std::future::pending;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::OptionFuture;
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Incoming;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::time::{Instant, sleep_until};
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::Protocol;
use super::end::End;
use super::intercept::Interceptors;
use super::interceptions::Interceptions;
use super::last_known_good::EnvoyCache;
use super::last_known_good::after_nack::StoredStream;
use super::observe::{Observer, Services, Source};
use super::phase::{Event, Phase, Requests};
use super::stream::StreamState;
use crate::backoff::Backoff;
use crate::clock::later;
use crate::istiod::{Istiod, MAX_SILENCE};
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
    phase: Phase,
    /// Requests and responses form a loop: istiod may not read requests while it waits for a large
    /// response to be taken, and Envoy may not take it before its requests are through. One of the
    /// hops must not wait, or all do. So those of Envoy do not wait for room here, but in the queue.
    queue: Requests,
    /// The shared memory that is taken.
    memory: Option<OwnedSemaphorePermit>,
    backoff: Backoff,
    /// Streams in a row that istiod has not answered.
    failures: Repetition,
    interceptions: Interceptions,
    /// Marked as changed with each stream of istiod, which so begins with the present verdict.
    health: Option<Health>,
    stored: StoredStream,
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
        let istiod = relay.istiod.clone();
        let stored = state.recorder.stored_versions();
        Self {
            relay,
            state,
            envoy,
            to_envoy,
            waits_since: Instant::now(),
            phase: Phase::connecting(Requests::default(), istiod, Duration::ZERO),
            queue: Requests::default(),
            memory: None,
            backoff: Backoff::new(FIRST_WAIT, MAX_WAIT),
            failures: Repetition::default(),
            interceptions: Interceptions::default(),
            health: relay.health.clone(),
            stored,
        }
    }

    async fn run(mut self) -> End {
        let Err(end) = self.relay().await;
        let problem = self.problem(end.status());
        self.record_end(&self.phase, &end, &problem, false);
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
            let requests = self.phase.requests().cloned();
            let to_istiod = requests.map(mpsc::Sender::reserve_owned);
            let is_open = to_istiod.is_some();
            let silent_at = self
                .phase
                .owed_since()
                .map(|since| later(since, MAX_SILENCE));
            let wants_responses = self.state.wants_responses();
            let clusters_due = self.state.recorder.clusters_due;
            tokio::select! {
                () = &mut stopped => return Err(End::stopped()),
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
                health = changed(&mut self.health), if is_open && self.state.is_subscribed => {
                    // Not held, as it may be no longer true when another stream opens.
                    self.queue.push(self.state.health_report(&health));
                }
                // It is closed only when istiod's stream has ended, which is about to be seen.
                Some(Ok(room)) = OptionFuture::from(to_istiod), if self.queue.memory() > 0 => {
                    room.send(self.queue.pop().unwrap_or_default());
                }
                Some(()) = OptionFuture::from(due.map(sleep_until)) => self.serve_last_known_good(),
                Some(()) = OptionFuture::from(clusters_due.map(sleep_until)) => {
                    self.state.recorder.clusters_due = None;
                }
                Some(stored) = self.stored.next(), if self.state.stored.is_none() => {
                    self.state.stored = Some(stored);
                    self.state.send_stored();
                }
                event = self.phase.next(wants_responses) => {
                    self.phase.owe(false);
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
            let may_owe = self.relay.is_envoy && self.relay.istiod.has_others();
            self.phase.owe(may_owe);
        }
    }

    fn istiod_event(&mut self, event: Event) -> Result<(), End> {
        match event {
            Event::Data(bytes) => {
                self.state.read_responses(bytes)?;
                if self.state.is_answered
                    && let Some(connection) = self.phase.answered()
                {
                    self.relay.observer.istiod_answered(self.relay.id);
                    self.relay.istiod.answered(connection);
                    if let Some(failures) = self.failures.end() {
                        let id = self.relay.id;
                        tracing::info!(target: "xdsproxy", id, "istiod answers again; {failures}");
                    }
                }
            }
            Event::Opened => {}
            Event::Connected(connection) => {
                self.health.iter_mut().for_each(Health::mark_changed);
                self.phase.connected(self.relay, connection);
                self.queue = self.phase.held().cloned().unwrap_or_default();
            }
        }
        Ok(())
    }

    /// Whether there is room for requests.
    fn wants_requests(&self) -> bool {
        match self.relay.shared {
            Some(_) => self.queue.memory() < MAX_WAITING,
            None => self.phase.requests().is_some() || self.held() < MAX_HELD,
        }
    }

    /// Returns the memory of the requests that are held for another stream of istiod.
    fn held(&self) -> usize {
        self.phase.held().map_or(0, Requests::memory)
    }

    /// Fails if requests need more memory than they may.
    fn bound_memory(&mut self) -> Result<(), End> {
        let queued = self.queue.memory();
        let needed = queued.max(self.held()) + self.state.requests.held.len();
        self.memory = None;
        let shared = self.relay.shared.clone();
        self.memory = shared.and_then(|it| it.try_acquire_many_owned(needed as u32).ok());
        if self.memory.is_some() || self.relay.shared.is_none() && queued <= MAX_QUEUED {
            return Ok(());
        }
        let problem = format!("more than {MAX_QUEUED} bytes of requests wait for istiod");
        Err(End::bad_request(&Status::resource_exhausted(problem)))
    }

    /// Connects again if Envoy's stream can be held, which takes that istiod has not answered on its own
    /// stream. Otherwise both end.
    fn istiod_done(&mut self, end: End, is_silent: bool) -> Result<(), End> {
        let end = self.state.istiod_done(end);
        let problem = self.problem(end.status());
        let mut phase = std::mem::replace(&mut self.phase, Phase::Ended);
        let has_moved = self.record_end(&phase, &end, &problem, is_silent);
        let is_istiods = end.code_of_istiod().is_some();
        let held = phase
            .held_mut()
            .filter(|_| is_istiods && self.relay.is_envoy);
        let Some(held) = held.map(std::mem::take) else {
            return Err(end);
        };
        if let Some(count) = self.failures.failed(&problem) {
            let problem = problem.consequence("Envoy's stream is held, and istiod is asked again");
            let id = self.relay.id;
            tracing::warn!(target: "xdsproxy", id, "upstream terminated with unexpected error {problem}{count}");
        }
        let wait = if has_moved {
            Duration::ZERO
        } else {
            self.backoff.next_wait()
        };
        self.phase = Phase::connecting(held, self.relay.istiod.clone(), wait);
        self.state.restart();
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

    /// Records how istiod's stream ended, if there was one in this phase. Returns whether another control
    /// plane is in use now.
    fn record_end(&self, phase: &Phase, end: &End, problem: &Problem, is_silent: bool) -> bool {
        let Some(connection) = phase.connection() else {
            return false;
        };
        let istiod = &self.relay.istiod;
        self.relay.observer.istiod_ended(end);
        let code = end.code_of_istiod();
        istiod.leave_if_unauthenticated(connection, code);
        let is_failure = code.is_some() && matches!(phase, Phase::AwaitingFirstResponse { .. });
        is_failure && istiod.failed(connection, is_silent, problem)
    }

    /// When Envoy is to be served last known good configuration, if istiod does not answer before.
    fn due(&self) -> Option<Instant> {
        let envoy = self
            .relay
            .kept
            .as_ref()
            .filter(|_| self.phase.held().is_some())?;
        Some(later(self.waits_since, envoy.patience()?))
    }

    /// Answers Envoy with last known good configuration, if there is any.
    fn serve_last_known_good(&mut self) {
        let kept = self.relay.kept.as_ref();
        let Some(envoy) = kept.filter(|envoy| envoy.can_be_served()) else {
            self.waits_since = Instant::now();
            return;
        };
        if let Some(connection) = self.phase.connection() {
            let status =
                Status::deadline_exceeded("no answer before stored configuration was served");
            let problem = self.problem(&status);
            self.relay.istiod.failed(connection, false, &problem);
        }
        self.queue = self.phase.held().cloned().unwrap_or_default();
        self.phase = Phase::serving(envoy.clone());
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
            if let Some(held) = self.phase.held_mut() {
                held.push(request.clone());
            }
            self.queue.push(request);
        }
        if self.held() > MAX_HELD {
            self.phase.release();
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
