//! Tests the forwarder with servers on the loopback interface. The time of the runtime is paused.

mod delivery;
mod hostile;
mod messages;
pub(super) mod upstream;

use std::io::Write;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use tempfile::NamedTempFile;
use tokio::time::Instant;

use super::{Config, Forwarder, cache};
use crate::dns::{Forward, Transport};
use crate::metrics::Registry;

pub(super) use messages::{Answer, query, query_with_opt};
pub(super) use upstream::Upstream;

pub(super) const TIMEOUT: Duration = Duration::from_secs(5);
pub(super) const NO_CACHE: cache::Config = cache::Config {
    max_entries: 0,
    max_bytes: 0,
    max_ttl: Duration::ZERO,
    max_negative_ttl: Duration::ZERO,
    max_stale: Duration::ZERO,
};

/// A cache that stores answers only for the case that no server answers.
pub(super) const STALE_CACHE: cache::Config = cache::Config {
    max_entries: 1024,
    max_bytes: 512 * 1024,
    max_stale: Duration::from_secs(300),
    ..NO_CACHE
};

/// A forwarder, its metrics and its `resolv.conf`.
pub(super) struct Bench {
    pub(super) forwarder: Forwarder,
    pub(super) registry: Registry,
    pub(super) file: NamedTempFile,
}

impl Bench {
    pub(super) fn new(servers: &[SocketAddr]) -> Self {
        Self::with(servers, |_| {})
    }

    pub(super) fn with(servers: &[SocketAddr], change: impl FnOnce(&mut Config)) -> Self {
        Self::reading(&resolv_conf(servers), change)
    }

    pub(super) fn reading(text: &str, change: impl FnOnce(&mut Config)) -> Self {
        let mut file = NamedTempFile::new().expect("a file");
        file.write_all(text.as_bytes()).expect("it is written");
        let registry = Registry::default();
        let mut config = Config {
            resolv_conf: file.path().to_owned(),
            parallel: false,
            timeout: TIMEOUT,
            listen_addresses: Vec::new(),
            cache: NO_CACHE,
        };
        change(&mut config);
        Self { forwarder: Forwarder::new(config, &registry), registry, file }
    }

    pub(super) fn rewrite(&self, text: &str) {
        std::fs::write(self.file.path(), text).expect("it is written");
    }

    pub(super) async fn ask(&self, query: &[u8]) -> Option<Bytes> {
        self.ask_over(query, Transport::Udp).await
    }

    pub(super) async fn ask_over(&self, query: &[u8], transport: Transport) -> Option<Bytes> {
        let query = Bytes::copy_from_slice(query);
        self.forwarder.forward(query, transport).await
    }

    /// Returns the answer and the time that it took.
    pub(super) async fn timed(&self, query: &[u8]) -> (Option<Bytes>, Duration) {
        let started = Instant::now();
        let answer = self.ask(query).await;
        (answer, started.elapsed())
    }

    /// Returns the value of a series; zero if the series does not exist.
    pub(super) fn count(&self, series: &str) -> u64 {
        let page = self.registry.render();
        let line = page.lines().find_map(|line| line.strip_prefix(series));
        line.map_or(0, |value| value.trim().parse().expect("a number"))
    }
}

pub(super) fn resolv_conf(servers: &[SocketAddr]) -> String {
    let line = |server: &SocketAddr| format!("nameserver [{}]:{}\n", server.ip(), server.port());
    servers.iter().map(line).collect()
}
