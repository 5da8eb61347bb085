//! Runs Envoy: starts it, waits for it, and brings it down gently.
//!
//! [`run`] owns the process from start to reaping. The way down is decided by [`drain::Descent`];
//! this file carries its actions out. Whatever happens, `run` returns only after Envoy has been
//! reaped, or after the kernel failed to kill it.
//!
//! Does not restart Envoy, and does not write its bootstrap.

pub mod admin;
pub mod command;
pub mod drain;
pub mod handle;
pub mod orphans;
pub mod process;

use std::net::IpAddr;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use crate::lifecycle::{Asked, Urgency};
use admin::Admin;
use command::Command;
use drain::{Action, Descent, Event, Limits, Phase};
use process::{Ended, Process};

/// An Envoy that fails this early was not able to start.
const EARLY: Duration = Duration::from_secs(1);

/// How Envoy is run.
#[derive(Clone, Debug)]
pub struct Config {
    pub command: Command,
    pub admin_host: IpAddr,
    pub admin_port: u16,
    /// Of a sidecar only inbound listeners are drained.
    pub drain_inbound_only: bool,
    /// Longest wait for an answer to the drain call.
    pub drain_call: Duration,
    pub limits: Limits,
}

/// Why [`run`] came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Envoy was asked to stop and did.
    Requested,
    /// Envoy ended and nobody had asked.
    ByItself(Ended),
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Process(#[from] process::Error),
    #[error(
        "Envoy ended {} ms after its start with {ended}, expected it to stay; its own log says why",
        .after.as_millis()
    )]
    AtOnce { ended: Ended, after: Duration },
    #[error("Envoy did not end within {0:?} of being killed")]
    Unkillable(Duration),
}

/// Runs Envoy until it ends. Each step up of the urgency takes it one step down: drain, terminate,
/// kill. Poll it on the main thread, see [`process`].
pub async fn run(config: Config, requests: watch::Receiver<Asked>) -> Result<Exit, Error> {
    tracing::info!(
        "Envoy command: [{} {}]",
        config.command.binary.display(),
        config.command.arguments().join(" ")
    );
    let started = Instant::now();
    let mut envoy = Process::start(&config.command)?;
    let pid = envoy.pid();
    let supervision = Supervision {
        admin: Admin::new(config.admin_host, config.admin_port, config.drain_call),
        descent: Descent::new(config.limits),
        deadline: None,
        config,
        requests,
        asked: Urgency::Run,
    };
    let exit = tokio::select! {
        exit = supervision.run(&mut envoy) => exit?,
        never = orphans::reap(Some(pid)) => match never {},
    };
    report(exit, started.elapsed())
}

/// Logs how Envoy ended; an end too early for a start is an error.
fn report(exit: Exit, after: Duration) -> Result<Exit, Error> {
    match exit {
        Exit::Requested => tracing::info!("Envoy exited normally"),
        Exit::ByItself(Ended::Code(0)) => tracing::warn!("Envoy exited by itself with status 0"),
        Exit::ByItself(ended) if after < EARLY => return Err(Error::AtOnce { ended, after }),
        Exit::ByItself(ended) => tracing::error!("Envoy exited with error: {ended}"),
    }
    Ok(exit)
}

/// What there is to know about a running Envoy, apart from its process.
struct Supervision {
    config: Config,
    admin: Admin,
    descent: Descent,
    /// End of the current wait.
    deadline: Option<Instant>,
    requests: watch::Receiver<Asked>,
    /// The urgency acted on so far.
    asked: Urgency,
}

impl Supervision {
    async fn run(mut self, envoy: &mut Process) -> Result<Exit, Error> {
        loop {
            let (event, ended) = self.next(envoy).await?;
            let was_running = self.descent.phase() == Phase::Running;
            let action = self.descent.apply(event);
            if let Some(ended) = ended {
                return Ok(if was_running {
                    Exit::ByItself(ended)
                } else {
                    Exit::Requested
                });
            }
            self.act(action, envoy)?;
        }
    }

    /// Waits for the next event. The end of Envoy comes with how it ended.
    async fn next(&mut self, envoy: &mut Process) -> Result<(Event, Option<Ended>), Error> {
        let announcing = self.descent.phase() == Phase::Announcing;
        let (admin, inbound_only) = (self.admin, self.config.drain_inbound_only);
        let deadline = self.deadline;
        tokio::select! {
            biased;
            ended = envoy.ended() => Ok((Event::EnvoyExited, Some(ended?))),
            () = asked_again(&mut self.requests, &mut self.asked) => Ok((Event::StopAsked, None)),
            () = announce(admin, inbound_only), if announcing => Ok((Event::Announced, None)),
            () = reached(deadline) => Ok((Event::Deadline, None)),
        }
    }

    fn act(&mut self, action: Action, envoy: &Process) -> Result<(), Error> {
        let wait = match action {
            Action::Nothing => return Ok(()),
            Action::Announce => {
                tracing::info!("Agent draining Proxy for termination");
                return Ok(());
            }
            Action::Wait(wait) => {
                tracing::info!("Graceful termination period is {wait:?}, starting...");
                wait
            }
            Action::TerminateAndWait(wait) => {
                tracing::info!("Terminating Envoy");
                envoy.terminate();
                wait
            }
            Action::KillAndWait(wait) => {
                tracing::warn!("Killing Envoy, which did not heed its termination in time");
                envoy.kill();
                wait
            }
            Action::GiveUp => return Err(Error::Unkillable(self.config.limits.kill)),
        };
        self.deadline = Some(Instant::now() + wait);
        Ok(())
    }
}

/// Returns when the urgency stands above what was acted on, one step at a time.
async fn asked_again(requests: &mut watch::Receiver<Asked>, asked: &mut Urgency) {
    let current = *asked;
    let higher = requests.wait_for(|now| now.urgency > current).await;
    if higher.is_err() {
        // Nobody is left who could ask.
        std::future::pending::<()>().await;
    }
    *asked = current.next();
}

/// Tells Envoy to drain. A failure is no reason to keep Envoy: the wait follows either way.
async fn announce(admin: Admin, inbound_only: bool) {
    match admin.drain_listeners(inbound_only).await {
        Ok(answer) if answer.status.is_success() => {}
        Ok(answer) => tracing::warn!(
            status = answer.status.as_u16(),
            "Envoy refused to drain its listeners; waiting all the same"
        ),
        Err(error) => {
            let cause = std::error::Error::source(&error).map(ToString::to_string);
            tracing::warn!(%error, cause, "failed to drain listeners; waiting all the same");
        }
    }
}

async fn reached(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests;
