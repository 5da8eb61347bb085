//! Serves queries on bound sockets.
//!
//! A loop for each socket and a task for each TCP connection. A table's answer is sent in place; a
//! query for others becomes a task in a bounded set of its loop, so that nobody waits for a slow
//! resolver but who asked it.
//!
//! Does not judge queries: `super::answer` does.

mod tcp;
mod udp;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::{JoinError, JoinSet};

use super::answer::{self, Answer, Outcome, Policy};
use super::metrics::{Metrics, Source};
use super::table::Table;
use super::wire::{self, Question};
use super::{Error, Forward, Transport};
use crate::lifecycle::{CancellationToken, Tasks};

/// Room for any message.
const LARGEST: usize = u16::MAX as usize;
/// Rest after a failure of a socket: what is missing is missing for a while.
const REST: Duration = Duration::from_millis(100);

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

impl<F> Shared<F> {
    /// Counts what became of a message, whose answer, if there is one already, is in `out`.
    fn count(&self, outcome: &Outcome, out: &[u8]) {
        if let Some(question) = &outcome.question {
            self.metrics.request(question.kind);
        }
        match (outcome.answer, outcome.question) {
            (Answer::Reply(length), Some(_)) => {
                self.metrics.response(&out[..length], Source::Agent)
            }
            (Answer::Reply(_), None) => self.metrics.refusal(),
            (Answer::Forward | Answer::Drop, _) => {}
        }
    }
}

/// Serves until `shutdown`, or until a socket fails for good; queries under way end with it.
pub(super) async fn serve<F: Forward>(
    bound: Vec<Bound>,
    shared: Arc<Shared<F>>,
    shutdown: CancellationToken,
) -> Result<(), Error> {
    let mut tasks = Tasks::new();
    for Bound { udp, tcp, .. } in bound {
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
