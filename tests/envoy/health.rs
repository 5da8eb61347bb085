//! The health of a machine's workload, as istiod learns of it.

use local_istiod::Event;
use rustix::process::Signal;
use serde_json::json;
use tokio::net::TcpListener;

use crate::support::control_plane::ControlPlane;
use crate::support::pod::{Pod, Settings};
use crate::support::{envoy_binary, free_port, local};

async fn told(control_plane: &mut ControlPlane, expected: bool) {
    let is_report = |event: &Event| matches!(event, Event::Health { .. });
    let what = format!("a report that health is {expected}");
    match control_plane.event(&what, is_report).await {
        Event::Health { healthy, .. } => assert_eq!(healthy, expected),
        event => panic!("{event}"),
    }
}

#[tokio::test]
async fn istiod_learns_of_each_change_of_a_workloads_health_also_over_restarts_and_of_a_drain() {
    let Some(binary) = envoy_binary() else { return };
    let mut control_plane = ControlPlane::of(&[]).await;
    let port = free_port();
    let listener = TcpListener::bind(local(port)).await.unwrap();
    let probe = json!({"tcpSocket": {"host": "127.0.0.1", "port": port}, "periodSeconds": 1});
    let proxy_config = json!({"readinessProbe": probe}).to_string();
    let settings = Settings {
        envoy: Some(&binary),
        environment: &[("PROXY_CONFIG", &proxy_config)],
    };
    let pod = Pod::serving(settings, &control_plane).await;
    told(&mut control_plane, true).await;
    drop(listener);
    told(&mut control_plane, false).await;
    // Each of the new streams begins with the present state.
    control_plane = control_plane.kill().await.revive().await;
    told(&mut control_plane, false).await;
    let _listener = TcpListener::bind(local(port)).await.unwrap();
    told(&mut control_plane, true).await;
    pod.agent.signal(Signal::TERM);
    told(&mut control_plane, false).await;
}
