//! Reports to systemd that the agent is ready, that it stops, and that its serving thread is alive.
//!
//! The agent polls [`Config::report`] on that thread. Source: the manuals sd_notify(3) and sd_watchdog_enabled(3).

use std::future::Future;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::SocketAddr;
use std::pin::pin;
use std::time::Duration;

use tokio::net::UnixDatagram;
use tokio::time::MissedTickBehavior;

use crate::runtime::duration::scaled;

/// The time limit for systemd to accept a message.
const LIMIT: Duration = Duration::from_secs(5);
/// The shortest period of watchdog messages, so that a short watchdog time does not keep the agent busy.
const MIN_PERIOD: Duration = Duration::from_millis(10);

/// The socket of systemd, and the period of the watchdog messages.
#[derive(Clone, Debug)]
pub struct Config {
    socket: SocketAddr,
    /// The time between two watchdog messages.
    period: Option<Duration>,
}

impl Config {
    /// Parses `NOTIFY_SOCKET`, a path or an abstract name after `@`. Returns None for other kinds of sockets.
    pub fn new(socket: &str, watchdog: Option<Duration>) -> Option<Self> {
        let socket = match socket.strip_prefix('@') {
            Some(name) => SocketAddr::from_abstract_name(name),
            None if socket.starts_with('/') => SocketAddr::from_pathname(socket),
            None => return None,
        };
        // Half the time, as systemd recommends.
        let period = watchdog.map(|watchdog| scaled(watchdog, 0.5).max(MIN_PERIOD));
        Some(Self { socket: socket.ok()?, period })
    }

    /// Reports when `ready` and `stopping` end, and in each period that the thread of this future is
    /// alive. Never ends.
    pub async fn report(self, ready: impl Future<Output = ()>, stopping: impl Future<Output = ()>) {
        let mut alive = tokio::time::interval(self.period.unwrap_or(Duration::MAX));
        alive.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut ready = pin!(ready);
        let mut stopping = pin!(stopping);
        let mut is_ready = false;
        let mut is_stopping = false;
        loop {
            let message = tokio::select! {
                () = &mut stopping, if !is_stopping => {
                    is_ready = true;
                    is_stopping = true;
                    "STOPPING=1"
                }
                () = &mut ready, if !is_ready => {
                    is_ready = true;
                    "READY=1"
                }
                _ = alive.tick(), if self.period.is_some() => "WATCHDOG=1",
            };
            if let Err(error) = self.send(message).await {
                tracing::warn!("cannot send {message} to systemd: {error}");
            }
        }
    }

    async fn send(&self, message: &str) -> io::Result<()> {
        let socket = std::os::unix::net::UnixDatagram::unbound()?;
        socket.connect_addr(&self.socket)?;
        socket.set_nonblocking(true)?;
        let socket = UnixDatagram::from_std(socket)?;
        tokio::time::timeout(LIMIT, socket.send(message.as_bytes())).await??;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;

    /// Receives messages until `last` arrives. Returns each different message once.
    async fn received(socket: &UnixDatagram, last: &str) -> Vec<String> {
        let mut messages: Vec<String> = Vec::new();
        let mut buffer = [0; 64];
        while messages.last().is_none_or(|message| message != last) {
            let length = socket.recv(&mut buffer).await.expect("a message");
            let message = String::from_utf8_lossy(&buffer[..length]).into_owned();
            if !messages.contains(&message) {
                messages.push(message);
            }
        }
        messages
    }

    #[tokio::test]
    async fn systemd_is_notified_of_readiness_watchdog_and_stop() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("notify").display().to_string();
        let name = format!("@istio-agent-test-{}", std::process::id());
        for name in [path, name] {
            let config = Config::new(&name, Some(Duration::from_millis(20))).expect("a socket");
            let socket = std::os::unix::net::UnixDatagram::bind_addr(&config.socket);
            let socket = socket.expect("bound");
            socket.set_nonblocking(true).expect("set");
            let socket = UnixDatagram::from_std(socket).expect("a socket");
            tokio::select! {
                () = config.clone().report(pending(), pending()) => {}
                found = received(&socket, "WATCHDOG=1") => assert_eq!(found, ["WATCHDOG=1"]),
            }
            let later = tokio::time::sleep(Duration::from_millis(50));
            tokio::select! {
                () = config.report(ready(()), later) => {}
                found = received(&socket, "STOPPING=1") => {
                    assert!(found.contains(&"READY=1".to_owned()), "{found:?}");
                }
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_agent_keeps_running_if_systemd_does_not_listen() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("none").display().to_string();
        let config = Config::new(&path, Some(Duration::from_secs(1))).expect("a socket");
        let report = config.report(ready(()), ready(()));
        let ended = tokio::time::timeout(Duration::from_secs(60), report).await;
        assert!(ended.is_err());
    }

    #[test]
    fn only_paths_and_abstract_names_are_sockets() {
        for (name, is_socket) in [
            ("/run/systemd/notify", true),
            ("@/org/freedesktop/systemd1/notify", true),
            ("vsock:2:1234", false),
            ("run/notify", false),
            (&format!("/{}", "n".repeat(200)), false),
        ] {
            assert_eq!(Config::new(name, None).is_some(), is_socket, "{name}");
        }
    }
}
