//! DNS over UDP: one loop per socket, which empties it before it looks elsewhere.
//!
//! Does not let a full machine grow the agent: beyond [`MOST_FORWARDS`] queries waiting for others,
//! the next is failed at once, so its client can ask another resolver.

use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;

use tokio::net::UdpSocket;

use super::{Current, Forwards, LARGEST, Shared};
use crate::dns::answer::{self, Answer};
use crate::dns::metrics::Source;
use crate::dns::{Forward, Transport};
use crate::lifecycle::CancellationToken;

/// Most queries that wait for others.
const MOST_FORWARDS: usize = 1024;
/// Queries taken in one go, before answers of others are looked for.
const BATCH: usize = 64;

struct Loop<F> {
    socket: UdpSocket,
    shared: Arc<Shared<F>>,
    current: Current,
    forwards: Forwards<F, SocketAddr>,
    query: Box<[u8]>,
    out: Box<[u8]>,
}

/// Serves until `shutdown`, or until the socket fails.
pub(super) async fn serve<F: Forward>(
    socket: UdpSocket,
    shared: Arc<Shared<F>>,
    shutdown: CancellationToken,
) -> io::Result<()> {
    let mut serving = Loop {
        socket,
        current: Current::new(shared.tables.clone()),
        forwards: Forwards::new(shared.clone(), Transport::Udp, MOST_FORWARDS),
        shared,
        query: vec![0; LARGEST].into(),
        out: vec![0; LARGEST].into(),
    };
    let mut stopped = pin!(shutdown.cancelled());
    loop {
        tokio::select! {
            () = &mut stopped => return Ok(()),
            Some(asked) = serving.forwards.running.join_next() => {
                if let Some((client, length)) = serving.forwards.finish(asked, &mut serving.out) {
                    serving.send(client, length).await;
                }
            }
            ready = serving.socket.readable() => {
                ready?;
                serving.drain().await;
            }
        }
    }
}

impl<F: Forward> Loop<F> {
    async fn drain(&mut self) {
        for _ in 0..BATCH {
            match self.socket.try_recv_from(&mut self.query) {
                Ok((length, client)) => self.take(length, client).await,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // What came back for an answer nobody waited for.
                Err(error) => tracing::debug!(target: "dns", "an answer did not arrive: {error}"),
            }
        }
    }

    async fn take(&mut self, length: usize, client: SocketAddr) {
        let query = &self.query[..length];
        let table = self.current.get();
        let policy = self.shared.policy;
        let outcome = answer::answer(query, Transport::Udp, table, policy, &mut self.out);
        if let Some(question) = &outcome.question {
            self.shared.metrics.request(question.kind);
        }
        let length = match (outcome.answer, outcome.question) {
            (Answer::Reply(length), _) => length,
            (Answer::Forward, Some(question)) if !self.forwards.is_full() => {
                self.forwards.start(client, query, question);
                return;
            }
            (Answer::Forward, Some(question)) => {
                self.shared.metrics.overflow();
                answer::fail(query, &question, &mut self.out)
            }
            (Answer::Forward | Answer::Drop, _) => return,
        };
        self.shared
            .metrics
            .response(&self.out[..length], Source::Agent);
        self.send(client, length).await;
    }

    async fn send(&self, client: SocketAddr, length: usize) {
        let message = &self.out[..length];
        let sent = match self.socket.try_send_to(message, client) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.socket.send_to(message, client).await
            }
            sent => sent,
        };
        if let Err(error) = sent {
            tracing::debug!(target: "dns", "cannot answer {client}: {error}");
        }
    }
}
