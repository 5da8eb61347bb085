//! Serves queries on bound sockets.
//!
//! Each socket has a loop and each TCP connection a task. Answers from the name table are sent at once;
//! a forwarded query becomes a task in a bounded set of its loop, so a slow resolver delays only the
//! clients that asked it.

mod tcp;
mod udp;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::answer::{self, Action, Policy};
use super::asked::Asked;
use super::metrics::{Metrics, Source};
use super::name_table::NameTable;
use super::wire::{self, Question};
use super::{Error, Forward, Transport};
use crate::lifecycle::{CancellationToken, Tasks};

/// Pause after a failure of a socket: what is missing is missing for a while.
const PAUSE: Duration = Duration::from_millis(100);

/// Both sockets of one address.
pub(super) type Bound = (std::net::UdpSocket, std::net::TcpListener);

/// What all loops share.
pub(super) struct Shared<F> {
    pub(super) forwarder: F,
    pub(super) policy: Policy,
    pub(super) metrics: Metrics,
    pub(super) asked: Asked,
    pub(super) tables: watch::Receiver<Option<Arc<NameTable>>>,
}

impl<F> Shared<F> {
    /// Answers a query in `out`, and counts both.
    fn answer(
        &self,
        query: &[u8],
        transport: Transport,
        table: Option<&NameTable>,
        out: &mut Vec<u8>,
    ) -> Action {
        let action = answer::answer(query, transport, table, self.policy, out);
        if let Action::Reply(question) | Action::Forward(question) = &action {
            self.metrics.request(question.kind);
        }
        match action {
            Action::Reply(question) => {
                self.metrics.response(out, Source::Agent);
                if table.is_some()
                    && let Some(name) = question.text(query)
                {
                    self.asked.remember(&name);
                }
            }
            Action::Refuse => self.metrics.refusals.inc(),
            Action::Forward(_) | Action::Drop => {}
        }
        action
    }
}

/// Serves until `shutdown`, or until a socket cannot be used; queries under way end with it.
pub(super) async fn serve<F: Forward>(
    bound: Vec<Bound>,
    shared: Arc<Shared<F>>,
    shutdown: CancellationToken,
) -> Result<(), Error> {
    let mut tasks = Tasks::new();
    for (udp, tcp) in bound {
        let tcp = TcpListener::from_std(tcp).map_err(Error::Socket)?;
        tasks.spawn("DNS over UDP", udp::serve(udp, shared.clone()));
        tasks.spawn("DNS over TCP", tcp::serve(tcp, shared.clone()));
    }
    tokio::select! {
        // Heard here, as each loop would pay for listening with every query.
        () = shutdown.cancelled() => Ok(()),
        ended = tasks.next_ended() => {
            ended.result.map_err(|error| Error::Socket(io::Error::other(error)))
        }
    }
}

/// Forwarded queries that wait for their replies.
struct Pending<F, T> {
    shared: Arc<Shared<F>>,
    transport: Transport,
    /// Client, query, its question, and the reply to it.
    running: JoinSet<(T, Bytes, Question, Option<Bytes>)>,
    most: usize,
}

impl<F: Forward, T: Send + 'static> Pending<F, T> {
    fn new(shared: Arc<Shared<F>>, transport: Transport, most: usize) -> Self {
        Self {
            shared,
            transport,
            running: JoinSet::new(),
            most,
        }
    }

    fn is_empty(&self) -> bool {
        self.running.is_empty()
    }

    fn is_full(&self) -> bool {
        self.running.len() >= self.most
    }

    fn start(&mut self, client: T, query: &[u8], question: Question) {
        let (shared, transport) = (self.shared.clone(), self.transport);
        let query = Bytes::copy_from_slice(query);
        self.running.spawn(async move {
            let reply = shared.forwarder.forward(query.clone(), transport).await;
            (client, query, question, reply)
        });
    }

    /// Writes the next answer to `out` and returns its client. Waits while there is none; no query is
    /// lost if the caller stops waiting.
    async fn next(&mut self, out: &mut Vec<u8>) -> Option<T> {
        let (client, query, question, reply) = match self.running.join_next().await? {
            Ok(forwarded) => forwarded,
            Err(error) => {
                tracing::error!(target: "dns", "a query was lost while it was forwarded: {error}");
                return None;
            }
        };
        let source = match reply {
            Some(reply) if reply.len() >= wire::HEADER => {
                wire::fit(&reply, question.limit(self.transport), out);
                Source::Upstream
            }
            _ => {
                answer::fail(&query, &question, out);
                Source::Agent
            }
        };
        self.shared.metrics.response(out, source);
        Some(client)
    }
}
