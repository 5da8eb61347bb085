//! Tests which credentials are found in Docker's configuration files.

use super::*;
use crate::runtime::lifecycle::with_causes;

fn password(user: &str, password: &str) -> Credentials {
    let header = basic(format!("{user}:{password}").as_bytes());
    Credentials::Password(header.expect("a header"))
}

#[test]
fn docker_configurations_of_all_forms_are_read() {
    let found = |config: &str, image: &str| read_credentials(config.as_bytes(), image);
    let header = HeaderValue::from_static;
    for (config, expected) in [
        (r#"{"auths":{"r.io":{"username":"u","password":"p"}}}"#, Some(password("u", "p"))),
        (r#"{"auths":{"r.io":{"auth":"dTpwOnE="}}}"#, Some(password("u", "p:q"))),
        (r#"{"auths":{"r.io":{"auth":"dTpwAAA="}}}"#, Some(password("u", "p"))),
        (r#"{"auths":{"https://r.io/v2/":{"auth":"dTpwOnE="}}}"#, Some(password("u", "p:q"))),
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
        (r#"{"auths":{"r.io":null}}"#, None),
        (
            r#"{"auths":{"r.io":{"auth":"dTpwOnE=","username":null,"password":null,"registrytoken":null}}}"#,
            Some(password("u", "p:q")),
        ),
    ] {
        assert!(found(config, "r.io/a").ok() == Some(expected), "{config}");
    }
    let hub = r#"{"auths":{"https://index.docker.io/v1/":{"auth":"dTpw"}}}"#;
    for hub in [hub, &hub.replace("index.", ""), &hub.replace("/v1/", "")] {
        assert!(found(hub, "index.docker.io/library/a").ok() == Some(Some(password("u", "p"))));
    }
}

#[test]
fn the_credentials_with_the_longest_matching_path_are_used() {
    for (keys, image, expected) in [
        (&["r.io/team-a", "r.io/team-b"][..], "r.io/team-b/plugin", Some(1)),
        (&["r.io/team-a", "r.io/team-b"], "r.io/team-a/x/y", Some(0)),
        (&["r.io/team-a", "r.io/team-b"], "r.io/team-c/plugin", None),
        (&["r.io/team", "r.io/te"], "r.io/team-b/plugin", None),
        (&["r.io/team", "r.io"], "r.io/team-b/plugin", Some(1)),
        (
            &["r.io", "r.io/team-b", "r.io/team-b/plugin", "r.io/team-b/plugin2"],
            "r.io/team-b/plugin",
            Some(2),
        ),
        (&["r.io", "https://r.io/v2/team-b/"], "r.io/team-b/plugin", Some(1)),
        (&["https://r.io/v1/", "http://r.io", "r.io"], "r.io/a", Some(2)),
        (&["r.io", "r.io:5000"], "r.io:5000/a", Some(1)),
        (&["r.io:5000/b", "http://r.io:5000/v1/"], "r.io:5000/a", Some(1)),
        (&["docker.io/other", "https://index.docker.io/v1/"], "index.docker.io/me/a", Some(1)),
        (&["docker.io/me", "https://index.docker.io/v1/"], "index.docker.io/me/a", Some(0)),
        (&["docker.io.example", "evil.io/r.io"], "index.docker.io/me/a", None),
    ] {
        // If the entries were read in the random order of a hash map, some of these runs would fail.
        for _ in 0..20 {
            let entries = keys.iter().enumerate();
            let entries =
                entries.map(|(at, key)| format!(r#""{key}":{{"username":"u","password":"{at}"}}"#));
            let config = format!(r#"{{"auths":{{{}}}}}"#, entries.collect::<Vec<_>>().join(","));
            let expected = expected.map(|at: usize| password("u", &at.to_string()));
            let found = read_credentials(config.as_bytes(), image);
            assert!(found.ok() == Some(expected), "{keys:?} {image}");
        }
    }
}

#[test]
fn the_error_for_an_invalid_docker_configuration_does_not_show_the_secret() {
    for config in [
        "null",
        "",
        "hunter2",
        "[\"hunter2\"]",
        r#"{"auths":{"r.io":"hunter2"}}"#,
        r#"{"auths":{"r.io":{"auth":"hunter2!"}}}"#,
        r#"{"auths":{"r.io":{"auth":"aHVudGVyMg=="}}}"#,
    ] {
        let Err(error) = read_credentials(config.as_bytes(), "r.io/a") else {
            panic!("{config}");
        };
        let error = with_causes(&error);
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
    let found = credentials_in_files(&paths, "r.io/a").await;
    assert!(found.ok() == Some(Some(password("u", "p"))));
    assert!(credentials_in_files(&paths[..1], "r.io/a").await.ok() == Some(None));
    assert!(credentials_in_files(&paths[2..], "r.io/a").await.is_err());
}
