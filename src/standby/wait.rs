//! The `standby` command: waits until no agent of the pod serves, or until it is to take over.

use std::path::PathBuf;
use std::pin::pin;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use tokio::time::{sleep, timeout};

use super::channel::{Channel, Message};
use super::record::{self, End, RECORD, Record, since_boot};
use super::{DIRECTORY, Pair, build, open_lock, socket};
use crate::config::environment::Environment;
use crate::problem::{Code, Problem};
use crate::runtime::lifecycle::{self, BoxError, Stop};

/// The time between two attempts to read the record of a first agent.
const RECORD_INTERVAL: Duration = Duration::from_secs(1);
/// The time between two connections to the agent that serves.
const CONNECT_INTERVAL: Duration = Duration::from_secs(5);
/// The time after which an agent that cannot take over connects again, because this may have changed.
const BLOCKED_INTERVAL: Duration = Duration::from_secs(60);

/// Waits until no other agent serves, or until this one is to take over. Returns the record with which to run
/// `pilot-agent proxy`, or None if this process is to exit. `envoy` returns the path of the Envoy that an agent with
/// this record runs. The agent that serves gets the result of `check`: the reason why an agent with this record cannot
/// serve in this container, as far as its files show.
pub async fn run(
    environment: &Environment,
    envoy: impl Fn(&Record) -> PathBuf,
    check: impl Fn(&Record) -> Option<String>,
) -> Result<Option<Record>, BoxError> {
    let start = since_boot();
    let mut pair = Pair::open(environment)?;
    let stop = Stop::new();
    let mut signals = pin!(lifecycle::signals(stop.clone())?);
    tracing::info!("container {} waits until no agent serves ({DIRECTORY})", pair.name);
    let directory = pair.directory.clone();
    let waiting = async {
        loop {
            // The thread ends with the process.
            let lock = open_lock()?;
            let take = move || flock(&lock, FlockOperation::LockExclusive).map(|()| lock);
            let lock = tokio::task::spawn_blocking(take).await??;
            if End::after(start, &directory)?.is_some() {
                tracing::info!("the agent that served has exited on purpose");
                return Ok(None);
            }
            let record = record::read(&directory, RECORD)?;
            if record.is_some() {
                tracing::warn!("no agent of this pod serves; taking over");
                return Ok(record);
            }
            drop(lock);
            sleep(RECORD_INTERVAL).await;
        }
    };
    let next = tokio::select! {
        next = waiting => next,
        record = wait_for_takeover(&mut pair, envoy, check) => record.map(Some),
        () = stop.first_request() => return Ok(None),
        never = &mut signals => match never {},
    };
    // A pod that is deleted stops the other container, and this one a moment later.
    if lifecycle::handle_last_signals(signals, &stop).await? {
        return Ok(None);
    }
    next
}

/// Waits until this container has a new build, or until the agent that serves tells this one to take over. Returns the
/// record of the agent that serves. Records the build of this container unless it is new, and an empty one after such a
/// message: [`Pair::enter`] must find a new build.
async fn wait_for_takeover(
    pair: &mut Pair,
    envoy: impl Fn(&Record) -> PathBuf,
    check: impl Fn(&Record) -> Option<String>,
) -> Result<Record, BoxError> {
    let record = loop {
        match record::read::<Record>(&pair.directory, RECORD)? {
            Some(record) => break record,
            None => sleep(RECORD_INTERVAL).await,
        }
    };
    let envoy = envoy(&record);
    pair.build = build(&envoy).await;
    if pair.has_new_build()? {
        return Ok(record);
    }
    pair.record_build(&pair.build)?;
    let mut hello = pair.hello(&envoy).await;
    let mut warned = None;
    loop {
        let message = async {
            let mut channel = Channel::connect(&socket()).await?;
            hello.self_check = Some(check(&record).map_or(Ok(()), Err));
            let blocker = hello.takeover_blocker(&channel.greet(&hello).await?);
            if warned != blocker
                && let Some(why) = &blocker
            {
                let subject = format!("container {}", pair.name);
                tracing::warn!("{}", Problem::new(Code::StandbyUnable, subject, why));
            }
            // A blocker may end, so the next connection checks it again.
            let limit = blocker.as_ref().map_or(Duration::MAX, |_| BLOCKED_INTERVAL);
            warned = blocker;
            Ok::<_, BoxError>(timeout(limit, channel.receive()).await??)
        };
        match message.await {
            Ok(Message::TakeOver) => {
                // `pilot-agent proxy`, which this process becomes, then finds a new build and asks for a handover.
                pair.record_build("")?;
                return Ok(record);
            }
            Ok(other) => tracing::warn!("unexpected message of the agent that serves: {other:?}"),
            // This is also the end of `limit`.
            Err(error) => tracing::debug!("no connection to the agent that serves: {error}"),
        }
        sleep(CONNECT_INTERVAL).await;
    }
}
