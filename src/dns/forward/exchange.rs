//! One question, put to servers until one of them answers it.
//!
//! A query that is not answered soon is sent again, to the next server or, when there is none, to
//! the same: after 300 ms in the first round, after twice that in each further one. With one server
//! and 5 s that makes five tries; where 5 % of packets are lost each way, all of them fail once in a
//! hundred thousand. Earlier tries stay open, so a slow server can still answer. A server that says
//! it cannot answer is not the last word while there are others. Once there is a reply cut short, its
//! rest is waited for and nobody else is asked.
//!
//! Does not cache, and does not know who waits.

use std::collections::VecDeque;
use std::future::{Future, pending, poll_fn};
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use rustix::process::{Resource, getrlimit};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep_until};

use super::attempt::{Asked, Failed, Means};
use super::health::Health;
use super::in_flight::Flight;
use super::metrics::Metrics;
use super::query::Query;
use super::random::Ids;
use super::reply::{Arrival, Reply};
use crate::dns::Transport;
use crate::dns::wire;

const FIRST_WAIT: Duration = Duration::from_millis(300);

/// How often one server is sent one question.
const ROUNDS: u32 = 5;

/// How long others may take once one server has said it cannot answer.
const LINGER: Duration = Duration::from_secs(1);

/// Open at one time for all questions, unless the process may have fewer.
const MAX_SOCKETS: usize = 2048;

#[derive(Debug)]
pub(super) struct Exchange {
    health: Health,
    means: Means,
    max_sockets: usize,
    first_wait: Duration,
}

/// How a question is to be put.
#[derive(Clone, Copy, Debug)]
pub(super) struct Manner {
    pub(super) transport: Transport,
    pub(super) is_parallel: bool,
    pub(super) limit: Duration,
}

/// One question under way.
struct Search<'a> {
    exchange: &'a Exchange,
    asked: &'a Asked<'a>,
    manner: Manner,
    /// Servers still to be asked, with how often they have been.
    rotation: VecDeque<(SocketAddr, u32)>,
    attempts: Vec<Attempt<'a>>,
    /// A reply no better than none.
    fallback: Option<Reply>,
    next_send: Instant,
    deadline: Instant,
}

struct Attempt<'a> {
    server: SocketAddr,
    started: Instant,
    future: Pin<Box<dyn Future<Output = Result<Arrival, Failed>> + Send + 'a>>,
}

impl Exchange {
    /// `timeout` is what the longest search may take.
    pub(super) fn new(timeout: Duration, metrics: Metrics) -> Self {
        let max_sockets = max_sockets();
        Self {
            health: Health::default(),
            means: Means {
                ids: Ids::new(),
                sockets: Semaphore::new(max_sockets),
                metrics,
            },
            max_sockets,
            first_wait: FIRST_WAIT.min(timeout / 16),
        }
    }

    /// How long to wait where an old answer is at hand: nearly as long as where there is none, and
    /// only for a glance when no server has answered lately.
    pub(super) fn patience(&self, servers: &[SocketAddr], timeout: Duration) -> Duration {
        if self.health.all_fail(servers, Instant::now()) {
            self.first_wait
        } else {
            timeout * 4 / 5
        }
    }

    fn has_room(&self) -> bool {
        self.means.sockets.available_permits() >= self.max_sockets / 2
    }

    /// Nothing when no server answered.
    pub(super) async fn ask(
        &self,
        query: &Query,
        flight: &Flight,
        servers: &[SocketAddr],
        manner: Manner,
    ) -> Option<Reply> {
        let asked = Asked {
            query,
            flight,
            cut_short: Default::default(),
        };
        let now = Instant::now();
        let order = self.health.order(servers, now);
        let mut search = Search {
            exchange: self,
            asked: &asked,
            manner,
            rotation: order.into_iter().map(|server| (server, 0)).collect(),
            attempts: Vec::new(),
            fallback: None,
            next_send: now,
            deadline: now + manner.limit,
        };
        let answer = search.run().await;
        let fallback = search.fallback.take();
        answer.or_else(|| asked.take_cut_short()).or(fallback)
    }
}

impl<'a> Search<'a> {
    async fn run(&mut self) -> Option<Reply> {
        loop {
            if self.rotation.is_empty() && self.attempts.is_empty() {
                return None;
            }
            let may_send = !self.rotation.is_empty();
            tokio::select! {
                biased;
                (server, result) = first_of(&mut self.attempts) => {
                    if let Some(reply) = self.judge(server, result) {
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
        if self.asked.cut_by().is_some() {
            self.rotation.clear();
        }
        let count = if self.manner.is_parallel {
            self.rotation.len()
        } else {
            1
        };
        for _ in 0..count {
            let Some((server, round)) = self.rotation.pop_front() else {
                return;
            };
            // Under load, the first tries of some come before the further ones of others.
            if round == 0 || self.exchange.has_room() {
                self.start(server, round);
            }
            // The kernel repeats what TCP loses.
            if self.manner.transport == Transport::Udp && round + 1 < ROUNDS {
                self.rotation.push_back((server, round + 1));
            }
            self.next_send = Instant::now() + self.exchange.first_wait * (1 << round);
        }
    }

    fn start(&mut self, server: SocketAddr, round: u32) {
        let means = &self.exchange.means;
        if !self.attempts.is_empty() && !self.manner.is_parallel || round > 0 {
            means.metrics.retries.inc();
        }
        // Two queries with an OPT record in vain: something on the way may not let it through.
        let is_plain = round >= 2;
        let attempt = means.ask(self.asked, server, self.manner.transport, is_plain);
        self.attempts.push(Attempt {
            server,
            started: Instant::now(),
            future: Box::pin(attempt),
        });
    }

    /// The reply, if it ends the search.
    fn judge(&mut self, server: SocketAddr, result: Result<Arrival, Failed>) -> Option<Reply> {
        let exchange = self.exchange;
        let mut is_of_server = true;
        match result {
            Ok(arrival) => {
                exchange.health.answered(server);
                let reply = self.weigh(server, arrival);
                if reply.is_some() {
                    return reply;
                }
                self.deadline = self.deadline.min(Instant::now() + LINGER);
            }
            Err(error) => {
                tracing::debug!(target: "dns", "upstream failure: {server}: {error}");
                is_of_server = error.is_of_server();
                if is_of_server {
                    exchange.health.failed(server, Instant::now());
                }
            }
        }
        if is_of_server {
            // Its other tries will not say anything else.
            self.attempts.retain(|attempt| attempt.server != server);
        }
        self.rotation.retain(|(other, _)| *other != server);
        self.next_send = Instant::now();
        None
    }

    fn weigh(&mut self, server: SocketAddr, arrival: Arrival) -> Option<Reply> {
        let metrics = &self.exchange.means.metrics;
        let rcode = match &arrival {
            Arrival::Reply(reply) | Arrival::Truncated(reply) => reply.rcode(),
            Arrival::Bare(rcode) => *rcode,
            // An attempt does not end with these.
            Arrival::NotOurs | Arrival::Broken => return None,
        };
        metrics.answered(rcode);
        match arrival {
            Arrival::Reply(reply) | Arrival::Truncated(reply) if !says_it_cannot(rcode) => {
                return Some(reply);
            }
            Arrival::Reply(reply) | Arrival::Truncated(reply) => self.fallback = Some(reply),
            _ => {}
        }
        tracing::debug!(target: "dns", "upstream failure: {server}: answered with code {rcode}");
        None
    }

    /// Those that had time to answer and did not.
    fn blame_silent(&self, answered: Option<SocketAddr>) {
        let now = Instant::now();
        let cut_by = self.asked.cut_by();
        let mut silent: Vec<_> = self
            .attempts
            .iter()
            .filter(|attempt| now - attempt.started >= self.exchange.first_wait)
            .map(|attempt| attempt.server)
            .filter(|server| ![answered, cut_by].contains(&Some(*server)))
            .collect();
        silent.sort();
        silent.dedup();
        for server in silent {
            self.exchange.health.missed(server, now);
        }
    }
}

/// The rest of the agent needs some, too.
fn max_sockets() -> usize {
    let limit = getrlimit(Resource::Nofile).current;
    let quarter = limit.and_then(|limit| usize::try_from(limit / 4).ok());
    quarter.unwrap_or(MAX_SOCKETS).min(MAX_SOCKETS)
}

pub(super) fn says_it_cannot(rcode: u8) -> bool {
    [wire::SERVFAIL, wire::NOTIMP, wire::REFUSED].contains(&rcode)
}

/// The first attempt to end. They are few, so each is asked whenever one stirs.
async fn first_of(attempts: &mut Vec<Attempt<'_>>) -> (SocketAddr, Result<Arrival, Failed>) {
    if attempts.is_empty() {
        return pending().await;
    }
    poll_fn(|context| {
        for index in 0..attempts.len() {
            if let Poll::Ready(result) = attempts[index].future.as_mut().poll(context) {
                return Poll::Ready((attempts.swap_remove(index).server, result));
            }
        }
        Poll::Pending
    })
    .await
}
