//! Numbers and names as people say them.
//!
//! Does not know HTML.

/// A time in its two largest units: `2 h 5 min`, `3.2 s`, `40 ms`.
pub(super) fn span(seconds: f64) -> String {
    const UNITS: [(u64, &str); 4] = [(86_400, "d"), (3_600, "h"), (60, "min"), (1, "s")];
    if seconds < 1.0 {
        return format!("{:.0} ms", seconds.max(0.0) * 1e3);
    }
    if seconds < 10.0 {
        return format!("{seconds:.1} s");
    }
    let whole = seconds as u64;
    let fits = |(length, _): &(u64, &str)| whole >= *length;
    let first = UNITS.iter().position(fits).unwrap_or(UNITS.len() - 1);
    let (length, unit) = UNITS[first];
    let text = format!("{} {unit}", whole / length);
    match UNITS
        .get(first + 1)
        .map(|(next, unit)| (whole % length / next, unit))
    {
        Some((more, unit)) if more > 0 => format!("{text} {more} {unit}"),
        _ => text,
    }
}

/// An amount of memory or of data.
pub(super) fn size(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{:.1} KiB", bytes as f64 / 1024.0),
        _ => format!("{:.1} MiB", bytes as f64 / 1_048_576.0),
    }
}

/// How many there are of a thing.
pub(super) fn counted(count: usize, thing: &str) -> String {
    let s = if count == 1 { "" } else { "s" };
    format!("{count} {thing}{s}")
}

/// The moment of a log line or of a snapshot, without what programs need: `2026-01-31 12:00:59`.
pub(super) fn moment(rfc3339: &str) -> String {
    let to_the_second = rfc3339.get(..19).unwrap_or(rfc3339);
    to_the_second.replace('T', " ")
}

/// What people call a type of resources, and its last name.
pub(super) fn resource_type(url: &str) -> (Option<&'static str>, &str) {
    let name = url.rsplit(['.', '/']).next().unwrap_or(url);
    let short = match name {
        "Cluster" => Some("CDS"),
        "ClusterLoadAssignment" => Some("EDS"),
        "Listener" => Some("LDS"),
        "RouteConfiguration" => Some("RDS"),
        "ScopedRouteConfiguration" => Some("SRDS"),
        "Secret" => Some("SDS"),
        "TypedExtensionConfig" => Some("ECDS"),
        "NameTable" => Some("NDS"),
        "ProxyConfig" => Some("PCDS"),
        _ => None,
    };
    (short, name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_said_in_their_two_largest_units() {
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
            assert_eq!(span(seconds), expected, "{seconds}");
        }
    }

    #[test]
    fn sizes_and_moments_are_short() {
        for (bytes, expected) in [
            (0, "0 B"),
            (1_023, "1023 B"),
            (1_536, "1.5 KiB"),
            (3 << 20, "3.0 MiB"),
        ] {
            assert_eq!(size(bytes), expected);
        }
        let moments = [
            ("2026-01-31T12:00:59Z", "2026-01-31 12:00:59"),
            ("2026-01-31T12:00:59.123456Z", "2026-01-31 12:00:59"),
            ("short", "short"),
        ];
        for (moment_found, expected) in moments {
            assert_eq!(moment(moment_found), expected);
        }
    }

    #[test]
    fn known_types_have_the_name_people_know() {
        let known = "type.googleapis.com/envoy.config.cluster.v3.Cluster";
        assert_eq!(resource_type(known), (Some("CDS"), "Cluster"));
        assert_eq!(resource_type("odd/one"), (None, "one"));
        assert_eq!(resource_type(""), (None, ""));
    }
}
