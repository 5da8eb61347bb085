//! Tests the start of the agent: errors that end it, leftovers that do not, and the log.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use rustix::fs::{CWD, FileType, OFlags, mknodat};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::support::place::Place;
use crate::support::{
    ask_for_clusters, ask_for_secrets, local_istiod, next_response, relays, until,
};

/// Expects exit code 255 and each of `sentences` in the log.
async fn refuses_to_start(place: &Place, sentences: &[&str]) {
    let (code, log) = place.ends().await;
    assert_eq!(code, 255, "{log}");
    for sentence in sentences {
        assert!(log.contains(sentence), "{sentence:?} is not in\n{log}");
    }
}

fn make_parent(path: &std::path::Path) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
}

#[tokio::test]
async fn a_stale_socket_is_replaced_and_open_to_envoy() {
    let mut istiod = local_istiod().await;
    let place = Place::with_envoy(&istiod);
    make_parent(&place.xds_socket());
    drop(UnixListener::bind(place.xds_socket()).unwrap());
    assert!(place.xds_socket().exists());
    let agent = place.start().await;
    relays(&place, &mut istiod).await;
    let mut secrets = ask_for_secrets(&place, &["default"]).await;
    next_response(&mut secrets).await;
    assert_eq!(place.mode(&place.xds_socket()), 0o666);
    assert_eq!(place.mode(&place.sds_socket()), 0o666);
    assert_eq!(place.mode(place.sds_socket().parent().unwrap()), 0o750);
    agent.terminate();
    let (code, log) = agent.ends().await;
    assert_eq!(code, 0, "{log}");
    assert!(!place.xds_socket().exists() && !place.sds_socket().exists());
}

#[tokio::test]
async fn a_discovery_socket_in_use_is_replaced_with_a_named_error() {
    let mut istiod = local_istiod().await;
    let place = Place::of(&istiod);
    make_parent(&place.xds_socket());
    let other = UnixListener::bind(place.xds_socket()).unwrap();
    let agent = place.start_only();
    let us = std::process::id();
    agent.logs(&format!("socket ./etc/istio/proxy/XDS: process {us} listens on it")).await;
    assert!(agent.log().contains("[SOCKET_TAKEN]"), "{}", agent.log());
    drop(other);
    until("the agent's own socket", || UnixStream::connect(place.xds_socket()).is_ok()).await;
    relays(&place, &mut istiod).await;
}

#[tokio::test]
async fn impossible_socket_paths_are_errors_that_name_them() {
    let istiod = local_istiod().await;
    let place = Place::of(&istiod);
    std::fs::create_dir_all(place.xds_socket().join("content")).unwrap();
    refuses_to_start(&place, &["etc/istio/proxy/XDS: a directory", "[SOCKET_DIRECTORY]"]).await;

    let place = Place::of(&istiod).proxy("configPath", json!("./blocked/proxy"));
    place.write("blocked", "a file");
    refuses_to_start(&place, &["./blocked/proxy/XDS: cannot create the directory of the socket"])
        .await;

    // Not even root can create files below `/sys`.
    let place = Place::of(&istiod).proxy("configPath", json!("/sys/agent"));
    let says = ["/sys/agent/XDS: cannot create", "[DIRECTORY_FORBIDDEN]"];
    refuses_to_start(&place, &says).await;
    let place = Place::of(&istiod).proxy("configPath", json!("/sys/kernel"));
    refuses_to_start(&place, &["/sys/kernel/XDS: cannot bind the socket"]).await;

    let long = format!("./{}", "x".repeat(120));
    let place = Place::of(&istiod).proxy("configPath", json!(long));
    refuses_to_start(&place, &["it has 126 bytes", "107", "[SOCKET_PATH_TOO_LONG]"]).await;
}

#[tokio::test]
async fn an_envoy_that_cannot_run_is_an_error_with_the_reason() {
    let istiod = local_istiod().await;
    let with = |path: &str| Place::with_envoy(&istiod).proxy("binaryPath", json!(path));
    refuses_to_start(&with("/no/envoy"), &["/no/envoy", "[ENVOY_MISSING]"]).await;
    let place = with("./envoy");
    place.write("envoy", "not executable");
    refuses_to_start(&place, &["./envoy", "[ENVOY_NOT_EXECUTABLE]"]).await;
    // `ls` refuses the arguments, like an Envoy of another version.
    let refused = "[ENVOY_BOOTSTRAP_REFUSED]";
    refuses_to_start(&with("/bin/ls"), &["unrecognized option", " ms, at ", refused]).await;
    refuses_to_start(&with("/bin/false"), &[refused]).await;
    let crashing = Place::with_envoy(&istiod).set("FAKE_ENVOY_MODE", "crashes");
    refuses_to_start(&crashing, &["signal 11", "[ENVOY_CRASHED]"]).await;
    let empty = with("");
    refuses_to_start(&empty, &["binaryPath of PROXY_CONFIG"]).await;
}

#[tokio::test]
async fn every_problem_of_a_configuration_is_reported() {
    let istiod = local_istiod().await;
    let broken = Place::of(&istiod).set("PROXY_CONFIG", "a: [1, 2\nb: }");
    refuses_to_start(&broken, &["PROXY_CONFIG line 2: "]).await;
    let wrong = Place::of(&istiod)
        .proxy("drainDuration", json!("soon"))
        .proxy("proxyAdminPort", json!(70_000))
        .proxy("discoveryAddress", json!("istiod"))
        .set("ECC_SIGNATURE_ALGORITHM", "DSA");
    let all = [
        "drainDuration of PROXY_CONFIG",
        "proxyAdminPort of PROXY_CONFIG line 1 is \"70000\", expected a port from 1 to 65535",
        "discoveryAddress of PROXY_CONFIG",
        "ECC_SIGNATURE_ALGORITHM",
    ];
    refuses_to_start(&wrong, &all).await;
}

#[tokio::test]
async fn unknown_node_types_are_refused_and_unknown_flags_are_left_out() {
    let mut istiod = local_istiod().await;
    let gateway = Place::of(&istiod).kind("gateway");
    refuses_to_start(&gateway, &["invalid proxy Type: gateway"]).await;
    let ztunnel = Place::of(&istiod).kind("ztunnel");
    refuses_to_start(&ztunnel, &["proxy type ztunnel is not supported"]).await;
    let place = Place::of(&istiod).flag("--frobnicate=yes").flag("--concurrency=2");
    let agent = place.start().await;
    agent.logs("ignoring flag --frobnicate").await;
    relays(&place, &mut istiod).await;
}

#[tokio::test]
async fn an_agent_whose_dependencies_are_all_missing_stops_at_once() {
    let istiod = local_istiod().await;
    let place = Place::with_envoy(&istiod);
    drop(istiod);
    let agent = place.start().await;
    agent.logs("resource:default failed to sign").await;
    let discovery = ask_for_clusters(&place).await;
    let secrets = ask_for_secrets(&place, &["default"]).await;
    agent.logs("is held open until there is a certificate").await;
    let terminated = Instant::now();
    agent.terminate();
    let (code, log) = agent.ends().await;
    assert_eq!(code, 0, "{log}");
    assert!(terminated.elapsed() < Duration::from_secs(8), "{:?}", terminated.elapsed());
    assert!(!log.contains("were aborted"), "{log}");
    drop((discovery.end().await, secrets.end().await));
}

/// Returns the level, the message and the labels of a log line of the default scope. The labels of a JSON line are
/// an object, those of a text line an array of its other columns.
fn read(line: &str, is_json: bool) -> Option<(String, String, Value)> {
    if is_json {
        let mut line: Value = serde_json::from_str(line).ok()?;
        let members = line.as_object_mut()?;
        let [level, message] =
            ["level", "msg"].map(|name| members.remove(name).unwrap_or_default());
        members.remove("time")?;
        let text = |value: Value| value.as_str().map(str::to_owned);
        return Some((text(level)?, text(message)?, line));
    }
    let mut columns = line.split('\t').skip(1).map(str::to_owned);
    let (level, message) = (columns.next()?, columns.next()?);
    Some((level, message, columns.collect()))
}

#[tokio::test]
async fn log_lines_that_monitoring_searches_equal_pilot_agents() {
    for is_json in [false, true] {
        let place = Place::with_envoy(&local_istiod().await)
            .set("INSTANCE_IP", "10.1.2.3")
            .flag(&format!("--log_as_json={is_json}"));
        let agent = place.start().await;
        agent.logs("Envoy command").await;
        agent.terminate();
        let (code, log) = agent.ends().await;
        assert_eq!(code, 0, "{log}");
        let lines: Vec<_> = log.lines().filter_map(|line| read(line, is_json)).collect();
        let opening = format!("Opening status port {}", place.status_port());
        let mut rest = lines.iter();
        for message in [
            "Proxy role",
            &opening,
            "Starting proxy agent",
            "Agent draining Proxy for termination",
            "Agent has successfully terminated",
            "Status server has successfully terminated",
        ] {
            let found = rest.find(|line| line.1 == message);
            let (level, ..) = found.unwrap_or_else(|| panic!("no {message:?} in {log}"));
            assert_eq!(level, "info", "{message}");
        }
        let role = lines.iter().find(|line| line.1 == "Proxy role").unwrap();
        let labels = &role.2;
        if is_json {
            assert_eq!(labels["ips"][0], "10.1.2.3");
            assert_eq!(labels["type"], "sidecar");
            assert_eq!(labels["id"], "bench.default");
            assert_eq!(labels["domain"], "default.svc.cluster.local");
            continue;
        }
        let labels = labels[0].as_str().unwrap();
        let rest = "] type=sidecar id=bench.default domain=default.svc.cluster.local";
        assert!(labels.starts_with("ips=[10.1.2.3"), "{labels}");
        assert!(labels.ends_with(rest) && !labels.contains(','), "{labels}");
    }
}

#[tokio::test]
async fn version_and_wait_ignore_further_words_and_wait_names_its_timeout() {
    let place = Place::of(&local_istiod().await);
    let waited = place.run(&["wait", "now", "--timeoutSeconds=0"]);
    assert!(!waited.status.success());
    let said = String::from_utf8_lossy(&waited.stdout);
    let line = "\tinfo\tWaiting for Envoy proxy to be ready (timeout: 0 seconds)...\n";
    assert!(said.contains(line), "{said}");
    for (words, beginning) in [
        (&["version", "now", "-s"][..], "client version: "),
        (&["completion"], "Usage: pilot-agent completion "),
    ] {
        let done = place.run(words);
        assert!(done.status.success(), "{words:?}");
        let said = String::from_utf8_lossy(&done.stdout);
        assert!(said.starts_with(beginning), "{said}");
    }
}

#[tokio::test]
async fn an_unread_log_delays_neither_secrets_nor_the_shutdown() {
    let mut istiod = local_istiod().await;
    let hand_over = "exec \"$0\" \"$@\" >pipe";
    let place = Place::with_envoy(&istiod).started_by(&["/bin/sh", "-c", hand_over]);
    let pipe = place.path("pipe");
    mknodat(CWD, &pipe, FileType::Fifo, 0o600.into(), 0).unwrap();
    let mut full = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
        .open(&pipe)
        .unwrap();
    while full.write(&[b'x'; 4096]).is_ok() {}
    let agent = place.start().await;
    relays(&place, &mut istiod).await;
    let mut secrets = ask_for_secrets(&place, &["default"]).await;
    next_response(&mut secrets).await;
    agent.terminate();
    let (code, _) = agent.ends().await;
    assert_eq!(code, 0);
}
