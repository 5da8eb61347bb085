//! Checks that the capture rules of this network namespace redirect traffic to Envoy.
//!
//! Most settings of the rules belong to another container or to istio-cni. The checks therefore simulate only packets
//! whose redirection does not depend on them.

use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::Path;
use std::time::Duration;

use futures_util::future::join_all;
use rustix::process::{getegid, geteuid};
use serde_json::Value;
use tokio::net::TcpSocket;
use tokio::time::timeout;

use super::{PROBE_LIMIT, Subject, run_blocking};
use crate::bootstrap::node::Node;
use crate::capture::bypass;
use crate::capture::layout::Layout;
use crate::capture::packet::{Decision, Packet, Sender, simulate};
use crate::capture::rules::{Chain, Family, Protocol};
use crate::capture::verify;
use crate::config::Config;
use crate::problem::{Code, Problem};
use crate::program::PATH;
use crate::report::Check;
use crate::runtime::usage::{self, LISTEN, Socket};

const NAME: &str = "rules";
/// Envoy's ports for captured traffic, unless the mesh configuration has others.
const OUTBOUND: u16 = 15001;
const INBOUND: u16 = 15006;
/// The destination port of the test connection, as in istio-validation.
const TEST_PORT: u16 = 15002;
/// The ports of Envoy and the agent.
const SIDECAR: RangeInclusive<u16> = 15000..=15090;
/// On machines, Istio does not capture SSH.
const SSH: u16 = 22;
/// The states of a TCP socket in proc_net(5) after a handshake.
const HAS_BEEN_OPEN: [u8; 7] = [0x01, 0x04, 0x05, 0x06, 0x08, 0x09, 0x0B];
const UNCHECKED: &str =
    "not checked; `istio-iptables --verify` compares the rules in a debug container with NET_ADMIN";
/// Envoy's user in Istio's images.
const PROXY: u32 = 1337;
/// The time limit of a connection over lo.
const CONNECT_LIMIT: Duration = Duration::from_millis(300);

/// Returns true for a sidecar whose pod's traffic is captured.
pub(super) fn is_captured(config: &Config) -> bool {
    let node = &config.bootstrap.node;
    node.id.starts_with("sidecar~") && matches!(mode(node), Some("REDIRECT" | "TPROXY"))
}

fn mode(node: &Node) -> Option<&str> {
    node.metadata.get("INTERCEPTION_MODE").and_then(Value::as_str)
}

pub(super) async fn checks(subject: Subject<'_>) -> Vec<Check> {
    let node = &subject.config.bootstrap.node;
    let why = match mode(node) {
        // Gateways are given a mode as well.
        _ if !node.id.starts_with("sidecar~") => "only sidecars capture traffic",
        Some("REDIRECT" | "TPROXY") => return captured(subject).await,
        Some(mode) => &format!("interception mode {mode}: traffic is not captured"),
        None => "ISTIO_META_INTERCEPTION_MODE is not set, so traffic may be captured or not",
    };
    vec![Check::skipped(NAME, why)]
}

async fn captured(subject: Subject<'_>) -> Vec<Check> {
    let own = &subject.config.bootstrap.node.addresses;
    let is_first_v6 = own.first().is_some_and(IpAddr::is_ipv6);
    let families = [Family::V4, Family::V6].into_iter().filter(|family| {
        let is_v6 = *family == Family::V6;
        is_v6 == is_first_v6
            || subject.config.bootstrap.dual_stack && own.iter().any(|it| it.is_ipv6() == is_v6)
    });
    let checks = families.map(|family| family_checks(subject, family));
    join_all(checks).await.into_iter().flatten().collect()
}

async fn family_checks(subject: Subject<'_>, family: Family) -> Vec<Check> {
    let layout = match timeout(PROBE_LIMIT, verify::read_rules(family, PATH)).await {
        Ok(Ok(layout)) => layout,
        Ok(Err(problem)) => return unread_rules(subject, family, &problem.found).await,
        Err(_) => {
            return unread_rules(subject, family, "the program that reads them does not end").await;
        }
    };
    let version = if family == Family::V4 { "IPv4" } else { "IPv6" };
    if !layout.has_istio_rules() {
        let found =
            format!("no chain of Istio for {version} leads to ports {OUTBOUND} and {INBOUND}");
        return vec![error(Code::CaptureRulesMissing, found)];
    }
    let mut checks = simulated_connections(&layout, family, envoy_ids(subject));
    let [_, _, peer] = addresses(family);
    let own = &subject.config.bootstrap.node.addresses;
    let pod = own.iter().find(|it| it.is_ipv4() == peer.is_ipv4()).map_or(peer, |it| *it);
    checks.extend(bypass::find(&layout, family, [pod, peer]).iter().map(Check::from));
    checks.extend(layout.earlier_dns.iter().map(|rule| {
        let found = format!("a DNS rule of an earlier version of Istio: {rule}");
        error(Code::CaptureRulesEarlier, found)
    }));
    checks.extend(dns(&layout, &dns_ports(subject, family)));
    if checks.is_empty() {
        let [outbound, inbound] = [Chain::Redirect, Chain::InRedirect]
            .map(|chain| layout.redirect_port(chain).unwrap_or_default());
        let found = format!("lead to ports {outbound} and {inbound} for {version}");
        checks.push(Check::ok(NAME, found));
    }
    checks
}

fn error(code: Code, found: String) -> Check {
    Check::from(&Problem::new(code, NAME, found))
}

/// Checks rules that cannot be read, by their effects.
async fn unread_rules(subject: Subject<'_>, family: Family, why: &str) -> Vec<Check> {
    let mut checks = vec![test_connection(subject, family, why).await];
    let node = &subject.config.bootstrap.node;
    // In TPROXY mode, Envoy's connections to the application have the address of the client.
    let sockets = match mode(node) {
        Some("REDIRECT") => run_blocking(|| usage::sockets(Path::new("/"))).await,
        _ => Ok(Vec::new()),
    };
    let users = [envoy_ids(subject).0, geteuid().as_raw()];
    if let Some(socket) = uncaptured(&sockets.unwrap_or_default(), family, users, node) {
        let Socket { local, remote, .. } = socket;
        let found = format!("a connection from {remote} has reached {local} without Envoy");
        checks.push(error(Code::CaptureBypassed, found));
    }
    checks
}

/// Finds a connection of another machine to a port of an application, which other users than Envoy's have. A captured
/// one comes from Envoy, over a loopback address.
fn uncaptured<'a>(
    sockets: &'a [Socket],
    family: Family,
    users: [u32; 2],
    node: &Node,
) -> Option<&'a Socket> {
    let mut locals: HashSet<_> = sockets.iter().map(|it| it.local.ip()).collect();
    locals.extend(&node.addresses);
    let [_, envoy, outside] = addresses(family);
    let mut envoys = HashSet::new();
    let mut others = HashSet::new();
    for listener in sockets.iter().filter(|it| it.state == LISTEN) {
        let ports = if users.contains(&listener.user) { &mut envoys } else { &mut others };
        ports.insert(listener.local.port());
    }
    sockets.iter().find(|Socket { local, remote, state, .. }| {
        let port = local.port();
        let peer = remote.ip();
        HAS_BEEN_OPEN.contains(state)
            && local.is_ipv4() == outside.is_ipv4()
            && node.addresses.contains(&local.ip())
            && !(peer.is_loopback() || peer == envoy || locals.contains(&peer))
            && others.contains(&port)
            && !envoys.contains(&port)
            && !is_spared(node, port)
    })
}

/// Returns true if Istio or an annotation of the pod does not capture a port.
fn is_spared(node: &Node, port: u16) -> bool {
    SIDECAR.contains(&port)
        || port == SSH
        || is_in_annotation(node, "excludeInboundPorts", port) == Some(true)
        || is_in_annotation(node, "includeInboundPorts", port) == Some(false)
}

/// Returns None if the pod does not have the annotation.
fn is_in_annotation(node: &Node, name: &str, port: u16) -> Option<bool> {
    let annotations = node.metadata.get("ANNOTATIONS")?;
    let list = annotations.get(format!("traffic.sidecar.istio.io/{name}"))?.as_str()?;
    Some(list.split(',').any(|it| it.trim() == "*" || it.trim() == port.to_string()))
}

/// Opens a test connection if the rules cannot be read, as istio-validation does: connections of Envoy's user over
/// lo to an address of the pod are redirected to Envoy.
async fn test_connection(subject: Subject<'_>, family: Family, why: &str) -> Check {
    let skipped = Check::skipped(NAME, format!("cannot be read: {why}"));
    let first = subject.config.bootstrap.node.addresses.first();
    let is_first = first.is_some_and(IpAddr::is_ipv6) == (family == Family::V6);
    // Rules treat root's connections differently. A pod may not have a route to the address in its second family.
    if geteuid().is_root() || !is_first {
        return skipped;
    }
    let [loopback, inbound, _] = addresses(family);
    let call = (inbound, TEST_PORT).into();
    let envoy = (loopback, INBOUND).into();
    match tokio::join!(connects(loopback, call), connects(loopback, envoy)) {
        (Ok(()), _) => Check::ok(
            NAME,
            format!("outbound: a call to {call} is redirected to Envoy; inbound: {UNCHECKED}"),
        ),
        (Err(failed), Ok(())) if failed.kind() == io::ErrorKind::ConnectionRefused => {
            let user = geteuid().as_raw();
            let found = format!(
                "a call to {call} is not redirected to Envoy, which listens on {envoy}: there are no rules, or they \
                 are for another user than {user} (`--proxy-uid` of istio-init, `runAsUser` of istio-proxy)"
            );
            error(Code::CaptureRulesMissing, found)
        }
        _ => skipped,
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

/// Connects from an address, because the kernel would take `::6` to connect to `::6`, which the rules treat differently.
async fn connects(from: IpAddr, to: SocketAddr) -> io::Result<()> {
    let socket = if to.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.bind((from, 0).into())?;
    timeout(CONNECT_LIMIT, socket.connect(to)).await.map_err(io::Error::from)?.map(drop)
}

/// Simulates connections of Envoy to its own pod and to other machines. Returns errors for those that do not arrive.
fn simulated_connections(
    layout: &Layout,
    family: Family,
    user_and_group: (u32, u32),
) -> Vec<Check> {
    let [loopback, inbound, outside] = addresses(family);
    let mut checks = Vec::new();
    let packet = packet_of_envoy(user_and_group, loopback, (inbound, TEST_PORT), "lo");
    let decision = simulate(layout, &packet).decision;
    // In TPROXY mode, Envoy runs as root. Only the rules for its group match then; they mark the connection for
    // TPROXY.
    if !matches!(decision, Decision::Redirected(_) | Decision::Tproxied(_)) {
        let found = format!("{packet} {decision}, expected Envoy's inbound port");
        checks.push(error(Code::CaptureRulesChanged, found));
    }
    let packet = packet_of_envoy(user_and_group, loopback, (outside, 443), "eth0");
    let decision = simulate(layout, &packet).decision;
    if decision != Decision::Untouched {
        checks.push(error(Code::CaptureProxyUid, format!("{packet} {decision}")));
    }
    checks
}

fn packet_of_envoy(
    (user, group): (u32, u32),
    source: IpAddr,
    destination: (IpAddr, u16),
    interface: &str,
) -> Packet {
    Packet {
        sender: Some(Sender { user: user.into(), group: group.into() }),
        protocol: Protocol::Tcp,
        source: (source, 0).into(),
        destination: destination.into(),
        interface: interface.to_owned(),
    }
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
    if !config.bootstrap.node.is_true("DNS_CAPTURE") {
        return Vec::new();
    }
    config
        .dns
        .iter()
        .flat_map(|dns| &dns.forwarder.listen_addresses)
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
    Some(error(Code::DnsNotCaptured, found))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::platform::Platform;
    use crate::capture::iptables::saved::Saved;
    use crate::proxy_config::ProxyConfig;

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
    fn calls_of_a_root_envoy_in_tproxy_reach_its_inbound_port() {
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
    fn a_connection_from_outside_to_a_port_of_the_application_bypasses_envoy() {
        const V4: &str = "10.0.0.7:8080";
        const EXCLUDE: &str = "traffic.sidecar.istio.io/excludeInboundPorts";
        const INCLUDE: &str = "traffic.sidecar.istio.io/includeInboundPorts";
        let node = |annotations: &[(&str, &str)]| {
            let annotations =
                annotations.iter().map(|(name, value)| ((*name).into(), (*value).into()));
            let annotations = Value::Object(annotations.collect());
            Node {
                id: String::new(),
                cluster: String::new(),
                addresses: vec![[10, 0, 0, 7].into(), "2001:db8::7".parse().expect("IPv6")],
                metadata: [("ANNOTATIONS".to_owned(), annotations)].into(),
                locality: None,
                proxy_config: ProxyConfig::default(),
                platform: Platform::default(),
            }
        };
        let socket = |(local, remote, state, user): (&str, &str, u8, u32)| Socket {
            local: local.parse().expect(local),
            remote: remote.parse().expect(remote),
            state,
            user,
        };
        let app = ("0.0.0.0:8080", "0.0.0.0:0", LISTEN, 0);
        let app_v6 = ("[::]:8080", "[::]:0", LISTEN, 1000);
        let direct = (V4, "10.0.0.9:40000", 1, 0);
        let closed = (V4, "10.0.0.9:40000", 6, 0);
        let direct_v6 = ("[2001:db8::7]:8080", "[2001:db8::9]:40000", 1, 1000);
        for (sockets, annotations, expected) in [
            (vec![app, direct], &[][..], Some(V4)),
            (vec![app_v6, closed], &[], Some(V4)),
            (vec![app, direct], &[(EXCLUDE, "15020,15021"), (INCLUDE, "*")], Some(V4)),
            (vec![app, direct], &[(INCLUDE, "80, 8080")], Some(V4)),
            (vec![app_v6, direct_v6], &[], Some("[2001:db8::7]:8080")),
            // Healthy pods: ports that are not captured,
            (vec![app, direct], &[(EXCLUDE, "15020, 8080")], None),
            (vec![app, direct], &[(INCLUDE, "")], None),
            (vec![app, direct], &[(INCLUDE, "80")], None),
            (vec![("0.0.0.0:22", "0.0.0.0:0", LISTEN, 0), ("10.0.0.7:22", V4, 1, 0)], &[], None),
            // interfaces that are not captured,
            (vec![app, ("10.9.0.1:8080", "10.9.0.2:40000", 1, 0)], &[], None),
            // connections of Envoy, of the pod to itself and of a port-forwarding,
            (vec![app, (V4, "127.0.0.6:40000", 1, 0)], &[], None),
            (vec![app_v6, ("[2001:db8::7]:8080", "[::6]:40000", 1, 0)], &[], None),
            (vec![app, (V4, "10.0.0.7:40000", 1, 0), ("10.0.0.7:40000", V4, 1, 0)], &[], None),
            (vec![app, ("127.0.0.1:8080", "127.0.0.1:40000", 1, 0)], &[], None),
            // connections to Envoy and to the agent,
            (vec![("0.0.0.0:9080", "0.0.0.0:0", LISTEN, 1337), direct], &[], None),
            (vec![("0.0.0.0:8080", "0.0.0.0:0", LISTEN, 1337), direct], &[], None),
            (vec![app, ("10.0.0.7:15006", "10.0.0.9:40000", 1, 1337)], &[], None),
            (
                vec![("[::]:15006", "[::]:0", LISTEN, 7), ("10.0.0.7:15006", "10.0.0.9:4", 1, 7)],
                &[],
                None,
            ),
            // connections of the application, and those that were never open.
            (vec![app, ("10.0.0.7:40000", "10.0.0.9:8080", 1, 0)], &[], None),
            (vec![app, (V4, "10.0.0.9:40000", 3, 0)], &[], None),
            (vec![app], &[], None),
            (vec![], &[], None),
        ] {
            let sockets: Vec<_> = sockets.into_iter().map(socket).collect();
            let found = [Family::V4, Family::V6]
                .map(|family| uncaptured(&sockets, family, [1337, 1337], &node(annotations)));
            let found = found.into_iter().flatten().map(|socket| socket.local.to_string());
            let found: Vec<_> = found.collect();
            let expected = Vec::from_iter(expected.map(str::to_owned));
            assert_eq!(found, expected, "{sockets:?} {annotations:?}");
        }
        // Without annotations, the port counts as captured.
        let sockets = [app, direct].map(socket);
        let node = Node { metadata: [].into(), ..node(&[]) };
        assert!(uncaptured(&sockets, Family::V4, [1337, 1337], &node).is_some());
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
