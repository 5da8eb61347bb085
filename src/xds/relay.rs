//! Ties one stream of Envoy to one stream of istiod.
//!
//! [`run`] feeds a [`StreamState`] and sends its bytes, in one loop that never waits for one direction
//! while the other has work. When either stream ends, the other does; Envoy connects again and sends
//! its subscriptions again.
//!
//! Envoy's stream stays open until istiod's first response, because Envoy backs off up to 30 s after a
//! failed stream and would notice istiod's recovery late. If istiod's stream fails before, Envoy's requests
//! are sent again on another one, after a backoff of up to [`MAX_WAIT`] or as soon as the token changes.
//! Streams of other clients end with istiod's.
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
use super::last_known_good::replay::Replay;
use super::observe::{Observer, Services, Source};
use super::phase::{Event, IstiodStream, Phase, Requests};
use super::stream::StreamState;
use crate::backoff::Backoff;
use crate::clock::{after, later};
use crate::istiod::{Istiod, MAX_SILENCE};
use crate::problem::{Problem, Repetition, codes};

/// The most bytes of requests held for another stream while istiod has not answered. The first requests of
/// an Envoy are far smaller. A client that sends more waits for a stream of istiod, and ends with that stream.
const MAX_HELD: usize = 16 << 20;

/// The most bytes of requests that wait for istiod while more is read from a client other than the agent's
/// Envoy.
const MAX_WAITING: usize = 1 << 20;

/// The most bytes of requests that wait for istiod, of one Envoy or of all other clients together. A stream
/// that needs more ends.
pub(super) const MAX_QUEUED: usize = 64 << 20;

/// Upper bounds of the first wait and of any wait after istiod has ended a stream without a response.
const FIRST_WAIT: Duration = Duration::from_millis(500);
const MAX_WAIT: Duration = Duration::from_secs(4);

/// Frames between the relay and Envoy's socket: 256 KiB.
const FRAMES: usize = 16;

/// A frame for Envoy: bytes of responses, unchanged, or the status at the end.
pub(super) type ToEnvoy = Result<Frame<Bytes>, Infallible>;

/// The body of the response to Envoy.
pub(super) type ResponseBody = StreamBody<ReceiverStream<ToEnvoy>>;

/// Returns a body fed through a bounded channel: more is read from istiod only when Envoy has taken its frames.
pub(super) fn response_body() -> (mpsc::Sender<ToEnvoy>, ResponseBody) {
    let (sender, receiver) = mpsc::channel(FRAMES);
    (sender, StreamBody::new(ReceiverStream::new(receiver)))
}

/// The health of the workload, with the reason if it is unhealthy; None while it is unknown.
pub(crate) type Health = watch::Receiver<Option<Result<(), String>>>;

/// The settings of a relay, and the parts of the agent that it uses.
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
    /// The stored configuration, if the client is an Envoy that may use it.
    pub store: Option<EnvoyCache>,
    /// Fired when a newer stream takes this one's place, or the agent stops.
    pub stop: CancellationToken,
}

/// Runs the relay until either stream has ended, and ends the other.
pub(crate) async fn run(relay: Relay, envoy: Incoming, to_envoy: mpsc::Sender<ToEnvoy>) {
    relay.observer.stream_began(relay.id, relay.protocol);
    let end = Session::new(&relay, envoy, &to_envoy).run().await;
    if let Some(trailers) = end.trailers() {
        // An Envoy that no longer reads does not block the relay.
        let sent = to_envoy.send_timeout(Ok(Frame::trailers(trailers)), Duration::from_secs(1));
        if sent.await.is_err() {
            tracing::debug!(target: "xdsproxy", id = relay.id, "Envoy closed its stream before its status was sent");
        }
    }
    let (prefix, address) = (relay.protocol.log_prefix(), relay.istiod.address());
    tracing::debug!(target: "xdsproxy", id = relay.id, "disconnected from {prefix}XDS server: {address}");
}

/// The stream state with its two streams.
struct Session<'a> {
    relay: &'a Relay,
    state: StreamState,
    envoy: Incoming,
    to_envoy: &'a mpsc::Sender<ToEnvoy>,
    waits_since: Instant,
    phase: Phase,
    /// All requests, as long as another stream of istiod can begin with them: it has not answered, and they are
    /// not too large.
    held: Option<Requests>,
    /// The time at which istiod counts as silent: [`MAX_SILENCE`] after a request began to wait for an answer. None
    /// if istiod does not owe one, or if there is no other control plane.
    silent_at: Option<Instant>,
    /// Requests for istiod. Reading from Envoy does not wait for room at istiod: istiod may not read requests
    /// while it waits for a large response to be taken, and Envoy may not take it before its requests are
    /// sent. If no hop had a queue, all would wait for each other.
    queue: Requests,
    /// The share of the memory of all other clients.
    memory: Option<OwnedSemaphorePermit>,
    backoff: Backoff,
    /// Consecutive streams without a response of istiod.
    failures: Repetition,
    interceptions: Interceptions,
    /// Marked as changed for each stream of istiod, so that it begins with the current verdict.
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
            relay.store.clone(),
        );
        state.services = relay.is_envoy.then(Services::default);
        let istiod = relay.istiod.clone();
        Self {
            relay,
            state,
            envoy,
            to_envoy,
            waits_since: Instant::now(),
            phase: Phase::connecting(istiod, Duration::ZERO),
            held: Some(Requests::default()),
            silent_at: None,
            queue: Requests::default(),
            memory: None,
            backoff: Backoff::new(FIRST_WAIT, MAX_WAIT),
            failures: Repetition::default(),
            interceptions: Interceptions::default(),
            health: relay.health.clone(),
        }
    }

    async fn run(mut self) -> End {
        let Err(end) = self.relay().await;
        let problem = self.problem(&end.status);
        self.record_end(&end, &problem, false);
        let Relay { id, observer, .. } = self.relay;
        observer.stream_ended(*id, &end);
        end.log(*id, &problem);
        end
    }

    async fn relay(&mut self) -> Result<Infallible, End> {
        let mut stopped = pin!(self.relay.stop.cancelled());
        let mut envoy_gone = pin!(self.to_envoy.closed());
        loop {
            let last_known_good_due = self.last_known_good_due();
            let requests = self.phase.requests().cloned();
            let to_istiod = requests.map(mpsc::Sender::reserve_owned);
            let is_open = to_istiod.is_some();
            let has_alternative = self.relay.is_envoy && self.relay.istiod.has_others();
            let is_owed = has_alternative && self.phase.stream().is_some() && self.held() > 0;
            self.silent_at = is_owed.then(|| self.silent_at.unwrap_or_else(|| after(MAX_SILENCE)));
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
                Some((response, outcome)) = self.interceptions.next() => {
                    if let Some(later) = self.state.intercepted(&response, outcome) {
                        self.interceptions.follow(response, later);
                    }
                }
                // Only the latest verdict is sent: one that has waited for istiod may be outdated.
                health = next_verdict(&mut self.health), if is_open && self.state.is_subscribed => {
                    // The report is not held, as it may be outdated when another stream opens.
                    self.queue.push(self.state.health_report(&health));
                }
                // The queue is closed only if istiod's stream has ended, which `phase.next` returns.
                Some(Ok(room)) = OptionFuture::from(to_istiod), if self.queue.memory() > 0 => {
                    room.send(self.queue.pop().unwrap_or_default());
                }
                Some(()) = OptionFuture::from(last_known_good_due.map(sleep_until)) => {
                    self.serve_last_known_good();
                }
                Some(()) = OptionFuture::from(clusters_due.map(sleep_until)) => {
                    self.state.recorder.clusters_due = None;
                }
                Some(stored) = self.state.recorder.stored_versions.next(), if self.state.stored.is_none() => {
                    self.state.stored = Some(stored);
                    self.state.send_waiting();
                }
                event = self.phase.next(wants_responses) => {
                    self.silent_at = None;
                    let handled = event.and_then(|event| self.handle(event));
                    handled.or_else(|end| self.istiod_done(end, false))?;
                }
                Some(()) = OptionFuture::from(self.silent_at.map(sleep_until)) => {
                    self.istiod_done(End::unanswered(), true)?;
                }
            }
            self.state.recorder.flush().await;
            self.forward();
            self.bound_memory()?;
        }
    }

    /// Handles an event of istiod's stream.
    fn handle(&mut self, event: Event) -> Result<(), End> {
        match event {
            Event::Data(bytes) => {
                self.state.read_responses(bytes)?;
                if self.state.is_answered
                    && let Phase::Relaying(stream) = &mut self.phase
                    && !std::mem::replace(&mut stream.is_answered, true)
                {
                    self.held = None;
                    self.relay.observer.istiod_answered(self.relay.id);
                    self.relay.istiod.answered(&stream.connection);
                    if let Some(failures) = self.failures.end() {
                        let id = self.relay.id;
                        tracing::info!(target: "xdsproxy", id, "istiod answers again; {failures}");
                    }
                }
            }
            Event::Connected(connection) => {
                self.health.iter_mut().for_each(Health::mark_changed);
                let (id, istiod, protocol) =
                    (self.relay.id, &self.relay.istiod, self.relay.protocol);
                let (prefix, address) = (protocol.log_prefix(), istiod.address());
                tracing::info!(target: "xdsproxy", id, "connected to {prefix}upstream XDS server: {address}");
                let sent = self.relay.observer.metrics.requests.clone();
                let stream = IstiodStream::open(connection, istiod, protocol.path(), sent);
                self.phase = Phase::Relaying(stream);
                self.queue = self.held.clone().unwrap_or_default();
            }
        }
        Ok(())
    }

    /// Returns true if there is room for requests.
    fn wants_requests(&self) -> bool {
        match self.relay.shared {
            Some(_) => self.queue.memory() < MAX_WAITING,
            None => self.phase.requests().is_some() || self.held() < MAX_HELD,
        }
    }

    /// Returns the memory of the requests that are held for another stream of istiod.
    fn held(&self) -> usize {
        self.held.as_ref().map_or(0, Requests::memory)
    }

    /// Fails if requests need more memory than they may.
    fn bound_memory(&mut self) -> Result<(), End> {
        let queued = self.queue.memory();
        let fits = if let Some(shared) = &self.relay.shared {
            let needed = queued.max(self.held()) + self.state.requests.held.len();
            // The old share is returned first, so that it counts as free.
            self.memory = None;
            self.memory = shared.clone().try_acquire_many_owned(needed as u32).ok();
            self.memory.is_some()
        } else {
            queued <= MAX_QUEUED
        };
        if fits {
            return Ok(());
        }
        let problem = format!("more than {MAX_QUEUED} bytes of requests wait for istiod");
        Err(End::bad_request(&Status::resource_exhausted(problem)))
    }

    /// Connects again if Envoy's stream can be held, that is if istiod ended its stream without a response.
    /// Otherwise both streams end.
    fn istiod_done(&mut self, end: End, is_silent: bool) -> Result<(), End> {
        let end = self.state.istiod_done(end);
        if self.held.is_none() || !self.relay.is_envoy || end.istiod_code().is_none() {
            return Err(end);
        }
        let problem = self.problem(&end.status);
        let has_moved = self.record_end(&end, &problem, is_silent);
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
        self.phase = Phase::connecting(self.relay.istiod.clone(), wait);
        self.state.restart();
        Ok(())
    }

    /// Explains a status of istiod's stream.
    fn problem(&self, status: &Status) -> Problem {
        let unimplemented = match self.relay.protocol {
            Protocol::Sotw => codes::ISTIOD_ERROR,
            Protocol::Delta => codes::ISTIOD_WITHOUT_DELTA,
        };
        self.relay.istiod.explain(unimplemented, status)
    }

    /// Records the end of istiod's stream, if there is one. Returns true if another control plane is in
    /// use now.
    fn record_end(&self, end: &End, problem: &Problem, is_silent: bool) -> bool {
        let Some(stream) = self.phase.stream() else {
            return false;
        };
        let (istiod, code) = (&self.relay.istiod, end.istiod_code());
        self.relay.observer.istiod_ended(end);
        istiod.leave_if_unauthenticated(&stream.connection, code);
        let is_failure = code.is_some() && !stream.is_answered;
        is_failure && istiod.failed(&stream.connection, is_silent, problem)
    }

    /// Returns when Envoy is served last known good configuration, unless istiod answers before.
    fn last_known_good_due(&self) -> Option<Instant> {
        self.held.as_ref()?;
        let patience = self.relay.store.as_ref()?.patience()?;
        Some(later(self.waits_since, patience))
    }

    /// Serves Envoy last known good configuration. If there is none, Envoy waits again.
    fn serve_last_known_good(&mut self) {
        let Some(envoy) = self.relay.store.as_ref().filter(|it| it.can_be_served()) else {
            self.waits_since = Instant::now();
            return;
        };
        if let Some(stream) = self.phase.stream() {
            let why = "no answer before stored configuration was served";
            let problem = self.problem(&Status::deadline_exceeded(why));
            let istiod = &self.relay.istiod;
            istiod.failed(&stream.connection, false, &problem);
        }
        self.queue = self.held.take().unwrap_or_default();
        self.phase = Phase::ServingLastKnownGood(Replay::start(envoy.clone()));
        self.state.recorder.stop();
        self.state.source = Source::Stored;
        self.relay.observer.serves_stored(self.relay.id);
    }

    /// Sends Envoy the next bytes.
    fn send(&mut self, room: mpsc::Permit<'_, ToEnvoy>) {
        if let Some(bytes) = self.state.to_envoy.pop_front() {
            room.send(Ok(Frame::data(bytes)));
        }
    }

    /// Forwards the requests and bytes that are ready, and starts interceptors.
    fn forward(&mut self) {
        for request in std::mem::take(&mut self.state.to_istiod) {
            if let Some(held) = &mut self.held {
                held.push(request.clone());
            }
            self.queue.push(request);
        }
        if self.held() > MAX_HELD && self.phase.stream().is_some() {
            self.held = None;
        }
        self.interceptions
            .start(&mut self.state, self.relay.protocol);
        // Without room, Envoy takes the bytes later, or has closed its stream, which the loop notices.
        while !self.state.to_envoy.is_empty()
            && let Ok(room) = self.to_envoy.try_reserve()
        {
            self.send(room);
        }
    }
}

/// Waits for a change of the health and returns the new verdict. Cancel safe.
async fn next_verdict(health: &mut Option<Health>) -> Result<(), String> {
    if let Some(receiver) = health {
        while receiver.changed().await.is_ok() {
            if let Some(verdict) = receiver.borrow_and_update().clone() {
                return verdict;
            }
        }
    }
    pending().await
}
