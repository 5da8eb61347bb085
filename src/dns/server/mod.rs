//! Serves queries on bound sockets.
//!
//! Each socket has a loop and each TCP connection a task. Answers from the name table are sent at once;
//! a query by UDP that is forwarded becomes a task in a bounded set of its loop, so a slow resolver delays
//! only the clients that asked it.

mod tcp;
mod udp;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::net::TcpListener;
use tokio::sync::watch;

use super::answer::{self, Action, Policy};
use super::asked::Asked;
use super::metrics::{Metrics, Source};
use super::name_table::NameTable;
use super::wire::{self, Question};
use super::{Forward, Transport};
use crate::lifecycle::{BoxError, CancellationToken, Retirement, Tasks};

/// Pause after a failure of a socket: what is missing is missing for a while.
const PAUSE: Duration = Duration::from_millis(100);

/// Both sockets of one address.
pub type Bound = (std::net::UdpSocket, std::net::TcpListener);

/// What all loops share.
pub(super) struct Shared<F> {
    pub(super) forwarder: F,
    pub(super) policy: Policy,
    pub(super) metrics: Metrics,
    pub(super) asked: Asked,
    pub(super) tables: watch::Receiver<Option<Arc<NameTable>>>,
}

impl<F: Forward> Shared<F> {
    /// Answers a query in `out`, and counts both.
    fn answer(
        &self,
        query: &[u8],
        transport: Transport,
        table: Option<&NameTable>,
        out: &mut Vec<u8>,
    ) -> Action {
        let action = answer::answer(query, transport, table, self.policy, out);
        if let Action::Reply(_) | Action::Forward(_) = &action {
            self.metrics.requests.inc();
        }
        if let Action::Reply(question) = &action {
            self.metrics.response(out, Source::Agent);
            if table.is_some()
                && let Some(name) = question.text(query)
            {
                self.asked.remember(&name);
            }
        }
        action
    }

    /// The answer to a forwarded query, which it counts.
    async fn forward(&self, query: Bytes, question: Question, transport: Transport) -> Vec<u8> {
        let mut out = Vec::new();
        let reply = self.forwarder.forward(query.clone(), transport).await;
        let source = match reply {
            Some(reply) if reply.len() >= wire::HEADER => {
                wire::fit(&reply, question.limit(transport), &mut out);
                Source::Upstream
            }
            _ => {
                answer::fail(&query, &question, &mut out);
                Source::Agent
            }
        };
        self.metrics.response(&out, source);
        out
    }
}

/// Serves until `shutdown`, or until a socket cannot be used; queries under way end with it. At the retirement the
/// sockets are not read any more, and queries under way are answered.
pub(super) async fn serve<F: Forward>(
    bound: Vec<Bound>,
    shared: Arc<Shared<F>>,
    retirement: Retirement,
    shutdown: CancellationToken,
) -> Result<(), BoxError> {
    let mut tasks = Tasks::default();
    for (udp, tcp) in bound {
        let tcp = TcpListener::from_std(tcp)?;
        tasks.spawn(
            "DNS over UDP",
            udp::serve(udp, shared.clone(), retirement.clone()),
        );
        tasks.spawn(
            "DNS over TCP",
            tcp::serve(tcp, shared.clone(), retirement.clone()),
        );
    }
    tokio::select! {
        // Heard here, as each loop would pay for listening with every query.
        () = shutdown.cancelled() => Ok(()),
        ended = tasks.next_ended() => ended.result,
    }
}
