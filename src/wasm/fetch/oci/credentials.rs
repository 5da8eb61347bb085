//! Credentials for registries, from Docker's configuration: a filter's pull secret, or a file.
//!
//! Helper programs (`credHelpers`, `credsStore`) are not run: what a pull secret names would be
//! executed.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::path::PathBuf;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::HeaderValue;
use serde::Deserialize;

use super::reference::DOCKER_HUB;
use crate::regular_file;
use crate::wasm::fetch::{basic, secret};

const MAX_CONFIG: u64 = 1 << 20;

/// What a registry is given. Headers are marked as secret, and not shown.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Credentials {
    /// For the registry or its token server.
    Password(HeaderValue),
    /// An OAuth 2 refresh token for the token server.
    Identity(HeaderValue),
    /// For the registry itself.
    Token(HeaderValue),
}

#[derive(Deserialize)]
struct DockerConfig {
    auths: Option<HashMap<String, Entry>>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Entry {
    username: String,
    password: String,
    auth: String,
    identitytoken: String,
    registrytoken: String,
}

/// The credentials for `registry` in Docker's configuration. None is access without any.
pub(super) fn read(config: &[u8], registry: &str) -> Result<Option<Credentials>, String> {
    // The error of the parser would show a part of the secret.
    let config: DockerConfig = serde_json::from_slice(config).map_err(|error| {
        let (line, column) = (error.line(), error.column());
        format!("not a Docker configuration in JSON, at line {line} column {column}")
    })?;
    let key = match registry {
        DOCKER_HUB => "https://index.docker.io/v1/",
        other => other,
    };
    let mut auths = config.auths.unwrap_or_default();
    let of_host = |name: &&String| host(name) == host(key);
    let name = auths.keys().find(of_host).cloned().unwrap_or_default();
    let entry = auths.remove(key).or_else(|| auths.remove(&name));
    entry.map_or(Ok(None), Entry::credentials)
}

/// The credentials in the first of these files that exists.
pub(super) async fn from_files(
    paths: &[PathBuf],
    registry: &str,
) -> Result<Option<Credentials>, String> {
    for path in paths {
        let of_path = |problem: String| format!("{}: {problem}", path.display());
        match regular_file::read_blocking(path.clone(), MAX_CONFIG).await {
            Ok(config) => return read(&config, registry).map_err(of_path),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(of_path(error.to_string())),
        }
    }
    Ok(None)
}

/// The host in a key of the configuration, which may be a URL.
fn host(key: &str) -> &str {
    let rest = key.split_once("://").map_or(key, |(_, rest)| rest);
    rest.split('/').next().unwrap_or_default()
}

impl Entry {
    fn credentials(self) -> Result<Option<Credentials>, String> {
        if !self.registrytoken.is_empty() {
            let token = secret(format!("Bearer {}", self.registrytoken))?;
            return Ok(Some(Credentials::Token(token)));
        }
        if !self.identitytoken.is_empty() {
            return Ok(Some(Credentials::Identity(secret(self.identitytoken)?)));
        }
        let mut password = format!("{}:{}", self.username, self.password).into_bytes();
        if !self.auth.is_empty() {
            let decoded = STANDARD.decode(self.auth.trim()).ok();
            let decoded = decoded.filter(|decoded| decoded.contains(&b':'));
            let expected = "\"auth\" of the registry is not the base64 of user:password";
            password = decoded.ok_or(expected)?;
        }
        match password.as_slice() {
            b":" => Ok(None),
            password => Ok(Some(Credentials::Password(basic(password)?))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn password(user: &str, password: &str) -> Credentials {
        let header = basic(format!("{user}:{password}").as_bytes());
        Credentials::Password(header.expect("a header"))
    }

    #[test]
    fn docker_configurations_of_all_forms_are_read() {
        let found = |config: &str, registry: &str| read(config.as_bytes(), registry);
        let header = HeaderValue::from_static;
        for (config, expected) in [
            (
                r#"{"auths":{"r.io":{"username":"u","password":"p"}}}"#,
                Some(password("u", "p")),
            ),
            (
                r#"{"auths":{"r.io":{"auth":"dTpwOnE="}}}"#,
                Some(password("u", "p:q")),
            ),
            (
                r#"{"auths":{"https://r.io/v2/":{"auth":"dTpwOnE="}}}"#,
                Some(password("u", "p:q")),
            ),
            (
                r#"{"auths":{"r.io":{"identitytoken":"i","auth":"dTpw"}}}"#,
                Some(Credentials::Identity(header("i"))),
            ),
            (
                r#"{"auths":{"r.io":{"registrytoken":"t"}}}"#,
                Some(Credentials::Token(header("Bearer t"))),
            ),
            (r#"{"auths":{"r.io":{}}}"#, None),
            (r#"{"auths":{"other.io":{"auth":"dTpw"}}}"#, None),
            (r#"{"credHelpers":{"r.io":"rm"},"credsStore":"rm"}"#, None),
            ("{}", None),
            (r#"{"auths":null}"#, None),
        ] {
            assert!(found(config, "r.io") == Ok(expected), "{config}");
        }
        let hub = r#"{"auths":{"https://index.docker.io/v1/":{"auth":"dTpw"}}}"#;
        assert!(found(hub, "index.docker.io") == Ok(Some(password("u", "p"))));
    }

    #[test]
    fn what_is_no_docker_configuration_is_an_error_without_the_secret() {
        for config in [
            "null",
            "",
            "hunter2",
            "[\"hunter2\"]",
            r#"{"auths":{"r.io":"hunter2"}}"#,
            r#"{"auths":{"r.io":{"auth":"hunter2!"}}}"#,
            r#"{"auths":{"r.io":{"auth":"aHVudGVyMg=="}}}"#,
        ] {
            let Err(error) = read(config.as_bytes(), "r.io") else {
                panic!("{config}");
            };
            assert!(!error.contains("hunter2") && !error.is_empty(), "{error}");
        }
    }

    #[tokio::test]
    async fn the_first_file_that_exists_is_used() {
        let directory = tempfile::tempdir().expect("a directory");
        let [missing, first, second] = ["a", "b", "c"].map(|name| directory.path().join(name));
        let config = |auth| format!(r#"{{"auths":{{"r.io":{{"auth":"{auth}"}}}}}}"#);
        std::fs::write(&first, config("dTpw")).expect("written");
        std::fs::write(&second, "broken").expect("written");
        let paths = [missing, first, second];
        assert!(from_files(&paths, "r.io").await == Ok(Some(password("u", "p"))));
        assert!(from_files(&paths[..1], "r.io").await == Ok(None));
        assert!(from_files(&paths[2..], "r.io").await.is_err());
    }
}
