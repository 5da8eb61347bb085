//! Sends a query to servers until one of them answers it.
//!
//! A query that is not answered soon is sent again, to the next server or, if there is no other, to the
//! same one: after 300 ms in the first round, after twice the time in each further round. One server and
//! a timeout of 5 s give five attempts; if 5 % of packets are lost each way, all of them fail once in a
//! hundred thousand times. Earlier attempts stay open, so a slow server can still answer.
//!
//! Each attempt has its own socket, port and id, and accepts only a reply from its server with that id
//! and the same question; anything else is ignored. SERVFAIL, NOTIMP or REFUSED from one server is not
//! final while others are left.

use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use futures_util::future::{BoxFuture, select_all};
use rustix::process::{Resource, getrlimit};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep_until};

use super::in_flight::InFlightQuery;
use super::message::{Query, Reply};
use super::servers::Health;
use crate::dns::metrics::ForwardMetrics as Metrics;
use crate::dns::wire::{self, NOTIMP, REFUSED, SERVFAIL};
use crate::dns::{Transport, any_port};
use crate::runtime::clock::after;
use crate::runtime::duration::scaled;

const FIRST_WAIT: Duration = Duration::from_millis(300);

/// Attempts to send one query to one server.
const ROUNDS: u32 = 5;

/// Time limit of the other servers after one has refused to answer.
const LINGER: Duration = Duration::from_secs(1);

/// The most sockets for all queries at the same time. A low limit of open files lowers it.
const MAX_SOCKETS: usize = 2048;

/// Upper limit of a datagram's length.
const MAX_DATAGRAM: usize = 65_535;

/// Sends queries to servers, and remembers which servers answer.
#[derive(Debug)]
pub(super) struct Upstream {
    health: Health,
    sockets: Semaphore,
    max_sockets: usize,
    is_parallel: bool,
    first_wait: Duration,
    metrics: Metrics,
}

/// A running query.
struct UpstreamQuery<'a> {
    upstream: &'a Upstream,
    query: &'a Query,
    in_flight: &'a InFlightQuery,
    transport: Transport,
    /// Servers to be tried next, each with the number of its attempts so far.
    rotation: VecDeque<(SocketAddr, u32)>,
    attempts: Vec<Attempt<'a>>,
    /// A server's error reply, which is returned if no other server answers.
    refusal: Option<Reply>,
    next_send: Instant,
    deadline: Instant,
}

struct Attempt<'a> {
    server: SocketAddr,
    started: Instant,
    reply: BoxFuture<'a, io::Result<Reply>>,
}

impl Upstream {
    /// Sends each query to all servers at once if `is_parallel`. `timeout` is the time limit of a query.
    pub(super) fn new(is_parallel: bool, timeout: Duration, metrics: Metrics) -> Self {
        let max_sockets = max_sockets();
        Self {
            health: Health::default(),
            sockets: Semaphore::new(max_sockets),
            max_sockets,
            is_parallel,
            first_wait: FIRST_WAIT.min(scaled(timeout, 1.0 / 16.0)),
            metrics,
        }
    }

    /// Returns the reply of a server, or `None` if no server answers before `deadline`.
    pub(super) async fn ask(
        &self,
        query: &Query,
        in_flight: &InFlightQuery,
        servers: &[SocketAddr],
        transport: Transport,
        deadline: Instant,
    ) -> Option<Reply> {
        let now = Instant::now();
        let order = self.health.choose_order(servers, now);
        let mut running = UpstreamQuery {
            upstream: self,
            query,
            in_flight,
            transport,
            rotation: order.into_iter().map(|server| (server, 0)).collect(),
            attempts: Vec::new(),
            refusal: None,
            next_send: now,
            deadline,
        };
        running.run().await.or(running.refusal)
    }

    /// Sends the query and waits for the reply, without a time limit. Records the message, so that the agent
    /// recognises it if it comes back in a loop.
    pub(super) async fn exchange(
        &self,
        query: &Query,
        in_flight: &InFlightQuery,
        server: SocketAddr,
        transport: Transport,
    ) -> io::Result<Reply> {
        let mut random = [0; 2];
        aws_lc_rs::rand::fill(&mut random).map_err(io::Error::other)?;
        let id = u16::from_be_bytes(random);
        let message = query.message(id);
        match transport {
            Transport::Udp => {
                let socket = UdpSocket::bind(any_port(server)).await?;
                socket.connect(server).await?;
                in_flight.remember_for_loop_detection(id, message.len());
                socket.send(&message).await?;
                // Some servers send more than the query allows. Unused capacity costs no memory.
                let mut datagram = Vec::with_capacity(MAX_DATAGRAM);
                loop {
                    datagram.clear();
                    let (_, from) = socket.recv_buf_from(&mut datagram).await?;
                    // Before it was connected, the socket received from any address.
                    let is_from_server = from.ip() == server.ip() && from.port() == server.port();
                    if let Some(reply) = Reply::read(&datagram, id, query)
                        && is_from_server
                    {
                        return Ok(reply);
                    }
                }
            }
            Transport::Tcp => {
                let mut stream = TcpStream::connect(server).await?;
                in_flight.remember_for_loop_detection(id, message.len());
                let length = u16::try_from(message.len()).map_err(io::Error::other)?;
                stream.write_all(&[&length.to_be_bytes(), message.as_slice()].concat()).await?;
                let reply = Reply::read(&wire::read_framed(&mut stream).await?, id, query);
                reply.ok_or_else(|| io::Error::other("the reply over TCP is to another query"))
            }
        }
    }
}

impl UpstreamQuery<'_> {
    /// Sends the query until a reply ends it, the time is over, or all servers have failed. Returns that reply.
    /// Records servers that do not answer.
    async fn run(&mut self) -> Option<Reply> {
        while !self.rotation.is_empty() || !self.attempts.is_empty() {
            let has_next_server = !self.rotation.is_empty();
            let is_waiting = !self.attempts.is_empty();
            let replies = self.attempts.iter_mut().map(|attempt| &mut attempt.reply);
            tokio::select! {
                biased;
                // `select_all` panics without futures, so it is called only if it is polled.
                (result, index, _) = async { select_all(replies).await }, if is_waiting => {
                    let server = self.attempts.swap_remove(index).server;
                    if let Some(reply) = self.evaluate(server, result) {
                        self.record_timeouts(Some(server));
                        return Some(reply);
                    }
                }
                () = sleep_until(self.deadline) => {
                    self.record_timeouts(None);
                    return None;
                }
                () = sleep_until(self.next_send), if has_next_server => self.send_next(),
            }
        }
        None
    }

    /// Sends the query to the next server, or to all, and schedules the next attempt.
    fn send_next(&mut self) {
        let upstream = self.upstream;
        let count = if upstream.is_parallel { self.rotation.len() } else { 1 };
        for (server, round) in self.rotation.drain(..count).collect::<Vec<_>>() {
            // Under load, first attempts take precedence.
            let may_send =
                round == 0 || upstream.sockets.available_permits() >= upstream.max_sockets / 2;
            if may_send && let Ok(permit) = upstream.sockets.try_acquire() {
                if !self.attempts.is_empty() && !upstream.is_parallel || round > 0 {
                    upstream.metrics.retries.inc();
                }
                let reply = upstream.exchange(self.query, self.in_flight, server, self.transport);
                self.attempts.push(Attempt {
                    server,
                    started: Instant::now(),
                    reply: Box::pin(async {
                        let _permit = permit;
                        reply.await
                    }),
                });
            }
            // The kernel retransmits lost TCP segments.
            if self.transport == Transport::Udp && round + 1 < ROUNDS {
                self.rotation.push_back((server, round + 1));
            }
            self.next_send = after(upstream.first_wait.saturating_mul(1 << round));
        }
    }

    /// Records the result of an attempt. Returns the reply if it ends the query; otherwise this server is not
    /// tried again, and the next one is tried at once.
    fn evaluate(&mut self, server: SocketAddr, result: io::Result<Reply>) -> Option<Reply> {
        match result {
            Ok(reply) => {
                self.upstream.health.record_answer(server);
                let rcode = reply.rcode();
                if ![SERVFAIL, NOTIMP, REFUSED].contains(&rcode) {
                    return Some(reply);
                }
                tracing::debug!(target: "dns", "upstream failure: {server}: answered with code {rcode}");
                self.refusal = Some(reply);
                self.deadline = self.deadline.min(after(LINGER));
            }
            Err(error) => {
                tracing::debug!(target: "dns", "upstream failure: {server}: {error}");
                self.upstream.health.record_miss(server, Instant::now());
            }
        }
        // The other attempts at this server would have the same result.
        self.attempts.retain(|attempt| attempt.server != server);
        self.rotation.retain(|(other, _)| *other != server);
        self.next_send = Instant::now();
        None
    }

    /// Records the servers that had time to answer and did not.
    fn record_timeouts(&self, answered: Option<SocketAddr>) {
        let now = Instant::now();
        let first_wait = self.upstream.first_wait;
        let late = self.attempts.iter().filter(|attempt| {
            now.duration_since(attempt.started) >= first_wait && Some(attempt.server) != answered
        });
        for server in late.map(|attempt| attempt.server).collect::<BTreeSet<_>>() {
            self.upstream.health.record_miss(server, now);
        }
    }
}

/// Returns the number of sockets that may be open. The rest of the agent needs descriptors, too.
fn max_sockets() -> usize {
    let limit = getrlimit(Resource::Nofile).current;
    limit.and_then(|limit| usize::try_from(limit / 4).ok()).unwrap_or(MAX_SOCKETS).min(MAX_SOCKETS)
}
