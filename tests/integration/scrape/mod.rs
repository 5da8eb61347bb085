//! Tests the merged page of metrics from outside: Prometheus' own parsers read it, and it takes little memory.
//!
//! The parsers are those of the Python package `prometheus-client`, which the test installs below
//! the target directory.

mod memory;
mod server;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use http_body_util::BodyExt;
use istio_agent::metrics::Registry;
use istio_agent::scrape::targets::Target;
use istio_agent::scrape::{Config, Scrape};

use crate::support::python::package;

/// Returns a scrape of the pages on these ports.
pub fn scrape(envoy: u16, targets: &[u16]) -> Scrape {
    let targets =
        targets.iter().map(|port| Target { port: *port, path: "/metrics".to_owned(), tls: None });
    let config = Config {
        envoy_port: Some(envoy),
        hidden: Vec::new(),
        targets: targets.collect(),
        limit: 10 << 20,
        timeout: std::time::Duration::from_secs(60),
    };
    Scrape::new(config, Registry::default())
}

pub fn request() -> http::request::Parts {
    let request = http::Request::get("/stats/prometheus").body(());
    request.expect("a request").into_parts().0
}

/// Returns a request whose page is in protobuf if a source is.
pub fn request_for_protobuf() -> http::request::Parts {
    let mut request = request();
    request.headers.insert(http::header::ACCEPT, http::HeaderValue::from_static(server::PROTOBUF));
    request
}

#[test]
fn prometheus_own_parsers_read_every_page() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let Some(parsers) = package("tests/integration/scrape/requirements.txt", "CI") else {
        return;
    };
    let folder = tempfile::TempDir::new().expect("a directory");
    let mut pages = golden_pages(root);
    pages.extend(write_merged_pages(folder.path()));
    let parsed = Command::new("python3")
        .env("PYTHONPATH", parsers)
        .arg("-B")
        .arg(root.join("tests/integration/scrape/parse.py"))
        .args(pages)
        .status();
    assert!(parsed.expect("python runs").success());
}

fn golden_pages(root: &Path) -> Vec<PathBuf> {
    let cases = fs::read_dir(root.join("tests/golden/scrape")).expect("cases");
    let files = cases.flat_map(|case| fs::read_dir(case.expect("a case").path()).expect("files"));
    let files = files.map(|file| file.expect("a file").path());
    let is_page = |path: &PathBuf| path.file_stem().is_some_and(|name| name == "expected");
    files.filter(is_page).collect()
}

/// Merges large pages, writes the results to `folder`, and returns their paths.
fn write_merged_pages(folder: &Path) -> Vec<PathBuf> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let envoy = server::page(server::TEXT, server::large("envoy", 100_000));
    let text = server::page(server::TEXT, server::large("app", 100_000));
    let metrics = server::large("app", 10_000) + "# EOF\n";
    let metrics = server::page(server::OPENMETRICS, metrics);
    let cases = [
        ("one.txt", vec![text]),
        ("one.om", vec![metrics]),
        ("two.txt", vec![text, metrics]),
        ("two.om", vec![metrics, metrics]),
    ];
    let write = |(name, targets): (&str, Vec<u16>)| {
        let body = runtime.block_on(async {
            let page = scrape(envoy, &targets).page(request()).await;
            page.into_body().collect().await.expect("a page").to_bytes()
        });
        assert!(body.len() > 5_000_000, "{name} has {} bytes", body.len());
        let path = folder.join(name);
        fs::write(&path, body).expect("written");
        path
    };
    cases.into_iter().map(write).collect()
}
