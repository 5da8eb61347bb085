//! The rules of one address family as packets meet them: by table and chain, in their final order.

use std::collections::BTreeMap;

use super::rules::{Chain, Family, Match, Place, Rules, Table, Verdict};

/// Rules that are wanted, or that a machine has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// Chains without rules are there with an empty list.
    pub chains: BTreeMap<(Table, Chain), Vec<Entry>>,
    /// Names of chains that start like Istio's, but are none of this version.
    pub unknown_chains: Vec<(Table, String)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    Rule {
        matches: Vec<Match>,
        verdict: Verdict,
    },
    /// A rule that is not of traffic capture, as its program prints it.
    Foreign(String),
}

impl Layout {
    /// What a machine has after these rules were added to empty tables.
    pub fn new(rules: &Rules, family: Family) -> Self {
        let mut layout = Self::default();
        for rule in rules.of(family) {
            let chain = layout.chains.entry((rule.table, rule.chain)).or_default();
            let at = match rule.place {
                Place::Last => chain.len(),
                Place::At(number) => chain.len().min(number - 1),
            };
            let entry = Entry::Rule {
                matches: rule.matches.clone(),
                verdict: rule.verdict,
            };
            chain.insert(at, entry);
            if let Verdict::Jump(target) = rule.verdict {
                layout.chains.entry((rule.table, target)).or_default();
            }
        }
        layout
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture::config::tests::checked;

    #[test]
    fn inserted_rules_stand_where_the_kernel_puts_them() {
        let (config, _) = checked(|settings| {
            settings.interception_mode = "TPROXY".to_owned();
            settings.inbound_ports = "*".to_owned();
        });
        let layout = Layout::new(&Rules::new(&config), Family::V4);
        let inbound = &layout.chains[&(Table::Mangle, Chain::Inbound)];
        let verdicts = inbound.iter().map(|entry| match entry {
            Entry::Rule { verdict, .. } => *verdict,
            Entry::Foreign(text) => panic!("{text}"),
        });
        assert_eq!(
            verdicts.collect::<Vec<_>>(),
            [
                Verdict::Return,
                Verdict::Return,
                Verdict::Return,
                Verdict::Jump(Chain::Divert),
                Verdict::Jump(Chain::Tproxy),
            ]
        );
    }
}
