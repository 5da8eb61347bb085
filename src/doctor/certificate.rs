//! The workload certificate, kept and written copies of it, and the streams that ask for secrets.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::certificates::Facts;
use super::report::{Check, Level};
use super::{Subject, aside};
use crate::clock::rfc3339;
use crate::config::Config;
use crate::duration::approximate;
use crate::regular_file;
use crate::sds::{Consumer, Consumers};
use crate::secrets::{Secrets, kept_certificate};
use crate::trust_anchors::LARGEST;

const WORKLOAD: &str = "workload certificate";
const LOG: &str = "istiod logs why: kubectl logs -n istio-system deployment/istiod";
const MOUNTED: &str = "mount the files again, or have their issuer renew them";

pub(super) async fn checks(subject: Subject<'_>) -> Vec<Check> {
    let config = subject.config;
    let running = subject.running;
    let mut checks = match running.and_then(|running| running.secrets.as_ref()) {
        Some(secrets) => signed(config, secrets),
        None => from_files(config, running.is_some()).await,
    };
    checks.extend(kept(config).await);
    checks.extend(
        running
            .map(|running| consumers(config, &running.consumers))
            .into_iter()
            .flatten(),
    );
    checks
}

/// What the authority has signed.
fn signed(config: &Config, secrets: &Secrets) -> Vec<Check> {
    let (state, now) = (secrets.latest(), SystemTime::now());
    let identity = config.secrets.renewal.identity.to_string();
    let problem = state.problem.as_ref().map(|problem| {
        let (failures, next) = (problem.failures, rfc3339(problem.next_attempt));
        format!(
            "{} ({failures} failures, next attempt at {next})",
            problem.cause()
        )
    });
    let Some(workload) = &state.workload else {
        let check = match problem {
            Some(problem) => Check::error(WORKLOAD, problem),
            None => Check::warning(WORKLOAD, "not signed yet, the request is under way"),
        };
        let expected = format!("one for {identity}");
        return vec![check.expected(expected).remedy(LOG)];
    };
    let facts = Facts::of_pem(workload.certificate.chain_pem());
    let mut checks = Vec::new();
    if let Some(leaf) = facts.first() {
        checks.push(leaf.life(WORKLOAD, LOG, now));
        if !leaf.names.contains(&identity) {
            let remedy = "set TRUST_DOMAIN to that of the mesh";
            let check = Check::warning("identity", leaf).expected(&identity);
            checks.push(check.remedy(remedy));
        }
    }
    checks.push(match (problem, state.dates) {
        (Some(problem), _) => Check::warning("renewal", problem).remedy(LOG),
        (None, Some(dates)) => Check::ok("renewal", format!("next at {}", rfc3339(dates.due))),
        (None, None) => Check::ok("renewal", "none has failed"),
    });
    let roots = state.roots.map(|roots| Facts::of_pem(roots.pem()));
    let roots = roots.unwrap_or_default();
    if let Some(latest) = roots.iter().max_by_key(|root| root.not_after) {
        let mut check = latest.life("roots of the mesh", LOG, now);
        check.found = format!("{} in use; {}", roots.len(), check.found);
        checks.push(check);
    }
    checks
}

/// What files say: those the workload's certificate comes from, or those it is written to.
async fn from_files(config: &Config, is_running: bool) -> Vec<Check> {
    let output = config.secrets.output.as_ref();
    let mut files: Vec<_> = output
        .map(|output| (output.directory.join("cert-chain.pem"), false))
        .into_iter()
        .collect();
    if let Some(workload) = &config.secret_sources.files.workload {
        files.push((workload.chain.clone(), workload.is_only_source));
        files.push((workload.roots.clone(), workload.is_only_source));
    }
    let mut checks = Vec::new();
    for (path, is_required) in files {
        checks.extend(file(path, is_required).await);
    }
    if checks.is_empty() {
        let why = match is_running {
            true => "another process serves it",
            false => "known to a running agent only",
        };
        checks.push(Check::skipped(WORKLOAD, why));
    }
    checks
}

/// The first certificate of a file, if it is there.
async fn file(path: PathBuf, is_required: bool) -> Option<Check> {
    let name = path.display().to_string();
    let missing = |problem: String| {
        is_required.then(|| {
            let check = Check::error(&name, problem).expected("certificates in PEM");
            check.remedy(MOUNTED)
        })
    };
    let pem = match aside(move || regular_file::read(&path, LARGEST)).await {
        Ok(Ok(pem)) => pem,
        Ok(Err(error)) => return missing(error.to_string()),
        Err(late) => return missing(late),
    };
    match Facts::of_pem(&pem).first() {
        Some(first) => {
            let life = first.life(&name, MOUNTED, SystemTime::now());
            // The agent replaces it at its start.
            let level = if is_required {
                life.level
            } else {
                life.level.min(Level::Warning)
            };
            Some(Check { level, ..life })
        }
        None => missing(format!("no certificate in {} bytes", pem.len())),
    }
}

/// The certificate that a restart finds.
async fn kept(config: &Config) -> Option<Check> {
    let path = kept_certificate(config.secrets.renewal.cache.as_deref()?);
    let name = "kept certificate";
    let text = path.display().to_string();
    let modified = move |path: &Path| path.metadata()?.modified();
    Some(match aside(move || modified(&path)).await {
        Ok(Ok(at)) => {
            let age = SystemTime::now().duration_since(at).unwrap_or_default();
            Check::ok(
                name,
                format!("{text}, written {} ago", approximate(age.as_secs_f64())),
            )
        }
        Ok(Err(error)) => Check::skipped(name, format!("{text}: {error}")),
        Err(late) => Check::warning(name, format!("{text}: {late}")),
    })
}

/// Envoy's streams for secrets.
fn consumers(config: &Config, consumers: &Consumers) -> Vec<Check> {
    let name = "secrets asked for";
    let all = consumers.all();
    if config.envoy.is_none() || all.is_empty() {
        let why = "no stream is open: Envoy opens one for each secret that its configuration names";
        return vec![Check::skipped(name, why)];
    }
    let mut served: Vec<_> = all.iter().flat_map(|it| it.served.clone()).collect();
    served.sort_unstable();
    served.dedup();
    let found = match served.is_empty() {
        true => "none is there yet".to_owned(),
        false => format!("served on {} streams: {}", all.len(), served.join(", ")),
    };
    let checks = std::iter::once(Check::ok(name, found));
    checks.chain(all.iter().flat_map(troubles)).collect()
}

/// What a stream waits for, and what it refuses.
fn troubles(consumer: &Consumer) -> Vec<Check> {
    let waits = consumer.waits.iter().map(|(name, waits_for)| {
        let name = format!("secret {name}");
        let found = format!("not there since {}: {waits_for}", rfc3339(consumer.since));
        Check::warning(name, found).expected("it is served").remedy(
            "listeners and clusters that use it do not work before: mount its files, or see the \
             workload certificate above",
        )
    });
    let names = consumer.served.join(", ");
    let refused = consumer.refused.as_ref().map(|reason| {
        let found = format!("refused by Envoy: {reason}");
        Check::error(format!("secret {names}"), found).remedy("replace it by one Envoy takes")
    });
    waits.chain(refused).collect()
}
