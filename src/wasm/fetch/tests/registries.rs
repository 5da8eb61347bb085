//! Images from registries.

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::json;

use super::*;

/// A layer with the module.
fn layer() -> Vec<u8> {
    let mut archive = vec![0; 512];
    archive[..11].copy_from_slice(b"plugin.wasm");
    archive[124..136].copy_from_slice(format!("{:012o}", MODULE.len()).as_bytes());
    archive[156] = b'0';
    archive.extend_from_slice(MODULE);
    archive.resize(2048, 0);
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    std::io::Write::write_all(&mut encoder, &archive).expect("in memory");
    encoder.finish().expect("in memory")
}

fn manifest() -> Vec<u8> {
    let layer = layer();
    let digest = format!("sha256:{}", sha256(&layer));
    let layer = json!({
        "mediaType": "application/vnd.oci.image.layer.v1.tar+gzip",
        "digest": digest,
        "size": layer.len(),
    });
    let manifest = json!({"schemaVersion": 2, "layers": [layer]});
    manifest.to_string().into_bytes()
}

fn index_of(manifest: &[u8]) -> Vec<u8> {
    let digest = format!("sha256:{}", sha256(manifest));
    json!({"schemaVersion": 2, "manifests": [{"digest": digest}]})
        .to_string()
        .into_bytes()
}

/// A registry of one image, with the tags `v1`, and `index` for an index of it.
fn image(head: &str) -> Vec<u8> {
    let (manifest, layer) = (manifest(), layer());
    let paths = [
        ("manifests/v1", manifest.clone()),
        ("manifests/index", index_of(&manifest)),
        (&format!("manifests/sha256:{}", sha256(&manifest)), manifest),
        (&format!("blobs/sha256:{}", sha256(&layer)), layer),
    ];
    let name = path(head)
        .strip_prefix("/v2/team/plugin/")
        .unwrap_or_default();
    let found = paths.into_iter().find(|(path, _)| *path == name);
    found.map_or_else(|| answer("404 Not Found", "", b""), |(_, body)| ok(&body))
}

#[tokio::test]
async fn an_image_is_pulled_by_tag_by_digest_and_through_an_index() {
    let server = Server::tls(|head, _| image(head)).await;
    let digest = sha256(&manifest());
    for version in [
        ":v1",
        ":index",
        &format!("@sha256:{digest}"),
        &format!(":x@sha256:{digest}"),
    ] {
        let url = format!("oci://{}/team/plugin{version}", server.address);
        assert_eq!(
            fetch(&config(), &url, None).await.as_deref(),
            Ok(MODULE),
            "{version}"
        );
    }
    let url = format!("oci://{}/team/plugin:index", server.address);
    let Ok(Source::Oci(url, reference)) = Source::parse(&url) else {
        panic!("no image")
    };
    let deadline = Instant::now() + LIMIT;
    let image = config()
        .image(&url, &reference, None, None, deadline)
        .await
        .expect("an image");
    assert!(image.is(&digest) && image.is(&sha256(&index_of(&manifest()))) && !image.is("x"));
}

#[tokio::test]
async fn a_registry_without_tls_is_asked_over_http() {
    let server = Server::start(|head, _| match head.starts_with("GET ") {
        true => image(head),
        false => answer("400 Bad Request", "", b""),
    });
    let server = server.await;
    let url = format!("oci://{}/team/plugin:v1", server.address);
    let secure = Config {
        insecure: Vec::new(),
        ..config()
    };
    assert_eq!(fetch(&secure, &url, None).await.as_deref(), Ok(MODULE));
}

fn host(head: &str) -> &str {
    let host = head.lines().find_map(|line| line.strip_prefix("host: "));
    host.unwrap_or_default()
}

/// A registry that wants `Bearer good`, of a token server under `/token`.
fn guarded(head: &str, authority: &str) -> Vec<u8> {
    let has = |line: &str| head.lines().any(|found| found == line);
    if path(head).starts_with("/token") {
        let basic = "authorization: Basic dTpw";
        let scope = "scope=repository%3Ateam%2Fplugin%3Apull&service=the%20registry";
        let known = has(basic) || head.starts_with("POST ");
        return match known && (head.starts_with("POST ") || head.contains(scope)) {
            true => ok(br#"{"access_token":"good"}"#),
            false => answer("401 Unauthorized", "", b""),
        };
    }
    match has("authorization: Bearer good") {
        true => image(head),
        false => {
            let realm = format!("https://{authority}/token");
            let challenge = format!("Bearer realm=\"{realm}\",service=\"the registry\"");
            answer(
                "401 Unauthorized",
                &format!("www-authenticate: {challenge}\r\n"),
                b"",
            )
        }
    }
}

#[tokio::test]
async fn registries_get_the_credentials_of_the_pull_secret_in_the_way_they_ask_for() {
    let bearer = Server::tls(|head, _| guarded(head, host(head)));
    let basic = Server::tls(
        |head, _| match head.contains("authorization: Basic dTpw\r\n") {
            true => image(head),
            false => answer(
                "401 No",
                "www-authenticate: Basic realm=\"Registry\"\r\n",
                b"",
            ),
        },
    );
    let (bearer, basic) = (bearer.await, basic.await);
    let secret = |server: &Server, member: &str, value: &str| {
        json!({"auths": {server.address.to_string(): {member: value}}}).to_string()
    };
    for (server, member, value, expected) in [
        (&bearer, "auth", "dTpw", Ok(())),
        (&bearer, "identitytoken", "refresh", Ok(())),
        (&bearer, "registrytoken", "good", Ok(())),
        (
            &bearer,
            "auth",
            "dTp4",
            Err("token server 127.0.0.1 answers with 401"),
        ),
        (
            &bearer,
            "auths",
            "",
            Err("token server 127.0.0.1 answers with 401"),
        ),
        (&bearer, "registrytoken", "expired", Err("401 Unauthorized")),
        (&basic, "auth", "dTpw", Ok(())),
        (&basic, "auth", "dTp4", Err("answers manifests/v1 with 401")),
        (
            &basic,
            "auths",
            "",
            Err("asks for authorization by password, and there is none"),
        ),
        (
            &basic,
            "auth",
            "!",
            Err("is not the base64 of user:password"),
        ),
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
    let error = fetch(
        &config(),
        &format!("oci://{}/a", basic.address),
        Some("null"),
    )
    .await;
    assert!(
        error
            .expect_err("no secret")
            .contains("not a Docker configuration")
    );
}

#[tokio::test]
async fn bad_answers_of_registries_are_errors_that_say_what_came() {
    let corrupt = |part: &'static str, body: Vec<u8>| {
        move |head: &str, _: usize| match path(head).contains(part) {
            true => body.clone(),
            false => image(head),
        }
    };
    let other = layer().iter().map(|byte| byte ^ 1).collect::<Vec<_>>();
    let bearer = |realm: &str| {
        let challenge = format!("www-authenticate: Bearer realm=\"{realm}\"\r\n");
        answer("401 No", &challenge, b"")
    };
    let huge = |size: usize| format!("HTTP/1.1 200 OK\r\ncontent-length: {size}\r\n\r\n");
    let huge = [huge(200 << 20).into_bytes(), vec![b' '; 5 << 20]].concat();
    for (what, part, body, expected) in [
        (
            "no image",
            "manifests",
            answer("404 No", "", b""),
            "answers manifests/v1 with 404",
        ),
        (
            "huge manifest",
            "manifests",
            huge,
            "more than 4194304 bytes",
        ),
        (
            "no manifest",
            "manifests",
            ok(b"<html>"),
            "it is no manifest",
        ),
        (
            "schema 1",
            "manifests",
            ok(br#"{"schemaVersion":1}"#),
            "schema 1, expected 2",
        ),
        (
            "no platform",
            "manifests",
            ok(br#"{"schemaVersion":2,"manifests":[]}"#),
            "no child with platform",
        ),
        (
            "index in index",
            "manifests",
            ok(&index_of(&index_of(b"x"))),
            "does not match requested",
        ),
        ("other layer", "blobs", ok(&other), "cannot unpack it"),
        ("cut layer", "blobs", ok(&layer()[..40]), "cannot unpack it"),
        (
            "long layer",
            "blobs",
            ok(&[layer(), vec![0; 50]].concat()),
            "it has more than",
        ),
        (
            "no layer",
            "blobs",
            answer("404 No", "", b""),
            "could not fetch Wasm binary",
        ),
        (
            "layer elsewhere",
            "blobs",
            answer("307 No", "location: http://169.254.169.254/\r\n", b""),
            "redirects to \"http://169.254.169.254/\", expected no private address",
        ),
        (
            "layer at a metadata service",
            "blobs",
            answer("307 No", "location: http://100.100.100.200/\r\n", b""),
            "is a known cloud metadata address",
        ),
        (
            "unknown scheme",
            "manifests",
            answer("401 No", "www-authenticate: Digest realm=\"a\"\r\n", b""),
            "in no known way",
        ),
        (
            "realm inside",
            "manifests",
            bearer("https://10.0.0.1/token"),
            "rejected unsafe bearer realm: host 10.0.0.1 not allowed",
        ),
        (
            "realm without TLS",
            "manifests",
            bearer("http://example.com/"),
            "realm scheme \"http\" not allowed",
        ),
        (
            "no token",
            "v2",
            bearer("https://SELF/x"),
            "answers without a token",
        ),
    ] {
        let text = String::from_utf8_lossy(&body).contains("SELF");
        let respond = corrupt(part, body);
        let server = Server::tls(move |head, before| {
            if path(head).starts_with("/x") {
                return ok(b"{}");
            }
            let found = respond(head, before);
            match text {
                true => String::from_utf8_lossy(&found)
                    .replace("SELF", host(head))
                    .into(),
                false => found,
            }
        });
        let server = server.await;
        let url = format!("oci://{}/team/plugin:v1", server.address);
        let error = fetch(&config(), &url, None).await.expect_err(what);
        assert!(error.contains(expected), "{what}: {error}");
    }
}

#[tokio::test]
async fn a_busy_registry_is_asked_again_unless_it_wants_to_be_left_alone_for_too_long() {
    let busy = |wait: &'static str| {
        move |head: &str, before: usize| match before {
            0 => answer("429 Busy", wait, b""),
            _ => image(head),
        }
    };
    let server = Server::tls(busy("")).await;
    let url = format!("oci://{}/team/plugin:v1", server.address);
    assert_eq!(fetch(&config(), &url, None).await.as_deref(), Ok(MODULE));
    let server = Server::tls(busy("retry-after: 3600\r\n")).await;
    let url = format!("oci://{}/team/plugin:v1", server.address);
    let error = fetch(&config(), &url, None).await.expect_err("too long");
    assert!(error.contains("429"), "{error}");
    assert_eq!(server.heads().len(), 1);
}

#[tokio::test]
async fn a_layer_may_be_elsewhere_and_is_held_to_its_digest_there() {
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
        assert!(
            !heads.is_empty() && !heads.contains("authorization"),
            "{heads}"
        );
    }
}
