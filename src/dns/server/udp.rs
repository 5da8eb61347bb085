//! Serves DNS over UDP: one loop per socket.
//!
//! Received queries are answered in batches; between batches, replies of resolvers and other tasks get
//! their turn. The socket is watched for queries only: the kernel would report free buffer space after
//! each answer and wake the thread for nothing. An answer that does not fit in the kernel's buffer is
//! lost, as on any hop of UDP; clients retry.
//!
//! While [`MAX_FORWARDED`] queries wait for resolvers, the next query fails at once, so that its client
//! can try another resolver.

use std::future::pending;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::pin::pin;
use std::sync::Arc;

use bytes::Bytes;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::task::{JoinSet, yield_now};
use tokio::time::sleep;

use super::{PAUSE, Shared};
use crate::dns::answer::{self, Action};
use crate::dns::metrics::Source;
use crate::dns::name_table::NameTable;
use crate::dns::wire::OWN_UDP;
use crate::dns::{Forward, Transport};
use crate::runtime::lifecycle::StopAccepting;

const MAX_FORWARDED: usize = 1024;
/// Queries that are answered before other tasks get their turn.
const BATCH: usize = 64;

struct Server<F> {
    shared: Arc<Shared<F>>,
    /// Forwarded queries. Each task returns the client and the answer.
    forwards: JoinSet<(SocketAddr, Vec<u8>)>,
    query: Box<[u8]>,
    out: Vec<u8>,
}

/// The end of a batch.
enum BatchEnd {
    SocketEmpty,
    /// The batch is full, and more queries may be waiting.
    MoreQueries,
}

/// Serves as long as it is polled, or until the socket cannot be watched. It stops receiving when the
/// `stop_accepting` begins.
pub(super) async fn serve<F: Forward>(
    socket: UdpSocket,
    shared: Arc<Shared<F>>,
    stop_accepting: StopAccepting,
) -> io::Result<()> {
    let socket = watch(socket)?;
    let mut server = Server {
        forwards: JoinSet::new(),
        shared,
        // One byte more than allowed, to recognise longer queries.
        query: vec![0; usize::from(OWN_UDP) + 1].into(),
        out: Vec::new(),
    };
    let mut is_failing = false;
    // Dropped when this socket stops receiving, which `StopAccepting::begin` waits for.
    let mut accept_guard = Some(stop_accepting.accept_guard());
    // Created once, because a new one for each query costs time.
    let mut accepting_ends = pin!(stop_accepting.wait_for_begin());
    loop {
        if stop_accepting.has_begun() {
            accept_guard = None;
        }
        tokio::select! {
            biased;
            Some(forwarded) = server.forwards.join_next(), if !server.forwards.is_empty() => match forwarded {
                Ok((client, answer)) => send(socket.get_ref(), &answer, client),
                Err(error) => tracing::error!(target: "dns", "a query was lost while it was forwarded: {error}"),
            },
            readable = socket.readable(), if accept_guard.is_some() => {
                let mut readable = readable?;
                let batch = server.answer_batch(socket.get_ref());
                match &batch {
                    Ok(BatchEnd::SocketEmpty) => readable.clear_ready(),
                    Ok(BatchEnd::MoreQueries) => yield_now().await,
                    Err(error) => {
                        if !is_failing {
                            tracing::warn!(target: "dns", "cannot receive DNS queries, next attempt in {} ms: {error}", PAUSE.as_millis());
                        }
                        sleep(PAUSE).await;
                    }
                }
                is_failing = batch.is_err();
            }
            () = &mut accepting_ends, if accept_guard.is_some() => {}
            // The socket stops receiving, and all forwarded queries are answered.
            else => pending().await,
        }
    }
}

impl<F: Forward> Server<F> {
    /// Answers or forwards up to [`BATCH`] queries. Fails if the socket cannot be read.
    fn answer_batch(&mut self, socket: &UdpSocket) -> io::Result<BatchEnd> {
        let shared = self.shared.clone();
        // Locked for a batch, during which a new table waits.
        let table = shared.dns.tables.borrow();
        for _ in 0..BATCH {
            match socket.recv_from(&mut self.query) {
                Ok((length, client)) => self.answer(socket, length, client, table.as_deref()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Ok(BatchEnd::SocketEmpty);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(BatchEnd::MoreQueries)
    }

    /// Answers or forwards the query in the first `length` bytes of the buffer.
    fn answer(
        &mut self,
        socket: &UdpSocket,
        length: usize,
        client: SocketAddr,
        table: Option<&NameTable>,
    ) {
        let Self { shared, out, .. } = self;
        let query = &self.query[..length];
        match shared.answer(query, Transport::Udp, table, out) {
            Action::Drop => return,
            Action::Reply(_) | Action::Refuse => {}
            Action::Forward(question) if self.forwards.len() < MAX_FORWARDED => {
                let shared = shared.clone();
                let query = Bytes::copy_from_slice(query);
                self.forwards.spawn(async move {
                    (client, shared.forward(query, question, Transport::Udp).await)
                });
                return;
            }
            Action::Forward(question) => {
                answer::write_servfail(query, &question, out);
                shared.dns.metrics.count_response(out, Source::Agent);
            }
        }
        send(socket, out, client);
    }
}

/// Sends a message without waiting. If the kernel's buffer is full, the message is lost.
fn send(socket: &UdpSocket, message: &[u8], client: SocketAddr) {
    if let Err(error) = socket.send_to(message, client) {
        tracing::debug!(target: "dns", "cannot answer {client}: {error}");
    }
}

/// Watches a socket for queries only.
#[expect(
    deprecated,
    reason = "unsound only for types that give up their descriptor; a socket keeps it"
)]
fn watch(socket: UdpSocket) -> io::Result<AsyncFd<UdpSocket>> {
    AsyncFd::with_interest(socket, Interest::READABLE)
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::task::Poll;

    use bytes::Bytes;

    use super::*;
    use crate::dns::answer::Policy;
    use crate::dns::answer::tests::query;
    use crate::dns::{Dns, SearchDomains};
    use crate::metrics::Registry;

    struct NoResolver;

    impl Forward for NoResolver {
        async fn forward(&self, _: Bytes, _: Transport) -> Option<Bytes> {
            None
        }
    }

    /// Returns a socket, a client that is connected to it, and the state for its server, without a name table.
    fn unserved() -> (UdpSocket, UdpSocket, Arc<Shared<NoResolver>>) {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
        socket.set_nonblocking(true).expect("set");
        let client = UdpSocket::bind("127.0.0.1:0").expect("a socket");
        client.set_nonblocking(true).expect("set");
        let address = socket.local_addr().expect("an address");
        client.connect(address).expect("connected");
        let shared = Shared {
            dns: Dns::new(SearchDomains::default(), &Registry::default()),
            forwarder: NoResolver,
            policy: Policy { ttl: 30, forward_before_first_table: false },
        };
        (socket, client, Arc::new(shared))
    }

    #[tokio::test]
    async fn a_flood_leaves_other_tasks_their_turn() {
        let (socket, client, shared) = unserved();
        let mut serving = std::pin::pin!(serve(socket, shared, StopAccepting::default()));
        let sent = 2 * BATCH + 1;
        for _ in 0..sent {
            client.send(&query("a", 1, None)).expect("sent");
        }
        let mut answered = 0;
        while answered < sent {
            // Lets the runtime notice that queries have arrived.
            yield_now().await;
            poll_fn(|context| {
                assert!(serving.as_mut().poll(context).is_pending());
                Poll::Ready(())
            })
            .await;
            let before = answered;
            while client.recv(&mut [0; 512]).is_ok() {
                answered += 1;
            }
            assert!(answered - before <= BATCH, "{} at once", answered - before);
        }
    }
}
