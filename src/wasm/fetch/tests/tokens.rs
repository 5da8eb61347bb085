//! Tests the authentication at registries, with token servers and redirects.

use parking_lot::Mutex;
use serde_json::json;

use super::registries::{host, image, layer};
use super::*;

/// Returns the response of a registry that requires `Bearer good`. The token server at `/token` issues this token.
fn guarded(head: &str, authority: &str) -> Vec<u8> {
    let has = |line: &str| head.lines().any(|found| found == line);
    if path(head).starts_with("/token") {
        let basic = "authorization: Basic dTpw";
        let scope = "scope=repository%3Ateam%2Fplugin%3Apull&service=the%20registry";
        let known = has(basic) || head.starts_with("POST ");
        if known && (head.starts_with("POST ") || head.contains(scope)) {
            return ok(br#"{"access_token":"good"}"#);
        }
        return answer("401 Unauthorized", "", b"");
    }
    if has("authorization: Bearer good") {
        return image(head);
    }
    let realm = format!("https://{authority}/token");
    let challenge = format!("Bearer realm=\"{realm}\",service=\"the registry\"");
    answer("401 Unauthorized", &format!("www-authenticate: {challenge}\r\n"), b"")
}

#[tokio::test]
async fn registries_get_credentials_of_the_pull_secret_as_they_ask() {
    let bearer = Server::tls(|head, _| guarded(head, host(head)));
    let basic = Server::tls(|head, _| {
        if head.contains("authorization: Basic dTpw\r\n") {
            return image(head);
        }
        let challenge = "www-authenticate: Basic realm=\"Registry\"\r\n";
        answer("401 No", challenge, b"")
    });
    let (bearer, basic) = (bearer.await, basic.await);
    let secret = |server: &Server, member: &str, value: &str| {
        json!({"auths": {server.address.to_string(): {member: value}}}).to_string()
    };
    for (server, member, value, expected) in [
        (&bearer, "auth", "dTpw", Ok(())),
        (&bearer, "identitytoken", "refresh", Ok(())),
        (&bearer, "registrytoken", "good", Ok(())),
        (&bearer, "auth", "dTp4", Err("token server 127.0.0.1 answers with 401")),
        (&bearer, "auths", "", Err("token server 127.0.0.1 answers with 401")),
        (&bearer, "registrytoken", "expired", Err("401 Unauthorized")),
        (&basic, "auth", "dTpw", Ok(())),
        (&basic, "auth", "dTp4", Err("answers manifests/v1 with 401")),
        (&basic, "auths", "", Err("asks for authorization by password, and none is configured")),
        (&basic, "auth", "!", Err("is not the base64 of user:password")),
    ] {
        let url = format!("oci://{}/team/plugin:v1", server.address);
        let found = fetch(&config(), &url, Some(&secret(server, member, value))).await;
        match (found, expected) {
            (Ok(module), Ok(())) => assert_eq!(module, MODULE),
            (Err(error), Err(part)) => {
                assert!(error.contains(part), "{member}: {error}");
                assert!(!error.contains("dTp"), "{error}");
            }
            (found, _) => panic!("{member}: {found:?}"),
        }
    }
    let error = fetch(&config(), &format!("oci://{}/a", basic.address), Some("null")).await;
    assert!(error.expect_err("no secret").contains("not a Docker configuration"));
}

#[tokio::test]
async fn a_layer_on_another_server_must_match_its_digest() {
    let storage = Server::tls(|head, _| image(&head.replace("/stored", "/v2/team/plugin/blobs")));
    let forged = Server::tls(|_, _| ok(&layer().iter().map(|byte| byte ^ 1).collect::<Vec<_>>()));
    for (elsewhere, expected) in [(storage.await, Ok(MODULE)), (forged.await, Err(()))] {
        let port = elsewhere.address.port();
        let server = Server::tls(move |head, _| match path(head).rsplit_once("/blobs/") {
            None => guarded(head, host(head)),
            Some((_, digest)) => {
                let location = format!("location: https://0.0.0.0:{port}/stored/{digest}\r\n");
                answer("307 Temporary Redirect", &location, b"")
            }
        });
        let server = server.await;
        let url = format!("oci://{}/team/plugin:v1", server.address);
        let secret = json!({"auths": {server.address.to_string(): {"auth": "dTpw"}}}).to_string();
        let found = fetch(&config(), &url, Some(&secret)).await;
        assert_eq!(found.as_deref().map_err(|_| ()), expected, "{found:?}");
        let heads = elsewhere.heads().concat();
        assert!(!heads.is_empty() && !heads.contains("authorization"), "{heads}");
    }
}

#[tokio::test]
async fn a_token_that_has_expired_is_replaced_once_for_each_request() {
    // The number of uses after which a token expires, and the resulting number of requests.
    for (uses, requests, expected) in
        [(0, 3, Err("answers manifests/v1 with 401")), (1, 6, Ok(MODULE)), (2, 4, Ok(MODULE))]
    {
        let tokens = Mutex::new((0, 0));
        let server = Server::tls(move |head, _| {
            let (issued, used) = &mut *tokens.lock();
            if path(head).starts_with("/token") {
                (*issued, *used) = (*issued + 1, 0);
                return ok(format!(r#"{{"token":"t{issued}"}}"#).as_bytes());
            }
            *used += 1;
            if head.contains(&format!("authorization: Bearer t{issued}\r\n")) && *used <= uses {
                return image(head);
            }
            guarded("", host(head))
        });
        let server = server.await;
        let url = format!("oci://{}/team/plugin:v1", server.address);
        let found = fetch(&config(), &url, None).await;
        match (found.as_deref(), expected) {
            (Err(error), Err(part)) => assert!(error.contains(part), "{error}"),
            (found, expected) => assert_eq!(found.ok(), expected.ok(), "{uses}"),
        }
        assert_eq!(server.heads().len(), requests, "{uses}");
    }
}

#[tokio::test]
async fn an_external_token_server_gets_the_password_and_may_not_redirect_inside() {
    let tokens = Server::tls(|head, _| guarded(head, "unused"));
    let inside = Server::tls(|_, _| answer("302 No", "location: https://10.0.0.1/\r\n", b""));
    for (tokens, expected) in
        [(tokens.await, None), (inside.await, Some("expected no private address"))]
    {
        let elsewhere = format!("0.0.0.0:{}", tokens.address.port());
        let server = Server::tls(move |head, _| guarded(head, &elsewhere)).await;
        let url = format!("oci://{}/team/plugin:v1", server.address);
        let secret = json!({"auths": {server.address.to_string(): {"auth": "dTpw"}}}).to_string();
        match (fetch(&config(), &url, Some(&secret)).await, expected) {
            (Ok(module), None) => assert_eq!(module, MODULE),
            (Err(error), Some(part)) => assert!(error.contains(part), "{error}"),
            (found, _) => panic!("{found:?}"),
        }
        assert!(tokens.heads()[0].contains("authorization: Basic dTpw\r\n"));
        assert!(!server.heads().concat().contains("Basic"));
    }
}

#[tokio::test]
async fn a_token_server_that_stays_busy_ends_the_fetch() {
    let server = Server::tls(|head, _| {
        if path(head).starts_with("/token") {
            return answer("429 Busy", "", b"");
        }
        guarded(head, host(head))
    });
    let server = server.await;
    let url = format!("oci://{}/team/plugin:v1", server.address);
    let error = fetch(&config(), &url, None).await.expect_err("no token");
    assert!(error.contains("answers with 429"), "{error}");
    assert_eq!(server.heads().len(), 4);
}
