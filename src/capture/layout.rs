//! The rules of one address family as packets meet them: by table and chain, in their final order.

use std::collections::BTreeMap;

use super::rules::{Chain, Criterion, Family, Match, Place, Rule, Rules, Table, Verdict};

/// Rules that are wanted, or that a machine has. Equal rules are equal entries, however they were written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// Chains without rules are there with an empty list.
    pub chains: BTreeMap<(Table, Chain), Vec<Entry>>,
    /// Names of chains that start like Istio's, but are none of this version.
    pub unknown_chains: Vec<(Table, String)>,
    /// Rules for DNS that Istio 1.8 to 1.24 put into the kernel's own chains, as text. They are not in `chains`.
    pub earlier_dns: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    Rule {
        /// In an order that depends on nothing else, without those that any packet passes.
        matches: Vec<Match>,
        verdict: Verdict,
    },
    /// A rule that is not of traffic capture, as its program prints it.
    Foreign(String),
}

/// The chains that rules are in or jump to, with the rules in their final order.
pub(super) fn chains<'a>(
    rules: impl IntoIterator<Item = &'a Rule>,
) -> BTreeMap<(Table, Chain), Vec<&'a Rule>> {
    let mut chains = BTreeMap::<_, Vec<&Rule>>::new();
    for rule in rules {
        let chain = chains.entry((rule.table, rule.chain)).or_default();
        let at = match rule.place {
            Place::Last => chain.len(),
            Place::At(number) => chain.len().min(number - 1),
        };
        chain.insert(at, rule);
        if let Verdict::Jump(target) = rule.verdict {
            chains.entry((rule.table, target)).or_default();
        }
    }
    chains
}

impl Layout {
    /// What a machine has after these rules were added to empty tables.
    pub fn new(rules: &Rules, family: Family) -> Self {
        Self::shared(rules.of(family), family)
    }

    /// What a machine has of a family after these rules were added to empty tables of both.
    pub(super) fn shared<'a>(rules: impl IntoIterator<Item = &'a Rule>, family: Family) -> Self {
        let entries = |rules: Vec<&Rule>| {
            let is_of = |rule: &&Rule| rule.family.is_none_or(|only| only == family);
            let entry = |rule: &Rule| Entry::rule(rule.matches.clone(), rule.verdict);
            rules.into_iter().filter(is_of).map(entry).collect()
        };
        let chains = chains(rules).into_iter();
        Self {
            chains: chains.map(|(name, rules)| (name, entries(rules))).collect(),
            ..Self::default()
        }
    }

    /// Whether there are chains of traffic capture, or rules of earlier versions.
    pub fn is_captured(&self) -> bool {
        let has_chains = self.chains.keys().any(|(_, chain)| !chain.is_builtin());
        has_chains || !self.earlier_dns.is_empty()
    }

    /// The mark of packets that TPROXY has handed over.
    pub fn tproxy_mark(&self) -> Option<u32> {
        let mut rules = self.rules(Table::Mangle, Chain::Inbound);
        rules.find_map(|(matches, _)| match matches {
            [
                Match::Is(Criterion::Protocol(_)),
                Match::Is(Criterion::Mark(mark)),
            ] => Some(*mark),
            _ => None,
        })
    }

    /// The port that a chain redirects to.
    pub fn redirects_to(&self, chain: Chain) -> Option<u16> {
        let mut rules = self.rules(Table::Nat, chain);
        rules.find_map(|(_, verdict)| match verdict {
            Verdict::Redirect(port) => Some(port),
            _ => None,
        })
    }

    /// The rules of a chain that are of the model.
    pub(super) fn rules(
        &self,
        table: Table,
        chain: Chain,
    ) -> impl Iterator<Item = (&[Match], Verdict)> {
        let entries = self.entries((table, chain)).iter();
        entries.filter_map(|entry| match entry {
            Entry::Rule { matches, verdict } => Some((matches.as_slice(), *verdict)),
            Entry::Foreign(_) => None,
        })
    }

    pub(super) fn entries(&self, place: (Table, Chain)) -> &[Entry] {
        self.chains.get(&place).map_or(&[], Vec::as_slice)
    }
}

impl Entry {
    /// A rule of the model, as the kernel keeps it: ranges lose the bits behind their prefix,
    /// and ports have no order and stand there once.
    pub fn rule(mut matches: Vec<Match>, verdict: Verdict) -> Self {
        for each in &mut matches {
            let (Match::Is(criterion) | Match::Not(criterion)) = each;
            match criterion {
                Criterion::Source(range) | Criterion::Destination(range) => *range = range.masked(),
                Criterion::DestinationPort(ports) => {
                    ports.sort_by_key(|ports| *ports.start());
                    ports.dedup();
                }
                _ => {}
            }
        }
        matches.retain(|each| match each {
            Match::Is(Criterion::Source(range) | Criterion::Destination(range)) => {
                range.prefix != 0
            }
            Match::Is(Criterion::DestinationPort(ports)) => *ports != [0..=u16::MAX],
            Match::Is(Criterion::InInterface(name) | Criterion::OutInterface(name)) => name != "+",
            _ => true,
        });
        // An order that iptables takes, and that does not depend on the one before.
        matches.sort_by_cached_key(|each| {
            let (Match::Is(criterion) | Match::Not(criterion)) = each;
            let rank = match criterion {
                Criterion::Source(_) | Criterion::Destination(_) => 0,
                Criterion::InInterface(_) | Criterion::OutInterface(_) => 1,
                Criterion::Protocol(_) => 2,
                Criterion::SourcePort(_) | Criterion::DestinationPort(_) => 3,
                _ => 4,
            };
            (rank, format!("{each:?}"))
        });
        Self::Rule { matches, verdict }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture::config::tests::checked;

    #[test]
    fn inserted_rules_stand_where_the_kernel_puts_them() {
        let (config, _) = checked(|settings| {
            settings.istio_inbound_interception_mode = "TPROXY".to_owned();
            settings.istio_inbound_ports = "*".to_owned();
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
