//! Renews the workload's certificate.
//!
//! The task has a certificate signed, publishes it, and waits for the calendar moment of the renewal;
//! after a suspend or a clock set forward that is at once. Failures are retried through the whole
//! remaining lifetime. Another future publishes the mesh's trust bundle.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::Code;

use super::cache::CertificateCache;
use super::certificate::Workload;
use super::metrics::Metrics;
use super::observe::Dates;
use super::schedule::{self, Retries};
use super::trust::{Bundle, MeshBundle};
use super::{Config, Failure, Roots, State};
use crate::ca::key::KeyType;
use crate::ca::{Ca, SignError, csr};
use crate::clock::Clock;
use crate::duration::rounded;
use crate::problem::{Problem, codes, sentence};

/// Why an attempt brought no certificate, with the error of the request if that has failed.
type IssueError = (Problem, Option<SignError>);

/// Limit of one request to the authority, far above the limit of its client.
const SIGNING_LIMIT: Duration = Duration::from_secs(120);

/// So many failures with the code INTERNAL in a row are taken for a refusal.
const PERSISTENT: u32 = 3;

/// How long changed roots are published before the certificate they signed, so that the pod's Envoys
/// have them when the certificate arrives.
const ROOTS_AHEAD: Duration = Duration::from_secs(1);

pub(super) struct Renewal<C> {
    pub(super) config: Config,
    /// The configured one, or RSA if the authority has refused that.
    pub(super) key_type: Mutex<KeyType>,
    pub(super) ca: C,
    pub(super) clock: Clock,
    pub(super) state: watch::Sender<State>,
    pub(super) metrics: Metrics,
    pub(super) authority_roots: Mutex<Option<Roots>>,
    pub(super) mesh: MeshBundle,
    pub(super) cache: Option<CertificateCache>,
}

impl<C: Ca> Renewal<C> {
    pub(super) async fn run(self) {
        tokio::join!(self.keep_fresh(), self.follow_mesh_bundle());
    }

    async fn keep_fresh(&self) {
        let mut retries = Retries::default();
        let mut mesh = self.mesh.subscribe();
        if let Some(due) = self.restore().await {
            let is_first = mesh.borrow_and_update().roots.is_none();
            self.wait_for_renewal(due, &mut mesh, is_first).await;
        }
        loop {
            // The authority may not know of what comes while it answers.
            let is_first = mesh.borrow_and_update().roots.is_none();
            match self.issue(retries.failures > 0).await {
                Ok((workload, answer)) => {
                    let (workload, issued) = (Arc::new(workload), self.clock.now());
                    // A certificate without any lifetime left is renewed with backoff.
                    let pause = if workload.certificate.not_after() > issued {
                        retries = Retries::default();
                        Duration::ZERO
                    } else {
                        retries.next_wait(true, Some(Duration::MAX))
                    };
                    let due = self.adopt(workload.clone(), issued, pause).await;
                    if let Some(cache) = self.cache.clone() {
                        cache.save(workload, answer, issued).await;
                    }
                    self.wait_for_renewal(due, &mut mesh, is_first).await;
                }
                Err((problem, error)) => {
                    let may_pass = error.as_ref().is_some_and(|error| !error.is_lasting());
                    let mut wait = retries.next_wait(may_pass, self.remaining());
                    let next_key = self.next_key(error.as_ref(), retries.failures);
                    if !next_key.is_empty() && *self.key_type.lock() != self.config.key_type {
                        wait = schedule::MIN_WAIT;
                    }
                    self.report((problem, error), (retries.failures, wait), next_key);
                    self.clock.sleep_until_due(self.clock.after(wait)).await;
                }
            }
        }
    }

    /// Waits until the renewal is due. Another trust bundle of the mesh (not the first) brings it
    /// forward to a random moment.
    async fn wait_for_renewal(
        &self,
        mut due: SystemTime,
        mesh: &mut watch::Receiver<Bundle>,
        mut is_first: bool,
    ) {
        loop {
            tokio::select! {
                () = self.clock.sleep_until_due(due) => break,
                // Not an error: this task holds the bundle.
                _ = mesh.changed() => {
                    // The certificate is as new as the first bundle.
                    if !std::mem::take(&mut is_first) {
                        due = due.min(self.clock.after(self.spread()));
                    }
                }
            }
        }
        tracing::debug!(target: "cache", "rotating certificate");
    }

    fn spread(&self) -> Duration {
        let drawn = schedule::drawn(&self.config.spread_by, fastrand::f64());
        let wait = schedule::spread(self.remaining().unwrap_or_default(), drawn);
        let within = rounded(wait);
        tracing::info!(
            target: "cache",
            "the trust bundle of the mesh has changed, renewing the certificate in {within}"
        );
        wait
    }

    /// Publishes a cached certificate. Returns when it is to be renewed.
    async fn restore(&self) -> Option<SystemTime> {
        let now = self.clock.now();
        let (workload, issued) = self.cache.clone()?.restore(now).await?;
        let ttl = left(workload.certificate.not_after(), now);
        tracing::info!(target: "cache", ?ttl, "using the cached workload certificate");
        Some(self.adopt(Arc::new(workload), issued, Duration::ZERO).await)
    }

    /// Publishes a certificate, and returns when it is to be renewed, not before `pause` is over. Changed
    /// roots are published before it, together with the ones they replace: an Envoy's roots then vouch for
    /// its certificate, whichever of the two certificates it holds.
    async fn adopt(
        &self,
        workload: Arc<Workload>,
        issued: SystemTime,
        pause: Duration,
    ) -> SystemTime {
        let due = self.renewal_time(&workload, issued);
        let due = due.max(self.clock.after(pause));
        *self.authority_roots.lock() = Some(workload.roots.clone());
        if let Some(both) = self.both_roots() {
            tracing::info!(target: "cache", "Root cert has changed, start rotating root cert");
            self.state.send_if_modified(|state| {
                let is_new = state.roots.as_ref() != Some(&both);
                state.roots = Some(both);
                is_new
            });
            tokio::time::sleep(ROOTS_AHEAD).await;
        }
        let dates = Dates {
            not_before: workload.certificate.leaf.not_before,
            not_after: workload.certificate.not_after(),
            issued,
            due,
        };
        self.state.send_replace(State {
            workload: Some(workload),
            roots: self.merged_roots(),
            dates: Some(dates),
            failure: None,
        });
        due
    }

    /// Makes one attempt and returns the answer beside what is in it. Each attempt has a new key, so
    /// that no key outlives its certificate.
    async fn issue(&self, is_retry: bool) -> Result<(Workload, Vec<String>), IssueError> {
        let started = Instant::now();
        let (key_type, encoding) = (*self.key_type.lock(), self.config.encoding);
        let identity = self.config.identity.clone();
        let generating = move || csr::generate(key_type, encoding, &identity);
        let request = tokio::task::spawn_blocking(generating).await;
        let request = request.map_err(no_key)?.map_err(no_key)?;
        let answer = self.sign(&request.csr_pem, is_retry).await;
        let answer = answer.map_err(|error| (error.problem.clone(), Some(error)))?;
        let now = self.clock.now();
        let workload = Workload::new(&answer, request.key_pem).map_err(|it| (it, None))?;
        let certificate = &workload.certificate;
        // With none in hand an expired one is better: the clock may be ahead.
        if self.remaining().is_some()
            && certificate.not_after() <= now
            && let Some(problem) = certificate.clock_problem(now)
        {
            return Err((problem.consequence("the last one stays in use"), None));
        }
        for problem in certificate.problems(&self.config.identity, now) {
            tracing::warn!(target: "cache", "{problem}");
        }
        tracing::info!(
            target: "cache",
            resourceName = "default",
            latency = ?started.elapsed(),
            ttl = ?left(workload.certificate.not_after(), now),
            "generated new workload certificate"
        );
        Ok((workload, answer))
    }

    async fn sign(&self, csr_pem: &str, is_retry: bool) -> Result<Vec<String>, SignError> {
        self.metrics.requested(is_retry);
        let started = Instant::now();
        let signed = self.ca.sign(csr_pem, self.config.ttl);
        let answer = match tokio::time::timeout(SIGNING_LIMIT, signed).await {
            Ok(answer) => answer,
            Err(_) => {
                let message = format!("no answer within {}", rounded(SIGNING_LIMIT));
                let (code, subject) = (codes::CERTIFICATE_REQUEST_FAILED, "certificate request");
                Err(SignError {
                    code: Code::DeadlineExceeded,
                    problem: Problem::new(code, subject, &message),
                    message,
                })
            }
        };
        self.metrics.answered(started.elapsed(), answer.is_ok());
        answer
    }

    /// Changes to RSA if the authority may have refused an ECDSA key that no setting asks for, and back
    /// if it refuses RSA as well. Returns a text for the log, empty without a change.
    fn next_key(&self, error: Option<&SignError>, failures: u32) -> &'static str {
        let mut key_type = self.key_type.lock();
        let is_rsa = *key_type != self.config.key_type;
        let is_refused = match error.map(|error| error.code) {
            Some(Code::InvalidArgument | Code::FailedPrecondition | Code::Unimplemented) => true,
            // Some authorities answer with this code whatever their signer says.
            Some(Code::Internal) => is_rsa || failures % (PERSISTENT + 1) == PERSISTENT,
            _ => false,
        };
        if !is_refused || !self.config.falls_back_to_rsa {
            return "";
        }
        if is_rsa {
            *key_type = self.config.key_type;
            return " with an ECDSA key";
        }
        *key_type = KeyType::Rsa(2048);
        " with an RSA 2048 key, because ECC_SIGNATURE_ALGORITHM is not set"
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
        let mut not_after = workload.certificate.not_after();
        if not_after <= issued {
            // By its own clock the certificate is new, or the authority is wrong and may mend soon.
            let life = left(not_after, workload.certificate.leaf.not_before);
            let end = issued.checked_add(life.min(schedule::MAX_DOUBTFUL));
            not_after = end.unwrap_or(issued);
        }
        let due = schedule::renewal_time(issued, not_after, ratio, least_pause);
        let wait = left(due, self.clock.now());
        tracing::debug!(target: "cache", "scheduled certificate for rotation in {wait:?}");
        due
    }

    /// The authority's roots with the mesh's. None before the authority's first answer: with the mesh's
    /// alone Envoy would refuse its own peers.
    fn merged_roots(&self) -> Option<Roots> {
        let authority = self.authority_roots.lock().clone()?;
        Some(match self.mesh.latest() {
            Some(mesh) => authority.with(&mesh),
            None => authority,
        })
    }

    /// The roots published and the roots to be published, if they differ.
    fn both_roots(&self) -> Option<Roots> {
        let published = self.state.borrow().roots.clone()?;
        let merged = self.merged_roots().filter(|merged| *merged != published)?;
        Some(merged.with(&published))
    }

    /// Publishes each trust bundle of the mesh.
    async fn follow_mesh_bundle(&self) {
        let mut mesh = self.mesh.subscribe();
        while mesh.changed().await.is_ok() {
            self.state.send_if_modified(|state| {
                let merged = self.merged_roots();
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

    /// The remaining lifetime of the published certificate; None if it has ended.
    fn remaining(&self) -> Option<Duration> {
        let state = self.state.borrow();
        let certificate = &state.workload.as_ref()?.certificate;
        let left = left(certificate.not_after(), self.clock.now());
        (!left.is_zero()).then_some(left)
    }

    /// Logs a failure, and its repetitions at growing intervals: a line of pilot-agent and one of ours.
    fn report(&self, (problem, error): IssueError, (failures, wait): (u32, Duration), key: &str) {
        let last = self.state.borrow().failure.clone();
        let is_new = last.as_ref().is_none_or(|last| last.problem != problem);
        if is_new || failures.is_power_of_two() {
            let served = match self.remaining().map(rounded) {
                Some(left) => format!("the last certificate is served for {left}"),
                None => "there is no valid certificate".to_owned(),
            };
            let next = format!("next attempt in {}{key}; {served}", rounded(wait));
            let next = format!("failure {failures} in a row, {next}");
            let text = error.as_ref().map(SignError::to_string);
            let text = text.unwrap_or_else(|| problem.found.clone());
            if self.state.borrow().roots.is_none() {
                tracing::warn!(
                    target: "sds",
                    "failed to warm certificate: failed to generate workload certificate: {text}"
                );
            } else if error.is_some() {
                let attempt = failures.saturating_add(1);
                tracing::warn!(
                    target: "ca",
                    "ca request failed, starting attempt {attempt} in {wait:?}"
                );
            }
            let (what, follows) = ("resource:default failed to sign", [&*next, &problem.remedy]);
            let line = sentence(what, &text, "", follows, problem.code.name);
            tracing::error!(target: "cache", "{line}");
        }
        let failure = Failure {
            problem,
            failures,
            since: last.map_or_else(|| self.clock.now(), |last| last.since),
            next_attempt: self.clock.after(wait),
        };
        self.state
            .send_modify(|state| state.failure = Some(failure));
    }
}

fn no_key(error: impl std::fmt::Display) -> IssueError {
    let (code, subject) = (codes::CERTIFICATE_KEY_FAILED, "private key and CSR");
    (Problem::new(code, subject, error), None)
}

fn left(until: SystemTime, now: SystemTime) -> Duration {
    until.duration_since(now).unwrap_or_default()
}
