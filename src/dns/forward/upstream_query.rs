//! One query, put to servers until one of them answers it.
//!
//! A query that is not answered soon is sent again, to the next server or, when there is none, to the
//! same: after 300 ms in the first round, after twice that in each further one. With one server and
//! 5 s that makes five tries; where 5 % of packets are lost each way, all of them fail once in a
//! hundred thousand. Earlier tries stay open, so a slow server can still answer.
//!
//! A server's SERVFAIL, NOTIMP or REFUSED is not the last word while there are others. After a truncated
//! reply the same server is asked over TCP, for a second, and no other; if that brings nothing, the
//! truncated reply is passed on. A server that cannot bear our OPT record is asked without.

use std::collections::VecDeque;
use std::future::{Future, pending, poll_fn};
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep_until};

use super::attempt::{Failed, Sending, max_sockets};
use super::health::Health;
use super::in_flight::SharedQuery;
use super::metrics::Metrics;
use super::query::Query;
use super::reply::{Received, Reply};
use crate::clock::{after, later};
use crate::dns::Transport;
use crate::dns::wire::{NOTIMP, REFUSED, SERVFAIL};
use crate::duration::scaled;

const FIRST_WAIT: Duration = Duration::from_millis(300);

/// How often one server is sent one query.
const ROUNDS: u32 = 5;

/// How long other servers may take once one has said it cannot answer.
const LINGER: Duration = Duration::from_secs(1);

/// How long the whole of a truncated reply may take. Where TCP is blocked, nothing comes.
const WHOLE_REPLY: Duration = Duration::from_secs(1);

/// Asks servers, and remembers which of them answer.
#[derive(Debug)]
pub(super) struct Upstream {
    health: Health,
    pub(super) sockets: Semaphore,
    max_sockets: usize,
    is_parallel: bool,
    first_wait: Duration,
    pub(super) metrics: Metrics,
}

/// One query under way.
struct UpstreamQuery<'a> {
    upstream: &'a Upstream,
    query: &'a Query,
    shared: &'a SharedQuery,
    transport: Transport,
    /// Servers still to be asked, with how often they have been.
    rotation: VecDeque<(SocketAddr, u32)>,
    attempts: Vec<Attempt<'a>>,
    /// An error a server answered with, for when no other answers.
    refusal: Option<Reply>,
    /// A truncated reply, whose server is being asked over TCP.
    truncated: Option<(SocketAddr, Reply)>,
    next_send: Instant,
    deadline: Instant,
}

struct Attempt<'a> {
    sending: Sending,
    started: Instant,
    future: Pin<Box<dyn Future<Output = Result<Received, Failed>> + Send + 'a>>,
}

impl Upstream {
    /// All servers are asked at once if `is_parallel`. `timeout` is that of a query.
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

    /// The reply of a server; `None` when none answers in time.
    pub(super) async fn ask(
        &self,
        query: &Query,
        shared: &SharedQuery,
        servers: &[SocketAddr],
        transport: Transport,
        timeout: Duration,
    ) -> Option<Reply> {
        let now = Instant::now();
        let order = self.health.order(servers, now);
        let mut asking = UpstreamQuery {
            upstream: self,
            query,
            shared,
            transport,
            rotation: order.into_iter().map(|server| (server, 0)).collect(),
            attempts: Vec::new(),
            refusal: None,
            truncated: None,
            next_send: now,
            deadline: later(now, timeout),
        };
        let reply = asking.run().await;
        let truncated = asking.truncated.map(|(_, reply)| reply);
        reply.or(truncated).or(asking.refusal)
    }
}

impl UpstreamQuery<'_> {
    async fn run(&mut self) -> Option<Reply> {
        loop {
            if self.rotation.is_empty() && self.attempts.is_empty() {
                return None;
            }
            let may_send = !self.rotation.is_empty();
            tokio::select! {
                biased;
                (attempt, result) = first_of(&mut self.attempts) => {
                    let server = attempt.sending.server;
                    if let Some(reply) = self.judge(attempt, result) {
                        self.blame_silent(Some(server));
                        return Some(reply);
                    }
                }
                () = sleep_until(self.deadline) => {
                    self.blame_silent(None);
                    return None;
                }
                () = sleep_until(self.next_send), if may_send => self.send(),
            }
        }
    }

    /// Asks the next server, or all.
    fn send(&mut self) {
        let upstream = self.upstream;
        let count = match upstream.is_parallel {
            true => self.rotation.len(),
            false => 1,
        };
        for _ in 0..count {
            let Some((server, round)) = self.rotation.pop_front() else {
                return;
            };
            // Under load, first tries come first.
            let has_sockets = upstream.sockets.available_permits() >= upstream.max_sockets / 2;
            if round == 0 || has_sockets {
                if !self.attempts.is_empty() && !upstream.is_parallel || round > 0 {
                    upstream.metrics.retries.inc();
                }
                self.start(Sending {
                    server,
                    transport: self.transport,
                    // Two queries with it in vain: the network may not let it through.
                    with_opt: round < 2,
                });
            }
            // The kernel repeats what TCP loses.
            if self.transport == Transport::Udp && round + 1 < ROUNDS {
                self.rotation.push_back((server, round + 1));
            }
            self.next_send = after(upstream.first_wait.saturating_mul(1 << round));
        }
    }

    fn start(&mut self, sending: Sending) {
        let future = self.upstream.send(self.query, self.shared, sending);
        self.attempts.push(Attempt {
            sending,
            started: Instant::now(),
            future: Box::pin(future),
        });
    }

    /// The reply, if it ends the query.
    fn judge(&mut self, attempt: Attempt<'_>, result: Result<Received, Failed>) -> Option<Reply> {
        let sending = attempt.sending;
        let server = sending.server;
        let received = match result {
            Ok(received) => received,
            Err(error) => return self.judge_failure(server, &error),
        };
        self.upstream.health.answered(server);
        if received.lacks_opt() && sending.with_opt && self.query.can_omit_opt() {
            self.start(Sending {
                with_opt: false,
                ..sending
            });
            return None;
        }
        let rcode = received.rcode;
        self.upstream.metrics.answered(rcode);
        if [SERVFAIL, NOTIMP, REFUSED].contains(&rcode) || received.reply.is_none() {
            tracing::debug!(target: "dns", "upstream failure: {server}: answered with code {rcode}");
            self.refusal = received.reply.or(self.refusal.take());
            self.deadline = self.deadline.min(after(LINGER));
            self.give_up(server);
            return None;
        }
        let is_final = !received.is_truncated || sending.transport == Transport::Tcp;
        if !is_final && let Some(reply) = received.reply {
            self.ask_over_tcp(server, reply);
            return None;
        }
        received.reply
    }

    fn judge_failure(&mut self, server: SocketAddr, error: &Failed) -> Option<Reply> {
        tracing::debug!(target: "dns", "upstream failure: {server}: {error}");
        if let Some((_, reply)) = self.truncated.take_if(|(by, _)| *by == server) {
            return Some(reply);
        }
        if error.is_of_server() {
            self.upstream.health.failed(server, Instant::now());
            self.give_up(server);
        }
        self.rotation.retain(|(other, _)| *other != server);
        self.next_send = Instant::now();
        None
    }

    /// Its other tries will not say anything else.
    fn give_up(&mut self, server: SocketAddr) {
        let is_other = |attempt: &Attempt<'_>| attempt.sending.server != server;
        self.attempts.retain(is_other);
        self.rotation.retain(|(other, _)| *other != server);
        self.next_send = Instant::now();
    }

    fn ask_over_tcp(&mut self, server: SocketAddr, truncated: Reply) {
        if self.truncated.is_some() {
            return;
        }
        self.truncated = Some((server, truncated));
        self.rotation.clear();
        self.deadline = self.deadline.min(after(WHOLE_REPLY));
        self.start(Sending {
            server,
            transport: Transport::Tcp,
            with_opt: true,
        });
    }

    /// Notes the servers that had time to answer and did not.
    fn blame_silent(&self, answered: Option<SocketAddr>) {
        let now = Instant::now();
        let truncated_by = self.truncated.as_ref().map(|(server, _)| *server);
        let late = self
            .attempts
            .iter()
            .filter(|attempt| now.duration_since(attempt.started) >= self.upstream.first_wait)
            .map(|attempt| attempt.sending.server);
        let mut silent: Vec<_> = late
            .filter(|server| ![answered, truncated_by].contains(&Some(*server)))
            .collect();
        silent.sort();
        silent.dedup();
        for server in silent {
            self.upstream.health.missed(server, now);
        }
    }
}

/// The first attempt to end. They are few, so each is polled whenever one wakes.
async fn first_of<'a>(attempts: &mut Vec<Attempt<'a>>) -> (Attempt<'a>, Result<Received, Failed>) {
    if attempts.is_empty() {
        return pending().await;
    }
    poll_fn(|context| {
        for index in 0..attempts.len() {
            if let Poll::Ready(result) = attempts[index].future.as_mut().poll(context) {
                return Poll::Ready((attempts.swap_remove(index), result));
            }
        }
        Poll::Pending
    })
    .await
}
