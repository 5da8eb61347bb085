//! Wall-clock time, injectable, with a sleep that a suspended machine or a set clock cannot fool.
//!
//! Certificates expire by the calendar, so renewal waits for a wall-clock moment and not for a
//! duration: after a suspend, or after the clock was set, [`Clock::sleep_until`] looks again at
//! once. It costs no periodic wake-up: the kernel tells when the clock was changed (`timerfd` on
//! `CLOCK_REALTIME` with `TFD_TIMER_CANCEL_ON_SET`).

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::watch;
use tokio::time::Instant;

/// Tells the time and waits for it.
#[derive(Clone, Debug)]
pub struct Clock(Source);

#[derive(Clone, Debug)]
enum Source {
    System,
    Simulated(Arc<Simulated>),
}

#[derive(Debug)]
struct Simulated {
    start: SystemTime,
    started: Instant,
    /// How far the simulated wall clock has been set forward since its start.
    ahead: watch::Sender<Duration>,
}

impl Clock {
    /// The machine's clock.
    pub const fn system() -> Self {
        Self(Source::System)
    }

    /// A clock that reads `start` now and follows tokio's clock, also while that is paused.
    pub fn simulated(start: SystemTime) -> Self {
        Self(Source::Simulated(Arc::new(Simulated {
            start,
            started: Instant::now(),
            ahead: watch::Sender::new(Duration::ZERO),
        })))
    }

    /// Sets a simulated clock forward, as a resumed machine finds it. The machine's own clock is
    /// left alone.
    pub fn jump(&self, by: Duration) {
        if let Source::Simulated(simulated) = &self.0 {
            simulated.ahead.send_modify(|ahead| *ahead += by);
        }
    }

    pub fn now(&self) -> SystemTime {
        match &self.0 {
            Source::System => SystemTime::now(),
            Source::Simulated(simulated) => {
                simulated.start + simulated.started.elapsed() + *simulated.ahead.borrow()
            }
        }
    }

    /// Returns once the wall clock shows `deadline` or later, however it got there.
    pub async fn sleep_until(&self, deadline: SystemTime) {
        while let Ok(left) = deadline.duration_since(self.now()) {
            if left.is_zero() {
                return;
            }
            match &self.0 {
                Source::System => system_sleep(deadline, left).await,
                Source::Simulated(simulated) => {
                    let mut ahead = simulated.ahead.subscribe();
                    tokio::select! {
                        () = tokio::time::sleep(left) => {}
                        _ = ahead.changed() => {}
                    }
                }
            }
        }
    }
}

/// A moment in UTC, to the second, as in `2026-08-22T15:00:18Z`.
pub(crate) fn rfc3339(time: SystemTime) -> String {
    let mut timestamp = prost_types::Timestamp::from(time);
    timestamp.nanos = 0;
    timestamp.to_string()
}

/// Returns at `deadline`, or earlier when the clock was set; the caller looks again.
async fn system_sleep(deadline: SystemTime, left: Duration) {
    match timer::until(deadline) {
        // Without a timer (no descriptors left) look again every few seconds: a renewal then
        // follows a resume within that time.
        Err(_) => tokio::time::sleep(left.min(Duration::from_secs(4))).await,
        Ok(timer) => timer.fired_or_clock_set().await,
    }
}

mod timer {
    use std::io;
    use std::os::fd::OwnedFd;
    use std::time::{SystemTime, UNIX_EPOCH};

    use rustix::time::{
        Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
        timerfd_settime,
    };
    use tokio::io::unix::AsyncFd;

    pub(super) struct Timer(AsyncFd<OwnedFd>);

    pub(super) fn until(deadline: SystemTime) -> io::Result<Timer> {
        let since_epoch = deadline
            .duration_since(UNIX_EPOCH)
            .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        let fd = timerfd_create(
            TimerfdClockId::Realtime,
            TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC,
        )?;
        let value = Timespec {
            tv_sec: i64::try_from(since_epoch.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: since_epoch.subsec_nanos().into(),
        };
        let once = Itimerspec {
            it_interval: Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            },
            it_value: value,
        };
        timerfd_settime(
            &fd,
            TimerfdTimerFlags::ABSTIME | TimerfdTimerFlags::CANCEL_ON_SET,
            &once,
        )?;
        #[expect(
            deprecated,
            reason = "unsound only for types that give up their descriptor; OwnedFd keeps it"
        )]
        let fd = AsyncFd::new(fd)?;
        Ok(Timer(fd))
    }

    impl Timer {
        /// Both an expiry and `ECANCELED` make the descriptor readable; either way it is time to
        /// look at the clock.
        pub(super) async fn fired_or_clock_set(&self) {
            let _ = self.0.readable().await; // An error means the runtime is going down.
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[tokio::test]
    async fn the_system_clock_wakes_at_the_deadline_and_not_before() {
        let clock = Clock::system();
        let deadline = clock.now() + Duration::from_millis(20);
        clock.sleep_until(deadline).await;
        assert!(clock.now() >= deadline);
    }
}
