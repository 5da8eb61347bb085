//! Resolving, dialing, TLS and a discovery request, for every control plane and each of its addresses.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, SystemTime};

use futures_util::future::{OptionFuture, join_all};
use tokio::time::{Instant, timeout_at};
use tonic::Code;

use super::certificates::Facts;
use super::discovery;
use super::report::{Check, Level};
use super::token::Found;
use super::{PROBE_LIMIT, Subject};
use crate::address;
use crate::dial::proxy::Proxy;
use crate::dial::resolve;
use crate::istiod::probe::{self, Probe};
use crate::istiod::{Config, LOG, Security};
use crate::lifecycle::with_causes;
use crate::xds::observe::Source;

/// A headless service may have hundreds.
const MAX_ADDRESSES: usize = 8;

/// The checks, and whether istiod accepts the token if that is known.
pub(super) async fn checks(
    subject: Subject<'_>,
    found: &Found,
    until: Instant,
) -> (Vec<Check>, Option<bool>) {
    let why = match (found.has_no_roots, left(until).is_zero()) {
        (true, _) => "not dialed: there are no roots to verify istiod with",
        (_, true) => "not dialed: reading token and roots took all of the time",
        (false, false) => "",
    };
    if !why.is_empty() {
        return (vec![Check::skipped("connections", why)], None);
    }
    let config = subject.config;
    let stream = open_stream(subject);
    let in_use = subject.running.map(|running| running.istiod.address());
    let planes = std::iter::once(&config.istiod).chain(&config.istiod.others);
    let planes = planes.map(|plane| {
        let serves = stream.is_some() && in_use == Some(&*plane.address);
        let asks = (!serves).then_some(found);
        examine(subject, plane.address.clone(), plane, asks, until)
    });
    let authority = config.ca_istiod.as_ref().map(|authority| {
        let name = format!("{} (certificates)", authority.address);
        examine(subject, name, authority, None, until)
    });
    let (planes, authority) = tokio::join!(join_all(planes), OptionFuture::from(authority));
    let accepted = planes.iter().find_map(|plane| plane.accepted);
    let accepted = stream.as_ref().map(|_| true).or(accepted);
    // What a running agent does not use serves nothing, whatever it answers.
    let works = |plane: &Examined| plane.works && in_use.is_none_or(|name| plane.name == name);
    let works = stream.is_some() || planes.iter().any(works);
    let mut checks: Vec<_> = planes.into_iter().flat_map(|plane| plane.checks).collect();
    if works {
        checks.iter_mut().for_each(soften);
    }
    checks.extend(stream);
    checks.extend(authority.into_iter().flat_map(|authority| authority.checks));
    (checks, accepted)
}

/// What serves in place of one that fails makes the failure a warning.
fn soften(check: &mut Check) {
    check.level = check.level.min(Level::Warning);
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

/// What was found of one control plane, or of the authority where it is another.
struct Examined {
    name: String,
    checks: Vec<Check>,
    works: bool,
    accepted: Option<bool>,
}

/// Dials all addresses. `asks` sends a discovery request with this token.
async fn examine(
    subject: Subject<'_>,
    name: String,
    config: &Config,
    asks: Option<&Found>,
    until: Instant,
) -> Examined {
    let (mut checks, addresses) = addresses(&name, config, until).await;
    let dials = addresses.iter().map(|to| dial(&name, config, *to, until));
    let dialed = join_all(dials).await;
    let is_open = dialed.iter().any(|(_, probe)| probe.is_ok());
    let mut open = None;
    for (mut check, probe) in dialed {
        let has_error = checks.iter().any(|check| check.level == Level::Error);
        match probe {
            Ok(probe) => {
                open.get_or_insert(probe);
            }
            // Others serve.
            Err(is_expected) if is_open && is_expected => check.level = Level::Skipped,
            // One cause is enough where all addresses fail alike.
            Err(_) if is_open || has_error => soften(&mut check),
            Err(_) => {}
        }
        checks.push(check);
    }
    let (mut works, mut accepted) = (false, None);
    if let (Some(probe), Some(found)) = (open, asks) {
        let what = format!("discovery request to {name}");
        let check = match found.has_errors() {
            true => Check::skipped(what, "not sent: istiod would refuse the token"),
            false => {
                let (check, answer) = ask(subject, what, config, probe, found, until).await;
                works = check.level < Level::Warning;
                accepted = answer;
                check
            }
        };
        checks.push(check);
    }
    Examined {
        name,
        checks,
        works,
        accepted,
    }
}

/// The addresses to dial: of istiod, or of the proxy that leads there.
async fn addresses(name: &str, config: &Config, until: Instant) -> (Vec<Check>, Vec<SocketAddr>) {
    let (what, next) = match &config.proxy {
        Some(proxy) => ("proxy to ", Some((proxy.host.as_str(), proxy.port))),
        None => ("", address::split(&config.address)),
    };
    let Some((host, port)) = next else {
        let check = Check::error(name, "no address").expected("host:port");
        return (vec![check], Vec::new());
    };
    let what = format!("address of {what}{name}");
    let remedy = "look at the pod's resolvers in /etc/resolv.conf, and whether the service is there: \
                  kubectl get service -n istio-system";
    let problem = match timeout_at(until, resolve(host, port)).await {
        Ok(Ok(mut found)) => {
            found.sort_unstable();
            found.dedup();
            let ips: Vec<_> = found.iter().map(|to| to.ip().to_string()).collect();
            found.truncate(MAX_ADDRESSES);
            let is_name = host.parse::<IpAddr>().is_err();
            let check = is_name.then(|| Check::ok(what, ips.join(", ")));
            return (check.into_iter().collect(), found);
        }
        Ok(Err(error)) => with_causes(&error),
        Err(_) => format!("no resolver has answered for {host} within {PROBE_LIMIT:?}"),
    };
    let check = Check::error(what, problem).expected("an address of istiod");
    (vec![check.remedy(remedy)], Vec::new())
}

/// The connection, or whether an address of this kind is expected to fail beside others: a family the
/// machine has no route for, and either address of localhost.
async fn dial(
    name: &str,
    config: &Config,
    to: SocketAddr,
    until: Instant,
) -> (Check, Result<Probe, bool>) {
    let what = match (&config.proxy, to.to_string() == *name) {
        (Some(_), _) => format!("connection to {name} by the proxy {to}"),
        (None, true) => format!("connection to {name}"),
        (None, false) => format!("connection to {name} at {to}"),
    };
    let probe = match probe::open(&through(config, to), left(until)).await {
        Ok(probe) => probe,
        Err(cause) => {
            let is_expected = cause.is_without_route() || config.address.starts_with("localhost:");
            let check = Check::error(what, &cause).remedy(cause.remedy());
            return (check, Err(is_expected));
        }
    };
    let check = match (&probe.connection.about().tls, &config.security) {
        (Some(tls), Security::Tls(expected)) => {
            let version = tls.version.as_deref().unwrap_or("TLS");
            let found = format!("{version} as {}", expected.server_name);
            let remedy = "renew istiod's certificate: kubectl rollout restart deployment istiod \
                          -n istio-system";
            let shown = tls.peer_certificate.as_ref();
            let life = shown.and_then(|der| Facts::read(der));
            let life = life.map(|facts| facts.life(&what, remedy, SystemTime::now()));
            match life {
                Some(life) => Check {
                    found: format!("{found}; {}", life.found),
                    ..life
                },
                None => Check::ok(what, found),
            }
        }
        _ => Check::ok(what, "plaintext"),
    };
    (check, Ok(probe))
}

/// The same with one address only; the name in the certificate stays.
fn through(config: &Config, to: SocketAddr) -> Config {
    let mut one = Config {
        others: Vec::new(),
        ..config.clone()
    };
    match &config.proxy {
        Some(proxy) => {
            one.proxy = Some(Proxy {
                host: to.ip().to_string(),
                port: to.port(),
                ..proxy.clone()
            });
        }
        None => one.address = to.to_string(),
    }
    one
}

/// What is left, in tenths of a second.
fn left(until: Instant) -> Duration {
    let left = until.saturating_duration_since(Instant::now());
    Duration::from_millis(u64::try_from(left.as_millis() / 100 * 100).unwrap_or(0))
}

/// Has istiod answer a request. Whether it accepted the token, if it said so.
async fn ask(
    subject: Subject<'_>,
    what: String,
    config: &Config,
    probe: Probe,
    found: &Found,
    until: Instant,
) -> (Check, Option<bool>) {
    let node = &subject.config.bootstrap.node;
    let request = discovery::ask(probe, config, found.authorization.clone(), node);
    let status = match timeout_at(until, request).await {
        Ok(Ok(version)) => {
            let check = Check::ok(what, format!("answered, version {version:?}"));
            return (check, Some(true));
        }
        Ok(Err(status)) => status,
        Err(_) => {
            let check = Check::error(what, format!("no answer within {PROBE_LIMIT:?}"));
            return (check.expected("a response").remedy(LOG), None);
        }
    };
    let (why, accepted) = match status.code() {
        Code::Unauthenticated => (
            "istiod does not accept the token: its API server may be another one, or not reachable; ",
            Some(false),
        ),
        Code::PermissionDenied => (
            "POD_NAMESPACE and SERVICE_ACCOUNT must be those of the token; ",
            None,
        ),
        _ => ("", None),
    };
    let text = format!("{:?}: {}", status.code(), status.message());
    let check = Check::error(what, text).expected("a response");
    (check.remedy(format!("{why}{LOG}")), accepted)
}
