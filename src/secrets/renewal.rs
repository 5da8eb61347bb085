//! Renews the workload's certificate.
//!
//! The task requests a certificate, publishes it, and waits for the calendar moment of the renewal;
//! after a suspend or a clock set forward it renews at once. Failures are retried until the certificate
//! ends, and after that. Another future publishes the mesh's trust bundle.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::Code;

use super::cache::CertificateCache;
use super::certificate::Workload;
use super::metrics::Metrics;
use super::schedule::{self, time_left};
use super::trust::{Bundle, MeshBundle, Roots};
use super::{Config, Dates, Failure, State};
use crate::ca::key::KeyType;
use crate::ca::{Ca, Reached, SignError, csr};
use crate::problem::{self, Problem, sentence};
use crate::runtime::clock::Clock;
use crate::runtime::duration::{rounded, scaled};

/// The reason why an attempt brought no certificate.
#[derive(Debug, thiserror::Error)]
enum IssueError {
    /// No request could be made, or its response cannot be used.
    #[error("{}", .0.found)]
    Unusable(#[from] Problem),
    #[error(transparent)]
    NotSigned(#[from] SignError),
    /// The authority did not get a request.
    #[error(transparent)]
    Unreachable(SignError),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum NextKey {
    Same,
    /// RSA, because the authority may have rejected an ECDSA key that no setting requests.
    Rsa,
    /// The configured type again, because the authority rejects RSA as well.
    Configured,
}

impl NextKey {
    fn text(self) -> &'static str {
        match self {
            Self::Same => "",
            Self::Rsa => " with an RSA 2048 key, because ECC_SIGNATURE_ALGORITHM is not set",
            Self::Configured => " with an ECDSA key",
        }
    }
}

/// The time limit of one request to the authority. It is far above the limit of the authority's client.
const SIGNING_LIMIT: Duration = Duration::from_secs(120);

/// After this many consecutive failures with the code INTERNAL, the key type is assumed to be rejected.
const MAX_INTERNAL_ERRORS: u32 = 3;

/// The time for which changed roots are published before the certificate that they signed, so that the
/// pod's Envoys have them when the certificate arrives.
const ROOTS_AHEAD: Duration = Duration::from_secs(1);

pub(super) struct Renewal<C> {
    pub(super) config: Config,
    /// The configured key type, or RSA if the authority has rejected it.
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
    /// Renews the certificate and follows the mesh's trust bundle. Does not return.
    pub(super) async fn run(self) {
        tokio::join!(self.keep_fresh(), self.follow_mesh_bundle());
    }

    /// Requests, publishes and stores certificates, each when its predecessor is due. Starts with the cached one, if
    /// there is one. Does not return.
    async fn keep_fresh(&self) {
        let mut failures = 0;
        let mut is_overdue = false;
        let mut mesh = self.mesh.subscribe();
        if let Some(due) = self.restore().await {
            is_overdue = due <= self.clock.now();
            // After a restart it is not known whether the first bundle differs from the one before. If it brought
            // the renewal forward, each restart would cost a request.
            let ignores_first_bundle = mesh.borrow_and_update().roots.is_none();
            self.wait_until_renewal_is_due(due, &mut mesh, ignores_first_bundle).await;
        }
        loop {
            self.wait_for_turn(std::mem::take(&mut is_overdue), &mut failures).await;
            // A certificate that was requested before there was a bundle is as new as the first one. This is read before
            // the request, because the authority may not know a bundle that comes during it.
            let ignores_first_bundle = mesh.borrow_and_update().roots.is_none();
            match self.request_certificate().await {
                Ok((workload, response)) => {
                    let workload = Arc::new(workload);
                    let issued = self.clock.now();
                    // A certificate without any lifetime left is renewed with backoff.
                    let pause = if workload.certificate.not_after() > issued {
                        failures = 0;
                        Duration::ZERO
                    } else {
                        schedule::next_wait(&mut failures, false, Some(Duration::MAX))
                    };
                    let due = self.publish(workload.clone(), issued, pause).await;
                    if let Some(cache) = self.cache.clone() {
                        let uncached = cache.save(workload, response, issued).await;
                        // The secrets have not changed, so no subscriber is woken.
                        self.state.send_if_modified(|state| {
                            state.uncached = uncached;
                            false
                        });
                    }
                    self.wait_until_renewal_is_due(due, &mut mesh, ignores_first_bundle).await;
                }
                Err(error) => self.wait_after_failure(error, &mut failures).await,
            }
        }
    }

    /// Waits until the renewal is due. A change of the mesh's trust bundle brings it forward to a random
    /// moment. With `ignores_first_bundle` the first bundle does not; the callers have the reasons.
    async fn wait_until_renewal_is_due(
        &self,
        mut due: SystemTime,
        mesh: &mut watch::Receiver<Bundle>,
        mut ignores_first_bundle: bool,
    ) {
        loop {
            tokio::select! {
                () = self.clock.sleep_until_due(due) => break,
                // The sender is not dropped before this task, which holds it.
                _ = mesh.changed() => {
                    if !std::mem::take(&mut ignores_first_bundle) {
                        due = self.bring_forward(due);
                    }
                }
            }
        }
        tracing::debug!(target: "cache", "rotating certificate");
    }

    /// Draws a random moment for the renewal after a change of the mesh's trust bundle, and logs it. Returns `due`
    /// if that is near: of several moments, the first would be early in most agents.
    fn bring_forward(&self, due: SystemTime) -> SystemTime {
        let spread = schedule::spread(self.remaining_lifetime());
        if time_left(due, self.clock.now()) <= spread {
            return due;
        }
        let wait = scaled(spread, fastrand::f64());
        let within = rounded(wait);
        tracing::info!(
            target: "cache",
            "the trust bundle of the mesh has changed, renewing the certificate within {within}"
        );
        self.clock.after(wait)
    }

    /// Waits until the authority is connected. If it was not, or if the request `is_overdue`, other agents are in the
    /// same situation, and the request waits for a random time. A request that must not wait returns at once.
    async fn wait_for_turn(&self, mut is_overdue: bool, failures: &mut u32) {
        loop {
            if schedule::spread(self.remaining_lifetime()).is_zero() {
                return;
            }
            match self.reach().await {
                Ok(Reached::Before) if !is_overdue => return,
                Ok(_) => {
                    is_overdue = false;
                    // The dial has taken a part of the remaining lifetime.
                    let spread = schedule::spread(self.remaining_lifetime());
                    let wait = scaled(spread, fastrand::f64());
                    let until = self.clock.after(wait);
                    self.state.send_if_modified(|state| {
                        state.failure.iter_mut().for_each(|it| it.next_attempt = until);
                        false
                    });
                    let within = rounded(wait);
                    tracing::info!(
                        target: "cache",
                        "connected to the certificate authority, renewing the certificate within {within}"
                    );
                    self.clock.sleep_until_due(until).await;
                }
                Err(error) => {
                    is_overdue = true;
                    self.wait_after_failure(error, failures).await;
                }
            }
        }
    }

    /// Connects to the authority, if needed. A failure counts as an attempt.
    async fn reach(&self) -> Result<Reached, IssueError> {
        let started = Instant::now();
        self.ca.reach().await.map_err(|error| {
            self.metrics.count_attempt();
            self.metrics.count_result(started.elapsed(), Some(&error));
            IssueError::Unreachable(error)
        })
    }

    /// Reports a failure, and waits until the next attempt is due.
    async fn wait_after_failure(&self, error: IssueError, failures: &mut u32) {
        let request = match &error {
            IssueError::NotSigned(error) => Some(error),
            IssueError::Unusable(_) | IssueError::Unreachable(_) => None,
        };
        let was_sent = !matches!(error, IssueError::Unreachable(_));
        let mut wait = schedule::next_wait(failures, was_sent, self.remaining_lifetime());
        let next_key = self.switch_key_type(request, *failures);
        if next_key == NextKey::Rsa {
            wait = schedule::MIN_WAIT;
        }
        self.report(error, *failures, wait, next_key);
        self.clock.sleep_until_due(self.clock.after(wait)).await;
    }

    /// Publishes and logs a cached certificate. Returns when it is to be renewed; None without a usable one.
    async fn restore(&self) -> Option<SystemTime> {
        let now = self.clock.now();
        let (workload, issued) = self.cache.clone()?.restore(now).await?;
        let ttl = time_left(workload.certificate.not_after(), now);
        tracing::info!(target: "cache", ?ttl, "using the cached workload certificate");
        Some(self.publish(Arc::new(workload), issued, Duration::ZERO).await)
    }

    /// Publishes a certificate, and returns when it is to be renewed, not before `pause` is over. Changed
    /// roots are published before it, together with the roots they replace: Envoy can then verify the old
    /// and the new certificate.
    async fn publish(
        &self,
        workload: Arc<Workload>,
        issued: SystemTime,
        pause: Duration,
    ) -> SystemTime {
        let due = self.renewal_time(&workload, issued).max(self.clock.after(pause));
        *self.authority_roots.lock() = Some(workload.roots.clone());
        if let Some((published, next)) = self.changed_roots() {
            self.publish_roots(next.union(&published));
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
            uncached: None,
        });
        due
    }

    /// Requests a certificate once. Returns it with the response that contains it. Fails if no key can be made, if
    /// the authority does not sign, or if the certificate cannot be used; other problems of it are logged. Each
    /// attempt has a new key, so that no key outlives its certificate.
    async fn request_certificate(&self) -> Result<(Workload, Vec<String>), IssueError> {
        let started = Instant::now();
        let key_type = *self.key_type.lock();
        let encoding = self.config.encoding;
        let identity = self.config.identity.clone();
        let request =
            tokio::task::spawn_blocking(move || csr::generate(key_type, encoding, &identity))
                .await
                .map_err(key_problem)?
                .map_err(key_problem)?;
        let response = self.sign(&request.csr_pem).await?;
        let now = self.clock.now();
        let workload = Workload::new(&response, request.key_pem)?;
        let certificate = &workload.certificate;
        // Without a current certificate an expired one is better than none: this clock may be ahead.
        if self.remaining_lifetime().is_some()
            && certificate.not_after() <= now
            && let Some(problem) = certificate.clock_problem(now)
        {
            return Err(problem.consequence("the last one stays in use").into());
        }
        for problem in certificate.problems(&self.config.identity, now) {
            tracing::warn!(target: "cache", "{problem}");
        }
        tracing::info!(
            target: "cache",
            resourceName = "default",
            latency = ?started.elapsed(),
            ttl = ?time_left(certificate.not_after(), now),
            "generated new workload certificate"
        );
        Ok((workload, response))
    }

    /// Sends a CSR to the authority, within [`SIGNING_LIMIT`]. Counts the attempt and its result.
    async fn sign(&self, csr_pem: &str) -> Result<Vec<String>, SignError> {
        self.metrics.count_attempt();
        let started = Instant::now();
        let signing = self.ca.sign(csr_pem, self.config.ttl);
        let response = match tokio::time::timeout(SIGNING_LIMIT, signing).await {
            Ok(response) => response,
            Err(_) => {
                let message = format!("no answer within {}", rounded(SIGNING_LIMIT));
                let code = problem::Code::CertificateRequestFailed;
                Err(SignError {
                    code: Code::DeadlineExceeded,
                    problem: Problem::new(code, "certificate request", &message),
                    message,
                })
            }
        };
        self.metrics.count_result(started.elapsed(), response.as_ref().err());
        response
    }

    /// Switches to RSA if the authority may have rejected an ECDSA key that no setting requests, and back
    /// if it rejects RSA as well.
    fn switch_key_type(&self, error: Option<&SignError>, failures: u32) -> NextKey {
        let mut key_type = self.key_type.lock();
        let is_rsa = *key_type != self.config.key_type;
        let is_rejected = match error.map(|error| error.code) {
            Some(Code::InvalidArgument | Code::FailedPrecondition | Code::Unimplemented) => true,
            // Some authorities return this code for every error of their signer.
            Some(Code::Internal) => {
                is_rsa || failures % (MAX_INTERNAL_ERRORS + 1) == MAX_INTERNAL_ERRORS
            }
            _ => false,
        };
        if !is_rejected || !self.config.falls_back_to_rsa {
            return NextKey::Same;
        }
        if is_rsa {
            *key_type = self.config.key_type;
            return NextKey::Configured;
        }
        *key_type = KeyType::Rsa(2048);
        NextKey::Rsa
    }

    /// Computes and logs when a certificate that was taken into use at `issued` is to be renewed. The moment is
    /// partly random.
    fn renewal_time(&self, workload: &Workload, issued: SystemTime) -> SystemTime {
        let config = &self.config;
        let ratio = schedule::jittered(config.grace_ratio, config.grace_jitter, fastrand::f64());
        let mut not_after = workload.certificate.not_after();
        if not_after <= issued {
            // This clock may be ahead, or the authority's is wrong and may be corrected soon.
            let lifetime = time_left(not_after, workload.certificate.leaf.not_before);
            let assumed = lifetime.min(schedule::MAX_ASSUMED_LIFETIME);
            not_after = issued.checked_add(assumed).unwrap_or(issued);
        }
        let due = schedule::renewal_time(issued, not_after, ratio, &config.least_pause);
        let wait = time_left(due, self.clock.now());
        tracing::debug!(target: "cache", "scheduled certificate for rotation in {wait:?}");
        due
    }

    /// Merges the roots of the authority and of the mesh. Returns None before the authority's first response:
    /// with the roots of the mesh alone Envoy would reject its own peers.
    fn merged_roots(&self) -> Option<Roots> {
        let authority = self.authority_roots.lock().clone()?;
        Some(match self.mesh.latest() {
            Some(mesh) => authority.union(&mesh),
            None => authority,
        })
    }

    /// Returns the published roots and the next ones, if they differ. Before the first certificate there is
    /// nothing to publish.
    fn changed_roots(&self) -> Option<(Roots, Roots)> {
        let published = self.state.borrow().roots.clone()?;
        let next = self.merged_roots().filter(|next| *next != published)?;
        Some((published, next))
    }

    fn publish_roots(&self, roots: Roots) {
        tracing::info!(target: "cache", "Root cert has changed, start rotating root cert");
        self.state.send_if_modified(|state| state.roots.replace(roots) != state.roots);
    }

    async fn follow_mesh_bundle(&self) {
        let mut mesh = self.mesh.subscribe();
        while mesh.changed().await.is_ok() {
            if let Some((_, next)) = self.changed_roots() {
                self.publish_roots(next);
            }
        }
    }

    /// Returns the remaining lifetime of the published certificate; None if it has ended or there is none.
    fn remaining_lifetime(&self) -> Option<Duration> {
        let state = self.state.borrow();
        let certificate = &state.workload.as_ref()?.certificate;
        let left = time_left(certificate.not_after(), self.clock.now());
        if left.is_zero() { None } else { Some(left) }
    }

    /// Publishes a failure and logs it: pilot-agent's line and one of this agent. Repetitions are logged at
    /// growing intervals.
    fn report(&self, error: IssueError, failures: u32, wait: Duration, next_key: NextKey) {
        let text = error.to_string();
        let (problem, is_request) = match error {
            IssueError::Unusable(problem) => (problem, false),
            IssueError::NotSigned(error) | IssueError::Unreachable(error) => (error.problem, true),
        };
        let last = self.state.borrow().failure.clone();
        let is_new = last.as_ref().is_none_or(|last| last.problem != problem);
        if is_new || failures.is_power_of_two() {
            let served = match self.remaining_lifetime().map(rounded) {
                Some(left) => format!("the last certificate is served for {left}"),
                None => "there is no valid certificate".to_owned(),
            };
            let wait_text = rounded(wait);
            let follows = format!(
                "failure {failures} in a row, next attempt in {wait_text}{}; {served}",
                next_key.text()
            );
            if self.state.borrow().roots.is_none() {
                tracing::warn!(
                    target: "sds",
                    "failed to warm certificate: failed to generate workload certificate: {text}"
                );
            } else if is_request {
                tracing::warn!(
                    target: "ca",
                    "ca request failed, starting attempt {} in {wait:?}",
                    failures.saturating_add(1)
                );
            }
            let what = "resource:default failed to sign";
            let line = sentence(what, &text, "", [&*follows, &problem.remedy], problem.code.name());
            tracing::error!(target: "cache", "{line}");
        }
        let failure = Failure {
            problem,
            failures,
            since: last.map_or_else(|| self.clock.now(), |last| last.since),
            next_attempt: self.clock.after(wait),
        };
        self.state.send_modify(|state| state.failure = Some(failure));
    }
}

fn key_problem(error: impl std::fmt::Display) -> Problem {
    Problem::new(problem::Code::CertificateKeyFailed, "private key and CSR", error)
}
