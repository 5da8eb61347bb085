//! Readiness as the kubelet sees it: through Envoy's health listener.

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::control_plane::ControlPlane;
use crate::support::http::connect;
use crate::support::pod::{Pod, Settings};
use crate::support::resources::{cluster, endpoints, listener, routes};
use crate::support::{envoy_binary, eventually, free_port};

/// Status and body of a GET; nothing where nobody answers.
async fn ask(port: u16, path: &str) -> Option<(u16, String)> {
    let mut stream = connect(port).await.ok()?;
    let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    Some((head.split(' ').nth(1)?.parse().ok()?, body.to_owned()))
}

async fn becomes(port: u16, path: &str, expected: u16) {
    eventually("another status", async || {
        let (status, _) = ask(port, path).await?;
        (status == expected).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_pod_is_ready_through_envoy_once_that_is_configured() {
    let Some(binary) = envoy_binary() else { return };
    let dead = ControlPlane::of(&[
        cluster("books"),
        endpoints("books", &[free_port()]),
        listener("plain", free_port(), "all"),
        routes("all", "books", "0"),
    ])
    .await;
    let health = free_port();
    let port = health.to_string();
    let settings = Settings {
        envoy: Some(&binary),
        environment: &[("ENVOY_STATUS_PORT", &port)],
    };
    let pod = Pod::start(settings, &dead);
    let dead = dead.kill().await;
    // Without a configuration Envoy may listen or not, but is not ready.
    eventually("an agent that answers", async || {
        let (status, body) = ask(pod.status_port, "/healthz/ready").await?;
        assert_eq!(status, 503, "{body}");
        body.contains("config not received from XDS server")
            .then_some(())
    })
    .await;
    let through_envoy = ask(health, "/healthz/ready").await;
    assert!(through_envoy.is_none_or(|(status, _)| status == 503));
    let _control_plane = dead.revive().await;
    becomes(health, "/healthz/ready", 200).await;
    becomes(pod.status_port, "/healthz/ready", 200).await;
    let (_, page) = ask(pod.status_port, "/metrics").await.unwrap();
    assert!(
        page.contains("\nistio_agent_startup_duration_seconds "),
        "{page}"
    );
}

#[tokio::test]
async fn a_stopped_envoy_that_has_proven_nothing_is_not_ready() {
    let Some(binary) = envoy_binary() else { return };
    let control_plane = ControlPlane::of(&[]).await;
    let settings = Settings {
        envoy: Some(&binary),
        environment: &[],
    };
    let pod = Pod::start(settings, &control_plane);
    let envoy = eventually("a pid", async || pod.envoy_pid()).await;
    rustix::process::kill_process(envoy, rustix::process::Signal::STOP).unwrap();
    eventually("an answer in time", async || {
        let (status, body) = ask(pod.status_port, "/healthz/ready").await?;
        assert_eq!(status, 503, "{body}");
        Some(())
    })
    .await;
}
