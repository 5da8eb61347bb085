//! Reads `WWW-Authenticate` headers, and decides which token servers are asked.

use http::{HeaderMap, Uri, header};

use crate::address;

/// What a registry asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Challenge {
    Basic,
    /// A token of the server at `realm`.
    Bearer {
        realm: String,
        service: Option<String>,
        scope: Option<String>,
    },
}

/// The challenge of an answer; Bearer comes before Basic.
pub(super) fn challenge(headers: &HeaderMap) -> Option<Challenge> {
    let mut asks_for_basic = false;
    for value in headers.get_all(header::WWW_AUTHENTICATE) {
        let text = value.to_str().unwrap_or_default();
        let lower_case = text.to_ascii_lowercase();
        if let Some(begin) = lower_case.find("bearer ") {
            let named = |name| parameter(&text[begin..], name);
            return Some(Challenge::Bearer {
                realm: named("realm").unwrap_or_default(),
                service: named("service"),
                scope: named("scope"),
            });
        }
        asks_for_basic |= lower_case.contains("basic");
    }
    asks_for_basic.then_some(Challenge::Basic)
}

/// The value of a quoted parameter.
fn parameter(challenge: &str, name: &str) -> Option<String> {
    let (_, rest) = challenge.split_once(&format!("{name}=\""))?;
    Some(rest.split_once('"')?.0.to_owned())
}

/// The token server of a registry at `base`, if it may be asked: it could be any that the registry
/// names, inside the cluster too. One on the registry's own host may.
pub(super) fn token_server(realm: &str, base: &Uri) -> Result<Uri, String> {
    let refused = |problem: &str| Err(format!("rejected unsafe bearer realm: {problem}"));
    let uri: Uri = realm.parse().unwrap_or_default();
    let (scheme, host) = (uri.scheme_str(), uri.host().unwrap_or_default());
    let is_allowed =
        scheme == Some("https") || scheme == Some("http") && base.scheme() == uri.scheme();
    let name = host.trim_end_matches('.').to_ascii_lowercase();
    let names_inside = ["metadata.google.internal", "localhost"];
    if !is_allowed {
        let scheme = scheme.unwrap_or_default();
        refused(&format!("realm scheme {scheme:?} not allowed"))
    } else if uri.host() != base.host()
        && (address::is_private(host) || names_inside.contains(&name.as_str()))
    {
        refused(&format!("host {host} not allowed"))
    } else {
        Ok(uri)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bearer(realm: &str, service: Option<&str>, scope: Option<&str>) -> Option<Challenge> {
        let [service, scope] = [service, scope].map(|text| text.map(str::to_owned));
        let realm = realm.to_owned();
        Some(Challenge::Bearer {
            realm,
            service,
            scope,
        })
    }

    #[test]
    fn challenges_of_all_forms_are_read() {
        for (headers, expected) in [
            (&["Basic realm=\"Registry\""][..], Some(Challenge::Basic)),
            (
                &["Bearer realm=\"https://a/b\",service=\"s\",scope=\"x:y:pull,push\""],
                bearer("https://a/b", Some("s"), Some("x:y:pull,push")),
            ),
            (
                &["bearer  realm=\"https://a\" , service=\"s\""],
                bearer("https://a", Some("s"), None),
            ),
            (
                &["Basic realm=\"r\"", "Bearer realm=\"https://a\""],
                bearer("https://a", None, None),
            ),
            (
                &["Negotiate abc==, Basic realm=\"r\", Bearer realm=\"https://a\""],
                bearer("https://a", None, None),
            ),
            (&["Digest realm=\"r\""], None),
            (&["Bearer realm=\"unclosed"], bearer("", None, None)),
            (&["Bearer realm=https://a"], bearer("", None, None)),
            (&[", = \" ,,"], None),
            (&[""], None),
            (&[], None),
        ] {
            let mut map = HeaderMap::new();
            for value in headers {
                map.append(header::WWW_AUTHENTICATE, value.parse().expect("a header"));
            }
            assert_eq!(challenge(&map), expected, "{headers:?}");
        }
    }

    #[test]
    fn token_servers_inside_are_not_asked() {
        for (realm, base, is_allowed) in [
            ("https://auth.io/token", "https://r.io/", true),
            ("https://r.io/token?a=b", "https://r.io/", true),
            ("http://auth.io/token", "http://r.io/", true),
            ("http://auth.io/token", "https://r.io/", false),
            ("https://8.8.8.8/", "https://r.io/", true),
            ("https://10.0.0.1/", "https://10.0.0.1:5000/", true),
            ("https://localhost/", "https://localhost:5000/", true),
            ("https://10.0.0.2/", "https://10.0.0.1:5000/", false),
            ("https://localhost/", "https://r.io/", false),
            ("https://LocalHost./", "https://r.io/", false),
            ("https://127.0.0.1/", "https://r.io/", false),
            ("https://[::1]/", "https://r.io/", false),
            ("https://[::ffff:10.0.0.1]/", "https://r.io/", false),
            ("https://[fd00::1]/", "https://r.io/", false),
            ("https://169.254.169.254/", "https://r.io/", false),
            ("https://metadata.google.internal/", "https://r.io/", false),
            ("file:///etc/passwd", "https://r.io/", false),
            ("ftp://auth.io/", "https://r.io/", false),
            ("/token", "https://r.io/", false),
            ("", "https://r.io/", false),
            ("https://", "https://r.io/", false),
        ] {
            let found = token_server(realm, &base.parse().expect("a URL"));
            assert_eq!(found.is_ok(), is_allowed, "{realm}: {found:?}");
        }
    }

    proptest! {
        #[test]
        fn any_challenge_leads_to_a_server_outside_or_to_none(
            text in "(Bearer |basic |realm=|\"|https?://|10\\.0\\.0\\.1|localhost|\\[::1\\]|[ -~]){0,12}",
            host in "https?://(10\\.0\\.0\\.1|localhost|\\[::1\\]|[!-~]{0,8})/[!-~]{0,4}",
        ) {
            for text in [text, format!("Bearer realm=\"{host}\"")] {
                let mut headers = HeaderMap::new();
                let value = text.parse().expect("a header");
                headers.insert(header::WWW_AUTHENTICATE, value);
                let base = Uri::from_static("https://r.io/");
                if let Some(Challenge::Bearer { realm, .. }) = challenge(&headers)
                    && let Ok(server) = token_server(&realm, &base)
                {
                    let host = server.host().unwrap_or_default();
                    prop_assert!(!address::is_private(host) && host != "localhost", "{}", text);
                    prop_assert_eq!(server.scheme_str(), Some("https"));
                }
            }
        }
    }
}
