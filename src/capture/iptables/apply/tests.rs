//! Texts for `iptables-restore`, from what is there and what is to be.

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

/// Leaving by eth1 is ours.
fn own() -> Own {
    let leaves = Match::Is(Criterion::OutInterface("eth1".to_owned()));
    let entry = Entry::rule(vec![leaves], Verdict::Return);
    let mut layout = Layout::default();
    layout
        .chains
        .insert((Table::Nat, Chain::Output), vec![entry]);
    Own::new([layout].into_iter())
}

#[test]
fn ours_is_replaced_and_all_else_stays() {
    let saved = Saved::parse(OLD).expect("a text");
    let new = TableText {
        name: "nat",
        chains: vec!["ISTIO_OUTPUT", "ISTIO_REDIRECT"],
        lines: vec!["-A OUTPUT -j ISTIO_OUTPUT".to_owned()],
    };
    assert_eq!(
        swap(&own().of(&saved), &[new]),
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
fn the_table_that_redirects_comes_last_and_goes_first() {
    let text = |name| format!("*{name}\n:ISTIO_OUTPUT - [0:0]\nCOMMIT\n");
    let old = text("mangle") + &text("nat") + &text("raw");
    let names = |text: &str| {
        let names = text.lines().filter_map(|line| line.strip_prefix('*'));
        names.map(str::to_owned).collect::<Vec<_>>()
    };
    let removal = swap(&own().of(&Saved::parse(&old).expect("a text")), &[]);
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
