//! Discovery streams of raw messages, which a test scripts or `discovery` serves.
//!
//! Like istiod, the control plane sends the response headers together with the first message and not
//! before: a client that waits for the headers before it sends a request would wait forever. Messages
//! are bytes, so a script may send messages that no encoder would write.

use std::fmt;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes};
use http::HeaderMap;
use http::header::AUTHORIZATION;
use prost::Message;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::{Request, Response, Status, Streaming};

use super::caller::{Authenticator, Peer};
use super::event::{Event, Events};
use crate::identity::SpiffeId;

/// The variant of the discovery protocol. The two variants differ in their messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    StateOfTheWorld,
    Delta,
}

/// An accepted stream. Dropping it ends it with OK.
#[derive(Debug)]
pub struct Stream {
    pub peer: SocketAddr,
    pub variant: Variant,
    /// The request headers, among them the agent's metadata.
    pub headers: HeaderMap,
    /// The caller's identity; None without TLS.
    pub caller: Option<SpiffeId>,
    requests: Streaming<Bytes>,
    copies: Option<mpsc::UnboundedSender<Bytes>>,
    responses: mpsc::Sender<Result<Bytes, Status>>,
}

/// An overload: few streams are accepted, and their first responses are late.
#[derive(Clone, Copy, Debug)]
pub struct Overload {
    /// The streams in a second, as `PILOT_MAX_REQUESTS_PER_SECOND` sets it. A stream that would wait for a second
    /// is refused with RESOURCE_EXHAUSTED.
    pub streams_per_second: f64,
    /// The time from the acceptance of a stream until its requests are read.
    pub delay: Duration,
}

/// The error when the client has closed the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("stream was closed by the client")]
pub struct Gone;

impl Stream {
    /// Returns the next request as bytes; `None` once the client has closed its half of the stream.
    pub async fn next_bytes(&mut self) -> Result<Option<Bytes>, Status> {
        let request = self.requests.message().await?;
        if let Some((copies, request)) = self.copies.as_ref().zip(request.as_ref()) {
            let _ = copies.send(request.clone()); // The receiver may have been dropped.
        }
        Ok(request)
    }

    /// Returns the next request, decoded.
    pub async fn next<M: Message + Default>(&mut self) -> Result<Option<M>, Status> {
        let bytes = self.next_bytes().await?;
        bytes
            .map(|bytes| M::decode(bytes).map_err(|error| Status::internal(error.to_string())))
            .transpose()
    }

    /// Sends a message. Waits while the client does not read.
    pub async fn send_bytes(&self, message: Bytes) -> Result<(), Gone> {
        self.responses.send(Ok(message)).await.map_err(|_| Gone)
    }

    pub async fn send(&self, message: &impl Message) -> Result<(), Gone> {
        self.send_bytes(message.encode_to_vec().into()).await
    }

    /// Ends the stream with a status.
    pub async fn end(self, status: Status) {
        let _ = self.responses.send(Err(status)).await; // The client may have ended it first.
    }
}

impl Variant {
    pub(super) fn of_path(path: &str) -> Option<Self> {
        match path.strip_prefix("/envoy.service.discovery.v3.AggregatedDiscoveryService/") {
            Some("StreamAggregatedResources") => Some(Self::StateOfTheWorld),
            Some("DeltaAggregatedResources") => Some(Self::Delta),
            _ => None,
        }
    }
}

/// An acceptor of streams. It authenticates the caller and hands the stream to the test or to the
/// discovery service.
#[derive(Clone, Debug)]
pub(super) struct Acceptor {
    /// The authenticator of callers; None without TLS.
    pub(super) authenticator: Option<Authenticator>,
    pub(super) accepted: mpsc::Sender<Stream>,
    pub(super) overload: watch::Receiver<Option<Overload>>,
    /// The time at which the next stream of an overload is accepted.
    pub(super) next_stream: Arc<Mutex<Option<Instant>>>,
    pub(super) stopping: CancellationToken,
    pub(super) events: Events,
    pub(super) requests: Option<mpsc::UnboundedSender<Bytes>>,
}

impl Acceptor {
    pub(super) async fn serve<B>(
        &self,
        variant: Variant,
        request: http::Request<B>,
    ) -> http::Response<tonic::body::Body>
    where
        B: http_body::Body + Send + 'static,
        B::Error: Into<tonic::codegen::StdError> + Send,
    {
        tonic::server::Grpc::new(BytesCodec)
            .apply_max_message_size_config(Some(usize::MAX), None)
            .streaming(Accept(variant, Arc::new(self.clone())), request)
            .await
    }

    async fn accept(
        &self,
        variant: Variant,
        request: Request<Streaming<Bytes>>,
    ) -> Result<Response<Answers>, Status> {
        let (metadata, extensions, requests) = request.into_parts();
        let mut headers = metadata.into_headers();
        if let Some(token) = headers.get_mut(AUTHORIZATION) {
            token.set_sensitive(true); // `Debug` output hides it then.
        }
        let peer = extensions
            .get::<Peer>()
            .ok_or_else(|| Status::internal("the connection has no peer"))?;
        let overload = *self.overload.borrow();
        if let Some(overload) = overload {
            let accepted = self.reserve(overload, peer.address)?;
            tokio::time::sleep_until(accepted + overload.delay).await;
        }
        let caller = self.caller(peer, &headers)?;
        let (responses, answers) = mpsc::channel(1);
        let stream = Stream {
            peer: peer.address,
            variant,
            headers,
            caller,
            requests,
            copies: self.requests.clone(),
            responses,
        };
        self.accepted
            .send(stream)
            .await
            .map_err(|_| Status::unavailable("discovery is not served"))?;
        Answers::begin(answers, self.stopping.clone()).await
    }

    /// Returns when a stream is accepted, or refuses it.
    fn reserve(&self, overload: Overload, peer: SocketAddr) -> Result<Instant, Status> {
        let now = Instant::now();
        let mut next = self.next_stream.lock().unwrap_or_else(PoisonError::into_inner);
        let accepted = next.map_or(now, |next| next.max(now));
        if accepted - now >= Duration::from_secs(1) {
            let reason = "stream not accepted: request rate limit exceeded".to_owned();
            self.events.report(Event::ConnectionFailed { peer, reason });
            return Err(Status::resource_exhausted("request rate limit exceeded"));
        }
        *next = Some(accepted + Duration::from_secs_f64(1.0 / overload.streams_per_second));
        Ok(accepted)
    }

    fn caller(&self, peer: &Peer, headers: &HeaderMap) -> Result<Option<SpiffeId>, Status> {
        let Some(authenticator) = &self.authenticator else {
            return Ok(None);
        };
        match authenticator.caller(peer, headers) {
            Ok(caller) => Ok(Some(caller)),
            Err(error) => {
                self.events.report(Event::ConnectionFailed {
                    peer: peer.address,
                    reason: format!("stream not authenticated: {error}"),
                });
                Err(Status::unauthenticated("authentication failure"))
            }
        }
    }
}

struct Accept(Variant, Arc<Acceptor>);

impl tonic::server::StreamingService<Bytes> for Accept {
    type Response = Bytes;
    type ResponseStream = Answers;
    type Future = tonic::codegen::BoxFuture<Response<Answers>, Status>;

    fn call(&mut self, request: Request<Streaming<Bytes>>) -> Self::Future {
        let (variant, acceptor) = (self.0, Arc::clone(&self.1));
        Box::pin(async move { acceptor.accept(variant, request).await })
    }
}

/// The responses to the client, until the script ends or the control plane stops.
pub(super) struct Answers {
    first: Option<Bytes>,
    rest: mpsc::Receiver<Result<Bytes, Status>>,
    stop: Option<Pin<Box<WaitForCancellationFutureOwned>>>,
}

impl Answers {
    /// Waits for the first response, so that the headers are sent together with it.
    async fn begin(
        mut answers: mpsc::Receiver<Result<Bytes, Status>>,
        stopping: CancellationToken,
    ) -> Result<Response<Self>, Status> {
        let first = tokio::select! {
            first = answers.recv() => first.transpose()?,
            () = stopping.cancelled() => return Err(stopped()),
        };
        Ok(Response::new(Self {
            first,
            rest: answers,
            stop: Some(Box::pin(stopping.cancelled_owned())),
        }))
    }
}

impl tokio_stream::Stream for Answers {
    type Item = Result<Bytes, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(first)));
        }
        let Some(stop) = &mut self.stop else {
            return Poll::Ready(None);
        };
        if stop.as_mut().poll(cx).is_ready() {
            self.stop = None;
            return Poll::Ready(Some(Err(stopped())));
        }
        self.rest.poll_recv(cx)
    }
}

fn stopped() -> Status {
    Status::unavailable("control plane is shutting down")
}

/// A codec that passes messages on unchanged.
#[derive(Clone, Copy, Debug)]
struct BytesCodec;

impl Codec for BytesCodec {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for BytesCodec {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, dst: &mut EncodeBuf<'_>) -> Result<(), Status> {
        dst.put(item);
        Ok(())
    }
}

impl Decoder for BytesCodec {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, src: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(src.copy_to_bytes(src.remaining())))
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::StateOfTheWorld => "state of the world",
            Self::Delta => "delta",
        })
    }
}
