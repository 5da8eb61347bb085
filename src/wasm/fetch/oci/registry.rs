//! Sends requests to a registry: authenticates, by a token server if the registry names one, and falls back
//! to plain HTTP if it does not support TLS.

use http::{HeaderMap, HeaderValue, Method, Response, StatusCode, Uri, header};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;
use tokio::time::Instant;

use super::Credentials;
use crate::net::address;
use crate::net::http_client::{Body, Error, Redirects};
use crate::wasm::fetch::error::FetchError;
use crate::wasm::fetch::server::{Server, get};
use crate::wasm::fetch::{Config, Reference, secret};

const MAX_TOKEN: usize = 1 << 20;
/// The name of the client for token servers.
const CLIENT_ID: &str = "istio-agent";

/// The repository of one image.
#[derive(Debug)]
pub(super) struct Registry {
    server: Server,
    base: Uri,
    repository: String,
    /// True if its certificate is not verified.
    is_insecure: bool,
    credentials: Option<Credentials>,
    has_answered: bool,
    /// The header of further requests.
    authorization: Option<HeaderValue>,
}

#[derive(Deserialize)]
struct Token {
    token: Option<String>,
    access_token: Option<String>,
}

impl Registry {
    /// Creates a client. `authority` is the registry's name in the URL.
    pub(super) async fn new(
        config: &Config,
        authority: &str,
        reference: &Reference,
        credentials: Option<Credentials>,
        deadline: Instant,
    ) -> Result<Self, FetchError> {
        Ok(Self {
            server: config.server(authority, true, Redirects::FollowPublic, deadline).await?,
            base: url(&format!("https://{}", reference.registry))?,
            repository: reference.repository.clone(),
            is_insecure: config.is_insecure(authority),
            credentials,
            has_answered: false,
            authorization: None,
        })
    }

    /// Requests a part of the repository. Fails unless the status is 200. An expired token is replaced once.
    pub(super) async fn get(
        &mut self,
        path: &str,
        accept: &'static str,
    ) -> Result<Response<Body>, FetchError> {
        let mut response = self.send(path, accept).await?;
        if response.status() == StatusCode::UNAUTHORIZED {
            self.authenticate(response.headers()).await?;
            response = self.send(path, accept).await?;
        }
        match response.status() {
            StatusCode::OK => Ok(response),
            status => {
                let registry = self.base.clone();
                Err(FetchError::Answer { registry, path: path.to_owned(), status })
            }
        }
    }

    /// Sends a request, over plain HTTP from the first time on that [`Self::falls_back`] demands it.
    async fn send(
        &mut self,
        path: &str,
        accept: &'static str,
    ) -> Result<Response<Body>, FetchError> {
        loop {
            let uri = url(&format!("{}v2/{}/{path}", self.base, self.repository))?;
            let mut request = get(uri, self.authorization.as_ref());
            request.headers_mut().insert(header::ACCEPT, HeaderValue::from_static(accept));
            match self.server.send(&request, |error| self.falls_back(error)).await {
                Ok(response) => {
                    self.has_answered = true;
                    return Ok(response);
                }
                Err(error) if self.falls_back(&error) => {
                    let authority = self.base.authority().map_or("", |it| it.as_str());
                    tracing::info!(target: "wasm", "fetching image with plain text from {authority}/{}", self.repository);
                    self.base = url(&format!("http://{authority}"))?;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Returns true if the client has to continue with plain HTTP: the registry answered TLS with HTTP, or is local.
    fn falls_back(&self, error: &Error) -> bool {
        let source = match error {
            Error::Tls { source, .. } => source.get_ref().and_then(|it| it.downcast_ref()),
            _ => None,
        };
        (matches!(source, Some(rustls::Error::InvalidMessage(_))) || self.is_local())
            && self.has_tls()
            && !self.has_answered
    }

    fn has_tls(&self) -> bool {
        self.base.scheme_str() == Some("https")
    }

    /// Returns true if the registry is on this machine or in a private network.
    fn is_local(&self) -> bool {
        let host = self.base.host().unwrap_or_default();
        address::is_private(host) || host == "localhost" || host.ends_with(".local")
    }

    /// Obtains the authorization that the registry requires in a 401.
    async fn authenticate(&mut self, headers: &HeaderMap) -> Result<(), FetchError> {
        let may_send = self.has_tls() || self.is_insecure || self.is_local();
        if self.credentials.is_some() && !may_send {
            let how = "over plain HTTP, and WASM_INSECURE_REGISTRIES does not list it";
            return Err(FetchError::Authorization { registry: self.base.clone(), how });
        }
        let Some(challenge) = challenge(headers) else {
            let how = "by an unknown scheme";
            return Err(FetchError::Authorization { registry: self.base.clone(), how });
        };
        let authorization = match (challenge, &self.credentials) {
            (_, Some(Credentials::Token(token))) => token.clone(),
            (Challenge::Basic, Some(Credentials::Password(password))) => password.clone(),
            (Challenge::Basic, _) => {
                let how = "by password, and none is configured";
                return Err(FetchError::Authorization { registry: self.base.clone(), how });
            }
            (Challenge::Bearer(bearer), _) => {
                let server = token_server(&bearer.realm, &self.base)?;
                let scope =
                    bearer.scope.unwrap_or_else(|| format!("repository:{}:pull", self.repository));
                let mut parameters = vec![("scope", scope)];
                parameters.extend(bearer.service.map(|service| ("service", service)));
                self.request_token(&server, parameters).await?
            }
        };
        self.authorization = Some(authorization);
        Ok(())
    }

    /// Requests a token from a token server.
    async fn request_token(
        &self,
        server: &Uri,
        mut parameters: Vec<(&str, String)>,
    ) -> Result<HeaderValue, FetchError> {
        let request = if let Some(Credentials::Identity(token)) = &self.credentials {
            let token = token.to_str().unwrap_or_default().to_owned();
            parameters.push(("grant_type", "refresh_token".to_owned()));
            parameters.push(("client_id", CLIENT_ID.to_owned()));
            parameters.push(("refresh_token", token));
            let mut request = get(server.clone(), None).map(|_| form(&parameters).into());
            *request.method_mut() = Method::POST;
            let value = HeaderValue::from_static("application/x-www-form-urlencoded");
            request.headers_mut().insert(header::CONTENT_TYPE, value);
            request
        } else {
            let separator = if server.query().is_some() { '&' } else { '?' };
            let uri = url(&format!("{server}{separator}{}", form(&parameters)))?;
            match &self.credentials {
                Some(Credentials::Password(password)) => get(uri, Some(password)),
                _ => get(uri, None),
            }
        };
        let sent = self.server.send(&request, |_| false).await;
        let mut response = sent.map_err(FetchError::Token)?;
        let host = server.host().unwrap_or_default().to_owned();
        let status = response.status();
        if !status.is_success() {
            return Err(FetchError::TokenAnswer { host, status });
        }
        let body = response.body_mut().collect(MAX_TOKEN).await.map_err(FetchError::Token)?;
        // The text of the parser's error may contain a part of the token.
        let parsed: Option<Token> = serde_json::from_slice(&body).ok();
        match parsed.and_then(|parsed| parsed.token.or(parsed.access_token)) {
            Some(token) if !token.is_empty() => secret(format!("Bearer {token}")),
            _ => Err(FetchError::TokenMissing { host }),
        }
    }
}

fn url(text: &str) -> Result<Uri, FetchError> {
    text.parse().map_err(|_| FetchError::Url { found: text.to_owned() })
}

/// Encodes parameters as in a URL's query.
fn form(parameters: &[(&str, String)]) -> String {
    let pairs = parameters
        .iter()
        .map(|(name, value)| format!("{name}={}", utf8_percent_encode(value, NON_ALPHANUMERIC)));
    pairs.collect::<Vec<_>>().join("&")
}

/// The authorization that a registry requires.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Challenge {
    Basic,
    Bearer(Bearer),
}

/// The parameters of a token, which the server at `realm` issues.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Bearer {
    realm: String,
    service: Option<String>,
    scope: Option<String>,
}

/// Returns the challenge of a response; Bearer precedes Basic.
fn challenge(headers: &HeaderMap) -> Option<Challenge> {
    let mut asks_for_basic = false;
    for value in headers.get_all(header::WWW_AUTHENTICATE) {
        let text = value.to_str().unwrap_or_default();
        let lower_case = text.to_ascii_lowercase();
        if let Some(begin) = lower_case.find("bearer ") {
            let text = &text[begin..];
            return Some(Challenge::Bearer(Bearer {
                realm: parameter(text, "realm").unwrap_or_default(),
                service: parameter(text, "service"),
                scope: parameter(text, "scope"),
            }));
        }
        asks_for_basic |= lower_case.contains("basic");
    }
    if asks_for_basic { Some(Challenge::Basic) } else { None }
}

/// Returns the value of a quoted parameter.
fn parameter(challenge: &str, name: &str) -> Option<String> {
    let (_, rest) = challenge.split_once(&format!("{name}=\""))?;
    Some(rest.split_once('"')?.0.to_owned())
}

/// Returns the token server of a registry at `base`. Fails unless it is on the registry's host or outside:
/// the registry could name any server in the cluster.
fn token_server(realm: &str, base: &Uri) -> Result<Uri, FetchError> {
    let uri: Uri = realm.parse().unwrap_or_default();
    let scheme = uri.scheme_str().unwrap_or_default();
    if scheme != "https" && (scheme != "http" || base.scheme() != uri.scheme()) {
        return Err(FetchError::RealmScheme { scheme: scheme.to_owned() });
    }
    let host = uri.host().unwrap_or_default();
    let name = host.trim_end_matches('.').to_ascii_lowercase();
    let is_inside =
        address::is_private(host) || ["metadata.google.internal", "localhost"].contains(&&*name);
    if is_inside && uri.host() != base.host() {
        return Err(FetchError::RealmHost { host: host.to_owned() });
    }
    Ok(uri)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::net::http_client::Client;

    #[tokio::test]
    async fn passwords_go_over_plain_http_only_to_local_or_listed_registries() {
        for (base, listed, expected) in [
            ("http://registry.example", false, Err(())),
            ("http://registry.example", true, Ok(())),
            ("http://192.168.0.1:5000", false, Ok(())),
            ("https://registry.example", false, Ok(())),
        ] {
            let password = HeaderValue::from_static("Basic dTpw");
            let mut registry = Registry {
                server: Server {
                    client: Client::default(),
                    request_limit: Duration::from_secs(5),
                    attempts: 1,
                    deadline: Instant::now(),
                },
                base: base.parse().expect("a URL"),
                repository: "a".to_owned(),
                is_insecure: listed,
                credentials: Some(Credentials::Password(password)),
                has_answered: true,
                authorization: None,
            };
            let mut headers = HeaderMap::new();
            let challenge = HeaderValue::from_static("Basic realm=\"Registry\"");
            headers.insert(header::WWW_AUTHENTICATE, challenge);
            let found = registry.authenticate(&headers).await;
            assert_eq!(found.is_ok(), expected.is_ok(), "{base}: {found:?}");
            assert_eq!(registry.authorization.is_some(), expected.is_ok());
        }
    }
}

#[cfg(test)]
mod challenge_tests {
    use proptest::prelude::*;

    use super::*;

    fn bearer(realm: &str, service: Option<&str>, scope: Option<&str>) -> Option<Challenge> {
        let [service, scope] = [service, scope].map(|text| text.map(str::to_owned));
        let realm = realm.to_owned();
        Some(Challenge::Bearer(Bearer { realm, service, scope }))
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
            (&["Basic realm=\"r\"", "Bearer realm=\"https://a\""], bearer("https://a", None, None)),
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
    fn token_servers_at_private_addresses_are_refused() {
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
                if let Some(Challenge::Bearer(bearer)) = challenge(&headers)
                    && let Ok(server) = token_server(&bearer.realm, &base)
                {
                    let host = server.host().unwrap_or_default();
                    prop_assert!(!address::is_private(host) && host != "localhost", "{}", text);
                    prop_assert_eq!(server.scheme_str(), Some("https"));
                }
            }
        }
    }
}
