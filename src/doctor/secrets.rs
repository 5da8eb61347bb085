//! Checks the workload certificate, its files, and other secrets from files.

use std::time::SystemTime;

use bytes::Bytes;
use rustix::fs::{Access, access};

use super::cert_chain::{ROOTS, chain, latest};
use super::{Subject, run_blocking};
use crate::problem::{Code, Level, Problem};
use crate::report::Check;
use crate::runtime::clock::{Clock, rfc3339};
use crate::sds::revocation_problem;
use crate::secrets::files::Files;
use crate::secrets::name::Name;
use crate::secrets::{Facts, Secret, SecretState, Secrets, Subscription, WORKLOAD, output};

pub(super) async fn checks(subject: Subject<'_>) -> Vec<Check> {
    let Subject { config, running } = subject;
    let served = running.map(|running| Subscription::new(running.secrets.clone(), &running.files));
    let authority = running.and_then(|running| running.secrets.as_ref());
    let ([certificate, roots], mut checks) = workload_secrets(subject, served.as_ref()).await;
    let now = Clock::system().now();
    let roots = match roots {
        Some(Secret::Roots(roots)) => Some(roots.pem().clone()),
        _ => None,
    };
    let mut pem = Bytes::new();
    if let Some(Secret::Certificate(certificate)) = &certificate {
        pem = certificate.chain_pem().clone();
        checks.push(match &authority.and_then(|_| certificate.clock_problem(now)) {
            Some(problem) => Check::from(problem),
            None => chain(WORKLOAD, &pem, roots.as_deref(), now),
        });
    }
    if let Some(authority) = authority {
        checks.push(renewal(authority, certificate.is_some()));
    } else if checks.is_empty() {
        let why = running.map_or("known to a running agent only", |_| "another process serves it");
        checks.push(Check::skipped(WORKLOAD, why));
    }
    let roots = Facts::of_pem(roots.as_deref().unwrap_or_default());
    let are_expired = checks.iter().any(|check| check.code == Code::RootsExpired.name());
    if !are_expired && let Some(latest) = latest(&roots, now) {
        let mut check = latest.validity(ROOTS, now);
        check.found = format!("{} in use; {}", roots.len(), check.found);
        checks.push(check);
    }
    if running.is_none_or(|running| running.serves_secrets) {
        let crl = config.secret_sources.options.crl.clone();
        let output = config.secrets.output.clone();
        let problems = run_blocking(move || {
            [crl.and_then(|path| revocation_problem(&path, &pem)), output.and_then(unwritable)]
        });
        for problem in problems.await.into_iter().flatten().flatten() {
            checks.push(Check::from(&problem));
        }
    }
    if let Some(running) = running {
        checks.extend(running.rejections.lock().values().map(Check::from));
        checks.extend(other_secrets(&running.files, now));
    }
    checks
}

fn unwritable(output: output::Config) -> Option<Problem> {
    Some(output::problem(&output, access(&output.directory, Access::WRITE_OK).err()?.into()))
}

/// Returns the workload's certificate and its roots: those that are served or, if no agent runs, those in the files.
/// Also returns the problems of the files.
async fn workload_secrets(
    subject: Subject<'_>,
    served: Option<&Subscription>,
) -> ([Option<Secret>; 2], Vec<Check>) {
    let mut secrets = [Name::Default, Name::RootCa].map(|name| served?.get(&name).available());
    if subject.running.is_some_and(|running| !running.serves_secrets) {
        return (secrets, Vec::new());
    }
    let Some(files) = subject.config.secret_sources.files.workload.clone() else {
        return (secrets, Vec::new());
    };
    let is_only_source = files.is_only_source;
    let path = files.chain.display().to_string();
    let read = run_blocking(move || files.read()).await.unwrap_or_else(|late| {
        let problem = Problem::new(Code::SecretFileUnreadable, path, late);
        [Err(problem.clone()), Err(problem)]
    });
    let mut checks = Vec::new();
    for (read, secret) in read.into_iter().zip(&mut secrets) {
        match read {
            Ok(found) if served.is_none() => *secret = Some(found),
            Err(problem) if is_only_source || problem.code != Code::SecretFileMissing => {
                // The agent continues to use the secret that it has read before.
                let level = secret.as_ref().map_or(Level::Error, |_| Level::Warning);
                checks.push(Check::with_level(level, &problem));
            }
            _ => {}
        }
    }
    (secrets, checks)
}

fn renewal(secrets: &Secrets, is_served: bool) -> Check {
    match (secrets.problem(), secrets.latest().dates) {
        (Some(problem), _) if is_served || problem.code == Code::CertificateNotIssued => {
            Check::with_level(Level::Warning, &problem)
        }
        (Some(problem), _) => Check::from(&problem),
        (None, Some(dates)) => Check::ok("renewal", format!("next at {}", rfc3339(dates.due))),
        (None, None) => Check::ok("renewal", "none has failed"),
    }
}

/// Checks the other secrets from files that Envoy has requested.
fn other_secrets(files: &Files, now: SystemTime) -> Vec<Check> {
    let mut checks = Vec::new();
    for (name, state) in files.others() {
        match state {
            SecretState::Available(Secret::Certificate(pair)) => {
                checks.push(chain(&format!("secret {name}"), pair.chain_pem(), None, now));
            }
            SecretState::Unusable(problem) => checks.push(Check::from(&*problem)),
            _ => {}
        }
    }
    checks
}
