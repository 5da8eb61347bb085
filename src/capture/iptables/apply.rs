//! Sets rules up and removes them, by `iptables-save` and `iptables-restore`.
//!
//! Each table of each family changes at once; the kernel offers no more. What fails midway is undone.

use super::programs::{Error, Kernel, Programs};
use super::swap::Own;
use super::wanted;
use crate::capture::config::{Config, Kind, Mode};
use crate::capture::layout::Layout;
use crate::capture::rules::{Family, Owner, Rules};

/// What to do, and what it depends on besides the configuration.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    pub config: &'a Config,
    /// Removes rules instead of setting them up.
    pub is_removal: bool,
    /// Sets rules up anew that are in place.
    pub is_forced: bool,
    /// Directories of programs, separated by colons.
    pub path: &'a str,
    /// The numbers of users and groups with names.
    pub number: fn(&Owner) -> Option<u32>,
}

/// A change by one pair of programs.
struct Change {
    programs: Programs,
    /// Input of `iptables-restore`.
    text: String,
}

impl Request<'_> {
    /// Leaves exactly the rules of the configuration, or none; rules of others stay.
    pub async fn carry_out(&self) -> Result<(), Error> {
        let changes = self.plan().await?;
        for (index, change) in changes.iter().enumerate() {
            if let Err(error) = change.programs.restore(&change.text, "--noflush").await {
                if let Err(undoing) = undo(&changes[..=index]).await {
                    tracing::error!("rules are set up in part, as undoing them failed: {undoing}");
                }
                return Err(error);
            }
        }
        if changes.is_empty() {
            tracing::info!("there is nothing to change in iptables");
        }
        Ok(())
    }

    /// What would be given to which program.
    pub async fn preview(&self) -> Result<String, Error> {
        let changes = self.plan().await?;
        let texts = changes.iter().map(|change| {
            let Change { programs, text, .. } = change;
            format!("{}-restore\n{text}", programs.name)
        });
        Ok(texts.collect())
    }

    async fn plan(&self) -> Result<Vec<Change>, Error> {
        let rules = Rules::new(self.config);
        let mut changes = Vec::new();
        for family in [Family::V4, Family::V6] {
            let exists = family == Family::V4 || self.config.has_v6;
            let is_wanted = exists && !self.is_removal;
            let kernel = Kernel::look(family)?;
            let kind = self.config.kind.filter(|_| !self.is_removal);
            let found = Programs::find(family, kind, self.path, kernel).await?;
            let is_unseen = self.is_removal && !kernel.is_seen_by(&found);
            if found.is_empty() && (is_wanted || is_unseen) {
                return Err(Error::missing(family, self.path));
            }
            for (index, programs) in found.into_iter().enumerate() {
                // Others have nothing, or what is left of earlier runs.
                let rules = (is_wanted && index == 0).then_some(&rules);
                if index == 0 || programs.kind.is_some() {
                    changes.extend(self.change(family, programs, rules)?);
                }
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
    ) -> Result<Option<Change>, Error> {
        let saved = programs.parse(&programs.saved)?;
        let own = self.own(family, saved.layout().tproxy_mark());
        let goal = rules.map(|rules| self.layout(rules, family));
        let is_there = own.of(&saved).layout() == goal.unwrap_or_default();
        if is_there && !(self.is_forced && rules.is_some()) {
            return Ok(None);
        }
        let new = rules.map(|rules| wanted(rules, family));
        let text = own.swap(&saved, &new.unwrap_or_default());
        Ok(Some(Change { programs, text }))
    }

    /// Ours are all rules that any mode has, with the mark of the configuration or this one.
    fn own(&self, family: Family, mark: Option<u32>) -> Own {
        let mut config = self.config.clone();
        (config.mode, config.has_v6) = (Mode::Tproxy, true);
        let marks = [Some(config.tproxy_mark), mark];
        Own::new(marks.into_iter().flatten().map(|mark| {
            config.tproxy_mark = mark;
            self.layout(&Rules::new(&config), family)
        }))
    }

    fn layout(&self, rules: &Rules, family: Family) -> Layout {
        let mut layout = Layout::new(rules, family);
        layout.resolve(self.number);
        layout
    }
}

/// The rules of a family, as programs on `path` print them that see chains of ours, if any do.
pub async fn live(family: Family, kind: Option<Kind>, path: &str) -> Result<Layout, Error> {
    let kernel = Kernel::look(family)?;
    let found = Programs::find(family, kind, path, kernel).await?;
    for programs in &found {
        let layout = programs.parse(&programs.saved)?.layout();
        if layout.is_captured() {
            return Ok(layout);
        }
    }
    match kernel.is_seen_by(&found) {
        true => Ok(Layout::default()),
        false => Err(Error::missing(family, path)),
    }
}

/// Puts the tables back as they were.
async fn undo(changes: &[Change]) -> Result<(), Error> {
    for Change { programs, text, .. } in changes.iter().rev() {
        let now = programs.save().await?;
        if programs.parse(&now)? == programs.parse(&programs.saved)? {
            continue;
        }
        let mut before = programs.saved.clone();
        for table in text.lines().filter(|line| line.starts_with('*')) {
            if !before.lines().any(|line| line == table) {
                before += &format!("{table}\nCOMMIT\n");
            }
        }
        programs.restore(&before, "--counters").await?;
    }
    Ok(())
}
