//! Tells rules of traffic capture from those of others, and replaces them.
//!
//! Ours are all in chains whose names start like Istio's, the jumps to these, and what the configuration
//! puts into the kernel's own chains. Rules of others stay as they are.

use super::saved::{ISTIO, Saved, SavedRule, SavedTable, chain_named};
use super::{TableText, rule, table_name};
use crate::address::Cidr;
use crate::capture::layout::{Entry, Layout};
use crate::capture::rules::{Chain, Criterion, Id, Match, Owner, Table};

/// All tables. The last one begins to redirect connections, so it comes last, and goes first.
const ORDER: [&str; 5] = ["security", "filter", "raw", "mangle", "nat"];

/// Which rules in the kernel's own chains are ours, besides jumps, whatever users they are for.
#[derive(Debug)]
pub(super) struct Own(Vec<((Table, Chain), Entry)>);

impl Own {
    pub(super) fn new(layouts: impl Iterator<Item = Layout>) -> Self {
        let chains = layouts.flat_map(|layout| layout.chains);
        let builtin = chains.filter(|((_, chain), _)| chain.is_builtin());
        let rules = builtin.flat_map(|(place, rules)| {
            let rules = rules.into_iter();
            rules.map(move |entry| (place, of_any_user(entry)))
        });
        Self(rules.collect())
    }

    fn has(&self, table: &SavedTable<'_>, saved: &SavedRule<'_>) -> bool {
        if saved.chain.starts_with(ISTIO) || jumps_to_istio(saved.text) {
            return true;
        }
        let mut tables = Table::ALL.into_iter();
        let of = tables.find(|of| table_name(*of) == table.name);
        let place = of.zip(chain_named(saved.chain));
        let entry = of_any_user(rule::entry(saved.text));
        place.is_some_and(|place| self.0.contains(&(place, entry)))
    }

    /// Our part of the tables.
    pub(super) fn of<'a>(&self, saved: &Saved<'a>) -> Saved<'a> {
        let mut own = saved.clone();
        for (table, all) in own.tables.iter_mut().zip(&saved.tables) {
            table.rules.retain(|rule| self.has(all, rule));
            table.chains.retain(|chain| chain.starts_with(ISTIO));
        }
        own
    }

    /// The input of `iptables-restore --noflush` that leaves these tables in place of all that is ours.
    /// Empty if there is nothing to do. Each table changes at once.
    pub(super) fn swap(&self, saved: &Saved<'_>, new: &[TableText]) -> String {
        let mut order = ORDER;
        if new.iter().all(|table| table.lines.is_empty()) {
            order.reverse();
        }
        let texts = order.iter().map(|name| {
            let old = saved.tables.iter().find(|table| table.name == *name);
            let new = new.iter().find(|table| table.name == *name);
            let (no_table, nothing) = (SavedTable::new(name), TableText::default());
            self.swap_table(old.unwrap_or(&no_table), new.unwrap_or(&nothing))
        });
        texts.collect()
    }

    fn swap_table(&self, old: &SavedTable<'_>, new: &TableText) -> String {
        let ours = old.rules.iter().filter(|rule| self.has(old, rule));
        let builtin = ours.filter(|rule| !rule.chain.starts_with(ISTIO));
        let deleted = builtin.map(|rule| format!("-D {} {}\n", rule.chain, rule.text));
        let mut text: String = deleted.collect();
        let mut stale = old.chains.clone();
        stale.retain(|chain| chain.starts_with(ISTIO) && !new.chains.contains(chain));
        // That empties a chain that exists.
        for chain in new.chains.iter().chain(&stale) {
            text += &format!(":{chain} - [0:0]\n");
        }
        for line in &new.lines {
            text += &format!("{line}\n");
        }
        for chain in stale {
            text += &format!("-X {chain}\n");
        }
        match text.is_empty() {
            true => text,
            false => format!("*{}\n{text}COMMIT\n", old.name),
        }
    }
}

/// The rule for another user and loopback range: those of a cleanup may differ.
fn of_any_user(mut entry: Entry) -> Entry {
    if let Entry::Rule { matches, .. } = &mut entry {
        for each in matches {
            match each {
                Match::Is(Criterion::Owner(owner)) => *owner = Owner::User(Id::from(0)),
                Match::Not(Criterion::Destination(range)) => *range = Cidr::low_v6(0),
                _ => {}
            }
        }
    }
    entry
}

/// Whether the target is one of Istio's chains, of any version.
pub(in crate::capture) fn jumps_to_istio(text: &str) -> bool {
    target(text).is_some_and(|target| target.starts_with(ISTIO))
}

pub(in crate::capture) fn target(text: &str) -> Option<&str> {
    let words: Vec<_> = text.split(' ').collect();
    // Before it there may be a comment, with anything in it.
    let option = words.iter().rposition(|word| matches!(*word, "-j" | "-g"));
    words.get(option? + 1).copied()
}

#[cfg(test)]
mod tests;
