//! Tests how commands read files and pipes that others wrote, and what they print of the content.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use rustix::fs::{CWD, FileType, mknodat};
use serde_json::{Value, json};

use crate::support::programs::{binary, is_this_agent};

/// Runs a command of the agent with this standard input.
fn run(words: &[&str], input: &str) -> Output {
    let program = binary("AGENT_BIN", Some(env!("CARGO_BIN_EXE_pilot-agent")));
    let mut command = Command::new(program);
    command.args(words).env_clear();
    let pipes = [Stdio::piped(), Stdio::piped(), Stdio::piped()];
    let [stdin, stdout, stderr] = pipes;
    let mut child = command.stdin(stdin).stdout(stdout).stderr(stderr).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    // A command that does not read its input may end earlier, which breaks the pipe.
    let _ = stdin.write_all(input.as_bytes());
    drop(stdin);
    child.wait_with_output().unwrap()
}

fn fifo(directory: &Path) -> String {
    let path = directory.join("fifo");
    mknodat(CWD, &path, FileType::Fifo, 0o600.into(), 0).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn standard_input_is_read_and_another_pipe_is_a_named_error() {
    if !is_this_agent("preflight and scope") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let fifo = fifo(directory.path());
    let usage = json!({
        "namespace": "shop", "workload": "cart", "labels": { "app": "cart" }, "pods": [], "services": [],
        "bytes_per_cluster": 1, "envoy_bytes": 1,
    });
    let pod = json!({
        "kind": "Pod", "metadata": { "name": "cart" },
        "spec": { "containers": [{ "name": "istio-proxy", "args": ["proxy", "sidecar"] }] },
    });
    let (usage, pod) = (usage.to_string(), pod.to_string());
    for (words, input, said) in [
        (&["preflight"][..], &pod, "with neither: 1,"),
        (&["preflight", "-"], &pod, "with neither: 1,"),
        (&["preflight", "/dev/stdin"], &pod, "with neither: 1,"),
        (&["preflight", "/dev/fd/0"], &pod, "with neither: 1,"),
        (&["scope", "--merge", "-"], &usage, "kind: Sidecar\n"),
        (&["scope", "--merge", "/dev/stdin"], &usage, "kind: Sidecar\n"),
    ] {
        let output = run(words, input);
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.contains(said), "{words:?}: {text}");
    }
    for words in [&["preflight", &fifo][..], &["scope", "--merge", &fifo]] {
        let output = run(words, "");
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(255), "{error}");
        let is_named = error.contains(&fifo) && error.contains("not a regular file");
        assert!(is_named, "{words:?}: {error}");
    }
}

#[test]
fn no_control_character_of_an_input_reaches_the_terminal() {
    if !is_this_agent("preflight and scope") {
        return;
    }
    let hostile = "a\u{1b}]0;x\u{7}\u{7f}\u{9b}31m\nb";
    let pod = json!({
        "kind": hostile, "metadata": { "name": hostile, "annotations": { "proxy.istio.io/config": hostile } },
        "spec": { "containers": [{
            "name": "istio-proxy", "args": ["proxy", "sidecar", hostile, format!("--{hostile}=1")],
            "env": [{ "name": "ISTIO_BOOTSTRAP", "value": hostile }, { "name": hostile, "valueFrom": { "x": 1 } }],
        }] },
    });
    let service = json!({
        "namespace": hostile, "host": format!("*{hostile}"), "clusters": 1, "connections": 1, "requests": 1,
        "is_asked": true,
    });
    let usage = json!({
        "namespace": hostile, "workload": hostile, "labels": { (hostile): hostile }, "services": [service],
        "pods": [{ "name": hostile, "observed_seconds": 1, "passthrough": 1, "black_hole": 1,
            "is_registry_only": true, "has_dns": false }],
        "bytes_per_cluster": 1, "envoy_bytes": 1,
    });
    for (words, input) in [
        (&["preflight"][..], &pod),
        (&["preflight", "--json"], &pod),
        (&["scope", "--merge", "-"], &usage),
        (&["scope", "--json", "--merge", "-"], &usage),
    ] {
        let output = run(words, &input.to_string());
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.contains("31m"), "{words:?}: {text}");
        let is_raw = |c: char| c.is_control() && c != '\n';
        assert!(!text.contains(is_raw), "{words:?}: {text:?}");
        // Text after a line break of the input would look like a line that the command has written.
        assert!(!text.contains("\nb"), "{words:?}: {text}");
        if words.contains(&"--json") {
            let read: Value = serde_json::from_str(&text).unwrap();
            assert!(read.to_string().contains("31m"));
        }
    }
}
