//! Owns named tasks, and turns signals into stop requests.
//!
//! Every task of the agent runs in a [`Tasks`] set, so no task ends unnoticed or outlives the
//! agent. A [`CancellationToken`] stops all tasks that hold it.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::ops::RangeInclusive;
use std::time::Duration;

use nix::sys::signal::SigSet;
use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinSet;
pub use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

/// Any error a task may end with.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Formats an error and its causes in one line.
pub fn with_causes(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}

/// The urgency of stop requests. Each signal makes the request one step more urgent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Urgency {
    /// The agent has not been asked to stop.
    #[default]
    Run,
    Drain,
    Terminate,
    Kill,
}

impl Urgency {
    /// Returns the urgency that is one step higher.
    #[must_use]
    pub fn next(self) -> Self {
        match self {
            Self::Run => Self::Drain,
            Self::Drain => Self::Terminate,
            Self::Terminate | Self::Kill => Self::Kill,
        }
    }
}

/// The cause of a stop that the pod's owner has asked for.
pub const QUIT: &str = "/quitquitquit called";

/// The sum of all stop requests so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopRequest {
    pub urgency: Urgency,
    /// The cause of the first request.
    pub cause: Option<&'static str>,
    /// True if a signal was among the requests.
    pub is_signaled: bool,
}

/// Asks the agent to stop, and reports the requests to subscribers. Clones share the request.
#[derive(Clone, Debug, Default)]
pub struct Stop(watch::Sender<StopRequest>);

impl Stop {
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes the request one step more urgent, for a signal.
    pub fn escalate(&self, cause: &'static str) {
        let next = self.0.borrow().urgency.next();
        self.request(next, cause);
        self.0.send_modify(|stop| stop.is_signaled = true);
    }

    /// Makes the request at least as urgent as given. Its cause is the cause of the first request.
    pub fn request(&self, urgency: Urgency, cause: &'static str) {
        self.0.send_modify(|stop| {
            stop.urgency = stop.urgency.max(urgency);
            stop.cause.get_or_insert(cause);
        });
    }

    /// Subscribes to the requests. The receiver begins with those so far.
    pub fn requested(&self) -> watch::Receiver<StopRequest> {
        self.0.subscribe()
    }

    /// Waits for the first request.
    pub async fn first_request(&self) {
        let mut requests = self.requested();
        // It fails only without a sender, and `self` has a sender.
        let _ = requests.wait_for(|stop| stop.urgency != Urgency::Run).await;
    }
}

/// Signals that end a process by default, but not a program of Go. Those from 35 on are real-time signals
/// that the C library leaves to programs.
const WITHOUT_EFFECT: [Signal; 9] = [
    Signal::USR1,
    Signal::USR2,
    Signal::ALARM,
    Signal::VTALARM,
    Signal::PROF,
    Signal::IO,
    Signal::XCPU,
    Signal::XFSZ,
    Signal::POWER,
];
const REAL_TIME: RangeInclusive<i32> = 35..=64;
/// The time for signals to arrive.
const LAST_SIGNALS: Duration = Duration::from_millis(10);

/// Makes the stop request one step more urgent for each SIGTERM and SIGINT. The signals are caught from
/// the call on, and handled while the future is polled, which never ends.
///
/// Signals that do not end pilot-agent are caught, too. They are not ignored (SIG_IGN), because Envoy
/// would inherit that.
pub fn signals(stop: Stop) -> io::Result<impl Future<Output = Infallible> + Send> {
    for number in WITHOUT_EFFECT.map(Signal::as_raw).into_iter().chain(REAL_TIME) {
        // The signal stays caught without the stream.
        drop(signal(SignalKind::from_raw(number))?);
    }
    let mut terminated = signal(SignalKind::terminate())?;
    let mut interrupted = signal(SignalKind::interrupt())?;
    stop_signals().thread_unblock()?;
    Ok(async move {
        loop {
            let cause = tokio::select! {
                _ = terminated.recv() => "received signal: terminated",
                _ = interrupted.recv() => "received signal: interrupt",
            };
            tracing::info!("{cause}");
            stop.escalate(cause);
        }
    })
}

/// Handles the signals that have arrived, and holds later ones as [`hold_signals`] does. `signals` is the future of
/// [`signals`]. Returns true if there was a signal, after which this process must not become another program.
pub async fn handle_last_signals(
    signals: impl Future<Output = Infallible>,
    stop: &Stop,
) -> io::Result<bool> {
    hold_signals()?;
    let _ = tokio::time::timeout(LAST_SIGNALS, signals).await;
    Ok(stop.requested().borrow().is_signaled)
}

/// Blocks SIGTERM and SIGINT on this thread until the next program that this process runs has called [`signals`]: the
/// kernel discards a signal that the first process of a container does not handle.
pub fn hold_signals() -> io::Result<()> {
    Ok(stop_signals().thread_block()?)
}

fn stop_signals() -> SigSet {
    SigSet::from_iter([nix::sys::signal::SIGTERM, nix::sys::signal::SIGINT])
}

/// Makes listeners stop accepting and finish their connections, because another agent continues with their sockets.
/// Clones share the state.
#[derive(Clone, Debug, Default)]
pub struct StopAccepting {
    begun: CancellationToken,
    /// Counts the guards of the listeners that still accept.
    accept_guards: TaskTracker,
}

impl StopAccepting {
    /// Returns a guard that a listener drops when it has stopped accepting.
    pub fn accept_guard(&self) -> TaskTrackerToken {
        self.accept_guards.token()
    }

    pub async fn wait_for_begin(&self) {
        self.begun.cancelled().await;
    }

    pub fn has_begun(&self) -> bool {
        self.begun.is_cancelled()
    }

    /// Makes all listeners stop, and waits until no listener accepts any more.
    pub async fn begin(&self) {
        self.begun.cancel();
        self.accept_guards.close();
        self.accept_guards.wait().await;
    }
}

/// The end of a task.
#[derive(Debug)]
pub struct Ended {
    pub name: &'static str,
    pub result: Result<(), BoxError>,
}

/// The running tasks of an owner. Dropping the set aborts them.
#[derive(Debug, Default)]
pub struct Tasks {
    set: JoinSet<Ended>,
}

impl Tasks {
    /// Starts `future` under `name`, which appears in the log when it ends.
    pub fn spawn<E>(
        &mut self,
        name: &'static str,
        future: impl Future<Output = Result<(), E>> + Send + 'static,
    ) where
        E: Into<BoxError>,
    {
        self.set.spawn(async move { Ended { name, result: future.await.map_err(Into::into) } });
    }

    pub(crate) fn len(&self) -> usize {
        self.set.len()
    }

    /// Waits for the next task to end. Never returns while the set is empty, for use in a `select!`.
    pub async fn next_ended(&mut self) -> Ended {
        match self.set.join_next().await {
            Some(Ok(ended)) => ended,
            // A panic loses the name. It is not an abort, which only follows from dropping or draining the set.
            Some(Err(error)) => Ended { name: "a task that panicked", result: Err(error.into()) },
            None => std::future::pending().await,
        }
    }

    /// Waits until all tasks have ended by themselves, and aborts those that still run after `limit`. Returns
    /// the number of aborted tasks.
    pub async fn drain(&mut self, limit: Duration) -> usize {
        let all_ended = async { while self.set.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(limit, all_ended).await; // The count below shows the outcome.
        let aborted = self.set.len();
        self.set.shutdown().await;
        aborted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn drain_waits_for_cancelled_tasks_and_aborts_the_rest() {
        let token = CancellationToken::new();
        let mut tasks = Tasks::default();
        let heeding = token.clone();
        tasks.spawn("heeds", async move {
            heeding.cancelled().await;
            Ok::<(), BoxError>(())
        });
        tasks.spawn("stubborn", std::future::pending::<Result<(), BoxError>>());
        token.cancel();
        assert_eq!(tasks.drain(Duration::from_secs(5)).await, 1);
        assert_eq!(tasks.len(), 0);
    }

    #[tokio::test]
    async fn a_failed_task_is_named() {
        let mut tasks = Tasks::default();
        tasks.spawn("relay", async { Err::<(), BoxError>("no".into()) });
        let ended = tasks.next_ended().await;
        assert_eq!(ended.name, "relay");
        assert_eq!(ended.result.map_err(|e| e.to_string()), Err("no".into()));
    }

    #[tokio::test]
    async fn each_signal_is_one_step_more_urgent() {
        use rustix::process::{getpid, kill_process};
        let stop = Stop::new();
        let mut asked = stop.requested();
        let watching = signals(stop).expect("the signals are caught");
        let asking = async {
            for (signal, expected) in [
                (Signal::TERM, Urgency::Drain),
                (Signal::INT, Urgency::Terminate),
                (Signal::TERM, Urgency::Kill),
                (Signal::TERM, Urgency::Kill),
            ] {
                kill_process(getpid(), signal).expect("the signal is sent");
                asked.changed().await.expect("the watch lives");
                let asked = asked.borrow_and_update();
                assert_eq!(asked.urgency, expected);
                assert_eq!(asked.cause, Some("received signal: terminated"));
            }
        };
        tokio::select! {
            () = asking => {}
            never = watching => match never {},
        }
    }
}
