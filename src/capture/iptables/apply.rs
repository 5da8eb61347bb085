//! Sets rules up and removes them, by `iptables-save` and `iptables-restore`.
//!
//! Each table of each family changes at once; the kernel offers no more. What fails midway is undone.

use super::programs::{Error, Kernel, Kind, Programs};
use super::swap::Own;
use super::{TableText, wanted};
use crate::capture::config::{Binaries, Config, Mode};
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

#[derive(Debug, thiserror::Error)]
pub enum Failed {
    #[error(transparent)]
    AsBefore(#[from] Error),
    #[error("rules are set up in part, because undoing them failed as well ({undoing})")]
    InPart {
        undoing: Error,
        #[source]
        source: Error,
    },
}

/// A change by one pair of programs.
struct Change {
    programs: Programs,
    own: Own,
    /// The mark that rules of ours had.
    mark: Option<u32>,
    /// Input of `iptables-restore`.
    text: String,
}

impl Request<'_> {
    /// Leaves exactly the rules of the configuration, or none; rules of others stay. Returns the marks of
    /// rules that are gone.
    pub async fn carry_out(&self) -> Result<Vec<u32>, Failed> {
        let changes = self.plan().await?;
        for (index, change) in changes.iter().enumerate() {
            if let Err(source) = change.programs.restore(&change.text).await {
                return Err(match undo(&changes[..=index]).await {
                    Ok(()) => source.into(),
                    Err(undoing) => Failed::InPart { undoing, source },
                });
            }
        }
        if changes.is_empty() {
            tracing::info!("there is nothing to change in iptables");
        }
        Ok(changes.iter().filter_map(|change| change.mark).collect())
    }

    /// What the kernel has, as the programs see it that would be used.
    pub async fn live(&self, family: Family) -> Result<Layout, Failed> {
        let kernel = Kernel::look(family)?;
        let found = Programs::find(family, self.config.binaries, self.path, kernel).await?;
        match found.first() {
            Some(programs) => Ok(programs.parse(&programs.saved)?.layout()),
            None if !kernel.is_seen_by(&found) => Err(Error::missing(family, self.path).into()),
            None => Ok(Layout::default()),
        }
    }

    /// What would be given to which program.
    pub async fn preview(&self) -> Result<String, Failed> {
        let changes = self.plan().await?;
        let texts = changes.iter().map(|change| {
            let Change { programs, text, .. } = change;
            format!("{}-restore\n{text}", programs.name)
        });
        Ok(texts.collect())
    }

    async fn plan(&self) -> Result<Vec<Change>, Error> {
        let mut changes = Vec::new();
        for family in [Family::V4, Family::V6] {
            self.plan_family(family, &mut changes).await?;
        }
        Ok(changes)
    }

    async fn plan_family(&self, family: Family, changes: &mut Vec<Change>) -> Result<(), Error> {
        let rules = Rules::new(self.config);
        let exists = family == Family::V4 || self.config.has_v6;
        let is_wanted = exists && !self.is_removal;
        let kernel = Kernel::look(family)?;
        let binaries = match self.is_removal {
            true => Binaries::Detected,
            false => self.config.binaries,
        };
        let found = Programs::find(family, binaries, self.path, kernel).await?;
        let is_unseen = self.is_removal && !kernel.is_seen_by(&found);
        if found.is_empty() && (is_wanted || is_unseen) {
            return Err(Error::missing(family, self.path));
        }
        for (index, programs) in found.into_iter().enumerate() {
            // Others have nothing, or what is left of earlier runs.
            let is_wanted = is_wanted && index == 0;
            if !is_wanted && (!programs.has_tables || index > 0 && programs.kind == Kind::Unknown) {
                continue;
            }
            let new = match is_wanted {
                true => wanted(&rules, family),
                false => Vec::new(),
            };
            changes.extend(self.change(family, programs, &new, is_wanted)?);
        }
        Ok(())
    }

    /// None if the rules are in place.
    fn change(
        &self,
        family: Family,
        programs: Programs,
        new: &[TableText<'_>],
        is_wanted: bool,
    ) -> Result<Option<Change>, Error> {
        let saved = programs.parse(&programs.saved)?;
        let mark = saved.layout().tproxy_mark();
        let own = self.own(family, mark);
        let goal = match is_wanted {
            true => self.layout(self.config, family),
            false => Layout::default(),
        };
        if own.of(&saved).layout() == goal && !(self.is_forced && is_wanted) {
            return Ok(None);
        }
        if !is_wanted {
            own.name_doubtful(&saved);
        }
        let text = own.swap(&saved, new);
        Ok(Some(Change {
            programs,
            own,
            mark,
            text,
        }))
    }

    /// Ours are all rules that any mode has, with the mark of the configuration or this one.
    fn own(&self, family: Family, mark: Option<u32>) -> Own {
        let mut config = self.config.clone();
        (config.mode, config.has_v6) = (Mode::Tproxy, true);
        let marks = [Some(config.tproxy_mark), mark];
        Own::new(marks.into_iter().flatten().map(|mark| {
            config.tproxy_mark = mark;
            self.layout(&config, family)
        }))
    }

    fn layout(&self, config: &Config, family: Family) -> Layout {
        let mut layout = Layout::new(&Rules::new(config), family);
        layout.resolve(self.number);
        layout
    }
}

/// The rules of a family as the programs on `path` print them that see chains of ours.
pub async fn live(family: Family, path: &str) -> Result<Layout, Failed> {
    let kernel = Kernel::look(family)?;
    let found = Programs::find(family, Binaries::Detected, path, kernel).await?;
    for programs in &found {
        let layout = programs.parse(&programs.saved)?.layout();
        if layout.is_captured() {
            return Ok(layout);
        }
    }
    match kernel.is_seen_by(&found) {
        true => Ok(Layout::default()),
        false => Err(Error::missing(family, path).into()),
    }
}

/// Puts back what was there.
async fn undo(changes: &[Change]) -> Result<(), Error> {
    for change in changes.iter().rev() {
        let (programs, own) = (&change.programs, &change.own);
        let now = programs.save().await?;
        let (now, before) = (programs.parse(&now)?, programs.parse(&programs.saved)?);
        if own.of(&now) != own.of(&before) {
            let text = own.swap(&now, &own.again(&before));
            programs.restore(&text).await?;
        }
    }
    Ok(())
}
