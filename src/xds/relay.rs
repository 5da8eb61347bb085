//! Ties one stream of Envoy, or of another client, to one stream of istiod.
//!
//! A [`Relay`] feeds a [`StreamState`] and sends its bytes, in one loop that never waits for one direction
//! while the other has work. When either stream ends, the other does; Envoy connects again and sends
//! its subscriptions again.
//!
//! Envoy's stream stays open until istiod's first response, because Envoy backs off up to 30 s after a
//! failed stream and would notice istiod's recovery late. If istiod's stream fails before, Envoy's requests
//! are sent again on another one, after a backoff of up to [`MAX_WAIT`] or as soon as the token changes. An
//! overloaded istiod gets [`MAX_WAIT_IF_OVERLOADED`].
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
use http::uri::Scheme;
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Incoming;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::task::yield_now;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};

use super::Protocol;
use super::end::End;
use super::interceptor::{Interceptors, Outcome};
use super::ledger::EnvoyCache;
use super::ledger::replay::Replay;
use super::liveness::{Liveness, NEW_STREAM_INTERVAL, News};
use super::observe::{Observer, Services, Source};
use super::on_demand::OnDemand;
use super::phase::{Event, IstiodStream, Phase, Requests};
use super::response::Captured;
use super::running_interceptors::RunningInterceptors;
use super::stream::StreamState;
use crate::istiod::{Connection, Istiod, MAX_SILENCE};
use crate::problem::{self, Problem, Repetition};
use crate::runtime::backoff::Backoff;
use crate::runtime::clock::{later, until};

/// The most bytes of requests that can be sent again while istiod has not responded. The first requests of
/// an Envoy are far smaller. A client that sends more waits for a stream of istiod, and ends with that stream.
const MAX_RESENDABLE: usize = 16 << 20;

/// The most bytes of requests that wait for istiod while more is read from a client other than the agent's
/// Envoy.
const MAX_WAITING: usize = 1 << 20;

/// The most bytes of requests of an Envoy of this agent that wait for istiod, and the most that all other clients
/// together have in memory. A stream that needs more ends.
pub(super) const MAX_QUEUED: usize = 64 << 20;

/// The upper bound of the first wait after istiod has ended a stream without a response. [`MAX_WAIT`] limits any wait.
const FIRST_WAIT: Duration = Duration::from_millis(500);
const MAX_WAIT: Duration = Duration::from_secs(4);

/// The longest wait after RESOURCE_EXHAUSTED, as long as Envoy's own: each attempt adds to the load of istiod.
const MAX_WAIT_IF_OVERLOADED: Duration = Duration::from_secs(30);

/// The number of silent streams up to which [`MAX_SILENCE`] grows: to two minutes.
const MAX_SILENT_STREAMS: u32 = 7;

/// The most bytes of responses that are read and stored before other tasks of the thread run, such as probes.
const MAX_UNYIELDED: usize = 64 << 10;

/// The most frames between the relay and the client's socket, which have 256 KiB together.
const FRAMES: usize = 16;

/// A frame for the client: bytes of responses, unchanged, or the status at the end.
pub(super) type ResponseFrame = Result<Frame<Bytes>, Infallible>;

/// The body of the response to the client.
pub(super) type ResponseBody = StreamBody<ReceiverStream<ResponseFrame>>;

/// Returns a body fed through a bounded channel: more is read from istiod only when the client has
/// taken its frames.
pub(super) fn response_body() -> (mpsc::Sender<ResponseFrame>, ResponseBody) {
    let (sender, receiver) = mpsc::channel(FRAMES);
    (sender, StreamBody::new(ReceiverStream::new(receiver)))
}

/// The health of the workload, with the reason if it is unhealthy; None while it is unknown.
pub(crate) type Health = watch::Receiver<Option<Verdict>>;
pub(super) type Verdict = Result<(), String>;

/// The settings of a relay, and the parts of the agent that it uses.
pub(crate) struct RelayConfig {
    pub id: u32,
    pub protocol: Protocol,
    pub istiod: Istiod,
    /// True for any Envoy: one of this agent, or one that a wrapper or another container runs.
    pub is_envoy: bool,
    /// The memory that the requests of all other clients share; None for an Envoy of this agent.
    pub shared_memory: Option<Arc<Semaphore>>,
    pub interceptors: Interceptors,
    pub observer: Observer,
    pub max_request_bytes: usize,
    pub health: Option<Health>,
    /// The stored configuration, if the client is an Envoy that may use it.
    pub store: Option<EnvoyCache>,
    /// The token that is cancelled when a newer stream replaces this one, or when the agent stops.
    pub stop: CancellationToken,
}

/// Relays a client's stream until it or istiod's has ended, ends the other, and sends the client the status.
pub(crate) async fn serve_stream(
    config: RelayConfig,
    client: Incoming,
    to_client: mpsc::Sender<ResponseFrame>,
) {
    config.observer.record_stream_begin(config.id, config.protocol);
    let end = Relay::new(&config, client, &to_client).run().await;
    if let Some(trailers) = end.trailers() {
        // A client that no longer reads does not block the relay.
        let sent = to_client.send_timeout(Ok(Frame::trailers(trailers)), Duration::from_secs(1));
        if sent.await.is_err() {
            tracing::debug!(target: "xdsproxy", id = config.id, "Envoy closed its stream before its status was sent");
        }
    }
    let prefix = config.protocol.log_prefix();
    let address = config.istiod.address();
    tracing::debug!(target: "xdsproxy", id = config.id, "disconnected from {prefix}XDS server: {address}");
}

/// The stream state with its two streams.
struct Relay<'a> {
    config: &'a RelayConfig,
    state: StreamState,
    /// The requests of the client.
    client: Incoming,
    to_client: &'a mpsc::Sender<ResponseFrame>,
    /// The time since which the client waits for istiod's first response. It begins again if stored configuration
    /// could not be served instead.
    awaits_istiod_since: Instant,
    phase: Phase,
    /// All requests, as long as another stream can begin with them: istiod has not responded, and they are not
    /// larger than [`MAX_RESENDABLE`].
    resendable: Option<Requests>,
    /// The consecutive streams on which istiod was silent too long.
    silent_streams: u32,
    /// Requests for the side that answers. Reading from the client does not wait for room at istiod: istiod may not
    /// read requests while it waits for a large response to be taken, and the client may not take it before its
    /// requests are sent. If no hop had a queue, all would wait for each other.
    queue: Requests,
    /// The bytes of responses that have been stored since other tasks ran.
    unyielded: usize,
    /// The part of [`RelayConfig::shared_memory`] that this relay has.
    memory_permit: Option<OwnedSemaphorePermit>,
    backoff: Backoff,
    /// The consecutive streams without a response of istiod.
    failures: Repetition,
    interceptions: RunningInterceptors,
    /// Marked as changed for each stream of istiod, so that it begins with the current verdict.
    health: Option<Health>,
}

impl<'a> Relay<'a> {
    fn new(
        config: &'a RelayConfig,
        client: Incoming,
        to_client: &'a mpsc::Sender<ResponseFrame>,
    ) -> Self {
        let mut state = StreamState::new(
            config.id,
            config.protocol,
            config.interceptors.clone(),
            config.observer.clone(),
            config.max_request_bytes,
            config.store.clone(),
        );
        state.services = config.is_envoy.then(Services::default);
        let istiod = config.istiod.clone();
        Self {
            config,
            state,
            client,
            to_client,
            awaits_istiod_since: Instant::now(),
            phase: Phase::connecting(istiod, Duration::ZERO),
            resendable: Some(Requests::default()),
            silent_streams: 0,
            queue: Requests::default(),
            unyielded: 0,
            memory_permit: None,
            backoff: Backoff::new(FIRST_WAIT, MAX_WAIT),
            failures: Repetition::default(),
            interceptions: RunningInterceptors::default(),
            health: config.health.clone(),
        }
    }

    /// Relays until either stream ends, then closes both. Records, logs and returns the end.
    async fn run(mut self) -> End {
        let Err(end) = self.run_until_end().await;
        let problem = self.explain(&end.status);
        self.record_istiod_end(&end, &problem, false);
        let RelayConfig { id, observer, .. } = self.config;
        observer.record_stream_end(*id, &end);
        end.log(*id, &problem);
        end
    }

    /// Relays requests and responses until either stream ends. Each turn handles one event, then forwards what is
    /// ready. A failed stream of istiod is no end while another can begin with the same requests.
    async fn run_until_end(&mut self) -> Result<Infallible, End> {
        let mut stopped = pin!(self.config.stop.cancelled());
        let mut client_gone = pin!(self.to_client.closed());
        loop {
            let request_room = self.phase.request_room();
            let wants_responses = self.state.wants_responses();
            let liveness_due = self.state.liveness_due(wants_responses);
            let last_known_good_due = self.last_known_good_due();
            let max_silence = self.max_silence();
            tokio::select! {
                () = &mut stopped => return Err(End::stopped()),
                () = &mut client_gone => return Err(End::envoy_gone(None)),
                frame = self.client.frame(), if self.wants_requests() => self.read_requests(frame)?,
                room = self.to_client.reserve(), if !self.state.to_client.is_empty() => {
                    self.send_next(room.map_err(|_| End::envoy_gone(None))?);
                }
                Some((response, outcome)) = self.interceptions.next() => {
                    self.apply_outcome(response, outcome);
                }
                // Only the latest verdict is sent: one that has waited for istiod may be outdated.
                health = next_verdict(&mut self.health), if request_room.is_some() && self.state.has_sent_own_subscriptions => {
                    // The report is not sent again on another stream, as it may be outdated then.
                    self.queue.push(self.state.health_report(&health));
                }
                // The channel is closed only if the side that answers has ended, which `phase.next` returns.
                Some(Ok(room)) = OptionFuture::from(request_room), if self.queue.memory() > 0 => {
                    self.send_request(room);
                }
                () = until(last_known_good_due) => self.serve_last_known_good(),
                Some(event) = OnDemand::next(&mut self.state.on_demand) => {
                    self.state.handle_on_demand(event);
                }
                () = self.state.recorder.next() => self.state.send_waiting(),
                event = self.phase.next(wants_responses, max_silence) => self.handle_event(event)?,
                () = until(liveness_due) => self.state.check_liveness(),
            }
            self.report_problem()?;
            self.forward();
            self.reserve_memory()?;
            if self.unyielded >= MAX_UNYIELDED {
                self.unyielded = 0;
                yield_now().await;
            }
        }
    }

    /// Reads a part of the client's requests.
    fn read_requests(&mut self, frame: Option<hyper::Result<Frame<Bytes>>>) -> Result<(), End> {
        match frame.transpose().map_err(|error| End::envoy_gone(Some(error)))? {
            Some(frame) => match frame.into_data() {
                Ok(bytes) => self.state.read_requests(bytes),
                Err(_trailers) => Ok(()),
            },
            None => Err(self.state.client_end()),
        }
    }

    /// Sends the side that answers the next request.
    fn send_request(&mut self, room: mpsc::OwnedPermit<Bytes>) {
        let request = self.queue.pop().unwrap_or_default();
        if let Some(liveness) = &mut self.state.liveness {
            liveness.note_request(&request);
        }
        if let Phase::Relaying(stream) = &mut self.phase {
            stream.active = Instant::now();
        }
        room.send(request);
    }

    /// Handles an event of the phase. A failed stream of istiod is replaced if it can be.
    fn handle_event(&mut self, event: Result<Event, End>) -> Result<(), End> {
        let handled = match event {
            Ok(Event::Connected(connection)) => {
                self.open_stream(connection);
                Ok(())
            }
            Ok(Event::Data(bytes)) => self.read_responses(bytes),
            Ok(Event::Silent(limit)) => {
                self.silent_streams = self.silent_streams.saturating_add(1);
                return self.reconnect_or_end(End::no_first_response(limit), true);
            }
            Err(end) => Err(end),
        };
        handled.or_else(|end| self.reconnect_or_end(end, false))
    }

    /// Opens a stream on a new connection to istiod, with all requests since the beginning.
    fn open_stream(&mut self, connection: Connection) {
        self.health.iter_mut().for_each(Health::mark_changed);
        let RelayConfig { id, istiod, protocol, observer, .. } = self.config;
        let prefix = protocol.log_prefix();
        let address = istiod.address();
        tracing::info!(target: "xdsproxy", id, "connected to {prefix}upstream XDS server: {address}");
        let sent = observer.metrics.requests.clone();
        let stream = IstiodStream::open(connection, istiod, protocol.path(), sent);
        self.phase = Phase::Relaying(stream);
        self.queue = self.resendable.clone().unwrap_or_default();
        // Without an identity of the agent, istiod ends a stream on which it is asked.
        if self.config.is_envoy
            && *protocol == Protocol::Delta
            && istiod.uri(protocol.path()).scheme() == Some(&Scheme::HTTPS)
            && !observer.history.lock().refusing.contains(address)
        {
            self.state.liveness = Some(Liveness::new());
        }
    }

    /// Reads bytes of responses, of istiod or of stored ones.
    fn read_responses(&mut self, bytes: Bytes) -> Result<(), End> {
        // Without storing, a response costs so little that other tasks do not wait.
        if self.config.store.is_some() {
            self.unyielded += bytes.len();
        }
        let had_responded = self.state.has_responded;
        self.state.read_responses(bytes)?;
        if self.state.has_responded
            && !had_responded
            && let Phase::Relaying(stream) = &self.phase
        {
            let RelayConfig { id, istiod, observer, .. } = self.config;
            self.resendable = None;
            observer.record_first_response(*id);
            istiod.record_success(&stream.connection);
            if let Some(failures) = self.failures.end() {
                tracing::info!(target: "xdsproxy", id, "istiod answers again; {failures}");
            }
        }
        Ok(())
    }

    /// Returns the longest time without bytes before the first response. None after it, if there is no other control plane,
    /// and if another stream cannot begin with the same requests. The time grows with each silent stream, so that control
    /// planes that are all slow get to answer.
    fn max_silence(&self) -> Option<Duration> {
        let can_change = self.config.is_envoy
            && self.config.istiod.has_fallbacks()
            && self.resendable_memory() > 0;
        can_change.then(|| {
            MAX_SILENCE
                .saturating_mul(self.silent_streams.min(MAX_SILENT_STREAMS).saturating_add(1))
        })
    }

    /// Records what does not work on istiod's stream. Ends the streams because of a new problem, at most once an hour.
    fn report_problem(&mut self) -> Result<(), End> {
        let RelayConfig { id, istiod, observer, .. } = self.config;
        let Some(liveness) = &mut self.state.liveness else { return Ok(()) };
        let Some(news) = liveness.news.take() else { return Ok(()) };
        let problem = liveness.problem();
        observer.record_problem(*id, problem.as_ref());
        let Some(problem) = problem.filter(|_| news == News::Problem) else {
            return Ok(());
        };
        tracing::warn!(target: "xdsproxy", id, "{problem}");
        observer.metrics.alarms.with([problem.code.name()]).inc();
        let replaced = &mut observer.history.lock().replaced;
        if replaced.is_some_and(|at| at.elapsed() < NEW_STREAM_INTERVAL) {
            return Ok(());
        }
        *replaced = Some(Instant::now());
        if let Some(stream) = self.phase.istiod_stream()
            && problem.code == problem::Code::DiscoveryStalled
        {
            istiod.record_failure(&stream.connection, true, &problem);
        }
        Err(End::agent("istiod is asked again on another stream"))
    }

    /// Returns true if more requests are to be read. Those of an Envoy of this agent are always read while a side
    /// answers, because it may not take responses before.
    fn wants_requests(&self) -> bool {
        match self.config.shared_memory {
            Some(_) => self.queue.memory() < MAX_WAITING,
            None => {
                self.phase.request_sender().is_some() || self.resendable_memory() < MAX_RESENDABLE
            }
        }
    }

    /// Returns the memory of the requests that can be sent again on another stream.
    fn resendable_memory(&self) -> usize {
        self.resendable.as_ref().map_or(0, Requests::memory)
    }

    /// Adapts this relay's part of the memory that other clients share to the requests it has. Fails if too little
    /// is free, or if the queue of an Envoy of this agent is too large.
    fn reserve_memory(&mut self) -> Result<(), End> {
        let queued = self.queue.memory();
        let problem = if let Some(shared) = &self.config.shared_memory {
            // The queue and the resendable requests share their bytes, so only the larger of them counts.
            let needed = queued.max(self.resendable_memory()) + self.state.requests.partial.len();
            // The old part is returned first, so that it counts as free.
            self.memory_permit = None;
            self.memory_permit = shared.clone().try_acquire_many_owned(needed as u32).ok();
            let is_full = self.memory_permit.is_none();
            is_full.then(|| {
                format!("requests of clients other than the agent's Envoy need more than {MAX_QUEUED} bytes in all")
            })
        } else {
            let is_full = queued > MAX_QUEUED;
            is_full.then(|| format!("more than {MAX_QUEUED} bytes of requests wait for istiod"))
        };
        match problem {
            None => Ok(()),
            Some(problem) => Err(End::bad_request(&Status::resource_exhausted(problem))),
        }
    }

    /// Connects again if Envoy's stream can be held, that is if istiod caused the end and has not responded.
    /// Otherwise returns the end of both streams. `timed_out` is true if the agent ends istiod's stream because no
    /// response came.
    fn reconnect_or_end(&mut self, end: End, timed_out: bool) -> Result<(), End> {
        let end = self.state.istiod_end(end);
        if self.resendable.is_none() || !self.config.is_envoy || end.istiod_code().is_none() {
            return Err(end);
        }
        let problem = self.explain(&end.status);
        let has_moved = self.record_istiod_end(&end, &problem, timed_out);
        if let Some(count) = self.failures.failed(&problem) {
            let problem = problem.consequence("Envoy's stream is held, and istiod is asked again");
            let id = self.config.id;
            tracing::warn!(target: "xdsproxy", id, "upstream terminated with unexpected error {problem}{count}");
        }
        let wait = if has_moved { Duration::ZERO } else { next_wait(&mut self.backoff, &end) };
        self.phase = Phase::connecting(self.config.istiod.clone(), wait);
        self.state.restart();
        Ok(())
    }

    /// Explains a status of istiod's stream.
    fn explain(&self, status: &Status) -> Problem {
        let unimplemented = match self.config.protocol {
            Protocol::Sotw => problem::Code::IstiodError,
            Protocol::Delta => problem::Code::IstiodWithoutDelta,
        };
        self.config.istiod.explain(unimplemented, status)
    }

    /// Records the end of istiod's stream, if there is one, as a failure of the control plane if it has not
    /// responded. Returns true if another control plane is in use now.
    fn record_istiod_end(&self, end: &End, problem: &Problem, timed_out: bool) -> bool {
        let Some(stream) = self.phase.istiod_stream() else { return false };
        let istiod = &self.config.istiod;
        let code = end.istiod_code();
        if let Some(code) = code
            && self.state.liveness.as_ref().is_some_and(|it| it.is_refused(code))
        {
            let address = istiod.address().to_owned();
            tracing::info!(target: "xdsproxy", id = self.config.id, "{address} ended a stream on which it was asked for a debug page, and is not asked again");
            self.config.observer.history.lock().refusing.insert(address);
        }
        self.config.observer.record_istiod_end(end);
        istiod.leave_if_unauthenticated(&stream.connection, code);
        let is_failure = code.is_some() && !self.state.has_responded;
        is_failure && istiod.record_failure(&stream.connection, timed_out, problem)
    }

    /// Returns when Envoy is served last known good configuration, unless istiod answers before.
    fn last_known_good_due(&self) -> Option<Instant> {
        self.resendable.as_ref()?;
        let wait = self.config.store.as_ref()?.max_wait_for_istiod()?;
        Some(later(self.awaits_istiod_since, wait))
    }

    /// Serves Envoy last known good configuration. If there is none, Envoy waits again.
    fn serve_last_known_good(&mut self) {
        let Some(cache) = self.config.store.as_ref().filter(|it| it.can_be_served()) else {
            self.awaits_istiod_since = Instant::now();
            return;
        };
        if let Some(stream) = self.phase.istiod_stream() {
            let why = "no answer before stored configuration was served";
            let problem = self.explain(&Status::deadline_exceeded(why));
            self.config.istiod.record_failure(&stream.connection, false, &problem);
        }
        self.state.on_demand = None;
        self.state.restart();
        self.queue = self.resendable.take().unwrap_or_default();
        let istiod_answers = Box::pin(self.until_istiod_answers());
        self.phase = Phase::ServingLastKnownGood(Replay::start(cache.clone()), istiod_answers);
        self.state.recorder.stop();
        self.state.source = Source::Stored;
        self.config.observer.record_stored_served(self.config.id);
    }

    /// Waits until istiod answers a stream that begins with Envoy's first request.
    fn until_istiod_answers(&self) -> impl Future<Output = ()> + Send + use<> {
        let istiod = self.config.istiod.clone();
        let path = self.config.protocol.path();
        let sent = self.config.observer.metrics.requests.clone();
        let first = self.queue.first().cloned().unwrap_or_default();
        let mut backoff = Backoff::new(FIRST_WAIT, MAX_WAIT);
        async move {
            let mut phase = Phase::connecting(istiod.clone(), Duration::ZERO);
            loop {
                phase = match phase.next(true, None).await {
                    Ok(Event::Data(_) | Event::Silent(_)) => return,
                    Ok(Event::Connected(connection)) => {
                        let stream = IstiodStream::open(connection, &istiod, path, sent.clone());
                        let phase = Phase::Relaying(stream);
                        // The queue of a new stream has room.
                        let _ = phase.request_sender().map(|queue| queue.try_send(first.clone()));
                        phase
                    }
                    Err(end) => Phase::connecting(istiod.clone(), next_wait(&mut backoff, &end)),
                };
            }
        }
    }

    /// Applies the outcome of an interceptor, and waits for the one that may follow.
    fn apply_outcome(&mut self, response: Captured, outcome: Outcome) {
        if let Some(second) = self.state.apply_outcome(&response, outcome) {
            self.interceptions.follow_with(response, second);
        }
    }

    /// Sends the client the next bytes.
    fn send_next(&mut self, room: mpsc::Permit<'_, ResponseFrame>) {
        if let Some(bytes) = self.state.to_client.pop_front() {
            room.send(Ok(Frame::data(bytes)));
        }
    }

    /// Forwards the requests and bytes that are ready, and starts interceptors.
    fn forward(&mut self) {
        for request in std::mem::take(&mut self.state.to_istiod) {
            if let Some(resendable) = &mut self.resendable {
                resendable.push(request.clone());
            }
            self.queue.push(request);
        }
        if let Some(liveness) = &mut self.state.liveness {
            liveness.requests.drain(..).for_each(|request| self.queue.push(request));
        }
        // Without a stream they stay, so that a new one can begin with them; no more are read (`wants_requests`).
        if self.resendable_memory() > MAX_RESENDABLE && self.phase.istiod_stream().is_some() {
            self.resendable = None;
        }
        self.interceptions.start(&mut self.state, self.config.protocol);
        // Without room, the client takes the bytes later, or has closed its stream, which the loop notices.
        while !self.state.to_client.is_empty()
            && let Ok(room) = self.to_client.try_reserve()
        {
            self.send_next(room);
        }
    }
}

/// Returns the wait before the next stream, after one that has ended without a response.
fn next_wait(backoff: &mut Backoff, end: &End) -> Duration {
    let is_overloaded = end.istiod_code() == Some(Code::ResourceExhausted);
    backoff.set_cap(if is_overloaded { MAX_WAIT_IF_OVERLOADED } else { MAX_WAIT });
    backoff.next_wait()
}

/// Waits for a change of the health and returns the new verdict. Cancel safe.
async fn next_verdict(health: &mut Option<Health>) -> Verdict {
    if let Some(receiver) = health {
        while receiver.changed().await.is_ok() {
            if let Some(verdict) = receiver.borrow_and_update().clone() {
                return verdict;
            }
        }
    }
    pending().await
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, HeaderName, HeaderValue};

    use super::*;

    #[test]
    fn an_overloaded_istiod_has_more_time_before_the_next_stream() {
        let mut backoff = Backoff::new(FIRST_WAIT, MAX_WAIT);
        for (code, seconds) in
            [(Code::Unavailable, 4), (Code::ResourceExhausted, 30), (Code::Internal, 4)]
        {
            let status = (HeaderName::from_static("grpc-status"), HeaderValue::from(code as i32));
            for _ in 0..8 {
                let end = End::istiod(HeaderMap::from_iter([status.clone()]));
                assert!(next_wait(&mut backoff, &end) <= Duration::from_secs(seconds), "{code:?}");
            }
            assert_eq!(backoff.ceiling(), Duration::from_secs(seconds), "{code:?}");
        }
    }
}
