//! The listener of the status port, and bounds on its connections.
//!
//! HTTP/1.1 on both address families. A client that has shut down its sending side gets its answer; one
//! that is gone cannot be told from it, so its request is carried out too. A connection beyond [`MAX_CONNECTIONS`] closes the one that
//! has been idle longest, so that a flood of idle ones does not lock out the kubelet. The head of the
//! first request must arrive within [`FIRST_HEAD`], that of a later one within [`IDLE`]. A connection
//! whose client reads nothing of an answer for [`UNREAD`] is closed.

use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use ::http::header::CONNECTION;
use ::http::{HeaderValue, Request, Uri};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use rustix::net::sockopt;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::{AbortHandle, Id, JoinSet};
use tokio::time::{Instant, sleep, timeout};

use super::{Caller, Router, reply};
use crate::lifecycle::{CancellationToken, Retirement};
use crate::port;
use crate::problem::{Problem, codes};

/// The kubelet, Prometheus and Envoy need a handful.
const MAX_CONNECTIONS: usize = 256;
/// Heads beyond this are refused with 431.
const MAX_HEAD: usize = 64 << 10;
const FIRST_HEAD: Duration = Duration::from_secs(10);
/// Longer than the pause between two probes or scrapes.
const IDLE: Duration = Duration::from_secs(300);
/// Longer than any scraper waits. The kernel measures it.
const UNREAD: Duration = Duration::from_secs(60);
const BACKLOG: u32 = 1024;
/// How long running requests may take when the port is closed.
const SHUTDOWN_LIMIT: Duration = Duration::from_millis(500);

/// The bound port.
#[derive(Debug)]
pub(super) struct Listener {
    listener: TcpListener,
    unread: Duration,
}

impl TryFrom<std::net::TcpListener> for Listener {
    type Error = io::Error;

    fn try_from(listener: std::net::TcpListener) -> io::Result<Self> {
        Ok(Self {
            listener: TcpListener::from_std(listener)?,
            unread: UNREAD,
        })
    }
}

/// Binds the port on all addresses of both families, or of IPv4 if there is no IPv6.
pub fn bind(port: u16) -> Result<std::net::TcpListener, Problem> {
    tracing::info!("Opening status port {port}");
    use rustix::io::Errno;
    let v6 = TcpSocket::new_v6().and_then(|socket| {
        sockopt::set_ipv6_v6only(&socket, false)?;
        listen(socket, (Ipv6Addr::UNSPECIFIED, port).into())
    });
    let listener = v6.or_else(|error| match Errno::from_io_error(&error) {
        Some(Errno::AFNOSUPPORT | Errno::ADDRNOTAVAIL) => {
            listen(TcpSocket::new_v4()?, (Ipv4Addr::UNSPECIFIED, port).into())
        }
        _ => Err(error),
    });
    listener.and_then(TcpListener::into_std).map_err(|error| {
        let found = port::holder(port).unwrap_or_else(|| error.to_string());
        let subject = format!("status port {port}");
        Problem::new(codes::STATUS_PORT_TAKEN, subject, found)
    })
}

fn listen(socket: TcpSocket, address: SocketAddr) -> io::Result<TcpListener> {
    // A restarted agent must not wait for its predecessor's connections in TIME_WAIT.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Serves until `stop`, then finishes running requests. At the retirement it stops accepting, and closes each connection
/// after its next answer.
pub(super) async fn serve(
    listener: Listener,
    router: Arc<Router>,
    retirement: Retirement,
    stop: CancellationToken,
) {
    let Listener { listener, unread } = listener;
    let mut connections = Connections::default();
    let accepting = retirement.accepting();
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            () = retirement.begun() => break,
            accepted = listener.accept() => match accepted {
                Ok((stream, from)) => {
                    set_options(&stream, unread);
                    connections.accept(stream, from, &router, (&retirement, &stop));
                }
                Err(error) => {
                    // Most likely the file descriptors are used up: close one of our own.
                    let (code, error) = (codes::STATUS_PORT_EXHAUSTED, error.to_string());
                    tracing::error!("{}", Problem::new(code, "status port", error));
                    connections.close_most_idle();
                    sleep(Duration::from_millis(100)).await;
                }
            },
            Some(ended) = connections.tasks.join_next_with_id() => {
                let id = ended.map_or_else(|error| error.id(), |(id, ())| id);
                connections.open.remove(&id);
            }
        }
    }
    drop((listener, accepting));
    while connections.tasks.join_next().await.is_some() {}
    tracing::info!("Status server has successfully terminated");
}

/// Without them it is slower, or a client that reads nothing is noticed later.
fn set_options(stream: &TcpStream, unread: Duration) {
    let _ = stream.set_nodelay(true);
    let milliseconds = u32::try_from(unread.as_millis()).unwrap_or(u32::MAX);
    let _ = sockopt::set_tcp_user_timeout(stream, milliseconds);
}

#[derive(Default)]
struct Connections {
    tasks: JoinSet<()>,
    open: HashMap<Id, (Activity, AbortHandle)>,
}

/// What a connection does, and since when.
type Activity = Arc<Mutex<(Phase, Instant)>>;

/// In the order in which connections are closed if there are too many.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    BeforeFirstRequest,
    Idle,
    Answering,
}

impl Connections {
    fn accept(
        &mut self,
        stream: TcpStream,
        from: SocketAddr,
        router: &Arc<Router>,
        (retirement, stop): (&Retirement, &CancellationToken),
    ) {
        while self.open.len() >= MAX_CONNECTIONS {
            self.close_most_idle();
        }
        let now = (Phase::BeforeFirstRequest, Instant::now());
        let activity = Arc::new(Mutex::new(now));
        let ends = (retirement.clone(), stop.clone());
        let served = serve_connection(stream, from, router.clone(), activity.clone(), ends);
        let handle = self.tasks.spawn(served);
        self.open.insert(handle.id(), (activity, handle));
    }

    fn close_most_idle(&mut self) {
        let connections = self.open.iter();
        let most_idle = connections.min_by_key(|(_, (activity, _))| *activity.lock());
        if let Some(id) = most_idle.map(|(id, _)| *id)
            && let Some((_, handle)) = self.open.remove(&id)
        {
            tracing::debug!("closing an idle connection because the status port has too many");
            handle.abort();
        }
    }
}

async fn serve_connection(
    stream: TcpStream,
    from: SocketAddr,
    router: Arc<Router>,
    activity: Activity,
    (retirement, stop): (Retirement, CancellationToken),
) {
    let caller = Caller::new(&stream, from);
    let answer = async |request: Request<Incoming>| {
        *activity.lock() = (Phase::Answering, Instant::now());
        let mut answer = router.answer(request, &caller).await;
        if retirement.has_begun() {
            // The next request goes to the agent that has the port. Without this one the client could not know.
            let close = HeaderValue::from_static("close");
            answer.headers_mut().insert(CONNECTION, close);
        }
        let activity = activity.clone();
        let answered = move || *activity.lock() = (Phase::Idle, Instant::now());
        Ok::<_, Infallible>(answer.map(|body| reply::followed(body, answered)))
    };
    // A connection without a request needs no memory for an answer.
    let service = service_fn(|request| Box::pin(answer(request)));
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .half_close(true)
        .header_read_timeout(IDLE)
        .max_header_size(MAX_HEAD)
        .max_buf_size(MAX_HEAD);
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
    let no_request = async {
        sleep(FIRST_HEAD).await;
        if activity.lock().0 > Phase::BeforeFirstRequest {
            std::future::pending().await
        }
    };
    tokio::select! {
        _ = connection.as_mut() => return,
        () = no_request => return,
        () = stop.cancelled() => {}
    }
    connection.as_mut().graceful_shutdown();
    // A client that has not read the answer by now is not waiting for it.
    let _ = timeout(SHUTDOWN_LIMIT, connection).await;
}

/// Prefixes that end in a slash.
const TREES: [&str; 3] = ["/app-health", "/app-lifecycle", "/debug"];

/// The canonical path and the query, to redirect to; None if the path is canonical. Doubled slashes and
/// dot segments are redirected, as in Go, so that no rule for a path can be bypassed. Percent encoding is
/// not decoded.
pub(super) fn cleaned(uri: &Uri) -> Option<String> {
    let path = uri.path();
    let mut clean = clean(path);
    if TREES.contains(&clean.as_str()) {
        clean.push('/');
    }
    if clean == path {
        return None;
    }
    Some(match uri.query() {
        Some(query) => format!("{clean}?{query}"),
        None => clean,
    })
}

fn clean(path: &str) -> String {
    let mut kept = Vec::new();
    for segment in path.split('/') {
        match segment {
            "" | "." => {}
            ".." => {
                kept.pop();
            }
            other => kept.push(other),
        }
    }
    let is_tree = path.ends_with('/') && !kept.is_empty();
    format!("/{}{}", kept.join("/"), if is_tree { "/" } else { "" })
}

#[cfg(test)]
mod tests;
