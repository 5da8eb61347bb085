//! Computes exponential backoff with full jitter: each wait is drawn evenly from zero to the current ceiling,
//! which doubles up to a cap. A fleet that loses its control plane at one moment therefore spreads its attempts
//! over the whole interval, also at the cap.

use std::time::Duration;

use crate::runtime::duration::scaled;

/// The state of one retry sequence. Call [`Backoff::reset`] after a success.
#[derive(Clone, Debug)]
pub struct Backoff {
    base: Duration,
    cap: Duration,
    attempt: u32,
}

impl Backoff {
    /// Ceilings run `base`, `2 × base`, `4 × base`, … and stop at `cap`.
    pub const fn new(base: Duration, cap: Duration) -> Self {
        Self::after(0, base, cap)
    }

    /// Like [`Backoff::new`], after `attempt` attempts.
    pub const fn after(attempt: u32, base: Duration, cap: Duration) -> Self {
        Self { base, cap, attempt }
    }

    /// Changes the longest ceiling. The ceilings continue to double.
    pub const fn set_cap(&mut self, cap: Duration) {
        self.cap = cap;
    }

    /// Returns the wait before the next attempt.
    pub fn next_wait(&mut self) -> Duration {
        let ceiling = self.ceiling();
        self.attempt = self.attempt.saturating_add(1);
        scaled(ceiling, fastrand::f64())
    }

    /// Returns the longest possible next wait.
    pub fn ceiling(&self) -> Duration {
        let factor = 1u32.checked_shl(self.attempt).unwrap_or(u32::MAX);
        self.base.saturating_mul(factor).min(self.cap)
    }

    /// Starts again at `base`.
    pub fn reset(&mut self) {
        self.attempt = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ceilings_double_up_to_the_cap_and_start_again_after_a_reset() {
        let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(1));
        let mut ceilings = Vec::new();
        for _ in 0..40 {
            let ceiling = backoff.ceiling();
            assert!(backoff.next_wait() <= ceiling);
            ceilings.push(ceiling.as_millis());
        }
        assert_eq!(ceilings[..6], [100, 200, 400, 800, 1000, 1000]);
        assert_eq!(ceilings[39], 1000);
        backoff.set_cap(Duration::from_secs(30));
        assert_eq!(backoff.ceiling(), Duration::from_secs(30));
        backoff.reset();
        assert_eq!(backoff.ceiling(), Duration::from_millis(100));
    }
}
