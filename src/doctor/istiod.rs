//! Resolving, dialing, TLS and a discovery request, for every control plane.

use std::time::SystemTime;

use futures_util::future::{OptionFuture, join_all};
use tokio::time::{Instant, timeout_at};
use tonic::Code;

use super::certificates::Facts;
use super::discovery;
use super::report::{Check, Level};
use super::token::{AUDIENCE, Found};
use super::{PROBE_LIMIT, Subject};
use crate::istiod::probe::{self, Probe};
use crate::istiod::{Config, LOG, Security};
use crate::xds::observe::Source;

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
        let (checks, works) = examine(subject, &plane.address, plane, asks, until).await;
        // What a running agent does not use serves nothing, whatever it answers.
        (checks, works && is_used)
    });
    let authority = config.ca_istiod.as_ref().map(async |authority| {
        let name = format!("{} (certificates)", authority.address);
        examine(subject, &name, authority, None, until).await.0
    });
    let (planes, authority) = tokio::join!(join_all(planes), OptionFuture::from(authority));
    let works = stream.is_some() || planes.iter().any(|(_, works)| *works);
    let mut checks: Vec<_> = planes.into_iter().flat_map(|(checks, _)| checks).collect();
    if works {
        // What serves in place of one that fails makes the failure a warning.
        let failed = checks.iter_mut().filter(|it| it.level == Level::Error);
        failed.for_each(|check| check.level = Level::Warning);
    }
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
    name: &str,
    config: &Config,
    asks: Option<&Found>,
    until: Instant,
) -> (Vec<Check>, bool) {
    let what = match &config.proxy {
        Some(proxy) => format!("connection to {name} by the proxy {}", proxy.host),
        None => format!("connection to {name}"),
    };
    let left = until.saturating_duration_since(Instant::now());
    let probe = match probe::open(config, left).await {
        Ok(probe) => probe,
        Err(cause) => {
            let check = Check::error(what, &cause).remedy(cause.remedy());
            return (vec![check], false);
        }
    };
    let mut checks = vec![connected(what, config, &probe)];
    let Some(found) = asks else {
        return (checks, false);
    };
    let what = format!("discovery request to {name}");
    let check = match found.has_errors() {
        true => Check::skipped(what, "not sent: istiod would refuse the token"),
        false => ask(subject, what, config, probe, found, until).await,
    };
    let works = check.level == Level::Ok;
    checks.push(check);
    (checks, works)
}

/// An open connection, and the certificate that istiod has shown.
fn connected(what: String, config: &Config, probe: &Probe) -> Check {
    let about = probe.connection.about();
    let (Some(tls), Security::Tls(expected)) = (&about.tls, &config.security) else {
        return Check::ok(what, format!("{}, plaintext", about.peer));
    };
    let version = tls.version.as_deref().unwrap_or("TLS");
    let found = format!("{}, {version} as {}", about.peer, expected.server_name);
    let remedy =
        "renew istiod's certificate: kubectl rollout restart deployment istiod -n istio-system";
    let shown = tls.peer_certificate.as_ref();
    match shown.and_then(|der| Facts::read(der)) {
        Some(facts) => {
            let life = facts.life(&what, remedy, SystemTime::now());
            let found = format!("{found}; {}", life.found);
            Check { found, ..life }
        }
        None => Check::ok(what, found),
    }
}

/// Has istiod answer a request.
async fn ask(
    subject: Subject<'_>,
    what: String,
    config: &Config,
    probe: Probe,
    found: &Found,
    until: Instant,
) -> Check {
    let node = &subject.config.bootstrap.node;
    let request = discovery::ask(probe, config, found.authorization.clone(), node);
    let status = match timeout_at(until, request).await {
        Ok(Ok(version)) => return Check::ok(what, format!("answered, version {version:?}")),
        Ok(Err(status)) => status,
        Err(_) => {
            let check = Check::error(what, format!("no answer within {PROBE_LIMIT:?}"));
            return check.expected("a response").remedy(LOG);
        }
    };
    let text = format!("{:?}: {}", status.code(), status.message());
    let check = Check::error(what, text);
    let audiences = &found.audiences;
    let is_foreign = !audiences.is_empty() && !audiences.iter().any(|name| name == AUDIENCE);
    match status.code() {
        Code::Unauthenticated if is_foreign => check
            .expected(format!("a token for {AUDIENCE}, not for {audiences:?}"))
            .remedy("set the audience of the projected volume istio-token, or TOKEN_AUDIENCES of istiod"),
        Code::Unauthenticated => check.expected("a response").remedy(format!(
            "istiod does not accept the token: its API server may be another one, or not reachable; {LOG}"
        )),
        Code::PermissionDenied => check.expected("a response").remedy(format!(
            "POD_NAMESPACE and SERVICE_ACCOUNT must be those of the token; {LOG}"
        )),
        _ => check.expected("a response").remedy(LOG),
    }
}
