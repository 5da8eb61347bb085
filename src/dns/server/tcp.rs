//! DNS over TCP: a task per connection, answers as they become ready.
//!
//! A client may have [`MOST_FORWARDS`] queries waiting for others; the next is read when one is
//! answered. Who says nothing loses the connection, sooner before the first query. While there are
//! [`MOST_CONNECTIONS`], new ones wait in the kernel.
//!
//! Does not keep answers in the order of queries, as RFC 7766 allows.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::{Forwards, LARGEST, REST, Shared};
use crate::dns::answer::{self, Answer};
use crate::dns::wire::Name;
use crate::dns::{Forward, Transport};
use crate::lifecycle::Tasks;

const MOST_CONNECTIONS: usize = 256;
const MOST_FORWARDS: usize = 64;
/// How long a new connection may say nothing.
const FIRST: Duration = Duration::from_secs(2);
/// How long any other may, and how long it may take to read an answer.
const IDLE: Duration = Duration::from_secs(8);

struct Connection<F> {
    stream: TcpStream,
    shared: Arc<Shared<F>>,
    forwards: Forwards<F, ()>,
    received: BytesMut,
    name: Name,
    /// A message behind its length.
    out: Box<[u8]>,
    deadline: Instant,
    /// Whether the client has nothing more to ask.
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
            accepted = listener.accept(), if connections.len() < MOST_CONNECTIONS => match accepted {
                Ok((stream, _)) => {
                    // Answers are small and come one by one. Without it they come later.
                    let _ = stream.set_nodelay(true);
                    let connection = Connection::new(stream, shared.clone());
                    connections.spawn("DNS connection", connection.run());
                }
                Err(error) => {
                    tracing::warn!(target: "dns", "cannot accept a connection, resting: {error}");
                    sleep(REST).await;
                }
            },
        }
    }
}

impl<F: Forward> Connection<F> {
    fn new(stream: TcpStream, shared: Arc<Shared<F>>) -> Self {
        Self {
            stream,
            forwards: Forwards::new(shared.clone(), Transport::Tcp, MOST_FORWARDS),
            shared,
            received: BytesMut::new(),
            name: Name::new(),
            out: vec![0; 2 + LARGEST].into(),
            deadline: Instant::now() + FIRST,
            is_finished: false,
        }
    }

    async fn run(mut self) -> io::Result<()> {
        loop {
            while !self.forwards.is_full()
                && let Some(query) = frame(&mut self.received)
            {
                self.take(&query).await?;
            }
            let is_waiting = !self.forwards.running.is_empty();
            let reads = !self.is_finished && !self.forwards.is_full();
            if self.is_finished && !is_waiting {
                return Ok(());
            }
            tokio::select! {
                Some(asked) = self.forwards.running.join_next() => {
                    if let Some(((), length)) = self.forwards.finish(asked, &mut self.out[2..]) {
                        self.send(length).await?;
                    }
                }
                read = self.stream.read_buf(&mut self.received), if reads => {
                    self.is_finished = read? == 0;
                }
                () = sleep_until(self.deadline), if !is_waiting => return Ok(()),
            }
        }
    }

    async fn take(&mut self, query: &[u8]) -> io::Result<()> {
        let policy = self.shared.policy;
        let out = &mut self.out[2..];
        let outcome = {
            let table = self.shared.tables.borrow();
            let table = table.as_deref();
            answer::answer(query, Transport::Tcp, table, policy, &mut self.name, out)
        };
        self.shared.count(&outcome, out);
        match (outcome.answer, outcome.question) {
            (Answer::Reply(length), _) => self.send(length).await,
            (Answer::Forward, Some(question)) => {
                self.forwards.start((), query, question);
                Ok(())
            }
            (Answer::Forward | Answer::Drop, _) => Ok(()),
        }
    }

    async fn send(&mut self, length: usize) -> io::Result<()> {
        // No message is longer than two bytes count.
        let prefix = (length as u16).to_be_bytes();
        self.out[..2].copy_from_slice(&prefix);
        let sending = self.stream.write_all(&self.out[..2 + length]);
        timeout(IDLE, sending).await??;
        self.deadline = Instant::now() + IDLE;
        Ok(())
    }
}

/// The next whole message, without its length.
fn frame(received: &mut BytesMut) -> Option<BytesMut> {
    let length = usize::from(u16::from_be_bytes([*received.first()?, *received.get(1)?]));
    if received.len() < 2 + length {
        return None;
    }
    received.advance(2);
    Some(received.split_to(length))
}
