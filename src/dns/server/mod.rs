//! Serves queries on bound sockets.
//!
//! A loop for each socket and a task for each TCP connection. A table's answer is sent in place; a
//! query for others becomes a task in a bounded set of its loop, so that nobody waits for a slow
//! resolver but who asked it.
//!
//! Does not judge queries: `super::answer` does.

mod tcp;
mod udp;

use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use tokio::net::{TcpListener, UdpSocket};
use tokio::sync::watch;
use tokio::task::{JoinError, JoinSet};

use super::answer::{self, Policy};
use super::metrics::{Metrics, Source};
use super::table::Table;
use super::wire::{self, Question};
use super::{Error, Forward, Transport};
use crate::lifecycle::{CancellationToken, Tasks};

/// Room for any message.
const LARGEST: usize = u16::MAX as usize;

/// Both sockets of one address.
#[derive(Debug)]
pub(super) struct Bound {
    pub(super) address: SocketAddr,
    pub(super) udp: std::net::UdpSocket,
    pub(super) tcp: std::net::TcpListener,
}

/// What all loops need.
pub(super) struct Shared<F> {
    pub(super) forwarder: F,
    pub(super) policy: Policy,
    pub(super) metrics: Metrics,
    pub(super) tables: watch::Receiver<Option<Arc<Table>>>,
}

/// Serves until `shutdown`, or until a socket fails for good.
pub(super) async fn serve<F: Forward>(
    bound: Vec<Bound>,
    shared: Arc<Shared<F>>,
    shutdown: CancellationToken,
) -> Result<(), Error> {
    let mut tasks = Tasks::new();
    for Bound { udp, tcp, .. } in bound {
        let udp = UdpSocket::from_std(udp).map_err(Error::Socket)?;
        let tcp = TcpListener::from_std(tcp).map_err(Error::Socket)?;
        let (udp_shared, udp_shutdown) = (shared.clone(), shutdown.clone());
        tasks.spawn("DNS over UDP", udp::serve(udp, udp_shared, udp_shutdown));
        let (tcp_shared, tcp_shutdown) = (shared.clone(), shutdown.clone());
        tasks.spawn("DNS over TCP", async move {
            tcp::serve(tcp, tcp_shared, tcp_shutdown).await;
            Ok::<(), Error>(())
        });
    }
    while !tasks.is_empty() {
        let ended = tasks.next_ended().await;
        if let Err(error) = ended.result {
            return Err(Error::Socket(std::io::Error::other(error)));
        }
    }
    Ok(())
}

/// The table of a loop, without a lock for each query.
struct Current {
    tables: watch::Receiver<Option<Arc<Table>>>,
    table: Option<Arc<Table>>,
}

impl Current {
    fn new(tables: watch::Receiver<Option<Arc<Table>>>) -> Self {
        let table = tables.borrow().clone();
        Self { tables, table }
    }

    fn get(&mut self) -> Option<&Table> {
        // Without a sender no other table will come.
        if self.tables.has_changed().unwrap_or(false) {
            self.table = self.tables.borrow_and_update().clone();
        }
        self.table.as_deref()
    }
}

/// A query that was asked on.
struct Asked<T> {
    client: T,
    query: Bytes,
    question: Question,
    reply: Option<Bytes>,
}

/// Queries that are being asked on.
struct Forwards<F, T> {
    shared: Arc<Shared<F>>,
    transport: Transport,
    running: JoinSet<Asked<T>>,
    most: usize,
}

impl<F: Forward, T: Send + 'static> Forwards<F, T> {
    fn new(shared: Arc<Shared<F>>, transport: Transport, most: usize) -> Self {
        Self {
            shared,
            transport,
            running: JoinSet::new(),
            most,
        }
    }

    fn is_full(&self) -> bool {
        self.running.len() >= self.most
    }

    fn start(&mut self, client: T, query: &[u8], question: Question) {
        let (shared, transport) = (self.shared.clone(), self.transport);
        let query = Bytes::copy_from_slice(query);
        self.running.spawn(async move {
            let reply = shared.forwarder.forward(query.clone(), transport).await;
            Asked {
                client,
                query,
                question,
                reply,
            }
        });
    }

    /// Writes the reply to what was asked into `out`.
    fn finish(&self, asked: Result<Asked<T>, JoinError>, out: &mut [u8]) -> Option<(T, usize)> {
        let asked = match asked {
            Ok(asked) => asked,
            Err(error) => {
                tracing::error!(target: "dns", "a query was lost while it was asked on: {error}");
                return None;
            }
        };
        let (length, source) = match asked.reply {
            Some(reply) if reply.len() >= wire::HEADER => {
                let limit = answer::limit(&asked.question, self.transport);
                (wire::fit(&reply, limit, out), Source::Upstream)
            }
            _ => {
                let length = answer::fail(&asked.query, &asked.question, out);
                (length, Source::Agent)
            }
        };
        self.shared.metrics.response(&out[..length], source);
        Some((asked.client, length))
    }
}
