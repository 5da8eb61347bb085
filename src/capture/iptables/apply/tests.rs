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

/// Selects Istio's rules. A rule for packets that leave through eth1 is among Istio's known rules; the rule
/// for eth2 is not.
fn istio_part(text: &str) -> Saved<'_> {
    let leaves = Match::Is(Criterion::OutInterface("eth1".to_owned()));
    let entry = Entry::rule(vec![leaves], Verdict::Return);
    let known = [((Table::Nat, Chain::Output), entry)];
    select_istio(&Saved::parse(text).expect("a text"), &known)
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
    let table = |name| TableText {
        name,
        chains: Vec::new(),
        lines: vec!["-A OUTPUT -j DROP".to_owned()],
    };
    let new = [table("mangle"), table("nat"), table("raw")];
    let set_up = swap(&Saved::default(), &new);
    assert_eq!(names(&set_up), ["raw", "mangle", "nat"]);
}
