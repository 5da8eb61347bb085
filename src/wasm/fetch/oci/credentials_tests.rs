//! Configurations of Docker, and files of them.

use super::*;

fn password(user: &str, password: &str) -> Credentials {
    let header = basic(format!("{user}:{password}").as_bytes());
    Credentials::Password(header.expect("a header"))
}

#[test]
fn docker_configurations_of_all_forms_are_read() {
    let found = |config: &str, registry: &str| read_credentials(config.as_bytes(), registry);
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
            r#"{"auths":{"r.io":{"auth":"dTpwAAA="}}}"#,
            Some(password("u", "p")),
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
        let Err(error) = read_credentials(config.as_bytes(), "r.io") else {
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
    assert!(credentials_in_files(&paths, "r.io").await == Ok(Some(password("u", "p"))));
    assert!(credentials_in_files(&paths[..1], "r.io").await == Ok(None));
    assert!(credentials_in_files(&paths[2..], "r.io").await.is_err());
}
