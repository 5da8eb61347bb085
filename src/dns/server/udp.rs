//! DNS over UDP: one loop per socket.
//!
//! Queries that have come are answered in batches; between them replies of resolvers and other tasks
//! have their turn. The socket is watched for queries only: the kernel would report room for answers
//! after each that is sent, which wakes the thread for nothing. An answer the kernel has no room for is
//! lost, as UDP may lose it anywhere; clients ask again.
//!
//! Beyond [`MAX_FORWARDED`] queries that wait for resolvers, the next fails at once, so its client can
//! ask another resolver.

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
use crate::lifecycle::Retirement;

/// Most queries that wait for resolvers.
const MAX_FORWARDED: usize = 1024;
/// Queries answered before other tasks have their turn.
const BATCH: usize = 64;

struct Server<F> {
    shared: Arc<Shared<F>>,
    /// Forwarded queries, with their clients and answers.
    pending: JoinSet<(SocketAddr, Vec<u8>)>,
    query: Box<[u8]>,
    out: Vec<u8>,
}

/// Serves for as long as it is polled, or until the socket cannot be watched. At the retirement it stops receiving.
pub(super) async fn serve<F: Forward>(
    socket: UdpSocket,
    shared: Arc<Shared<F>>,
    retirement: Retirement,
) -> io::Result<()> {
    let socket = watch(socket)?;
    let mut server = Server {
        pending: JoinSet::new(),
        shared,
        // One byte more tells what is too long.
        query: vec![0; usize::from(OWN_UDP) + 1].into(),
        out: Vec::new(),
    };
    let mut is_failing = false;
    let mut receiving = Some(retirement.accepting());
    // Made once, as each query would pay for it.
    let mut retired = pin!(retirement.begun());
    loop {
        if retirement.has_begun() {
            receiving = None;
        }
        tokio::select! {
            biased;
            Some(forwarded) = server.pending.join_next(), if !server.pending.is_empty() => match forwarded {
                Ok((client, answer)) => send(socket.get_ref(), &answer, client),
                Err(error) => tracing::error!(target: "dns", "a query was lost while it was forwarded: {error}"),
            },
            readable = socket.readable(), if receiving.is_some() => {
                let mut readable = readable?;
                let drained = server.drain(socket.get_ref());
                if let (Err(error), false) = (&drained, is_failing) {
                    tracing::warn!(target: "dns", "cannot receive DNS queries, next attempt in {} ms: {error}", PAUSE.as_millis());
                }
                is_failing = drained.is_err();
                match drained {
                    Ok(true) => readable.clear_ready(),
                    Ok(false) => yield_now().await,
                    Err(_) => sleep(PAUSE).await,
                }
            }
            () = &mut retired, if receiving.is_some() => {}
            // Nothing is left to do.
            else => pending().await,
        }
    }
}

impl<F: Forward> Server<F> {
    /// Answers up to a batch of queries. Returns whether that was all.
    fn drain(&mut self, socket: &UdpSocket) -> io::Result<bool> {
        let shared = self.shared.clone();
        // Held for a batch: a new table waits a moment.
        let table = shared.tables.borrow();
        for _ in 0..BATCH {
            match socket.recv_from(&mut self.query) {
                Ok((length, client)) => self.answer(socket, length, client, table.as_deref()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
                Err(error) => return Err(error),
            }
        }
        Ok(false)
    }

    /// Answers or forwards the query of this length in the buffer.
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
            Action::Forward(question) if self.pending.len() < MAX_FORWARDED => {
                let (shared, query) = (shared.clone(), Bytes::copy_from_slice(query));
                self.pending.spawn(async move {
                    let forwarding = shared.forward(query, question, Transport::Udp);
                    (client, forwarding.await)
                });
                return;
            }
            Action::Forward(question) => {
                answer::fail(query, &question, out);
                shared.metrics.response(out, Source::Agent);
            }
        }
        send(socket, out, client);
    }
}

fn send(socket: &UdpSocket, message: &[u8], client: SocketAddr) {
    if let Err(error) = socket.send_to(message, client) {
        tracing::debug!(target: "dns", "cannot answer {client}: {error}");
    }
}

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
    use tokio::sync::watch;

    use super::*;
    use crate::dns::answer::Policy;
    use crate::dns::answer::tests::query;
    use crate::dns::asked::Asked;
    use crate::dns::metrics::Metrics;
    use crate::metrics::Registry;

    struct NoResolver;

    impl Forward for NoResolver {
        async fn forward(&self, _: Bytes, _: Transport) -> Option<Bytes> {
            None
        }
    }

    /// A socket, a client of it, and what its server needs, without a name table.
    fn unserved() -> (UdpSocket, UdpSocket, Arc<Shared<NoResolver>>) {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
        socket.set_nonblocking(true).expect("set");
        let client = UdpSocket::bind("127.0.0.1:0").expect("a socket");
        client.set_nonblocking(true).expect("set");
        let address = socket.local_addr().expect("an address");
        client.connect(address).expect("connected");
        let (_tables, tables) = watch::channel(None);
        let shared = Shared {
            forwarder: NoResolver,
            policy: Policy {
                ttl: 30,
                forward_before_first_table: false,
            },
            metrics: Metrics::new(&Registry::default()),
            asked: Asked::default(),
            tables,
        };
        (socket, client, Arc::new(shared))
    }

    #[tokio::test]
    async fn a_flood_leaves_other_tasks_their_turn() {
        let (socket, client, shared) = unserved();
        let mut serving = std::pin::pin!(serve(socket, shared, Retirement::default()));
        let sent = 2 * BATCH + 1;
        for _ in 0..sent {
            client.send(&query("a", 1, None)).expect("sent");
        }
        let mut answered = 0;
        while answered < sent {
            // The runtime notices what has come.
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
