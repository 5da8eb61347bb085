//! Binds Unix sockets for Envoy, and serves gRPC on them.
//!
//! A stale socket is replaced; only [`replace`] also takes one that another process listens on. The file has mode
//! 0666, because Envoy may run as another user; an [`access::Access`] decides by the peer's user.

pub mod access;
mod authority;
pub mod probe;

use std::convert::Infallible;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use http_body::Body;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::net::RecvFlags;
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use crate::files::permission;
use crate::files::regular_file::if_exists;
use crate::net::executor::ConnectionTasks;
use crate::problem::{Code, Problem};
use crate::runtime::lifecycle::BoxError;
use access::Access;
use authority::valid_authority;

/// The longest path of a socket, without its terminating zero (unix(7)).
const MAX_PATH: usize = 107;

/// Pilot-agent's limit on streams of one connection.
const MAX_CONCURRENT_STREAMS: u32 = 100_000;

/// The bytes of a stream, and of a connection, that may be sent before they are read. They also limit how many tiny
/// frames h2 queues before it takes the peer for an attacker: 2,000 by default, which a burst of requests can reach.
const STREAM_WINDOW: u32 = 4 * 1024 * 1024;
const CONNECTION_WINDOW: u32 = 8 * 1024 * 1024;

/// The number of connections that are served at once. Envoy has one or two for each of its threads at most.
const MAX_CONNECTIONS: usize = 2048;

/// The limit for the first byte. Envoy sends its preface at once.
const FIRST_BYTE: Duration = Duration::from_secs(10);

/// A bound socket. Dropping it removes the file.
#[derive(Debug)]
pub struct Listener {
    listener: UnixListener,
    path: PathBuf,
    /// None admits all users.
    access: Option<Access>,
    connections: Arc<Semaphore>,
}

/// The process at the other end of a connection, in the extensions of each request. None if the kernel does not
/// report it, as for a process in another pod.
#[derive(Clone, Copy, Debug, Default)]
pub struct Peer(Option<i32>);

/// Binds `path`. Creates its directory (mode 0750) if it is missing.
pub fn bind(path: &Path) -> Result<Listener, Problem> {
    let length = path.as_os_str().len();
    if length > MAX_PATH {
        let found = format!("it has {length} bytes, a socket address holds {MAX_PATH}");
        return Err(problem(Code::SocketPathTooLong, path, found));
    }
    if let Some(parent) = path.parent().filter(|p| !p.as_os_str().is_empty()) {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o750)
            .create(parent)
            .map_err(io_problem(path, "create the directory of the socket"))?;
    }
    remove_stale(path)?;
    let listener = UnixListener::bind(path).map_err(io_problem(path, "bind the socket"))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o666))
        .map_err(io_problem(path, "set the mode of the socket"))?;
    Ok(Listener {
        listener,
        path: path.to_owned(),
        access: None,
        connections: Arc::new(Semaphore::new(MAX_CONNECTIONS)),
    })
}

/// Returns the path of a container's own socket, if two containers of a pod bind one each and `path` is a link to
/// one of them. Without a name it is `path`.
pub fn container_path(path: &Path, container: &str) -> PathBuf {
    let mut own = path.as_os_str().to_owned();
    if !container.is_empty() {
        own.push("-");
        own.push(container);
    }
    own.into()
}

/// Makes `path` a link to the socket of this container, unless they are the same. Replaces an existing file or empty
/// directory.
pub fn link(path: &Path, own: &Path) -> Result<(), Problem> {
    let (Some(target), true) = (own.file_name(), path != own) else {
        return Ok(());
    };
    let temporary = own.with_extension("link");
    remove_stale(&temporary)?;
    if fs::symlink_metadata(path).is_ok_and(|found| found.is_dir()) {
        remove_directory(path)?;
    }
    symlink(target, &temporary)
        .and_then(|()| fs::rename(temporary, path))
        .map_err(io_problem(path, "link the socket"))
}

/// Returns true if [`link`] has made `path`, and not another process that also uses a link.
pub fn is_link_to_container(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    fs::read_link(path).unwrap_or_default().to_string_lossy().starts_with(&format!("{name}-"))
}

/// Like [`bind`], but also takes a socket on which another process listens, and logs this as an error.
pub fn replace(path: &Path) -> Result<Listener, Problem> {
    match bind(path) {
        Err(taken) if taken.code == Code::SocketTaken => {
            tracing::error!("{}", taken.consequence("it gets no more connections"));
            fs::remove_file(path)
                .map_err(io_problem(path, "remove the socket of another process"))?;
            bind(path)
        }
        other => other,
    }
}

/// Returns the conversion of an error of `action` into a problem.
fn io_problem(path: &Path, action: &'static str) -> impl Fn(io::Error) -> Problem {
    move |error| permission::problem(action, path, error)
}

fn problem(code: Code, path: &Path, found: impl ToString) -> Problem {
    Problem::new(code, format!("socket {}", path.display()), found)
}

/// Removes the file or empty directory in the way of a socket. Fails if a process listens on it.
fn remove_stale(path: &Path) -> Result<(), Problem> {
    let found =
        if_exists(fs::symlink_metadata(path)).map_err(io_problem(path, "look at the socket"))?;
    let Some(kind) = found.map(|found| found.file_type()) else {
        return Ok(());
    };
    if kind.is_dir() {
        return remove_directory(path);
    }
    if let (true, Ok(pid)) = (kind.is_socket(), find_listener(path)) {
        return Err(problem(Code::SocketTaken, path, format!("process {pid} listens on it")));
    }
    fs::remove_file(path).map_err(io_problem(path, "remove the stale socket"))
}

/// Removes a directory in the place of a socket, unless it has content or is a volume.
fn remove_directory(path: &Path) -> Result<(), Problem> {
    fs::remove_dir(path).map_err(|error| {
        let found = format!("a directory is in its place, which cannot be removed: {error}");
        problem(Code::SocketDirectory, path, found)
    })
}

/// Returns the process that listens on `path`, or 0 if the kernel does not report it, as for one in another
/// container. Does not wait until it accepts the connection.
pub fn find_listener(path: &Path) -> io::Result<i32> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&socket, &SocketAddrUnix::new(path)?) {
        Ok(()) => {
            let stream = UnixStream::from_std(socket.into()).ok();
            Ok(stream.and_then(|it| Peer::of(&it).0).unwrap_or_default())
        }
        // A process listens, and its queue of connections is full.
        Err(rustix::io::Errno::AGAIN) => Ok(0),
        Err(error) => Err(error.into()),
    }
}

impl Listener {
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn for_own_user(self) -> Result<Self, Problem> {
        fs::set_permissions(&self.path, fs::Permissions::from_mode(0o600))
            .map_err(io_problem(&self.path, "set the mode of the socket"))?;
        Ok(self)
    }

    #[must_use]
    pub fn with_access(mut self, access: Option<Access>) -> Self {
        self.access = access;
        self
    }

    /// Serves HTTP/2 without TLS until `shutdown`, then waits for the streams to end. Closes a connection whose
    /// first byte is late. At most [`MAX_CONNECTIONS`] are served, and others wait.
    pub async fn serve<S, B>(mut self, service: S, shutdown: CancellationToken)
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
        let tasks = ConnectionTasks::default();
        let executor = tasks.executor();
        // No keepalive: the kernel closes a Unix stream when its peer dies.
        let mut http2 = hyper::server::conn::http2::Builder::new(executor.clone());
        http2
            .timer(TokioTimer::new())
            .max_concurrent_streams(MAX_CONCURRENT_STREAMS)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW);
        while let Some((stream, permit)) = shutdown.run_until_cancelled(self.accept()).await {
            let service = service.clone();
            let http2 = http2.clone();
            let connection = async move {
                let _permit = permit;
                // A silent client does not cost the kilobytes of HTTP/2.
                if !has_first_byte(&stream).await {
                    return;
                }
                let peer = Peer::of(&stream);
                let service = service_fn(move |mut request: http::Request<Incoming>| {
                    request.extensions_mut().insert(peer);
                    service.call(request)
                });
                let serving =
                    http2.serve_connection(TokioIo::new(valid_authority(stream)), service);
                if let Err(error) = Box::pin(serving).await {
                    tracing::debug!("connection on a local socket ended: {error}");
                }
            };
            let until_shutdown = shutdown.clone().run_until_cancelled_owned(connection);
            executor.spawn(async move {
                until_shutdown.await;
            });
        }
        tasks.all_ended().await;
    }

    /// Waits for the next connection that may be served. At the limit, connections wait in the kernel's queue.
    async fn accept(&mut self) -> (UnixStream, Option<OwnedSemaphorePermit>) {
        // The semaphore is never closed.
        let permit = self.connections.clone().acquire_owned().await.ok();
        loop {
            match self.listener.accept().await {
                Ok((stream, _)) => {
                    let access = self.access.as_mut();
                    if access.is_none_or(|access| access.admit(&stream, &self.path)) {
                        return (stream, permit);
                    }
                }
                Err(error) => {
                    // Most likely, the file descriptors are used up.
                    tracing::error!(
                        "failed to accept downstream gRPC connection {error} on {}; trying again in 1s",
                        self.path.display()
                    );
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
            }
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path); // Gone already, or the next agent replaces it.
    }
}

/// Waits for the first byte, and leaves it unread. Returns false if there is none in time.
async fn has_first_byte(stream: &UnixStream) -> bool {
    let mut byte = [0; 1];
    let peeked = stream.async_io(Interest::READABLE, || {
        Ok(rustix::net::recv(stream, &mut byte, RecvFlags::PEEK)?)
    });
    match tokio::time::timeout(FIRST_BYTE, peeked).await {
        Ok(peeked) => peeked.is_ok_and(|(read, _)| read > 0),
        Err(_) => {
            let peer = Peer::of(stream).0.unwrap_or_default();
            tracing::debug!("process {peer} connected and sent nothing within {FIRST_BYTE:?}");
            false
        }
    }
}

impl Peer {
    pub fn pid(self) -> Option<i32> {
        self.0
    }

    fn of(stream: &UnixStream) -> Self {
        Self(stream.peer_cred().ok().and_then(|peer| peer.pid()))
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http_body_util::Empty;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::task::JoinSet;
    use tokio::time::{Instant, timeout};

    use super::*;

    /// Starts a server that has at most `most` connections at the same time. Returns its directory, path and task.
    fn start(most: usize) -> (tempfile::TempDir, PathBuf, JoinSet<()>) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let mut listener = bind(&path).unwrap();
        listener.connections = Arc::new(Semaphore::new(most));
        let nothing = |_| async { Ok(http::Response::new(Empty::<Bytes>::new())) };
        let mut tasks = JoinSet::new();
        let stop = CancellationToken::new();
        tasks.spawn(async move {
            let service = service_fn(nothing);
            listener.serve(service, stop).await;
        });
        (directory, path, tasks)
    }

    /// Reads the first byte. Returns None if the server closes the connection.
    async fn first_byte(stream: &mut UnixStream) -> Option<u8> {
        let mut byte = [0];
        let read = timeout(6 * FIRST_BYTE, stream.read(&mut byte)).await;
        let read = read.expect("not for ever").unwrap_or_default();
        (read > 0).then_some(byte[0])
    }

    #[tokio::test]
    async fn a_socket_replaces_an_empty_directory_and_no_other_one() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("XDS");
        fs::create_dir(&path).unwrap();
        fs::write(path.join("file"), "").unwrap();
        let own = container_path(&path, "istio-proxy");
        for problem in [bind(&path).map(drop), link(&path, &own)] {
            assert_eq!(problem.unwrap_err().code, Code::SocketDirectory);
        }
        fs::remove_file(path.join("file")).unwrap();
        // The socket is removed with its listener.
        drop(bind(&path).unwrap());
        fs::create_dir(&path).unwrap();
        link(&path, &own).unwrap();
        assert!(is_link_to_container(&path));
    }

    #[test]
    fn only_links_to_the_socket_of_a_container_are_recognized_as_such() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        assert!(!is_link_to_container(&path), "it does not exist");
        for (target, expected) in
            [("socket-istio-proxy", true), ("spire.sock", false), ("/run/spire/socket-a", false)]
        {
            symlink(target, &path).unwrap();
            assert_eq!(is_link_to_container(&path), expected, "{target}");
            fs::remove_file(&path).unwrap();
        }
        let own = container_path(&path, "istio-proxy");
        fs::write(&own, "").unwrap();
        link(&path, &own).unwrap();
        assert!(is_link_to_container(&path));
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_connection_is_closed_and_a_speaking_one_is_served() {
        let (_directory, path, _tasks) = start(2);
        let mut silent = UnixStream::connect(&path).await.unwrap();
        assert_eq!(first_byte(&mut silent).await, None);
        let mut speaks = UnixStream::connect(&path).await.unwrap();
        speaks.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
        assert!(first_byte(&mut speaks).await.is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_beyond_the_limit_waits_until_another_one_ends() {
        let (_directory, path, _tasks) = start(2);
        let mut taken = Vec::new();
        for _ in 0..2 {
            taken.push(UnixStream::connect(&path).await.unwrap());
        }
        let start = Instant::now();
        let mut third = UnixStream::connect(&path).await.unwrap();
        third.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
        assert!(first_byte(&mut third).await.is_some());
        // The third connection is served only after the first two, which are silent, are closed.
        assert!(start.elapsed() >= FIRST_BYTE);
        drop(taken);
    }
}
