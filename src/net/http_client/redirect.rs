//! Follows the Location header of a response.

use http::{HeaderValue, Method, Request, Response, Uri, header};

use super::{Error, host_and_port};
use crate::net::address;
use crate::net::request_path::escaped;

/// The redirects that are followed. Redirects of requests other than GET are always returned.
/// Credentials are not sent to another host, port or scheme.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Redirects {
    /// Redirects are returned like other responses.
    #[default]
    Return,
    /// Redirects to the same host over HTTP or HTTPS are followed; others are returned.
    SameHost,
    Follow,
    /// Redirects are followed, except that a private address of another host is an error.
    FollowPublic,
}

impl Redirects {
    /// Changes `request` to follow the redirect in `response`. Returns false if none is followed.
    pub(super) fn follow<T, B>(
        self,
        request: &mut Request<T>,
        response: &Response<B>,
    ) -> Result<bool, Error> {
        let location = response.headers().get(header::LOCATION);
        let location = String::from_utf8_lossy(location.map_or(&[][..], HeaderValue::as_bytes));
        if location.is_empty()
            || self == Self::Return
            || request.method() != Method::GET
            || !matches!(response.status().as_u16(), 301..=303 | 307 | 308)
        {
            return Ok(false);
        }
        let base = request.uri();
        let is_http = location.get(..4).unwrap_or_default().eq_ignore_ascii_case("http");
        if self == Self::SameHost && is_absolute(&location) && !is_http {
            return Ok(false);
        }
        let next =
            resolve(base, &location).ok_or_else(|| unusable(base, &location, "a path or a URL"))?;
        if next.host() != base.host() {
            match self {
                Self::SameHost => return Ok(false),
                Self::FollowPublic if next.host().is_some_and(address::is_private) => {
                    return Err(unusable(base, &location, "no private address"));
                }
                _ => {}
            }
        }
        if (next.scheme(), next.authority()) != (base.scheme(), base.authority()) {
            request.headers_mut().remove(header::AUTHORIZATION);
        }
        if is_absolute(&location) {
            request.headers_mut().remove(header::HOST);
        }
        *request.uri_mut() = next;
        Ok(true)
    }
}

fn unusable(base: &Uri, location: &str, expected: &'static str) -> Error {
    Error::Redirect {
        authority: host_and_port(base),
        // The query is left out, because it may be a signature.
        found: location.split('?').next().unwrap_or_default().to_owned(),
        expected,
    }
}

/// Returns true if a Location header begins with a scheme.
fn is_absolute(location: &str) -> bool {
    let first = location.split(['/', '?', '#']).next();
    first.is_some_and(|first| first.contains(':'))
}

/// Resolves a Location header relative to `base`, as leniently as Go. Source: RFC 3986, section 5.2.
fn resolve(base: &Uri, location: &str) -> Option<Uri> {
    let location = escaped(location.split('#').next()?);
    let root = format!("{}://{}", base.scheme_str()?, base.authority()?);
    let path = base.path();
    let next = match location.as_str() {
        "" => base.to_string(),
        url if is_absolute(url) => url.to_owned(),
        no_host if no_host.starts_with("///") => format!("{root}{no_host}"),
        host if host.starts_with("//") => format!("{}:{host}", base.scheme_str()?),
        absolute if absolute.starts_with('/') => format!("{root}{absolute}"),
        query if query.starts_with('?') => format!("{root}{path}{query}"),
        relative => format!("{root}{}/{relative}", path.rsplit_once('/')?.0),
    };
    let next: Uri = next.parse().ok()?;
    let scheme = next.scheme_str()?;
    if !["http", "https"].contains(&scheme) {
        return None;
    }
    let authority = next.authority()?;
    let query = next.query().map(|query| format!("?{query}"));
    let path = without_dots(next.path()) + &query.unwrap_or_default();
    format!("{scheme}://{authority}{path}").parse().ok()
}

/// Removes the segments `.` and `..` of an absolute path.
fn without_dots(path: &str) -> String {
    let mut segments = Vec::new();
    for segment in path.split('/').skip(1) {
        match segment {
            "." => {}
            ".." => drop(segments.pop()),
            _ => segments.push(segment),
        }
    }
    // A path that ends with a dot segment names a directory, so it gets a slash at its end.
    if matches!(path.rsplit('/').next(), Some("." | "..")) {
        segments.push("");
    }
    format!("/{}", segments.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_and_host_stay_with_the_host_they_are_for() {
        for (location, is_kept, has_host) in [
            ("/b", true, true),
            ("https://h:8/b", true, false),
            ("https://h/b", false, false),
            ("http://h:8/b", false, false),
            ("//other:8/", false, true),
        ] {
            let mut request = Request::get("https://h:8/a").body(()).expect("a request");
            let secret = HeaderValue::from_static("Basic c2VjcmV0");
            request.headers_mut().insert(header::AUTHORIZATION, secret);
            let host = HeaderValue::from_static("cart");
            request.headers_mut().insert(header::HOST, host);
            let response = Response::builder().status(307).header("location", location);
            let response = response.body(()).expect("a response");
            assert!(matches!(Redirects::Follow.follow(&mut request, &response), Ok(true)));
            let found = request.headers().contains_key(header::AUTHORIZATION);
            assert_eq!(found, is_kept, "{location}");
            let found = request.headers().contains_key(header::HOST);
            assert_eq!(found, has_host, "{location}");
        }
    }

    #[test]
    fn private_addresses_of_other_hosts_are_refused_if_configured() {
        for (location, is_followed) in [
            ("https://10.0.0.1:8/b", true),
            ("https://10.0.0.2/b", false),
            ("http://[::1]:1/", false),
            ("//169.254.169.254/", false),
            ("https://8.8.8.8/", true),
            ("https://localhost/", true),
        ] {
            let mut request = Request::get("https://10.0.0.1/a").body(()).expect("a request");
            let response = Response::builder().status(302).header("location", location);
            let response = response.body(()).expect("a response");
            let found = Redirects::FollowPublic.follow(&mut request, &response);
            assert_eq!(matches!(found, Ok(true)), is_followed, "{location}: {found:?}");
        }
    }

    #[test]
    fn a_location_is_relative_to_the_request() {
        for (location, expected) in [
            ("/b?q", Some("http://[::1]:80/b?q")),
            ("b", Some("http://[::1]:80/a/b")),
            ("?q", Some("http://[::1]:80/a/x?q")),
            ("", Some("http://[::1]:80/a/x?old")),
            ("#part", Some("http://[::1]:80/a/x?old")),
            ("/a b/é", Some("http://[::1]:80/a%20b/%C3%A9")),
            ("HTTPS://h/", Some("https://h/")),
            ("x?y=a://b", Some("http://[::1]:80/a/x?y=a://b")),
            ("//h/y#part", Some("http://h/y")),
            ("http://127.0.0.1:2", Some("http://127.0.0.1:2/")),
            ("https://h:8/", Some("https://h:8/")),
            ("ftp://h/", None),
            ("http://", None),
            ("http://a b/", None),
            ("mailto:a@b", None),
            ("../y", Some("http://[::1]:80/y")),
            ("../../../y/./z/", Some("http://[::1]:80/y/z/")),
            ("./y", Some("http://[::1]:80/a/y")),
            ("..", Some("http://[::1]:80/")),
            (".", Some("http://[::1]:80/a/")),
            ("./", Some("http://[::1]:80/a/")),
            ("y/..?q=../z", Some("http://[::1]:80/a/?q=../z")),
            ("/b//../c/./", Some("http://[::1]:80/b/c/")),
            ("/..", Some("http://[::1]:80/")),
            ("/.a/..b/...", Some("http://[::1]:80/.a/..b/...")),
            ("/%2e%2e/x", Some("http://[::1]:80/%2e%2e/x")),
            ("./y:z", Some("http://[::1]:80/a/y:z")),
            ("///y", Some("http://[::1]:80///y")),
            ("//h/a/../b?q", Some("http://h/b?q")),
            ("http://h/a/b/../.?q", Some("http://h/a/?q")),
            ("?", Some("http://[::1]:80/a/x?")),
        ] {
            let base: Uri = "http://[::1]:80/a/x?old".parse().expect("an address");
            let found = resolve(&base, location).map(|uri| uri.to_string());
            assert_eq!(found.as_deref(), expected, "{location:?}");
        }
    }
}
