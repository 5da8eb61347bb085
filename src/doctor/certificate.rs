//! The workload certificate, its files, and other secrets from files.

use std::time::SystemTime;

use super::certificates::{Facts, chain, latest};
use super::report::{Check, Level};
use super::{Running, Subject, run_blocking};
use crate::clock::{Clock, rfc3339};
use crate::config::Config;
use crate::secrets::files::Files;
use crate::secrets::name::Name;
use crate::secrets::{Secret, SecretState, Secrets, Subscription};

const LOG: &str = "istiod logs why: kubectl logs -n istio-system deployment/istiod";
const WORKLOAD: &str = "workload certificate";
const MOUNTED: &str = "mount the files again, or have their issuer renew them";

pub(super) async fn checks(subject: Subject<'_>) -> Vec<Check> {
    let (config, running) = (subject.config, subject.running);
    let served = running.map(|running| Subscription::new(running.secrets.clone(), &running.files));
    let authority = running.and_then(|running| running.secrets.as_ref());
    let (own, mut checks) = own(subject, served.as_ref()).await;
    let now = Clock::system().now();
    let remedy = authority.map_or(MOUNTED, |_| LOG);
    let [certificate, roots] = own;
    let roots = match roots {
        Some(Secret::Roots(roots)) => Some(roots),
        _ => None,
    };
    if let Some(Secret::Certificate(certificate)) = &certificate {
        let roots = roots.as_ref().map(|roots| &**roots.pem());
        checks.push(chain(WORKLOAD, certificate.chain_pem(), roots, remedy, now));
    }
    match authority {
        Some(authority) => checks.push(signed(config, authority, certificate.is_some())),
        None if checks.is_empty() => {
            let why = match running {
                Some(_) => "another process serves it",
                None => "known to a running agent only",
            };
            checks.push(Check::skipped(WORKLOAD, why));
        }
        None => {}
    }
    if let Some(roots) = roots {
        let roots = Facts::of_pem(roots.pem());
        if let Some(latest) = latest(&roots, now) {
            let mut check = latest.life("roots of the mesh", remedy, now);
            check.found = format!("{} in use; {}", roots.len(), check.found);
            checks.push(check);
        }
    }
    if let Some(running) = running {
        checks.extend(of_files(&running.files, now));
    }
    checks
}

/// The workload's certificate and its roots, as served, or as their files hold them where no agent
/// runs; and what is wrong with the files.
async fn own(
    subject: Subject<'_>,
    served: Option<&Subscription>,
) -> ([Option<Secret>; 2], Vec<Check>) {
    let mut secrets = [Name::Default, Name::RootCa].map(|name| served?.get(&name).available());
    let files = subject.config.secret_sources.files.workload.clone();
    let is_other = |running: &Running| !running.serves_secrets;
    let Some(files) = files.filter(|_| !subject.running.is_some_and(is_other)) else {
        return (secrets, Vec::new());
    };
    let (is_only_source, names) = (files.is_only_source, [&files.chain, &files.roots]);
    let names = names.map(|path| path.display().to_string());
    let read = match run_blocking(move || files.read()).await {
        Ok(read) => read,
        Err(late) => {
            let is_missed = is_only_source && secrets[0].is_none();
            let level = if is_missed {
                Level::Error
            } else {
                Level::Warning
            };
            return (secrets, vec![Check::new(&names[0], level, late)]);
        }
    };
    let mut checks = Vec::new();
    for ((name, read), secret) in names.iter().zip(read).zip(&mut secrets) {
        match read {
            Ok(found) if served.is_none() => *secret = Some(found),
            Err(error) if is_only_source || !error.is_absence() => {
                // What was read before stays in use, until the agent ends.
                let level = secret.as_ref().map_or(Level::Error, |_| Level::Warning);
                let check = Check::new(name, level, error).remedy(MOUNTED);
                checks.push(check.expected("certificates in PEM, and the key of the first"));
            }
            _ => {}
        }
    }
    (secrets, checks)
}

/// What the authority has signed.
fn signed(config: &Config, secrets: &Secrets, is_served: bool) -> Check {
    let state = secrets.latest();
    let identity = config.secrets.renewal.identity.to_string();
    let problem = state.problem.as_ref().map(|problem| {
        let (failures, next) = (problem.failures, rfc3339(problem.next_attempt));
        let cause = problem.cause();
        format!("{cause} ({failures} failures, next attempt at {next})")
    });
    if !is_served {
        let check = match problem {
            Some(problem) => Check::error(WORKLOAD, problem),
            None => Check::warning(WORKLOAD, "not signed yet, the request is under way"),
        };
        let expected = format!("one for {identity}");
        return check.expected(expected).remedy(LOG);
    }
    match (problem, state.dates) {
        (Some(problem), _) => Check::warning("renewal", problem).remedy(LOG),
        (None, Some(dates)) => Check::ok("renewal", format!("next at {}", rfc3339(dates.due))),
        (None, None) => Check::ok("renewal", "none has failed"),
    }
}

/// The other secrets from files that Envoy has asked for.
fn of_files(files: &Files, now: SystemTime) -> Vec<Check> {
    let checks = files.others().into_iter().filter_map(|(name, state)| {
        let name = format!("secret {name}");
        match state {
            SecretState::Available(Secret::Certificate(pair)) => {
                Some(chain(&name, pair.chain_pem(), None, MOUNTED, now))
            }
            SecretState::Unusable(error) => {
                let level = match error.is_absence() {
                    true => Level::Warning,
                    false => Level::Error,
                };
                Some(Check::new(name, level, error).expected("it is served").remedy(
                    "listeners and clusters that use it do not work before: mount its files",
                ))
            }
            _ => None,
        }
    });
    checks.collect()
}
