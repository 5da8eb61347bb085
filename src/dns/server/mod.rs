//! Serves queries on bound sockets.
//!
//! Each socket has a loop and each TCP connection a task. Answers from the name table are sent at once.
//! A UDP query that is forwarded becomes a task in a bounded set of its loop, so a slow resolver delays
//! only the clients that need it.

mod tcp;
mod udp;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::net::TcpListener;

use super::answer::{self, Action, Policy};
use super::metrics::Source;
use super::name_table::NameTable;
use super::wire::{self, Question};
use super::{Dns, Forward, Transport};
use crate::runtime::lifecycle::{BoxError, CancellationToken, StopAccepting, Tasks};

/// Wait after an error of a socket, because missing memory or descriptors stay missing for a while.
const PAUSE: Duration = Duration::from_millis(100);

/// The UDP and the TCP socket of one address.
pub type Bound = (std::net::UdpSocket, std::net::TcpListener);

/// State that all loops share.
pub(super) struct Shared<F> {
    pub(super) dns: Dns,
    pub(super) forwarder: F,
    pub(super) policy: Policy,
}

impl<F: Forward> Shared<F> {
    /// Decides on a query as [`answer::answer`] does, counts the query and the response, and remembers a name
    /// that the table has.
    pub(super) fn answer(
        &self,
        query: &[u8],
        transport: Transport,
        table: Option<&NameTable>,
        out: &mut Vec<u8>,
    ) -> Action {
        let action = answer::answer(query, transport, table, self.policy, out);
        if let Action::Reply(_) | Action::Forward(_) = &action {
            self.dns.metrics.requests.inc();
        }
        if let Action::Reply(question) = &action {
            self.dns.metrics.count_response(out, Source::Agent);
            if let Some(name) = question.text(query) {
                if table.is_some() {
                    tracing::debug!(target: "dns", "response for hostname {:?} (found=true)", String::from_utf8_lossy(&name));
                    self.dns.remember(&name);
                } else {
                    tracing::debug!(target: "dns", "dns request for host {:?} before lookup table is loaded", String::from_utf8_lossy(&name));
                }
            }
        } else if let Action::Forward(question) = &action {
            tracing::debug!(
                target: "dns",
                "response for hostname {:?} not found in dns proxy, querying upstream",
                String::from_utf8_lossy(&question.text(query).unwrap_or_default())
            );
        }
        action
    }

    /// Forwards a query, and returns and counts the response: SERVFAIL if no resolver replies.
    async fn forward(&self, query: Bytes, question: Question, transport: Transport) -> Vec<u8> {
        let mut out = Vec::new();
        let reply = self.forwarder.forward(query.clone(), transport).await;
        if let Some(reply) = reply.filter(|reply| reply.len() >= wire::HEADER) {
            out = reply.into();
            wire::truncate(&mut out, question.limit(transport));
            self.dns.metrics.count_response(&out, Source::Upstream);
        } else {
            answer::write_servfail(&query, &question, &mut out);
            self.dns.metrics.count_response(&out, Source::Agent);
        }
        out
    }
}

/// Serves until `shutdown` or until a socket cannot be used, which also drops running queries. After
/// `stop_accepting` has begun, no queries are received over UDP and no connections are accepted; open connections are
/// served, and running queries are answered.
pub(super) async fn serve<F: Forward>(
    bound: Vec<Bound>,
    shared: Arc<Shared<F>>,
    stop_accepting: StopAccepting,
    shutdown: CancellationToken,
) -> Result<(), BoxError> {
    let mut tasks = Tasks::default();
    for (udp, tcp) in bound {
        let tcp = TcpListener::from_std(tcp)?;
        tasks.spawn("DNS over UDP", udp::serve(udp, shared.clone(), stop_accepting.clone()));
        tasks.spawn("DNS over TCP", tcp::serve(tcp, shared.clone(), stop_accepting.clone()));
    }
    tokio::select! {
        // Here and not in the loops, which would poll it with every query.
        () = shutdown.cancelled() => Ok(()),
        ended = tasks.next_ended() => ended.result,
    }
}
