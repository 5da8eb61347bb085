//! Tests the download of images from registries.

use serde_json::json;

use super::*;

/// Returns a layer that contains the module.
pub(super) fn layer() -> Vec<u8> {
    let mut header = tar::Header::new_ustar();
    header.set_path("plugin.wasm").expect("a path");
    header.set_size(MODULE.len() as u64);
    header.set_cksum();
    let mut archive = [header.as_bytes(), MODULE].concat();
    archive.resize(2048, 0);
    gzip(&archive)
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
    json!({"schemaVersion": 2, "manifests": [{"digest": digest}]}).to_string().into_bytes()
}

/// Returns the response of a registry with one image. Its tag is `v1`; the tag `index` names an index with the image.
pub(super) fn image(head: &str) -> Vec<u8> {
    let (manifest, layer) = (manifest(), layer());
    let paths = [
        ("manifests/v1", manifest.clone()),
        ("manifests/index", index_of(&manifest)),
        (&format!("manifests/sha256:{}", sha256(&index_of(&manifest))), index_of(&manifest)),
        (&format!("manifests/sha256:{}", sha256(&manifest)), manifest),
        (&format!("blobs/sha256:{}", sha256(&layer)), layer),
    ];
    let name = path(head).strip_prefix("/v2/team/plugin/").unwrap_or_default();
    let found = paths.into_iter().find(|(path, _)| *path == name);
    found.map_or_else(|| answer("404 Not Found", "", b""), |(_, body)| ok(&body))
}

#[tokio::test]
async fn an_image_is_pulled_by_tag_by_digest_and_through_an_index() {
    let server = Server::tls(|head, _| image(head)).await;
    let digest = sha256(&manifest());
    for version in [":v1", ":index", &format!("@sha256:{digest}"), &format!(":x@sha256:{digest}")] {
        let url = format!("oci://{}/team/plugin{version}", server.address);
        assert_eq!(fetch(&config(), &url, None).await.as_deref(), Ok(MODULE), "{version}");
    }
    let url = format!("oci://{}/team/plugin:index", server.address);
    let source = Source::parse(&url).expect("a URL");
    let reference = source.image.as_ref().expect("an image");
    let deadline = Instant::now() + LIMIT;
    let image = config().image(&source, reference, None, None, deadline).await.expect("an image");
    assert_eq!(image.digests, [digest, sha256(&index_of(&manifest()))]);
}

#[tokio::test]
async fn a_registry_without_tls_is_asked_over_http() {
    let server = Server::start(|head, _| {
        if head.starts_with("GET ") {
            return image(head);
        }
        answer("400 Bad Request", "", b"")
    });
    let server = server.await;
    let url = format!("oci://{}/team/plugin:v1", server.address);
    let secure = Config { insecure: Vec::new(), ..config() };
    assert_eq!(fetch(&secure, &url, None).await.as_deref(), Ok(MODULE));
}

pub(super) fn host(head: &str) -> &str {
    let host = head.lines().find_map(|line| line.strip_prefix("host: "));
    host.unwrap_or_default()
}

#[tokio::test]
async fn bad_answers_of_registries_are_errors_that_say_what_came() {
    let corrupt = |part: &'static str, body: Vec<u8>| {
        move |head: &str, _: usize| {
            if path(head).contains(part) {
                return body.clone();
            }
            image(head)
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
        ("no image", "manifests", answer("404 No", "", b""), "answers manifests/v1 with 404"),
        ("huge manifest", "manifests", huge, "more than 4194304 bytes"),
        ("no manifest", "manifests", ok(b"<html>"), "not a manifest"),
        (
            "schema 1",
            "manifests",
            ok(br#"{"schemaVersion":1}"#),
            "invalid format as an OCI image: found layers []",
        ),
        (
            "no platform",
            "manifests",
            ok(br#"{"schemaVersion":2,"manifests":[]}"#),
            "no child with platform",
        ),
        (
            "index in index",
            "manifests/v1",
            ok(&index_of(&index_of(&manifest()))),
            "its index leads to another index",
        ),
        (
            "other manifest than the index says",
            "manifests",
            ok(&index_of(b"x")),
            "does not match requested",
        ),
        (
            "layer that breaks off",
            "blobs",
            answer("200 OK", "", &layer())[..60].to_vec(),
            "failed before the end",
        ),
        (
            "layers in a circle",
            "blobs",
            answer("307 No", "location: ?again\r\n", b""),
            "stopped after 10 redirects",
        ),
        ("other layer", "blobs", ok(&other), "it has digest"),
        ("cut layer", "blobs", ok(&layer()[..40]), "it has digest"),
        ("long layer", "blobs", ok(&[layer(), vec![0; 50]].concat()), "it has more than"),
        ("no layer", "blobs", answer("404 No", "", b""), "could not fetch Wasm binary"),
        (
            "layer elsewhere",
            "blobs",
            answer("307 No", "location: http://169.254.169.254/?signature\r\n", b""),
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
            "by an unknown scheme",
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
        ("no token", "v2", bearer("https://SELF/x"), "answers without a token"),
    ] {
        let names_itself = String::from_utf8_lossy(&body).contains("SELF");
        let respond = corrupt(part, body);
        let server = Server::tls(move |head, before| {
            if path(head).starts_with("/x") {
                return ok(b"{}");
            }
            let response = respond(head, before);
            if !names_itself {
                return response;
            }
            let text = String::from_utf8_lossy(&response);
            text.replace("SELF", host(head)).into()
        });
        let server = server.await;
        let url = format!("oci://{}/team/plugin:v1", server.address);
        let error = fetch(&config(), &url, None).await.expect_err(what);
        assert!(error.contains(expected), "{what}: {error}");
    }
}

#[tokio::test]
async fn a_busy_registry_is_asked_again() {
    let server = Server::tls(|head, before| match before {
        0 => answer("429 Busy", "", b""),
        _ => image(head),
    });
    let server = server.await;
    let url = format!("oci://{}/team/plugin:v1", server.address);
    assert_eq!(fetch(&config(), &url, None).await.as_deref(), Ok(MODULE));
}
