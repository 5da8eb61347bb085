//! Tests the input of `iptables-restore` that replaces the present rules with the wanted rules.

use super::*;
use crate::capture::rules::Verdict;

const OLD: &str = "\
*nat
:OUTPUT ACCEPT [0:0]
:ISTIO_OUTPUT - [0:0]
:ISTIO_OLD - [0:0]
:OTHER - [0:0]
-A OUTPUT -j OTHER
-A OUTPUT -o eth1 -j RETURN
-A OUTPUT -o eth2 -j RETURN
-A OUTPUT -j ISTIO_OUTPUT
-A ISTIO_OUTPUT -j ISTIO_OLD
-A OTHER -m comment --comment \"-j ISTIO_OLD\" -j RETURN
-A OTHER -g ISTIO_OLD
COMMIT
";

/// Selects Istio's rules. A rule for packets that leave through eth1 is among the rules of the configuration; the
/// rule for eth2 is not.
fn istio_part(text: &str) -> Saved<'_> {
    let leaves = Match::Is(Criterion::OutInterface("eth1".to_owned()));
    let entry = Entry::rule(vec![leaves], Verdict::Return);
    let known = [((Table::Nat, Chain::Output), entry)];
    let saved = Saved::parse(text).expect("a text");
    let interfaces = saved.istio_interfaces().into_iter().map(str::to_owned);
    select_istio(&saved, &known, &interfaces.collect(), false)
}

#[test]
fn an_interface_rule_is_istios_by_its_place_and_counterpart() {
    const JUMPS: [&str; 2] = ["PREROUTING -p tcp -j ISTIO_INBOUND", "OUTPUT -j ISTIO_OUTPUT"];
    let [inbound, outbound] = JUMPS;
    for (rules, istios) in [
        // Both directions are excluded.
        (vec!["PREROUTING -i a -j RETURN", inbound, "OUTPUT -o a -j RETURN", outbound], vec![0, 2]),
        // With TPROXY, the nat table has no jump for inbound traffic.
        (vec!["PREROUTING -i a -j RETURN", "OUTPUT -o a -j RETURN", outbound], vec![0, 1]),
        // Traffic of virtual machines is captured.
        (
            vec![
                "PREROUTING -d 10.0.0.0/8 -i v -j ISTIO_REDIRECT",
                "PREROUTING -i v -j RETURN",
                inbound,
            ],
            vec![1],
        ),
        (vec!["PREROUTING -i v -j ISTIO_REDIRECT", "PREROUTING -i v -j RETURN"], vec![1]),
        // Others have rules for one direction, behind the jump, with another condition, or without Istio.
        (vec!["PREROUTING -i a -j RETURN", inbound, outbound], vec![]),
        (vec!["OUTPUT -o a -j RETURN", outbound], vec![]),
        (vec![inbound, "PREROUTING -i a -j RETURN", outbound, "OUTPUT -o a -j RETURN"], vec![]),
        (
            vec![
                "PREROUTING -i a -p udp -j RETURN",
                inbound,
                "OUTPUT -o a -p udp -j RETURN",
                outbound,
            ],
            vec![],
        ),
        (vec!["PREROUTING -i a -j RETURN", "OUTPUT -o a -j RETURN"], vec![]),
        (vec!["OUTPUT -o a -j RETURN", outbound, inbound, "PREROUTING -i a -j RETURN"], vec![]),
        // The configuration names eth1.
        (vec!["OUTPUT -o eth1 -j RETURN", outbound], vec![0]),
        (vec![outbound, "OUTPUT -o eth1 -j RETURN"], vec![]),
    ] {
        let lines: String = rules.iter().map(|rule| format!("-A {rule}\n")).collect();
        let chain = if lines.contains("ISTIO") { ":ISTIO_OUTPUT - [0:0]\n" } else { "" };
        let text = format!("*nat\n{chain}{lines}COMMIT\n");
        let found: Vec<_> = istio_part(&text)
            .rules
            .iter()
            .filter(|rule| !jumps_to_istio(rule.text))
            .map(|found| format!("{} {}", found.chain, found.text))
            .collect();
        let istios: Vec<_> = istios.iter().map(|index: &usize| rules[*index]).collect();
        assert_eq!(found, istios, "{text}");
    }
}

#[test]
fn istio_rules_are_replaced_and_other_rules_stay() {
    let new = TableText {
        name: "nat",
        chains: vec!["ISTIO_OUTPUT", "ISTIO_REDIRECT"],
        lines: vec!["-A OUTPUT -j ISTIO_OUTPUT".to_owned()],
    };
    assert_eq!(
        swap(&istio_part(OLD), &[new]),
        "\
*nat
-D OUTPUT -o eth1 -j RETURN
-D OUTPUT -j ISTIO_OUTPUT
-D OTHER -g ISTIO_OLD
:ISTIO_OUTPUT - [0:0]
:ISTIO_REDIRECT - [0:0]
:ISTIO_OLD - [0:0]
-A OUTPUT -j ISTIO_OUTPUT
-X ISTIO_OLD
COMMIT
"
    );
    assert_eq!(swap(&Saved::default(), &[]), "");
}

#[test]
fn the_nat_table_is_set_up_last_and_removed_first() {
    let text = |name| format!("*{name}\n:ISTIO_OUTPUT - [0:0]\nCOMMIT\n");
    let old = text("mangle") + &text("nat") + &text("raw");
    let names = |text: &str| {
        let names = text.lines().filter_map(|line| line.strip_prefix('*'));
        names.map(str::to_owned).collect::<Vec<_>>()
    };
    let removal = swap(&istio_part(&old), &[]);
    assert_eq!(names(&removal), ["nat", "mangle", "raw"]);
    let table =
        |name| TableText { name, chains: Vec::new(), lines: vec!["-A OUTPUT -j DROP".to_owned()] };
    let new = [table("mangle"), table("nat"), table("raw")];
    let set_up = swap(&Saved::default(), &new);
    assert_eq!(names(&set_up), ["raw", "mangle", "nat"]);
}
