//! DNS over TCP: a task per connection, one query after the other.
//!
//! A silent connection is closed, sooner before its first query. While there are [`MAX_CONNECTIONS`], new
//! ones wait in the kernel.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout, timeout_at};

use super::{PAUSE, Shared};
use crate::clock::after;
use crate::dns::answer::Action;
use crate::dns::{Forward, Transport, wire};
use crate::lifecycle::{Retirement, Tasks};

const MAX_CONNECTIONS: usize = 256;
/// How long a new connection may be silent.
const FIRST: Duration = Duration::from_secs(2);
/// How long it may be later, and how long it may take to read an answer.
const IDLE: Duration = Duration::from_secs(8);

/// Serves for as long as it is polled. At the retirement it stops accepting.
pub(super) async fn serve<F: Forward>(
    listener: TcpListener,
    shared: Arc<Shared<F>>,
    retirement: Retirement,
) -> io::Result<()> {
    let mut connections = Tasks::default();
    let mut accepting = Some(retirement.accepting());
    loop {
        tokio::select! {
            () = retirement.begun(), if accepting.is_some() => accepting = None,
            ended = connections.next_ended() => {
                if let Err(error) = ended.result {
                    tracing::debug!(target: "dns", "a DNS connection ended: {error}");
                }
            }
            accepted = listener.accept(), if accepting.is_some() && connections.len() < MAX_CONNECTIONS => match accepted {
                Ok((stream, _)) => {
                    // Answers are small and come one by one. Without it they come later.
                    let _ = stream.set_nodelay(true);
                    connections.spawn("DNS connection", answer(stream, shared.clone()));
                }
                Err(error) => {
                    tracing::warn!(target: "dns", "cannot accept a DNS connection, next attempt in {} ms: {error}", PAUSE.as_millis());
                    sleep(PAUSE).await;
                }
            },
        }
    }
}

/// Answers until the client ends the connection or is silent for too long.
async fn answer<F: Forward>(mut stream: TcpStream, shared: Arc<Shared<F>>) -> io::Result<()> {
    let (mut deadline, mut out) = (after(FIRST), Vec::new());
    while let Ok(query) = timeout_at(deadline, wire::read_framed(&mut stream)).await {
        let query = query?;
        let table = shared.tables.borrow().clone();
        match shared.answer(&query, Transport::Tcp, table.as_deref(), &mut out) {
            Action::Reply(_) | Action::Refuse => {}
            Action::Forward(question) => {
                out = shared.forward(query.into(), question, Transport::Tcp).await;
            }
            Action::Drop => continue,
        }
        // No message is longer than two bytes count.
        let framed = [&(out.len() as u16).to_be_bytes(), out.as_slice()].concat();
        timeout(IDLE, stream.write_all(&framed)).await??;
        deadline = after(IDLE);
    }
    Ok(())
}
