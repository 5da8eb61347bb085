//! What the commands say to a new user: about misspelt names, missing files and wrong users.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::json;

use crate::support::child::{binary, ours_only};

/// A command line of the agent, in a folder of its own.
fn agent(folder: &Path, line: &str) -> Command {
    let mut command = Command::new(binary("AGENT_BIN", Some(env!("CARGO_BIN_EXE_pilot-agent"))));
    command
        .args(line.split(' ').filter(|word| !word.is_empty()))
        .current_dir(folder)
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .env("CLOUD_PLATFORM", "none");
    command
}

fn shown(output: &Output) -> String {
    let text = [&output.stdout[..], &output.stderr].concat();
    String::from_utf8_lossy(&text).into_owned()
}

/// The port of a server that answers every request with a body larger than a pipe.
fn serve_large_body() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let _ = stream.read(&mut [0; 1000]);
            let head = "HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n";
            // The client may leave before the end.
            let _ = stream.write_all((head.to_owned() + &"x\n".repeat(1 << 20)).as_bytes());
        }
    });
    port
}

#[test]
fn output_that_is_not_read_is_no_error() {
    if !ours_only("its output") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let port = serve_large_body();
    for (line, codes) in [
        ("", &[0][..]),
        ("--help", &[0]),
        ("help proxy", &[0]),
        ("version", &[0]),
        ("completion bash", &[0]),
        ("bootstrap", &[0]),
        ("config", &[0]),
        ("support-bundle", &[0]),
        (&format!("request --debug-port={port} GET /"), &[0]),
        // The code is what was found.
        ("doctor", &[1, 2]),
        (
            "istio-iptables --explain out,tcp,1337,10.0.0.5:443 -i *",
            &[0],
        ),
        ("istio-iptables --dry-run -i *", &[0]),
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = agent(folder.path(), line);
        let config = json!({ "statusPort": port, "proxyAdminPort": 1, "binaryPath": "none" });
        command
            .env("PROXY_CONFIG", config.to_string())
            .env("XDS_ROOT_CA", "SYSTEM")
            .env("CA_ROOT_CA", "SYSTEM")
            .stdout(writer)
            .stderr(Stdio::piped());
        let output = command.output().unwrap();
        let text = shown(&output);
        if text.contains("no valid local IP address found") {
            eprintln!("skipped, as it takes a network: {line}");
            continue;
        }
        let code = output.status.code().unwrap();
        assert!(codes.contains(&code), "{line}: {code}: {text}");
        assert!(!text.contains("Error"), "{line}: {text}");
    }
}
