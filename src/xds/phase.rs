//! Holds the phase of a session, from dialing istiod to the end of istiod's stream.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::pending;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::HeaderMap;
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Incoming;
use tokio::sync::mpsc;
use tokio::time::sleep;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;

use super::end::{self, End};
use super::last_known_good::EnvoyCache;
use super::last_known_good::replay::Replay;
use super::relay::Relay;
use crate::istiod::{Closed, Connection, Istiod};

/// Requests of Envoy in the order of arrival.
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

/// Returns the memory of a request, including its handle, which is most of it in a flood of small requests.
fn memory(request: &Bytes) -> usize {
    request.len() + size_of::<Bytes>()
}

/// The phase of a session: which side answers Envoy.
pub(super) enum Phase {
    /// The agent dials istiod, and no side answers.
    Connecting(BoxFuture<'static, Result<Connection, Closed>>),
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
    pub(super) connection: Connection,
    /// True once istiod has responded.
    pub(super) is_answered: bool,
    /// Completes when the stream should move to another connection.
    moved: BoxFuture<'static, ()>,
    requests: mpsc::Sender<Bytes>,
    responses: Responses,
}

enum Responses {
    Opening(BoxFuture<'static, Result<http::Response<Incoming>, hyper::Error>>),
    Open(Incoming),
}

/// An event of istiod's stream.
pub(super) enum Event {
    Connected(Connection),
    Opened,
    Data(Bytes),
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

    /// Serves last known good configuration in place of istiod.
    pub(super) fn serving(envoy: EnvoyCache) -> Self {
        let (requests, queue) = mpsc::channel(1);
        let replay = Replay::start(envoy, queue);
        Self::ServingLastKnownGood { replay, requests }
    }

    /// Records a response of istiod. Returns its connection if the response is the first of the stream.
    pub(super) fn answered(&mut self) -> Option<&Connection> {
        match self {
            Self::Relaying(stream) if !stream.is_answered => {
                stream.is_answered = true;
                Some(&stream.connection)
            }
            _ => None,
        }
    }

    /// Waits for the next event or the end. Responses are read only if they are wanted. Cancel safe.
    pub(super) async fn next(&mut self, wants_responses: bool) -> Result<Event, End> {
        match self {
            Self::Connecting(dial) => match dial.await {
                Ok(connection) => Ok(Event::Connected(connection)),
                // The agent stops.
                Err(Closed) => Err(End::stopped()),
            },
            Self::Relaying(stream) => stream.next(wants_responses).await,
            Self::ServingLastKnownGood { replay, .. } if wants_responses => {
                replay.next().await.map(Event::Data)
            }
            Self::ServingLastKnownGood { .. } | Self::Ended => pending().await,
        }
    }

    /// Returns istiod's stream, if there is one.
    pub(super) fn stream(&self) -> Option<&IstiodStream> {
        match self {
            Self::Relaying(stream) => Some(stream),
            _ => None,
        }
    }

    /// Returns the queue of requests, once there is a stream that takes them.
    pub(super) fn requests(&self) -> Option<&mpsc::Sender<Bytes>> {
        match self {
            Self::ServingLastKnownGood { requests, .. } => Some(requests),
            _ => Some(&self.stream()?.requests),
        }
    }
}

impl IstiodStream {
    /// Opens a stream. Does not wait for the response headers, which may come only with the first response.
    pub(super) fn open(relay: &Relay, connection: Connection) -> Self {
        let (requests, queue) = mpsc::channel(1);
        let sent = relay.observer.metrics.requests.clone();
        let frames = ReceiverStream::new(queue).map(move |request| {
            sent.inc();
            Ok::<_, Infallible>(Frame::data(request))
        });
        let body = crate::istiod::Body::new(StreamBody::new(frames));
        let request = relay.istiod.request(relay.protocol.path(), body);
        let (prefix, address) = (relay.protocol.log_prefix(), relay.istiod.address());
        tracing::info!(target: "xdsproxy", id = relay.id, "connected to {prefix}upstream XDS server: {address}");
        let moved = Box::pin(connection.left());
        let mut sender = connection.clone();
        let responses = Responses::Opening(Box::pin(async move { sender.send(request).await }));
        Self {
            connection,
            is_answered: false,
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
                *self = Self::Open(end::grpc_body(response)?);
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
