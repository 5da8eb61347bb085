//! Tests how simulated packets pass the rules. Each row has a flow and the expected decision.

use super::Decision::{Redirected, Rejected, Tproxied, Untouched};
use super::*;
use crate::capture::config::tests::settings;
use crate::capture::config::{Config, Host, Settings};
use crate::capture::explain::Flow;
use crate::capture::iptables::appended;
use crate::capture::rules::{Family, Rules};

/// The rules for both families.
struct Fixture([Layout; 2]);

fn rules(change: impl FnOnce(&mut Settings)) -> Fixture {
    let host =
        Host { has_v6: true, nameservers: vec![IpAddr::from([10, 0, 0, 53])], ..Host::default() };
    let all = |s: &mut Settings| {
        (s.istio_service_cidr, s.istio_inbound_ports) = ("*".to_owned(), "*".to_owned());
        change(s);
    };
    let (config, _) = Config::check(&settings(all), &host).expect("a configuration");
    let rules = Rules::new(&config);
    Fixture([Family::V4, Family::V6].map(|family| Layout::new(&rules, family)))
}

fn tproxy(settings: &mut Settings) {
    settings.istio_inbound_interception_mode = "TPROXY".to_owned();
}

/// Returns the first packet of a flow. The interface is eth0 unless the flow names another.
fn packet(flow: &str) -> Packet {
    let flow: Flow = flow.parse().expect("a flow");
    let destination = flow.destination.unwrap_or([10, 0, 0, 1].into());
    let unspecified = match destination {
        IpAddr::V4(_) => IpAddr::from([10, 0, 0, 2]),
        IpAddr::V6(_) => "2001:db8::2".parse().expect("an address"),
    };
    let sender =
        flow.user.map(|user| Sender { group: flow.group.unwrap_or_else(|| user.clone()), user });
    Packet {
        sender,
        protocol: flow.protocol,
        source: SocketAddr::new(flow.source.unwrap_or(unspecified), 40000),
        destination: SocketAddr::new(destination, flow.port),
        interface: flow.interface.unwrap_or_else(|| "eth0".to_owned()),
    }
}

impl Fixture {
    fn trace(&self, packet: &Packet) -> Trace<'_> {
        let Self([v4, v6]) = self;
        simulate(if packet.destination.is_ipv4() { v4 } else { v6 }, packet)
    }

    fn assert(&self, expected: &[(&str, Decision)]) {
        for (flow, expected) in expected {
            let trace = self.trace(&packet(flow));
            assert_eq!(trace.decision, *expected, "{flow}: {:#?}", trace.rules);
        }
    }
}

#[test]
fn packets_of_applications_are_captured_and_those_of_the_proxy_are_not() {
    rules(|_| {}).assert(&[
        ("out,tcp,1000,10.0.0.5:443", Redirected(15001)),
        ("out,tcp,1000,[2001:db8::5]:443", Redirected(15001)),
        ("out,udp,1000,10.0.0.5:443", Untouched),
        ("out,tcp,1337,10.0.0.5:443", Untouched),
        ("out,tcp,1000/1337,10.0.0.5:443", Untouched),
        ("out,tcp,1337/0,[2001:db8::5]:443", Untouched),
        ("out,tcp,1000,127.0.0.1:80,lo", Untouched),
        ("out,tcp,1000,[::1]:80,lo", Untouched),
        // Connections of the pod to its own address. Connections of the proxy count as inbound.
        ("out,tcp,1000,10.0.0.1:80,lo", Untouched),
        ("out,tcp,1337,10.0.0.1:80,lo", Redirected(15006)),
        ("out,tcp,1337,10.0.0.1:15008,lo", Untouched),
        ("out,tcp,1337,127.0.0.1:80,lo", Untouched),
        ("out,tcp,1337,127.0.0.6,10.0.0.1:80,lo", Untouched),
        ("in,tcp,80", Redirected(15006)),
        ("in,tcp,[2001:db8::1]:80", Redirected(15006)),
        ("in,udp,80", Untouched),
        ("in,tcp,15008", Untouched),
    ]);
}

#[test]
fn ports_ranges_interfaces_and_groups_decide_whether_a_packet_is_captured() {
    let fixture = rules(|s| {
        let text = str::to_owned;
        (s.istio_inbound_ports, s.istio_outbound_ports) = (text("80,81"), text("9000"));
        s.istio_local_outbound_ports_exclude = text("9090");
        s.istio_service_cidr = text("10.0.0.0/8,2001:db8::/32");
        s.istio_service_exclude_cidr = text("10.1.0.0/16");
        (s.istio_exclude_interfaces, s.kube_virt_interfaces) = (text("net+"), text("vm0"));
        s.istio_outbound_owner_groups = text("1000,1001");
    });
    fixture.assert(&[
        ("in,tcp,81", Redirected(15006)),
        ("in,tcp,82", Untouched),
        ("in,tcp,81,net0", Untouched),
        ("in,tcp,10.2.0.1:82,vm0", Redirected(15001)),
        ("in,tcp,11.2.0.1:82,vm0", Untouched),
        ("out,tcp,1000,10.2.0.1:443", Redirected(15001)),
        ("out,tcp,1000/1001,10.2.0.1:443", Redirected(15001)),
        ("out,tcp,1000/1002,10.2.0.1:443", Untouched),
        ("out,tcp,1000,10.2.0.1:443,net1", Untouched),
        ("out,tcp,1000,10.2.0.1:9090", Untouched),
        ("out,tcp,1000,10.1.255.255:443", Untouched),
        ("out,tcp,1000,[2001:db9::]:443", Untouched),
        ("out,tcp,1000,11.0.0.1:9000", Redirected(15001)),
    ]);
}

#[test]
fn dns_is_redirected_to_the_agent_and_zones_separate_the_proxys_queries() {
    let servers = rules(|s| s.redirect_dns = true);
    servers.assert(&[
        ("out,udp,1000,10.0.0.53:53", Redirected(15053)),
        ("out,tcp,1000,10.0.0.53:53", Redirected(15053)),
        ("out,udp,1000,10.0.0.54:53", Untouched),
        ("out,tcp,1000,10.0.0.54:53", Redirected(15001)),
        ("out,udp,1337,10.0.0.53:53", Untouched),
        ("out,tcp,1337,10.0.0.53:53", Untouched),
    ]);
    let all = rules(|s| (s.redirect_dns, s.capture_all_dns) = (true, true));
    all.assert(&[
        ("out,udp,1000,10.0.0.54:53", Redirected(15053)),
        ("out,udp,1000,127.0.0.53:53,lo", Redirected(15053)),
        ("out,udp,1000,[2001:db8::53]:53", Redirected(15053)),
    ]);
    let mut reply = packet("in,udp,40000");
    reply.source.set_port(53);
    for (packet, zone) in [
        (packet("out,udp,1000,10.0.0.54:53"), Some(2)),
        (packet("out,udp,1337,10.0.0.54:53"), Some(1)),
        (packet("out,udp,1000,10.0.0.54:54"), None),
        (reply, Some(1)),
    ] {
        let rules = all.trace(&packet).rules;
        let rules = rules.iter().map(|(_, entry)| *entry);
        let mut verdicts = rules.filter_map(|entry| match entry {
            Entry::Rule { verdict, .. } => Some(*verdict),
            Entry::Foreign(_) => None,
        });
        let assigned = verdicts.find_map(|verdict| match verdict {
            Verdict::Zone(zone) => Some(zone),
            _ => None,
        });
        assert_eq!(assigned, zone, "{packet}");
    }
}

#[test]
fn tproxy_takes_new_connections() {
    let fixture = rules(|s| {
        tproxy(s);
        s.istio_local_exclude_ports = "15021".to_owned();
    });
    fixture.assert(&[
        ("in,tcp,80", Tproxied(15006)),
        ("in,tcp,[2001:db8::1]:80", Tproxied(15006)),
        ("in,tcp,15008", Tproxied(15006)),
        ("in,tcp,15021", Untouched),
        ("out,tcp,1000,10.0.0.5:443", Redirected(15001)),
        ("out,tcp,1000,10.0.0.1:80,lo", Untouched),
        ("out,tcp,1337,10.0.0.1:80,lo", Redirected(15006)),
    ]);
}

#[test]
fn connections_to_the_admin_port_are_rejected() {
    let fixture = rules(|s| s.protect_admin = true);
    fixture.assert(&[
        ("out,tcp,1000,127.0.0.1:15000,lo", Rejected),
        ("out,tcp,1000,[::1]:15000,lo", Rejected),
        ("out,tcp,0,127.0.0.1:15000,lo", Untouched),
        ("out,tcp,1337,127.0.0.1:15000,lo", Untouched),
        ("out,tcp,1000,10.0.0.5:15000", Redirected(15001)),
    ]);
}

#[test]
fn jumps_without_effect_are_not_among_the_rules() {
    let fixture = rules(|s| s.redirect_dns = true);
    let trace = fixture.trace(&packet("out,tcp,1000,10.0.0.5:443"));
    let lines = trace.rules.iter();
    let lines: Vec<_> = lines.map(|(place, entry)| appended(*place, entry)).collect();
    assert_eq!(
        lines,
        [
            "nat: -A OUTPUT -j ISTIO_OUTPUT",
            "nat: -A ISTIO_OUTPUT -j ISTIO_REDIRECT",
            "nat: -A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001",
        ]
    );
}

#[test]
fn the_simulation_skips_foreign_rules_and_ends_jump_loops() {
    let Fixture([mut layout, _]) = rules(|_| {});
    let output = layout.chains.get_mut(&(Table::Nat, Chain::Output));
    output.expect("a chain").insert(0, Entry::Foreign("-p tcp -j ACCEPT".to_owned()));
    let packet = packet("out,tcp,1000,10.0.0.5:443");
    assert_eq!(simulate(&layout, &packet).decision, Redirected(15001));
    let to_itself = Entry::Rule { matches: Vec::new(), verdict: Verdict::Jump(Chain::Output) };
    layout.chains.insert((Table::Nat, Chain::Output), vec![to_itself]);
    assert_eq!(simulate(&layout, &packet).decision, Untouched);
}
