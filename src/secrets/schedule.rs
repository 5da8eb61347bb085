//! Computes when to renew, and how long to wait after a failure.
//!
//! The functions only calculate with times of the wall clock. A certificate is renewed when the grace part of its
//! lifetime is left, with a little jitter, so that the pods of a mesh do not renew at the same time.

use std::ops::RangeInclusive;
use std::time::{Duration, SystemTime};

use crate::runtime::backoff::Backoff;
use crate::runtime::duration::scaled;

/// The upper bound of the first wait after a failure.
const RETRY_BASE: Duration = Duration::from_millis(500);

/// The shortest time between two attempts.
pub(super) const MIN_WAIT: Duration = Duration::from_millis(100);

/// The longest time over which the agents of a mesh spread requests. It is short because an operator who rotates roots
/// removes the old root soon after, and a certificate that the old one has signed is then refused.
const MAX_SPREAD: Duration = Duration::from_secs(60);

/// A certificate that ends within this time is requested without delay.
const URGENT: Duration = Duration::from_secs(30);

/// The longest lifetime assumed for a certificate that has already expired when it is issued.
pub(super) const MAX_ASSUMED_LIFETIME: Duration = Duration::from_secs(120);

/// The upper bound of the waits while the current certificate is valid for a long time.
const RETRY_CAP: Duration = Duration::from_secs(60);

/// The upper bound of the waits without a certificate. Envoy waits for one, so the agent must soon notice that the
/// authority is reachable again.
const RETRY_CAP_WITHOUT_CERTIFICATE: Duration = Duration::from_secs(5);

/// Returns the seconds from `start` to `end`, negative if the end is earlier.
pub(super) fn signed_seconds(end: SystemTime, start: SystemTime) -> f64 {
    match end.duration_since(start) {
        Ok(left) => left.as_secs_f64(),
        Err(error) => -error.duration().as_secs_f64(),
    }
}

/// Returns the time from `now` to `end`, zero if the end has passed.
pub(super) fn time_left(end: SystemTime, now: SystemTime) -> Duration {
    end.duration_since(now).unwrap_or_default()
}

/// Moves `ratio` by up to `jitter` in either direction; `random` lies in 0 to 1.
pub(super) fn jittered(ratio: f64, jitter: f64, random: f64) -> f64 {
    (ratio + jitter * (random * 2.0 - 1.0)).clamp(0.0, 1.0)
}

/// Returns the time over which agents spread the requests that an event makes due in the whole mesh, when the
/// current certificate is valid for `remaining`: a quarter of that time, at most [`MAX_SPREAD`]. Returns zero if a
/// request must not wait: without a certificate, and for one that ends soon.
pub(super) fn spread(remaining: Option<Duration>) -> Duration {
    scaled(remaining.filter(|left| *left > URGENT).unwrap_or_default(), 0.25).min(MAX_SPREAD)
}

/// Returns the moment when `ratio` of the lifetime between `created` and `not_after` is left.
///
/// The pause after `created` is at least a tenth of the lifetime, clamped to `least_pause`. Otherwise the
/// authority would sign without a pause if this clock is ahead of its own, or the ratio is 1.
pub(super) fn renewal_time(
    created: SystemTime,
    not_after: SystemTime,
    ratio: f64,
    least_pause: &RangeInclusive<Duration>,
) -> SystemTime {
    let lifetime = time_left(not_after, created);
    let used = lifetime.as_secs_f64() * (1.0 - ratio);
    // A ratio that is not a number gives no duration; half of the lifetime is the default.
    let wait = Duration::try_from_secs_f64(used).unwrap_or(scaled(lifetime, 0.5));
    let floor = scaled(lifetime, 0.1).max(*least_pause.start()).min(*least_pause.end());
    created.checked_add(wait.max(floor)).unwrap_or(not_after)
}

/// Returns the longest wait after a failure, when the current certificate is valid for `remaining`: the
/// nearer its end, the shorter.
fn retry_cap(remaining: Option<Duration>) -> Duration {
    remaining.map_or(RETRY_CAP_WITHOUT_CERTIFICATE, |left| {
        scaled(left, 0.1).clamp(RETRY_BASE, RETRY_CAP)
    })
}

/// Counts a failure and returns the wait after it, when the certificate is valid for `remaining`. The attempts that
/// the authority gets (`was_sent`) are spread until the certificate ends soon, because it fails and recovers for the
/// whole mesh: after the sum of two even draws, n agents make n requests on average in the time of [`spread`].
pub(super) fn next_wait(
    failures: &mut u32,
    was_sent: bool,
    remaining: Option<Duration>,
) -> Duration {
    let spread = spread(remaining);
    let until_urgent = remaining.map(|it| it.saturating_sub(URGENT));
    let wait = if was_sent && !spread.is_zero() {
        let wait = scaled(spread, fastrand::f64() + fastrand::f64());
        wait.min(until_urgent.unwrap_or_default())
    } else {
        Backoff::after(*failures, RETRY_BASE, retry_cap(remaining)).next_wait()
    };
    *failures = failures.saturating_add(1);
    wait.max(MIN_WAIT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::secrets::MIN_PAUSE;

    const HOUR: Duration = Duration::from_secs(3600);
    const MINUTE: Duration = Duration::from_secs(60);

    fn delay(ratio: f64, life: Duration) -> Duration {
        let created = SystemTime::UNIX_EPOCH + HOUR;
        renewal_time(created, created + life, ratio, &MIN_PAUSE)
            .duration_since(created)
            .expect("is not before the creation")
    }

    #[test]
    fn the_renewal_is_due_when_the_grace_ratio_of_the_lifetime_remains() {
        for (ratio, life, expected) in [
            (0.5, 24 * HOUR, 12 * HOUR),
            (0.25, HOUR, 45 * MINUTE),
            (0.75, HOUR, 15 * MINUTE),
            (0.0, HOUR, HOUR),
            (f64::NAN, HOUR, 30 * MINUTE),
        ] {
            assert_eq!(delay(ratio, life), expected, "{ratio} of {life:?}");
        }
    }

    #[test]
    fn never_renews_without_a_pause() {
        for (ratio, life, expected) in [
            (1.0, HOUR, Duration::from_secs(5)),
            (1.0, Duration::from_secs(20), Duration::from_secs(2)),
            (0.5, Duration::from_millis(1), Duration::from_secs(1)),
            (0.5, Duration::ZERO, Duration::from_secs(1)),
        ] {
            assert_eq!(delay(ratio, life), expected, "{ratio} of {life:?}");
        }
        let created = SystemTime::UNIX_EPOCH + HOUR;
        let expired = renewal_time(created, SystemTime::UNIX_EPOCH, 0.5, &MIN_PAUSE);
        assert_eq!(expired, created + Duration::from_secs(1));
    }

    #[test]
    fn jitter_moves_the_renewal_within_its_bounds() {
        for (ratio, jitter, earliest, latest) in [
            (0.5, 0.01, 0.49, 0.51),
            (0.5, 0.5, 0.0, 1.0),
            (0.0, 0.5, 0.5, 1.0),
            (1.0, 0.5, 0.0, 0.5),
        ] {
            let day = 24 * HOUR;
            let ends = [
                delay(jittered(ratio, jitter, 1.0), day),
                delay(jittered(ratio, jitter, 0.0), day),
            ];
            let floor = Duration::from_secs(5);
            let expected = [earliest, latest].map(|part| scaled(day, part).max(floor));
            for (found, expected) in ends.into_iter().zip(expected) {
                let off = found.abs_diff(expected);
                assert!(off < Duration::from_millis(1), "{found:?} {expected:?}");
            }
        }
    }

    #[test]
    fn requests_of_a_mesh_spread_over_a_quarter_of_remaining_lifetime() {
        for (remaining, expected) in [
            (Some(24 * HOUR), 60.0),
            (Some(4 * MINUTE), 60.0),
            (Some(2 * MINUTE), 30.0),
            (Some(Duration::from_secs(31)), 7.75),
            (Some(Duration::from_secs(30)), 0.0),
            (None, 0.0),
        ] {
            assert_eq!(spread(remaining).as_secs_f64(), expected, "{remaining:?}");
        }
    }

    #[test]
    fn requests_of_a_thousand_agents_are_spread_over_the_window_promised() {
        let (day, jitter) = (24 * HOUR, 0.01);
        let mut tenths = [0; 10];
        for _ in 0..1000 {
            let due = delay(jittered(0.5, jitter, fastrand::f64()), day);
            let earliest = scaled(day, 0.5 - jitter);
            let part = (due - earliest).div_duration_f64(scaled(day, 2.0 * jitter));
            tenths[(part * 10.0) as usize] += 1;
        }
        assert!(tenths.iter().all(|due| (50..150).contains(due)), "{tenths:?}");
    }

    #[test]
    fn retries_become_more_frequent_towards_the_expiry() {
        for (remaining, expected) in [
            (None, Duration::from_secs(5)),
            (Some(12 * HOUR), Duration::from_secs(60)),
            (Some(5 * MINUTE), Duration::from_secs(30)),
            (Some(Duration::from_secs(20)), Duration::from_secs(2)),
            (Some(Duration::ZERO), Duration::from_millis(500)),
        ] {
            assert_eq!(retry_cap(remaining), expected, "{remaining:?}");
        }
    }
}
