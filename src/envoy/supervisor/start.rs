//! How the Envoy that serves is started: the first, one after another that has ended, and one at the
//! place of another in its line.
//!
//! Does not start an Envoy beside another.

use std::sync::Arc;

use super::super::calls;
use super::super::child::Child;
use super::super::command::{Command, Mode};
use super::super::hot_restart::base_id::BaseId;
use super::super::hot_restart::{HotRestart, Launch};
use super::super::{Config, Error};
use super::{JoinSet, Supervisor};

impl Supervisor {
    pub(super) fn start(&mut self) -> Result<(), Error> {
        if self.last_end.take().is_some() {
            self.counters.restarts.inc();
        }
        let command = self.command()?;
        if self.count == 0 {
            tracing::info!(
                "Envoy command: [{} {}]",
                command.binary.display(),
                command.arguments().join(" ")
            );
        }
        self.epoch = self.count;
        self.count += 1;
        let child = Child::start(&command, self.epoch, &self.own)?;
        self.child = Some(child);
        self.show_current(Some(self.clock.now()));
        self.calls = JoinSet::new();
        self.calls.spawn(calls::live(self.admin));
        Ok(())
    }

    fn command(&mut self) -> Result<Command, Error> {
        let Some(epochs) = &mut self.epochs else {
            return Ok(self.config.command.clone());
        };
        // What was found good and not started beside another is started now.
        let prepared = match (epochs.prepared.take(), &epochs.serving) {
            (Some(prepared), _) => Arc::new(prepared),
            (None, Some(run)) => Arc::clone(&run.prepared),
            (None, None) => {
                let first = epochs.inputs.first();
                Arc::new(first.map_err(|source| Error::Inputs { source })?)
            }
        };
        let is_relaunch = std::mem::take(&mut epochs.is_relaunch);
        let run = match epochs.serving.take() {
            // The one before lives, and knows it by its place.
            Some(run) if is_relaunch => run,
            _ => Launch {
                prepared,
                base: new_base(&self.config, self.count),
                place: 0,
            },
        };
        let command = epochs.command_of(&run);
        epochs.serving = Some(run);
        Ok(command)
    }
}

/// The base of a line that begins with the Envoy of this number, where there can be one.
pub(super) fn new_base(config: &Config, number: u32) -> Option<Arc<BaseId>> {
    super::super::hot_restart::base_id::can_share().then(|| {
        let name = format!("envoy-base-id{number}");
        Arc::new(BaseId::at(config.directory.join(name), config.command.user))
    })
}

impl HotRestart {
    pub(super) fn command_of(&self, run: &Launch) -> Command {
        let parent_shutdown = self.limits.parent_shutdown;
        let mode = match (&run.base, run.place) {
            (None, _) => Mode::Alone,
            (Some(base), 0) => Mode::First {
                base_id_file: base.file().to_owned(),
                parent_shutdown,
            },
            (Some(base), epoch) => match base.id() {
                Some(base_id) => Mode::Next {
                    base_id,
                    epoch,
                    parent_shutdown,
                },
                // Without its number nobody takes its line up; this is checked before.
                None => Mode::Alone,
            },
        };
        Command {
            mode,
            ..run.prepared.command.clone()
        }
    }
}
