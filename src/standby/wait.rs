//! The `standby` command: waits until no agent of the pod serves, or until it is to take over.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use tokio::time::sleep;

use super::channel::{Channel, Message};
use super::record::{End, Record, since_boot};
use super::{DIRECTORY, Lock, Standby, build, exec, socket};
use crate::config::environment::{Environment, ISTIO_AGENT_STANDBY};
use crate::lifecycle::{self, BoxError, Stop, Urgency};
use crate::problem::{Problem, codes};

/// How often the standby looks for the record of a first agent.
const FIRST: Duration = Duration::from_secs(1);
/// How often it connects to the agent that serves.
const CONNECTS: Duration = Duration::from_secs(5);

#[derive(Args, Clone, Debug)]
pub struct StandbyFlags {}

/// What the standby does next.
#[derive(Debug)]
pub enum Next {
    /// Runs `pilot-agent proxy`: no other agent serves, or it is to take over from it.
    Serve(Record),
    /// Exits with this code, as the other agent did on purpose.
    Exit(u8),
}

/// Waits. `envoy` finds the program that an agent started with this record runs.
pub async fn run(
    environment: &Environment,
    envoy: impl Fn(&Record) -> PathBuf,
) -> Result<Next, BoxError> {
    let start = since_boot();
    let Some(mut standby) = Standby::open(environment)? else {
        let (code, name) = (codes::SETTING_INVALID, ISTIO_AGENT_STANDBY.name);
        return Err(Problem::value(code, name, "", "the name of this container").into());
    };
    let stop = Stop::new();
    let signals = lifecycle::signals(stop.clone())?;
    tracing::info!(
        "container {} waits until no agent serves ({DIRECTORY})",
        standby.name
    );
    let directory = standby.directory.clone();
    let waiting = async {
        loop {
            // The thread ends with the process.
            let lock = Lock::open()?;
            let lock = tokio::task::spawn_blocking(|| lock.take()).await??;
            if let Some(end) = End::after(start, &directory)? {
                tracing::info!(
                    "the agent that served has exited on purpose, with code {}",
                    end.code
                );
                return Ok(Next::Exit(end.code));
            }
            if let Some(record) = Record::read(&directory)? {
                tracing::warn!("no agent of this pod serves; taking over");
                return Ok(Next::Serve(record));
            }
            drop(lock);
            sleep(FIRST).await;
        }
    };
    tokio::select! {
        next = waiting => next,
        record = until_ordered(&mut standby, envoy) => Ok(Next::Serve(record?)),
        () = stopped(&stop) => Ok(Next::Exit(0)),
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

/// Returns if this container has a new build, or when the agent that serves says so.
async fn until_ordered(
    standby: &mut Standby,
    envoy: impl Fn(&Record) -> PathBuf,
) -> Result<Record, BoxError> {
    let record = loop {
        match Record::read(&standby.directory)? {
            Some(record) => break record,
            None => sleep(FIRST).await,
        }
    };
    let envoy = envoy(&record);
    standby.build = build(&envoy).await;
    if standby.has_new_build()? {
        return Ok(record);
    }
    standby.record_build(&standby.build)?;
    let hello = standby.hello(&envoy).await;
    let mut warned = None;
    loop {
        let order = async {
            let mut channel = Channel::connect(&socket()).await?;
            let serving = channel.greet(&hello).await?;
            let hindrance = hello.hindrance(&serving);
            if let Some(why) = hindrance.as_ref().filter(|_| warned != hindrance) {
                let subject = format!("container {}", standby.name);
                tracing::warn!("{}", Problem::new(codes::STANDBY_UNABLE, subject, why));
            }
            warned = hindrance;
            channel.receive().await
        };
        match order.await {
            Ok(Message::TakeOver) => {
                // `pilot-agent proxy`, which this process becomes, then finds a new build and asks to take over.
                standby.record_build("")?;
                return Ok(record);
            }
            Ok(other) => tracing::warn!("unexpected message of the agent that serves: {other:?}"),
            Err(error) => tracing::debug!("no connection to the agent that serves: {error}"),
        }
        sleep(CONNECTS).await;
    }
}

/// Becomes the agent that serves. Returns only on failure.
pub fn serve(record: &Record, environment: &Environment) -> Problem {
    let error = exec::proxy(record, environment);
    Problem::new(codes::STANDBY_UNUSABLE, "pilot-agent", error)
}
