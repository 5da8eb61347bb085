//! Probes whether another process serves gRPC on a socket.
//!
//! A socket file may be left over from an ended process, and a process may bind a socket and never respond.
//! So the peer is healthy only if it sends HTTP/2 settings in time. A peer whose queue of connections is full
//! is busy, not dead. No method is called.

use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::time::Duration;
use std::{fs, io};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use crate::files::permission::explained;

const LIMIT: Duration = Duration::from_secs(1);

/// The client's preface of HTTP/2: a fixed text, and empty settings.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

const SETTINGS: u8 = 4;

#[derive(Debug)]
pub enum Health {
    /// No socket: there is no file, or one of another kind.
    Absent,
    /// A socket without a process that speaks HTTP/2.
    Dead(io::Error),
    /// A process listens, and its queue of connections is full.
    Busy,
    Healthy,
}

/// Connects, and waits for HTTP/2 settings, for a second at most.
pub async fn health(path: &Path) -> Health {
    if !fs::metadata(path).is_ok_and(|found| found.file_type().is_socket()) {
        return Health::Absent;
    }
    match tokio::time::timeout(LIMIT, handshake(path)).await {
        Ok(Ok(())) => Health::Healthy,
        Ok(Err(error)) if error.kind() == io::ErrorKind::WouldBlock => Health::Busy,
        Ok(Err(error)) => Health::Dead(error),
        Err(_) => Health::Dead(io::Error::new(
            io::ErrorKind::TimedOut,
            format!("no HTTP/2 settings within {LIMIT:?}"),
        )),
    }
}

async fn handshake(path: &Path) -> io::Result<()> {
    let mut stream = UnixStream::connect(path).await.map_err(|error| explained(path, error))?;
    stream.write_all(PREFACE).await?;
    let mut head = [0; 9];
    stream.read_exact(&mut head).await?;
    match head[3] {
        SETTINGS => Ok(()),
        other => Err(io::Error::other(format!(
            "a frame of type {other} comes first, expected HTTP/2 settings"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::UnixListener;
    use tokio::time::Instant;

    use super::*;

    async fn answered_with(answer: &'static [u8]) -> Health {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let answering = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.write_all(answer).await.unwrap();
            std::future::pending::<()>().await;
        };
        tokio::select! {
            health = health(&path) => health,
            () = answering => panic!("ends never"),
        }
    }

    #[tokio::test]
    async fn only_a_peer_that_sends_http2_settings_is_healthy() {
        assert!(matches!(answered_with(b"\0\0\0\x04\0\0\0\0\0").await, Health::Healthy));
        assert!(matches!(answered_with(b"HTTP/1.1 400 Bad").await, Health::Dead(_)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_without_settings_within_a_second_is_dead() {
        let start = Instant::now();
        assert!(matches!(answered_with(b"").await, Health::Dead(_)));
        assert_eq!(start.elapsed().as_millis() / 10, 100);
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_queue_of_connections_is_busy_and_not_dead() {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let full = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        bind(&full, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        listen(&full, 0).unwrap();
        let mut callers = Vec::new();
        while let Ok(caller) = UnixStream::connect(&path).await {
            callers.push(caller);
        }
        assert!(!callers.is_empty());
        assert!(matches!(health(&path).await, Health::Busy));
    }

    #[tokio::test]
    async fn a_file_is_absent_and_the_socket_of_a_process_is_dead() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        assert!(matches!(health(&path).await, Health::Absent));
        fs::write(&path, "").unwrap();
        assert!(matches!(health(&path).await, Health::Absent));
        fs::remove_file(&path).unwrap();
        drop(UnixListener::bind(&path).unwrap());
        assert!(matches!(health(&path).await, Health::Dead(_)));
    }
}
