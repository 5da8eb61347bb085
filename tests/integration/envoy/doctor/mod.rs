//! Tests `pilot-agent doctor` with a real Envoy.

mod capture;
mod faults;
mod healthy;
mod peers;
mod refusals;

use std::time::Duration;

use http::Method;
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::support::control_plane::ControlPlane;
use crate::support::http::Backend;
use crate::support::pod::{Pod, Settings, ask};
use crate::support::process::Process;
use crate::support::programs::envoy_binary;
use crate::support::resources::answering;
use crate::support::{eventually, free_port};

/// Runs the command, which must end within ten seconds, also on a busy machine. Returns its report and its exit code.
pub async fn diagnosed(pod: &Pod) -> (Value, Option<i32>) {
    let mut command = pod.command_as_agent();
    command.args(["doctor", "--json"]);
    let began = Instant::now();
    let mut process = Process::start(&mut command, &pod.path("doctor.log"));
    let status = process.end().await;
    let (took, log) = (began.elapsed(), process.log());
    assert!(took < Duration::from_secs(10), "{took:?}: {log}");
    let report = serde_json::from_str(&log).unwrap_or_else(|error| panic!("{error}: {log}"));
    (report, status.code())
}

/// Returns all checks, each with the name of its group.
pub fn checks(report: &Value) -> Vec<(&str, &Value)> {
    let mut all = Vec::new();
    for group in report["groups"].as_array().unwrap() {
        let checks = group["checks"].as_array().unwrap().iter();
        all.extend(checks.map(|check| (group["name"].as_str().unwrap(), check)));
    }
    all
}

/// Starts a pod whose control plane sends these resources.
async fn pod(resources: &[Value], environment: &[(&str, &str)]) -> (Pod, ControlPlane) {
    let binary = envoy_binary().unwrap();
    let control_plane = ControlPlane::of(resources).await;
    let settings = Settings { envoy: Some(&binary), environment };
    (Pod::start(settings, &control_plane), control_plane)
}

/// Starts a pod without an upstream resolver, and waits until it is ready.
async fn ready(environment: &[(&str, &str)]) -> (Pod, ControlPlane) {
    // This file names no resolver.
    let none = ("ISTIO_AGENT_RESOLV_CONF", concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"));
    let environment = [environment, &[none]].concat();
    let (pod, control_plane) = pod(&[answering("plain", free_port())], &environment).await;
    is_ready(&pod).await;
    (pod, control_plane)
}

async fn is_ready(pod: &Pod) {
    let look = async || pod.status(Method::GET, "/healthz/ready").await;
    eventually("a ready pod", look).await;
}

/// Waits until a page of Envoy's admin port contains these words.
async fn envoy_says(pod: &Pod, page: &str, words: &str) {
    let look = async || ask(&pod.envoy, page).await.filter(|page| page.contains(words));
    eventually(words, look).await;
}

/// Waits until Envoy has refused a response.
async fn nack(pod: &Pod) {
    let look = async || {
        let page = pod.status(Method::GET, "/debug/xdsz").await?;
        page.contains("\"last_nack\":{").then_some(())
    };
    eventually("a NACK", look).await;
}

/// Sends the signal to the agent, if there is one, and waits until the agent ends.
async fn ended(pod: &mut Pod, signal: Option<Signal>) {
    if let Some(signal) = signal {
        pod.agent.signal(signal);
    }
    pod.agent.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_that_do_not_belong_to_the_pod_are_named() {
    if envoy_binary().is_none() {
        return;
    }
    let settings = [
        ("ISTIO_META_INTERCEPTION_MODE", "REDIRECT"),
        ("INSTANCE_IP", "192.0.2.7"),
        ("TRUST_DOMAIN", "other.example"),
    ];
    let (pod, _control_plane) = ready(&settings).await;
    let (report, _) = diagnosed(&pod).await;
    for (code, found, remedy) in [
        ("INTERFACE_UNKNOWN", "192.0.2.7 is on no interface", "status.podIP"),
        (
            "ISTIOD_PERMISSION_DENIED",
            "TRUST_DOMAIN is \"other.example\"",
            "trustDomain of the mesh",
        ),
    ] {
        let checks = checks(&report);
        let check = checks.iter().find(|(_, check)| check["code"] == code);
        let (_, check) = check.unwrap_or_else(|| panic!("{code}: {report:#}"));
        assert!(check["found"].as_str().unwrap().contains(found), "{check}");
        assert!(check["remedy"].as_str().unwrap().contains(remedy), "{check}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_healthy_pod_has_neither_errors_nor_warnings() {
    if envoy_binary().is_none() {
        return;
    }
    let application = Backend::start().await;
    let port = application.port;
    let probers =
        json!({ "/app-health/cart/readyz": { "httpGet": { "port": port, "path": "/" } } });
    let (pod, control_plane) = ready(&[("ISTIO_KUBE_APP_PROBERS", &probers.to_string())]).await;
    // istiod has answered on the open stream, so the doctor does not send a request with the new token.
    pod.replace_token(&control_plane.token_for("another-audience"));
    let (report, _) = diagnosed(&pod).await;
    assert!(!report.to_string().contains("another-audience"), "{report:#}");
    let checks = checks(&report);
    for group in ["sockets", "Envoy", "resources", "probes"] {
        let of_group = checks.iter().filter(|(name, _)| *name == group);
        let of_group: Vec<_> = of_group.map(|(_, check)| check).collect();
        assert!(!of_group.is_empty(), "{report:#}");
        for check in of_group {
            // Envoy counts refused calls only if its statistics are configured for it.
            let is_uncounted = check["name"] == "refused calls";
            let expected = if is_uncounted { "skipped" } else { "ok" };
            assert_eq!(check["level"], expected, "{report:#}");
        }
    }
}
