//! Parses durations in Go's syntax (`100ms`, `1h30m`, `1.5s`), and writes them in the form of protobuf's JSON
//! or rounded, for people. Negative durations are rejected.

use std::time::Duration;

/// Parses a duration in Go's syntax. Returns None for anything else.
pub fn parse(text: &str) -> Option<Duration> {
    let mut rest = text.strip_prefix('+').unwrap_or(text);
    if rest == "0" {
        return Some(Duration::ZERO);
    }
    let mut total = Duration::ZERO;
    loop {
        let (part, after) = leading_part(rest)?;
        total = total.checked_add(part)?;
        if after.is_empty() {
            return Some(total);
        }
        rest = after;
    }
}

/// Formats a duration for protobuf's JSON: seconds with 0, 3, 6 or 9 decimals.
pub fn seconds(duration: Duration) -> String {
    // Longer durations than protobuf's are never parsed.
    prost_types::Duration::try_from(duration).unwrap_or_default().to_string()
}

/// Multiplies a duration by a factor. Returns zero if the product is negative or not a number, and the longest
/// duration if it does not fit.
pub fn scaled(duration: Duration, factor: f64) -> Duration {
    let seconds = (duration.as_secs_f64() * factor).max(0.0);
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}

/// Formats a duration in its two largest units: `2 h 5 min`, `3.2 s`, `40 ms`.
pub fn rounded(duration: Duration) -> String {
    rounded_seconds(duration.as_secs_f64())
}

/// Like [`rounded`], for seconds.
pub fn rounded_seconds(seconds: f64) -> String {
    const UNITS: [(u64, &str); 4] = [(86_400, "d"), (3_600, "h"), (60, "min"), (1, "s")];
    if seconds < 1.0 {
        return format!("{:.0} ms", seconds.max(0.0) * 1e3);
    }
    if seconds < 10.0 {
        return format!("{seconds:.1} s");
    }
    let seconds = seconds as u64;
    let index = UNITS.iter().position(|(length, _)| seconds >= *length).unwrap_or_default();
    let (length, unit) = UNITS[index];
    let mut text = format!("{} {unit}", seconds / length);
    // The second unit is the next smaller one: `1 d 5 s` becomes `1 d`.
    if let Some((next, unit)) = UNITS.get(index + 1)
        && let rest @ 1.. = seconds % length / next
    {
        text += &format!(" {rest} {unit}");
    }
    text
}

/// Splits off the first number with its unit. Returns the rest, too.
fn leading_part(text: &str) -> Option<(Duration, &str)> {
    let (number, rest) = text.split_at(text.find(|c: char| !c.is_ascii_digit() && c != '.')?);
    let unit_end = rest.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(rest.len());
    let (unit, rest) = rest.split_at(unit_end);
    let nanos_per_unit: f64 = match unit {
        "ns" => 1.0,
        "us" | "µs" | "μs" => 1e3,
        "ms" => 1e6,
        "s" => 1e9,
        "m" => 60e9,
        "h" => 3600e9,
        _ => return None,
    };
    let nanos = (number.parse::<f64>().ok()? * nanos_per_unit).round();
    // Go's longest duration is 2^63 nanoseconds.
    if nanos < 9.223_372_036_854_776e18 {
        Some((Duration::from_nanos(nanos as u64), rest))
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_times_any_factor_is_a_duration() {
        let hour = Duration::from_secs(3600);
        for (duration, factor, expected) in [
            (hour, 0.1, Duration::from_secs(360)),
            (hour, 1.5, Duration::from_secs(5400)),
            (hour, -1.0, Duration::ZERO),
            (hour, f64::NAN, Duration::ZERO),
            (hour, f64::INFINITY, Duration::MAX),
            (Duration::MAX, 1.0, Duration::MAX),
            (Duration::MAX, 2.0, Duration::MAX),
        ] {
            assert_eq!(scaled(duration, factor), expected, "{duration:?} times {factor}");
        }
    }

    #[test]
    fn durations_have_their_two_largest_units() {
        for (seconds, expected) in [
            (-3.0, "0 ms"),
            (0.0, "0 ms"),
            (0.0401, "40 ms"),
            (3.25, "3.2 s"),
            (42.9, "42 s"),
            (60.0, "1 min"),
            (192.0, "3 min 12 s"),
            (3_600.0, "1 h"),
            (3_610.0, "1 h"),
            (86_399.0, "23 h 59 min"),
            (86_400.0 * 3650.0 + 7_200.0, "3650 d 2 h"),
        ] {
            assert_eq!(rounded_seconds(seconds), expected, "{seconds}");
        }
    }

    #[test]
    fn reads_what_go_writes_and_nothing_else() {
        for (text, millis) in [
            ("0", 0),
            ("0s", 0),
            ("100ms", 100),
            ("1.5s", 1_500),
            ("1h30m", 5_400_000),
            ("+5s", 5_000),
            (".5s", 500),
        ] {
            assert_eq!(parse(text), Some(Duration::from_millis(millis)), "{text}");
        }
        for text in ["", "5", "s", "-5s", "5 s", "5s ", "5x", "1m30", "99999999h", ".s", "1.2.3s"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    #[test]
    fn writes_seconds_with_as_few_decimals_as_needed() {
        for (nanos, text) in [
            (45_000_000_000, "45s"),
            (100_000_000, "0.100s"),
            (1_000, "0.000001s"),
            (1, "0.000000001s"),
        ] {
            assert_eq!(seconds(Duration::from_nanos(nanos)), text);
        }
    }
}
