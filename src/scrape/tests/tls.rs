//! Tests application pages that are served with TLS.

use std::collections::BTreeMap;
use std::os::unix::fs::{lchown, symlink};

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use super::*;
use crate::istiod::fake::{Authority, Clients, server_tls};
use crate::scrape::tls;

/// A server whose certificate has another name than `localhost`. Its page says whether the client has a certificate.
struct Server {
    port: u16,
    _serving: JoinSet<()>,
}

impl Server {
    async fn start(authority: &Authority) -> Self {
        let mut tls = server_tls(authority, "app.example", Clients::Optional);
        tls.alpn_protocols.clear();
        let acceptor = TlsAcceptor::from(Arc::new(tls));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let Ok(mut stream) = acceptor.accept(stream).await else { continue };
                let has_client = stream.get_ref().1.peer_certificates().is_some();
                let _ = stream.read(&mut [0; 4096]).await;
                let body = format!("has_client {}\n", u8::from(has_client));
                let head = "HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\nconnection: close\r\n";
                let answer = format!("{head}content-length: {}\r\n\r\n{body}", body.len());
                let _ = stream.write_all(answer.as_bytes()).await;
                let _ = stream.shutdown().await;
            }
        });
        Self { port, _serving: serving }
    }

    /// Scrapes the page with these settings. Returns it, or the problem.
    async fn scraped(&self, files: serde_json::Value) -> String {
        let text = json!({ self.port.to_string(): files }).to_string();
        let files = tls::parse(&text).expect("files").remove(&self.port).map(Arc::new);
        let target = Target { port: self.port, path: "/metrics".to_owned(), tls: files };
        let client = tls::Clients::default().of(self.port, target.tls.clone().expect("TLS"));
        let mut source =
            Source::new(client.boxed(), HeaderMap::new(), Origin::Application, &target, 1000);
        source.read_head().await;
        let chunk = source.chunk().await.unwrap_or_default();
        match source.failure {
            Some(problem) => problem.to_string(),
            None => String::from_utf8_lossy(&chunk).into_owned(),
        }
    }
}

fn write(folder: &Path, name: &str, text: &str) -> String {
    let path = folder.join(name);
    fs::write(&path, text).expect("written");
    path.display().to_string()
}

#[tokio::test]
async fn the_targets_certificate_is_checked_against_the_roots_and_not_its_names() {
    let (own, other) = (Authority::new("own"), Authority::new("other"));
    let server = Server::start(&own).await;
    let folder = tempfile::tempdir().expect("a directory");
    assert_eq!(server.scraped(json!({})).await, "has_client 0\n");
    let roots = write(folder.path(), "ca.pem", &own.pem());
    assert_eq!(server.scraped(json!({ "caFile": roots })).await, "has_client 0\n");
    let roots = write(folder.path(), "other.pem", &other.pem());
    let problem = server.scraped(json!({ "caFile": roots })).await;
    assert!(problem.contains("UnknownIssuer"), "{problem}");
    let pair = own.issue("agent");
    let chain = write(folder.path(), "chain.pem", &pair.chain);
    let key = write(folder.path(), "key.pem", &pair.key);
    let page = server.scraped(json!({ "certFile": chain, "keyFile": key })).await;
    assert_eq!(page, "has_client 1\n");
    // A key of another certificate, and files that are missing or no PEM.
    let key = write(folder.path(), "key.pem", &other.issue("agent").key);
    let problem = server.scraped(json!({ "certFile": chain, "keyFile": key })).await;
    assert!(problem.contains("chain.pem") && problem.contains("SCRAPE_TLS_UNUSABLE"), "{problem}");
    let problem = server.scraped(json!({ "caFile": "/nowhere" })).await;
    assert!(problem.contains("/nowhere"), "{problem}");
    let roots = write(folder.path(), "ca.pem", "no PEM");
    let problem = server.scraped(json!({ "caFile": roots })).await;
    assert!(problem.contains("no PEM certificate"), "{problem}");
}

#[tokio::test]
async fn changed_files_are_used_at_the_next_scrape() {
    let (own, other) = (Authority::new("own"), Authority::new("other"));
    let server = Server::start(&own).await;
    let folder = tempfile::tempdir().expect("a directory");
    let roots = write(folder.path(), "ca.pem", &other.pem());
    let text = json!({ server.port.to_string(): { "caFile": roots } }).to_string();
    let files = tls::parse(&text).expect("files").remove(&server.port).map(Arc::new);
    let target = Target { port: server.port, path: "/".to_owned(), tls: files };
    let registry = Registry::default();
    let config = Config {
        envoy_port: None,
        hidden: Vec::new(),
        targets: vec![target],
        limit: 1000,
        timeout: Duration::from_secs(10),
    };
    let scrape = Scrape::new(config, registry.clone());
    assert_eq!(scrape_without_agent_metrics(&scrape, &[]).await, "");
    assert_eq!(failures(&registry, "application"), 1);
    write(folder.path(), "ca.pem", &own.pem());
    assert_eq!(scrape_without_agent_metrics(&scrape, &[]).await, "has_client 0\n");
}

#[tokio::test]
async fn links_of_other_users_are_not_followed() {
    let own = Authority::new("own");
    let server = Server::start(&own).await;
    let folder = tempfile::tempdir().expect("a directory");
    // Like a volume of Kubernetes: a link to a file below a link to a directory.
    fs::create_dir(folder.path().join("..v1")).expect("a directory");
    write(&folder.path().join("..v1"), "ca.pem", &own.pem());
    symlink("..v1", folder.path().join("..data")).expect("a link");
    symlink("..data/ca.pem", folder.path().join("ca.pem")).expect("a link");
    let roots = folder.path().join("ca.pem");
    assert_eq!(server.scraped(json!({ "caFile": roots })).await, "has_client 0\n");
    if lchown(folder.path().join("..data"), Some(4711), None).is_ok() {
        let problem = server.scraped(json!({ "caFile": roots })).await;
        assert!(problem.contains("the link ..data of user 4711 is not followed"), "{problem}");
    }
    fs::remove_file(&roots).expect("removed");
    symlink("ca.pem", &roots).expect("a link");
    let problem = server.scraped(json!({ "caFile": roots })).await;
    assert!(problem.contains("is not followed"), "{problem}");
    fs::remove_file(&roots).expect("removed");
    write(folder.path(), "ca.pem", &"x".repeat((1 << 20) + 1));
    let problem = server.scraped(json!({ "caFile": roots })).await;
    assert!(problem.contains("more than 1048576 bytes"), "{problem}");
}

#[test]
fn files_are_given_by_port() {
    for text in ["null", "{}"] {
        assert_eq!(tls::parse(text).expect("good"), BTreeMap::new());
    }
    let ports = tls::parse(r#"{"9443": null, "9444": {"caFile": "/ca"}}"#).expect("good");
    assert_eq!(ports.into_keys().collect::<Vec<_>>(), [9444]);
    for (text, expected) in [
        (r#"{"9443": {"certFile": "/c"}}"#, "both"),
        (r#"{"9443": {"keyFile": "/k"}}"#, "both"),
        (r#"{"9443": {"ca": "/k"}}"#, "unknown field"),
        (r#"{"http": {}}"#, "expected a JSON object"),
        ("[]", "expected a JSON object"),
    ] {
        let error = tls::parse(text).expect_err(text);
        assert!(error.to_string().contains(expected), "{error}");
    }
}
