//! Answers the pod's DNS queries: names of the mesh from istiod's name table (NDS), all others by
//! forwarding.
//!
//! [`new`] returns a handle and a future. [`Dns::update`] gives the handle a name table: its index is
//! built on another thread and then replaces the last one, so no lookup waits for it; while istiod is
//! unreachable the last table stays. The future serves. Run it on its own thread, so that neither a
//! large push nor a certificate delays an answer. [`Forward`] sends queries to the pod's resolvers.

mod answer;
pub mod forward;
pub mod listen;
mod metrics;
pub mod name_table;
mod search_domains;
mod server;
mod wire;

use std::collections::HashSet;
use std::future::Future;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{Mutex, watch};

use crate::metrics::Registry;
use crate::problem::{Code, Problem};
use crate::runtime::lifecycle::{BoxError, CancellationToken, StopAccepting};
pub use answer::Policy;
use metrics::Metrics;
use name_table::NameTable;
pub use search_domains::SearchDomains;
pub use server::Bound;

/// Bytes of queries that the kernel may hold while the thread is busy. The kernel lowers it to its own
/// limit, by default twice the usual buffer.
const RECEIVE_BUFFER: usize = 1 << 20;

/// The most names of the mesh that are remembered as queried: more than a workload uses.
const MAX_QUERIED: usize = 10_000;

/// The protocol that a query is received or forwarded over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Transport {
    Udp,
    Tcp,
}

/// Forwards queries to the pod's resolvers.
pub trait Forward: Send + Sync + 'static {
    /// Returns the reply to a query, with the query's id and question, and our OPT record if the query
    /// has one; `None` if no resolver answers. It may be longer than the client accepts.
    fn forward(
        &self,
        query: Bytes,
        transport: Transport,
    ) -> impl Future<Output = Option<Bytes>> + Send;
}

/// Settings of the DNS server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The addresses to listen on, each a host and a port. For port 0 the kernel chooses one.
    pub addresses: Vec<String>,
    pub search_domains: SearchDomains,
    pub policy: Policy,
}

/// Handle of the DNS server: takes name tables and shows the last one. Clones share it.
#[derive(Clone, Debug)]
pub struct Dns {
    /// The last name table.
    tables: watch::Sender<Option<Arc<NameTable>>>,
    search_domains: SearchDomains,
    metrics: Metrics,
    /// Empty until the server has its sockets.
    addresses: Arc<OnceLock<Vec<SocketAddr>>>,
    /// Names of the mesh that clients queried, for `pilot-agent scope`.
    queried: Arc<parking_lot::Mutex<HashSet<Box<[u8]>>>>,
    /// Locked while an index is built, so that the updates of streams that have ended do not pile up.
    building: Arc<Mutex<()>>,
}

/// Binds UDP and TCP on all addresses.
pub fn bind(config: &Config) -> Result<Vec<Bound>, Problem> {
    config.addresses.iter().map(|a| bind_both(a)).collect()
}

/// Returns a handle, and a future that waits for the sockets and serves on them until `shutdown`.
pub fn new<F: Forward, S: Future<Output = io::Result<Vec<Bound>>> + Send>(
    config: Config,
    sockets: S,
    forwarder: F,
    registry: &Registry,
    stop_accepting: StopAccepting,
    shutdown: CancellationToken,
) -> (Dns, impl Future<Output = Result<(), BoxError>> + Send + use<F, S>) {
    let dns = Dns::new(config.search_domains, registry);
    let shared = server::Shared { dns: dns.clone(), forwarder, policy: config.policy };
    let serving = async move {
        let Some(bound) = shutdown.run_until_cancelled(sockets).await.transpose()? else {
            return Ok(());
        };
        let local: Result<_, _> = bound.iter().map(|(udp, _)| udp.local_addr()).collect();
        // This future alone sets the addresses, and runs once.
        let _ = shared.dns.addresses.set(local?);
        server::serve(bound, Arc::new(shared), stop_accepting, shutdown).await
    };
    (dns, serving)
}

impl Dns {
    fn new(search_domains: SearchDomains, registry: &Registry) -> Self {
        Self {
            tables: watch::Sender::new(None),
            search_domains,
            metrics: Metrics::new(registry),
            addresses: Arc::default(),
            queried: Arc::default(),
            building: Arc::default(),
        }
    }

    /// Builds the index of an encoded name table and replaces the last table by it. If the table cannot
    /// be read, the last one stays and the reason is returned.
    pub async fn update(&self, encoded: Bytes) -> Result<(), String> {
        let guard = self.building.clone().lock_owned().await;
        let domains = self.search_domains.clone();
        let task = tokio::task::spawn_blocking(move || {
            // Held until the index is built, even if the caller drops the update.
            let _guard = guard;
            NameTable::build(&encoded, domains)
        });
        // The task is cancelled if the agent is stopping.
        let built = task.await.map_err(|_| "the name table was not read to its end")?;
        let table = built.map_err(|error| format!("failed to unmarshal name table: {error}"))?;
        self.metrics.hosts.set(table.host_count() as f64);
        tracing::debug!(target: "dns", "name table of {} hosts", table.host_count());
        self.tables.send_replace(Some(Arc::new(table)));
        Ok(())
    }

    /// Returns true once there is a table.
    pub fn is_ready(&self) -> bool {
        self.tables.borrow().is_some()
    }

    /// Renders the table as JSON, if there is one. A large table takes a while.
    pub fn to_json(&self) -> Option<String> {
        // Cloned, so that updates do not wait meanwhile.
        let table = self.tables.borrow().clone()?;
        Some(table.to_json())
    }

    /// Returns the number of hosts in the table.
    pub fn host_count(&self) -> Result<usize, Problem> {
        let hosts = self.tables.borrow().as_ref().map(|table| table.host_count());
        let code = Code::DnsNameTableMissing;
        hosts.ok_or_else(|| Problem::new(code, "name table", "not received from istiod"))
    }

    /// Returns the hosts of the table that clients queried.
    pub fn queried_hosts(&self) -> Vec<String> {
        let Some(table) = self.tables.borrow().clone() else {
            return Vec::new();
        };
        let names = self.queried.lock().clone();
        names.iter().filter_map(|name| table.host_of(name)).collect()
    }

    /// Remembers a name of the mesh that a client queried.
    fn remember(&self, name: &[u8]) {
        let mut queried = self.queried.lock();
        if queried.len() < MAX_QUERIED && !queried.contains(name) {
            queried.insert(name.into());
        }
    }

    /// Returns the addresses that the server listens on.
    pub fn addresses(&self) -> &[SocketAddr] {
        self.addresses.get().map_or(&[], Vec::as_slice)
    }
}

/// Checks that the agent's DNS server answers within `limit`.
pub async fn check_server(server: SocketAddr, limit: Duration) -> Result<(), Problem> {
    let answered = tokio::time::timeout(limit, query_status(server)).await;
    answered
        .unwrap_or_else(|late| Err(late.into()))
        .map_err(|error| Problem::new(Code::DnsServerSilent, format!("server {server}"), error))
}

/// Sends a query with opcode STATUS, which no server forwards, and waits for the answer.
async fn query_status(server: SocketAddr) -> io::Result<()> {
    let mut message = [0; wire::HEADER];
    message[wire::FLAGS] = 2 << 3;
    let socket = tokio::net::UdpSocket::bind(any_port(server)).await?;
    socket.connect(server).await?;
    socket.send(&message).await?;
    socket.recv(&mut message).await.map(drop)
}

/// Returns the address that a client of `server` binds: any port of the server's family.
fn any_port(server: SocketAddr) -> SocketAddr {
    match server {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    }
}

/// Binds both protocols to one port.
fn bind_both(address: &str) -> Result<Bound, Problem> {
    let udp_failed = listen_failed("udp", address);
    let tcp_failed = listen_failed("tcp", address);
    let udp = UdpSocket::bind(address).map_err(&udp_failed)?;
    let bound = udp.local_addr().map_err(&udp_failed)?;
    let tcp = TcpListener::bind(bound).map_err(&tcp_failed)?;
    udp.set_nonblocking(true).map_err(&udp_failed)?;
    tcp.set_nonblocking(true).map_err(&tcp_failed)?;
    if let Err(error) = rustix::net::sockopt::set_socket_recv_buffer_size(&udp, RECEIVE_BUFFER) {
        tracing::debug!(target: "dns", "cannot enlarge the receive buffer of {bound}: {error}");
    }
    for protocol in ["udp", "tcp"] {
        tracing::info!(target: "dns", "Starting local {protocol} DNS server on {bound}");
    }
    Ok((udp, tcp))
}

/// Returns the conversion of an error while listening on `address` into a problem.
fn listen_failed(protocol: &str, address: &str) -> impl Fn(io::Error) -> Problem {
    move |error| {
        let code = match error.kind() {
            io::ErrorKind::AddrInUse => Code::DnsPortTaken,
            _ => Code::DnsListenFailed,
        };
        let found = format!("cannot listen on {protocol} {address}: {error}");
        Problem::new(code, "failed to start local DNS server", found)
    }
}

#[cfg(test)]
mod tests;
