//! Sets rules up and removes them, by `iptables-save` and `iptables-restore`.
//!
//! Each table of each family changes at once; the kernel offers no more. What fails midway is undone.
//!
//! Ours are all rules in chains whose names start like Istio's, the jumps to these, and what the configuration
//! or, for DNS, an earlier version puts into the kernel's own chains. Rules of others stay as they are.

use super::programs::{Kernel, Programs, missing};
use super::saved::{ISTIO, Saved, entry, jumps_to_istio};
use super::{TableText, wanted};
use crate::address::Cidr;
use crate::capture::config::{Config, Kind, Mode};
use crate::capture::layout::{Entry, Layout};
use crate::capture::rules::{Chain, Criterion, Family, Id, Match, Owner, Rules, Table};
use crate::problem::Problem;

/// What to do, and what it depends on besides the configuration, whose users and groups are numbers.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    pub config: &'a Config,
    /// Removes rules instead of setting them up.
    pub is_removal: bool,
    /// Sets rules up anew that are in place.
    pub is_forced: bool,
    /// Directories of programs, separated by colons.
    pub path: &'a str,
}

/// A change by one pair of programs.
struct Change {
    programs: Programs,
    /// Input of `iptables-restore`.
    text: String,
}

impl Request<'_> {
    /// Leaves exactly the rules of the configuration, or none; rules of others stay.
    pub async fn carry_out(&self) -> Result<(), Problem> {
        let changes = self.plan().await?;
        for (index, change) in changes.iter().enumerate() {
            if let Err(error) = change.programs.restore(&change.text, "--noflush").await {
                if let Err(undoing) = undo(&changes[..=index]).await {
                    tracing::error!("rollback failed, rules are partially applied: {undoing}");
                }
                return Err(error);
            }
        }
        if changes.is_empty() {
            tracing::info!("no iptables rule needs a change");
        }
        Ok(())
    }

    /// What would be given to which program.
    pub async fn preview(&self) -> Result<String, Problem> {
        let changes = self.plan().await?;
        let text = |Change { programs, text }| format!("{}-restore\n{text}", programs.name);
        Ok(changes.into_iter().map(text).collect())
    }

    async fn plan(&self) -> Result<Vec<Change>, Problem> {
        let mut changes = Vec::new();
        for family in [Family::V4, Family::V6] {
            let found = self.changes(family).await;
            changes.extend(self.if_needed(family, found)?);
        }
        Ok(changes)
    }

    /// What was found in a family; nothing in place of a failure in IPv6 if no rules are wanted or known there.
    pub(in crate::capture) fn if_needed<T: Default>(
        &self,
        family: Family,
        found: Result<T, Problem>,
    ) -> Result<T, Problem> {
        let has_istio = || Kernel::look(family).is_ok_and(|kernel| kernel.has_istio);
        let is_optional = family == Family::V6 && !self.config.has_v6;
        match found {
            Err(error) if is_optional && !(self.is_removal && has_istio()) => {
                tracing::warn!("IPv6 rules stay unchanged: {error}");
                Ok(T::default())
            }
            found => found,
        }
    }

    async fn changes(&self, family: Family) -> Result<Vec<Change>, Problem> {
        let rules = Rules::new(self.config);
        let is_wanted = !self.is_removal && (family == Family::V4 || self.config.has_v6);
        let kernel = Kernel::look(family)?;
        let kind = self.config.kind.filter(|_| !self.is_removal);
        let found = Programs::find(family, kind, self.path, kernel).await?;
        let is_unseen = self.is_removal && !kernel.is_seen_by(&found);
        if found.is_empty() && (is_wanted || is_unseen) {
            return Err(missing(family, self.path));
        }
        let mut changes = Vec::new();
        for (index, programs) in found.into_iter().enumerate() {
            // Others have nothing, or what is left of earlier runs.
            let rules = (is_wanted && index == 0).then_some(&rules);
            if index == 0 || programs.kind.is_some() {
                changes.extend(self.change(family, programs, rules)?);
            }
        }
        Ok(changes)
    }

    /// The change to these rules, or to none of ours. None if there is nothing to change.
    fn change(
        &self,
        family: Family,
        programs: Programs,
        rules: Option<&Rules>,
    ) -> Result<Option<Change>, Problem> {
        let saved = programs.parse(&programs.saved)?;
        let own = self.own(family, saved.layout().tproxy_mark()).of(&saved);
        let goal = rules.map(|rules| Layout::new(rules, family));
        let is_there = own.layout() == goal.unwrap_or_default();
        if is_there && !(self.is_forced && rules.is_some()) {
            return Ok(None);
        }
        let new = rules.map(|rules| wanted(rules, family));
        let text = swap(&own, &new.unwrap_or_default());
        Ok(Some(Change { programs, text }))
    }

    /// Ours are all rules that any mode has, with the mark of the configuration or this one.
    fn own(&self, family: Family, mark: Option<u32>) -> Own {
        let mut config = self.config.clone();
        (config.mode, config.has_v6) = (Mode::Tproxy, true);
        let marks = [Some(config.tproxy_mark), mark];
        Own::new(marks.into_iter().flatten().map(|mark| {
            config.tproxy_mark = mark;
            Layout::new(&Rules::new(&config), family)
        }))
    }
}

/// The rules of a family, as programs on `path` print them that see chains of ours, if any do.
pub async fn live(family: Family, kind: Option<Kind>, path: &str) -> Result<Layout, Problem> {
    let kernel = Kernel::look(family)?;
    let found = match Programs::find(family, kind, path, kernel).await {
        // Legacy tables cannot be read without NET_RAW, which the sidecar lacks in mode TPROXY. A program
        // that looks for rules creates these tables.
        Err(_) if kind.is_none() && kernel.has_istio => {
            Programs::find(family, Some(Kind::Nft), path, kernel).await
        }
        found => found,
    }?;
    for programs in &found {
        let layout = programs.parse(&programs.saved)?.layout();
        if layout.is_captured() {
            return Ok(layout);
        }
    }
    match kernel.is_seen_by(&found) {
        true => Ok(Layout::default()),
        false => Err(missing(family, path)),
    }
}

/// Puts the tables of the changes back as they were.
async fn undo(changes: &[Change]) -> Result<(), Problem> {
    for Change { programs, text, .. } in changes.iter().rev() {
        let now = programs.save().await?;
        if programs.parse(&now)? == programs.parse(&programs.saved)? {
            continue;
        }
        let tables = text.lines().filter(|line| line.starts_with('*'));
        let before = tables.map(|table| {
            let mut saved = programs.saved.split_inclusive("COMMIT\n");
            let saved = saved.find(|saved| saved.lines().any(|line| line == table));
            saved.map_or_else(|| format!("{table}\nCOMMIT\n"), str::to_owned)
        });
        let before: String = before.collect();
        programs.restore(&before, "--counters").await?;
    }
    Ok(())
}

/// All tables. The last one begins to redirect connections, so it comes last, and goes first.
const ORDER: [&str; 5] = ["security", "filter", "raw", "mangle", "nat"];

/// Which rules in the kernel's own chains are ours, besides jumps, whatever users they are for.
#[derive(Debug)]
struct Own(Vec<((Table, Chain), Entry)>);

impl Own {
    fn new(layouts: impl Iterator<Item = Layout>) -> Self {
        let chains = layouts.flat_map(|layout| layout.chains);
        let builtin = chains.filter(|((_, chain), _)| chain.is_builtin());
        let rules = builtin.flat_map(|(place, rules)| {
            let rules = rules.into_iter();
            rules.map(move |entry| (place, of_any_user(entry)))
        });
        Self(rules.collect())
    }

    /// Our part of the tables.
    fn of<'a>(&self, saved: &Saved<'a>) -> Saved<'a> {
        let (mut own, earlier) = (saved.clone(), saved.earlier_dns());
        own.rules.retain(|rule| {
            let is_listed = |place| self.0.contains(&(place, of_any_user(entry(rule.text))));
            rule.chain.starts_with(ISTIO)
                || jumps_to_istio(rule.text)
                || rule.place().is_some_and(is_listed)
                || earlier.contains(&rule)
        });
        own.chains.retain(|(_, chain)| chain.starts_with(ISTIO));
        own
    }
}

/// The input of `iptables-restore --noflush` that leaves these tables in place of all that is ours. Empty if
/// there is nothing to do. Each table changes at once.
fn swap(own: &Saved<'_>, new: &[TableText]) -> String {
    let mut order = ORDER;
    if new.is_empty() {
        order.reverse();
    }
    let nothing = TableText::default();
    let texts = order.map(|name| {
        let new = new.iter().find(|table| table.name == name);
        swap_table(name, own, new.unwrap_or(&nothing))
    });
    texts.concat()
}

fn swap_table(name: &str, own: &Saved<'_>, new: &TableText) -> String {
    let mut text = String::new();
    let rules = own.rules.iter().filter(|rule| rule.table == name);
    for rule in rules.filter(|rule| !rule.chain.starts_with(ISTIO)) {
        text += &format!("-D {} {}\n", rule.chain, rule.text);
    }
    let chains = own.chains.iter().filter(|(table, _)| *table == name);
    let mut stale: Vec<_> = chains.map(|(_, chain)| *chain).collect();
    stale.retain(|chain| !new.chains.contains(chain));
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
        false => format!("*{name}\n{text}COMMIT\n"),
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

#[cfg(test)]
mod tests;
