//! Tests an Envoy whose admin interface listens on a Unix socket.

use std::fs;
use std::net::TcpStream;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;

use http::Method;
use rustix::process::Signal;
use serde_json::Value;

use crate::support::control_plane::ControlPlane;
use crate::support::http::{get, try_ask};
use crate::support::namespace;
use crate::support::pod::{ADMIN_SOCKET, Pod, Settings, ask};
use crate::support::process::{Process, children_of};
use crate::support::programs::envoy_binary;
use crate::support::resources::answering;
use crate::support::{eventually, free_port, local, until};

/// The setting of Istio, and that of this agent.
const ISTIOS: [(&str, &str); 2] =
    [("ISTIO_ENVOY_ADMIN_TRANSPORT", "UDS"), ("ISTIO_NATIVE_SIDECAR", "true")];
const OWN: (&str, &str) = ("ISTIO_AGENT_ADMIN_SOCKET", "true");

async fn pod(environment: &[(&str, &str)], control_plane: &ControlPlane) -> Option<Pod> {
    let binary = envoy_binary()?;
    let settings = Settings { envoy: Some(&binary), environment };
    let pod = Pod::serving(settings, control_plane).await;
    until_ready(&pod).await;
    Some(pod)
}

async fn until_ready(pod: &Pod) {
    let ready = async || pod.status(Method::GET, "/healthz/ready").await;
    eventually("the pod is ready", ready).await;
}

/// Runs `pilot-agent request` in the pod. Returns whether it succeeds, and what it prints.
async fn request(pod: &Pod, method: &str, path: &str) -> (bool, String) {
    let mut command = pod.command_as_agent();
    command.args(["request", method, path]);
    let mut process = Process::start(&mut command, &pod.path("request.log"));
    let status = process.end().await;
    (status.success(), process.log())
}

/// Returns the status of a response of the status port.
async fn status(pod: &Pod, line: &str) -> u16 {
    try_ask(pod.status_port, line, "").await.unwrap().status
}

#[tokio::test]
async fn envoys_port_is_closed_and_only_its_user_can_open_the_socket() {
    let control_plane = ControlPlane::of(&[]).await;
    for environment in [&ISTIOS[..], &[OWN]] {
        let Some(pod) = pod(environment, &control_plane).await else { return };
        assert!(TcpStream::connect(local(pod.admin_port)).is_err());
        let mode = |path| fs::metadata(pod.path(path)).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(ADMIN_SOCKET), 0o600);
        assert_eq!(mode("etc/istio/proxy/admin"), 0o700);
        // The listener for Prometheus reaches the admin interface, too.
        let metrics = pod.status(Method::GET, "/stats/prometheus").await.unwrap();
        assert!(metrics.contains("envoy_cluster_manager_cds_update_success"), "{metrics}");
        let doctor = pod.status(Method::GET, "/debug/doctor").await.unwrap();
        assert!(doctor.contains("admin.sock: LIVE"), "{doctor}");
        let usage = pod.status(Method::GET, "/debug/scope").await.unwrap();
        assert!(usage.contains("bytes_per_cluster"), "{usage}");
    }
}

#[tokio::test]
async fn another_user_of_the_pod_owns_socket_and_directory() {
    const TEST: &str = "another_user_of_the_pod_owns_socket_and_directory";
    if !namespace::is_inside(&format!("admin_socket::{TEST}")) {
        return;
    }
    let Some(binary) = envoy_binary() else { return };
    let binary = namespace::reachable(&binary);
    let control_plane = ControlPlane::of(&[]).await;
    let settings = Settings { envoy: Some(&binary), environment: &ISTIOS };
    let pod = Pod::serving_as(Some((2000, 2001)), settings, &control_plane).await;
    for path in [ADMIN_SOCKET, "etc/istio/proxy/admin"] {
        let found = fs::metadata(pod.path(path)).unwrap();
        assert_eq!((found.uid(), found.gid()), (2000, 2001), "{path}");
    }
}

#[tokio::test]
async fn requests_of_the_command_go_to_the_socket() {
    let control_plane = ControlPlane::of(&[]).await;
    let Some(pod) = pod(&ISTIOS, &control_plane).await else { return };
    let (is_ok, output) = request(&pod, "GET", "server_info").await;
    assert!(is_ok && output.contains("\"state\": \"LIVE\""), "{output}");
    let (is_ok, output) = request(&pod, "GET", "no-such-page").await;
    assert!(!is_ok && output.contains("status code 404: invalid path"), "{output}");
    // The preStop hook that Istio's injector writes.
    let drain = "drain_listeners?inboundonly&graceful&skip_exit";
    assert!(request(&pod, "POST", drain).await.0);
    fs::remove_file(pod.path(ADMIN_SOCKET)).unwrap();
    let (is_ok, output) = request(&pod, "GET", "server_info").await;
    assert!(!is_ok && output.contains("admin.sock"), "{output}");
}

#[tokio::test]
async fn only_istios_setting_closes_control_paths_of_the_status_port() {
    let control_plane = ControlPlane::of(&[]).await;
    let paths = ["GET /drain", "POST /drain", "GET /quitquitquit", "POST /quitquitquit"];
    let Some(istios) = pod(&ISTIOS, &control_plane).await else { return };
    for line in paths {
        assert_eq!(status(&istios, line).await, 404, "{line}");
    }
    let Some(mut own) = pod(&[OWN], &control_plane).await else { return };
    assert_eq!(status(&own, "POST /drain").await, 200);
    assert_eq!(status(&own, "POST /quitquitquit").await, 200);
    assert!(own.agent.end().await.success());
}

#[tokio::test]
async fn a_killed_envoys_socket_is_replaced_and_a_used_one_is_not() {
    let control_plane = ControlPlane::of(&[]).await;
    let Some(mut pod) = pod(&[OWN], &control_plane).await else { return };
    pod.kill().await;
    assert!(pod.path(ADMIN_SOCKET).exists());
    pod.restart(&[]);
    until_ready(&pod).await;
    pod.kill().await;
    fs::remove_file(pod.path(ADMIN_SOCKET)).unwrap();
    let _other = UnixListener::bind(pod.path(ADMIN_SOCKET)).unwrap();
    pod.restart(&[]);
    assert!(!pod.agent.end().await.success());
    let log = pod.agent.log();
    assert!(log.contains("ADMIN_SOCKET_UNUSABLE"), "{log}");
}

#[tokio::test]
async fn an_envoy_without_its_socket_is_not_ready() {
    let Some(binary) = envoy_binary() else { return };
    let control_plane = ControlPlane::of(&[]).await.kill().await;
    let control_plane = control_plane.revive_silent().await;
    let settings = Settings { envoy: Some(&binary), environment: &[OWN] };
    let pod = Pod::start(settings, &control_plane);
    until("the socket", || pod.path(ADMIN_SOCKET).exists()).await;
    fs::remove_file(pod.path(ADMIN_SOCKET)).unwrap();
    // The answer may be that of a query that was under way.
    eventually("the reason", async || {
        let answer = try_ask(pod.status_port, "GET /healthz/ready", "").await?;
        assert_eq!(answer.status, 503);
        answer.body.contains("admin.sock").then_some(())
    })
    .await;
}

#[tokio::test]
async fn the_successor_of_a_hot_restart_takes_the_socket_over() {
    let port = free_port();
    let control_plane = ControlPlane::of(&[answering("all", port)]).await;
    let environment = [
        OWN,
        ("ISTIO_AGENT_HOT_RESTART", "true"),
        ("ISTIO_AGENT_PARENT_SHUTDOWN_TIME", "3s"),
        ("ISTIO_BOOTSTRAP_OVERRIDE", "in/override.json"),
        ("PROXY_CONFIG", r#"{"drainDuration": "1s"}"#),
    ];
    let Some(pod) = pod(&environment, &control_plane).await else { return };
    let epoch = async || {
        let info = ask(&pod.envoy, "/server_info").await?;
        let info: Value = serde_json::from_str(&info).ok()?;
        info["command_line_options"]["restart_epoch"].as_u64()
    };
    fs::create_dir_all(pod.path("in")).unwrap();
    for number in 1..3 {
        pod.replace(
            "in/override.json",
            &format!(r#"{{"node": {{"metadata": {{"MARK": "{number}"}}}}}}"#),
        );
        pod.agent.signal(Signal::HUP);
        eventually("the successor", async || (epoch().await? == number).then_some(())).await;
        get(port).await.unwrap();
        // The next hot restart waits for the end of the parent.
        let only = async || (children_of(pod.agent.pid()).len() == 1).then_some(());
        eventually("the end of the parent", only).await;
    }
}
