//! The task that renews: what to do when, and what to do when it fails.
//!
//! It signs, publishes, and waits for the calendar moment of the renewal; a suspended machine or a
//! clock that was set renews at once. A failure is retried through the whole remaining life. Beside
//! it runs the one other writer of the state, which withdraws a certificate that has expired.
//!
//! Does not serve anybody: see [`super::Secrets`].

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::watch;
use tokio::time::Instant;

use super::certificate::{CertificateError, Workload};
use super::metrics::Metrics;
use super::observe::{Issued, Record};
use super::{Config, Problem, State, schedule};
use crate::backoff::Backoff;
use crate::ca::csr::{self, CsrError};
use crate::ca::{Ca, Retry, SignError};
use crate::clock::{Clock, rfc3339};

/// Why an attempt brought no certificate.
#[derive(Debug, thiserror::Error)]
pub enum IssueError {
    #[error("failed to generate private key and CSR")]
    Request(#[from] CsrError),
    #[error("key generation was interrupted")]
    Interrupted(#[from] tokio::task::JoinError),
    #[error(transparent)]
    Sign(#[from] SignError),
    #[error("create certificate: no answer within {SIGNING_LIMIT:?}")]
    Silent,
    #[error("unusable answer of the certificate authority")]
    Certificate(#[from] CertificateError),
}

/// After this time an authority that does not answer counts as one that failed. Far above what its
/// client allows a call and its retries.
const SIGNING_LIMIT: Duration = Duration::from_secs(120);

/// How long changed roots are published before the certificate they have signed, so that every
/// Envoy of the pod has them when the certificate arrives.
const ROOTS_AHEAD: Duration = Duration::from_secs(1);

pub(super) struct Renewal<C> {
    pub(super) config: Config,
    pub(super) ca: C,
    pub(super) clock: Clock,
    pub(super) state: watch::Sender<State>,
    pub(super) metrics: Metrics,
    pub(super) record: Record,
}

impl<C: Ca> Renewal<C> {
    /// Renews for ever.
    pub(super) async fn run(self) {
        tokio::join!(self.keep_fresh(), self.withdraw_expired());
    }

    async fn keep_fresh(&self) {
        let mut retries = Retries::new();
        loop {
            match self.issue(retries.failures > 0).await {
                Ok(workload) => {
                    retries = Retries::new();
                    let due = self.renewal_time(&workload);
                    self.note(&workload, due);
                    self.publish(Arc::new(workload)).await;
                    self.clock.sleep_until(due).await;
                    tracing::debug!(target: "cache", "rotating certificate");
                }
                Err(error) => {
                    let wait = retries.next_wait(&error, self.remaining());
                    self.report(error, retries.failures, wait);
                    tokio::time::sleep(wait).await;
                }
            }
        }
    }

    /// One attempt. A new key each time, so that no key outlives its certificate.
    async fn issue(&self, is_retry: bool) -> Result<Workload, IssueError> {
        let started = Instant::now();
        let (key_type, identity) = (self.config.key_type, self.config.identity.clone());
        let request =
            tokio::task::spawn_blocking(move || csr::generate(key_type, &identity)).await??;
        let answer = self.sign(&request.csr_pem, is_retry).await?;
        let now = self.clock.now();
        let workload = Workload::new(&answer, request.key_pem, now)?;
        for oddity in workload.certificate.oddities(&self.config.identity, now) {
            tracing::warn!(target: "cache", "resource:default is used although {oddity}");
        }
        tracing::info!(
            target: "cache",
            resourceName = "default",
            latency = ?started.elapsed(),
            ttl = ?left(workload.certificate.not_after(), now),
            "generated new workload certificate"
        );
        Ok(workload)
    }

    async fn sign(&self, csr_pem: &str, is_retry: bool) -> Result<Vec<String>, IssueError> {
        let started = Instant::now();
        self.metrics.asks(is_retry);
        let signed = self.ca.sign(csr_pem, self.config.ttl);
        let answer = match tokio::time::timeout(SIGNING_LIMIT, signed).await {
            Ok(answer) => answer.map_err(IssueError::Sign),
            Err(_) => Err(IssueError::Silent),
        };
        self.metrics.answered(started.elapsed(), answer.is_ok());
        answer
    }

    fn renewal_time(&self, workload: &Workload) -> SystemTime {
        let Config {
            grace_ratio,
            grace_jitter,
            ref least_pause,
            ..
        } = self.config;
        let ratio = schedule::varied(grace_ratio, grace_jitter, fastrand::f64() * 2.0 - 1.0);
        let now = self.clock.now();
        let due = schedule::renewal_time(now, workload.certificate.not_after(), ratio, least_pause);
        let wait = left(due, now);
        tracing::debug!(target: "cache", "scheduled certificate for rotation in {wait:?}");
        due
    }

    fn note(&self, workload: &Workload, due: SystemTime) {
        self.record.issue(Issued {
            not_before: workload.certificate.not_before(),
            not_after: workload.certificate.not_after(),
            at: self.clock.now(),
            due,
        });
    }

    async fn publish(&self, workload: Arc<Workload>) {
        let roots = Some(workload.roots.clone());
        let roots_changed = {
            let state = self.state.borrow();
            state.roots.is_some() && state.roots != roots
        };
        if roots_changed {
            tracing::info!(target: "cache", "Root cert has changed, start rotating root cert");
            self.state
                .send_modify(|state| state.roots.clone_from(&roots));
            tokio::time::sleep(ROOTS_AHEAD).await;
        }
        self.state.send_replace(State {
            workload: Some(workload),
            roots,
            problem: None,
        });
    }

    /// How long the certificate in hand has to live.
    fn remaining(&self) -> Option<Duration> {
        let not_after = self
            .state
            .borrow()
            .workload
            .as_ref()?
            .certificate
            .not_after();
        Some(left(not_after, self.clock.now()))
    }

    fn report(&self, error: IssueError, failures: u32, wait: Duration) {
        let problem = Problem {
            error: Arc::new(error),
            failures,
            next_attempt: self.clock.now() + wait,
        };
        let cause = problem.cause();
        let next = format!("failure {failures} in a row, next attempt in {wait:?}");
        tracing::error!(target: "cache", "resource:default failed to sign: {cause}; {next}");
        if self.state.borrow().roots.is_none() {
            tracing::warn!(
                target: "sds",
                "failed to warm certificate: failed to generate workload certificate: {cause}; \
                 {next}"
            );
        }
        self.state
            .send_modify(|state| state.problem = Some(problem));
    }

    /// An expired certificate is no longer served; the roots are, as peers still prove themselves
    /// with them.
    async fn withdraw_expired(&self) {
        let mut published = self.state.subscribe();
        loop {
            let workload = published.borrow_and_update().workload.clone();
            let expiry = async {
                match &workload {
                    Some(workload) => {
                        let not_after = workload.certificate.not_after();
                        self.clock.sleep_until(not_after).await;
                    }
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                // Not an error: this task itself holds the sender.
                _ = published.changed() => {}
                () = expiry => self.withdraw_if_expired(),
            }
        }
    }

    /// Looks again at what is published: a new certificate may have come in the same moment.
    fn withdraw_if_expired(&self) {
        let now = self.clock.now();
        let expired = |workload: &mut Arc<Workload>| workload.certificate.not_after() <= now;
        self.state.send_if_modified(|state| {
            let Some(workload) = state.workload.take_if(expired) else {
                return false;
            };
            tracing::error!(
                target: "cache",
                "resource:default expired at {}; withdrawn until a new one is signed",
                rfc3339(workload.certificate.not_after())
            );
            true
        });
    }
}

fn left(until: SystemTime, now: SystemTime) -> Duration {
    until.duration_since(now).unwrap_or_default()
}

/// The failures since the last success.
struct Retries {
    failures: u32,
    backoff: Backoff,
}

impl Retries {
    fn new() -> Self {
        Self {
            failures: 0,
            backoff: Backoff::new(schedule::RETRY_BASE, schedule::RETRY_BASE),
        }
    }

    fn next_wait(&mut self, error: &IssueError, remaining: Option<Duration>) -> Duration {
        self.failures = self.failures.saturating_add(1);
        let cap = schedule::retry_cap(remaining);
        self.backoff.set_cap(cap);
        let wait = self.backoff.next_wait();
        if may_pass(error) {
            wait
        } else {
            Backoff::new(cap, cap).next_wait()
        }
    }
}

/// Whether the cause may go away by itself within seconds. Others are asked about again too, as an
/// operator may have put them right, but not in haste.
fn may_pass(error: &IssueError) -> bool {
    match error {
        IssueError::Sign(error) => error.retry() == Retry::Soon,
        IssueError::Silent | IssueError::Interrupted(_) => true,
        IssueError::Request(_) | IssueError::Certificate(_) => false,
    }
}
