//! Canonical paths: requests with doubled slashes or dot segments are redirected, as in Go, so that
//! no rule for a path can be bypassed. Percent encoding is not decoded.

use ::http::Uri;

/// Prefixes that end in a slash.
const TREES: [&str; 3] = ["/app-health", "/app-lifecycle", "/debug"];

/// The canonical path and the query, to redirect to. None if the path is canonical.
pub(super) fn cleaned(uri: &Uri) -> Option<String> {
    let path = uri.path();
    let mut clean = clean(path);
    if TREES.contains(&clean.as_str()) {
        clean.push('/');
    }
    if clean == path {
        return None;
    }
    Some(match uri.query() {
        Some(query) => format!("{clean}?{query}"),
        None => clean,
    })
}

fn clean(path: &str) -> String {
    let mut kept = Vec::new();
    for segment in path.split('/') {
        match segment {
            "" | "." => {}
            ".." => {
                kept.pop();
            }
            other => kept.push(other),
        }
    }
    let is_tree = path.ends_with('/') && !kept.is_empty();
    format!("/{}{}", kept.join("/"), if is_tree { "/" } else { "" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_paths_are_redirected_to_the_canonical_one() {
        for (path, expected) in [
            ("/healthz/ready", None),
            ("/", None),
            ("/app-health/", None),
            ("/app-health", Some("/app-health/")),
            ("/app-lifecycle?a", Some("/app-lifecycle/?a")),
            ("/debug", Some("/debug/")),
            ("/debug/", None),
            ("//debug/envoy", Some("/debug/envoy")),
            ("/debug/../drain?x=%2e", Some("/drain?x=%2e")),
            ("/./stats//prometheus", Some("/stats/prometheus")),
            ("/../..", Some("/")),
            ("/drain//", Some("/drain/")),
        ] {
            let uri = path.parse().expect("a path");
            assert_eq!(cleaned(&uri).as_deref(), expected, "{path}");
        }
    }
}
