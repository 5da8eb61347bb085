//! Checks that the capture rules of this network namespace redirect traffic to Envoy.
//!
//! Most settings of the rules belong to another container or to istio-cni. The checks therefore simulate only packets
//! whose redirection does not depend on them.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use futures_util::future::join_all;
use rustix::process::{getegid, geteuid};
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::{PROBE_LIMIT, Subject};
use crate::capture::layout::Layout;
use crate::capture::packet::{Decision, Packet, Sender, simulate};
use crate::capture::rules::{Chain, Family, Protocol};
use crate::capture::verify;
use crate::config::Config;
use crate::problem::{Code, Problem, codes};
use crate::program::PATH;
use crate::report::Check;

const NAME: &str = "rules";
/// Envoy's ports for captured traffic, unless the mesh configuration has others.
const OUTBOUND: u16 = 15001;
const INBOUND: u16 = 15006;
/// The destination port of the test connection, as in istio-validation.
const TEST_PORT: u16 = 15002;
/// Envoy's user in Istio's images.
const PROXY: u32 = 1337;
/// The time limit of a connection over lo.
const CONNECT_LIMIT: Duration = Duration::from_millis(300);

/// Returns true for a sidecar whose pod's traffic is captured.
pub(super) fn is_captured(config: &Config) -> bool {
    let node = &config.bootstrap.node;
    let mode = node.metadata.get("INTERCEPTION_MODE").and_then(Value::as_str);
    node.id.starts_with("sidecar~") && matches!(mode, Some("REDIRECT" | "TPROXY"))
}

pub(super) async fn checks(subject: Subject<'_>) -> Vec<Check> {
    let node = &subject.config.bootstrap.node;
    let mode = node.metadata.get("INTERCEPTION_MODE");
    let skipped = |why: &str| vec![Check::skipped(NAME, why)];
    match mode.and_then(Value::as_str) {
        // Gateways are given a mode as well.
        _ if !node.id.starts_with("sidecar~") => return skipped("only sidecars capture traffic"),
        Some("REDIRECT" | "TPROXY") => {}
        Some(mode) => {
            return skipped(&format!("interception mode {mode}: traffic is not captured"));
        }
        None => {
            return skipped(
                "ISTIO_META_INTERCEPTION_MODE is not set, so traffic may be captured or not",
            );
        }
    }
    let is_first_v6 = node.addresses.first().is_some_and(IpAddr::is_ipv6);
    let families = [Family::V4, Family::V6].into_iter().filter(|family| {
        let is_v6 = *family == Family::V6;
        let mut are_v6 = node.addresses.iter().map(IpAddr::is_ipv6);
        is_v6 == is_first_v6 || subject.config.bootstrap.dual_stack && are_v6.any(|it| it == is_v6)
    });
    let checks = families.map(|family| family_checks(subject, family));
    join_all(checks).await.into_iter().flatten().collect()
}

async fn family_checks(subject: Subject<'_>, family: Family) -> Vec<Check> {
    let layout = match timeout(PROBE_LIMIT, verify::read_rules(family, PATH)).await {
        Ok(Ok(layout)) => layout,
        Ok(Err(problem)) => return vec![test_connection(subject, family, &problem.found).await],
        Err(_) => {
            let why = "the program that reads them does not end";
            return vec![test_connection(subject, family, why).await];
        }
    };
    let version = if family == Family::V4 { "IPv4" } else { "IPv6" };
    if !layout.has_istio_rules() {
        let found =
            format!("no chain of Istio for {version} leads to ports {OUTBOUND} and {INBOUND}");
        return vec![error(codes::CAPTURE_RULES_MISSING, found)];
    }
    let mut checks = simulated_connections(&layout, family, envoy_ids(subject));
    checks.extend(layout.earlier_dns.iter().map(|rule| {
        let found = format!("a DNS rule of an earlier version of Istio: {rule}");
        error(codes::CAPTURE_RULES_EARLIER, found)
    }));
    checks.extend(dns(&layout, &dns_ports(subject, family)));
    if checks.is_empty() {
        let port = |chain| layout.redirect_port(chain).unwrap_or_default();
        let [outbound, inbound] = [Chain::Redirect, Chain::InRedirect].map(port);
        let found = format!("lead to ports {outbound} and {inbound} for {version}");
        checks.push(Check::ok(NAME, found));
    }
    checks
}

fn error(code: &'static Code, found: String) -> Check {
    Check::from(&Problem::new(code, NAME, found))
}

/// Opens a test connection if the rules cannot be read, as istio-validation does: connections of Envoy's user over
/// lo to an address of the pod are redirected to Envoy.
async fn test_connection(subject: Subject<'_>, family: Family, why: &str) -> Check {
    let skipped = || Check::skipped(NAME, format!("cannot be read: {why}"));
    let first = subject.config.bootstrap.node.addresses.first();
    let is_first = first.is_some_and(IpAddr::is_ipv6) == (family == Family::V6);
    // Rules treat root's connections differently. A pod may not have a route to the address in its second family.
    if geteuid().is_root() || !is_first {
        return skipped();
    }
    let [loopback, inbound, _] = addresses(family);
    let (call, envoy) = ((inbound, TEST_PORT).into(), (loopback, INBOUND).into());
    match tokio::join!(connects(call), connects(envoy)) {
        (Ok(()), _) => Check::ok(NAME, format!("a call to {call} is redirected to Envoy")),
        (Err(failed), Ok(())) if failed.kind() == io::ErrorKind::ConnectionRefused => {
            let found =
                format!("a call to {call} is not redirected to Envoy, which listens on {envoy}");
            error(codes::CAPTURE_RULES_MISSING, found)
        }
        _ => skipped(),
    }
}

/// Returns loopback, the address from which Envoy connects to applications, and an address outside of the pod.
fn addresses(family: Family) -> [IpAddr; 3] {
    const OUTSIDE: [u16; 8] = [0x2001, 0xdb8, 7, 0, 0, 0, 0, 7];
    match family {
        Family::V4 => [[127, 0, 0, 1], [127, 0, 0, 6], [198, 51, 100, 7]].map(IpAddr::from),
        Family::V6 => [1.into(), 6.into(), Ipv6Addr::from(OUTSIDE)].map(IpAddr::V6),
    }
}

async fn connects(address: SocketAddr) -> io::Result<()> {
    let connected = timeout(CONNECT_LIMIT, TcpStream::connect(address)).await;
    connected.map_err(io::Error::from)?.map(drop)
}

/// Simulates connections of Envoy to its own pod and to other machines. Returns errors for those that do not arrive.
fn simulated_connections(layout: &Layout, family: Family, (user, group): (u32, u32)) -> Vec<Check> {
    let [loopback, inbound, outside] = addresses(family);
    let simulate_to = |destination: (IpAddr, u16), interface: &str| {
        let packet = Packet {
            sender: Some(Sender { user: user.into(), group: group.into() }),
            protocol: Protocol::Tcp,
            source: (loopback, 0).into(),
            destination: destination.into(),
            interface: interface.to_owned(),
        };
        let decision = simulate(layout, &packet).decision;
        (decision, format!("{packet} {decision}"))
    };
    let mut checks = Vec::new();
    let (decision, found) = simulate_to((inbound, TEST_PORT), "lo");
    // In TPROXY mode, Envoy runs as root. Only the rules for its group match then; they mark the connection for
    // TPROXY.
    if !matches!(decision, Decision::Redirected(_) | Decision::Tproxied(_)) {
        let found = format!("{found}, expected Envoy's inbound port");
        checks.push(error(codes::CAPTURE_RULES_CHANGED, found));
    }
    let (decision, found) = simulate_to((outside, 443), "eth0");
    if decision != Decision::Untouched {
        checks.push(error(codes::CAPTURE_PROXY_UID, found));
    }
    checks
}

/// Returns the user and the group of Envoy: the agent's, unless the agent is root.
fn envoy_ids(subject: Subject<'_>) -> (u32, u32) {
    let envoy = subject.config.envoy.as_ref();
    match (envoy.and_then(|envoy| envoy.command.user), subject.running) {
        (Some(user), _) => (user, user),
        (None, Some(_)) => (geteuid().as_raw(), getegid().as_raw()),
        (None, None) => (PROXY, PROXY),
    }
}

/// Returns the ports at which the agent answers the captured DNS queries of a family; none if it does not.
fn dns_ports(subject: Subject<'_>, family: Family) -> Vec<u16> {
    let config = subject.config;
    let is_captured = config.bootstrap.node.is_true("DNS_CAPTURE");
    let dns = config.dns.iter().filter(|_| is_captured);
    dns.flat_map(|dns| &dns.forwarder.listen_addresses)
        .filter(|address| address.is_ipv4() == (family == Family::V4))
        .map(SocketAddr::port)
        .collect()
}

/// Checks that DNS is captured for the agent, which answers at these ports.
fn dns(layout: &Layout, agent_ports: &[u16]) -> Option<Check> {
    let expected = agent_ports.first()?;
    let found = match layout.redirect_port(Chain::OutputDns) {
        Some(port) if agent_ports.contains(&port) => return None,
        Some(port) => format!("DNS queries are redirected to port {port}"),
        None => "DNS queries are not redirected".to_owned(),
    };
    let found = format!("{found}, expected redirection to the agent's port {expected}");
    Some(error(codes::DNS_NOT_CAPTURED, found))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture::iptables::saved::Saved;

    /// The IPv4 rules that capture everything except DNS, in the format of `iptables-save`.
    const RULES: &str = "*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:ISTIO_INBOUND - [0:0]
:ISTIO_IN_REDIRECT - [0:0]
:ISTIO_OUTPUT - [0:0]
:ISTIO_OUTPUT_DNS - [0:0]
:ISTIO_REDIRECT - [0:0]
-A PREROUTING -p tcp -j ISTIO_INBOUND
-A OUTPUT -j ISTIO_OUTPUT
-A ISTIO_INBOUND -p tcp -j ISTIO_IN_REDIRECT
-A ISTIO_IN_REDIRECT -p tcp -j REDIRECT --to-ports 15006
-A ISTIO_OUTPUT ! -d 127.0.0.1/32 -o lo -p tcp -m owner --uid-owner 1337 -j ISTIO_IN_REDIRECT
-A ISTIO_OUTPUT -o lo -m owner ! --uid-owner 1337 -j RETURN
-A ISTIO_OUTPUT -m owner --uid-owner 1337 -j RETURN
-A ISTIO_OUTPUT -d 127.0.0.1/32 -j RETURN
-A ISTIO_OUTPUT -j ISTIO_REDIRECT
-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001
COMMIT
";
    const DNS: &str = "-A ISTIO_OUTPUT_DNS -p udp -m udp --dport 53 -j REDIRECT --to-ports 15053
";

    fn layout(from: &str, to: &str) -> Layout {
        let text = RULES.replacen(from, to, 1);
        assert_eq!(text == RULES, from == to, "{from}");
        Saved::parse(&text).expect("rules").layout()
    }

    #[test]
    fn the_doctor_finds_misrouting_rules_by_simulated_connections() {
        let ends = |layout: &Layout, user| {
            let checks = simulated_connections(layout, Family::V4, (user, user)).into_iter();
            checks.map(|check| check.found).collect::<Vec<_>>()
        };
        assert_eq!(ends(&layout("", ""), 1337), [""; 0]);
        let of_another = ends(&layout("", ""), 1000);
        assert_eq!(of_another.len(), 2, "{of_another:?}");
        assert!(of_another[0].contains("to 127.0.0.6:15002 over lo"), "{of_another:?}");
        assert!(of_another[1].contains("is redirected to port 15001"), "{of_another:?}");
        for spoilt in [
            layout("-A OUTPUT -j ISTIO_OUTPUT\n", ""),
            layout("-A ISTIO_IN_REDIRECT -p tcp -j REDIRECT --to-ports 15006\n", ""),
        ] {
            let ends = ends(&spoilt, 1337);
            assert!(ends[0].contains("goes to its destination"), "{ends:?}");
        }
    }

    /// The mangle table in TPROXY mode. Its rules identify an Envoy that runs as root by its group only, and mark
    /// its connections.
    const TPROXY: &str = "*mangle
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:ISTIO_INBOUND - [0:0]
:ISTIO_TPROXY - [0:0]
-A PREROUTING -p tcp -j ISTIO_INBOUND
-A OUTPUT ! -d 127.0.0.1/32 -o lo -p tcp -m owner --gid-owner 1337 -j MARK --set-xmark 0x53a/0xffffffff
-A ISTIO_INBOUND -i lo -p tcp -m mark ! --mark 0x53a -j RETURN
-A ISTIO_INBOUND -p tcp -j ISTIO_TPROXY
-A ISTIO_TPROXY ! -d 127.0.0.1/32 -p tcp -j TPROXY --on-port 15006 --on-ip 0.0.0.0 --tproxy-mark 0x539/0xffffffff
COMMIT
";

    #[test]
    fn calls_of_an_envoy_that_is_root_in_tproxy_reach_its_inbound_port() {
        let by_group = "-A ISTIO_OUTPUT -m owner --gid-owner 1337 -j RETURN
-A ISTIO_OUTPUT -d 127.0.0.1/32";
        let rules = RULES.replace("-A PREROUTING -p tcp -j ISTIO_INBOUND\n", "");
        let rules = rules.replacen("-A ISTIO_OUTPUT -d 127.0.0.1/32", by_group, 1);
        let layout =
            |mangle: &str| Saved::parse(&(rules.clone() + mangle)).expect("rules").layout();
        assert_eq!(simulated_connections(&layout(TPROXY), Family::V4, (0, 1337)), []);
        assert_eq!(simulated_connections(&layout(TPROXY), Family::V4, (1337, 1337)), []);
        let unmarked = TPROXY.replace("--gid-owner 1337", "--gid-owner 1338");
        let checks = simulated_connections(&layout(&unmarked), Family::V4, (0, 1337));
        assert_eq!(checks.len(), 1, "{checks:?}");
        assert!(checks[0].found.contains("127.0.0.6:15002"), "{checks:?}");
    }

    #[test]
    fn dns_that_is_not_captured_for_the_agent_is_found() {
        let without = layout("", "");
        assert_eq!(dns(&without, &[]), None);
        let found = dns(&without, &[15053]).expect("an error").found;
        assert!(found.starts_with("DNS queries are not redirected"), "{found}");
        let with = layout("COMMIT", &format!("{DNS}COMMIT"));
        assert_eq!(dns(&with, &[15053]), None);
        let found = dns(&with, &[5300]).expect("an error").found;
        assert!(found.starts_with("DNS queries are redirected to port 15053"), "{found}");
    }
}
