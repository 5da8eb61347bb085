//! Resolving, dialing, TLS and a discovery request, for every control plane.

use std::time::SystemTime;

use futures_util::future::{OptionFuture, join_all};
use tokio::time::{Instant, timeout_at};
use tonic::Status;

use super::discovery;
use super::report::{Check, Level};
use super::token::Found;
use super::{PROBE_LIMIT, Subject};
use crate::duration::rounded;
use crate::istiod::probe::{self, Probe};
use crate::istiod::{Config, Security, refusal};
use crate::problem::codes;
use crate::secrets::Facts;
use crate::xds::observe::Source;

const RENEW: &str =
    "renew istiod's certificate: kubectl rollout restart deployment istiod -n istio-system";

/// The checks, with what `found` says of token and roots.
pub(super) async fn checks(subject: Subject<'_>, found: &Found, until: Instant) -> Vec<Check> {
    if found.has_no_roots {
        let why = "not dialed: there are no roots to verify istiod with";
        return vec![Check::skipped("connections", why)];
    }
    let config = subject.config;
    let stream = open_stream(subject);
    let in_use = subject.running.map(|running| running.istiod.address());
    let planes = std::iter::once(&config.istiod).chain(&config.istiod.others);
    let planes = planes.map(async |plane| {
        let is_used = in_use.is_none_or(|address| *address == *plane.address);
        let asks = (stream.is_none() || !is_used).then_some(found);
        let (checks, works) = examine(subject, plane, asks, until).await;
        // What a running agent does not use serves nothing, whatever it answers.
        (checks, works && is_used)
    });
    let authority = config.ca_istiod.as_ref();
    let authority = authority.map(async |it| examine(subject, it, None, until).await.0);
    let (planes, authority) = tokio::join!(join_all(planes), OptionFuture::from(authority));
    let works = stream.is_some() || planes.iter().any(|(_, works)| *works);
    let mut checks: Vec<_> = planes.into_iter().flat_map(|(checks, _)| checks).collect();
    if works {
        // What serves in place of one that fails makes the failure a warning.
        let failed = checks.iter_mut().filter(|it| it.level == Level::Error);
        failed.for_each(|check| check.level = Level::Warning);
    }
    // Only Envoy's requests are incremental, so the doctor's own is answered.
    let failed = subject
        .running
        .and_then(|running| running.istiod.status().last_error);
    let failed =
        failed.filter(|it| it.problem.code == codes::ISTIOD_WITHOUT_DELTA && stream.is_none());
    checks.extend(failed.map(|failed| Check::problem(Level::Error, &failed.problem)));
    checks.extend(stream);
    checks.extend(authority.into_iter().flatten());
    checks
}

/// The agent's own stream, if istiod has answered on it: then a request of the doctor shows nothing
/// more, and costs istiod the preparation of another proxy.
fn open_stream(subject: Subject<'_>) -> Option<Check> {
    let running = subject.running?;
    let seen = running.discovery.snapshot();
    let stream = seen
        .stream
        .filter(|stream| stream.connected && stream.source == Source::Istiod)?;
    let (address, types) = (running.istiod.address(), seen.types.len());
    let found = format!("open to {address} since {}, {types} types", stream.since);
    Some(Check::ok("discovery stream", found))
}

/// Dials one control plane, or the authority where it is another, as the agent does. `asks` sends a
/// discovery request with this token. Returns whether that was answered, too.
async fn examine(
    subject: Subject<'_>,
    config: &Config,
    asks: Option<&Found>,
    until: Instant,
) -> (Vec<Check>, bool) {
    let left = until.saturating_duration_since(Instant::now());
    let probe = match probe::open(config, left).await {
        Ok(probe) => probe,
        Err(problem) => return (vec![Check::of(&problem)], false),
    };
    let mut checks = vec![connected(config, &probe)];
    let Some(found) = asks else {
        return (checks, false);
    };
    let check = if found.checks.iter().any(|it| it.level == Level::Error) {
        let why = "not sent: istiod would refuse the token";
        Check::skipped("discovery request", why)
    } else {
        ask(subject, config, probe, found, until).await
    };
    let works = check.level == Level::Ok;
    checks.push(check);
    (checks, works)
}

/// An open connection, and the certificate that istiod has shown.
fn connected(config: &Config, probe: &Probe) -> Check {
    let what = format!("connection to {}", config.subject());
    let about = probe.connection.about();
    let (Some(tls), Security::Tls(expected)) = (&about.tls, &config.security) else {
        return Check::ok(what, format!("{}, plaintext", about.peer));
    };
    let version = tls.version.as_deref().unwrap_or("TLS");
    let found = format!("{}, {version} as {}", about.peer, expected.server_name);
    let shown = tls.peer_certificate.as_ref();
    let Some(facts) = shown.and_then(|der| Facts::read(der).ok()) else {
        return Check::ok(what, found);
    };
    let mut life = facts.life(&what, SystemTime::now());
    life.found = format!("{found}; {}", life.found);
    if life.level != Level::Ok {
        RENEW.clone_into(&mut life.remedy);
    }
    life
}

/// Has istiod answer a request.
async fn ask(
    subject: Subject<'_>,
    config: &Config,
    probe: Probe,
    found: &Found,
    until: Instant,
) -> Check {
    let node = &subject.config.bootstrap.node;
    let request = discovery::ask(probe, config, found.authorization.clone(), node);
    let answer = timeout_at(until, request).await.unwrap_or_else(|_| {
        let late = format!("no answer within {}", rounded(PROBE_LIMIT));
        Err(Status::deadline_exceeded(late))
    });
    let what = format!("discovery request to {}", config.subject());
    match answer {
        Ok(version) => Check::ok(what, format!("answered, version {version:?}")),
        Err(status) => {
            let problem = refusal::explain(config, &found.token, codes::ISTIOD_ERROR, &status);
            Check::of(&problem)
        }
    }
}
