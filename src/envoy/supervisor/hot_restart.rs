//! Replaces the Envoy that serves: carries out what the machine of epochs says.
//!
//! The next Envoy is started beside the one that serves; once it serves itself the two change
//! places. What happens is logged where it happens and published with it.
//!
//! Does not decide what follows what; [`super::super::hot_restart::machine`] does.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::super::Error;
use super::super::calls;
use super::super::child::Child;
use super::super::handle::Outcome;
use super::super::hot_restart::base_id::BaseId;
use super::super::hot_restart::machine::{self, Action, Method, Phase, Verdict};
use super::super::hot_restart::{HotRestart, Instance, Launch, Progress};
use super::super::machine::{Event, Phase as Life};
use super::Supervisor;
use super::start::new_base;
use crate::lifecycle::with_causes;

/// How much longer than it should an old Envoy may stay.
const OVERDUE: Duration = Duration::from_secs(10);
/// What an old Envoy is given when its successor has ended as it was asked to.
const FOLLOWS: Duration = Duration::from_secs(1);

impl Supervisor {
    /// Somebody wants another Envoy.
    pub(super) fn want(&mut self, reason: &'static str) {
        let Some(epochs) = &self.epochs else {
            tracing::warn!("not restarting Envoy ({reason}): hot restart is not configured");
            return;
        };
        if epochs.machine.phase() != Phase::Idle {
            tracing::info!("Envoy is to be restarted ({reason}) after the change under way");
        }
        self.reason = reason;
        self.apply(machine::Event::Wanted);
    }

    /// Tells what the life of the Envoy that serves means for the next.
    pub(super) fn tell_epochs(&mut self, event: Event) {
        let phase = self.machine.phase();
        match event {
            Event::Live if phase == Life::Running => {
                self.say_full_restart_is_over();
                self.learn_base();
                self.await_the_old_one();
                self.apply(machine::Event::Ready);
            }
            Event::StopRequested(_) => {
                self.abandon("Envoy is to end");
                // A full restart has got further than that.
                self.say_abandoned("Envoy is to end");
                self.apply(machine::Event::Stop);
            }
            _ if phase != Life::Running => {
                self.apply(machine::Event::Unready);
            }
            _ => {}
        }
    }

    /// What is checked, or started beside the Envoy that serves, comes to nothing.
    pub(super) fn abandon(&mut self, why: &str) {
        let Some(epochs) = &mut self.epochs else {
            return;
        };
        match epochs.machine.phase() {
            Phase::Checking => epochs.drop_calls(),
            Phase::Starting(_) => {}
            Phase::Idle | Phase::Leaving(_) | Phase::Clearing => return,
        }
        epochs.prepared = None;
        self.say_abandoned(why);
    }

    /// A successor that was started again at its place serves.
    fn await_the_old_one(&mut self) {
        let stay = self.stay(Method::Hot);
        if let Some(epochs) = &mut self.epochs
            && epochs.machine.phase() == Phase::Leaving(Method::Hot)
        {
            epochs.successor_serves(stay);
        }
    }

    fn learn_base(&mut self) {
        let Some(epochs) = &mut self.epochs else {
            return;
        };
        let base = epochs.serving.as_ref().and_then(|run| run.base.as_ref());
        if base.and_then(|base| base.id()).is_none() {
            tracing::warn!("Envoys cannot share memory here: a restart will be a full one");
            epochs.machine.apply(machine::Event::Unshared);
        }
    }

    /// Something under way has ended.
    pub(super) async fn hear(&mut self, news: Progress) -> Option<Event> {
        let serves = self.machine.phase() == Life::Running;
        let epochs = self.epochs.as_mut()?;
        let is_early = epochs.is_early();
        match &news {
            Progress::Checked(Verdict::Usable(_), _) if !serves => {
                self.abandon("the Envoy that serves drains or has ended");
            }
            Progress::Checked(verdict, problem) => self.say_checked(*verdict, problem.clone()),
            Progress::NextEnded(ended) => {
                epochs.drop_calls();
                let last = last_line(epochs.next.take()).await;
                self.say_failed(format!("it ended before it served: {ended}, {last:?}"));
            }
            Progress::OldEnded(ended) => {
                epochs.deadline = None;
                let old = epochs.old.take();
                let epoch = old.as_ref().map(|old| old.epoch).unwrap_or_default();
                last_line(old).await;
                tracing::info!("Envoy epoch {epoch} has left: {ended}");
            }
            Progress::Deadline if epochs.next.is_some() => {
                let limit = epochs.limits.live;
                self.say_failed(format!("it did not serve within {limit:?}"));
            }
            Progress::Live | Progress::Deadline => {}
        }
        self.apply(news.event(is_early))
    }

    /// Has the machine decide and does as it says. Returns what it wants of the Envoy that serves.
    pub(super) fn apply(&mut self, event: machine::Event) -> Option<Event> {
        let epochs = self.epochs.as_mut()?;
        match epochs.machine.apply(event) {
            Action::Nothing => {}
            Action::Relaunch => self.relaunch(),
            Action::Check => self.check(),
            Action::Start(method) => {
                if let Err(error) = self.start_next(method) {
                    self.say_failed(with_causes(&error));
                    return self.apply(machine::Event::NextExited);
                }
            }
            Action::KillNext => kill(epochs.next.as_ref()),
            Action::KillOld => kill(epochs.old.as_ref()),
            Action::Promote(method) => self.promote(method),
            Action::Replace(end_by) => {
                tracing::warn!(
                    "Envoy is replaced by a full restart: it ends, then the next starts"
                );
                self.say_method(Method::Full);
                return Some(Event::Replace(end_by));
            }
        }
        self.show_epochs();
        None
    }

    fn check(&mut self) {
        tracing::info!("checking what Envoy would start from now ({})", self.reason);
        self.say_begun(self.reason, None);
        if let Some(epochs) = &mut self.epochs {
            epochs.check(self.count, self.admin, self.own.clone());
        }
    }

    fn start_next(&mut self, method: Method) -> Result<(), Error> {
        let epoch = self.count;
        let base = new_base(&self.config, epoch);
        let Some(epochs) = &mut self.epochs else {
            return Ok(());
        };
        let Some(run) = epochs.next_run(method, base) else {
            return Ok(());
        };
        let how = match method {
            Method::Hot => "hot restart: it takes the sockets over",
            Method::Overlap | Method::Full => {
                "overlapping restart, as hot restart cannot be used: it shares the ports"
            }
        };
        tracing::info!("starting Envoy epoch {epoch} beside the one that serves ({how})");
        let child = Child::start(&epochs.command_of(&run), epoch, &self.own)?;
        self.count += 1;
        epochs.await_live(self.admin, run.place);
        epochs.next = Some(Instance {
            child,
            run,
            epoch,
            started: self.clock.now(),
        });
        self.say_method(method);
        Ok(())
    }

    /// The next one serves; the one that did so is old.
    fn promote(&mut self, method: Method) {
        let started = self.publish.borrow().started;
        let stay = self.stay(method);
        let Some(epochs) = &mut self.epochs else {
            return;
        };
        epochs.drop_calls();
        let (Some(next), Some(served)) = (epochs.next.take(), self.child.take()) else {
            return;
        };
        if method == Method::Overlap {
            // It has lost its admin port, and shares what comes in for as long as it lives.
            served.process.terminate();
        }
        epochs.successor_serves(stay);
        let old_epoch = std::mem::replace(&mut self.epoch, next.epoch);
        epochs.old = epochs.serving.replace(next.run).map(|run| Instance {
            child: served,
            run,
            epoch: old_epoch,
            started: started.unwrap_or(next.started),
        });
        self.child = Some(next.child);
        let epoch = self.epoch;
        tracing::info!("Envoy epoch {epoch} serves; epoch {old_epoch} leaves within {stay:?}");
        self.show_current(Some(next.started));
        let result = if method == Method::Hot {
            "hot"
        } else {
            "overlap"
        };
        self.conclude(Outcome::Succeeded, result, None);
        self.repeat_drain();
    }

    /// How long an old Envoy may stay.
    fn stay(&self, method: Method) -> Duration {
        match &self.epochs {
            Some(epochs) if method == Method::Hot => epochs.limits.parent_shutdown + OVERDUE,
            _ => self.config.limits.terminate,
        }
    }

    /// An Envoy that takes the place of one that was told to drain is told, too.
    fn repeat_drain(&mut self) {
        if self.machine.is_drained() {
            let (admin, inbound_only) = (self.admin, self.config.drain_inbound_only);
            self.calls.spawn(async move {
                calls::drain(admin, inbound_only, true).await;
                Event::Answered
            });
        }
    }

    /// The Envoy that serves is started again at its place.
    fn relaunch(&mut self) {
        let stay = self.stay(Method::Hot);
        if let Some(epochs) = &mut self.epochs {
            // Until it serves; from then on the old one's time begins anew.
            epochs.deadline = Some(Instant::now() + epochs.limits.live + stay);
            epochs.serves_since = None;
            epochs.is_relaunch = true;
            tracing::warn!("the Envoy before still lives, so its successor starts again at once");
        }
    }

    /// Ends whoever is left when no Envoy is to serve any more.
    pub(super) async fn end_others(&mut self) {
        let limit = self.config.limits.kill;
        let Some(epochs) = &mut self.epochs else {
            return;
        };
        epochs.drop_calls();
        if let Some(next) = epochs.next.take() {
            next.end(limit).await;
        }
        if let Some(mut old) = epochs.old.take() {
            // Its successor has sent it away.
            let left = tokio::time::timeout(FOLLOWS, old.child.process.ended()).await;
            if left.is_err() {
                old.end(limit).await;
            }
        }
        self.show_epochs();
    }
}

/// What an Envoy that has ended wrote last; all of it is copied on.
async fn last_line(beside: Option<Instance>) -> String {
    let Some(mut beside) = beside else {
        return String::new();
    };
    beside.child.finish().await.pop().unwrap_or_default()
}

fn kill(beside: Option<&Instance>) {
    if let Some(beside) = beside {
        tracing::warn!("killing Envoy epoch {}", beside.epoch);
        beside.child.process.kill();
    }
}

impl HotRestart {
    /// What the next Envoy runs on: in the line of the one that serves, or as the first of another.
    fn next_run(&mut self, method: Method, new: Option<Arc<BaseId>>) -> Option<Launch> {
        let prepared = Arc::new(self.prepared.take()?);
        let serving = self.serving.as_ref()?;
        Some(match method {
            Method::Hot => Launch {
                prepared,
                base: serving.base.clone(),
                place: serving.place + 1,
            },
            Method::Overlap | Method::Full => Launch {
                prepared,
                base: new,
                place: 0,
            },
        })
    }
}
