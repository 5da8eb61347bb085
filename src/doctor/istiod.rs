//! Resolving, dialing, TLS and a discovery request, for every control plane and each of its addresses.

use std::net::SocketAddr;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::Instant;

use super::discovery;
use super::explain::{explain, explain_status, is_without_route};
use super::report::{Check, Level};
use super::token::Found;
use super::{PROBE_LIMIT, Subject};
use crate::address;
use crate::dial::proxy::Proxy;
use crate::dial::resolve;
use crate::istiod::probe::{self, Probe};
use crate::istiod::{Config, Security};
use crate::xds::observe::Source;

/// A headless service may have hundreds.
const MOST_ADDRESSES: usize = 8;

/// One control plane, or the authority where it is another.
struct Target<'a> {
    name: String,
    config: &'a Config,
    serves_discovery: bool,
}

/// The checks, and whether istiod accepts the token if that is known.
pub(super) async fn checks(
    subject: Subject<'_>,
    found: &Found,
    until: Instant,
) -> (Vec<Check>, Option<bool>) {
    if found.has_no_roots() {
        let why = "not dialed: there are no roots to verify istiod with";
        return (vec![Check::skipped("connections", why)], None);
    }
    if left(until).is_zero() {
        let why = "not dialed: reading token and roots took all of the time";
        return (vec![Check::skipped("connections", why)], None);
    }
    let config = subject.config;
    let discovery = std::iter::once(&config.istiod).chain(&config.istiod.others);
    let discovery = discovery.map(|config| Target {
        name: config.address.clone(),
        config,
        serves_discovery: true,
    });
    let authority = config.ca_istiod.as_ref().map(|config| Target {
        name: format!("{} (certificates)", config.address),
        config,
        serves_discovery: false,
    });
    let stream = open_stream(subject);
    let running = subject.running.filter(|_| stream.is_some());
    let in_use = running.map_or("", |running| running.istiod.address());
    let look = |target| examine(subject, target, found, in_use, until);
    let (planes, authority) =
        tokio::join!(join_all(discovery.map(look)), join_all(authority.map(look)),);
    let accepted = planes.iter().find_map(|plane| plane.accepted);
    let accepted = stream.as_ref().map(|_| true).or(accepted);
    // What a running agent does not use serves nothing, whatever it answers.
    let in_use = subject.running.map(|running| running.istiod.address());
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
    if check.level == Level::Error {
        check.level = Level::Warning;
    }
}

/// The agent's own stream, if istiod has answered on it: then a request of the doctor shows nothing
/// more, and costs istiod the preparation of another proxy.
fn open_stream(subject: Subject<'_>) -> Option<Check> {
    let running = subject.running?;
    let seen = running.discovery.snapshot();
    let stream = seen
        .stream
        .filter(|stream| stream.connected && stream.source == Source::Istiod)?;
    let found = format!(
        "open to {} since {}, {} types",
        running.istiod.address(),
        stream.since,
        seen.types.len(),
    );
    Some(Check::ok("discovery stream", found))
}

/// What was found of one target.
struct Examined {
    name: String,
    checks: Vec<Check>,
    works: bool,
    accepted: Option<bool>,
}

async fn examine(
    subject: Subject<'_>,
    target: Target<'_>,
    found: &Found,
    in_use: &str,
    until: Instant,
) -> Examined {
    let (name, config) = (&target.name, target.config);
    let (mut checks, addresses) = addresses(name, config, until).await;
    let dials = addresses.iter().map(|to| dial(name, config, *to, until));
    let mut open = None;
    let mut failed = Vec::new();
    for (check, probe) in join_all(dials).await {
        match probe {
            Ok(probe) => {
                open.get_or_insert(probe);
                checks.push(check);
            }
            Err(is_expected) => failed.push((check, is_expected)),
        }
    }
    let mut accepted = None;
    let mut works = false;
    match open {
        Some(probe) => {
            // Others serve.
            for (check, is_expected) in &mut failed {
                check.level = match is_expected {
                    true => Level::Skipped,
                    false => Level::Warning,
                };
            }
            let asks = target.name != in_use && !found.has_errors();
            if asks && target.serves_discovery {
                let (check, answer) = ask(subject, name, config, probe, found, until).await;
                works = check.level < Level::Warning;
                accepted = answer;
                checks.push(check);
            } else if found.has_errors() && target.serves_discovery {
                let what = format!("discovery request to {name}");
                checks.push(Check::skipped(
                    what,
                    "not sent: istiod would refuse the token",
                ));
            }
        }
        // One cause is enough where all addresses fail alike.
        None => failed
            .iter_mut()
            .skip(1)
            .for_each(|(check, _)| soften(check)),
    }
    checks.extend(failed.into_iter().map(|(check, _)| check));
    Examined {
        name: target.name,
        checks,
        works,
        accepted,
    }
}

/// The addresses to dial: of istiod, or of the proxy that leads there.
async fn addresses(name: &str, config: &Config, until: Instant) -> (Vec<Check>, Vec<SocketAddr>) {
    let next = match &config.proxy {
        Some(proxy) => Some((proxy.host.as_str(), proxy.port)),
        None => address::split(&config.address),
    };
    let Some((host, port)) = next else {
        let check = Check::error(name, "no address").expected("host:port");
        return (vec![check], Vec::new());
    };
    let what = match &config.proxy {
        Some(_) => format!("address of the proxy to {name}"),
        None => format!("address of {name}"),
    };
    let remedy = "look at the pod's resolvers in /etc/resolv.conf, and whether the service is there: \
                  kubectl get service -n istio-system";
    let problem = match tokio::time::timeout_at(until, resolve(host, port)).await {
        Ok(Ok(mut found)) => {
            found.sort_unstable();
            found.dedup();
            let ips: Vec<_> = found.iter().map(|to| to.ip().to_string()).collect();
            found.truncate(MOST_ADDRESSES);
            let is_name = host.parse::<std::net::IpAddr>().is_err();
            let check = Check::ok(what.as_str(), ips.join(", "));
            return (is_name.then_some(check).into_iter().collect(), found);
        }
        Ok(Err(error)) => crate::lifecycle::with_causes(&error),
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
    let ours = through(config, to);
    let what = match (&config.proxy, to.to_string() == *name) {
        (Some(_), _) => format!("connection to {name} by the proxy {to}"),
        (None, true) => format!("connection to {name}"),
        (None, false) => format!("connection to {name} at {to}"),
    };
    match probe::open(&ours, left(until)).await {
        Ok(probe) => {
            let (about, security) = (probe.connection.about(), &config.security);
            let found = match (&about.tls, security) {
                (Some(tls), Security::Tls(expected)) => {
                    let version = tls.version.as_deref().unwrap_or("TLS");
                    format!("{version} as {}", expected.server_name)
                }
                _ => "plaintext".to_owned(),
            };
            let life = about.tls.as_ref().and_then(|tls| {
                let facts = super::certificates::Facts::read(tls.peer_certificate.as_ref()?)?;
                let remedy = "renew istiod's certificate: kubectl rollout restart deployment istiod \
                              -n istio-system";
                Some(facts.life(&what, remedy, std::time::SystemTime::now()))
            });
            let check = match life {
                Some(mut life) => {
                    life.found = format!("{found}; {}", life.found);
                    life
                }
                None => Check::ok(what, found),
            };
            (check, Ok(probe))
        }
        Err(cause) => {
            let is_expected = is_without_route(&cause) || config.address.starts_with("localhost:");
            let check = explain(what, &ours, &cause, left(until)).await;
            (check, Err(is_expected))
        }
    }
}

/// The same with one address only; the name in the certificate stays.
fn through(config: &Config, to: SocketAddr) -> Config {
    let one = Config {
        others: Vec::new(),
        ..config.clone()
    };
    match &config.proxy {
        Some(proxy) => Config {
            proxy: Some(Proxy {
                host: to.ip().to_string(),
                port: to.port(),
                ..proxy.clone()
            }),
            ..one
        },
        None => Config {
            address: to.to_string(),
            ..one
        },
    }
}

/// What is left, in tenths of a second.
fn left(until: Instant) -> Duration {
    let left = until.saturating_duration_since(Instant::now());
    Duration::from_millis(u64::try_from(left.as_millis() / 100 * 100).unwrap_or(0))
}

/// Has istiod answer a request. Whether it accepted the token, if it said so.
async fn ask(
    subject: Subject<'_>,
    name: &str,
    config: &Config,
    probe: Probe,
    found: &Found,
    until: Instant,
) -> (Check, Option<bool>) {
    let what = format!("discovery request to {name}");
    let node = &subject.config.bootstrap.node;
    let request = discovery::ask(probe, config, found.authorization.clone(), node);
    match tokio::time::timeout_at(until, request).await {
        Ok(Ok(version)) => (
            Check::ok(what, format!("answered, version {version:?}")),
            Some(true),
        ),
        Ok(Err(status)) => explain_status(what, &status),
        Err(_) => {
            let remedy = "istiod may be overloaded or not ready: kubectl logs -n istio-system \
                          deployment/istiod";
            let check = Check::error(what, format!("no answer within {PROBE_LIMIT:?}"));
            (check.expected("a response").remedy(remedy), None)
        }
    }
}
