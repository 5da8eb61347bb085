//! The Unix sockets Envoy dials: binding one where an earlier agent may have left its own, and
//! serving gRPC on it.
//!
//! A stale socket file is replaced; one that somebody still answers on is left alone. The file is
//! open to every user of the pod (mode 0666), as Envoy may run under another one; who is served of
//! those who connect, an [`access::Access`] says.
//!
//! Does not know what is served: a caller hands in the service.

pub mod access;
mod coalesced;
pub mod probe;

use std::convert::Infallible;
use std::fs;
use std::future::{Future, poll_fn};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use http_body::Body;
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::net::RecvFlags;
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::lifecycle::BoxError;
use access::Access;

/// Longest path `sockaddr_un` can hold, without its terminating zero (unix(7)).
const LONGEST_PATH: usize = 107;

/// Pilot-agent's limit on streams of one connection.
const MAX_CONCURRENT_STREAMS: u32 = 100_000;

/// How much of a stream, and of all streams of a connection, may be sent ahead of being read.
///
/// h2 also takes from it how many tiny frames it lets pile up before it takes the peer for an
/// attacker: at its default of 1 MiB some two thousand, which a burst of requests can reach.
const STREAM_WINDOW: u32 = 4 * 1024 * 1024;
const CONNECTION_WINDOW: u32 = 8 * 1024 * 1024;

/// How many connections are served at once. Envoy has one or two for each of its threads at the most.
const MOST_CONNECTIONS: usize = 2048;

/// How long the first byte may take. Envoy speaks at once.
const FIRST_BYTE: Duration = Duration::from_secs(10);

/// A socket that is bound and open to Envoy. Dropping it removes the file.
#[derive(Debug)]
pub struct Listener {
    listener: UnixListener,
    path: PathBuf,
    access: Access,
    /// Room for connections.
    places: Arc<Semaphore>,
}

/// The process at the other end of a connection, in each of its requests' extensions. None where the
/// kernel does not tell, as of a process in another pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Peer(Option<i32>);

/// Why a socket could not be had at a path.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    #[error("socket path {path} has {length} bytes, more than the {LONGEST_PATH} a socket address holds", path = .path.display())]
    PathTooLong { path: PathBuf, length: usize },
    #[error("another process answers on {path}", path = .path.display())]
    Live { path: PathBuf },
    #[error("{path} is a directory, expected a socket or nothing", path = .path.display())]
    Directory { path: PathBuf },
    #[error("cannot {action} {path}", path = .path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
}

/// Binds `path`, in a directory that is made if missing (mode 0750).
pub fn bind(path: &Path) -> Result<Listener, BindError> {
    let length = path.as_os_str().len();
    if length > LONGEST_PATH {
        return Err(BindError::PathTooLong {
            path: path.to_owned(),
            length,
        });
    }
    let failed = |action| {
        move |source| BindError::Io {
            action,
            path: path.to_owned(),
            source,
        }
    };
    if let Some(parent) = path.parent().filter(|p| !p.as_os_str().is_empty()) {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o750)
            .create(parent)
            .map_err(failed("create the directory of"))?;
    }
    remove_stale(path)?;
    let listener = UnixListener::bind(path).map_err(failed("bind"))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o666))
        .map_err(failed("set the mode of"))?;
    Ok(Listener {
        listener,
        path: path.to_owned(),
        access: Access::default(),
        places: Arc::new(Semaphore::new(MOST_CONNECTIONS)),
    })
}

fn remove_stale(path: &Path) -> Result<(), BindError> {
    let kind = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata.file_type(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(source) => {
            return Err(BindError::Io {
                action: "look at",
                path: path.to_owned(),
                source,
            });
        }
    };
    if kind.is_dir() {
        return Err(BindError::Directory {
            path: path.to_owned(),
        });
    }
    if kind.is_socket() && is_live(path) {
        return Err(BindError::Live {
            path: path.to_owned(),
        });
    }
    fs::remove_file(path).map_err(|source| BindError::Io {
        action: "remove the stale file",
        path: path.to_owned(),
        source,
    })
}

/// Whether somebody listens on `path`. Does not wait, also for one who accepts nobody.
pub fn is_live(path: &Path) -> bool {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    let (Ok(socket), Ok(address)) = (socket, SocketAddrUnix::new(path)) else {
        return false;
    };
    // EAGAIN says that its queue is full.
    matches!(
        rustix::net::connect(&socket, &address),
        Ok(()) | Err(rustix::io::Errno::AGAIN)
    )
}

impl Listener {
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Serves those only whom `access` lets in.
    #[must_use]
    pub fn guarded(mut self, access: Access) -> Self {
        self.access = access;
        self
    }

    /// Serves HTTP/2 without TLS until `shutdown`, then waits for streams to notice it and end. Hangs
    /// up on who is silent at first, and on who comes while too many are served.
    pub async fn serve<S, B>(self, service: S, shutdown: CancellationToken)
    where
        S: hyper::service::Service<
                http::Request<Incoming>,
                Response = http::Response<B>,
                Error = Infallible,
                Future: Send,
            > + Clone
            + Send
            + 'static,
        B: Body<Data: Send, Error: Into<BoxError>> + Send + 'static,
    {
        let tasks = TaskTracker::new();
        let mut access = self.access.clone();
        let mut is_full = false;
        loop {
            let accepted = tokio::select! {
                () = shutdown.cancelled() => break,
                accepted = self.listener.accept() => accepted,
            };
            match accepted {
                Ok((stream, _)) if !access.admits(&stream, &self.path) => {}
                Ok((stream, _)) => {
                    let place = self.places.clone().try_acquire_owned();
                    if std::mem::replace(&mut is_full, place.is_err()) != is_full && is_full {
                        tracing::warn!(
                            "{} has all the connections it may have; others are hung up on",
                            self.path.display()
                        );
                    }
                    let Ok(place) = place else {
                        continue;
                    };
                    let service = service.clone();
                    let (shutdown, streams) = (shutdown.clone(), tasks.clone());
                    let connection = async move {
                        let _place = place;
                        // HTTP/2 takes kilobytes, which a client that says nothing is not given.
                        if speaks(&stream).await {
                            let peer = Peer::of(&stream);
                            let service = WithPeer { service, peer };
                            Box::pin(serve_connection(stream, service, &streams)).await;
                        }
                    };
                    tasks.spawn(async move {
                        tokio::select! {
                            () = shutdown.cancelled() => {}
                            () = connection => {}
                        }
                    });
                }
                Err(error) => {
                    // Out of descriptors, most likely. Others close some meanwhile.
                    tracing::error!(
                        "failed to accept downstream gRPC connection {error} on {}; trying again in 1s",
                        self.path.display()
                    );
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
            }
        }
        tasks.close();
        tasks.wait().await;
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path); // Gone already, or the next agent replaces it.
    }
}

/// Waits for the first byte, which stays unread, or for the end: false if none came in time.
async fn speaks(stream: &UnixStream) -> bool {
    let mut byte = [0; 1];
    let peek = || Ok(rustix::net::recv(stream, &mut byte, RecvFlags::PEEK)?);
    let peeked = stream.async_io(Interest::READABLE, peek);
    match tokio::time::timeout(FIRST_BYTE, peeked).await {
        Ok(peeked) => peeked.is_ok_and(|(read, _)| read > 0),
        Err(_) => {
            let peer = Peer::of(stream).0.unwrap_or_default();
            tracing::debug!("process {peer} connected and said nothing within {FIRST_BYTE:?}");
            false
        }
    }
}

impl Peer {
    fn of(stream: &UnixStream) -> Self {
        Self(stream.peer_cred().ok().and_then(|peer| peer.pid()))
    }
}

/// A service that is told with each request whose it is.
struct WithPeer<S> {
    service: S,
    peer: Peer,
}

impl<S: hyper::service::Service<http::Request<Incoming>>>
    hyper::service::Service<http::Request<Incoming>> for WithPeer<S>
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn call(&self, mut request: http::Request<Incoming>) -> S::Future {
        request.extensions_mut().insert(self.peer);
        self.service.call(request)
    }
}

fn serve_connection<S, B, IO>(
    stream: IO,
    service: S,
    tasks: &TaskTracker,
) -> impl Future<Output = ()> + Send + 'static
where
    S: hyper::service::Service<
            http::Request<Incoming>,
            Response = http::Response<B>,
            Error = Infallible,
            Future: Send,
        > + Send
        + 'static,
    B: Body<Data: Send, Error: Into<BoxError>> + Send + 'static,
    IO: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    let (stream, turn) = coalesced::coalesced(stream);
    // No keepalive: the kernel closes a Unix stream when its peer dies.
    let connection = hyper::server::conn::http2::Builder::new(Tracked(tasks.clone()))
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_CONCURRENT_STREAMS)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .serve_connection(TokioIo::new(stream), service);
    async move {
        let mut connection = pin!(connection);
        let ended = poll_fn(|context| {
            if let Poll::Ready(ended) = connection.as_mut().poll(context) {
                // Its last words, such as what was wrong; a peer that does not take them is let go.
                let _ = turn.end(context);
                return Poll::Ready(ended.map_err(BoxError::from));
            }
            match turn.end(context) {
                Poll::Ready(Err(error)) => Poll::Ready(Err(error.into())),
                // Whatever moves the connection on, or makes room for its bytes, wakes this.
                Poll::Ready(Ok(())) | Poll::Pending => Poll::Pending,
            }
        });
        if let Err(error) = ended.await {
            tracing::debug!(error, "connection on a local socket ended");
        }
    }
}

/// Spawns hyper's stream tasks into the listener's own set.
#[derive(Clone)]
struct Tracked(TaskTracker);

impl<F> hyper::rt::Executor<F> for Tracked
where
    F: Future<Output: Send + 'static> + Send + 'static,
{
    fn execute(&self, future: F) {
        self.0.spawn(future);
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http_body_util::Empty;
    use hyper::service::service_fn;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::task::JoinSet;
    use tokio::time::{Instant, timeout};

    use super::*;

    /// A server with room for so many, its place and its task.
    fn start(most: usize) -> (tempfile::TempDir, PathBuf, JoinSet<()>) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let mut listener = bind(&path).unwrap();
        listener.places = Arc::new(Semaphore::new(most));
        let nothing = |_| async { Ok(http::Response::new(Empty::<Bytes>::new())) };
        let mut tasks = JoinSet::new();
        let stop = CancellationToken::new();
        tasks.spawn(async move {
            let service = service_fn(nothing);
            listener.serve(service, stop).await;
        });
        (directory, path, tasks)
    }

    /// What comes first: a byte of the other side, or its end.
    async fn first_byte(stream: &mut UnixStream) -> Option<u8> {
        let mut byte = [0];
        let read = timeout(6 * FIRST_BYTE, stream.read(&mut byte)).await;
        let read = read.expect("not for ever").unwrap_or_default();
        (read > 0).then_some(byte[0])
    }

    #[tokio::test(start_paused = true)]
    async fn who_says_nothing_is_hung_up_on_and_who_speaks_at_once_is_not() {
        let (_directory, path, _tasks) = start(2);
        let mut silent = UnixStream::connect(&path).await.unwrap();
        assert_eq!(first_byte(&mut silent).await, None);
        let mut speaks = UnixStream::connect(&path).await.unwrap();
        speaks
            .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            .await
            .unwrap();
        assert!(first_byte(&mut speaks).await.is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn who_comes_while_all_places_are_taken_is_hung_up_on_at_once() {
        let (_directory, path, _tasks) = start(2);
        let mut taken = Vec::new();
        for _ in 0..2 {
            taken.push(UnixStream::connect(&path).await.unwrap());
        }
        let start = Instant::now();
        let mut third = UnixStream::connect(&path).await.unwrap();
        assert_eq!(first_byte(&mut third).await, None);
        assert!(start.elapsed() < FIRST_BYTE);
        drop(taken);
        let mut fourth = UnixStream::connect(&path).await.unwrap();
        let greeting = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
        while fourth.write_all(greeting).await.is_err() || first_byte(&mut fourth).await.is_none() {
            fourth = UnixStream::connect(&path).await.unwrap();
        }
    }
}
