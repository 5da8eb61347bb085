//! Reads what `iptables-save` and `ip6tables-save` print, of either kind, with or without counters.

use super::{chain_name, rule, table_name};
use crate::capture::layout::Layout;
use crate::capture::rules::{Chain, Table};

/// What the names of Istio's chains start with, in every version.
pub(super) const ISTIO: &str = "ISTIO_";

/// The tables of one family.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Saved<'a> {
    pub(super) tables: Vec<SavedTable<'a>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SavedTable<'a> {
    pub(super) name: &'a str,
    /// All chains, also the kernel's own.
    pub(super) chains: Vec<&'a str>,
    pub(super) rules: Vec<SavedRule<'a>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SavedRule<'a> {
    pub(super) chain: &'a str,
    /// Matches and target.
    pub(super) text: &'a str,
}

impl<'a> Saved<'a> {
    /// Reads the program's output. An error is the line that it does not print, or the last one if more
    /// would follow.
    pub fn parse(text: &'a str) -> Result<Self, &'a str> {
        let (mut tables, mut open) = (Vec::new(), None);
        let lines = text.lines().map(str::trim_end);
        for line in lines.filter(|line| !line.is_empty() && !line.starts_with('#')) {
            match (line.strip_prefix('*'), &mut open) {
                (Some(name), None) => open = Some(SavedTable::new(name)),
                (None, Some(_)) if line == "COMMIT" => tables.extend(open.take()),
                (None, Some(table)) => table.add(line).ok_or(line)?,
                _ => return Err(line),
            }
        }
        match open {
            None => Ok(Self { tables }),
            Some(_) => Err(text.lines().next_back().unwrap_or_default()),
        }
    }

    /// The rules in chains that traffic capture knows.
    pub fn layout(&self) -> Layout {
        let mut layout = Layout::default();
        for table in &self.tables {
            let is_named = |of: &Table| table_name(*of) == table.name;
            let Some(of) = Table::ALL.into_iter().find(is_named) else {
                continue;
            };
            for name in &table.chains {
                match chain_named(name) {
                    Some(chain) if !chain.is_builtin() => {
                        layout.chains.entry((of, chain)).or_default();
                    }
                    None if name.starts_with(ISTIO) => {
                        layout.unknown_chains.push((of, (*name).to_owned()));
                    }
                    _ => {}
                }
            }
            for rule in &table.rules {
                if let Some(chain) = chain_named(rule.chain) {
                    let entries = layout.chains.entry((of, chain)).or_default();
                    entries.push(rule::entry(rule.text));
                }
            }
        }
        layout
    }
}

impl<'a> SavedTable<'a> {
    pub(super) fn new(name: &'a str) -> Self {
        Self {
            name,
            chains: Vec::new(),
            rules: Vec::new(),
        }
    }

    /// Adds a line that declares a chain, or adds a rule to one.
    fn add(&mut self, line: &'a str) -> Option<()> {
        if let Some(declared) = line.strip_prefix(':') {
            self.chains.push(declared.split(' ').next()?);
            return Some(());
        }
        let line = match line.strip_prefix('[') {
            Some(counted) => counted.split_once("] ")?.1,
            None => line,
        };
        let rule = line.strip_prefix("-A ")?;
        let (chain, text) = rule.split_once(' ').unwrap_or((rule, ""));
        self.rules.push(SavedRule { chain, text });
        Some(())
    }
}

pub(super) fn chain_named(name: &str) -> Option<Chain> {
    let is_named = |chain: &Chain| chain_name(*chain) == name;
    Chain::ALL.into_iter().find(is_named)
}

#[cfg(test)]
mod tests;
