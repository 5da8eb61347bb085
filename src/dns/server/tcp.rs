//! DNS over TCP: a task per connection, answers as they become ready, as RFC 7766 allows.
//!
//! A connection has at most [`MAX_FORWARDED`] queries that wait for resolvers; the next is read when one
//! is answered. A silent connection is closed, sooner before its first query. While there are
//! [`MAX_CONNECTIONS`], new ones wait in the kernel.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::{PAUSE, Pending, Shared};
use crate::clock::after;
use crate::dns::answer::Action;
use crate::dns::{Forward, Transport};
use crate::lifecycle::Tasks;

const MAX_CONNECTIONS: usize = 256;
const MAX_FORWARDED: usize = 64;
/// How long a new connection may be silent.
const FIRST: Duration = Duration::from_secs(2);
/// How long it may be later, and how long it may take to read an answer.
const IDLE: Duration = Duration::from_secs(8);

struct Connection<F> {
    stream: TcpStream,
    shared: Arc<Shared<F>>,
    pending: Pending<F, ()>,
    received: BytesMut,
    out: Vec<u8>,
    deadline: Instant,
    /// Whether the client has closed its side.
    is_finished: bool,
}

/// Serves for as long as it is polled.
pub(super) async fn serve<F: Forward>(
    listener: TcpListener,
    shared: Arc<Shared<F>>,
) -> io::Result<()> {
    let mut connections = Tasks::new();
    loop {
        tokio::select! {
            ended = connections.next_ended() => {
                if let Err(error) = ended.result {
                    tracing::debug!(target: "dns", "a DNS connection ended: {error}");
                }
            }
            accepted = listener.accept(), if connections.len() < MAX_CONNECTIONS => match accepted {
                Ok((stream, _)) => {
                    // Answers are small and come one by one. Without it they come later.
                    let _ = stream.set_nodelay(true);
                    let connection = Connection::new(stream, shared.clone());
                    connections.spawn("DNS connection", connection.run());
                }
                Err(error) => {
                    tracing::warn!(target: "dns", "cannot accept a connection, pausing: {error}");
                    sleep(PAUSE).await;
                }
            },
        }
    }
}

impl<F: Forward> Connection<F> {
    fn new(stream: TcpStream, shared: Arc<Shared<F>>) -> Self {
        Self {
            stream,
            pending: Pending::new(shared.clone(), Transport::Tcp, MAX_FORWARDED),
            shared,
            received: BytesMut::new(),
            out: Vec::new(),
            deadline: after(FIRST),
            is_finished: false,
        }
    }

    async fn run(mut self) -> io::Result<()> {
        loop {
            while !self.pending.is_full()
                && let Some(query) = next_message(&mut self.received)
            {
                self.answer(&query).await?;
            }
            let is_waiting = !self.pending.is_empty();
            let reads = !self.is_finished && !self.pending.is_full();
            if self.is_finished && !is_waiting {
                return Ok(());
            }
            tokio::select! {
                answered = self.pending.next(&mut self.out), if is_waiting => {
                    if answered.is_some() {
                        self.send().await?;
                    }
                }
                read = self.stream.read_buf(&mut self.received), if reads => {
                    self.is_finished = read? == 0;
                }
                () = sleep_until(self.deadline), if !is_waiting => return Ok(()),
            }
        }
    }

    async fn answer(&mut self, query: &[u8]) -> io::Result<()> {
        let table = self.shared.tables.borrow().clone();
        let table = table.as_deref();
        match self
            .shared
            .answer(query, Transport::Tcp, table, &mut self.out)
        {
            Action::Reply(_) | Action::Refuse => self.send().await?,
            Action::Forward(question) => self.pending.start((), query, question),
            Action::Drop => {}
        }
        Ok(())
    }

    async fn send(&mut self) -> io::Result<()> {
        // No message is longer than two bytes count.
        let length = (self.out.len() as u16).to_be_bytes();
        let mut framed = Buf::chain(&length[..], &self.out[..]);
        timeout(IDLE, self.stream.write_all_buf(&mut framed)).await??;
        self.deadline = after(IDLE);
        Ok(())
    }
}

/// The next whole message, without its length.
fn next_message(received: &mut BytesMut) -> Option<BytesMut> {
    let length = usize::from(u16::from_be_bytes([*received.first()?, *received.get(1)?]));
    if received.len() < 2 + length {
        return None;
    }
    received.advance(2);
    Some(received.split_to(length))
}
