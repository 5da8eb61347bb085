//! Tests how platforms are detected, and how their metadata services are queried.

use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use super::*;

fn config(root: &TempDir) -> Config {
    Config {
        choice: String::new(),
        gcp: None,
        gcp_host: None,
        root: root.path().to_owned(),
        v6: false,
    }
}

fn root(files: &[(&str, &str)]) -> TempDir {
    let root = TempDir::new().expect("a directory");
    for (path, text) in files {
        let path = root.path().join(path);
        std::fs::create_dir_all(path.parent().expect("a directory")).expect("made");
        std::fs::write(path, text).expect("written");
    }
    root
}

#[tokio::test]
async fn an_unknown_platform_is_detected() {
    let root = root(&[]);
    let mut config = config(&root);
    config.gcp = known(["a", "b", "c", "d"]);
    for (choice, is_detected) in [("NONE", false), ("none", false), ("", true), ("mars", true)] {
        choice.clone_into(&mut config.choice);
        let platform = discover(&config).await;
        assert_eq!(platform.metadata.contains_key("gcp_project"), is_detected);
    }
}

fn known(parts: [&str; 4]) -> Option<Metadata> {
    let parts = parts.map(str::to_owned);
    Some(known_google(parts, String::new(), String::new()))
}

#[tokio::test]
async fn static_metadata_of_google_needs_no_network() {
    let root = root(&[("etc/resolv.conf", "search x.local us-east1-b.c.shop.internal\n")]);
    let mut config = config(&root);
    config.gcp = known(["shop", "7", "main", "us-east1"]);
    let platform = discover(&config).await;
    assert_eq!(platform.locality.region, "us-east1");
    assert_eq!(platform.locality.zone, "us-east1-b");
    assert_eq!(platform.metadata["gcp_project_number"], "7");
    assert_eq!(
        platform.metadata["gcp_gke_cluster_url"],
        "https://container.googleapis.com/v1/projects/shop/locations/us-east1/clusters/main"
    );
    assert_eq!(platform.metadata.len(), 5);
}

#[tokio::test]
async fn platform_none_discovers_no_metadata() {
    let root = root(&[]);
    let mut config = config(&root);
    config.choice = "none".to_owned();
    assert_eq!(discover(&config).await, Platform::default());
}

#[tokio::test]
async fn googles_metadata_service_is_queried() {
    googles_metadata_arrives_after(Duration::ZERO).await;
}

#[tokio::test(start_paused = true)]
async fn google_metadata_that_takes_three_seconds_is_used_without_missing_values() {
    googles_metadata_arrives_after(Duration::from_secs(3)).await;
}

async fn googles_metadata_arrives_after(delay: Duration) {
    let root = root(&[]);
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let mut config = config(&root);
    config.gcp_host = Some(listener.local_addr().expect("an address").to_string());
    let platform = tokio::select! {
        platform = discover(&config) => platform,
        () = serve(&listener, delay) => unreachable!("it serves for ever"),
    };
    assert_eq!(platform.locality.zone, "europe-west4-a");
    assert_eq!(platform.metadata["gcp_location"], "europe-west4-a");
    assert_eq!(platform.metadata["gcp_project"], "shop");
    assert_eq!(platform.metadata.len(), 2);
}

/// Serves metadata with a project and a zone, each response after `delay`. With a delay, the request for
/// `created-by` gets no response.
async fn serve(listener: &TcpListener, delay: Duration) {
    let mut answers = JoinSet::new();
    loop {
        let (stream, _) = listener.accept().await.expect("a caller");
        answers.spawn(answer(stream, delay));
    }
}

async fn answer(mut stream: TcpStream, delay: Duration) {
    let mut request = [0; 1024];
    let length = stream.read(&mut request).await.expect("a request");
    let request = String::from_utf8_lossy(&request[..length]).to_ascii_lowercase();
    assert!(request.contains("metadata-flavor: google"), "{request}");
    let path = request.split(' ').nth(1).expect("a path");
    let (status, text) = match path.rsplit('/').next() {
        Some("project-id") => ("200 OK", "shop"),
        Some("zone") => ("200 OK", "projects/7/zones/europe-west4-a"),
        Some("created-by") if !delay.is_zero() => std::future::pending().await,
        _ => ("404 Not Found", ""),
    };
    tokio::time::sleep(delay).await;
    let length = text.len();
    let answer = format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\n\r\n{text}");
    stream.write_all(answer.as_bytes()).await.expect("answered");
}

#[tokio::test(start_paused = true)]
async fn a_metadata_service_that_never_answers_costs_at_most_five_seconds() {
    let root = root(&[]);
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let mut config = config(&root);
    config.gcp_host = Some(listener.local_addr().expect("an address").to_string());
    let start = tokio::time::Instant::now();
    assert_eq!(discover(&config).await, Platform::default());
    assert!(start.elapsed() <= Duration::from_secs(5));
}
