//! What the tests share: processes, a control plane with resources, load, and patience.

pub mod control_plane;
pub mod http;
pub mod names;
pub mod namespace;
pub mod pod;
pub mod process;
pub mod registry;
pub mod resources;
pub mod tls;

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

/// How long anything may take that should happen soon on a machine that is busy.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Where Envoy is; none means that the test is not to be run.
pub fn envoy_binary() -> Option<PathBuf> {
    static FOUND: OnceLock<Option<PathBuf>> = OnceLock::new();
    let found = FOUND.get_or_init(find_envoy).clone();
    if found.is_none() {
        let sentence = "There is no Envoy: set ENVOY_BIN to the path of one, or put it on PATH.";
        assert!(variable("CI").is_none(), "{sentence}");
        eprintln!("{sentence} This test is not run.");
    }
    found
}

/// Where Chromium is; none means that the test is not to be run.
pub fn chromium_binary() -> Option<PathBuf> {
    let found = match variable("CHROMIUM_BIN") {
        Some(path) => vec![path.into()],
        None => on_path(&["chromium", "chromium-browser", "google-chrome"]),
    };
    let found = found.into_iter().find(|path| path.is_file());
    if found.is_none() {
        let sentence = "There is no Chromium: set CHROMIUM_BIN to the path of one, or install it.";
        assert!(variable("PAGE_TESTS").is_none(), "{sentence}");
        eprintln!("{sentence} This test is not run.");
    }
    found
}

/// Where Docker's registry is; none means that the test is not to be run.
pub fn registry_binary() -> Option<PathBuf> {
    let found = on_path(&["docker-registry"]);
    let found = found.into_iter().find(|path| path.is_file());
    if found.is_none() {
        let sentence = "There is no docker-registry: install the package of that name.";
        assert!(variable("REGISTRY_TESTS").is_none(), "{sentence}");
        eprintln!("{sentence} This test is not run.");
    }
    found
}

fn on_path(names: &[&str]) -> Vec<PathBuf> {
    let path = variable("PATH").unwrap_or_default();
    let directories = std::env::split_paths(&path);
    directories
        .flat_map(|directory| names.iter().map(move |name| directory.join(name)))
        .collect()
}

fn find_envoy() -> Option<PathBuf> {
    let candidates: Vec<PathBuf> = match variable("ENVOY_BIN") {
        Some(path) => vec![path.into()],
        None => on_path(&["envoy"]),
    };
    let file = candidates.into_iter().find(|path| path.is_file())?;
    // Agents run in directories of their own.
    file.canonicalize().ok()
}

#[expect(
    clippy::disallowed_methods,
    reason = "the suite is told by its environment where Envoy and Chromium are"
)]
pub fn variable(name: &str) -> Option<std::ffi::OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

/// A port that is free and none of Istio's own, given out once. Below those the system gives to clients, so that none
/// of them takes it before its owner binds it.
pub fn free_port() -> u16 {
    static NEXT: OnceLock<AtomicU16> = OnceLock::new();
    let next = NEXT.get_or_init(|| {
        let of_process = u16::try_from(std::process::id() % 100).unwrap_or_default();
        AtomicU16::new(12_000 + of_process * 200)
    });
    loop {
        let port = next.fetch_add(1, Ordering::Relaxed);
        let is_of_istio = (15_000..15_100).contains(&port);
        if !is_of_istio && TcpListener::bind(local(port)).is_ok() {
            return port;
        }
    }
}

pub fn local(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}

/// What must happen within the patience of a slow machine.
pub async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    let Ok(value) = tokio::time::timeout(PATIENCE, future).await else {
        panic!("{what}: not within {PATIENCE:?}");
    };
    value
}

/// Looks again until there is something.
pub async fn eventually<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    soon(what, async {
        loop {
            if let Some(value) = look().await {
                return value;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await
}
