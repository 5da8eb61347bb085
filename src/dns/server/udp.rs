//! DNS over UDP: one loop per socket.
//!
//! What has come is answered in one go, up to a batch; then answers of others and other tasks have
//! their turn, however much more there is. The socket is watched for queries only: the kernel would
//! report room for answers after each that is sent, which wakes the thread for nothing.
//!
//! Does not let a full machine grow the agent: beyond [`MOST_FORWARDS`] queries waiting for others,
//! the next is failed at once, so its client can ask another resolver.

use std::future::poll_fn;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::task::yield_now;
use tokio::time::sleep;

use super::{Forwards, LARGEST, REST, Shared};
use crate::dns::answer::{self, Answer};
use crate::dns::metrics::Source;
use crate::dns::table::Table;
use crate::dns::wire::{Name, OWN_UDP};
use crate::dns::{Forward, Transport};

/// Most queries that wait for others.
const MOST_FORWARDS: usize = 1024;
/// Queries taken in one go, before others have their turn.
const BATCH: usize = 64;

/// Receives queries and writes answers, each in a buffer of its own.
struct Loop<F> {
    shared: Arc<Shared<F>>,
    forwards: Forwards<F, SocketAddr>,
    query: Box<[u8]>,
    name: Name,
    out: Box<[u8]>,
    /// Whether nothing could be received lately.
    is_failing: bool,
}

/// Why a loop pauses.
enum Pause {
    /// Others have their turn.
    Turn,
    /// Nothing can be received.
    Failure,
    /// There is no room for the answer of this length, to this client.
    NoRoom(usize, SocketAddr),
}

/// Serves for as long as it is polled, or until the socket fails.
pub(super) async fn serve<F: Forward>(socket: UdpSocket, shared: Arc<Shared<F>>) -> io::Result<()> {
    let socket = watch(socket, Interest::READABLE)?;
    let mut serving = Loop {
        forwards: Forwards::new(shared.clone(), Transport::Udp, MOST_FORWARDS),
        shared,
        // One byte more tells what is too long.
        query: vec![0; usize::from(OWN_UDP) + 1].into(),
        name: Name::new(),
        out: vec![0; LARGEST].into(),
        is_failing: false,
    };
    loop {
        match poll_fn(|context| serving.poll(&socket, context)).await? {
            Pause::Turn => yield_now().await,
            Pause::Failure => sleep(REST).await,
            Pause::NoRoom(length, client) => {
                if let Err(error) = send_late(&socket, &serving.out[..length], client).await {
                    not_sent(client, &error);
                }
            }
        }
    }
}

impl<F: Forward> Loop<F> {
    fn poll(
        &mut self,
        socket: &AsyncFd<UdpSocket>,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<Pause>> {
        loop {
            while !self.forwards.running.is_empty()
                && let Poll::Ready(Some(asked)) = self.forwards.running.poll_join_next(context)
            {
                let out = &mut self.out;
                if let Some((client, length)) = self.forwards.finish(asked, out)
                    && let Some(pause) = send(socket.get_ref(), &out[..length], client)
                {
                    return Poll::Ready(Ok(pause));
                }
            }
            let mut readable = ready!(socket.poll_read_ready(context))?;
            match self.drain(socket.get_ref()) {
                Some(pause) => return Poll::Ready(Ok(pause)),
                None => readable.clear_ready(),
            }
        }
    }

    /// Answers what has come; nothing if that was all.
    fn drain(&mut self, socket: &UdpSocket) -> Option<Pause> {
        let shared = self.shared.clone();
        // Held for a batch: who swaps tables waits a moment, and frees the old one.
        let table = shared.tables.borrow();
        for _ in 0..BATCH {
            let (length, client) = match socket.recv_from(&mut self.query) {
                Ok(received) => received,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return None,
                Err(error) => {
                    if !self.is_failing {
                        tracing::warn!(target: "dns", "cannot receive queries, resting: {error}");
                    }
                    self.is_failing = true;
                    return Some(Pause::Failure);
                }
            };
            self.is_failing = false;
            if let Some(pause) = self.act(socket, length, client, table.as_deref()) {
                return Some(pause);
            }
        }
        Some(Pause::Turn)
    }

    /// Answers the query of this length in the buffer, or passes it on.
    fn act(
        &mut self,
        socket: &UdpSocket,
        length: usize,
        client: SocketAddr,
        table: Option<&Table>,
    ) -> Option<Pause> {
        let Self {
            shared, name, out, ..
        } = self;
        let query = &self.query[..length];
        let outcome = answer::answer(query, Transport::Udp, table, shared.policy, name, out);
        shared.count(&outcome, out);
        let length = match (outcome.answer, outcome.question) {
            (Answer::Reply(length), _) => length,
            (Answer::Forward, Some(question)) if !self.forwards.is_full() => {
                self.forwards.start(client, query, question);
                return None;
            }
            (Answer::Forward, Some(question)) => {
                shared.metrics.overflow();
                let length = answer::fail(query, &question, out);
                shared.metrics.response(&out[..length], Source::Agent);
                length
            }
            (Answer::Forward | Answer::Drop, _) => return None,
        };
        send(socket, &out[..length], client)
    }
}

/// Sends an answer; a pause if there is no room for it.
fn send(socket: &UdpSocket, message: &[u8], client: SocketAddr) -> Option<Pause> {
    match socket.send_to(message, client) {
        Ok(_) => None,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            Some(Pause::NoRoom(message.len(), client))
        }
        Err(error) => {
            not_sent(client, &error);
            None
        }
    }
}

/// Waits for room. It is rare, so a second watch of the socket, for as long, costs less than one
/// that is always there.
async fn send_late(
    socket: &AsyncFd<UdpSocket>,
    message: &[u8],
    client: SocketAddr,
) -> io::Result<usize> {
    let socket = watch(socket.get_ref().try_clone()?, Interest::WRITABLE)?;
    let send = |socket: &UdpSocket| socket.send_to(message, client);
    socket.async_io(Interest::WRITABLE, send).await
}

#[expect(
    deprecated,
    reason = "unsound only for types that give up their descriptor; a socket keeps it"
)]
fn watch(socket: UdpSocket, interest: Interest) -> io::Result<AsyncFd<UdpSocket>> {
    AsyncFd::with_interest(socket, interest)
}

fn not_sent(client: SocketAddr, error: &io::Error) {
    tracing::debug!(target: "dns", "cannot answer {client}: {error}");
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use tokio::sync::watch;

    use super::*;
    use crate::dns::answer::Policy;
    use crate::dns::answer::tests::query;
    use crate::dns::metrics::Metrics;
    use crate::metrics::Registry;

    struct Nobody;

    impl Forward for Nobody {
        async fn forward(&self, _: Bytes, _: Transport) -> Option<Bytes> {
            None
        }
    }

    /// A socket, a client of it, and what is shared by those who serve it without a table.
    fn unserved() -> (UdpSocket, UdpSocket, Arc<Shared<Nobody>>) {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
        socket.set_nonblocking(true).expect("set");
        let client = UdpSocket::bind("127.0.0.1:0").expect("a socket");
        client.set_nonblocking(true).expect("set");
        let address = socket.local_addr().expect("an address");
        client.connect(address).expect("connected");
        let (_tables, tables) = watch::channel(None);
        let shared = Shared {
            forwarder: Nobody,
            policy: Policy {
                ttl: 30,
                forward_before_first_table: false,
            },
            metrics: Metrics::new(&Registry::default()),
            tables,
        };
        (socket, client, Arc::new(shared))
    }

    #[tokio::test]
    async fn a_flood_leaves_others_their_turn() {
        let (socket, client, shared) = unserved();
        let mut serving = std::pin::pin!(serve(socket, shared));
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
