//! Holds the phase of a relay, from dialing istiod to the end of istiod's stream, and its requests.
//!
//! The relay waits for [`Phase::next`] and replaces the phase; [`IstiodStream`] turns istiod's response into events.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::pending;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::stream::BoxStream;
use futures_util::{TryFutureExt as _, TryStreamExt as _};
use http::HeaderMap;
use http_body::Frame;
use http_body_util::{BodyStream, StreamBody};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;

use super::end::{self, End};
use super::ledger::replay::Replay;
use crate::istiod::{Body, Connection, Istiod, refusal};
use crate::metrics::Counter;
use crate::problem::Problem;
use crate::runtime::clock::later;

/// A queue of requests in the order of arrival.
#[derive(Clone, Debug, Default)]
pub(super) struct Requests {
    frames: VecDeque<Bytes>,
    memory: usize,
}

impl Requests {
    pub(super) fn push(&mut self, frame: Bytes) {
        self.memory += memory(&frame);
        self.frames.push_back(frame);
    }

    pub(super) fn pop(&mut self) -> Option<Bytes> {
        let frame = self.frames.pop_front()?;
        self.memory -= memory(&frame);
        Some(frame)
    }

    pub(super) fn first(&self) -> Option<&Bytes> {
        self.frames.front()
    }

    /// Returns the memory of the requests in bytes.
    pub(super) fn memory(&self) -> usize {
        self.memory
    }
}

/// Returns the memory of a request, including its handle, which is most of it in a flood of small requests.
fn memory(request: &Bytes) -> usize {
    request.len() + size_of::<Bytes>()
}

/// The phase of a relay: which side answers the client.
pub(super) enum Phase {
    /// The agent dials istiod, and no side answers.
    Connecting(BoxFuture<'static, Result<Connection, Problem>>),
    Relaying(IstiodStream),
    /// The future ends when istiod answers.
    ServingLastKnownGood(Replay, BoxFuture<'static, ()>),
}

/// A stream to istiod.
pub(super) struct IstiodStream {
    pub(super) connection: Connection,
    /// The time at which istiod was last sent a request, or sent bytes.
    pub(super) active: Instant,
    /// Completes when the stream should move to another connection.
    moved: BoxFuture<'static, ()>,
    requests: mpsc::Sender<Bytes>,
    responses: BoxStream<'static, Result<Frame<Bytes>, End>>,
}

/// An event of the phase.
pub(super) enum Event {
    Connected(Connection),
    Data(Bytes),
    /// Nothing was sent or received for this time.
    Silent(Duration),
}

impl Phase {
    /// Connects after a wait. A new token ends the wait.
    pub(super) fn connecting(istiod: Istiod, wait: Duration) -> Self {
        Self::Connecting(Box::pin(async move {
            tokio::select! {
                () = sleep(wait) => {}
                () = istiod.token_changed(), if !wait.is_zero() => {}
            }
            istiod.connection().await
        }))
    }

    /// Waits for the next event or the end. Responses are read only if they are wanted. A stream of istiod may be silent for
    /// `max_silence`. Cancel safe.
    pub(super) async fn next(
        &mut self,
        wants_responses: bool,
        max_silence: Option<Duration>,
    ) -> Result<Event, End> {
        match self {
            Self::Connecting(dial) => match dial.await {
                Ok(connection) => Ok(Event::Connected(connection)),
                // The agent is stopping.
                Err(_) => Err(End::stopped()),
            },
            Self::Relaying(stream) => stream.next(wants_responses, max_silence).await,
            Self::ServingLastKnownGood(replay, istiod_answers) => tokio::select! {
                () = istiod_answers => {
                    let why = "istiod answers; Envoy's next stream goes to istiod";
                    tracing::info!(target: "xdsproxy", "{why}");
                    Err(End::agent(why))
                }
                bytes = replay.next(), if wants_responses => bytes.map(Event::Data),
            },
        }
    }

    /// Returns istiod's stream, if there is one.
    pub(super) fn istiod_stream(&self) -> Option<&IstiodStream> {
        match self {
            Self::Relaying(stream) => Some(stream),
            _ => None,
        }
    }

    /// Returns the sender of requests for the side that answers: istiod, or the stored configuration. None while
    /// the agent connects to istiod.
    pub(super) fn request_sender(&self) -> Option<&mpsc::Sender<Bytes>> {
        match self {
            Self::ServingLastKnownGood(replay, _) => Some(&replay.requests),
            _ => Some(&self.istiod_stream()?.requests),
        }
    }

    /// Waits for room for a request.
    pub(super) fn request_room(
        &self,
    ) -> Option<
        impl Future<Output = Result<mpsc::OwnedPermit<Bytes>, mpsc::error::SendError<()>>> + use<>,
    > {
        self.request_sender().cloned().map(mpsc::Sender::reserve_owned)
    }
}

impl IstiodStream {
    /// Opens a stream, and counts the requests on it in `sent`. Does not wait for the response headers, which may come
    /// only with the first response.
    pub(super) fn open(
        connection: Connection,
        istiod: &Istiod,
        path: &'static str,
        sent: Counter,
    ) -> Self {
        let (requests, queue) = mpsc::channel(1);
        let frames = ReceiverStream::new(queue).map(move |request| {
            sent.inc();
            Ok::<_, Infallible>(Frame::data(request))
        });
        let request = istiod.request(path, Body::new(StreamBody::new(frames)));
        let mut sender = connection.clone();
        let responses = async move {
            let response = sender.send(request).await.map_err(End::broken)?;
            let response = refusal::check_is_grpc(response).await;
            let response = response.map_err(|status| End::bad_response(&status))?;
            let body = BodyStream::new(end::grpc_body(response)?);
            Ok::<_, End>(body.map_err(End::broken))
        };
        Self {
            moved: Box::pin(connection.superseded()),
            connection,
            active: Instant::now(),
            requests,
            responses: Box::pin(responses.try_flatten_stream()),
        }
    }

    /// Waits for bytes of responses, if they are wanted, for the end, or for the limit of silence. Cancel safe.
    async fn next(
        &mut self,
        wants_responses: bool,
        max_silence: Option<Duration>,
    ) -> Result<Event, End> {
        let frame = tokio::select! {
            () = &mut self.moved => return Err(End::moved()),
            frame = self.responses.next(), if wants_responses => frame.transpose()?,
            limit = silence(self.active, max_silence) => return Ok(Event::Silent(limit)),
        };
        self.active = Instant::now();
        match frame.map(Frame::into_data) {
            Some(Ok(bytes)) => Ok(Event::Data(bytes)),
            Some(Err(frame)) => Err(End::istiod(frame.into_trailers().unwrap_or_default())),
            None => Err(End::istiod(HeaderMap::new())),
        }
    }
}

/// Waits until this time has passed since an instant, and returns it. Without one it waits for ever.
async fn silence(since: Instant, limit: Option<Duration>) -> Duration {
    match limit {
        Some(limit) => {
            sleep_until(later(since, limit)).await;
            limit
        }
        None => pending().await,
    }
}
