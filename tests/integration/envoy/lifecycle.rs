//! Tests that agent and Envoy end together, whichever ends first, and which Envoys are restarted.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use http::Method;
use rustix::process::{Pid, Signal};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::support::control_plane::ControlPlane;
use crate::support::http::{Backend, connect, get, header};
use crate::support::pod::{Pod, Settings, ask};
use crate::support::process::is_alive;
use crate::support::programs::envoy_binary;
use crate::support::resources::{cluster, endpoints, listener, logged, routes};
use crate::support::{eventually, free_port};

/// The settings of a drain of an hour.
const ENDLESS: [(&str, &str); 2] =
    [("EXIT_ON_ZERO_ACTIVE_CONNECTIONS", "true"), ("MINIMUM_DRAIN_DURATION", "1h")];

/// Starts a pod with a route through Envoy, and returns it with Envoy's pid and the port of the route.
async fn serving(binary: &Path) -> (Pod, Pid, u16, Backend, ControlPlane) {
    serving_with(binary, &[]).await
}

async fn serving_with(
    binary: &Path,
    environment: &[(&str, &str)],
) -> (Pod, Pid, u16, Backend, ControlPlane) {
    let (backend, port) = (Backend::start().await, free_port());
    let control_plane = ControlPlane::of(&[
        cluster("books"),
        endpoints("books", &[backend.port]),
        listener("plain", port, "all"),
        routes("all", "books", "0"),
    ])
    .await;
    let settings = Settings { envoy: Some(binary), environment };
    let pod = Pod::serving(settings, &control_plane).await;
    eventually("a route in force", async || get(port).await.ok()).await;
    let envoy = pod.envoy_pid().unwrap();
    (pod, envoy, port, backend, control_plane)
}

/// Waits until Envoy has run for more than a second, because an earlier exit is a failed start, which has another
/// status. Envoy counts the second in which it was started as a full second, so the uptime must be more than 1 s.
pub async fn wait_past_start_failure_window(pod: &Pod) {
    eventually("an Envoy of a second", async || {
        let info = ask(&pod.envoy, "/server_info").await?;
        let info: Value = serde_json::from_str(&info).unwrap();
        let uptime = info["uptime_current_epoch"].as_str().unwrap();
        (!["0s", "1s"].contains(&uptime)).then_some(())
    })
    .await;
}

/// Waits until the agent has noticed that Envoy serves. The agent polls the state of Envoy.
pub async fn wait_until_agent_sees_envoy_running(pod: &Pod) {
    eventually("a running Envoy", async || {
        let page = pod.status(Method::GET, "/debug/overview").await?;
        let page: Value = serde_json::from_str(&page).unwrap();
        (page["envoy"]["state"] == "running").then_some(())
    })
    .await;
}

/// Waits until Envoy asks its clients to close their connections.
async fn wait_for_connection_close(port: u16) {
    eventually("a request to close the connection", async || {
        let head = get(port).await.ok()?;
        (header(&head, "connection") == Some("close")).then_some(())
    })
    .await;
}

#[tokio::test]
async fn sigterm_drains_envoy_and_ends_both_with_status_0() {
    let Some(binary) = envoy_binary() else { return };
    let (mut pod, envoy, port, _backend, _control_plane) = serving(&binary).await;
    let asked = Instant::now();
    pod.agent.signal(Signal::TERM);
    wait_for_connection_close(port).await;
    let status = pod.agent.end().await;
    assert_eq!(status.code(), Some(0), "{status}");
    assert!(!is_alive(envoy));
    let took = asked.elapsed();
    assert!(took >= Duration::from_secs(1), "{took:?} is no drain of 1 s");
    for left in [
        "etc/istio/proxy/XDS",
        "etc/istio/proxy/envoy-rev.json",
        "var/run/secrets/workload-spiffe-uds/socket",
    ] {
        assert!(!pod.path(left).exists(), "{left}");
    }
}

/// Runs the agent in the way that a systemd unit does: its outputs are sockets of the journal.
#[tokio::test]
async fn access_logs_in_dev_stdout_pass_through_sockets() {
    let Some(binary) = envoy_binary() else { return };
    for output in ["stdout", "stderr"] {
        let (backend, port) = (Backend::start().await, free_port());
        let (file, line) = (format!("/dev/{output}"), format!("request in {output}\n"));
        let control_plane = ControlPlane::of(&[
            cluster("books"),
            endpoints("books", &[backend.port]),
            logged(listener("plain", port, "all"), &file, &line),
            routes("all", "books", "0"),
        ])
        .await;
        let settings = Settings { envoy: Some(&binary), environment: &[("JOURNAL_STREAM", "8:1")] };
        let mut pod = Pod::start(settings, &control_plane);
        eventually("a route in force", async || get(port).await.ok()).await;
        pod.agent.signal(Signal::TERM);
        let status = pod.agent.end().await;
        assert_eq!(status.code(), Some(0), "{status}");
        // A thread of the test copies the output to the log, which may take a moment.
        eventually(&line, async || pod.agent.log().contains(&line).then_some(())).await;
    }
}

#[tokio::test]
async fn envoy_reopens_its_access_logs_at_sigusr1_which_the_agent_ignores() {
    let Some(binary) = envoy_binary() else { return };
    let (backend, port) = (Backend::start().await, free_port());
    let directory = tempfile::tempdir().unwrap();
    let (log, rotated) = (directory.path().join("log"), directory.path().join("log.1"));
    let control_plane = ControlPlane::of(&[
        cluster("books"),
        endpoints("books", &[backend.port]),
        logged(listener("plain", port, "all"), log.to_str().unwrap(), "request\n"),
        routes("all", "books", "0"),
    ])
    .await;
    let settings = Settings { envoy: Some(&binary), environment: &[] };
    let pod = Pod::serving(settings, &control_plane).await;
    eventually("a route in force", async || get(port).await.ok()).await;
    std::fs::rename(&log, &rotated).unwrap();
    let envoy = pod.envoy_pid().unwrap();
    for process in [pod.agent.pid(), envoy] {
        rustix::process::kill_process(process, Signal::USR1).unwrap();
    }
    // Envoy creates the new file when it writes the first line to it.
    eventually("a new file", async || {
        get(port).await.unwrap();
        log.exists().then_some(())
    })
    .await;
    assert!(pod.agent.is_running() && is_alive(envoy));
}

#[tokio::test]
async fn a_crash_with_restarts_off_ends_the_agent_with_envoys_signal() {
    let Some(binary) = envoy_binary() else { return };
    for (signal, expected, restarts) in [(Signal::SEGV, 128 + 11, "0"), (Signal::KILL, 128 + 9, "")]
    {
        let environment = [("ISTIO_AGENT_ENVOY_RESTARTS", restarts)];
        let (mut pod, envoy, _port, _backend, _control_plane) =
            serving_with(&binary, &environment).await;
        wait_past_start_failure_window(&pod).await;
        rustix::process::kill_process(envoy, signal).unwrap();
        let status = pod.agent.end().await;
        assert_eq!(status.code(), Some(expected), "{signal:?}");
        let record = std::fs::read_to_string(pod.path("etc/istio/proxy/envoy-crash.json")).unwrap();
        let record: Value = serde_json::from_str(&record).unwrap();
        assert_eq!(record["signal"], signal.as_raw(), "{record}");
        assert_eq!(record["pid"], envoy.as_raw_nonzero().get());
        assert_ne!(record["out_of_memory"], true);
        let log = pod.agent.log();
        assert!(log.contains("Envoy exited with error: signal"), "{log}");
        // If the kernel's count of kills can be read, the log says once that Envoy was not killed for lack of memory.
        assert!(log.matches("of memory").count() <= 1, "{log}");
    }
}

#[tokio::test]
async fn an_envoy_that_crashed_serves_again_as_often_as_the_budget_allows() {
    let Some(binary) = envoy_binary() else { return };
    let environment = [("ISTIO_AGENT_ENVOY_RESTARTS", "1/1h")];
    let started = Instant::now();
    let (mut pod, envoy, port, _backend, _control_plane) =
        serving_with(&binary, &environment).await;
    let start = started.elapsed();
    wait_until_agent_sees_envoy_running(&pod).await;
    let crashed = Instant::now();
    rustix::process::kill_process(envoy, Signal::SEGV).unwrap();
    eventually("the end of the first", async || (!is_alive(envoy)).then_some(())).await;
    eventually("a route in force again", async || get(port).await.ok()).await;
    let again = crashed.elapsed();
    assert!(
        again <= start + Duration::from_secs(1),
        "{again:?} from the crash on, and {start:?} the first time"
    );
    let second = pod.envoy_pid().unwrap();
    assert_ne!(second, envoy);
    rustix::process::kill_process(second, Signal::KILL).unwrap();
    let status = pod.agent.end().await;
    assert_eq!(status.code(), Some(128 + 9), "the budget was for one");
}

#[tokio::test]
async fn an_envoy_that_crashes_serves_again_by_default() {
    let Some(binary) = envoy_binary() else { return };
    let directory = tempfile::tempdir().unwrap();
    let failing = directory.path().join("envoy");
    // On SIGUSR2, this wrapper kills Envoy and exits with status 1.
    let script = format!(
        "#!/bin/sh\nsetpriv --pdeathsig KILL {} \"$@\" &\ntrap 'kill -KILL $!; exit 1' USR2\nwait\n",
        binary.display()
    );
    std::fs::write(&failing, script).unwrap();
    std::fs::set_permissions(&failing, Permissions::from_mode(0o755)).unwrap();
    for (binary, signal, says) in [
        (&binary, Signal::ABORT, "signal 6"),
        (&binary, Signal::KILL, "signal 9"),
        (&failing, Signal::USR2, "exit status 1"),
    ] {
        let (mut pod, envoy, port, _backend, _control_plane) = serving(binary).await;
        wait_until_agent_sees_envoy_running(&pod).await;
        rustix::process::kill_process(envoy, signal).unwrap();
        eventually("the end of the first", async || (!is_alive(envoy)).then_some(())).await;
        if pod.agent.log().contains("count of kills cannot be read") {
            // On this machine, the agent cannot distinguish this SIGKILL from a kill for lack of memory, so
            // it does not restart Envoy.
            assert_eq!(pod.agent.end().await.code(), Some(128 + 9));
            continue;
        }
        eventually("a route in force again", async || get(port).await.ok()).await;
        assert_ne!(pod.envoy_pid().unwrap(), envoy);
        let log = pod.agent.log();
        assert!(log.contains(&format!("Envoy exited with error: {says}")), "{log}");
        let metrics = pod.status(Method::GET, "/stats/prometheus").await.unwrap();
        assert!(metrics.contains("istio_agent_envoy_restarts_total 1\n"), "{says}");
    }
}

/// Stops Envoy in the way that `pkill envoy` does at the end of a job.
#[tokio::test]
async fn an_envoy_stopped_by_another_process_ends_the_agent_with_0() {
    let Some(binary) = envoy_binary() else { return };
    for signal in [Some(Signal::TERM), Some(Signal::INT), None] {
        let (mut pod, envoy, _port, _backend, _control_plane) = serving(&binary).await;
        wait_until_agent_sees_envoy_running(&pod).await;
        match signal {
            Some(signal) => rustix::process::kill_process(envoy, signal).unwrap(),
            None => {
                let asked = pod.envoy.request(Method::POST, "/quitquitquit").await;
                asked.unwrap();
            }
        }
        let status = pod.agent.end().await;
        assert_eq!(status.code(), Some(0), "{signal:?}: {status}");
        let log = pod.agent.log();
        assert!(!log.contains("starting Envoy again"), "{log}");
    }
}

/// A control group of the test, in version 1, with a memory limit.
struct Memory(PathBuf);

impl Memory {
    fn of(bytes: u64) -> Option<Self> {
        let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap();
        let (_, path) = groups.lines().find_map(|line| line.split_once(":memory:/"))?;
        let group = Path::new("/sys/fs/cgroup/memory").join(path);
        let group = group.join(format!("istio-agent-{}", std::process::id()));
        std::fs::create_dir(&group).ok()?;
        let group = Self(group);
        std::fs::write(group.0.join("memory.limit_in_bytes"), bytes.to_string()).unwrap();
        Some(group)
    }

    fn takes(&self, process: Pid) {
        let pid = process.as_raw_nonzero().to_string();
        std::fs::write(self.0.join("cgroup.procs"), pid).unwrap();
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0); // A failed test leaves processes in the group.
    }
}

#[tokio::test]
async fn an_envoy_killed_for_lack_of_memory_is_not_restarted() {
    let Some(binary) = envoy_binary() else { return };
    let Some(memory) = Memory::of(400 << 20) else {
        eprintln!("No control group of memory can be made: this test is not run.");
        return;
    };
    let (mut pod, first, port, _backend, _control_plane) = serving(&binary).await;
    wait_until_agent_sees_envoy_running(&pod).await;
    memory.takes(pod.agent.pid());
    rustix::process::kill_process(first, Signal::KILL).unwrap();
    eventually("another Envoy", async || pod.envoy_pid().filter(|envoy| *envoy != first)).await;
    eventually("a route in force again", async || get(port).await.ok()).await;
    wait_until_agent_sees_envoy_running(&pod).await;
    // With this score, the kernel kills Envoy first when another process uses up the memory of the group.
    let envoy = pod.envoy_pid().unwrap().as_raw_nonzero();
    std::fs::write(format!("/proc/{envoy}/oom_score_adj"), "1000").unwrap();
    let script = "echo $$ > \"$0/cgroup.procs\" && exec tail /dev/zero";
    let mut greedy = Command::new("sh");
    greedy.args(["-c", script]).arg(&memory.0);
    let mut greedy = greedy.spawn().unwrap();
    let status = pod.agent.end().await;
    let _ = greedy.kill(); // The kernel may have killed it by now.
    greedy.wait().unwrap();
    assert_eq!(status.code(), Some(128 + 9), "{status}");
    let log = pod.agent.log();
    for says in ["[ENVOY_OUT_OF_MEMORY]", "not restarting Envoy: memory was used up"] {
        assert!(log.contains(says), "{says}: {log}");
    }
}

#[tokio::test]
async fn an_envoy_that_never_served_ends_the_agent_with_its_signal() {
    let Some(binary) = envoy_binary() else { return };
    let control_plane = ControlPlane::of(&[]).await;
    let nowhere = json!({ "discoveryAddress": format!("127.0.0.1:{}", free_port()) }).to_string();
    let settings = Settings { envoy: Some(&binary), environment: &[("PROXY_CONFIG", &nowhere)] };
    let mut pod = Pod::start(settings, &control_plane);
    wait_past_start_failure_window(&pod).await;
    let envoy = pod.envoy_pid().unwrap();
    rustix::process::kill_process(envoy, Signal::SEGV).unwrap();
    let status = pod.agent.end().await;
    assert_eq!(status.code(), Some(128 + 11), "{status}");
    let log = pod.agent.log();
    assert!(log.contains("not restarting Envoy: it has not served"), "{log}");
}

#[tokio::test]
async fn an_envoy_that_crashes_in_a_drain_is_not_restarted() {
    let Some(binary) = envoy_binary() else { return };
    let (mut pod, envoy, port, _backend, _control_plane) = serving_with(&binary, &ENDLESS).await;
    wait_until_agent_sees_envoy_running(&pod).await;
    pod.agent.signal(Signal::TERM);
    wait_for_connection_close(port).await;
    rustix::process::kill_process(envoy, Signal::SEGV).unwrap();
    let status = pod.agent.end().await;
    assert_eq!(status.code(), Some(0), "{status}");
    let log = pod.agent.log();
    assert!(!log.contains("starting Envoy again"), "{log}");
}

#[tokio::test]
async fn a_second_signal_cuts_the_drain_short() {
    let Some(binary) = envoy_binary() else { return };
    let (mut pod, envoy, _port, _backend, _control_plane) = serving_with(&binary, &ENDLESS).await;
    pod.agent.signal(Signal::TERM);
    eventually("a drain", async || {
        pod.agent.log().contains("Graceful termination period").then_some(())
    })
    .await;
    pod.agent.signal(Signal::TERM);
    let status = pod.agent.end().await;
    assert_eq!(status.code(), Some(0), "{status}");
    assert!(!is_alive(envoy));
}

#[tokio::test]
async fn a_third_signal_ends_even_an_envoy_that_is_stopped() {
    let Some(binary) = envoy_binary() else { return };
    let (mut pod, envoy, _port, _backend, _control_plane) = serving(&binary).await;
    rustix::process::kill_process(envoy, Signal::STOP).unwrap();
    for step in ["draining", "Asking Envoy to quit", "Killing Envoy"] {
        pod.agent.signal(Signal::TERM);
        eventually(step, async || pod.agent.log().contains(step).then_some(())).await;
    }
    let status = pod.agent.end().await;
    assert_eq!(status.code(), Some(0), "{status}");
    assert!(!is_alive(envoy));
}

#[tokio::test]
async fn a_drain_until_idle_waits_for_an_open_connection_and_no_longer() {
    let Some(binary) = envoy_binary() else { return };
    let environment =
        [("EXIT_ON_ZERO_ACTIVE_CONNECTIONS", "true"), ("MINIMUM_DRAIN_DURATION", "100ms")];
    let (mut pod, _envoy, port, _backend, _control_plane) =
        serving_with(&binary, &environment).await;
    let connection = connect(port).await.unwrap();
    pod.agent.signal(Signal::TERM);
    eventually("a count", async || {
        let log = pod.agent.log();
        log.contains("Envoy still has 1 active connections").then_some(())
    })
    .await;
    assert!(pod.agent.is_running());
    drop(connection);
    let status = pod.agent.end().await;
    assert_eq!(status.code(), Some(0), "{status}");
    assert!(pod.agent.log().contains("no active connections left"));
}

#[tokio::test]
async fn envoy_does_not_outlive_a_killed_agent() {
    let Some(binary) = envoy_binary() else { return };
    let (mut pod, envoy, _port, _backend, _control_plane) = serving(&binary).await;
    pod.agent.signal(Signal::KILL);
    let killed = Instant::now();
    pod.agent.end().await;
    eventually("Envoy is gone", async || (!is_alive(envoy)).then_some(())).await;
    let took = killed.elapsed();
    assert!(took <= Duration::from_secs(2), "{took:?}");
}

/// Drains Envoy by the request that the preStop hook of a native sidecar sends, and then sends SIGTERM.
#[tokio::test]
async fn a_native_sidecar_drained_by_its_hook_exits_at_once_after_sigterm() {
    let Some(binary) = envoy_binary() else { return };
    let (mut pod, envoy, port, _backend, _control_plane) = serving_with(&binary, &ENDLESS).await;
    // The status port of this pod is not the default port.
    let status_port = format!("--debug-port={}", pod.status_port);
    pod.run(&["request", &status_port, "POST", "drain"]).await;
    wait_for_connection_close(port).await;
    let is_ready = pod.status(Method::GET, "/healthz/ready").await;
    assert!(is_ready.is_some(), "the application still runs");
    assert!(pod.agent.is_running());
    assert!(get(port).await.is_ok(), "its clients are still served");
    pod.agent.signal(Signal::TERM);
    let status = pod.agent.end().await;
    assert_eq!(status.code(), Some(0), "{status}");
    assert!(!is_alive(envoy));
}

/// Sends the request with which the application of a job ends its sidecar.
#[tokio::test]
async fn quitquitquit_from_a_finished_job_ends_agent_and_envoy_with_0() {
    let Some(binary) = envoy_binary() else { return };
    let (mut pod, envoy, port, _backend, _control_plane) = serving_with(&binary, &ENDLESS).await;
    let _open = connect(port).await.unwrap();
    let answer = pod.status(Method::POST, "/quitquitquit").await;
    assert_eq!(answer.as_deref(), Some("OK"));
    let asked = Instant::now();
    let status = pod.agent.end().await;
    let took = asked.elapsed();
    assert_eq!(status.code(), Some(0), "{status}");
    assert!(!is_alive(envoy));
    // Envoy exits by itself after the request. The next step would be SIGTERM, 2 s later.
    assert!(took < Duration::from_secs(2), "{took:?}");
}

#[tokio::test]
async fn a_gateway_drains_all_listeners_and_a_sidecar_inbound_ones_only() {
    let Some(binary) = envoy_binary() else { return };
    for (role, drains_outbound) in [("router", true), ("sidecar", false)] {
        let (backend, inbound, outbound) = (Backend::start().await, free_port(), free_port());
        let mut to_others = listener("outbound", outbound, "all");
        to_others["traffic_direction"] = "OUTBOUND".into();
        let control_plane = ControlPlane::of(&[
            cluster("books"),
            endpoints("books", &[backend.port]),
            listener("inbound", inbound, "all"),
            to_others,
            routes("all", "books", "0"),
        ])
        .await;
        let settings = Settings { envoy: Some(&binary), environment: &ENDLESS };
        let mut pod = Pod::start_as(role, settings, &control_plane);
        for port in [inbound, outbound] {
            eventually("a route in force", async || get(port).await.ok()).await;
        }
        pod.agent.signal(Signal::TERM);
        wait_for_connection_close(inbound).await;
        if drains_outbound {
            wait_for_connection_close(outbound).await;
        } else {
            let head = get(outbound).await.unwrap();
            assert_eq!(header(&head, "connection"), None, "{role}: {head}");
        }
        pod.agent.signal(Signal::TERM);
        let status = pod.agent.end().await;
        assert_eq!(status.code(), Some(0), "{role}: {status}");
    }
}
