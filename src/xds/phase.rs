//! Phases of a session, from dialing istiod to the end of its stream.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::pending;
use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Incoming;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;

use super::end::{self, End};
use super::last_known_good::EnvoyCache;
use super::last_known_good::replay::Replay;
use super::relay::Relay;
use crate::istiod::{Closed, Connection, Istiod};

type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Requests of Envoy in their order.
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

    /// Returns the memory of the requests in bytes.
    pub(super) fn memory(&self) -> usize {
        self.memory
    }
}

/// The memory of a request. A flood of small ones is mostly handles.
fn memory(request: &Bytes) -> usize {
    request.len() + size_of::<Bytes>()
}

/// The phase of a session: which side answers Envoy.
pub(super) enum Phase {
    /// The agent dials istiod, and no side answers. The stream to istiod will begin with the held requests.
    Connecting {
        held: Requests,
        dial: BoxFuture<Result<Connection, Closed>>,
    },
    /// Istiod has not answered yet. The requests are held for the next stream, unless they became too large.
    AwaitingFirstResponse {
        held: Option<Requests>,
        stream: IstiodStream,
        /// Since when istiod owes an answer, if there is another control plane.
        owed_since: Option<Instant>,
    },
    Relaying(IstiodStream),
    ServingLastKnownGood {
        replay: Replay,
        requests: mpsc::Sender<Bytes>,
    },
    /// Istiod's stream has ended, and Envoy's is about to.
    Ended,
}

/// A stream to istiod.
pub(super) struct IstiodStream {
    connection: Connection,
    /// Completes when the stream should move to another connection.
    moved: BoxFuture<()>,
    requests: mpsc::Sender<Bytes>,
    responses: Responses,
}

enum Responses {
    Opening(BoxFuture<Result<http::Response<Incoming>, hyper::Error>>),
    Open(Incoming),
}

/// What came from istiod.
pub(super) enum Event {
    Connected(Connection),
    Opened,
    Data(Bytes),
}

impl Phase {
    /// Connects after a wait, which a new token ends.
    pub(super) fn connecting(held: Requests, istiod: Istiod, wait: Duration) -> Self {
        let dial = Box::pin(async move {
            tokio::select! {
                () = sleep(wait) => {}
                () = istiod.token_changed(), if !wait.is_zero() => {}
            }
            istiod.connection().await
        });
        Self::Connecting { held, dial }
    }

    /// Opens a stream of istiod, which begins with the requests that are held.
    pub(super) fn connected(&mut self, relay: &Relay, connection: Connection) {
        let held = self.held_mut().map(std::mem::take);
        let stream = IstiodStream::open(relay, connection);
        *self = Self::AwaitingFirstResponse {
            held,
            stream,
            owed_since: None,
        };
    }

    /// Serves last known good configuration in place of istiod.
    pub(super) fn serving(envoy: EnvoyCache) -> Self {
        let (requests, queue) = mpsc::channel(1);
        let replay = Replay::start(envoy, queue);
        Self::ServingLastKnownGood { replay, requests }
    }

    /// Notes that istiod has answered. Returns its connection the first time.
    pub(super) fn answered(&mut self) -> Option<&Connection> {
        let phase = std::mem::replace(self, Self::Ended);
        let Self::AwaitingFirstResponse { stream, .. } = phase else {
            *self = phase;
            return None;
        };
        *self = Self::Relaying(stream);
        self.connection()
    }

    /// Waits for the next event or the end. Responses are read only if they are wanted. Cancel safe.
    pub(super) async fn next(&mut self, wants_responses: bool) -> Result<Event, End> {
        match self {
            Self::Connecting { dial, .. } => match dial.await {
                Ok(connection) => Ok(Event::Connected(connection)),
                // The agent stops.
                Err(Closed) => Err(End::stopped()),
            },
            Self::AwaitingFirstResponse { stream, .. } | Self::Relaying(stream) => {
                stream.next(wants_responses).await
            }
            Self::ServingLastKnownGood { replay, .. } if wants_responses => {
                replay.next().await.map(Event::Data)
            }
            Self::ServingLastKnownGood { .. } | Self::Ended => pending().await,
        }
    }

    pub(super) fn connection(&self) -> Option<&Connection> {
        match self {
            Self::AwaitingFirstResponse { stream, .. } | Self::Relaying(stream) => {
                Some(&stream.connection)
            }
            _ => None,
        }
    }

    /// Returns the queue of requests, once there is a stream that takes them.
    pub(super) fn requests(&self) -> Option<&mpsc::Sender<Bytes>> {
        match self {
            Self::AwaitingFirstResponse { stream, .. } | Self::Relaying(stream) => {
                Some(&stream.requests)
            }
            Self::ServingLastKnownGood { requests, .. } => Some(requests),
            Self::Connecting { .. } | Self::Ended => None,
        }
    }

    /// Returns all requests, as long as another stream of istiod can begin with them.
    pub(super) fn held(&self) -> Option<&Requests> {
        match self {
            Self::Connecting { held, .. } => Some(held),
            Self::AwaitingFirstResponse { held, .. } => held.as_ref(),
            _ => None,
        }
    }

    pub(super) fn held_mut(&mut self) -> Option<&mut Requests> {
        match self {
            Self::Connecting { held, .. } => Some(held),
            Self::AwaitingFirstResponse { held, .. } => held.as_mut(),
            _ => None,
        }
    }

    /// Gives up requests that are held while istiod has a stream: no other stream can begin with them.
    pub(super) fn release(&mut self) {
        if let Self::AwaitingFirstResponse { held, .. } = self {
            *held = None;
        }
    }

    /// Notes since when istiod owes an answer to requests, or that it does not owe any.
    pub(super) fn owe(&mut self, may_owe: bool) {
        if let Self::AwaitingFirstResponse {
            held, owed_since, ..
        } = self
        {
            let is_owed = may_owe && held.as_ref().is_some_and(|held| held.memory > 0);
            *owed_since = is_owed.then(|| owed_since.unwrap_or_else(Instant::now));
        }
    }

    pub(super) fn owed_since(&self) -> Option<Instant> {
        match self {
            Self::AwaitingFirstResponse { owed_since, .. } => *owed_since,
            _ => None,
        }
    }
}

impl IstiodStream {
    /// Opens a stream. Its head may come only with the first response, so nothing waits for it.
    fn open(relay: &Relay, connection: Connection) -> Self {
        let (requests, queue) = mpsc::channel(1);
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
        let moved = Box::pin(connection.left());
        let mut sender = connection.clone();
        let responses = Responses::Opening(Box::pin(async move { sender.send(request).await }));
        Self {
            connection,
            moved,
            requests,
            responses,
        }
    }

    async fn next(&mut self, wants_responses: bool) -> Result<Event, End> {
        tokio::select! {
            () = &mut self.moved => Err(End::moved()),
            event = self.responses.next(), if wants_responses => event,
        }
    }
}

impl Responses {
    async fn next(&mut self) -> Result<Event, End> {
        match self {
            Self::Opening(response) => {
                let response = response.await.map_err(End::broken)?;
                *self = Self::Open(end::opened(response)?);
                Ok(Event::Opened)
            }
            Self::Open(body) => {
                let frame = body.frame().await.transpose().map_err(End::broken)?;
                match frame.map(Frame::into_data) {
                    Some(Ok(bytes)) => Ok(Event::Data(bytes)),
                    Some(Err(frame)) => Err(End::istiod(frame.into_trailers().unwrap_or_default())),
                    None => Err(End::istiod(HeaderMap::new())),
                }
            }
        }
    }
}
