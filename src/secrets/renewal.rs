//! The task that renews: what to do when, and what to do when it fails.
//!
//! It signs, publishes, and waits for the calendar moment of the renewal; a suspended machine or a
//! clock that was set renews at once. A failure is retried through the whole remaining life. Beside
//! it run the other writers of the state: one withdraws a certificate that has expired, one
//! publishes roots of the mesh. A certificate that was kept is as good as one just signed.
//!
//! Does not serve anybody: see [`super::Secrets`].

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::watch;
use tokio::time::Instant;

use super::certificate::{CertificateError, Workload};
use super::keep::Keep;
use super::metrics::Metrics;
use super::observe::{Issued, Record};
use super::trust::Trust;
use super::{Config, Problem, Roots, State, schedule};
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

/// A certificate just signed, and the answer it came in.
struct New {
    workload: Workload,
    answer: Vec<String>,
}

pub(super) struct Renewal<C> {
    pub(super) config: Config,
    pub(super) ca: C,
    pub(super) clock: Clock,
    pub(super) state: watch::Sender<State>,
    pub(super) metrics: Metrics,
    pub(super) record: Record,
    pub(super) trust: Trust,
    pub(super) keep: Option<Keep>,
}

impl<C: Ca> Renewal<C> {
    /// Renews for ever.
    pub(super) async fn run(self) {
        tokio::join!(
            self.keep_fresh(),
            self.withdraw_expired(),
            self.follow_mesh()
        );
    }

    async fn keep_fresh(&self) {
        let mut retries = Retries::new();
        let mut mesh = self.trust.mesh();
        if let Some(due) = self.restore().await {
            let is_first = mesh.borrow_and_update().is_none();
            self.wait_for_renewal(due, &mut mesh, is_first).await;
        }
        loop {
            // The authority may not know of what comes while it answers.
            let is_first = mesh.borrow_and_update().is_none();
            match self.issue(retries.failures > 0).await {
                Ok(new) => {
                    retries = Retries::new();
                    let now = self.clock.now();
                    let due = self.renewal_time(&new.workload, now);
                    self.note(&new.workload, now, due);
                    let workload = Arc::new(new.workload);
                    self.publish(workload.clone()).await;
                    if let Some(keep) = self.keep.clone() {
                        keep.save(workload, new.answer, now).await;
                    }
                    self.wait_for_renewal(due, &mut mesh, is_first).await;
                }
                Err(error) => {
                    let wait = retries.next_wait(&error, self.remaining());
                    self.report(error, retries.failures, wait);
                    self.clock.sleep_until_due(self.clock.now() + wait).await;
                }
            }
        }
    }

    /// Until the renewal is due, or until another bundle of the mesh makes it due earlier, at a
    /// moment of our own. A first bundle does not.
    async fn wait_for_renewal(
        &self,
        mut due: SystemTime,
        mesh: &mut watch::Receiver<Option<Roots>>,
        mut is_first: bool,
    ) {
        loop {
            tokio::select! {
                () = self.clock.sleep_until_due(due) => break,
                changed = mesh.changed() => {
                    if changed.is_err() {
                        // Nobody can send another bundle.
                        self.clock.sleep_until_due(due).await;
                        break;
                    }
                    // The certificate is as new as the first bundle.
                    if !std::mem::take(&mut is_first) {
                        due = due.min(self.clock.now() + self.spread());
                    }
                }
            }
        }
        tracing::debug!(target: "cache", "rotating certificate");
    }

    fn spread(&self) -> Duration {
        let drawn = schedule::drawn(&self.config.spread_by, fastrand::f64());
        let wait = schedule::spread(self.remaining().unwrap_or_default(), drawn);
        tracing::info!(
            target: "cache",
            "the trust bundle of the mesh has changed, renewing in {wait:?} at the latest"
        );
        wait
    }

    /// Publishes what was kept. Returns when it is to be renewed.
    async fn restore(&self) -> Option<SystemTime> {
        let keep = self.keep.clone()?;
        let now = self.clock.now();
        let (workload, issued) = keep.restore(now).await?;
        let due = self.renewal_time(&workload, issued);
        let ttl = left(workload.certificate.not_after(), now);
        tracing::info!(target: "cache", ?ttl, "using the workload certificate that was kept");
        self.note(&workload, issued, due);
        self.publish(Arc::new(workload)).await;
        Some(due)
    }

    /// One attempt. A new key each time, so that no key outlives its certificate.
    async fn issue(&self, is_retry: bool) -> Result<New, IssueError> {
        let started = Instant::now();
        let Config {
            key_type, encoding, ..
        } = self.config;
        let identity = self.config.identity.clone();
        let generating = move || csr::generate(key_type, encoding, &identity);
        let request = tokio::task::spawn_blocking(generating).await??;
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
        Ok(New { workload, answer })
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

    /// For a certificate taken into use at `issued`.
    fn renewal_time(&self, workload: &Workload, issued: SystemTime) -> SystemTime {
        let Config {
            grace_ratio,
            grace_jitter,
            ref least_pause,
            ..
        } = self.config;
        let drawn = schedule::drawn(&self.config.spread_by, fastrand::f64());
        let ratio = schedule::varied(grace_ratio, grace_jitter, drawn * 2.0 - 1.0);
        let not_after = workload.certificate.not_after();
        let due = schedule::renewal_time(issued, not_after, ratio, least_pause);
        let wait = left(due, self.clock.now());
        tracing::debug!(target: "cache", "scheduled certificate for rotation in {wait:?}");
        due
    }

    fn note(&self, workload: &Workload, issued: SystemTime, due: SystemTime) {
        self.record.issue(Issued {
            not_before: workload.certificate.not_before(),
            not_after: workload.certificate.not_after(),
            at: issued,
            due,
        });
    }

    /// Changed roots go ahead, together with those they replace: whichever of the two certificates
    /// an Envoy holds at a moment, it is one its roots vouch for.
    async fn publish(&self, workload: Arc<Workload>) {
        self.trust.learn(&workload.roots);
        if let Some(both) = self.both_roots() {
            tracing::info!(target: "cache", "Root cert has changed, start rotating root cert");
            self.state.send_if_modified(|state| {
                let is_new = state.roots.as_ref() != Some(&both);
                state.roots = Some(both);
                is_new
            });
            tokio::time::sleep(ROOTS_AHEAD).await;
        }
        self.state.send_replace(State {
            workload: Some(workload),
            roots: self.trust.merged(),
            problem: None,
        });
    }

    /// The roots published and those to be published, if they differ.
    fn both_roots(&self) -> Option<Roots> {
        let published = self.state.borrow().roots.clone()?;
        let merged = self.trust.merged().filter(|merged| *merged != published)?;
        Some(merged.with(&published))
    }

    /// Publishes roots of the mesh as they come.
    async fn follow_mesh(&self) {
        let mut mesh = self.trust.mesh();
        while mesh.changed().await.is_ok() {
            self.state.send_if_modified(|state| {
                let merged = self.trust.merged();
                // Before the first certificate there is nothing to publish.
                let is_new = state.roots.is_some() && state.roots != merged;
                if is_new {
                    tracing::info!(
                        target: "cache",
                        "Root cert has changed, start rotating root cert"
                    );
                    state.roots = merged;
                }
                is_new
            });
        }
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
        if let IssueError::Sign(_) | IssueError::Silent = *problem.error {
            let attempt = failures.saturating_add(1);
            tracing::warn!(
                target: "ca",
                "ca request failed, starting attempt {attempt} in {wait:?}"
            );
        }
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
        let wait = if may_pass(error) {
            wait
        } else {
            Backoff::new(cap, cap).next_wait()
        };
        wait.max(schedule::LEAST_WAIT)
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
