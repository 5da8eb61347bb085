//! The rules of one address family as packets meet them: by table and chain, in their final order.

use std::collections::BTreeMap;

use super::rules::{Chain, Criterion, Family, Match, Rule, Rules, Table, Verdict};

/// Rules of one family that are wanted, or that a machine has. Equal rules are equal entries, whichever way
/// they were written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// Chains without rules have an empty list.
    pub chains: BTreeMap<(Table, Chain), Vec<Entry>>,
    /// Names of chains that start like Istio's, but do not exist in this version.
    pub unknown_chains: Vec<(Table, String)>,
    /// Rules for DNS that Istio 1.8 to 1.24 put into the kernel's own chains, as text. They are not in `chains`.
    pub earlier_dns: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    Rule {
        /// Sorted, without matches that every packet passes.
        matches: Vec<Match>,
        verdict: Verdict,
    },
    /// A rule that the model of traffic capture cannot express, as its program prints it.
    Foreign(String),
}

/// Returns the chains that rules are in or jump to, with the rules in their final order.
pub(super) fn chains<'a>(
    rules: impl IntoIterator<Item = &'a Rule>,
) -> BTreeMap<(Table, Chain), Vec<&'a Rule>> {
    let mut chains = BTreeMap::<_, Vec<&Rule>>::new();
    for rule in rules {
        let chain = chains.entry((rule.table, rule.chain)).or_default();
        let last = chain.len();
        chain.insert(rule.position.map_or(last, |number| last.min(number - 1)), rule);
        if let Verdict::Jump(target) = rule.verdict {
            chains.entry((rule.table, target)).or_default();
        }
    }
    chains
}

impl Layout {
    /// Returns the layout of a family after these rules were added to its empty tables.
    pub fn new(rules: &Rules, family: Family) -> Self {
        Self::shared(rules.for_family(family), family)
    }

    /// Returns the layout of a family after these rules were added to empty tables that both families share.
    pub(super) fn shared<'a>(rules: impl IntoIterator<Item = &'a Rule>, family: Family) -> Self {
        let mut layout = Self::default();
        for (place, rules) in chains(rules) {
            let entries = layout.chains.entry(place).or_default();
            for rule in rules.into_iter().filter(|rule| rule.is_for(family)) {
                entries.push(Entry::rule(rule.matches.clone(), rule.verdict));
            }
        }
        layout
    }

    /// Returns true if there are chains of traffic capture, or rules of earlier versions.
    pub fn has_istio_rules(&self) -> bool {
        !self.earlier_dns.is_empty() || self.chains.keys().any(|(_, chain)| !chain.is_builtin())
    }

    /// Returns the mark of packets that TPROXY has handed over.
    pub fn tproxy_mark(&self) -> Option<u32> {
        self.rules(Table::Mangle, Chain::Inbound).find_map(|(matches, _)| match matches {
            [Match::Is(Criterion::Protocol(_)), Match::Is(Criterion::Mark(mark))] => Some(*mark),
            _ => None,
        })
    }

    /// Returns the port that a chain redirects to.
    pub fn redirect_port(&self, chain: Chain) -> Option<u16> {
        self.rules(Table::Nat, chain).find_map(|(_, verdict)| match verdict {
            Verdict::Redirect(port) => Some(port),
            _ => None,
        })
    }

    /// Iterates over the rules of a chain that the model can express.
    pub(super) fn rules(
        &self,
        table: Table,
        chain: Chain,
    ) -> impl Iterator<Item = (&[Match], Verdict)> {
        self.entries((table, chain)).iter().filter_map(|entry| match entry {
            Entry::Rule { matches, verdict } => Some((matches.as_slice(), *verdict)),
            Entry::Foreign(_) => None,
        })
    }

    /// Returns the entries of a chain; none if it does not exist.
    pub(super) fn entries(&self, chain: (Table, Chain)) -> &[Entry] {
        self.chains.get(&chain).map_or(&[], Vec::as_slice)
    }
}

impl Entry {
    /// Makes an entry of a rule of the model, normalized as the kernel stores it: ranges lose the bits
    /// behind their prefix, and ports are a set.
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
            Match::Is(Criterion::InInterface(name) | Criterion::OutInterface(name)) => name != "+",
            _ => true,
        });
        // iptables accepts this order. It does not depend on the order of the arguments.
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
