//! Random settings, by both back ends: the kernel has the rules that the model says, and packets of each
//! way through them go the same way.

use std::fs;
use std::net::IpAddr;
use std::process::Command;

use proptest::prelude::*;
use proptest::sample::{select, subsequence};

use super::config::tests::settings;
use super::config::{Config, Host};
use super::explain::{Flow, explain};
use super::iptables::{self, saved::Saved};
use super::layout::Layout;
use super::nftables::{self, Live};
use super::packet::{Account, Direction, Packet, State, Trace, simulate};
use super::rules::{Family, Protocol, Rules};
use super::verify::ways;

/// Some of these items, as a list.
fn list(items: &'static [&'static str]) -> impl Strategy<Value = String> {
    subsequence(items, 0..=items.len()).prop_map(|items| items.join(","))
}

/// `*`, or some of these items.
fn all_or(items: &'static [&'static str]) -> impl Strategy<Value = String> {
    prop_oneof![Just("*".to_owned()), list(items)]
}

fn configs() -> impl Strategy<Value = Config> {
    let ids = || list(&["1337", "0", "2000-2010"]);
    let ranges = &[
        "10.0.0.0/8",
        "172.16.5.5/12",
        "127.0.0.0/8",
        "0.0.0.0/0",
        "2001:db8::/32",
    ];
    let servers = &["10.0.0.53", "192.168.0.53", "2001:db8::53"];
    let proxy = (ids(), ids(), select(vec!["", "TPROXY"]), any::<bool>());
    let inbound = (
        all_or(&["80", "8000:8010", "15008"]),
        list(&["15021", "7000-7010", "22"]),
        list(&["eth1", "net+"]),
        list(&["vm0", "tap+"]),
    );
    let outbound = (
        all_or(ranges),
        list(&["10.96.0.0/12", "192.168.1.1/32", "2001:db8:1::/48"]),
        list(&["443", "9000:9100"]),
        list(&["53", "25", "6000:6100"]),
    );
    let dns = (any::<[bool; 4]>(), subsequence(servers, 0..=3));
    let groups = (
        prop_oneof![2 => Just("*".to_owned()), 1 => list(&["1000", "2000-2010"])],
        list(&["202", "3000"]),
        select(vec!["127.0.0.1/32", "127.0.0.1/8"]),
    );
    (proxy, inbound, outbound, dns, groups).prop_map(|(proxy, inbound, outbound, dns, groups)| {
        let settings = settings(|s| {
            (s.proxy_uid, s.proxy_gid) = (proxy.0, proxy.1);
            s.istio_inbound_interception_mode = proxy.2.to_owned();
            (s.istio_inbound_ports, s.istio_local_exclude_ports) = (inbound.0, inbound.1);
            (s.istio_exclude_interfaces, s.kube_virt_interfaces) = (inbound.2, inbound.3);
            (s.istio_service_cidr, s.istio_service_exclude_cidr) = (outbound.0, outbound.1);
            (s.istio_outbound_ports, s.istio_local_outbound_ports_exclude) =
                (outbound.2, outbound.3);
            [
                s.redirect_dns,
                s.capture_all_dns,
                s.drop_invalid,
                s.protect_admin,
            ] = dns.0;
            (
                s.istio_outbound_owner_groups,
                s.istio_outbound_owner_groups_exclude,
            ) = (groups.0, groups.1);
            s.istio_outbound_ipv4_loopback_cidr = groups.2.to_owned();
        });
        let host = Host {
            has_v6: proxy.3,
            nameservers: dns
                .1
                .iter()
                .map(|server| server.parse().expect(server))
                .collect(),
            envoy_uid: None,
        };
        let (config, _) = Config::check(&settings, &host).expect("a configuration");
        config
    })
}

/// The model's rules for iptables, and for nft.
fn wanted(config: &Config) -> [Live; 2] {
    let rules = Rules::new(config);
    let iptables = Live {
        v4: Layout::new(&rules, Family::V4),
        v6: Layout::new(&rules, Family::V6),
    };
    [iptables, nftables::wanted(&rules)]
}

/// What kernels have after the rules were loaded. None is a machine without namespaces.
fn loaded(config: &Config) -> Option<[Live; 2]> {
    const MARK: &str = "@@";
    let rules = Rules::new(config);
    let folder = tempfile::tempdir().expect("a folder");
    for (name, text) in [
        ("v4", iptables::restore(&rules, Family::V4)),
        ("v6", iptables::restore(&rules, Family::V6)),
        ("nft", nftables::transaction(&rules)),
    ] {
        fs::write(folder.path().join(name), text).expect("written");
    }
    let script = "iptables-restore --noflush v4 && ip6tables-restore --noflush v6 \
                  && iptables-save && echo @@ && ip6tables-save && echo @@ \
                  && exec unshare --net sh -c 'nft -f nft && nft -j list ruleset'";
    let mut command = Command::new("unshare");
    command
        .args(["--net", "sh", "-c", script])
        .current_dir(folder.path());
    let output = command.output().expect("unshare");
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        #[expect(clippy::disallowed_methods, reason = "of the tests, not the agent")]
        let is_required = std::env::var_os("NETNS_TESTS").is_some();
        assert!(!is_required, "{error}");
        return None;
    }
    let text = String::from_utf8(output.stdout).expect("text");
    let parts: Vec<_> = text.split(MARK).collect();
    let saved = |text| Saved::parse(text).expect("rules").layout();
    let iptables = Live {
        v4: saved(parts[0]),
        v6: saved(parts[1]),
    };
    let nft = Live::parse(parts[2].trim().as_bytes()).expect("rules");
    Some([iptables, nft])
}

/// What happens to a packet, without the rules.
fn way(trace: &Trace<'_>) -> impl PartialEq + std::fmt::Debug {
    let zone = trace.zone;
    (trace.decision, trace.mark, trace.connection_mark, zone)
}

/// As `--explain` takes it.
fn flow(packet: &Packet) -> String {
    let id = |account: &Account| account.number.expect("a number");
    let protocol = match packet.protocol {
        Protocol::Tcp => "tcp",
        Protocol::Udp => "udp",
    };
    let start = match &packet.direction {
        Direction::Out { user, group } => format!("out,{protocol},{}/{}", id(user), id(group)),
        Direction::In => format!("in,{protocol}"),
    };
    let source: IpAddr = packet.source.ip();
    format!(
        "{start},{source},{},{}",
        packet.destination, packet.interface
    )
}

/// Packets go one way by all rules of a family. Only nft lets invalid packets of UDP pass: Istio's rule
/// for it is one of TCP, and has no effect on others.
fn assert_one_way(config: &Config, family: Family) -> Result<(), TestCaseError> {
    let [by_iptables, by_nft] = wanted(config);
    let without_drop = Config {
        drop_invalid: false,
        ..config.clone()
    };
    let [by_iptables_without_drop, _] = wanted(&without_drop);
    let layouts = [by_iptables.of(family), by_nft.of(family)];
    for (mut packet, expected, found) in ways(layouts, family) {
        let invalid_udp = packet.state == State::Invalid && packet.protocol == Protocol::Udp;
        let expected_by_nft = match invalid_udp {
            true => simulate(by_iptables_without_drop.of(family), &packet),
            false => expected.clone(),
        };
        prop_assert_eq!(
            way(&found),
            way(&expected_by_nft),
            "{} {:#?}",
            packet,
            found.rules
        );
        let said = explain(&packet, &expected, config);
        prop_assert!(said.contains(&expected.decision.to_string()), "{}", said);
        let port = packet.destination.port().max(1);
        packet.destination.set_port(port);
        let parsed: Flow = flow(&packet).parse().expect("a flow");
        prop_assert_eq!(parsed.destination, Some(packet.destination.ip()));
        let given = (parsed.port, parsed.protocol, parsed.interface);
        prop_assert_eq!(given, (port, packet.protocol, Some(packet.interface)));
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(24), ..ProptestConfig::default() })]

    #[test]
    fn packets_go_one_way_by_iptables_and_nft(config in configs()) {
        assert_one_way(&config, Family::V4)?;
        assert_one_way(&config, Family::V6)?;
    }

    #[test]
    fn kernels_have_the_rules_of_the_model_by_iptables_and_nft(config in configs()) {
        if let Some([iptables, nft]) = loaded(&config) {
            let [by_iptables, by_nft] = wanted(&config);
            prop_assert_eq!(iptables, by_iptables);
            prop_assert_eq!(nft, by_nft);
        }
    }
}

/// `PROPTEST_CASES`, or else this number.
fn cases(default: u32) -> u32 {
    #[expect(clippy::disallowed_methods, reason = "of the tests, not the agent")]
    let given = std::env::var("PROPTEST_CASES").ok();
    given
        .and_then(|given| given.parse().ok())
        .unwrap_or(default)
}
