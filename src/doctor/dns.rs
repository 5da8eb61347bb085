//! Checks the agent's DNS server, the pod's resolvers and the name table.

use std::net::SocketAddr;

use futures_util::future::join_all;

use super::{PROBE_LIMIT, Running, Subject, checked, run_blocking};
use crate::dns::forward::resolv_conf::ResolvConf;
use crate::dns::forward::{self, Forwarder};
use crate::dns::{self, Dns};
use crate::metrics::Registry;
use crate::problem::{Code, Level, Problem};
use crate::report::Check;

pub(super) async fn checks(subject: Subject<'_>) -> Vec<Check> {
    let captured = subject.config.dns.as_ref();
    let config = captured.map_or_else(
        // Applications query these resolvers themselves.
        || forward::Config {
            resolv_conf: subject.config.resolv_conf.clone(),
            ..forward::Config::default()
        },
        |dns| dns.forwarder.clone(),
    );
    // A forwarding loop is detected only by the forwarder of the running agent.
    let running = subject.running.and_then(|it| it.forwarder.clone());
    let forwarder = running.unwrap_or_else(|| Forwarder::new(config.clone(), &Registry::default()));
    let dns = subject.running.and_then(|running| running.dns.as_ref());
    let addresses = dns.map(Dns::addresses).unwrap_or_default();
    let servers = join_all(addresses.iter().map(|address| server(*address)));
    let (mut checks, resolvers) = tokio::join!(servers, resolvers(&config, &forwarder));
    checks.extend(resolvers);
    if captured.is_some() {
        checks.push(name_table(subject.running));
    } else {
        // A virtual machine may not have any resolver.
        checks.retain(|check| check.code != Code::DnsResolverMissing.name());
    }
    checks
}

/// Checks that the agent's own server answers.
async fn server(address: SocketAddr) -> Check {
    let answers = dns::check_server(address, PROBE_LIMIT).await;
    checked(format!("server {address}"), answers.map(|()| "answers"))
}

/// Reads `resolv.conf`, and queries the resolvers in it.
async fn resolvers(config: &forward::Config, forwarder: &Forwarder) -> Vec<Check> {
    let path = config.resolv_conf.clone();
    let name = path.display().to_string();
    let mut resolv_conf = match run_blocking(move || ResolvConf::read(&path)).await {
        Ok(Ok(resolv_conf)) => resolv_conf,
        Ok(Err(problem)) => return vec![Check::from(&problem)],
        Err(late) => return vec![super::late(name, late)],
    };
    let problems = resolv_conf.remove_own(&config.listen_addresses, &config.resolv_conf);
    let mut checks: Vec<_> = problems.iter().map(Check::from).collect();
    if checks.is_empty() {
        let count = resolv_conf.nameservers.len();
        let search = resolv_conf.search.join(" ");
        checks.push(Check::ok(name, format!("{count} resolvers, search domains: {search}")));
    }
    // Resolvers of a cluster answer in its domains without querying other resolvers.
    let domain = resolv_conf.search.first().map_or("", String::as_str);
    let probes = resolv_conf.nameservers.iter().map(|server| forwarder.probe(*server, domain));
    let answers = join_all(probes).await;
    let has_any = answers.iter().any(is_answer);
    for (server, answer) in resolv_conf.nameservers.iter().zip(answers) {
        checks.push(resolver(*server, answer, has_any));
    }
    checks
}

/// Returns true if a resolver answers, also with a refusal.
fn is_answer(answer: &Result<&'static str, Problem>) -> bool {
    answer.as_ref().err().is_none_or(|problem| problem.code == Code::DnsResolverRefuses)
}

/// Checks the answer of a resolver. A failure is a warning if another resolver answers, because the agent queries the
/// failed one last.
fn resolver(server: SocketAddr, answer: Result<&'static str, Problem>, has_other: bool) -> Check {
    match answer {
        Ok(rcode) => Check::ok(format!("resolver {server}"), format!("answers {rcode}")),
        Err(problem) if has_other => Check::with_level(Level::Warning, &problem),
        Err(problem) => Check::from(&problem),
    }
}

fn name_table(running: Option<&Running>) -> Check {
    let name = "name table";
    let Some(dns) = running.and_then(|running| running.dns.as_ref()) else {
        return Check::skipped(name, "known to a running agent only");
    };
    checked(name, dns.host_count().map(|hosts| format!("{hosts} hosts")))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn address(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn a_file_that_leaves_no_resolver_is_an_error() {
        let own = address("127.0.0.1:15053");
        let us = "nameserver [127.0.0.1]:15053\n";
        let other = "nameserver 10.0.0.10\n";
        let (is_agent, missing) = (Code::DnsResolverInvalid, Code::DnsResolverMissing);
        for (text, expected, worst) in [
            ("search a.test b.test".to_owned(), &[missing][..], Some(Level::Error)),
            (us.to_owned(), &[is_agent, missing], Some(Level::Error)),
            (us.to_owned() + other, &[is_agent], Some(Level::Warning)),
            (other.to_owned(), &[], None),
        ] {
            let problems = ResolvConf::parse(&text).remove_own(&[own], Path::new("file"));
            let codes: Vec<_> = problems.iter().map(|problem| problem.code).collect();
            assert_eq!(codes, expected, "{text}");
            let levels = problems.iter().map(|problem| Check::from(problem).level);
            assert_eq!(levels.max(), worst, "{text}");
        }
    }

    #[test]
    fn a_resolver_that_fails_is_an_error_if_no_other_answers() {
        let server = address("10.0.0.10:53");
        let problem = |code| Err(Problem::new(code, "resolver", ""));
        let level = |answer, others| resolver(server, answer, others).level;
        assert_eq!(level(Ok("NXDOMAIN"), true), Level::Ok);
        assert!(is_answer(&problem(Code::DnsResolverRefuses)));
        assert!(!is_answer(&problem(Code::DnsResolverSilent)));
        assert_eq!(level(problem(Code::DnsResolverSilent), true), Level::Warning);
        assert_eq!(level(problem(Code::DnsResolverSilent), false), Level::Error);
    }
}
