//! Finds connections that Istio's chains send to Envoy, but that do not get there, because the kernel's chains do not lead
//! them to these chains, or because a rule of others comes first.
//!
//! The settings of the rules need not be known: Istio's own chains decide what Envoy is to get.

use std::net::IpAddr;

use super::iptables::{appended, jumps_to_istio, target};
use super::layout::{Entry, Layout};
use super::packet::{Decision, Packet, Sender, simulate};
use super::rules::{Chain, Criterion, Family, Match, Protocol, Table, Verdict};
use super::verify::find_others;
use crate::problem::{Code, Problem};

const SUBJECT: &str = "rules";
/// The user and group of an application. No rule names them.
const APPLICATION: u32 = 1338;
/// Targets that keep packets from the rules behind them.
const TAKING: [&str; 7] = ["ACCEPT", "DNAT", "NETMAP", "NFQUEUE", "REDIRECT", "RETURN", "TPROXY"];

/// Simulates connections between an application at `pod` and `peer`, one in each direction, at all ports that matter.
pub fn find(layout: &Layout, family: Family, [pod, peer]: [IpAddr; 2]) -> Vec<Problem> {
    let istio = istio_alone(layout);
    let sender = Sender { user: APPLICATION.into(), group: APPLICATION.into() };
    let mut found = Vec::new();
    for (sender, source, destination) in [(None, peer, pod), (Some(sender), pod, peer)] {
        let mut packet = Packet {
            sender,
            protocol: Protocol::Tcp,
            source: (source, 0).into(),
            destination: (destination, 0).into(),
            interface: "eth0".to_owned(),
        };
        found.extend(ports(layout).find_map(|port| {
            packet.destination.set_port(port);
            bypass(layout, &istio, &packet)
        }));
    }
    if found.is_empty() {
        // Rules that cannot be simulated. One for loopback addresses belongs to a resolver in the pod.
        let others = find_others(&istio, layout, family).into_iter().map(|other| other.detail);
        for rule in others.filter(|rule| !rule.contains(" -d 127.")) {
            if target(&rule).is_some_and(|target| TAKING.contains(&target)) {
                let why =
                    format!("a rule of others comes before Istio's and may take calls: {rule}");
                found.push(Problem::new(Code::CaptureBypassed, SUBJECT, why));
            }
        }
    }
    found
}

/// Returns usual ports, and those at which a rule begins or ceases to match.
fn ports(layout: &Layout) -> impl Iterator<Item = u16> {
    let entries = layout.chains.values().flatten().flat_map(|entry| match entry {
        Entry::Rule { matches, .. } => matches.as_slice(),
        Entry::Foreign(_) => &[],
    });
    let ports = entries.flat_map(|(Match::Is(each) | Match::Not(each))| match each {
        Criterion::DestinationPort(ports) => ports.as_slice(),
        _ => &[],
    });
    let ends = ports.flat_map(|ports| [*ports.start(), ports.end().saturating_add(1)]);
    [8080, 443].into_iter().chain(ends)
}

/// Compares where a packet ends with where Istio's rules alone would send it.
fn bypass(layout: &Layout, istio: &Layout, packet: &Packet) -> Option<Problem> {
    let expected = simulate(istio, packet).decision;
    let trace = simulate(layout, packet);
    let (Decision::Redirected(port) | Decision::Tproxied(port)) = expected else {
        return None;
    };
    // A firewall refuses connections on purpose.
    if [expected, Decision::Dropped, Decision::Rejected].contains(&trace.decision) {
        return None;
    }
    let mut rules = trace.rules.iter().rev();
    let other =
        rules.find(|(place, rule)| place.1.is_builtin() && !is_istios(layout, *place, rule));
    let (code, why) = match other {
        Some((place, rule)) => (
            Code::CaptureBypassed,
            format!("a rule of others takes it: {}", appended(*place, rule)),
        ),
        None => (Code::CaptureRulesChanged, "no rule leads it to Istio's chains".to_owned()),
    };
    let decision = trace.decision;
    Some(Problem::new(code, SUBJECT, format!("{packet} {decision}, expected port {port}: {why}")))
}

/// Returns Istio's rules alone: removes rules of others from the kernel's chains, and adds missing jumps from there to
/// Istio's chains.
fn istio_alone(layout: &Layout) -> Layout {
    let mut istio = layout.clone();
    for (place, entries) in istio.chains.iter_mut().filter(|((_, chain), _)| chain.is_builtin()) {
        entries.retain(|entry| is_istios(layout, *place, entry));
    }
    let tcp = Match::Is(Criterion::Protocol(Protocol::Tcp));
    for (table, hook, chain) in [
        (Table::Nat, Chain::Prerouting, Chain::Inbound),
        (Table::Mangle, Chain::Prerouting, Chain::Inbound),
        (Table::Nat, Chain::Output, Chain::IstioOutput),
    ] {
        let entries = istio.chains.entry((table, hook)).or_default();
        // Such a jump has a condition that cannot be simulated.
        let mut found = layout.entries((table, hook)).iter();
        if !found.any(|entry| matches!(entry, Entry::Foreign(text) if jumps_to_istio(text))) {
            entries.push(Entry::rule(vec![tcp.clone()], Verdict::Jump(chain)));
        }
    }
    istio
}

/// Returns true if Istio may have written a rule in a chain of the kernel. Where it spares an interface, it has such a rule
/// in each direction, or captures some traffic of the interface.
fn is_istios(layout: &Layout, (table, chain): (Table, Chain), entry: &Entry) -> bool {
    use Verdict::{Jump, RestoreMark, Return, SaveMark, SetMark};
    let (matches, verdict) = match entry {
        Entry::Foreign(_) => return false,
        Entry::Rule { matches, verdict } => (matches.as_slice(), *verdict),
    };
    let other = if chain == Chain::Output { Chain::Prerouting } else { Chain::Output };
    let has = |chain, verdict, length| {
        let mut rules = layout.rules(table, chain).filter(|rule| rule.1 == verdict);
        rules.any(|(rule, _)| rule.len() <= length && interface(rule) == interface(matches))
    };
    match (matches, verdict) {
        ([] | [_], Return) if interface(matches).is_some() == (matches.len() == 1) => {
            has(other, Return, matches.len()) || has(chain, Jump(Chain::Redirect), 2)
        }
        (_, Return) => matches.iter().any(|it| matches!(it, Match::Is(Criterion::Mark(_)))),
        _ => matches!(verdict, Jump(_) | SetMark(_) | SaveMark | RestoreMark),
    }
}

/// Returns the interface that the matches name.
fn interface(matches: &[Match]) -> Option<&str> {
    matches.iter().find_map(|each| match each {
        Match::Is(Criterion::InInterface(name) | Criterion::OutInterface(name)) => Some(&**name),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture::config::tests::settings;
    use crate::capture::config::{Config, Host, Settings};
    use crate::capture::iptables::saved::entry;
    use crate::capture::nftables;
    use crate::capture::rules::Rules;

    type Change = fn(&mut Settings);

    const USUAL: Change = |s| s.istio_local_exclude_ports = "15090,15021,15020".to_owned();
    const TPROXY: Change = |s| {
        USUAL(s);
        s.istio_inbound_interception_mode = "TPROXY".to_owned();
    };

    fn rules(change: Change) -> Rules {
        let settings = settings(|s| {
            (s.istio_service_cidr, s.istio_inbound_ports) = ("*".to_owned(), "*".to_owned());
            change(s);
        });
        let nameservers = vec![[10, 0, 0, 53].into(), "2001:db8::53".parse().expect("IPv6")];
        let host = Host { has_v6: true, nameservers, envoy_uid: None };
        Rules::new(&Config::check(&settings, &host).expect("settings").0)
    }

    fn problems(layout: &Layout, family: Family) -> Vec<String> {
        let addresses = match family {
            Family::V4 => ["10.0.0.7", "198.51.100.7"],
            Family::V6 => ["2001:db8::7", "2001:db8:7::7"],
        };
        let addresses = addresses.map(|address| address.parse().expect(address));
        find(layout, family, addresses).iter().map(|it| it.brief() + it.code.name()).collect()
    }

    #[test]
    fn no_rules_of_istio_let_connections_bypass_envoy() {
        for change in [
            USUAL,
            TPROXY,
            |s| s.istio_inbound_ports = String::new(),
            |s| s.istio_inbound_ports = "9090".to_owned(),
            |s| {
                TPROXY(s);
                s.istio_inbound_ports = "9090,8080".to_owned();
            },
            |s| s.istio_local_exclude_ports = "8080,443,8000:9000".to_owned(),
            |s| s.istio_exclude_interfaces = "eth0,net+".to_owned(),
            |s| {
                TPROXY(s);
                s.istio_exclude_interfaces = "eth0".to_owned();
            },
            |s| s.istio_exclude_interfaces = "+".to_owned(),
            |s| s.kube_virt_interfaces = "vm0,eth0".to_owned(),
            |s| {
                s.kube_virt_interfaces = "eth0".to_owned();
                s.istio_service_cidr = "10.96.0.0/16,2001:db8:1::/48".to_owned();
            },
            |s| {
                s.istio_service_cidr = "10.96.0.0/16,2001:db8:1::/48".to_owned();
                s.istio_outbound_ports = "9443".to_owned();
                s.istio_local_outbound_ports_exclude = "443,3306".to_owned();
            },
            |s| s.istio_service_exclude_cidr = "198.51.100.0/24".to_owned(),
            |s| s.istio_service_cidr = String::new(),
            |s| s.istio_outbound_owner_groups = "1000".to_owned(),
            |s| s.istio_outbound_owner_groups_exclude = "1338".to_owned(),
            |s| (s.redirect_dns, s.capture_all_dns) = (true, true),
            |s| (s.redirect_dns, s.drop_invalid, s.protect_admin) = (true, true, true),
        ] as [Change; 18]
        {
            let rules = rules(change);
            for family in [Family::V4, Family::V6] {
                let mut versions = nftables::versions(&rules, family);
                versions.push(Layout::new(&rules, family));
                for layout in versions {
                    assert_eq!(problems(&layout, family), [""; 0], "{layout:#?}");
                }
            }
        }
    }

    #[test]
    fn missing_jumps_and_preceding_foreign_rules_are_named() {
        use Chain::{Output, Prerouting};
        use Table::{Mangle, Nat};
        let ours = "-p tcp -j ISTIO_INBOUND";
        for (change, place, (removed, rule), expected) in [
            (
                USUAL,
                (Nat, Prerouting),
                (ours, ""),
                &["8080 over eth0", "goes to its", "port 15006"][..],
            ),
            (
                TPROXY,
                (Mangle, Prerouting),
                (ours, ""),
                &["8080 over eth0", "CAPTURE_RULES_CHANGED"],
            ),
            (USUAL, (Nat, Output), ("-j ISTIO_OUTPUT", ""), &["user 1338", "expected port 15001"]),
            (
                USUAL,
                (Nat, Prerouting),
                (ours, "-p tcp -m tcp --dport 80 -j ISTIO_INBOUND"),
                &["8080"],
            ),
            (
                USUAL,
                (Nat, Prerouting),
                ("", "-p tcp -j ACCEPT"),
                &["takes it: nat: -A PREROUTING -p"],
            ),
            (
                USUAL,
                (Nat, Prerouting),
                ("", "-i eth0 -j RETURN"),
                &["PREROUTING -i eth0 -j RETURN"],
            ),
            (TPROXY, (Mangle, Prerouting), ("", "-p tcp -j ACCEPT"), &["mangle: -A", "BYPASSED"]),
            (
                USUAL,
                (Nat, Prerouting),
                ("", "-p tcp -m tcp --dport 9443 -j REDIRECT --to-ports 9090"),
                &[
                    "to 10.0.0.7:9443",
                    "is redirected to port 9090, expected port 15006",
                    "BYPASSED",
                ],
            ),
            (
                USUAL,
                (Nat, Output),
                ("", "-p tcp -m tcp --dport 3306 -j RETURN"),
                &["198.51.100.7:3306", "BYPASSED"],
            ),
            (
                USUAL,
                (Nat, Prerouting),
                ("", "-p tcp -m tcp --dport 8080 -j DNAT --to-destination 10.0.0.7:80"),
                &["may take calls: nat: -A PREROUTING -p tcp -m tcp --dport 8080 -j DNAT"],
            ),
            (
                USUAL,
                (Nat, Prerouting),
                ("", "-s 10.0.0.9/32 -p tcp -j ACCEPT"),
                &["may take calls"],
            ),
            // Healthy: a resolver in the pod, a firewall, UDP, and a rule of a form that cannot be simulated.
            (USUAL, (Nat, Output), ("", "-d 127.0.0.11/32 -j DOCKER_OUTPUT"), &[]),
            (USUAL, (Nat, Output), ("", "-d 127.0.0.11/32 -p tcp -j DNAT --to-destination x"), &[]),
            (USUAL, (Mangle, Prerouting), ("", "-p tcp -m tcp --dport 2375 -j DROP"), &[]),
            (USUAL, (Nat, Prerouting), ("", "-p udp -m udp --dport 53 -j ACCEPT"), &[]),
            (
                USUAL,
                (Nat, Prerouting),
                (ours, "-p tcp -m comment --comment x -j ISTIO_INBOUND"),
                &[],
            ),
        ] {
            let mut layout = Layout::new(&rules(change), Family::V4);
            let entries = layout.chains.entry(place).or_default();
            entries.retain(|it| *it != entry(removed));
            if !rule.is_empty() {
                entries.insert(0, entry(rule));
            }
            let found = problems(&layout, Family::V4);
            assert_eq!(found.len(), usize::from(!expected.is_empty()), "{rule}: {found:?}");
            assert!(expected.iter().all(|it| found[0].contains(it)), "{rule}: {found:?}");
        }
    }
}
