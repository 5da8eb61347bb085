//! The port itself: who is let in, how many, and for how long.
//!
//! HTTP/1.1 on both address families. The number of connections is bounded; where there is no room,
//! the one that has been silent longest makes it, so that a flood of idle ones does not keep the
//! kubelet out. A request's head must come within [`activity::HEAD`], and an answer be read within
//! [`activity::READING`]; between requests there may be a pause longer than any probe or scrape makes.
//!
//! Does not look at paths.

mod activity;

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use ::http::Request;
use http_body::Body;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::{AbortHandle, Id, JoinSet};
use tokio::time::{sleep_until, timeout};

use super::Router;
use super::held::Held;
use crate::lifecycle::CancellationToken;
use activity::{Activity, Heard};

/// The kubelet, Prometheus and Envoy need a handful.
const MOST_CONNECTIONS: usize = 256;
/// Heads beyond this are refused with 431.
const LARGEST_HEAD: usize = 64 << 10;
const BACKLOG: u32 = 1024;
/// How long answers under way may take when the port is closed.
const LAST_WORDS: Duration = Duration::from_millis(500);

#[derive(Debug, thiserror::Error)]
#[error("cannot listen on the status port {port}")]
pub struct BindError {
    port: u16,
    #[source]
    source: io::Error,
}

/// The port, bound.
#[derive(Debug)]
pub struct Listener(TcpListener);

/// Binds the port on all addresses of both families, or of IPv4 where there is no other.
pub fn bind(port: u16) -> Result<Listener, BindError> {
    let bound = match bind_both(port) {
        Err(error) if has_no_v6(&error) => bind_v4(port),
        bound => bound,
    };
    bound
        .map(Listener)
        .map_err(|source| BindError { port, source })
}

fn bind_both(port: u16) -> io::Result<TcpListener> {
    let socket = TcpSocket::new_v6()?;
    rustix::net::sockopt::set_ipv6_v6only(&socket, false)?;
    listen(socket, (Ipv6Addr::UNSPECIFIED, port).into())
}

fn bind_v4(port: u16) -> io::Result<TcpListener> {
    listen(TcpSocket::new_v4()?, (Ipv4Addr::UNSPECIFIED, port).into())
}

fn listen(socket: TcpSocket, address: SocketAddr) -> io::Result<TcpListener> {
    // An agent that follows another must not wait for its connections to be forgotten.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

fn has_no_v6(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let found = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(found, Some(Errno::AFNOSUPPORT | Errno::ADDRNOTAVAIL))
}

/// Serves until `stop`, then lets answers under way be finished.
pub(super) async fn serve(
    Listener(listener): Listener,
    router: Arc<Router>,
    stop: CancellationToken,
) {
    let mut guests = Guests::default();
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            accepted = listener.accept() => match accepted {
                Ok((stream, from)) => guests.let_in(stream, from, &router, &stop),
                Err(error) => {
                    // Out of descriptors, most likely: connections of our own are some of them.
                    tracing::error!("failed to accept a connection to the status port: {error}");
                    guests.send_away_one();
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            },
            Some(ended) = guests.tasks.join_next_with_id() => guests.forget(&ended),
        }
    }
    drop(listener);
    let all_ended = async { while guests.tasks.join_next().await.is_some() {} };
    if timeout(2 * LAST_WORDS, all_ended).await.is_err() {
        tracing::debug!("connections to the status port were cut off");
    }
}

/// Connections, and how they spend their time.
#[derive(Default)]
struct Guests {
    tasks: JoinSet<()>,
    known: HashMap<Id, (Arc<Activity>, AbortHandle)>,
}

impl Guests {
    fn let_in(
        &mut self,
        stream: TcpStream,
        from: SocketAddr,
        router: &Arc<Router>,
        stop: &CancellationToken,
    ) {
        while self.known.len() >= MOST_CONNECTIONS {
            self.send_away_one();
        }
        let activity = Arc::new(Activity::new());
        let guest = Guest {
            from,
            router: router.clone(),
            activity: activity.clone(),
        };
        let handle = self.tasks.spawn(guest.serve(stream, stop.clone()));
        self.known.insert(handle.id(), (activity, handle));
    }

    /// Ends the connection that is missed least.
    fn send_away_one(&mut self) {
        let least = self
            .known
            .iter()
            .min_by_key(|(_, (activity, _))| activity.rank());
        if let Some(id) = least.map(|(id, _)| *id)
            && let Some((_, handle)) = self.known.remove(&id)
        {
            tracing::debug!("closing a connection to the status port to make room");
            handle.abort();
        }
    }

    fn forget(&mut self, ended: &Result<(Id, ()), tokio::task::JoinError>) {
        let id = match ended {
            Ok((id, ())) => *id,
            Err(error) => {
                if error.is_panic() {
                    tracing::error!("a connection to the status port ended in a panic: {error}");
                }
                error.id()
            }
        };
        self.known.remove(&id);
    }
}

/// One connection.
struct Guest {
    from: SocketAddr,
    router: Arc<Router>,
    activity: Arc<Activity>,
}

impl Guest {
    async fn serve(self, stream: TcpStream, stop: CancellationToken) {
        // Answers are small; one that waits for its predecessor's acknowledgement is late.
        let _ = stream.set_nodelay(true); // It works without.
        let io = TokioIo::new(Heard::new(stream, self.activity.clone()));
        let answer = async |request: Request<Incoming>| {
            self.activity.is_asked(!request.body().is_end_stream());
            let answer = self.router.answer(request, self.from).await;
            let end = self.activity.until_answered();
            Ok::<_, Infallible>(answer.map(|body| Held::new(body, end)))
        };
        // A connection that asks nothing needs no room for an answer.
        let service = service_fn(|request| Box::pin(answer(request)));
        let mut builder = http1::Builder::new();
        // Time is watched below, where pauses between requests are not mistaken for late heads.
        builder
            .header_read_timeout(None)
            .max_header_size(LARGEST_HEAD)
            .max_buf_size(LARGEST_HEAD);
        let mut connection = pin!(builder.serve_connection(io, service));
        let mut timer = pin!(sleep_until(self.activity.since()));
        let served = poll_fn(|context| {
            if connection.as_mut().poll(context).is_ready() {
                return Poll::Ready(());
            }
            let Some(deadline) = self.activity.deadline() else {
                return Poll::Pending;
            };
            if timer.deadline() != deadline {
                timer.as_mut().reset(deadline);
            }
            timer.as_mut().poll(context)
        });
        tokio::select! {
            () = served => return,
            () = stop.cancelled() => {}
        }
        connection.as_mut().graceful_shutdown();
        // Whoever has not read the answer by now is not waiting for it.
        let _ = timeout(LAST_WORDS, connection).await;
    }
}

#[cfg(test)]
mod tests;
