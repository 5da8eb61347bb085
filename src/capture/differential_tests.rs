//! Compares the rules of iptables and nftables for random settings: the kernel has the rules of the model,
//! and both send packets the same way.

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
use super::nftables;
use super::packet::{Packet, Sender, simulate};
use super::rules::{Family, Rules};
use crate::net::address::Cidr;

/// Generates a comma-separated list of some of the items.
fn list(items: &'static [&'static str]) -> impl Strategy<Value = String> {
    subsequence(items, 0..=items.len()).prop_map(|items| items.join(","))
}

/// Generates `*`, or a list of some of the items.
fn all_or(items: &'static [&'static str]) -> impl Strategy<Value = String> {
    prop_oneof![Just("*".to_owned()), list(items)]
}

fn configs() -> impl Strategy<Value = Config> {
    let ids = || list(&["1337", "0", "2000-2010"]);
    let ranges = &["10.0.0.0/8", "172.16.5.5/12", "127.0.0.0/8", "0.0.0.0/0", "2001:db8::/32"];
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
            [s.redirect_dns, s.capture_all_dns, s.drop_invalid, s.protect_admin] = dns.0;
            (s.istio_outbound_owner_groups, s.istio_outbound_owner_groups_exclude) =
                (groups.0, groups.1);
            s.istio_outbound_ipv4_loopback_cidr = groups.2.to_owned();
        });
        let host = Host {
            has_v6: proxy.3,
            nameservers: dns.1.iter().map(|server| server.parse().expect(server)).collect(),
            envoy_uid: None,
        };
        let (config, _) = Config::check(&settings, &host).expect("a configuration");
        config
    })
}

const FAMILIES: [Family; 2] = [Family::V4, Family::V6];

/// Returns the rules of the model for iptables and for nft, each for both families.
fn wanted(config: &Config) -> [[Layout; 2]; 2] {
    let rules = Rules::new(config);
    [
        FAMILIES.map(|family| Layout::new(&rules, family)),
        FAMILIES.map(|family| nftables::versions(&rules, family).remove(0)),
    ]
}

/// Loads the rules into a new network namespace for iptables, and into another one for nft. Returns the rules
/// that the kernel lists; None on a machine without namespaces.
fn loaded(config: &Config) -> Option<[[Layout; 2]; 2]> {
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
    command.args(["--net", "sh", "-c", script]).current_dir(folder.path());
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
    let iptables = [saved(parts[0]), saved(parts[1])];
    let listed = parts[2].trim().as_bytes();
    let nft = FAMILIES.map(|family| nftables::parse(listed, family).expect("rules"));
    Some([iptables, nft])
}

/// Generates flows, in the form that `--explain` accepts, whose first packets the rules may capture.
fn flows() -> impl Strategy<Value = Vec<String>> {
    let users = select(vec!["1337", "0", "1000", "202", "2005", "3000", "54321"]);
    let v4 = [
        "10.0.0.53",
        "10.96.0.1",
        "172.16.5.5",
        "192.168.1.1",
        "127.0.0.6",
        "127.0.0.1",
        "198.51.100.7",
    ];
    let v6 = ["2001:db8::53", "2001:db8:1::7", "::1", "::6", "2001:db9::7"];
    let ports = select(vec![53, 80, 443, 25, 7005, 8005, 9050, 15000, 15006, 15008, 15021]);
    let interfaces = select(vec!["eth0", "eth1", "net0", "vm0", "tap3", "lo"]);
    let address = any::<[proptest::sample::Index; 2]>();
    let protocol = select(vec!["tcp", "udp"]);
    let flow = (protocol, users.clone(), users, address, ports, interfaces, any::<[bool; 2]>());
    let flow =
        flow.prop_map(move |(protocol, user, group, at, port, interface, [is_sent, is_v6])| {
            let addresses = if is_v6 { &v6[..] } else { &v4[..] };
            let [from, to] = at.map(|index| addresses[index.index(addresses.len())]);
            let host = if is_v6 { format!("[{to}]") } else { to.to_owned() };
            let rest = format!("{from},{host}:{port}");
            if is_sent || interface == "lo" {
                format!("out,{protocol},{user}/{group},{rest},{interface}")
            } else {
                format!("in,{protocol},{rest},{interface}")
            }
        });
    proptest::collection::vec(flow, 200)
}

/// Returns the packet of a flow that has all fields.
fn packet(flow: Flow) -> Packet {
    let unspecified = IpAddr::from([0, 0, 0, 0]);
    let sender = flow.user.map(|user| Sender { user, group: flow.group.expect("a group") });
    Packet {
        sender,
        protocol: flow.protocol,
        source: (flow.source.unwrap_or(unspecified), 40000).into(),
        destination: (flow.destination.unwrap_or(unspecified), flow.port).into(),
        interface: flow.interface.unwrap_or_default(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(24), ..ProptestConfig::default() })]

    #[test]
    fn iptables_and_nftables_rules_send_each_packet_the_same_way(config in configs(), flows in flows()) {
        let [by_iptables, by_nft] = wanted(&config);
        for flow in flows {
            let packet = packet(flow.parse().expect("a flow"));
            let family = Cidr::single(packet.destination.ip()).family();
            let expected = simulate(&by_iptables[family as usize], &packet);
            let found = simulate(&by_nft[family as usize], &packet);
            prop_assert_eq!(found.decision, expected.decision, "{} {:#?}", packet, found.rules);
            let said = explain(&packet, &expected, &config);
            prop_assert!(said.contains(&expected.decision.to_string()), "{}", said);
        }
    }

    #[test]
    fn rules_read_from_the_kernel_equal_the_model_for_iptables_and_nftables(config in configs()) {
        if let Some([iptables, nft]) = loaded(&config) {
            let [by_iptables, by_nft] = wanted(&config);
            prop_assert_eq!(iptables, by_iptables);
            prop_assert_eq!(nft, by_nft);
        }
    }
}

/// Returns the number in `PROPTEST_CASES`, or else `default`.
fn cases(default: u32) -> u32 {
    #[expect(clippy::disallowed_methods, reason = "of the tests, not the agent")]
    let given = std::env::var("PROPTEST_CASES").ok();
    given.and_then(|given| given.parse().ok()).unwrap_or(default)
}
