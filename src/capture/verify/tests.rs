//! Rules that are as they should be, and rules that are not.

use proptest::prelude::*;

use super::*;
use crate::capture::config::tests::checked;
use crate::capture::config::{Config, Settings};
use crate::capture::rules::{Rules, Verdict};

fn config(change: impl FnOnce(&mut Settings)) -> Config {
    let all = |s: &mut Settings| {
        (s.service_cidr, s.inbound_ports) = ("*".to_owned(), "*".to_owned());
        change(s);
    };
    checked(all).0
}

fn wanted(change: impl FnOnce(&mut Settings)) -> Layout {
    Layout::new(&Rules::new(&config(change)), Family::V4)
}

fn chain(layout: &mut Layout, chain: Chain) -> &mut Vec<Entry> {
    let chain = layout.chains.get_mut(&(Table::Nat, chain));
    chain.expect("a chain")
}

/// The findings after a change, and whether one of them misleads traffic.
fn findings(change: impl FnOnce(&mut Layout)) -> (Vec<String>, bool) {
    let wanted = wanted(|_| {});
    let mut found = wanted.clone();
    change(&mut found);
    let findings = compare(&wanted, &found, Family::V4);
    let texts = findings.iter().map(ToString::to_string);
    (texts.collect(), findings.iter().any(Finding::misleads))
}

#[test]
fn equal_rules_differ_in_nothing() {
    assert_eq!(findings(|_| {}), (Vec::new(), false));
}

#[test]
fn every_rule_that_is_missing_is_found_and_misleads_traffic_unless_another_covers_it() {
    // Who is not of the proxy's user has left before the rules of its group.
    let covered = [
        "nat: -A ISTIO_OUTPUT ! -d 127.0.0.1/32 -o lo -p tcp ! --dport 15008 -m owner --gid-owner 1337 -j ISTIO_IN_REDIRECT",
        "nat: -A ISTIO_OUTPUT -o lo -m owner ! --gid-owner 1337 -j RETURN",
    ];
    for is_tproxy in [false, true] {
        let wanted = wanted(|s| match is_tproxy {
            false => s.local_exclude_ports = "15021".to_owned(),
            true => s.interception_mode = "TPROXY".to_owned(),
        });
        for (place, entries) in &wanted.chains {
            for at in 0..entries.len() {
                let mut found = wanted.clone();
                let entry = found.chains.get_mut(place).expect("a chain").remove(at);
                let line = line(*place, &entry);
                let findings = compare(&wanted, &found, Family::V4);
                assert_eq!(
                    (findings[0].kind, &findings[0].detail),
                    (Kind::Missing, &line)
                );
                let misleads = findings.iter().any(Finding::misleads);
                // In TPROXY, no packet comes to this chain.
                let is_unused = is_tproxy && line.starts_with("nat: -A ISTIO_INBOUND");
                let matters = !is_unused && !covered.contains(&line.as_str());
                assert_eq!(misleads, matters, "{findings:#?}");
            }
        }
    }
}

#[test]
fn a_way_that_differs_is_told_by_an_example_and_its_rule() {
    let (texts, misleads) = findings(|found| {
        let port = chain(found, Chain::Redirect);
        let Entry::Rule { verdict, .. } = &mut port[0] else {
            panic!("a rule");
        };
        *verdict = Verdict::Redirect(15002);
    });
    assert!(misleads);
    let rule = "nat: -A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports";
    assert_eq!(
        texts[0],
        format!("IPv4: a rule is changed: found {rule} 15002, expected {rule} 15001")
    );
    let end = format!(
        "is redirected to port 15002, expected that it is redirected to port 15001; it matches {rule} 15002"
    );
    assert_eq!(texts.len(), 2);
    assert!(
        texts[1].starts_with("IPv4: a packet ends elsewhere: TCP from user ")
            && texts[1].ends_with(&end),
        "{texts:?}"
    );
}

#[test]
fn rules_of_others_before_ours_mislead_only_what_they_certainly_take() {
    for (rule, is_named, misleads) in [
        ("-p tcp -j ACCEPT", true, true),
        (
            r#"-p tcp -m comment --comment "a \"b\" -j X" -j RETURN"#,
            true,
            true,
        ),
        (
            "-p tcp -m comment --comment word -j DNAT --to-destination 10.0.0.1",
            true,
            true,
        ),
        (
            "-d 10.0.0.0/8 -j REJECT --reject-with icmp-port-unreachable",
            true,
            true,
        ),
        ("-m cgroup --path x -j ACCEPT", true, false),
        ("-d 10.0.0.0/8 -g DOCKER", true, false),
        ("-p tcp -j LOG --log-prefix \"-j ACCEPT\"", false, false),
        ("-j NFLOG", false, false),
        ("-p tcp", false, false),
        ("-p udp -j ACCEPT", true, false),
    ] {
        let (texts, misled) = findings(|found| {
            chain(found, Chain::Output).insert(0, Entry::Foreign(rule.to_owned()));
        });
        let named = format!(
            "IPv4: a rule of others comes first and may take traffic: nat: -A OUTPUT {rule}"
        );
        assert_eq!(texts.contains(&named), is_named, "{texts:#?}");
        assert_eq!(misled, misleads, "{texts:#?}");
    }
}

#[test]
fn rules_of_others_behind_ours_are_none_of_our_business() {
    let (texts, misled) = findings(|found| {
        let rule = Entry::Foreign("-p udp -j DNAT --to-destination 10.0.0.1".to_owned());
        chain(found, Chain::Output).push(rule);
        let rule = Entry::rule(Vec::new(), Verdict::Accept);
        chain(found, Chain::Prerouting).push(rule);
    });
    assert_eq!((texts, misled), (Vec::new(), false));
}

#[test]
fn order_doubles_and_chains_of_other_versions_are_named() {
    let (texts, misled) = findings(|found| chain(found, Chain::IstioOutput).reverse());
    assert!(misled);
    assert_eq!(
        texts[0],
        "IPv4: rules are in another order: nat: ISTIO_OUTPUT"
    );
    let (texts, misled) = findings(|found| {
        let output = chain(found, Chain::Output);
        output.push(output[0].clone());
        found
            .unknown_chains
            .push((Table::Nat, "ISTIO_OLD".to_owned()));
    });
    assert!(!misled);
    assert_eq!(
        texts,
        [
            "IPv4: a rule is not asked for: nat: -A OUTPUT -j ISTIO_OUTPUT",
            "IPv4: a chain is not of this version of Istio: nat: ISTIO_OLD",
        ]
    );
}

proptest! {
    /// What is readable does not depend on a comment.
    #[test]
    fn a_rule_of_others_of_any_text_is_readable_or_stays_text(
        text in "(-p tcp)?( -[jgm] |comment| --comment|\"|\\\\|[A-Z]{2,6}| |\\PC){0,12}",
    ) {
        let foreign = Entry::Foreign(text.clone());
        others::may_take(&foreign);
        let read = others::readable(&foreign);
        let commented = Entry::Foreign(format!("-m comment --comment x {text}"));
        if !text.contains("--comment") && !text.contains('\\') {
            prop_assert_eq!(others::readable(&commented), read);
        }
    }
}
