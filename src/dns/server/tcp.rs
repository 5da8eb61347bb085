//! Serves DNS over TCP: a task per connection, which answers one query after the other.
//!
//! A silent connection is closed, sooner before its first query. While [`MAX_CONNECTIONS`] are open, new
//! ones wait in the kernel.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout, timeout_at};

use super::{PAUSE, Shared};
use crate::dns::answer::Action;
use crate::dns::{Forward, Transport, wire};
use crate::runtime::clock::after;
use crate::runtime::lifecycle::{StopAccepting, Tasks};

const MAX_CONNECTIONS: usize = 256;
/// Time limit for the first query of a connection.
const FIRST: Duration = Duration::from_secs(2);
/// Time limit for each further query, and for the client to read an answer.
const IDLE: Duration = Duration::from_secs(8);

/// Serves as long as it is polled. It stops accepting when `stop_accepting` begins.
pub(super) async fn serve<F: Forward>(
    listener: TcpListener,
    shared: Arc<Shared<F>>,
    stop_accepting: StopAccepting,
) -> io::Result<()> {
    let mut connections = Tasks::default();
    // Dropped when this socket stops accepting, which `StopAccepting::begin` waits for.
    let mut accept_guard = Some(stop_accepting.accept_guard());
    loop {
        tokio::select! {
            () = stop_accepting.wait_for_begin(), if accept_guard.is_some() => accept_guard = None,
            ended = connections.next_ended() => {
                if let Err(error) = ended.result {
                    tracing::debug!(target: "dns", "a DNS connection ended: {error}");
                }
            }
            accepted = listener.accept(), if accept_guard.is_some() && connections.len() < MAX_CONNECTIONS => match accepted {
                Ok((stream, _)) => {
                    // Answers are small and sent one by one. If it fails, they only arrive later.
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

/// Answers queries until the client closes the connection or is silent for too long.
async fn answer<F: Forward>(mut stream: TcpStream, shared: Arc<Shared<F>>) -> io::Result<()> {
    let mut deadline = after(FIRST);
    let mut out = Vec::new();
    while let Ok(query) = timeout_at(deadline, wire::read_framed(&mut stream)).await {
        let query = query?;
        let table = shared.dns.tables.borrow().clone();
        match shared.answer(&query, Transport::Tcp, table.as_deref(), &mut out) {
            Action::Reply(_) | Action::Refuse => {}
            Action::Forward(question) => {
                out = shared.forward(query.into(), question, Transport::Tcp).await;
            }
            Action::Drop => continue,
        }
        // The length fits, because messages have at most 65,535 bytes.
        let framed = [&(out.len() as u16).to_be_bytes(), out.as_slice()].concat();
        timeout(IDLE, stream.write_all(&framed)).await??;
        deadline = after(IDLE);
    }
    Ok(())
}
