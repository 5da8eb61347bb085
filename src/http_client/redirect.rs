//! Follows the Location header of an answer.

use http::{HeaderValue, Method, Request, Response, Uri, header};

use super::{Error, host_and_port};
use crate::address;
use crate::request_path::escaped;

/// Which redirects of GET requests are followed; those of others are the answer. Credentials are not
/// sent to another host, port or scheme.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Redirects {
    /// The redirect is the answer.
    #[default]
    Return,
    /// Those to the same host are followed; another one, also of another scheme, is the answer.
    SameHost,
    Follow,
    /// Those to a private address of another host are errors.
    FollowPublic,
}

impl Redirects {
    /// Points `request` to where `response` redirects it. False if it does not.
    pub(super) fn follow<T, B>(
        self,
        request: &mut Request<T>,
        response: &Response<B>,
    ) -> Result<bool, Error> {
        let location = response.headers().get(header::LOCATION);
        let location = location.map_or(&[][..], HeaderValue::as_bytes);
        if location.is_empty()
            || self == Self::Return
            || request.method() != Method::GET
            || !matches!(response.status().as_u16(), 301..=303 | 307 | 308)
        {
            return Ok(false);
        }
        let location = String::from_utf8_lossy(location);
        let unusable = |expected| Error::Redirect {
            authority: host_and_port(request.uri()),
            // A query may be a signature.
            found: location.split('?').next().unwrap_or_default().to_owned(),
            expected,
        };
        if self == Self::SameHost && scheme(&location).is_some_and(|scheme| !is_http(scheme)) {
            return Ok(false);
        }
        let next = resolve(request.uri(), &location).ok_or_else(|| unusable("a path or a URL"))?;
        let is_private = next.host().is_some_and(address::is_private);
        match self {
            _ if next.host() == request.uri().host() => {}
            Self::SameHost => return Ok(false),
            Self::FollowPublic if is_private => return Err(unusable("no private address")),
            _ => {}
        }
        let endpoint = |uri: &Uri| (uri.scheme().cloned(), uri.authority().cloned());
        if endpoint(&next) != endpoint(request.uri()) {
            request.headers_mut().remove(header::AUTHORIZATION);
            request.headers_mut().remove(header::HOST);
        }
        *request.uri_mut() = next;
        Ok(true)
    }
}

/// The scheme of a Location header that has one.
fn scheme(location: &str) -> Option<&str> {
    let (scheme, _) = location.split_once(':')?;
    let is_scheme = scheme.starts_with(|c: char| c.is_ascii_alphabetic())
        && scheme
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c));
    is_scheme.then_some(scheme)
}

fn is_http(scheme: &str) -> bool {
    ["http", "https"].contains(&scheme.to_ascii_lowercase().as_str())
}

/// Reads a Location header relative to `base`.
fn resolve(base: &Uri, location: &str) -> Option<Uri> {
    let location = escaped(location.split('#').next()?);
    let own_scheme = base.scheme_str()?;
    if let Some(rest) = location.strip_prefix("//") {
        return format!("{own_scheme}://{rest}").parse().ok();
    }
    if let Some(scheme) = scheme(&location) {
        let rest = &location[scheme.len()..];
        let uri = format!("{}{rest}", scheme.to_ascii_lowercase())
            .parse()
            .ok();
        return uri.filter(|_| is_http(scheme));
    }
    let path = base.path();
    let path = match location.as_str() {
        "" => base.path_and_query()?.to_string(),
        absolute if absolute.starts_with('/') => absolute.to_owned(),
        query if query.starts_with('?') => format!("{path}{query}"),
        relative => {
            let (directory, _) = path.rsplit_once('/')?;
            format!("{directory}/{relative}")
        }
    };
    let authority = base.authority()?;
    format!("{own_scheme}://{authority}{path}").parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_stay_with_the_host_they_are_for() {
        for (location, is_kept) in [
            ("/b", true),
            ("https://h:8/b", true),
            ("https://h/b", false),
            ("http://h:8/b", false),
            ("//other:8/", false),
        ] {
            let mut request = Request::get("https://h:8/a").body(()).expect("a request");
            let secret = HeaderValue::from_static("Basic c2VjcmV0");
            request.headers_mut().insert(header::AUTHORIZATION, secret);
            let response = Response::builder().status(307).header("location", location);
            let response = response.body(()).expect("a response");
            assert!(matches!(
                Redirects::Follow.follow(&mut request, &response),
                Ok(true)
            ));
            let found = request.headers().contains_key(header::AUTHORIZATION);
            assert_eq!(found, is_kept, "{location}");
        }
    }

    #[test]
    fn private_addresses_of_other_hosts_are_refused_where_that_is_wanted() {
        for (location, is_followed) in [
            ("https://10.0.0.1:8/b", true),
            ("https://10.0.0.2/b", false),
            ("http://[::1]:1/", false),
            ("//169.254.169.254/", false),
            ("https://8.8.8.8/", true),
            ("https://localhost/", true),
        ] {
            let mut request = Request::get("https://10.0.0.1/a")
                .body(())
                .expect("a request");
            let response = Response::builder().status(302).header("location", location);
            let response = response.body(()).expect("a response");
            let found = Redirects::FollowPublic.follow(&mut request, &response);
            assert_eq!(
                matches!(found, Ok(true)),
                is_followed,
                "{location}: {found:?}"
            );
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
        ] {
            let base: Uri = "http://[::1]:80/a/x?old".parse().expect("an address");
            let found = resolve(&base, location).map(|uri| uri.to_string());
            assert_eq!(found.as_deref(), expected, "{location:?}");
        }
    }
}
