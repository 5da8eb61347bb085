//! Sends requests to a registry: authentication, further attempts, and plain HTTP where the registry
//! does not speak TLS.

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, Uri, header};
use serde::Deserialize;
use tokio::time::{Instant, sleep};

use super::challenge::{Challenge, challenge, token_server};
use super::credentials::Credentials;
use super::reference::Reference;
use crate::dial;
use crate::http_client::{self, Body, Client, Redirects};
use crate::lifecycle::with_causes;
use crate::wasm::fetch::{Config, basic, secret};

/// Waits before the second and the third attempt.
const WAITS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(3)];
/// Statuses after which another attempt may succeed.
const TEMPORARY: [u16; 8] = [408, 429, 499, 500, 502, 503, 504, 522];
const LARGEST_TOKEN: usize = 1 << 20;
/// How docker, and registries made for it, name a client.
const CLIENT_ID: &str = "istio-agent";

/// The repository of one image.
pub(super) struct Registry {
    client: Client,
    /// For tokens that are asked for with a secret in the body.
    tokens: Client,
    base: Uri,
    repository: String,
    /// Whether its certificate is not verified.
    is_insecure: bool,
    credentials: Option<Credentials>,
    has_answered: bool,
    /// Of the requests to come.
    authorization: Option<HeaderValue>,
    deadline: Instant,
}

#[derive(Deserialize)]
struct Token {
    token: Option<String>,
    access_token: Option<String>,
}

impl Registry {
    /// `authority` is the registry as the URL names it.
    pub(super) async fn new(
        config: &Config,
        authority: &str,
        reference: &Reference,
        credentials: Option<Credentials>,
        deadline: Instant,
    ) -> Result<Self, String> {
        let base = format!("https://{}", reference.registry).parse();
        Ok(Self {
            client: config.client(authority, Redirects::FollowPublic).await?,
            tokens: config.client(authority, Redirects::Return).await?,
            base: base.map_err(|error: http::uri::InvalidUri| error.to_string())?,
            repository: reference.repository.clone(),
            is_insecure: config.is_insecure(authority),
            credentials,
            has_answered: false,
            authorization: None,
            deadline,
        })
    }

    /// Requests a part of the repository, and succeeds with status 200 only.
    pub(super) async fn get(&mut self, path: &str, accept: &str) -> Result<Response<Body>, String> {
        let mut has_authenticated = false;
        let mut waits = WAITS.into_iter();
        loop {
            let (problem, wait) = match self.send(path, accept).await {
                Err(error) if self.falls_back(&error) => continue,
                Err(error) => (with_causes(&error), waits.next()),
                Ok(response) => {
                    self.has_answered = true;
                    let status = response.status();
                    if status == StatusCode::OK {
                        return Ok(response);
                    }
                    if status == StatusCode::UNAUTHORIZED && !has_authenticated {
                        has_authenticated = true;
                        self.authenticate(&response.into_parts().0.headers).await?;
                        continue;
                    }
                    let is_temporary = TEMPORARY.contains(&status.as_u16());
                    let wait = is_temporary.then(|| waits.next()).flatten();
                    let wait = wait.map(|wait| wait.max(retry_after(&response)));
                    (format!("{} answers {path} with {status}", self.base), wait)
                }
            };
            match wait {
                Some(wait) if Instant::now() + wait < self.deadline => sleep(wait).await,
                _ => return Err(problem),
            }
        }
    }

    async fn send(&self, path: &str, accept: &str) -> Result<Response<Body>, http_client::Error> {
        let uri = format!("{}v2/{}/{path}", self.base, self.repository);
        let mut request = Request::new(Bytes::new());
        *request.uri_mut() = uri
            .parse()
            .map_err(|_| http_client::Error::Url { found: uri })?;
        let headers = request.headers_mut();
        if let Ok(accept) = HeaderValue::from_str(accept) {
            headers.insert(header::ACCEPT, accept);
        }
        if let Some(authorization) = &self.authorization {
            headers.insert(header::AUTHORIZATION, authorization.clone());
        }
        self.client.send(request).await
    }

    /// Turns to plain HTTP if the registry answers TLS in HTTP, or is local and refuses TLS.
    fn falls_back(&mut self, error: &http_client::Error) -> bool {
        let host = self.base.host().unwrap_or_default();
        let is_refused = match error {
            http_client::Error::Tls { source, .. } => {
                let source = source.get_ref().and_then(|error| error.downcast_ref());
                matches!(source, Some(rustls::Error::InvalidMessage(_))) || is_local(host)
            }
            http_client::Error::Connect(dial::Error::Connect { .. }) => is_local(host),
            _ => false,
        };
        if !is_refused || self.has_answered || self.base.scheme_str() != Some("https") {
            return false;
        }
        let authority = self
            .base
            .authority()
            .map_or("", |authority| authority.as_str());
        let Ok(base) = format!("http://{authority}").parse() else {
            return false;
        };
        tracing::info!(target: "wasm", "fetching image with plain text from {authority}/{}", self.repository);
        self.base = base;
        true
    }

    /// Gets what the registry asks for in a 401.
    async fn authenticate(&mut self, headers: &HeaderMap) -> Result<(), String> {
        let refuses = format!("{} asks for authorization", self.base);
        let challenge = challenge(headers);
        let challenge = challenge.ok_or_else(|| format!("{refuses} in no known way"))?;
        let host = self.base.host().unwrap_or_default();
        let is_plain = self.base.scheme_str() != Some("https");
        if is_plain && self.credentials.is_some() && !self.is_insecure && !is_local(host) {
            let listed = "WASM_INSECURE_REGISTRIES does not list it";
            return Err(format!("{refuses} over plain HTTP, and {listed}"));
        }
        self.authorization = Some(match (&challenge, &self.credentials) {
            (_, Some(Credentials::Token(token))) => secret(format!("Bearer {}", **token))?,
            (Challenge::Basic, Some(Credentials::Password { user, password })) => {
                basic(user.as_bytes(), password.as_bytes())?
            }
            (Challenge::Basic, _) => {
                return Err(format!("{refuses} by password, and there is none for it"));
            }
            (
                Challenge::Bearer {
                    realm,
                    service,
                    scope,
                },
                _,
            ) => {
                let own = format!("repository:{}:pull", self.repository);
                let scope = scope.as_deref().unwrap_or(&own);
                let server = token_server(realm, &self.base)?;
                self.token(server, service.as_deref(), scope).await?
            }
        });
        Ok(())
    }

    /// Asks a token server.
    async fn token(
        &self,
        server: Uri,
        service: Option<&str>,
        scope: &str,
    ) -> Result<HeaderValue, String> {
        let mut parameters = vec![("scope", scope)];
        parameters.extend(service.map(|service| ("service", service)));
        let mut request = Request::new(Bytes::new());
        let mut client = &self.client;
        match &self.credentials {
            Some(Credentials::Identity(token)) => {
                client = &self.tokens;
                let own = [("grant_type", "refresh_token"), ("client_id", CLIENT_ID)];
                parameters.extend(own);
                parameters.push(("refresh_token", token));
                *request.method_mut() = http::Method::POST;
                *request.body_mut() = form(&parameters).into();
                let kind = HeaderValue::from_static("application/x-www-form-urlencoded");
                request.headers_mut().insert(header::CONTENT_TYPE, kind);
                *request.uri_mut() = server.clone();
            }
            other => {
                if let Some(Credentials::Password { user, password }) = other {
                    let authorization = basic(user.as_bytes(), password.as_bytes())?;
                    request
                        .headers_mut()
                        .insert(header::AUTHORIZATION, authorization);
                }
                let joint = if server.query().is_some() { '&' } else { '?' };
                let uri = format!("{server}{joint}{}", form(&parameters)).parse();
                *request.uri_mut() = uri.map_err(|_| "the token server's URL is broken")?;
            }
        }
        let name = server.host().unwrap_or_default();
        let left = self.deadline.saturating_duration_since(Instant::now());
        let answer = client.fetch(request, left, LARGEST_TOKEN).await;
        let answer = answer.map_err(|error| format!("no token: {}", with_causes(&error)))?;
        if !answer.status().is_success() {
            return Err(format!(
                "token server {name} answers with {}",
                answer.status()
            ));
        }
        // The error of the parser would show a part of the token.
        let token: Option<Token> = serde_json::from_slice(answer.body()).ok();
        let token = token.and_then(|token| token.token.or(token.access_token));
        let token = token.filter(|token| !token.is_empty());
        let token = token.ok_or_else(|| format!("token server {name} answers without a token"))?;
        secret(format!("Bearer {token}"))
    }
}

/// Parameters as in a URL's query.
fn form(parameters: &[(&str, &str)]) -> String {
    use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
    let pairs = parameters.iter().map(|(name, value)| {
        let value = utf8_percent_encode(value, NON_ALPHANUMERIC);
        format!("{name}={value}")
    });
    pairs.collect::<Vec<_>>().join("&")
}

/// How long a server wants to be left alone, in seconds; none for a date.
fn retry_after(response: &Response<Body>) -> Duration {
    let header = response.headers().get(header::RETRY_AFTER);
    let seconds = header.and_then(|value| value.to_str().ok()?.trim().parse().ok());
    Duration::from_secs(seconds.unwrap_or_default())
}

/// Whether a host is one of this machine or of a private network.
fn is_local(host: &str) -> bool {
    match host.trim_matches(['[', ']']).parse::<IpAddr>() {
        Ok(IpAddr::V4(address)) => address.is_loopback() || address.is_private(),
        Ok(IpAddr::V6(address)) => address.is_loopback(),
        Err(_) => host == "localhost" || host.ends_with(".local"),
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry")
            .field("base", &self.base)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_password_goes_over_plain_http_only_where_the_registry_is_local_or_listed() {
        use crate::wasm::fetch::fake_server::{Server, answer};
        let challenge = "www-authenticate: Basic realm=\"Registry\"\r\n";
        let server = Server::start(|_, _| answer("401 No", challenge, b"")).await;
        for (base, listed, expected) in [
            ("http://registry.example", false, Err(())),
            ("http://registry.example", true, Ok(())),
            ("http://192.168.0.1:5000", false, Ok(())),
            ("https://registry.example", false, Ok(())),
        ] {
            let credentials = Credentials::Password {
                user: "u".to_owned(),
                password: "p".to_owned().into(),
            };
            let mut registry = Registry {
                client: Client::default(),
                tokens: Client::default(),
                base: base.parse().expect("a URL"),
                repository: "a".to_owned(),
                is_insecure: listed,
                credentials: Some(credentials),
                has_answered: true,
                authorization: None,
                deadline: Instant::now(),
            };
            let request = Request::get(format!("http://{}/", server.address));
            let request = request.body(Bytes::new()).expect("a request");
            let response = registry.client.send(request).await.expect("an answer");
            let found = registry.authenticate(response.headers()).await;
            assert_eq!(found.is_ok(), expected.is_ok(), "{base}: {found:?}");
            assert_eq!(registry.authorization.is_some(), expected.is_ok());
        }
    }
}
