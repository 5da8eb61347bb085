//! The agent's DNS server, the pod's resolvers and the name table.

use std::net::SocketAddr;

use futures_util::future::join_all;

use super::report::Check;
use super::{PROBE_LIMIT, Running, Subject, run_blocking};
use crate::config::DnsParameters;
use crate::dns::forward::resolv_conf::ResolvConf;
use crate::dns::forward::{Forwarder, Unanswered, is_own};
use crate::dns::{self, Transport};
use crate::metrics::Registry;

const RESOLVERS: &str = "name the resolvers of the cluster or the network in dnsConfig.nameservers of the \
                         pod, or in a file of ISTIO_AGENT_RESOLV_CONF";

pub(super) async fn checks(subject: Subject<'_>) -> Vec<Check> {
    let Some(config) = &subject.config.dns else {
        let why = "the agent answers no DNS: neither ISTIO_META_DNS_CAPTURE of a sidecar nor \
                   ISTIO_META_ENABLE_DNS_SERVER is true";
        return vec![Check::skipped("DNS", why)];
    };
    let own = subject.running.and_then(|running| running.dns.as_ref());
    let own = own.map(|dns| dns.addresses()).unwrap_or_default();
    let forwarder = subject.running.and_then(|it| it.forwarder.clone());
    // Without the agent's own, a question that comes back is not noticed.
    let forwarder =
        forwarder.unwrap_or_else(|| Forwarder::new(config.forwarder.clone(), &Registry::default()));
    let (mut checks, of_resolvers) = tokio::join!(
        join_all(own.iter().map(|address| server(*address))),
        resolvers(config, &forwarder)
    );
    checks.extend(of_resolvers);
    checks.push(name_table(subject.running));
    checks
}

/// The agent's own server.
async fn server(address: SocketAddr) -> Check {
    let name = format!("server {address}");
    match dns::answers(address, PROBE_LIMIT).await {
        Ok(()) => Check::ok(name, "answers"),
        Err(error) => Check::error(name, error)
            .expected("an answer of the agent")
            .remedy("restart the container: applications cannot resolve names"),
    }
}

/// What `resolv.conf` says, and whether the resolvers in it answer.
async fn resolvers(config: &DnsParameters, forwarder: &Forwarder) -> Vec<Check> {
    let path = config.forwarder.resolv_conf.clone();
    let name = path.display().to_string();
    let read = run_blocking(move || ResolvConf::read(&path)).await;
    let found = match read.and_then(|read| read.map_err(|error| error.to_string())) {
        Ok(found) => found,
        Err(error) => {
            let check = Check::error(name, error).expected("a file with the pod's resolvers");
            return vec![check.remedy(RESOLVERS)];
        }
    };
    let is_own = |server: &SocketAddr| is_own(&config.forwarder.own_addresses, *server);
    let (own, servers): (Vec<_>, Vec<_>) = found.nameservers.iter().partition(|it| is_own(it));
    let mut checks = vec![file(name, &found, &own, servers.len())];
    let transport = match found.use_tcp {
        true => Transport::Tcp,
        false => Transport::Udp,
    };
    // Resolvers of a cluster answer in its domains without those of others.
    let domain = found.search.first().map_or("", String::as_str);
    let answers = servers
        .iter()
        .map(|server| forwarder.probe(*server, transport, domain));
    let answers = join_all(answers).await;
    let has_any = answers.iter().any(Result::is_ok);
    let answers = servers.iter().zip(answers);
    checks.extend(answers.map(|(server, answer)| resolver(*server, answer, has_any)));
    checks
}

/// The file itself, which names the agent's `own` addresses and so many others.
fn file(name: String, found: &ResolvConf, own: &[SocketAddr], others: usize) -> Check {
    let search = match found.search.as_slice() {
        [] => "no search domain".to_owned(),
        domains => format!("search domains {}", domains.join(" ")),
    };
    let check = match (own, others) {
        ([], 0) => Check::error(name, "names no resolver").expected("nameserver lines"),
        ([first, ..], 0) => {
            let found = format!("a loop: its only resolver, {first}, is this agent");
            Check::error(name, found).expected("resolvers to forward to")
        }
        ([first, ..], _) => {
            Check::warning(name, format!("resolver {first} is this agent, left out"))
                .expected("resolvers to forward to")
        }
        _ => return Check::ok(name, format!("{others} resolvers, {search}")),
    };
    check.remedy(RESOLVERS)
}

/// What one resolver answers. While others do, it is asked last.
fn resolver(
    server: SocketAddr,
    answer: Result<&'static str, Unanswered>,
    others_answer: bool,
) -> Check {
    let name = format!("resolver {server}");
    let error = match answer {
        Ok(rcode @ ("SERVFAIL" | "REFUSED")) => {
            return Check::warning(name, format!("answers {rcode}"))
                .expected("NXDOMAIN to a name that does not exist")
                .remedy("look at the log of that DNS server");
        }
        Ok(rcode) => return Check::ok(name, format!("answers {rcode}")),
        Err(error) => error,
    };
    let check = match others_answer {
        true => Check::warning(name, &error),
        false => Check::error(name, &error),
    };
    let check = check.expected("an answer");
    match error {
        Unanswered::ForwardingLoop => check.remedy(
            "a loop: queries of the agent must not be captured; see --proxy-uid of istio-init",
        ),
        Unanswered::Late | Unanswered::Failed(_) => check.remedy(format!(
            "look at that DNS server and at network policies for UDP and TCP port {}",
            server.port()
        )),
    }
}

fn name_table(running: Option<&Running>) -> Check {
    let name = "name table";
    let Some(dns) = running.and_then(|running| running.dns.as_ref()) else {
        return Check::skipped(name, "known to a running agent only");
    };
    match dns.hosts() {
        Some(hosts) => Check::ok(name, format!("{hosts} hosts")),
        None => Check::error(name, "not received")
            .expected("names of the mesh from istiod (NDS)")
            .remedy(
                "until then these names do not resolve; istiod sends them once Envoy is connected: \
                 istioctl proxy-status",
            ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::report::Level;

    fn address(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn a_file_that_leaves_no_resolver_is_an_error() {
        let us = address("127.0.0.1:15053");
        for (text, own, others, level, words) in [
            (
                "search a.test b.test",
                &[][..],
                0,
                Level::Error,
                "names no resolver",
            ),
            (
                "",
                &[us],
                0,
                Level::Error,
                "a loop: its only resolver, 127.0.0.1:15053, is this agent",
            ),
            (
                "",
                &[us],
                1,
                Level::Warning,
                "127.0.0.1:15053 is this agent",
            ),
            (
                "search a.test b.test",
                &[],
                2,
                Level::Ok,
                "2 resolvers, search domains a.test b.test",
            ),
        ] {
            let check = file("file".to_owned(), &ResolvConf::parse(text), own, others);
            assert_eq!(check.level, level, "{check}");
            assert!(check.found.contains(words), "{check}");
        }
    }

    #[test]
    fn a_resolver_that_fails_is_an_error_if_no_other_answers() {
        let server = address("10.0.0.10:53");
        let level = |answer, others| resolver(server, answer, others).level;
        assert_eq!(level(Ok("NXDOMAIN"), true), Level::Ok);
        assert_eq!(level(Ok("SERVFAIL"), true), Level::Warning);
        assert_eq!(level(Err(Unanswered::Late), true), Level::Warning);
        assert_eq!(level(Err(Unanswered::Late), false), Level::Error);
        let circle = resolver(server, Err(Unanswered::ForwardingLoop), false);
        assert!(
            circle.to_string().contains("leads back to this agent"),
            "{circle}"
        );
    }
}
