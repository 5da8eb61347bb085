//! Checks every control plane: resolves its name, dials it, and sends a discovery request.

use std::time::SystemTime;

use futures_util::future::{OptionFuture, join_all};
use tokio::time::{Instant, timeout_at};
use tonic::Status;

use super::discovery;
use super::report::{Check, Level};
use super::token::Credentials;
use super::{PROBE_LIMIT, Subject};
use crate::duration::rounded;
use crate::istiod::probe::{self, Probe};
use crate::istiod::{Config, Security, refusal};
use crate::problem::codes;
use crate::secrets::Facts;
use crate::xds::observe::Source;

const RENEW: &str =
    "renew istiod's certificate: kubectl rollout restart deployment istiod -n istio-system";

/// Makes the checks with these credentials.
pub(super) async fn checks(
    subject: Subject<'_>,
    credentials: &Credentials,
    until: Instant,
) -> Vec<Check> {
    if credentials.lacks_roots {
        let why = "not dialed: there are no roots to verify istiod with";
        return vec![Check::skipped("connections", why)];
    }
    let config = subject.config;
    let stream = open_stream(subject);
    let in_use = subject.running.map(|running| running.istiod.address());
    let planes = std::iter::once(&config.istiod).chain(&config.istiod.others);
    let examining = planes.map(async |plane| {
        let is_used = in_use.is_none_or(|address| *address == *plane.address);
        let credentials = (stream.is_none() || !is_used).then_some(credentials);
        let (checks, works) = examine(subject, plane, credentials, until).await;
        // A control plane that a running agent does not use does not replace a failed one.
        (checks, works && is_used)
    });
    let ca = config.ca_istiod.as_ref();
    let authority = ca.map(async |ca| examine(subject, ca, None, until).await.0);
    let (planes, authority) = tokio::join!(join_all(examining), OptionFuture::from(authority));
    let works = stream.is_some() || planes.iter().any(|(_, works)| *works);
    let mut checks: Vec<_> = planes.into_iter().flat_map(|(checks, _)| checks).collect();
    if works {
        // A failure is a warning if another control plane works.
        let failed = checks.iter_mut().filter(|it| it.level == Level::Error);
        failed.for_each(|check| check.level = Level::Warning);
    }
    // istiod without delta xDS answers the doctor's request, and rejects only Envoy's delta requests.
    if stream.is_none()
        && let Some(running) = subject.running
        && let Some(failed) = running.istiod.status().last_error
        && failed.problem.code == codes::ISTIOD_WITHOUT_DELTA
    {
        checks.push(Check::problem(Level::Error, &failed.problem));
    }
    checks.extend(stream);
    checks.extend(authority.into_iter().flatten());
    checks
}

/// Checks the agent's own stream, if istiod has answered on it: then a request of the doctor is not sent, because it
/// would show nothing more and istiod would prepare another proxy for it.
fn open_stream(subject: Subject<'_>) -> Option<Check> {
    let running = subject.running?;
    let seen = running.discovery.snapshot();
    let stream = seen.stream?;
    if !stream.connected || stream.source != Source::Istiod {
        return None;
    }
    let (address, types) = (running.istiod.address(), seen.types.len());
    let found = format!("open to {address} since {}, {types} types", stream.since);
    Some(Check::ok("discovery stream", found))
}

/// Dials a control plane, or a separate authority, like the agent. With `credentials`, also sends a
/// discovery request. Returns true with the checks if the request was answered.
async fn examine(
    subject: Subject<'_>,
    config: &Config,
    credentials: Option<&Credentials>,
    until: Instant,
) -> (Vec<Check>, bool) {
    let left = until.saturating_duration_since(Instant::now());
    let probe = match probe::open(config, left).await {
        Ok(probe) => probe,
        Err(problem) => return (vec![Check::of(&problem)], false),
    };
    let mut checks = vec![connected(config, &probe)];
    let Some(credentials) = credentials else {
        return (checks, false);
    };
    let check = if credentials.checks.iter().any(|it| it.level == Level::Error) {
        let why = "not sent: istiod would refuse the token";
        Check::skipped("discovery request", why)
    } else {
        ask(subject, config, probe, credentials, until).await
    };
    let works = check.level == Level::Ok;
    checks.push(check);
    (checks, works)
}

/// Checks an open connection and istiod's certificate.
fn connected(config: &Config, probe: &Probe) -> Check {
    let name = format!("connection to {}", config.subject());
    let about = probe.connection.about();
    let (Some(tls), Security::Tls(expected)) = (&about.tls, &config.security) else {
        return Check::ok(name, format!("{}, plaintext", about.peer));
    };
    let version = tls.version.as_deref().unwrap_or("TLS");
    let found = format!("{}, {version} as {}", about.peer, expected.server_name);
    let certificate = tls.peer_certificate.as_ref();
    let Some(facts) = certificate.and_then(|der| Facts::read(der).ok()) else {
        return Check::ok(name, found);
    };
    let mut check = facts.validity(&name, SystemTime::now());
    check.found = format!("{found}; {}", check.found);
    if check.level != Level::Ok {
        RENEW.clone_into(&mut check.remedy);
    }
    check
}

/// Sends a discovery request, and checks the response.
async fn ask(
    subject: Subject<'_>,
    config: &Config,
    probe: Probe,
    credentials: &Credentials,
    until: Instant,
) -> Check {
    let node = &subject.config.bootstrap.node;
    let authorization = credentials.authorization.clone();
    let request = discovery::ask(probe, config, authorization, node);
    let answer = timeout_at(until, request).await.unwrap_or_else(|_| {
        let late = format!("no answer within {}", rounded(PROBE_LIMIT));
        Err(Status::deadline_exceeded(late))
    });
    match answer {
        Ok(version) => {
            let name = format!("discovery request to {}", config.subject());
            Check::ok(name, format!("answered, version {version:?}"))
        }
        Err(status) => {
            let (token, code) = (&credentials.token, codes::ISTIOD_ERROR);
            Check::of(&refusal::explain(config, token, code, &status))
        }
    }
}
