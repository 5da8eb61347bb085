//! Opens and runs one HTTP/2 connection to istiod.
//!
//! The windows are static. One unread stream holds at most a sixth of the connection window, so the streams
//! of two Envoys do not block certificate requests. Pings are sent only while streams are open.

use std::fmt;
use std::pin::pin;
use std::sync::Arc;

use h2::Reason;
use hyper::body::Incoming;
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic::client::GrpcService;

use super::frames::{self, GoAway, Http2State, Loss};
use super::refusal;
use super::status::Connected;
use super::{Body, Config};
use crate::net::executor::Executor;

/// The bytes of a stream that istiod may send before the agent forwards them. Waiting bytes leave the
/// processor's cache: with 4 MiB, a large response takes a sixth more CPU time. With less than 2 MiB, a
/// distant istiod, which can send one window per round trip, gets slower without another gain.
const STREAM_WINDOW: u32 = 2 << 20;
/// The bytes of all streams that istiod may send: enough for several streams that wait for Envoy, and for
/// certificate requests.
const CONNECTION_WINDOW: u32 = 12 << 20;
/// The largest headers and trailers of one response: an authority quotes its signer in the text of an error.
const MAX_HEADERS: u32 = 1 << 20;

/// A byte stream to istiod, encrypted or not.
pub(super) trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// A connection to send requests on. Clones share it.
#[derive(Clone)]
pub struct Connection {
    sender: SendRequest<Body>,
    /// The properties of the connection. The pointer identifies the connection, and does not keep it open.
    pub(super) about: Arc<Connected>,
    pub(super) config: Arc<Config>,
    superseded: CancellationToken,
}

impl Connection {
    pub fn about(&self) -> &Connected {
        &self.about
    }

    /// Sends a request, as soon as istiod accepts another stream. After an error the connection is broken: the
    /// caller needs a new one.
    pub async fn send(
        &mut self,
        request: http::Request<Body>,
    ) -> Result<http::Response<Incoming>, hyper::Error> {
        self.sender.ready().await?;
        self.sender.send_request(request).await
    }

    /// Adapts the connection to a generated client.
    pub(crate) fn service(
        self,
    ) -> impl GrpcService<Body, ResponseBody = Incoming, Error = Status, Future: Send> {
        tower::service_fn(move |request| {
            let mut connection = self.clone();
            async move {
                let response = connection.send(request).await.map_err(|error| {
                    Status::unavailable(format!("the connection to istiod broke: {error}"))
                })?;
                refusal::check_is_grpc(response).await
            }
        })
    }

    /// Waits until there is a connection to a preferred control plane, to which long streams should move.
    /// Cancel safe.
    pub(crate) fn superseded(&self) -> impl Future<Output = ()> + Send + use<> {
        self.superseded.clone().cancelled_owned()
    }

    pub(super) fn supersede(&self) {
        self.superseded.cancel();
    }

    pub(super) fn is_closed(&self) -> bool {
        self.sender.is_closed()
    }

    /// Returns true if the connection was opened with the client certificate.
    pub(super) fn has_client_certificate(&self) -> bool {
        let tls = self.about.tls.as_ref();
        tls.is_some_and(|tls| tls.client_certificate)
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Connection").field(&self.about).finish()
    }
}

/// The driver of an open connection, which must be polled for the connection to work.
pub(super) struct Driver {
    running: Running,
    peer: watch::Receiver<Http2State>,
}

type Running =
    hyper::client::conn::http2::Connection<TokioIo<frames::Inspected<Box<dyn Io>>>, Body, Executor>;

/// Starts HTTP/2 on `io` and waits for the peer's settings.
pub(super) async fn open(
    io: Box<dyn Io>,
    about: Connected,
    config: Arc<Config>,
    executor: Executor,
) -> Result<(Connection, Driver), Loss> {
    let (io, mut peer) = frames::inspect(io);
    let (sender, mut running) = Builder::new(executor)
        .timer(TokioTimer::new())
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_header_list_size(MAX_HEADERS)
        .keep_alive_interval(config.keepalive.interval)
        .keep_alive_timeout(config.keepalive.timeout)
        .handshake(TokioIo::new(io))
        .await
        .map_err(|error| Loss::Ended(error.to_string()))?;
    let ended = tokio::select! {
        biased;
        _ = peer.wait_for(|peer| *peer != Http2State::AwaitingSettings) => false,
        _ = &mut running => true,
    };
    match peer.borrow().clone() {
        Http2State::Ready if !ended => {}
        Http2State::Closed(loss) => return Err(loss),
        Http2State::GoingAway(go_away) => return Err(Loss::Ended(format!("it sent {go_away}"))),
        _ => return Err(Loss::Ended("it closed the connection".to_owned())),
    }
    let connection =
        Connection { sender, about: Arc::new(about), config, superseded: CancellationToken::new() };
    Ok((connection, Driver { running, peer }))
}

impl Driver {
    /// Runs the connection until its last stream has ended. Calls `on_leave` as soon as no new stream can be
    /// opened. Returns why the connection ended. The error is a GOAWAY with an error code, such as ENHANCE_YOUR_CALM.
    pub(super) async fn run(mut self, on_leave: impl FnOnce()) -> Result<String, GoAway> {
        let mut running = pin!(self.running);
        let ended = tokio::select! {
            ended = &mut running => Some(ended),
            _ = self.peer.wait_for(|peer| *peer != Http2State::Ready) => None,
        };
        on_leave();
        let result = match ended {
            Some(result) => result,
            None => running.await,
        };
        Ok(match (result, &*self.peer.borrow()) {
            (_, Http2State::GoingAway(go_away)) if go_away.code != Reason::NO_ERROR => {
                return Err(go_away.clone());
            }
            (Err(error), _) => error.to_string(),
            (Ok(()), Http2State::Closed(loss)) => loss.to_string(),
            (Ok(()), Http2State::GoingAway(go_away)) => format!("it sent {go_away}"),
            (Ok(()), _) => "no longer used".to_owned(),
        })
    }
}
