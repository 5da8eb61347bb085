//! Owns the connection, and dials while a call waits for one.
//!
//! Calls queue here while there is no connection. One dial serves all of them, also those that come
//! while it runs. Dials that fail are retried with backoff and full jitter; a success resets the
//! backoff. Dials start at least [`Limits::least_between`](super::Limits) apart, whatever becomes of
//! them, so that a fleet's dials per second stay below its agents. Without calls the worker neither
//! dials nor wakes up, except while it does not use the first control plane: that is then dialed now
//! and again, and used when it answers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until};

use super::Config;
use super::connection::{Connection, Driver};
use super::dial::{Failure, dial};
use super::hosts::Hosts;
use super::status::{Connected, Record};
use crate::backoff::Backoff;
use crate::clock::{after, later};
use crate::dial::Dialer;
use crate::duration::{rounded, scaled};
use crate::executor::ConnectionTasks;
use crate::problem::{Problem, Repetition};

/// Upper bound of what the first wait adds to the least time between two dials.
const FIRST_WAIT: Duration = Duration::from_millis(100);

/// Upper bound of what any wait adds. A returning istiod is found within this, the least time between
/// two dials, and the time of one dial.
const MAX_WAIT: Duration = Duration::from_secs(1);

/// A call that waits for a connection.
#[derive(Debug)]
pub(super) struct Waiter {
    /// Whether it gives up with the error of the next failed dial.
    pub(super) once: bool,
    pub(super) reply: oneshot::Sender<Result<Connection, Problem>>,
}

pub(super) struct Worker {
    hosts: Arc<Hosts>,
    queue: mpsc::UnboundedReceiver<Waiter>,
    connected: watch::Sender<Option<Connection>>,
    record: Record,
    tasks: ConnectionTasks,
    backoff: Backoff,
    /// When the next dial may start.
    not_before: Instant,
    dialer: Dialer,
    waiting: Vec<Waiter>,
    /// The failed dials in a row of each address.
    failures: BTreeMap<String, Repetition>,
}

impl Worker {
    pub(super) fn new(
        hosts: Arc<Hosts>,
        queue: mpsc::UnboundedReceiver<Waiter>,
        connected: watch::Sender<Option<Connection>>,
        record: Record,
    ) -> Self {
        Self {
            hosts,
            queue,
            connected,
            record,
            tasks: ConnectionTasks::default(),
            backoff: Backoff::new(FIRST_WAIT, MAX_WAIT),
            not_before: Instant::now(),
            dialer: Dialer::default(),
            waiting: Vec::new(),
            failures: BTreeMap::new(),
        }
    }

    pub(super) async fn run(mut self) {
        loop {
            let due = self.hosts.due().map(|due| due.max(self.not_before));
            let due_at = sleep_until(due.unwrap_or_else(Instant::now));
            let served = tokio::select! {
                waiter = self.queue.recv() => match waiter {
                    Some(waiter) => {
                        self.waiting.push(waiter);
                        self.serve().await
                    }
                    None => return,
                },
                () = due_at, if due.is_some() => self.try_first().await,
            };
            if served.is_none() {
                return;
            }
        }
    }

    /// Returns to the first control plane if it answers. None once every handle is gone.
    async fn try_first(&mut self) -> Option<()> {
        if current(&self.connected).is_none() {
            self.hosts.return_to_first();
            return Some(());
        }
        let first = self.hosts.first().clone();
        match self.dial(&first).await? {
            Ok((connection, driver)) => {
                tracing::info!(target: "xdsproxy", "istiod at {} is used again", first.address);
                self.hosts.return_to_first();
                if let Some(other) = current(&self.connected) {
                    other.leave();
                }
                self.connected(connection, driver);
            }
            Err(Failure { problem, .. }) => {
                let other = &self.hosts.current().address;
                self.record.dial_failed(&problem);
                tracing::debug!(target: "xdsproxy", "staying with istiod at {other}: {problem}");
                self.hosts.postpone();
            }
        }
        self.serve().await
    }

    /// Returns when no call waits. None once every handle is gone.
    async fn serve(&mut self) -> Option<()> {
        loop {
            self.waiting.retain(|waiter| !waiter.reply.is_closed());
            if let Some(connection) = current(&self.connected) {
                self.give(&connection);
            }
            if self.waiting.is_empty() {
                return Some(());
            }
            if Instant::now() < self.not_before {
                self.collect_during(sleep_until(self.not_before)).await?;
                continue;
            }
            let config = self.hosts.current().clone();
            match self.dial(&config).await? {
                Ok(_) if !Arc::ptr_eq(&config, self.hosts.current()) => {}
                Ok((connection, driver)) => self.connected(connection, driver),
                Err(failure) => self.failed(&config, failure),
            }
        }
    }

    async fn dial(
        &mut self,
        config: &Arc<Config>,
    ) -> Option<Result<(Connection, Driver), Failure>> {
        self.record.dials();
        self.not_before = after(config.limits.least_between);
        let (dialer, executor) = (self.dialer.clone(), self.tasks.executor());
        let dial = async move { dial(config, &dialer, executor).await };
        self.collect_during(dial).await
    }

    /// Runs `work` to its end while more calls join the queue. None once every handle is gone.
    async fn collect_during<T>(&mut self, work: impl Future<Output = T>) -> Option<T> {
        let mut work = std::pin::pin!(work);
        loop {
            tokio::select! {
                done = &mut work => return Some(done),
                waiter = self.queue.recv() => self.waiting.push(waiter?),
            }
        }
    }

    fn give(&mut self, connection: &Connection) {
        for waiter in self.waiting.drain(..) {
            let _ = waiter.reply.send(Ok(connection.clone())); // The call may be cancelled.
        }
    }

    fn connected(&mut self, connection: Connection, driver: Driver) {
        self.backoff.reset();
        // One that breaks at once is dialed again as after a first failure.
        self.not_before = later(self.not_before, scaled(FIRST_WAIT, fastrand::f64()));
        let address = connection.config.address.clone();
        let failures = self.failures.remove(&address);
        if let Some(failures) = failures.and_then(|mut failures| failures.end()) {
            tracing::info!(target: "xdsproxy", "connected to istiod at {address} again; {failures}");
        }
        self.failures.clear();
        let about = connection.about();
        tracing::debug!(target: "xdsproxy", "connected to istiod at {address} ({about})");
        let identity = connection.identity();
        self.connected.send_replace(Some(connection.clone()));
        let connected = self.connected.clone();
        self.tasks.executor().spawn(async move {
            let leaves = || forget(&connected, &identity);
            let reason = driver.run(leaves).await;
            let ended = format!("connection to istiod at {address} ended: {reason}");
            tracing::debug!(target: "xdsproxy", "{ended}");
        });
        self.give(&connection);
    }

    fn failed(&mut self, config: &Arc<Config>, failure: Failure) {
        let problem = failure.problem;
        self.record.dial_failed(&problem);
        let has_moved = self.hosts.failed(config, failure.is_silent, &problem);
        if has_moved {
            self.backoff.reset();
        }
        let now = Instant::now();
        self.not_before = later(self.not_before.max(now), self.backoff.next_wait());
        let wait = self.not_before.duration_since(now);
        self.complain(&config.address, &problem, wait);
        if has_moved {
            return; // All calls wait for the other one.
        }
        for waiter in self.waiting.extract_if(.., |waiter| waiter.once) {
            let _ = waiter.reply.send(Err(problem.clone())); // The call may be cancelled.
        }
    }

    /// Logs an outage as an error when it begins and then at growing intervals, other failures at debug
    /// level.
    fn complain(&mut self, address: &str, problem: &Problem, wait: Duration) {
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

/// The connection, if it takes requests as far as is known.
pub(super) fn current(connected: &watch::Sender<Option<Connection>>) -> Option<Connection> {
    let current = connected.borrow();
    current.as_ref().filter(|c| !c.is_closed()).cloned()
}

/// Forgets the current connection if it is this one. Its streams may finish.
pub(super) fn forget(connected: &watch::Sender<Option<Connection>>, identity: &Arc<Connected>) {
    let is_meant = |current: &mut Connection| current.is(identity);
    connected.send_if_modified(|current| current.take_if(is_meant).is_some());
}
