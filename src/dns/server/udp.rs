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
use crate::lifecycle::Retirement;

const MAX_FORWARDED: usize = 1024;
/// Queries that are answered before other tasks get their turn.
const BATCH: usize = 64;

struct Server<F> {
    shared: Arc<Shared<F>>,
    /// Forwards queries. Each task returns the client and the answer.
    pending: JoinSet<(SocketAddr, Vec<u8>)>,
    query: Box<[u8]>,
    out: Vec<u8>,
}

/// Serves as long as it is polled, or until the socket cannot be watched. It stops receiving when the
/// retirement begins.
pub(super) async fn serve<F: Forward>(
    socket: UdpSocket,
    shared: Arc<Shared<F>>,
    retirement: Retirement,
) -> io::Result<()> {
    let socket = watch(socket)?;
    let mut server = Server {
        pending: JoinSet::new(),
        shared,
        // One byte more than allowed, to recognise longer queries.
        query: vec![0; usize::from(OWN_UDP) + 1].into(),
        out: Vec::new(),
    };
    let mut is_failing = false;
    let mut receiving = Some(retirement.accepting());
    // Created once, because a new one for each query costs time.
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
                match &drained {
                    Ok(true) => readable.clear_ready(),
                    Ok(false) => yield_now().await,
                    Err(error) => {
                        if !is_failing {
                            tracing::warn!(target: "dns", "cannot receive DNS queries, next attempt in {} ms: {error}", PAUSE.as_millis());
                        }
                        sleep(PAUSE).await;
                    }
                }
                is_failing = drained.is_err();
            }
            () = &mut retired, if receiving.is_some() => {}
            // The retirement has begun, and all forwarded queries are answered.
            else => pending().await,
        }
    }
}

impl<F: Forward> Server<F> {
    /// Answers up to a batch of queries. Returns true if no more are waiting.
    fn drain(&mut self, socket: &UdpSocket) -> io::Result<bool> {
        let shared = self.shared.clone();
        // Locked for a batch, during which a new table waits.
        let table = shared.dns.tables.borrow();
        for _ in 0..BATCH {
            match socket.recv_from(&mut self.query) {
                Ok((length, client)) => self.answer(socket, length, client, table.as_deref()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
                Err(error) => return Err(error),
            }
        }
        Ok(false)
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
            Action::Forward(question) if self.pending.len() < MAX_FORWARDED => {
                let (shared, query) = (shared.clone(), Bytes::copy_from_slice(query));
                self.pending.spawn(async move {
                    let answer = shared.forward(query, question, Transport::Udp).await;
                    (client, answer)
                });
                return;
            }
            Action::Forward(question) => {
                answer::write_servfail(query, &question, out);
                shared.dns.metrics.response(out, Source::Agent);
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

    /// A socket, a client of it, and what its server needs, without a name table.
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
            policy: Policy {
                ttl: 30,
                forward_before_first_table: false,
            },
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
            // The runtime learns that queries have arrived.
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
