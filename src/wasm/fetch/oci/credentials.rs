//! Credentials for registries, from Docker's configuration: a filter's pull secret, or a file.
//!
//! Helper programs (`credHelpers`, `credsStore`) are not run: what a pull secret names would be
//! executed.

use std::collections::HashMap;
use std::path::PathBuf;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use zeroize::Zeroizing;

use crate::regular_file;

const LARGEST: u64 = 1 << 20;

/// What a registry is given.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum Credentials {
    Password {
        user: String,
        password: Zeroizing<String>,
    },
    /// An OAuth 2 refresh token for the token server.
    Identity(Zeroizing<String>),
    /// A bearer token for the registry itself.
    Token(Zeroizing<String>),
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
        "index.docker.io" => "https://index.docker.io/v1/",
        other => other,
    };
    let of_host = |(name, _): &(&String, _)| host(name) == host(key);
    let auths = config.auths.unwrap_or_default();
    let (found, mut entries) = (auths.get(key), auths.iter());
    match found.or_else(|| entries.find(of_host).map(|(_, entry)| entry)) {
        Some(entry) => entry.credentials(),
        None => Ok(None),
    }
}

/// The credentials in the first of these files that exists.
pub(super) async fn from_files(
    paths: &[PathBuf],
    registry: &str,
) -> Result<Option<Credentials>, String> {
    for path in paths {
        match regular_file::read_aside(path.clone(), LARGEST).await {
            Ok(config) => {
                let found = read(&config, registry);
                return found.map_err(|problem| format!("{}: {problem}", path.display()));
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(format!("cannot read {}: {error}", path.display())),
        }
    }
    Ok(None)
}

/// The host in a key of the configuration, which may be a URL.
fn host(key: &str) -> &str {
    let rest = key
        .trim_start_matches("https://")
        .trim_start_matches("http://");
    rest.split('/').next().unwrap_or_default()
}

impl Entry {
    fn credentials(&self) -> Result<Option<Credentials>, String> {
        if !self.registrytoken.is_empty() {
            return Ok(Some(Credentials::Token(self.registrytoken.clone().into())));
        }
        if !self.identitytoken.is_empty() {
            return Ok(Some(Credentials::Identity(
                self.identitytoken.clone().into(),
            )));
        }
        let (user, password) = match self.auth.is_empty() {
            true => (self.username.clone(), self.password.clone().into()),
            false => self.decoded()?,
        };
        let is_set = !user.is_empty() || !password.is_empty();
        Ok(is_set.then_some(Credentials::Password { user, password }))
    }

    /// `auth`: base64 of user and password, joined by a colon.
    fn decoded(&self) -> Result<(String, Zeroizing<String>), String> {
        let expected = "\"auth\" of the registry is not the base64 of user:password";
        let decoded = STANDARD.decode(self.auth.trim()).map_err(|_| expected)?;
        let decoded = Zeroizing::new(decoded);
        let text = std::str::from_utf8(&decoded).map_err(|_| expected)?;
        let (user, password) = text.split_once(':').ok_or(expected)?;
        let password = password.trim_end_matches('\0').to_owned();
        Ok((user.to_owned(), Zeroizing::new(password)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn password(user: &str, password: &str) -> Credentials {
        let password = Zeroizing::new(password.to_owned());
        Credentials::Password {
            user: user.to_owned(),
            password,
        }
    }

    #[test]
    fn docker_configurations_of_all_forms_are_read() {
        let found = |config: &str, registry: &str| read(config.as_bytes(), registry);
        let token = |text: &str| Zeroizing::new(text.to_owned());
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
                r#"{"auths":{"r.io":{"auth":"dTpwAA==","username":"other"}}}"#,
                Some(password("u", "p")),
            ),
            (
                r#"{"auths":{"https://r.io/v2/":{"auth":"dTpwOnE="}}}"#,
                Some(password("u", "p:q")),
            ),
            (
                r#"{"auths":{"r.io":{"identitytoken":"i","auth":"dTpw"}}}"#,
                Some(Credentials::Identity(token("i"))),
            ),
            (
                r#"{"auths":{"r.io":{"registrytoken":"t"}}}"#,
                Some(Credentials::Token(token("t"))),
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
