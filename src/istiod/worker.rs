//! Runs the connection, and dials while a call waits for one.
//!
//! Calls queue here while there is no connection. One dial serves all of them, also those that arrive
//! while it runs. Failed dials are retried with backoff and full jitter; a success resets the backoff.
//! Dials start at least [`Limits::least_between`](super::Limits) apart, successful or not, so a fleet makes
//! fewer dials per second than it has agents. Without calls the worker neither dials nor wakes up, except
//! while it does not use the first control plane: it then dials the first one periodically, and returns to
//! it when it responds.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use h2::Reason;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until};

use super::connection::{Connection, Driver};
use super::dial::{Failure, dial};
use super::{Config, Shared};
use crate::net::dial::Dialer;
use crate::net::executor::ConnectionTasks;
use crate::problem::{Code, Problem, Repetition};
use crate::runtime::backoff::Backoff;
use crate::runtime::clock::{after, later};
use crate::runtime::duration::{rounded, scaled};

/// The longest time that the first wait adds to the least time between two dials.
const FIRST_WAIT: Duration = Duration::from_millis(100);

/// The remedy for GOAWAY with ENHANCE_YOUR_CALM.
const TOO_MANY_PINGS: &str = "for too_many_pings raise `GRPC_KEEPALIVE_INTERVAL`, or lower the least time between \
    pings that the server or the load balancer enforces";

/// A call that waits for a connection.
#[derive(Debug)]
pub(super) struct Waiter {
    /// True if the call fails with the error of the next failed dial.
    pub(super) once: bool,
    pub(super) reply: oneshot::Sender<Result<Connection, Problem>>,
}

pub(super) struct Worker {
    shared: Arc<Shared>,
    queue: mpsc::UnboundedReceiver<Waiter>,
    tasks: ConnectionTasks,
    backoff: Backoff,
    /// The earliest start of the next dial.
    not_before: Instant,
    dialer: Dialer,
    waiting: Vec<Waiter>,
    /// The consecutive failed dials of each address.
    failures: BTreeMap<String, Repetition>,
}

impl Worker {
    pub(super) fn new(shared: Arc<Shared>, queue: mpsc::UnboundedReceiver<Waiter>) -> Self {
        let backoff = Backoff::new(FIRST_WAIT, shared.hosts.first().limits.max_wait);
        Self {
            shared,
            queue,
            tasks: ConnectionTasks::default(),
            backoff,
            not_before: Instant::now(),
            dialer: Dialer::default(),
            waiting: Vec::new(),
            failures: BTreeMap::new(),
        }
    }

    pub(super) async fn run(mut self) {
        loop {
            let due = self.shared.hosts.due().map(|due| due.max(self.not_before));
            let return_due = sleep_until(due.unwrap_or_else(Instant::now));
            let running = tokio::select! {
                waiter = self.queue.recv() => match waiter {
                    Some(waiter) => {
                        self.waiting.push(waiter);
                        self.serve().await
                    }
                    None => return,
                },
                () = return_due, if due.is_some() => self.dial_first().await,
            };
            if running.is_none() {
                return;
            }
        }
    }

    /// Returns to the first control plane if it responds. Returns None once every handle is dropped.
    async fn dial_first(&mut self) -> Option<()> {
        let shared = self.shared.clone();
        // No connection has to be replaced, so the next call dials the first control plane.
        if shared.connection().is_none() {
            shared.hosts.return_to_first();
            return Some(());
        }
        let first = shared.hosts.first();
        match self.dial(first).await? {
            Ok((connection, driver)) => {
                tracing::info!(target: "xdsproxy", "istiod at {} is used again", first.address);
                shared.hosts.return_to_first();
                if let Some(other) = shared.connection() {
                    other.supersede();
                }
                self.use_connection(connection, driver);
            }
            Err(Failure { problem, .. }) => {
                let other = &shared.hosts.current().address;
                shared.record.record_failed_dial(&problem);
                tracing::debug!(target: "xdsproxy", "staying with istiod at {other}: {problem}");
                shared.hosts.postpone();
            }
        }
        self.serve().await
    }

    /// Dials until no call waits. Returns None once every handle is dropped.
    async fn serve(&mut self) -> Option<()> {
        loop {
            self.waiting.retain(|waiter| !waiter.reply.is_closed());
            if let Some(connection) = self.shared.connection() {
                self.reply_all(&connection);
            }
            if self.waiting.is_empty() {
                return Some(());
            }
            if Instant::now() < self.not_before {
                self.collect_during(sleep_until(self.not_before)).await?;
                continue;
            }
            let config = self.shared.hosts.current().clone();
            match self.dial(&config).await? {
                // Failed calls have meanwhile selected another control plane, which is dialed instead.
                Ok(_) if !Arc::ptr_eq(&config, self.shared.hosts.current()) => {}
                Ok((connection, driver)) => self.use_connection(connection, driver),
                Err(failure) => self.handle_failure(&config, failure),
            }
        }
    }

    /// Dials once, and sets the earliest start of the next dial. Returns None once every handle is dropped.
    async fn dial(
        &mut self,
        config: &Arc<Config>,
    ) -> Option<Result<(Connection, Driver), Failure>> {
        self.shared.record.count_dial();
        self.not_before = after(config.limits.least_between);
        let dialer = self.dialer.clone();
        let executor = self.tasks.executor();
        self.collect_during(async move { dial(config, &dialer, executor).await }).await
    }

    /// Runs `work` to its end while more calls join the queue. Returns None once every handle is dropped.
    async fn collect_during<T>(&mut self, work: impl Future<Output = T>) -> Option<T> {
        let mut work = std::pin::pin!(work);
        loop {
            tokio::select! {
                done = &mut work => return Some(done),
                waiter = self.queue.recv() => self.waiting.push(waiter?),
            }
        }
    }

    fn reply_all(&mut self, connection: &Connection) {
        for waiter in self.waiting.drain(..) {
            let _ = waiter.reply.send(Ok(connection.clone())); // The call may be cancelled.
        }
    }

    /// Makes this the connection of all calls, including the waiting ones, and runs it.
    fn use_connection(&mut self, connection: Connection, driver: Driver) {
        self.backoff.reset();
        // If the connection breaks at once, the wait is the same as after a first failure.
        self.not_before = later(self.not_before, scaled(FIRST_WAIT, fastrand::f64()));
        // Not the connection: a copy of it would keep it open.
        let config = connection.config.clone();
        let address = config.address.clone();
        if let Some(failures) = self.failures.get_mut(&address).and_then(Repetition::end) {
            tracing::info!(target: "xdsproxy", "connected to istiod at {address} again; {failures}");
        }
        self.failures.clear();
        let about = connection.about.clone();
        tracing::debug!(target: "xdsproxy", "connected to istiod at {address} ({about})");
        self.shared.connected.send_replace(Some(connection.clone()));
        let shared = self.shared.clone();
        self.tasks.executor().spawn(async move {
            match driver.run(|| shared.leave(&about)).await {
                Ok(reason) => {
                    tracing::debug!(
                        target: "xdsproxy",
                        "connection to istiod at {address} ended: {reason}"
                    );
                }
                Err(go_away) => {
                    let found = format!("it ended the connection with {go_away}");
                    let problem = config.problem(Code::IstiodUnavailable, found);
                    let problem = problem.remedy(match go_away.code {
                        Reason::ENHANCE_YOUR_CALM => TOO_MANY_PINGS,
                        _ => Code::IstiodError.remedy(),
                    });
                    // Calls on a newer connection may have succeeded.
                    if shared.connection().is_none() {
                        shared.record.record_error(&problem);
                    }
                    tracing::warn!(target: "xdsproxy", "{problem}");
                }
            }
        });
        self.reply_all(&connection);
    }

    /// Schedules the next dial after a failed one. The calls that do not retry get its error.
    fn handle_failure(&mut self, config: &Arc<Config>, failure: Failure) {
        let Failure { problem, timed_out, .. } = failure;
        let Shared { hosts, record, .. } = &*self.shared;
        record.record_failed_dial(&problem);
        let has_moved = hosts.record_failure(config, timed_out, &problem);
        if has_moved {
            self.backoff.reset();
        }
        let now = Instant::now();
        self.not_before = later(self.not_before.max(now), self.backoff.next_wait());
        let wait = self.not_before.duration_since(now);
        self.log_failure(&config.address, &problem, wait);
        if has_moved {
            return; // All calls wait for the other control plane.
        }
        for waiter in self.waiting.extract_if(.., |waiter| waiter.once) {
            let _ = waiter.reply.send(Err(problem.clone())); // The call may be cancelled.
        }
    }

    /// Logs an outage as an error when it begins and then at growing intervals, other failures at debug
    /// level.
    fn log_failure(&mut self, address: &str, problem: &Problem, wait: Duration) {
        let failures = self.failures.entry(address.to_owned()).or_default();
        let text = format!("failed to connect to upstream {address}: {problem}");
        if let Some(count) = failures.failed(problem) {
            tracing::error!(target: "xdsproxy", "{text}{count}");
        } else {
            let wait = rounded(wait);
            tracing::debug!(target: "xdsproxy", "{text}; the next dial is in {wait} or later");
        }
    }
}
