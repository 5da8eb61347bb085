//! Sizes and type names in the form people read.

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
