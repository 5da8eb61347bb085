//! Answers the pod's DNS: names of the mesh from istiod's name table (NDS), all others by forwarding.
//!
//! [`new`] binds and returns a handle and a future. The handle takes name tables: an index is built on
//! another thread and swapped in whole, so no lookup waits for it, and the last one stays while istiod
//! is away. The future serves; it wants a thread of its own, so that neither a large push nor a
//! certificate delays an answer. How queries are forwarded is behind [`Forward`].

mod answer;
mod asked;
pub mod forward;
pub mod listen;
mod metrics;
pub mod name_table;
mod search_domains;
mod server;
mod wire;

use std::future::Future;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{Mutex, watch};

use crate::lifecycle::{BoxError, CancellationToken, Retirement};
use crate::metrics::Registry;
use crate::problem::{Problem, codes};
pub use answer::Policy;
use asked::Asked;
use metrics::Metrics;
use name_table::NameTable;
pub use search_domains::SearchDomains;
pub use server::Bound;

/// How many bytes of queries the kernel may hold while the thread is elsewhere. It gives what it
/// may, which is twice the default where nothing is configured.
const RECEIVE_BUFFER: usize = 1 << 20;

/// How a query came, and how it is forwarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Transport {
    Udp,
    Tcp,
}

/// Asks the pod's resolvers.
pub trait Forward: Send + Sync + 'static {
    /// The answer to a query, with its id, its question, and our OPT record if it has one; `None` if no
    /// resolver answers. It may be longer than the client takes.
    fn forward(
        &self,
        query: Bytes,
        transport: Transport,
    ) -> impl Future<Output = Option<Bytes>> + Send;
}

/// What the DNS server needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Host and port, each. Port 0 is any.
    pub addresses: Vec<String>,
    pub search_domains: SearchDomains,
    pub policy: Policy,
}

/// How the server ends.
type Served = Result<(), BoxError>;

/// Takes name tables, and shows the last. Clones share it.
#[derive(Clone, Debug)]
pub struct Dns {
    tables: watch::Sender<Option<Arc<NameTable>>>,
    search_domains: SearchDomains,
    metrics: Metrics,
    /// Empty until it has its sockets.
    addresses: Arc<OnceLock<Vec<SocketAddr>>>,
    asked: Asked,
    /// Held while an index is built: updates of streams that have ended must not pile up.
    building: Arc<Mutex<()>>,
}

/// Binds all addresses.
pub fn bind(config: &Config) -> Result<Vec<Bound>, Problem> {
    config.addresses.iter().map(|it| bind_both(it)).collect()
}

/// Returns a handle, and what serves on the sockets from when there are some until `shutdown`.
pub fn new<F: Forward, S: Future<Output = io::Result<Vec<Bound>>> + Send>(
    config: Config,
    sockets: S,
    forwarder: F,
    registry: &Registry,
    retirement: Retirement,
    shutdown: CancellationToken,
) -> (Dns, impl Future<Output = Served> + Send + use<F, S>) {
    let metrics = Metrics::new(registry);
    let (tables, receiver) = watch::channel(None);
    let dns = Dns {
        tables,
        search_domains: config.search_domains,
        metrics: metrics.clone(),
        addresses: Arc::default(),
        asked: Asked::default(),
        building: Arc::default(),
    };
    let shared = server::Shared {
        forwarder,
        policy: config.policy,
        metrics,
        asked: dns.asked.clone(),
        tables: receiver,
    };
    let addresses = dns.addresses.clone();
    let serving = async move {
        let Some(bound) = shutdown.run_until_cancelled(sockets).await.transpose()? else {
            return Ok(());
        };
        let found: Result<_, _> = bound.iter().map(|(udp, _)| udp.local_addr()).collect();
        // They come once.
        let _ = addresses.set(found?);
        server::serve(bound, Arc::new(shared), retirement, shutdown).await
    };
    (dns, serving)
}

impl Dns {
    /// Takes an encoded name table, once its index is built. The one before stays if it cannot be read, for
    /// the reason returned.
    pub async fn update(&self, encoded: Bytes) -> Result<(), String> {
        let alone = self.building.clone().lock_owned().await;
        let domains = self.search_domains.clone();
        let building = tokio::task::spawn_blocking(move || {
            // Until the end, also when the update was dropped.
            let _alone = alone;
            NameTable::build(&encoded, domains)
        });
        // It is not finished if the agent is ending.
        let built = building
            .await
            .map_err(|_| "the name table was not read to its end")?;
        let table = built.map_err(|error| format!("failed to unmarshal name table: {error}"))?;
        self.metrics.hosts.set(table.hosts() as f64);
        tracing::debug!(target: "dns", "name table of {} hosts", table.hosts());
        self.tables.send_replace(Some(Arc::new(table)));
        Ok(())
    }

    /// Whether there has been a table.
    pub fn is_ready(&self) -> bool {
        self.tables.borrow().is_some()
    }

    /// Waits for the first table.
    pub async fn until_ready(&self) {
        // The sender is here.
        let _ = self.tables.subscribe().wait_for(Option::is_some).await;
    }

    /// The table as JSON, if there is one. Takes a while with a large one.
    pub fn ndsz(&self) -> Option<String> {
        let table = self.tables.borrow().clone();
        table.map(|table| table.to_json())
    }

    /// The number of hosts in the table.
    pub fn hosts(&self) -> Result<usize, Problem> {
        let hosts = self.tables.borrow().as_ref().map(|table| table.hosts());
        let code = codes::DNS_NAME_TABLE_MISSING;
        hosts.ok_or_else(|| Problem::new(code, "name table", "not received from istiod"))
    }

    /// The hosts of the table that were asked for.
    pub fn asked(&self) -> Vec<String> {
        let table = self.tables.borrow().clone();
        let names = self.asked.names().into_iter();
        names
            .filter_map(|name| table.as_ref()?.host_of(&name))
            .collect()
    }

    /// Where it listens.
    pub fn addresses(&self) -> &[SocketAddr] {
        self.addresses.get().map_or(&[], Vec::as_slice)
    }
}

/// Checks that the agent's DNS server answers. The message is a query of a kind that no server forwards.
pub async fn answers(server: SocketAddr, limit: Duration) -> Result<(), Problem> {
    const STATUS: u8 = 2 << 3;
    let asking = async {
        let mut message = [0; wire::HEADER];
        message[wire::FLAGS] = STATUS;
        let socket = tokio::net::UdpSocket::bind(any_port(server)).await?;
        socket.connect(server).await?;
        socket.send(&message).await?;
        socket.recv(&mut message).await.map(drop)
    };
    let answer = tokio::time::timeout(limit, asking).await;
    let answer = answer.unwrap_or_else(|late| Err(io::Error::from(late)));
    let (code, subject) = (codes::DNS_SERVER_SILENT, format!("server {server}"));
    answer.map_err(|error| Problem::new(code, subject, error))
}

/// Where a client of `server` may bind.
fn any_port(server: SocketAddr) -> SocketAddr {
    match server {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    }
}

/// Binds both protocols to one port.
fn bind_both(address: &str) -> Result<Bound, Problem> {
    let failed = |protocol| {
        move |error: io::Error| {
            let code = match error.kind() {
                io::ErrorKind::AddrInUse => codes::DNS_PORT_TAKEN,
                _ => codes::DNS_LISTEN_FAILED,
            };
            let found = format!("cannot listen on {protocol} {address}: {error}");
            Problem::new(code, "failed to start local DNS server", found)
        }
    };
    let udp = UdpSocket::bind(address).map_err(failed("udp"))?;
    let bound = udp.local_addr().map_err(failed("udp"))?;
    let tcp = TcpListener::bind(bound).map_err(failed("tcp"))?;
    udp.set_nonblocking(true).map_err(failed("udp"))?;
    tcp.set_nonblocking(true).map_err(failed("tcp"))?;
    if let Err(error) = rustix::net::sockopt::set_socket_recv_buffer_size(&udp, RECEIVE_BUFFER) {
        tracing::debug!(target: "dns", "cannot enlarge the receive buffer of {bound}: {error}");
    }
    for protocol in ["udp", "tcp"] {
        tracing::info!(target: "dns", "Starting local {protocol} DNS server on {bound}");
    }
    Ok((udp, tcp))
}

#[cfg(test)]
mod tests;
