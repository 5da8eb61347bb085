//! Tests downloads of modules from well-behaved and misbehaving servers and registries.

mod registries;
mod tokens;

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use aws_lc_rs::digest::{SHA256, digest};
use flate2::Compression;
use flate2::write::GzEncoder;
use proptest::prelude::*;
use tokio::time::{Instant, timeout};

use super::download::{Download, hexadecimal};
use super::fake_server::{Server, answer, ok, path};
use super::*;
use crate::istiod::fake::{self, Authority, Clients};

const MODULE: &[u8] = b"\0asm\x01\0\0\0module";
const LIMIT: Duration = Duration::from_secs(20);

fn config() -> Config {
    Config {
        insecure: vec!["*".to_owned()],
        blocked: Vec::new(),
        proxies: Default::default(),
        request_limit: Duration::from_secs(5),
        attempts: 3,
        max_bytes: 100_000,
        credentials: Vec::new(),
        roots: SystemRoots::new("", ""),
    }
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).expect("in memory");
    encoder.finish().expect("in memory")
}

fn sha256(bytes: &[u8]) -> String {
    hexadecimal(digest(&SHA256, bytes).as_ref())
}

/// Fetches the module of a URL; for an image, first its manifest and then the module.
async fn fetch(config: &Config, url: &str, secret: Option<&str>) -> Result<Vec<u8>, String> {
    let directory = tempfile::tempdir().expect("a directory");
    let fetched = fetch_into(config, url, secret, directory.path()).await;
    let fetched = fetched.map_err(|(_, found)| found);
    let module = fetched.map(|download| {
        let module = std::fs::read(download.file.path()).expect("a file");
        assert_eq!((download.size, download.sha256), (module.len() as u64, sha256(&module)));
        module
    });
    // Neither a failure nor a dropped download leaves a file.
    assert_eq!(std::fs::read_dir(directory.path()).expect("a directory").count(), 0);
    module
}

async fn fetch_into(
    config: &Config,
    url: &str,
    secret: Option<&str>,
    directory: &Path,
) -> Result<Download, Error> {
    let fetching = async {
        let (source, deadline) = (Source::parse(url)?, Instant::now() + LIMIT);
        let Some(image) = &source.image else {
            return config.download(&source, directory, deadline).await;
        };
        let image = config.image(&source, image, secret, None, deadline).await?;
        config.module(&source, image, directory).await
    };
    timeout(LIMIT, fetching).await.expect("in time")
}

#[tokio::test]
async fn urls_are_http_or_oci() {
    for (url, expected) in [
        ("ftp://host/a", "unsupported Wasm module downloading URL scheme: ftp"),
        ("host/a", "unsupported Wasm module downloading URL scheme: "),
        ("", "unsupported Wasm module downloading URL scheme: "),
        ("file:///a", "unsupported Wasm module downloading URL scheme: file"),
        ("https://", "fail to parse Wasm module fetch url: https://…: "),
        ("http://user:hunter2@/a", "fail to parse"),
        ("http://user:hunter2@a b/", "fail to parse"),
        ("oci://host/UPPER", "could not parse reference"),
    ] {
        let error = fetch(&config(), url, None).await.expect_err(url);
        assert!(error.contains(expected) && !error.contains("hunter2"), "{error}");
    }
    let source = Source::parse("HTTPS://user:hunter2@host:1/a?token=hunter2").expect("a URL");
    assert_eq!(source.redacted(), "https://host:1/a");
    assert!(!format!("{source:?}").contains("dXNlc"));
}

#[tokio::test]
async fn a_module_is_downloaded_over_http_and_tls() {
    let plain = Server::start(|_, _| ok(MODULE)).await;
    let tls = Server::tls(|_, _| ok(MODULE)).await;
    let url = format!("http://user:p%40ss@{}/a?b=c", plain.address);
    assert_eq!(fetch(&config(), &url, None).await.as_deref(), Ok(MODULE));
    let head = plain.heads().remove(0);
    assert!(head.starts_with("GET /a?b=c HTTP/1.1\r\n"), "{head}");
    assert!(head.contains("authorization: Basic dXNlcjpwQHNz\r\n"), "{head}");
    let url = format!("https://{}/a", tls.address);
    assert_eq!(fetch(&config(), &url, None).await.as_deref(), Ok(MODULE));
    let insecure = vec![tls.address.to_string()];
    let listed = Config { insecure, ..config() };
    assert_eq!(fetch(&listed, &url, None).await.as_deref(), Ok(MODULE));
    let verifying = Config { insecure: Vec::new(), attempts: 1, ..config() };
    let error = fetch(&verifying, &url, None).await.expect_err("a foreign certificate");
    assert!(error.contains("certificate") || error.contains("no root certificates"), "{error}");
}

#[tokio::test]
async fn a_server_ca_certificate_is_accepted_if_a_root_has_signed_it() {
    let root = Authority::new("root");
    let (own, middle) = (root.below("server"), root.below("middle"));
    let below = middle.below("server");
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("roots.pem");
    std::fs::write(&file, root.pem()).expect("written");
    let config = Config {
        insecure: Vec::new(),
        attempts: 1,
        roots: SystemRoots::new(&file.display().to_string(), "/nonexistent"),
        ..config()
    };
    for (chain, is_accepted) in [(&[&root][..], true), (&[&own], true), (&[&below, &middle], false)]
    {
        let mut tls = fake::server_tls(&root, "127.0.0.1", Clients::Optional);
        tls.cert_resolver = Authority::shown(chain);
        tls.alpn_protocols.clear();
        let tls = Arc::new(tls).into();
        let server = Server::serve(Some(tls), |_, _| ok(MODULE)).await;
        let found = fetch(&config, &format!("https://{}/a", server.address), None).await;
        match found {
            Ok(module) => assert!(is_accepted && module == MODULE),
            Err(error) => assert!(!is_accepted && error.contains("isCA: false"), "{error}"),
        }
    }
}

#[tokio::test]
async fn roots_are_needed_only_where_a_redirect_leads_to_tls() {
    let config = Config {
        insecure: Vec::new(),
        roots: SystemRoots::new("/nonexistent", "/nonexistent"),
        ..config()
    };
    let plain = Server::start(|_, _| ok(MODULE)).await;
    let tls = Server::tls(|_, _| ok(MODULE)).await;
    let location = format!("location: https://{}/\r\n", tls.address);
    let redirecting = Server::start(move |_, _| answer("302 Found", &location, b"")).await;
    let url = format!("http://{}/a", plain.address);
    assert_eq!(fetch(&config, &url, None).await.as_deref(), Ok(MODULE));
    let url = format!("http://{}/a", redirecting.address);
    let error = fetch(&config, &url, None).await.expect_err("no roots");
    assert!(error.contains("no root certificates"), "{error}");
    let found = fetch(&self::config(), &url, None).await;
    assert_eq!(found.as_deref(), Ok(MODULE));
}

#[tokio::test]
async fn bad_answers_over_http_are_errors_that_say_what_came() {
    let body = |text: &str| format!("HTTP/1.1 200 OK\r\n{text}").into_bytes();
    let chunked = "transfer-encoding: chunked\r\n\r\n";
    for (what, response, requests, expected) in [
        ("not found", answer("404 Not Found", "", b""), 1, "status code 404"),
        ("too many", answer("429 Too Many", "", b""), 3, "status code 429"),
        ("no content", answer("204 No Content", "", b""), 1, "status code 204"),
        ("not implemented", answer("501 No", "", b""), 1, "status code 501"),
        ("server error", answer("503 No", "", b""), 3, "/a failed: status code 503"),
        ("page", ok(b"<!DOCTYPE html>"), 1, "is invalid: it begins with \"<!DOCTYPE"),
        ("empty", ok(b""), 1, "is invalid: it begins with \"\""),
        ("cut off", body("content-length: 50\r\n\r\n\0asm\x01\0\0\0"), 1, "failed before the end"),
        ("cut chunk", body(&format!("{chunked}20\r\n\0asm\x01\0\0\0")), 1, "failed before the end"),
        ("too large", ok(&[MODULE, &[0; 100_000]].concat()), 1, "more than 100000 bytes"),
        (
            "shorter than said",
            body("content-length: 5\r\n\r\n\0asm\x01\0\0\0module"),
            1,
            "is invalid: it begins with \"\\x00asm\\x01\"",
        ),
        (
            "said to be endless",
            body("content-length: 9223372036854775807\r\n\r\n\0asm"),
            1,
            "failed before the end",
        ),
        (
            "two lengths",
            body("content-length: 12\r\ncontent-length: 13\r\n\r\n\0asm"),
            3,
            "failed before the end",
        ),
        (
            "gzip bomb",
            ok(&gzip(&[MODULE, &[0; 1 << 20]].concat())),
            1,
            "more bytes than a module may have",
        ),
        ("zip", ok(b"PK\x03\x04..........."), 1, "is invalid: it begins with \"PK"),
        ("no HTTP", b"hello".to_vec(), 3, "failed before the end"),
        (
            "redirect to itself",
            answer("302 Found", "location: /a\r\n", b""),
            30,
            "stopped after 10 redirects",
        ),
        (
            "redirect to metadata",
            answer("302 Found", "location: http://169.254.169.254/\r\n", b""),
            3,
            "connection blocked: resolved IP 169.254.169.254 is link-local",
        ),
        (
            "redirect to another scheme",
            answer("302 Found", "location: file:///etc/passwd\r\n", b""),
            3,
            "redirects to",
        ),
    ] {
        let server = Server::start(move |_, _| response.clone()).await;
        let url = format!("http://{}/a", server.address);
        let error = fetch(&config(), &url, None).await.expect_err(what);
        assert!(error.contains(expected), "{what}: {error}");
        assert_eq!(server.heads().len(), requests, "{what}");
    }
}

proptest! {
    /// The deadline of each download is its start, so that no second attempt follows.
    #[test]
    fn header_numbers_of_any_size_end_in_a_module_or_error(
        status in prop::sample::select(vec!["200 OK", "302 Found", "401 No", "429 Busy", "503 No"]),
        number in "-?[0-9]{1,24}|[0-9]{1,3}[.e][0-9]{1,3}",
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let fetched = runtime.expect("a runtime").block_on(async {
            let head = format!("HTTP/1.1 {status}\r\ncontent-length: {number}\r\n\r\n");
            let server = Server::start(move |_, _| [head.as_bytes(), MODULE].concat()).await;
            let source = Source::parse(&format!("http://{}/a", server.address)).expect("a URL");
            let directory = tempfile::tempdir().expect("a directory");
            let config = config();
            let fetching = config.download(&source, directory.path(), Instant::now());
            timeout(LIMIT, fetching).await.expect("in time")
        });
        prop_assert!(fetched.is_err() || status == "200 OK");
    }
}

#[tokio::test]
async fn a_server_error_is_followed_by_another_attempt() {
    let server = Server::start(|_, before| match before {
        0 | 1 => answer("500 No", "", b""),
        _ => ok(MODULE),
    });
    let server = server.await;
    let url = format!("http://{}/a", server.address);
    assert_eq!(fetch(&config(), &url, None).await.as_deref(), Ok(MODULE));
}

#[tokio::test]
async fn blocked_networks_and_a_silent_server_end_the_download() {
    let server = Server::start(|_, _| Vec::new()).await;
    let url = format!("http://{}/a", server.address);
    let blocked = vec![Cidr::parse("127.0.0.0/8").expect("a network")];
    let config = Config { blocked, attempts: 1, ..config() };
    let error = fetch(&config, &url, None).await.expect_err("blocked");
    assert!(error.contains("127.0.0.1 is in blocked CIDR range 127.0.0.0/8"), "{error}");
    assert!(server.heads().is_empty());
    let request_limit = Duration::from_millis(50);
    let config = Config { blocked: Vec::new(), request_limit, ..config };
    let error = fetch(&config, &url, None).await.expect_err("silent");
    assert!(error.contains("within 50ms"), "{error}");
}

#[tokio::test]
async fn a_directory_that_cannot_be_written_is_named() {
    let server = Server::start(|_, _| ok(MODULE)).await;
    let url = format!("http://{}/a", server.address);
    let missing = Path::new("/nonexistent/modules");
    let error = fetch_into(&config(), &url, None, missing).await.expect_err("no directory");
    let (_, error) = error;
    let parts = ["cannot write it to disk", "/nonexistent/modules/"];
    assert!(parts.iter().all(|part| error.contains(part)), "{error}");
}
