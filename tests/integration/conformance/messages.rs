//! Tests what the commands print for a new user: about misspelt names, missing files and wrong users.

use std::fs::Permissions;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::json;

use crate::support::free_port;
use crate::support::programs::{binary, is_this_agent};

/// Returns a command of the agent with the words of `line`, which runs in `folder`.
fn agent(folder: &Path, line: &str) -> Command {
    let program = binary("AGENT_BIN", Some(env!("CARGO_BIN_EXE_pilot-agent")));
    command(program.as_ref(), folder, line)
}

fn command(program: &Path, folder: &Path, line: &str) -> Command {
    let mut command = Command::new(program);
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

/// Starts a server that answers every request with a body larger than a pipe, and returns its port.
fn serve_large_body() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let _ = stream.read(&mut [0; 1000]);
            let head = "HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n";
            // The client may close the connection before the end.
            let _ = stream.write_all((head.to_owned() + &"x\n".repeat(1 << 20)).as_bytes());
        }
    });
    port
}

#[test]
fn output_that_is_not_read_is_no_error() {
    if !is_this_agent("its output") {
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
        // The exit code depends on the worst check of the report.
        ("doctor", &[1, 2]),
        ("istio-iptables --explain out,tcp,1337,10.0.0.5:443 -i * -b *", &[0]),
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

#[test]
fn misspelt_commands_flags_variables_and_members_get_the_nearest_name() {
    if !is_this_agent("its hints") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let config = "\ndiscoveryAdress: istiod.example:15012\nbinaryPath: none";
    for (line, code, expected) in [
        (
            "proxi sidecar",
            255,
            "Error: unknown command \"proxi\" for \"pilot-agent\"\n\nDid you mean this?\n\tproxy\n",
        ),
        ("wait --periodMilis=1", 255, "Error: unknown flag: --periodMilis (--periodMillis?)\n"),
        (
            "proxy --domian shop.svc.cluster.local",
            255,
            "ignoring flag --domian (--domain?) and the word after it, which this agent does not have",
        ),
        (
            "proxy",
            255,
            "ISTIO_AGENT_HOTRESTART: unknown variable (ISTIO_AGENT_HOT_RESTART?); the variable is ignored; correct its name, or remove it [SETTING_UNKNOWN]",
        ),
        (
            "proxy",
            255,
            "PROXY_CONFIG line 2: unknown member discoveryAdress (discoveryAddress?); the member is ignored; correct its name, or remove it [MEMBER_UNKNOWN]",
        ),
        (
            "config",
            0,
            "ISTIO_AGENT_HOTRESTART: unknown variable (ISTIO_AGENT_HOT_RESTART?); the variable is ignored; correct its name, or remove it [SETTING_UNKNOWN]",
        ),
    ] {
        let mut command = agent(folder.path(), line);
        command
            .env("PROXY_CONFIG", config)
            .env("ISTIO_AGENT_HOTRESTART", "true")
            .env("XDS_ROOT_CA", "SYSTEM")
            .env("CA_ROOT_CA", "SYSTEM");
        let output = command.output().unwrap();
        let text = shown(&output);
        assert_eq!(output.status.code(), Some(code), "{line}: {text}");
        assert!(text.contains(expected), "{line}: {text}");
    }
}

#[test]
fn a_failed_command_writes_only_its_error_to_standard_error() {
    if !is_this_agent("its outputs") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for line in [
        "scope --bogus",
        "config -o xml",
        "bootstrap",
        "preflight missing.yaml",
        "support-bundle --output no/such/file",
        "version -o xml",
        "completion csh",
        "doctor --bogus",
    ] {
        let config = "discoveryAddress: \"a\\u202Eb\"";
        let mut command = agent(folder.path(), line);
        let output = command.env("PROXY_CONFIG", config).output().unwrap();
        assert_eq!(output.status.code(), Some(255), "{line}");
        assert!(output.stdout.is_empty(), "{line}: {}", shown(&output));
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(error.matches('\n').count(), 1, "{line}: {error}");
        assert!(error.starts_with("Error: ") && !error.contains('\u{202e}'), "{error}");
    }
    // Other commands log the error as well, as pilot-agent does: in one line.
    for line in ["proxi", "wait --bogus", "request GET", "istio-iptables --bogus"] {
        let output = agent(folder.path(), line).output().unwrap();
        let (log, error) = (output.stdout, output.stderr);
        let log = String::from_utf8(log).unwrap();
        assert!(log.contains("\terror\t") && !log.contains("\\n"), "{line}: {log}");
        assert!(error.starts_with(b"Error: "), "{line}");
    }
}

#[test]
fn the_version_is_printed_for_the_flag_as_for_the_command() {
    if !is_this_agent("its flag --version") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let [flag, with_command, command] = ["--version", "--version wait", "version"]
        .map(|line| agent(folder.path(), line).output().unwrap());
    assert!(flag.status.success() && with_command.status.success());
    assert_eq!(shown(&flag), shown(&command));
    assert_eq!(shown(&with_command), shown(&command));
    assert!(shown(&flag).starts_with("client version: version.BuildInfo{Version:\"1."));
}

#[test]
fn broken_yaml_is_named_by_its_source_its_line_and_the_reason() {
    if !is_this_agent("its errors") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let write = |path: &str, text: &str| {
        let path = folder.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    write("var/run/secrets/istio/root-cert.pem", "");
    write("mesh", "defaultConfig:\n  configPath: x\n bad: 1\n");
    write("override", "a: [1, 2\nb: } # hush");
    let reason = "illegal placement of ':' indicator";
    let unusable = "Error: the configuration cannot be used: ";
    for (line, config, expected) in [
        (
            "proxy",
            "a: [1, 2\nb: }",
            format!("{unusable}PROXY_CONFIG line 2: {reason}; the agent does not start; "),
        ),
        (
            "proxy --meshConfig=mesh",
            "",
            format!(
                "{unusable}mesh line 3: while parsing a block mapping, did not find expected key; the agent "
            ),
        ),
        (
            "proxy",
            "binaryPath: none",
            format!("override (ISTIO_BOOTSTRAP_OVERRIDE): line 2: {reason}; Envoy starts without"),
        ),
    ] {
        let mut command = agent(folder.path(), line);
        let command = command.env("PROXY_CONFIG", config);
        let output = command.env("ISTIO_BOOTSTRAP_OVERRIDE", "override").output();
        let text = shown(&output.unwrap());
        assert!(text.contains(&expected), "{line}: {text}");
        assert!(!text.contains("hush"), "{line}: {text}");
    }
}

/// Runs the agent as another user, which only root can do.
#[test]
fn a_user_without_access_is_named_with_the_owner() {
    if !is_this_agent("its errors") {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped, as only root can become another user");
        return;
    }
    const USER: u32 = 12345;
    let folder = tempfile::tempdir().unwrap();
    let open = |path: &str, mode: u32| {
        let path = folder.path().join(path);
        std::fs::create_dir_all(&path).unwrap();
        std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    };
    open("", 0o755);
    open("proxy", 0o755);
    open("closed", 0o700);
    let program = folder.path().join("pilot-agent");
    std::fs::copy(agent(folder.path(), "").get_program(), &program).unwrap();
    let run = |line: &str| {
        let config =
            json!({ "configPath": "./proxy", "binaryPath": "none", "statusPort": free_port() });
        let mut command = command(&program, folder.path(), line);
        command
            .env("DISABLE_ENVOY", "true")
            .env("XDS_ROOT_CA", "SYSTEM")
            .env("CA_ROOT_CA", "SYSTEM")
            .env("PROXY_CONFIG", config.to_string())
            .uid(USER)
            .gid(USER);
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(255), "{line}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let denied = |path: &str, mode: u32| {
        format!(
            "Permission denied (os error 13): {path} belongs to user 0 with mode {mode:o}, and this \
             process runs as user {USER}"
        )
    };
    for (line, failed, path, mode) in [
        ("proxy", "./proxy/XDS: cannot bind the socket", "./proxy", 0o755),
        ("proxy --meshConfig=closed/mesh", "closed/mesh: ", "./closed", 0o700),
        ("proxy --log_target=proxy/log", "cannot open proxy/log", "proxy", 0o755),
        ("bootstrap --output=proxy/out", "proxy/out: cannot write the file", "proxy", 0o755),
    ] {
        let error = run(line);
        assert!(error.contains(failed), "{line}: {error}");
        assert!(error.contains(&denied(path, mode)), "{line}: {error}");
    }
}
