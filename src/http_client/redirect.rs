//! Follows the Location header of an answer.

use http::{HeaderValue, Request, Response, Uri, header};

use super::{Error, host_and_port};

/// Which redirects are followed. Only requests without a body may be redirected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Redirects {
    /// The redirect is the answer.
    Return,
    /// Those to the same host are followed; another one is the answer.
    SameHost,
    Follow,
}

impl Redirects {
    /// Points `request` to where `response` redirects it. False if it does not.
    pub(super) fn follow<T, B>(
        self,
        request: &mut Request<T>,
        response: &Response<B>,
    ) -> Result<bool, Error> {
        let Some(location) = response.headers().get(header::LOCATION) else {
            return Ok(false);
        };
        if self == Self::Return || !matches!(response.status().as_u16(), 301..=303 | 307 | 308) {
            return Ok(false);
        }
        let Some((next, is_absolute)) = resolve(request.uri(), location) else {
            return Err(Error::Redirect {
                authority: host_and_port(request.uri()),
                found: String::from_utf8_lossy(location.as_bytes()).into_owned(),
            });
        };
        if self == Self::SameHost && next.host() != request.uri().host() {
            return Ok(false);
        }
        *request.uri_mut() = next;
        if is_absolute {
            request.headers_mut().remove(header::HOST);
        }
        Ok(true)
    }
}

/// Reads a Location header relative to `base`, and whether it names a host.
fn resolve(base: &Uri, location: &HeaderValue) -> Option<(Uri, bool)> {
    let location = location.to_str().ok()?.split('#').next()?;
    let (scheme, authority) = (base.scheme_str()?, base.authority()?);
    if let Some(rest) = location.strip_prefix("//") {
        return Some((format!("{scheme}://{rest}").parse().ok()?, true));
    }
    if location.contains("://") && !location.starts_with(['/', '?', '.']) {
        let uri: Uri = location.parse().ok()?;
        let is_known = matches!(uri.scheme_str(), Some("http" | "https"));
        return is_known.then_some((uri, true));
    }
    let path = base.path();
    let path = match location {
        "" => base.path_and_query()?.to_string(),
        absolute if absolute.starts_with('/') => absolute.to_owned(),
        query if query.starts_with('?') => format!("{path}{query}"),
        relative => {
            let (directory, _) = path.rsplit_once('/')?;
            format!("{directory}/{relative}")
        }
    };
    let uri = format!("{scheme}://{authority}{path}").parse().ok()?;
    Some((uri, false))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_location_is_relative_to_the_request() {
        for (location, expected) in [
            ("/b?q", Some("http://[::1]:80/b?q")),
            ("b", Some("http://[::1]:80/a/b")),
            ("?q", Some("http://[::1]:80/a/x?q")),
            ("", Some("http://[::1]:80/a/x?old")),
            ("//h/y#part", Some("http://h/y")),
            ("http://127.0.0.1:2", Some("http://127.0.0.1:2/")),
            ("https://h:8/", Some("https://h:8/")),
            ("ftp://h/", None),
            ("http://", None),
            ("http://a b/", None),
            ("/a b", None),
        ] {
            let base: Uri = "http://[::1]:80/a/x?old".parse().expect("an address");
            let location = HeaderValue::from_str(location).expect("a value");
            let found = resolve(&base, &location).map(|(uri, _)| uri.to_string());
            assert_eq!(found.as_deref(), expected, "{location:?}");
        }
    }
}
