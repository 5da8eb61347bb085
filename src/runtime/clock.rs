//! Reads the wall clock, and sleeps by it through suspends and changes of the clock. Tests simulate it.
//!
//! Certificates expire by the calendar, so renewal waits for a wall-clock moment and not for a duration:
//! [`Clock::sleep_until`] reads the clock again after a suspend, or when the clock was set. It needs no periodic
//! wake-up, because the kernel reports changes (`timerfd` on `CLOCK_REALTIME` with `TFD_TIMER_CANCEL_ON_SET`).
//! [`Clock::sleep_until_due`] also counts the time that passes, suspended or not (`CLOCK_BOOTTIME`), so a clock set
//! back does not delay it.

use std::future::pending;
use std::io;
#[cfg(test)]
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use serde::Serializer;
use tokio::io::unix::AsyncFd;
#[cfg(test)]
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

/// The longest wait. A longer one is cut, because the sum of a moment and a duration may be out of range.
const FAR_AWAY: Duration = Duration::from_secs(30 * 365 * 86_400);

/// Returns the instant that is `wait` from now, at most [`FAR_AWAY`].
pub fn after(wait: Duration) -> Instant {
    later(Instant::now(), wait)
}

/// Returns the instant that is `wait` after another, at most [`FAR_AWAY`].
pub fn later(instant: Instant, wait: Duration) -> Instant {
    instant.checked_add(wait.min(FAR_AWAY)).unwrap_or(instant)
}

/// Waits until an instant, or for ever without one.
pub(crate) async fn until(due: Option<Instant>) {
    match due {
        Some(due) => sleep_until(due).await,
        None => pending().await,
    }
}

/// Reads the wall clock and sleeps by it.
#[derive(Clone, Debug)]
pub struct Clock(Source);

#[derive(Clone, Debug)]
enum Source {
    System,
    #[cfg(test)]
    Simulated(Arc<Simulated>),
}

#[cfg(test)]
#[derive(Debug)]
struct Simulated {
    start: SystemTime,
    started: Instant,
    set: watch::Sender<Set>,
}

/// The changes of a simulated wall clock since its start.
#[cfg(test)]
#[derive(Clone, Copy, Debug, Default)]
struct Set {
    forward: Duration,
    back: Duration,
}

impl Clock {
    /// Returns the machine's clock.
    pub const fn system() -> Self {
        Self(Source::System)
    }

    /// Returns a clock that reads `start` now and follows tokio's clock, also while that is paused.
    #[cfg(test)]
    pub(crate) fn simulated(start: SystemTime) -> Self {
        Self(Source::Simulated(Arc::new(Simulated {
            start,
            started: Instant::now(),
            set: watch::Sender::default(),
        })))
    }

    /// Sets a simulated clock forward, as after a suspend. Has no effect on the machine's clock.
    #[cfg(test)]
    pub(crate) fn jump(&self, by: Duration) {
        if let Source::Simulated(simulated) = &self.0 {
            simulated.set.send_modify(|set| set.forward += by);
        }
    }

    /// Sets a simulated clock back, as a correction of the time does.
    #[cfg(test)]
    pub(crate) fn jump_back(&self, by: Duration) {
        if let Source::Simulated(simulated) = &self.0 {
            simulated.set.send_modify(|set| set.back += by);
        }
    }

    pub fn now(&self) -> SystemTime {
        match &self.0 {
            Source::System => SystemTime::now(),
            #[cfg(test)]
            Source::Simulated(simulated) => {
                let set = *simulated.set.borrow();
                simulated.start + simulated.started.elapsed() + set.forward - set.back
            }
        }
    }

    /// Returns the moment that is `wait` from now, at most [`FAR_AWAY`].
    pub fn after(&self, wait: Duration) -> SystemTime {
        let now = self.now();
        now.checked_add(wait.min(FAR_AWAY)).unwrap_or(now)
    }

    /// Waits until the wall clock shows `deadline` or later, also if the clock was set.
    pub async fn sleep_until(&self, deadline: SystemTime) {
        while let Ok(left) = deadline.duration_since(self.now()) {
            if left.is_zero() {
                return;
            }
            match &self.0 {
                Source::System => {
                    let flags = TimerfdTimerFlags::ABSTIME | TimerfdTimerFlags::CANCEL_ON_SET;
                    let moment = deadline.duration_since(UNIX_EPOCH).unwrap_or_default();
                    if timer(TimerfdClockId::Realtime, flags, moment).await.is_err() {
                        // Without a timer (no descriptors left) look again every few seconds: a renewal
                        // then follows a resume within that time.
                        tokio::time::sleep(left.min(Duration::from_secs(4))).await;
                    }
                }
                #[cfg(test)]
                Source::Simulated(simulated) => {
                    let mut set = simulated.set.subscribe();
                    tokio::select! {
                        () = tokio::time::sleep(left) => {}
                        _ = set.changed() => {}
                    }
                }
            }
        }
    }

    /// Waits until the wall clock shows `deadline`, or until the time that was left has passed, whichever is first.
    pub async fn sleep_until_due(&self, deadline: SystemTime) {
        let Ok(left) = deadline.duration_since(self.now()) else {
            return;
        };
        tokio::select! {
            () = self.sleep_until(deadline) => {}
            () = self.pass(left) => {}
        }
    }

    /// Waits until this time has passed, including the time for which the machine is suspended.
    async fn pass(&self, time: Duration) {
        match &self.0 {
            Source::System => {
                let flags = TimerfdTimerFlags::empty();
                if timer(TimerfdClockId::Boottime, flags, time).await.is_err() {
                    // Without a timer the time of a suspend is not counted.
                    tokio::time::sleep(time).await;
                }
            }
            #[cfg(test)]
            Source::Simulated(_) => tokio::time::sleep(time).await,
        }
    }
}

/// Formats a moment in UTC, to the second, as in `2026-08-22T15:00:18Z`.
pub(crate) fn rfc3339(time: SystemTime) -> String {
    let mut timestamp = prost_types::Timestamp::from(time);
    timestamp.nanos = 0;
    timestamp.to_string()
}

/// Serializes a moment as [`rfc3339`].
pub(crate) fn in_utc<S: Serializer>(moment: &SystemTime, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&rfc3339(*moment))
}

/// Waits until a timer of the kernel fires, or reports that the clock was set; the caller looks at the clock again.
/// Fails at once if there is no timer.
async fn timer(clock: TimerfdClockId, flags: TimerfdTimerFlags, at: Duration) -> io::Result<()> {
    let fd = timerfd_create(clock, TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC)?;
    // Zero would switch the timer off.
    let at = at.max(Duration::from_nanos(1));
    let once = Itimerspec {
        it_interval: Timespec { tv_sec: 0, tv_nsec: 0 },
        it_value: Timespec {
            tv_sec: i64::try_from(at.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: at.subsec_nanos().into(),
        },
    };
    timerfd_settime(&fd, flags, &once)?;
    #[expect(
        deprecated,
        reason = "unsound only for types that give up their descriptor; OwnedFd keeps it"
    )]
    let fd = AsyncFd::new(fd)?;
    // Both an expiry and `ECANCELED` make the descriptor readable. An error means that the runtime ends.
    let _ = fd.readable().await;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_wait_that_overflows_the_clock_is_capped() {
        let now = Instant::now();
        for wait in [Duration::from_secs(u64::MAX), Duration::MAX] {
            assert_eq!(later(now, wait), now + FAR_AWAY);
            assert!(after(wait) >= now + FAR_AWAY);
            assert!(Clock::system().after(wait) > SystemTime::now() + FAR_AWAY / 2);
        }
        assert_eq!(later(now, FAR_AWAY / 2), now + FAR_AWAY / 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_simulated_clock_follows_the_paused_runtime() {
        let start = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000);
        let clock = Clock::simulated(start);
        clock.sleep_until(start + Duration::from_secs(3600)).await;
        assert_eq!(clock.now(), start + Duration::from_secs(3600));
    }

    #[tokio::test(start_paused = true)]
    async fn a_clock_set_forward_wakes_the_sleeper_at_once() {
        let start = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000);
        let clock = Clock::simulated(start);
        let before = Instant::now();
        let sleeper = clock.clone();
        let sleep = sleeper.sleep_until(start + Duration::from_secs(12 * 3600));
        let jump = async {
            tokio::task::yield_now().await;
            clock.jump(Duration::from_secs(13 * 3600));
        };
        tokio::join!(sleep, jump);
        assert_eq!(before.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn a_clock_set_back_does_not_delay_a_deadline() {
        let start = SystemTime::UNIX_EPOCH + Duration::from_secs(100_000);
        let clock = Clock::simulated(start);
        let before = Instant::now();
        let hour = Duration::from_secs(3600);
        let back = async {
            tokio::task::yield_now().await;
            clock.jump_back(hour);
        };
        tokio::join!(clock.sleep_until_due(start + hour), back);
        assert_eq!(before.elapsed(), hour);
    }

    #[tokio::test]
    async fn the_system_clock_waits_in_real_time() {
        let clock = Clock::system();
        let time = Duration::from_millis(20);
        let before = Instant::now();
        clock.pass(time).await;
        clock.pass(Duration::ZERO).await;
        assert!(before.elapsed() >= time);
        clock.sleep_until_due(clock.now() + time).await;
        clock.sleep_until_due(SystemTime::UNIX_EPOCH).await;
        assert!(before.elapsed() >= 2 * time);
    }

    #[tokio::test]
    async fn the_system_clock_wakes_at_the_deadline_and_not_before() {
        let clock = Clock::system();
        let deadline = clock.now() + Duration::from_millis(20);
        clock.sleep_until(deadline).await;
        assert!(clock.now() >= deadline);
    }
}
