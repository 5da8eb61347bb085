//! Agent and Envoy end together, whoever ends first.

use std::time::Duration;

use rustix::process::{Pid, Signal};
use serde_json::Value;
use tokio::time::Instant;

use crate::support::control_plane::ControlPlane;
use crate::support::http::{Backend, get, header};
use crate::support::pod::{Pod, Settings, ask};
use crate::support::process::is_alive;
use crate::support::resources::{cluster, endpoints, listener, routes};
use crate::support::{envoy_binary, eventually, free_port};

/// A pod with a route through Envoy at `port`.
async fn serving(binary: &std::path::Path) -> (Pod, Pid, u16, Backend, ControlPlane) {
    let (backend, port) = (Backend::start().await, free_port());
    let control_plane = ControlPlane::of(&[
        cluster("books"),
        endpoints("books", &[backend.port]),
        listener("plain", port, "all"),
        routes("all", "books", "0"),
    ])
    .await;
    let settings = Settings {
        envoy: Some(binary),
        environment: &[],
    };
    let pod = Pod::serving(settings, &control_plane).await;
    eventually("a route in force", async || get(port).await.ok()).await;
    let envoy = pod.envoy_pid().unwrap();
    (pod, envoy, port, backend, control_plane)
}

#[tokio::test]
async fn sigterm_drains_envoy_and_ends_both_with_status_0() {
    let Some(binary) = envoy_binary() else { return };
    let (mut pod, envoy, port, _backend, _control_plane) = serving(&binary).await;
    let asked = Instant::now();
    pod.agent.signal(Signal::TERM);
    eventually("goodbyes to clients", async || {
        let head = get(port).await.ok()?;
        (header(&head, "connection") == Some("close")).then_some(())
    })
    .await;
    let status = pod.agent.end().await;
    assert_eq!(status.code(), Some(0), "{status}");
    assert!(!is_alive(envoy));
    let took = asked.elapsed();
    assert!(
        took >= Duration::from_secs(1),
        "{took:?} is no drain of 1 s"
    );
    for left in [
        "etc/istio/proxy/XDS",
        "etc/istio/proxy/envoy-rev.json",
        "var/run/secrets/workload-spiffe-uds/socket",
    ] {
        assert!(!pod.path(left).exists(), "{left}");
    }
}

#[tokio::test]
async fn a_crash_of_envoy_ends_the_agent_with_its_signal_in_the_status() {
    let Some(binary) = envoy_binary() else { return };
    for (signal, expected) in [(Signal::SEGV, 128 + 11), (Signal::KILL, 128 + 9)] {
        let (mut pod, envoy, _port, _backend, _control_plane) = serving(&binary).await;
        // An end in the first second is a failed start, which has another status. Envoy counts the
        // second it was started in as a whole one.
        eventually("an Envoy of a second", async || {
            let info = ask(&pod.envoy, "/server_info").await?;
            let info: Value = serde_json::from_str(&info).unwrap();
            let uptime = info["uptime_current_epoch"].as_str().unwrap();
            (!["0s", "1s"].contains(&uptime)).then_some(())
        })
        .await;
        rustix::process::kill_process(envoy, signal).unwrap();
        let status = pod.agent.end().await;
        assert_eq!(status.code(), Some(expected), "{signal:?}");
    }
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
