//! The `standby` command: waits until no agent of the pod serves, and then serves.

use std::time::Duration;

use clap::Args;
use tokio::time::sleep;

use super::record::{End, Record, since_boot};
use super::{DIRECTORY, Standby, exec};
use crate::config::environment::{Environment, ISTIO_AGENT_STANDBY};
use crate::lifecycle::{self, BoxError, Stop, Urgency};
use crate::problem::{Problem, codes};

/// How often the standby looks for the record of a first agent.
const FIRST: Duration = Duration::from_secs(1);

#[derive(Args, Clone, Debug)]
pub struct StandbyFlags {}

/// What the standby does once no other agent serves.
#[derive(Debug)]
pub enum Next {
    Serve(Record),
    /// It exits with this code, as the other agent did on purpose.
    Exit(u8),
}

/// Waits for the lock.
pub async fn run(environment: &Environment) -> Result<Next, BoxError> {
    let start = since_boot();
    let Some(standby) = Standby::open(environment)? else {
        let (code, name) = (codes::SETTING_INVALID, ISTIO_AGENT_STANDBY.name);
        return Err(Problem::value(code, name, "", "the name of this container").into());
    };
    let stop = Stop::new();
    let signals = lifecycle::signals(stop.clone())?;
    tracing::info!(
        "container {} waits until no agent serves ({DIRECTORY})",
        standby.name
    );
    tokio::select! {
        next = next(&standby, start) => next,
        _ = stopped(&stop) => Ok(Next::Exit(0)),
        never = signals => match never {},
    }
}

async fn stopped(stop: &Stop) {
    // An error means that all senders are gone; this function has one.
    let _ = stop
        .requested()
        .wait_for(|stop| stop.urgency != Urgency::Run)
        .await;
}

async fn next(standby: &Standby, start: u64) -> Result<Next, BoxError> {
    loop {
        let waiting = standby.clone();
        // The thread ends with the process.
        tokio::task::spawn_blocking(move || waiting.lock()).await??;
        if let Some(end) = End::after(start, &standby.directory)? {
            tracing::info!(
                "the agent that served has exited on purpose, with code {}",
                end.code
            );
            return Ok(Next::Exit(end.code));
        }
        if let Some(record) = Record::read(&standby.directory)? {
            return Ok(Next::Serve(record));
        }
        standby.unlock()?;
        sleep(FIRST).await;
    }
}

/// Becomes the agent that serves. Returns only on failure.
pub fn serve(record: &Record, environment: &Environment) -> Problem {
    tracing::warn!("no agent of this pod serves; taking over");
    let error = exec::proxy(record, environment);
    Problem::new(codes::STANDBY_UNUSABLE, "pilot-agent", error)
}
