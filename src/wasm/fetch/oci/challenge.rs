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
    let values = headers.get_all(header::WWW_AUTHENTICATE).iter();
    let texts = values.filter_map(|value| value.to_str().ok());
    let found: Vec<_> = texts.flat_map(parse).collect();
    let bearer = found.iter().find(|one| **one != Challenge::Basic);
    bearer.or(found.first()).cloned()
}

/// Reads `scheme key="value", key=value, scheme …`. Other schemes are left out.
fn parse(header: &str) -> Vec<Challenge> {
    let (mut found, mut rest) = (Vec::new(), header);
    while !rest.is_empty() {
        let end = rest.find([' ', ',', '=', '"']).unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        if let Some(value) = after.strip_prefix('=') {
            let (value, after) = parameter(value);
            set(found.last_mut(), word, value);
            rest = after;
        } else {
            let scheme = word.to_ascii_lowercase();
            match scheme.as_str() {
                "basic" => found.push(Challenge::Basic),
                "bearer" => found.push(Challenge::Bearer {
                    realm: String::new(),
                    service: None,
                    scope: None,
                }),
                _ => {}
            }
            rest = after;
        }
        rest = rest.trim_start_matches([' ', ',', '=', '"']);
    }
    found
}

/// The value of a parameter, quoted or not, and what follows.
fn parameter(text: &str) -> (&str, &str) {
    match text.strip_prefix('"') {
        Some(quoted) => quoted.split_once('"').unwrap_or((quoted, "")),
        None => text.split_at(text.find([',', ' ']).unwrap_or(text.len())),
    }
}

fn set(challenge: Option<&mut Challenge>, name: &str, value: &str) {
    if let Some(Challenge::Bearer {
        realm,
        service,
        scope,
    }) = challenge
    {
        match name.to_ascii_lowercase().as_str() {
            "realm" => *realm = value.to_owned(),
            "service" => *service = Some(value.to_owned()),
            "scope" => *scope = Some(value.to_owned()),
            _ => {}
        }
    }
}

/// The token server of a registry at `base`, if it may be asked: it could be any that the registry
/// names, inside the cluster too. One on the registry's own host may.
pub(super) fn token_server(realm: &str, base: &Uri) -> Result<Uri, String> {
    let refused = |problem: &str| format!("rejected unsafe bearer realm: {problem}");
    let uri: Uri = realm.parse().map_err(|_| refused("it is no URL"))?;
    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
    match uri.scheme_str() {
        Some("https") => {}
        Some("http") if base.scheme_str() == Some("http") => {}
        scheme => {
            let scheme = scheme.unwrap_or_default();
            return Err(refused(&format!("realm scheme {scheme:?} not allowed")));
        }
    }
    if host.is_empty() {
        return Err(refused("it has no host"));
    }
    if uri.host() == base.host() {
        return Ok(uri);
    }
    let names_inside = ["metadata.google.internal", "localhost"];
    match address::is_private(host) || names_inside.contains(&host) {
        true => Err(refused(&format!("host {host} not allowed"))),
        false => Ok(uri),
    }
}

#[cfg(test)]
mod tests {
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
                &["bearer Realm=https://a , service=s"],
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
            (&["Bearer realm=\"unclosed"], bearer("unclosed", None, None)),
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
}
