//! One HTTP/2 connection to istiod, from its preface to its end.
//!
//! The windows are static. One unread stream holds at most a sixth of the connection window, so
//! certificate requests get through beside the streams of two Envoys. Pings are sent only while
//! streams are open.

use std::fmt;
use std::pin::pin;
use std::sync::Arc;

use hyper::body::Incoming;
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic::client::GrpcService;

use super::frames::{self, Http2State};
use super::status::Connected;
use super::{Body, Config};
use crate::executor::Executor;

/// How much of a stream istiod may send ahead of its being passed on. What is ahead has left the
/// processor's cache when its turn comes: with 4 MiB a large response costs a sixth more. With less
/// than 2 MiB a distant istiod, which can send as much per round trip, gets slower and nothing else
/// is gained.
const STREAM_WINDOW: u32 = 2 << 20;
/// As much for several streams that wait for Envoy, and more, so that a signing never does.
const CONNECTION_WINDOW: u32 = 12 << 20;
/// Headers and trailers of one response: an authority quotes its signer in the text of an error.
const MAX_HEADERS: u32 = 1 << 20;

/// A byte stream to istiod, encrypted or not.
pub(super) trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// A connection to send requests on. Clones share it.
#[derive(Clone)]
pub struct Connection {
    sender: SendRequest<Body>,
    about: Arc<Connected>,
    /// The control plane.
    pub(super) config: Arc<Config>,
    left: CancellationToken,
}

impl Connection {
    pub fn about(&self) -> &Connected {
        &self.about
    }

    /// Sends a request, as soon as istiod takes another stream. A failure before the response is
    /// one of the connection: ask for a connection again.
    pub async fn send(
        &mut self,
        request: http::Request<Body>,
    ) -> Result<http::Response<Incoming>, hyper::Error> {
        self.sender.ready().await?;
        self.sender.send_request(request).await
    }

    /// Adapts the connection to a generated client. Sending waits where necessary.
    pub(crate) fn service(
        self,
    ) -> impl GrpcService<Body, ResponseBody = Incoming, Error = Status, Future: Send> {
        tower::service_fn(move |request| {
            let mut connection = self.clone();
            async move {
                connection.send(request).await.map_err(|error| {
                    Status::unavailable(format!("the connection to istiod broke: {error}"))
                })
            }
        })
    }

    /// Waits until another connection leads to a preferred control plane, to which long streams should
    /// move. Cancel safe.
    pub(crate) fn left(&self) -> impl Future<Output = ()> + Send + use<> {
        self.left.clone().cancelled_owned()
    }

    pub(super) fn leave(&self) {
        self.left.cancel();
    }

    pub(super) fn is_closed(&self) -> bool {
        self.sender.is_closed()
    }

    /// Whether it was opened with the client certificate.
    pub(super) fn has_client_certificate(&self) -> bool {
        let tls = self.about.tls.as_ref();
        tls.is_some_and(|tls| tls.client_certificate)
    }

    /// Identifies the connection without keeping it open.
    pub(super) fn identity(&self) -> Arc<Connected> {
        self.about.clone()
    }

    pub(super) fn is(&self, identity: &Arc<Connected>) -> bool {
        Arc::ptr_eq(&self.about, identity)
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Connection").field(&self.about).finish()
    }
}

/// Runs an open connection. Must be polled for the connection to work.
pub(super) struct Driver {
    running: Running,
    peer: watch::Receiver<Http2State>,
}

type Running =
    hyper::client::conn::http2::Connection<TokioIo<frames::Inspected<Box<dyn Io>>>, Body, Executor>;

/// Speaks HTTP/2 on `io` and returns once the peer has answered in kind. An error has a reason, and says
/// whether that is an alert of TLS.
pub(super) async fn open(
    io: Box<dyn Io>,
    about: Connected,
    config: Arc<Config>,
    executor: Executor,
) -> Result<(Connection, Driver), (String, bool)> {
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
        .map_err(|error| (error.to_string(), false))?;
    let ended = {
        let answered = peer.wait_for(|peer| *peer != Http2State::AwaitingSettings);
        tokio::select! {
            biased;
            _ = answered => false,
            _ = &mut running => true,
        }
    };
    let first = peer.borrow().clone();
    match first {
        Http2State::Ready if !ended => {}
        Http2State::Closed(reason, is_alert) => return Err((reason, is_alert)),
        Http2State::GoingAway => return Err(("it sent GOAWAY at once".to_owned(), false)),
        _ => return Err(("it closed the connection".to_owned(), false)),
    }
    let about = Arc::new(about);
    let left = CancellationToken::new();
    Ok((
        Connection {
            sender,
            about,
            config,
            left,
        },
        Driver { running, peer },
    ))
}

impl Driver {
    /// Runs the connection until its last stream has ended. `leaves` is called as soon as no new
    /// stream can be opened. Returns why it ended.
    pub(super) async fn run(mut self, leaves: impl FnOnce()) -> String {
        let mut running = pin!(self.running);
        let ended = {
            let refuses = self.peer.wait_for(|peer| *peer != Http2State::Ready);
            tokio::select! {
                ended = &mut running => Some(ended),
                _ = refuses => None,
            }
        };
        leaves();
        let ended = match ended {
            Some(ended) => ended,
            None => running.await,
        };
        match (ended, &*self.peer.borrow()) {
            (Err(error), _) => error.to_string(),
            (Ok(()), Http2State::Closed(reason, _)) => reason.clone(),
            (Ok(()), Http2State::GoingAway) => "it sent GOAWAY".to_owned(),
            (Ok(()), _) => "no longer used".to_owned(),
        }
    }
}
