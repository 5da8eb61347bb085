//! Durations, sizes and type names in the form people read.

/// A duration in its two largest units: `2 h 5 min`, `3.2 s`, `40 ms`.
pub(super) fn duration(seconds: f64) -> String {
    const UNITS: [(u64, &str); 4] = [(86_400, "d"), (3_600, "h"), (60, "min"), (1, "s")];
    if seconds < 1.0 {
        return format!("{:.0} ms", seconds.max(0.0) * 1e3);
    }
    if seconds < 10.0 {
        return format!("{seconds:.1} s");
    }
    let seconds = seconds as u64;
    let largest = UNITS.iter().position(|(length, _)| seconds >= *length);
    let at = largest.unwrap_or_default();
    let (length, unit) = UNITS[at];
    let mut text = format!("{} {unit}", seconds / length);
    // A second unit follows only directly: `1 d 5 s` is `1 d`.
    if let Some((next, unit)) = UNITS.get(at + 1)
        && let rest @ 1.. = seconds % length / next
    {
        text += &format!(" {rest} {unit}");
    }
    text
}

pub(super) fn size(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{:.1} KiB", bytes as f64 / 1024.0),
        _ => format!("{:.1} MiB", bytes as f64 / 1_048_576.0),
    }
}

/// `1 type`, `2 types`.
pub(super) fn counted(count: usize, noun: &str) -> String {
    let s = if count == 1 { "" } else { "s" };
    format!("{count} {noun}{s}")
}

/// The abbreviation of a resource type's discovery service, and the type's last name.
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
            assert_eq!(duration(seconds), expected, "{seconds}");
        }
    }

    #[test]
    fn sizes_have_binary_units() {
        for (bytes, expected) in [
            (0, "0 B"),
            (1_023, "1023 B"),
            (1_536, "1.5 KiB"),
            (3 << 20, "3.0 MiB"),
        ] {
            assert_eq!(size(bytes), expected);
        }
    }

    #[test]
    fn known_types_have_the_abbreviation_of_their_discovery_service() {
        let known = "type.googleapis.com/envoy.config.cluster.v3.Cluster";
        assert_eq!(resource_type(known), (Some("CDS"), "Cluster"));
        assert_eq!(resource_type("odd/one"), (None, "one"));
        assert_eq!(resource_type(""), (None, ""));
    }
}
