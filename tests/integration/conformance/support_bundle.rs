//! Tests the `support-bundle` command as a process: its memory with a large configuration of Envoy, and the
//! destinations of its output.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::support::process::Process;
use crate::support::programs::{binary, is_this_agent};
use crate::support::until;

/// The size of a configuration dump, in bytes, which ends with a secret. In a debug build, 12 MiB take 4 of the
/// 20 s that a bundle has.
const LARGE: usize = if cfg!(debug_assertions) { 12 << 20 } else { 100 << 20 };
const SECRET: &str = "last-header-of-all";

/// Returns the command, which runs in `directory` and uses the admin port `admin` of an Envoy.
fn bundle(directory: &Path, admin: u16) -> Command {
    let mut command = Command::new(binary("AGENT_BIN", Some(env!("CARGO_BIN_EXE_pilot-agent"))));
    let config = json!({ "proxyAdminPort": admin, "statusPort": 0, "binaryPath": "none" });
    command
        .arg("support-bundle")
        .current_dir(directory)
        .env_clear()
        .env("PROXY_CONFIG", config.to_string());
    command
}

/// Starts an admin port with a large configuration dump, and empty objects on all other paths. Returns the port.
fn serve_large_dump() -> u16 {
    let listener = TcpListener::bind("localhost:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut request = [0; 1000];
            let length = stream.read(&mut request).unwrap();
            let is_dump = request[..length].starts_with(b"GET /config_dump ");
            let head = "HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n";
            stream.write_all(head.as_bytes()).unwrap();
            if !is_dump {
                stream.write_all(b"{}").unwrap();
                continue;
            }
            let name = "outbound|80||cart.shop.svc.cluster.local";
            let cluster = json!({ "cluster": {
                "@type": "type.googleapis.com/envoy.config.cluster.v3.Cluster",
                "name": name, "type": "EDS", "eds_cluster_config": { "service_name": name },
                "alt_stat_name": name.repeat(20), "notes": "x".repeat(200),
            }});
            let clusters = format!("{cluster:#},\n").repeat(25);
            let dump = "type.googleapis.com/envoy.admin.v3.ClustersConfigDump";
            let begin =
                format!("{{\"configs\": [{{\"@type\": \"{dump}\", \"static_clusters\": [\n");
            stream.write_all(begin.as_bytes()).unwrap();
            for _ in 0..LARGE / clusters.len() {
                stream.write_all(clusters.as_bytes()).unwrap();
            }
            let last = json!({ "header": { "key": "a", "value": SECRET } });
            stream.write_all(format!("{last}]}}]}}").as_bytes()).unwrap();
        }
    });
    port
}

/// Writes a bundle to a file. Returns the peak of the command's resident memory, in KiB, and its log.
async fn peak(directory: &Path, admin: u16, file: &str) -> (u64, String) {
    let mut command = bundle(directory, admin);
    command.args(["--output", file]);
    let child = Process::start(&mut command, &directory.join("log"));
    let status = format!("/proc/{}/status", child.pid().as_raw_nonzero());
    let mut most = 0;
    until("the end", || {
        let status = fs::read_to_string(&status).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let found = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse().ok());
        most = most.max(found.unwrap_or_default());
        !child.is_running()
    })
    .await;
    let (code, log) = child.ends().await;
    assert_eq!(code, 0, "{log}");
    (most, log)
}

#[tokio::test]
async fn a_bundles_memory_does_not_grow_with_envoys_configuration() {
    if !is_this_agent("its command support-bundle") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (without, _) = peak(directory.path(), 1, "small.tgz").await;
    let (with, log) = peak(directory.path(), serve_large_dump(), "bundle.tgz").await;
    assert!(!log.contains("config_dump"), "{log}");
    assert!(without > 0 && with < without + (8 << 10), "{with}, {without} KiB");
    let path = directory.path().join("bundle.tgz");
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let mut tar = Command::new("tar");
    tar.arg("xzOf").arg(&path);
    let output = tar.arg("support-bundle/envoy/config_dump.json").output();
    let output = output.unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(output.stdout.len() > LARGE / 2, "{}", output.stdout.len());
    let dump: Value = serde_json::from_slice(&output.stdout).unwrap();
    let clusters = dump["configs"][0]["static_clusters"].as_array().unwrap();
    assert_eq!(clusters.len() % 25, 1);
    assert_eq!(clusters[clusters.len() - 1], json!({}));
}

#[test]
fn a_bundle_goes_to_a_new_file_or_reader_and_no_terminal() {
    if !is_this_agent("its command support-bundle") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("taken");
    fs::write(&path, "mine").unwrap();
    let mut command = bundle(directory.path(), 1);
    let refused = command.args(["--output", "taken"]).output().unwrap();
    let text = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(255), "{text}");
    assert!(
        text.contains("--output \"taken\": ") && text.contains("[BUNDLE_OUTPUT_UNUSABLE]"),
        "{text}"
    );
    assert_eq!(fs::read_to_string(&path).unwrap(), "mine");

    let mut command = bundle(directory.path(), 1);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(!text.contains("BUNDLE_OUTPUT_UNUSABLE"), "{text}");

    let agent = binary("AGENT_BIN", Some(env!("CARGO_BIN_EXE_pilot-agent")));
    let line = format!("{} support-bundle", agent.display());
    let output = Command::new("script")
        .args(["-qec", &line, "/dev/null"])
        .current_dir(directory.path())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        text.contains("standard output: is a terminal; ") && text.contains("redirect"),
        "{text}"
    );
}
