//! Sets up and removes rules, by `iptables-save` and `iptables-restore`.
//!
//! [`Request::carry_out`] changes the rules, [`Request::preview`] only renders the changes, and [`read_rules`] reads
//! the rules of a machine. Each table of each family changes in one transaction, the largest unit that the
//! kernel offers. If a later table fails, the earlier ones are restored.
//!
//! Istio's rules are all rules in chains whose names start like Istio's, the jumps to these chains, and the
//! rules that any configuration or, for DNS, an earlier version puts into the kernel's own chains. Rules of
//! others stay unchanged.

use std::collections::HashSet;
use std::net::Ipv6Addr;

use super::programs::{Kernel, Programs, missing};
use super::saved::{ISTIO, Saved, SavedRule, entry, jumps_to_istio};
use super::{TableText, tables};
use crate::capture::config::{Config, Kind, Mode};
use crate::capture::layout::{Entry, Layout};
use crate::capture::rules::{Chain, Criterion, Family, Id, Match, Rules, Table};
use crate::net::address::Cidr;
use crate::problem::Problem;

/// Replaces the present rules by the rules of a configuration, whose users and groups are numbers.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    pub config: &'a Config,
    /// Removes rules instead of setting them up.
    pub is_removal: bool,
    /// Sets up rules even if they already exist.
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
    /// Changes Istio's rules to the rules of the configuration, or removes them. Rules of others stay.
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

    /// Returns each program that would run, with its input.
    pub async fn preview(&self) -> Result<String, Problem> {
        let changes = self.plan().await?;
        Ok(changes.iter().map(|it| format!("{}-restore\n{}", it.programs.name, it.text)).collect())
    }

    /// Returns the changes of both families, in the order in which they are to be made.
    async fn plan(&self) -> Result<Vec<Change>, Problem> {
        let mut changes = Vec::new();
        let mut interfaces = HashSet::new();
        for family in [Family::V4, Family::V6] {
            let found = self.changes_of_family(family, &mut interfaces).await;
            changes.extend(self.tolerate_optional_ipv6_error(family, found)?);
        }
        Ok(changes)
    }

    /// Replaces a failure in IPv6 by the default and logs it, if no IPv6 rules are wanted. Returns it if rules
    /// are to be removed and nftables has chains of Istio's.
    pub(in crate::capture) fn tolerate_optional_ipv6_error<T: Default>(
        &self,
        family: Family,
        found: Result<T, Problem>,
    ) -> Result<T, Problem> {
        let is_optional = family == Family::V6 && !self.config.has_v6;
        found.or_else(|error| {
            if !is_optional
                || self.is_removal && Kernel::read(family).is_ok_and(|kernel| kernel.has_istio)
            {
                return Err(error);
            }
            tracing::warn!("IPv6 rules stay unchanged: {error}");
            Ok(T::default())
        })
    }

    /// Returns the change for each kind of programs, the kind to use first. Fails if there are no programs, but rules
    /// are wanted or may be left. Adds Istio's interfaces: IPv6 has no rule that shows them if only IPv4 is captured.
    async fn changes_of_family(
        &self,
        family: Family,
        interfaces: &mut HashSet<String>,
    ) -> Result<Vec<Change>, Problem> {
        let rules = Rules::new(self.config);
        let is_wanted = !self.is_removal && (family == Family::V4 || self.config.has_v6);
        let kernel = Kernel::read(family)?;
        let kind = if self.is_removal { None } else { self.config.kind };
        let found = Programs::find(family, kind, self.path, kernel).await?;
        if found.is_empty() && (is_wanted || self.is_removal && !kernel.is_covered_by(&found)) {
            return Err(missing(family, self.path));
        }
        let mut changes = Vec::new();
        for (index, programs) in found.into_iter().enumerate() {
            // Programs of another kind have no rules, or rules of earlier runs.
            let rules = if is_wanted && index == 0 { Some(&rules) } else { None };
            if index == 0 || programs.kind.is_some() {
                changes.extend(self.change_with(family, programs, rules, interfaces)?);
            }
        }
        Ok(changes)
    }

    /// Returns the change by these programs that sets up `rules`, or removes Istio's rules without them. None if
    /// nothing changes and no change is forced.
    fn change_with(
        &self,
        family: Family,
        programs: Programs,
        rules: Option<&Rules>,
        interfaces: &mut HashSet<String>,
    ) -> Result<Option<Change>, Problem> {
        let saved = programs.parse(&programs.saved)?;
        let known = self.known_rules(family, saved.layout().tproxy_mark());
        interfaces.extend(saved.istio_interfaces().into_iter().map(str::to_owned));
        let present = select_istio(&saved, &known, interfaces, self.is_removal);
        let goal = rules.map(|rules| Layout::new(rules, family)).unwrap_or_default();
        if present.layout() == goal && !(self.is_forced && rules.is_some()) {
            return Ok(None);
        }
        let text = swap(&present, &rules.map(|rules| tables(rules, family)).unwrap_or_default());
        Ok(Some(Change { programs, text }))
    }

    /// Returns Istio's rules in the kernel's own chains, apart from jumps, in any mode and for any user, with the
    /// mark of the configuration or this one.
    fn known_rules(&self, family: Family, mark: Option<u32>) -> Vec<PlacedEntry> {
        let mut config = self.config.clone();
        (config.mode, config.has_v6) = (Mode::Tproxy, true);
        let mut known = Vec::new();
        for mark in [Some(config.tproxy_mark), mark].into_iter().flatten() {
            config.tproxy_mark = mark;
            let mut chains = Layout::new(&Rules::new(&config), family).chains;
            chains.retain(|(_, chain), _| chain.is_builtin());
            for (chain, entries) in chains {
                known.extend(entries.into_iter().map(for_any_user).map(|entry| (chain, entry)));
            }
        }
        known
    }
}

/// Reads the rules of a family with the first programs on `path` that print Istio's chains.
pub async fn read_rules(family: Family, kind: Option<Kind>, path: &str) -> Result<Layout, Problem> {
    let kernel = Kernel::read(family)?;
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
        if layout.has_istio_rules() {
            return Ok(layout);
        }
    }
    if !kernel.is_covered_by(&found) {
        return Err(missing(family, path));
    }
    Ok(Layout::default())
}

/// Restores the saved tables of the changes.
async fn undo(changes: &[Change]) -> Result<(), Problem> {
    for Change { programs, text } in changes.iter().rev() {
        if programs.parse(&programs.save().await?)? == programs.parse(&programs.saved)? {
            continue;
        }
        let mut before = String::new();
        for name in text.lines().filter(|line| line.starts_with('*')) {
            let mut tables = programs.saved.split_inclusive("COMMIT\n");
            match tables.find(|table| table.lines().any(|line| line == name)) {
                Some(table) => before += table,
                None => before += &format!("{name}\nCOMMIT\n"),
            }
        }
        programs.restore(&before, "--counters").await?;
    }
    Ok(())
}

/// All tables, in the order of a set-up; a removal reverses it. The nat table redirects connections, so it is
/// set up last and removed first.
const ORDER: [&str; 5] = ["security", "filter", "raw", "mangle", "nat"];

/// An entry of a chain of the kernel's own.
type PlacedEntry = ((Table, Chain), Entry);

/// Returns the part of the tables that is Istio's. `interfaces` are Istio's by the rules of either family. For a
/// removal, rules that the configuration names are Istio's even if no other rule of Istio is left.
fn select_istio<'a>(
    saved: &Saved<'a>,
    known: &[PlacedEntry],
    interfaces: &HashSet<String>,
    is_removal: bool,
) -> Saved<'a> {
    let earlier = saved.earlier_dns();
    let is_known = |rule: &SavedRule<'_>| {
        rule.place().is_some_and(|chain| known.contains(&(chain, for_any_user(entry(rule.text)))))
    };
    let is_certain = |rule: &SavedRule<'_>| {
        rule.chain.starts_with(ISTIO)
            || jumps_to_istio(rule.text)
            || earlier.contains(&rule)
            || rule.passing_interface().is_none() && is_known(rule)
    };
    // Rules of others may let an interface pass, too. Istio's are in front of the last of its other rules in the chain,
    // not counting the jumps for virtual machines, which come first. Some chains have none, as nat PREROUTING with TPROXY.
    let is_in_place = |index: usize, rule: &SavedRule<'_>| {
        let last = saved.rules.iter().rposition(|other| {
            (other.table, other.chain) == (rule.table, rule.chain)
                && is_certain(other)
                && other.captured_interface().is_none()
        });
        last.map_or_else(|| is_removal || saved.has_istio(rule.table), |last| index < last)
    };
    let rules = saved.rules.iter().enumerate();
    let rules = rules.filter(|(index, rule)| match rule.passing_interface() {
        Some(name) => (interfaces.contains(name) || is_known(rule)) && is_in_place(*index, rule),
        None => is_certain(rule),
    });
    let chains = saved.chains.iter().filter(|(_, chain)| chain.starts_with(ISTIO));
    Saved {
        rules: rules.map(|(_, rule)| rule.clone()).collect(),
        chains: chains.copied().collect(),
    }
}

/// Renders the input of `iptables-restore --noflush` that replaces Istio's present rules by these tables. Rules of
/// others must not be in `present_istio`. Empty if Istio neither has nor gets a rule.
fn swap(present_istio: &Saved<'_>, new: &[TableText]) -> String {
    let mut order = ORDER;
    if new.is_empty() {
        order.reverse();
    }
    let nothing = TableText::default();
    let texts = order.map(|name| {
        let new = new.iter().find(|table| table.name == name).unwrap_or(&nothing);
        swap_table(name, present_istio, new)
    });
    texts.concat()
}

/// Renders the change of one table from Istio's present rules to `new`, as [`swap`] does. Empty if Istio neither has
/// nor gets a rule in it.
fn swap_table(name: &str, present_istio: &Saved<'_>, new: &TableText) -> String {
    let mut text = String::new();
    for rule in &present_istio.rules {
        if rule.table == name && !rule.chain.starts_with(ISTIO) {
            text += &format!("-D {} {}\n", rule.chain, rule.text);
        }
    }
    let mut stale = Vec::new();
    for (table, chain) in &present_istio.chains {
        if *table == name && !new.chains.contains(chain) {
            stale.push(*chain);
        }
    }
    // Declaring a chain that exists empties it.
    for chain in new.chains.iter().chain(&stale) {
        text += &format!(":{chain} - [0:0]\n");
    }
    for line in &new.lines {
        text += &format!("{line}\n");
    }
    for chain in stale {
        text += &format!("-X {chain}\n");
    }
    if text.is_empty() {
        return text;
    }
    format!("*{name}\n{text}COMMIT\n")
}

/// Replaces users, groups and loopback ranges, because a cleanup may be given other ones than the set-up.
fn for_any_user(mut entry: Entry) -> Entry {
    if let Entry::Rule { matches, .. } = &mut entry {
        for each in matches {
            match each {
                Match::Is(owner @ (Criterion::User(_) | Criterion::Group(_))) => {
                    *owner = Criterion::User(Id::from(0));
                }
                Match::Not(Criterion::Destination(range)) => {
                    *range = Cidr::single(Ipv6Addr::UNSPECIFIED.into());
                }
                _ => {}
            }
        }
    }
    entry
}

#[cfg(test)]
mod tests;
