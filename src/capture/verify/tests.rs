//! Tests which differences from the wanted rules are found.

use super::*;
use crate::capture::config::tests::settings;
use crate::capture::config::{Config, Host, Settings};
use crate::capture::iptables;
use crate::capture::rules::Rules;

type Change = fn(&mut Settings);

fn config(change: Change) -> Config {
    let settings = settings(|s| {
        (s.istio_service_cidr, s.istio_inbound_ports) = ("*".to_owned(), "*".to_owned());
        change(s);
    });
    let servers = ["10.0.0.53", "10.0.0.54", "2001:db8::53"];
    let host = Host {
        has_v6: true,
        nameservers: servers.map(|server| server.parse().expect(server)).into(),
        envoy_uid: None,
    };
    Config::check(&settings, &host).expect("settings").0
}

fn tproxy(s: &mut Settings) {
    s.istio_inbound_interception_mode = "TPROXY".to_owned();
    s.istio_exclude_interfaces = "eth1".to_owned();
}

fn dns_of_servers(s: &mut Settings) {
    s.redirect_dns = true;
    s.istio_outbound_owner_groups_exclude = "202".to_owned();
}

const CONFIGS: [Change; 6] = [
    |s| s.istio_local_exclude_ports = "15021,15020".to_owned(),
    tproxy,
    dns_of_servers,
    |s| (s.redirect_dns, s.capture_all_dns) = (true, true),
    |s| {
        (s.drop_invalid, s.protect_admin) = (true, true);
        s.kube_virt_interfaces = "vm0".to_owned();
    },
    |s| {
        s.istio_outbound_owner_groups = "1000,1001".to_owned();
        s.istio_service_cidr = "10.96.0.0/16,2001:db8::/32".to_owned();
    },
];

fn wanted(change: Change, family: Family) -> Layout {
    Layout::new(&Rules::new(&config(change)), family)
}

fn chain(layout: &mut Layout, table: Table, chain: Chain) -> &mut Vec<Entry> {
    layout.chains.entry((table, chain)).or_default()
}

/// Returns the findings after a change of the rules, and true if one of them affects traffic.
fn findings(settings: Change, change: impl FnOnce(&mut Layout)) -> (Vec<String>, bool) {
    let wanted = wanted(settings, Family::V4);
    let mut found = wanted.clone();
    change(&mut found);
    let findings = compare(&[wanted], &found, Family::V4);
    let texts = findings.iter().map(ToString::to_string);
    (texts.collect(), findings.iter().any(Finding::affects_traffic))
}

#[test]
fn equal_rules_have_no_differences() {
    for change in CONFIGS {
        assert_eq!(findings(change, |_| {}), (Vec::new(), false));
    }
}

#[test]
fn every_missing_extra_or_moved_rule_is_named_and_affects_traffic() {
    let mut tried = 0;
    for (change, family) in CONFIGS.map(|c| [(c, Family::V4), (c, Family::V6)]).concat() {
        let wanted = wanted(change, family);
        for (place, entries) in &wanted.chains {
            for (at, entry) in entries.iter().enumerate() {
                type Damage<'a> = Box<dyn Fn(&mut Vec<Entry>) + 'a>;
                let mut damages: Vec<(_, Damage)> = vec![
                    (Kind::Missing, Box::new(|rules| drop(rules.remove(at)))),
                    (Kind::Unwanted, Box::new(|rules| rules.push(entry.clone()))),
                ];
                if at + 1 < entries.len() {
                    damages.push((Kind::Order, Box::new(|rules| rules.swap(at, at + 1))));
                }
                for (kind, damage) in damages {
                    let mut found = wanted.clone();
                    damage(found.chains.get_mut(place).expect("a chain"));
                    let findings = compare(std::slice::from_ref(&wanted), &found, family);
                    let [finding] = &findings[..] else {
                        panic!("{entry:?}: {findings:#?}");
                    };
                    assert!(finding.affects_traffic());
                    assert_eq!(finding.kind, kind);
                    assert!(finding.detail.contains(&appended(*place, entry)), "{finding}");
                    tried += 1;
                }
            }
        }
    }
    assert!(tried > 500, "{tried}");
}

#[test]
fn zones_and_redirects_of_dns_that_are_missing_are_named() {
    for (table, rule) in [
        (Table::Raw, "-A ISTIO_OUTPUT_DNS -p udp --dport 53 -d 10.0.0.53/32 -j CT --zone 2"),
        (Table::Nat, "-A ISTIO_OUTPUT -j ISTIO_OUTPUT_DNS"),
        (
            Table::Nat,
            "-A ISTIO_OUTPUT_DNS -p udp --dport 53 -d 10.0.0.53/32 -j REDIRECT --to-port 15053",
        ),
    ] {
        let same = |text: &str| {
            let mut words: Vec<_> = text.split(' ').map(str::to_owned).collect();
            words.sort();
            words
        };
        let expected = format!("{}: {rule}", table.name());
        let (texts, affects_traffic) = findings(dns_of_servers, |found| {
            for (place, entries) in &mut found.chains {
                entries.retain(|entry| same(&appended(*place, entry)) != same(&expected));
            }
        });
        assert!(affects_traffic);
        assert_eq!(texts.len(), 1, "{texts:?}");
        let said = texts[0].replace("IPv4: a rule is missing: ", "");
        assert_eq!(same(&said), same(&expected));
    }
}

#[test]
fn foreign_rules_before_istios_are_reported_if_they_may_take_packets() {
    use Table::{Filter, Mangle, Nat, Raw};
    let all: Change = |_| {};
    for (settings, table, rule, is_named) in [
        (all, Nat, "-p tcp -j ACCEPT", true),
        (all, Nat, "-d 10.0.0.0/8 -p tcp -m tcp --dport 443 -j RETURN", true),
        (all, Nat, r#"-p tcp -m comment --comment "a \"b\" -j X" -j RETURN"#, true),
        (all, Nat, "-m comment --comment word -j DNAT --to-destination 10.0.0.1", true),
        (all, Nat, "! -o lo -p tcp -m owner ! --uid-owner 1000 -j ACCEPT", true),
        (all, Nat, "-m cgroup --path x -j ACCEPT", true),
        (all, Nat, "-d 10.0.0.0/8 -g DOCKER", true),
        (all, Nat, "-p tcp -j LOG --log-prefix \"-j ACCEPT\"", false),
        (all, Nat, "-j NFLOG", false),
        (all, Nat, "-p tcp", false),
        (all, Nat, "-p udp -j ACCEPT", false),
        (all, Nat, "! -p udp -j ACCEPT", true),
        (all, Nat, "! -p udp -j DNAT --to-destination 10.0.0.1", true),
        (all, Nat, "-p udp -m udp --dport 53 -j DNAT --to-destination 10.0.0.1", false),
        // With these settings, Istio has no rules in the mangle and filter tables.
        (all, Mangle, "-d 10.0.0.0/8 -j REJECT --reject-with icmp-port-unreachable", false),
        (all, Filter, "-p tcp -m tcp --dport 15001 -j DROP", false),
        (dns_of_servers, Nat, "-p udp -j ACCEPT", true),
        (dns_of_servers, Raw, "-p udp -j CT --zone 7", true),
        (dns_of_servers, Raw, "-p udp -j CT --notrack", true),
        (dns_of_servers, Nat, "-d 10.0.0.54/32 -p tcp -m tcp --dport 53 -j RETURN", true),
        (CONFIGS[5], Nat, "-d 10.96.7.0/24 -m owner --gid-owner 1001 -j ACCEPT", true),
        (tproxy, Mangle, "-p tcp -j MARK --set-xmark 0x1/0xffffffff", true),
        (tproxy, Mangle, "-p tcp -j MARK --set-xmark 0x1/0xff", true),
    ] {
        let (texts, affects_traffic) = findings(settings, |found| {
            let rules = chain(found, table, Chain::Output);
            rules.insert(0, iptables::saved::entry(rule));
        });
        assert_eq!(
            (texts.len(), affects_traffic),
            (is_named.into(), is_named),
            "{rule}: {texts:?}"
        );
        let start = format!(
            "IPv4: a rule of others comes first and may take traffic: {}: -A OUTPUT ",
            table.name()
        );
        assert!(texts.iter().all(|text| text.starts_with(&start)), "{texts:?}");
    }
}

#[test]
fn foreign_rules_after_istios_are_ignored() {
    let (texts, affects_traffic) = findings(
        |_| {},
        |found| {
            let rule = Entry::Foreign("-p udp -j DNAT --to-destination 10.0.0.1".to_owned());
            chain(found, Table::Nat, Chain::Output).push(rule);
            let rule = Entry::rule(Vec::new(), Verdict::Accept);
            chain(found, Table::Nat, Chain::Prerouting).push(rule);
        },
    );
    assert_eq!((texts, affects_traffic), (Vec::new(), false));
}

#[test]
fn dns_rules_of_an_earlier_version_are_named_and_affect_traffic() {
    let rule = "nat: -A POSTROUTING -p udp -m udp --dport 15053 -j SNAT --to-source 127.0.0.1";
    for settings in [|_: &mut Settings| {}, dns_of_servers] {
        let (texts, affects_traffic) =
            findings(settings, |found| found.earlier_dns = vec![rule.to_owned()]);
        let named = format!("IPv4: a rule is extra: {rule}");
        assert_eq!((texts, affects_traffic), (vec![named], true));
    }
}

#[test]
fn a_chain_of_another_version_matters_once_it_is_jumped_to() {
    let old = |found: &mut Layout| {
        let chain = (Table::Nat, "ISTIO_OLD".to_owned());
        found.unknown_chains.push(chain);
    };
    let (texts, affects_traffic) = findings(|_| {}, old);
    let named = "IPv4: a chain is not of this version of Istio: nat: ISTIO_OLD";
    assert_eq!((&texts[..], affects_traffic), (&[named.to_owned()][..], false));
    let (texts, affects_traffic) = findings(
        |_| {},
        |found| {
            old(found);
            let jump = iptables::saved::entry("-p tcp -j ISTIO_OLD");
            chain(found, Table::Nat, Chain::Output).push(jump);
        },
    );
    let jump = "IPv4: a rule is extra: nat: -A OUTPUT -p tcp -j ISTIO_OLD";
    assert_eq!((&texts[..], affects_traffic), (&[jump.to_owned(), named.to_owned()][..], true));
}

#[test]
fn complete_rules_of_an_earlier_version_are_named_as_harmless() {
    let all: Change = |s| (s.redirect_dns, s.capture_all_dns) = (true, true);
    for change in [dns_of_servers, all] {
        let line = "-A ISTIO_OUTPUT_DNS -p udp --dport 53 -m owner --uid-owner 1337 -j RETURN\n";
        let config = config(change);
        let earlier = Rules::earlier(&config);
        for family in [Family::V4, Family::V6] {
            let text = iptables::restore(&earlier, family);
            assert!(text.contains(line), "{text}");
            let versions = [Rules::new(&config), earlier.clone()];
            let versions = versions.map(|rules| Layout::new(&rules, family));
            let findings = compare(&versions, &versions[1], family);
            let kinds: Vec<_> = findings.iter().map(|finding| finding.kind).collect();
            assert_eq!(kinds, [Kind::Version]);
            assert!(!findings[0].affects_traffic());
            let mut found = versions[1].clone();
            chain(&mut found, Table::Nat, Chain::IstioOutput).remove(0);
            let findings = compare(&versions, &found, family);
            assert!(findings.iter().any(Finding::affects_traffic));
        }
    }
}
