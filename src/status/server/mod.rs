//! Serves HTTP/1.1 on the status port, on both address families, and bounds its connections.
//!
//! A client that has shut down its sending side gets its response. A client that has exited cannot be
//! distinguished from it, so its request is carried out, too. A connection beyond [`MAX_CONNECTIONS`] closes the
//! one that has been idle longest, so that a flood of idle ones does not lock out the kubelet. The head of the
//! first request must arrive within [`FIRST_HEAD`], the head of a later one within [`IDLE`]. A connection
//! whose client reads nothing of a response for [`UNREAD`] is closed.

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
use crate::net::port;
use crate::problem::{Code, Problem};
use crate::runtime::lifecycle::{CancellationToken, StopAccepting};

/// The most connections. The kubelet, Prometheus and Envoy need a handful.
const MAX_CONNECTIONS: usize = 256;
/// The largest head of a request, in bytes. Larger ones are refused with 431.
const MAX_HEAD: usize = 64 << 10;
const FIRST_HEAD: Duration = Duration::from_secs(10);
/// The limit of an idle connection. It is longer than the pause between two probes or scrapes.
const IDLE: Duration = Duration::from_secs(300);
/// The limit of a client that does not read. It is longer than any scraper waits; the kernel measures it.
pub(super) const UNREAD: Duration = Duration::from_secs(60);
const BACKLOG: u32 = 1024;
/// The limit of running requests when the port is closed.
const SHUTDOWN_LIMIT: Duration = Duration::from_millis(500);

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
        Problem::new(Code::StatusPortTaken, format!("status port {port}"), found)
    })
}

fn listen(socket: TcpSocket, address: SocketAddr) -> io::Result<TcpListener> {
    // A restarted agent must not wait for its predecessor's connections in TIME_WAIT.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Serves until `stop`, then finishes running requests. Once `stop_accepting` has begun, it accepts no connections,
/// and closes each one after its next response. A client may read nothing for the time `unread`.
pub(super) async fn serve(
    listener: TcpListener,
    unread: Duration,
    router: Arc<Router>,
    stop_accepting: StopAccepting,
    stop: CancellationToken,
) {
    let mut connections = Connections::default();
    let accept_guard = stop_accepting.accept_guard();
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            () = stop_accepting.wait_for_begin() => break,
            accepted = listener.accept() => match accepted {
                Ok((stream, from)) => {
                    set_options(&stream, unread);
                    connections.accept(stream, from, &router, (&stop_accepting, &stop));
                }
                Err(error) => {
                    // Most likely the file descriptors are used up, so it closes one of its own.
                    let code = Code::StatusPortExhausted;
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
    drop((listener, accept_guard));
    while connections.tasks.join_next().await.is_some() {}
    tracing::info!("Status server has successfully terminated");
}

/// Sets socket options. If they fail, responses are slower, or a client that does not read is closed later.
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

/// The phase of a connection, and when it began.
type Activity = Arc<Mutex<(Phase, Instant)>>;

/// The phases of a connection, in the order in which connections are closed if there are too many.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    BeforeFirstRequest,
    Idle,
    Answering,
}

impl Connections {
    /// Serves a connection in a task of its own. Closes idle ones while there are too many.
    fn accept(
        &mut self,
        stream: TcpStream,
        from: SocketAddr,
        router: &Arc<Router>,
        (stop_accepting, stop): (&StopAccepting, &CancellationToken),
    ) {
        while self.open.len() >= MAX_CONNECTIONS {
            self.close_most_idle();
        }
        let activity = Arc::new(Mutex::new((Phase::BeforeFirstRequest, Instant::now())));
        let ends = (stop_accepting.clone(), stop.clone());
        let task = serve_connection(stream, from, router.clone(), activity.clone(), ends);
        let handle = self.tasks.spawn(task);
        self.open.insert(handle.id(), (activity, handle));
    }

    fn close_most_idle(&mut self) {
        let most_idle = self.open.iter().min_by_key(|(_, (activity, _))| *activity.lock());
        if let Some(id) = most_idle.map(|(id, _)| *id)
            && let Some((_, handle)) = self.open.remove(&id)
        {
            tracing::debug!("closing an idle connection because the status port has too many");
            handle.abort();
        }
    }
}

/// Answers the requests of a connection, until it ends, its client sends no first request in time, or `stop`.
async fn serve_connection(
    stream: TcpStream,
    from: SocketAddr,
    router: Arc<Router>,
    activity: Activity,
    (stop_accepting, stop): (StopAccepting, CancellationToken),
) {
    let caller = Caller::new(&stream, from);
    // Boxed, the future of a response takes no memory in a connection without a request.
    let service = service_fn(|request: Request<Incoming>| {
        Box::pin(async {
            *activity.lock() = (Phase::Answering, Instant::now());
            let mut answer = router.answer(request, &caller).await;
            if stop_accepting.has_begun() {
                // It makes the client send its next request to the agent that has taken over the port.
                answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            }
            let activity = activity.clone();
            Ok::<_, Infallible>(answer.map(|body| {
                reply::call_after(body, move || *activity.lock() = (Phase::Idle, Instant::now()))
            }))
        })
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .half_close(true)
        .header_read_timeout(IDLE)
        .max_header_size(MAX_HEAD)
        .max_buf_size(MAX_HEAD)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = pin!(connection);
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

/// Prefixes of paths that are redirected to themselves with a slash.
const TREES: [&str; 3] = ["/app-health", "/app-lifecycle", "/debug"];

/// Returns the canonical path and the query, to redirect to; None if the path is canonical. Doubled slashes and
/// dot segments are redirected, as in Go, so that no rule for a path can be bypassed. Percent encoding is
/// not decoded.
pub(super) fn canonical_target(uri: &Uri) -> Option<String> {
    let path = uri.path();
    let mut canonical = canonical_path(path);
    if TREES.contains(&canonical.as_str()) {
        canonical.push('/');
    }
    if canonical == path {
        return None;
    }
    if let Some(query) = uri.query() {
        canonical += &format!("?{query}");
    }
    Some(canonical)
}

/// Removes doubled slashes and dot segments.
fn canonical_path(path: &str) -> String {
    let mut segments = Vec::new();
    for segment in path.split('/') {
        match segment {
            "" | "." => {}
            ".." => {
                segments.pop();
            }
            other => segments.push(other),
        }
    }
    let is_tree = path.ends_with('/') && !segments.is_empty();
    format!("/{}{}", segments.join("/"), if is_tree { "/" } else { "" })
}

#[cfg(test)]
mod tests;
