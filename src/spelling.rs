//! Finds the name that a misspelt one most likely stands for.

/// The Jaro-Winkler similarity, of at most 1, from which on two names are alike.
const MIN_SIMILARITY: f64 = 0.85;

/// Suggests the nearest of the `known` names, with `prefix` before it, for an error about a misspelt name. Empty if no
/// name is alike.
pub(crate) fn hint(
    name: &str,
    prefix: &str,
    known: impl IntoIterator<Item = impl AsRef<str>>,
) -> String {
    let lowercase = name.to_lowercase();
    known
        .into_iter()
        .map(|known| (strsim::jaro_winkler(&lowercase, &known.as_ref().to_lowercase()), known))
        .filter(|(similarity, _)| *similarity >= MIN_SIMILARITY)
        .max_by(|(one, _), (other, _)| one.total_cmp(other))
        .map_or_else(String::new, |(_, known)| format!(" ({prefix}{}?)", known.as_ref()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_name_has_the_nearest_one_and_another_name_has_none() {
        let known = [
            "proxy",
            "request",
            "version",
            "support-bundle",
            "istio-iptables",
            "domain",
            "concurrency",
            "output",
            "discoveryAddress",
            "statusPort",
            "HOT_RESTART",
            "KEEP_CONFIG",
            "DNS_CACHE_MAX_TTL",
        ];
        for (name, expected) in [
            ("proxi", "proxy"),
            ("prox", "proxy"),
            ("Proxy", "proxy"),
            ("reqeust", "request"),
            ("vers", "version"),
            ("bundle-support", ""),
            ("support", "support-bundle"),
            ("iptables", ""),
            ("istio", "istio-iptables"),
            ("domian", "domain"),
            ("concurency", "concurrency"),
            ("outptu", "output"),
            ("discoveryAdress", "discoveryAddress"),
            ("statusport", "statusPort"),
            ("HOTRESTART", "HOT_RESTART"),
            ("KEEP_CONFIGURATION", "KEEP_CONFIG"),
            ("DNS_CACHE_TTL", "DNS_CACHE_MAX_TTL"),
            ("frobnicate", ""),
            ("old", ""),
            ("", ""),
        ] {
            let expected = match expected {
                "" => String::new(),
                expected => format!(" (--{expected}?)"),
            };
            assert_eq!(hint(name, "--", known), expected, "{name}");
        }
    }
}
