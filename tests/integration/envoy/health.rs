//! Tests the health of a machine's workload: the reports to istiod, and the traffic that the machine gets.

use std::os::unix::fs::PermissionsExt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::Method;
use local_istiod::Event;
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::support::control_plane::{ControlPlane, only};
use crate::support::http::{Backend, Fresh, Lasting, Load, get};
use crate::support::pod::{Pod, Settings};
use crate::support::programs::envoy_binary;
use crate::support::resources::{answering, cluster, endpoints, listener, routes};
use crate::support::{eventually, free_port, local, soon, until};

const PERIOD: Duration = Duration::from_secs(1);
/// The time that a busy machine may add to [`PERIOD`].
const SLACK: Duration = Duration::from_millis(500);

async fn expect_health_report(control_plane: &mut ControlPlane, expected: bool) {
    let is_report = |event: &Event| matches!(event, Event::Health { .. });
    let what = format!("a report that health is {expected}");
    match control_plane.event(&what, is_report).await {
        Event::Health { healthy, .. } => assert_eq!(healthy, expected),
        event => panic!("{event}"),
    }
}

/// Waits for a report like [`told`], which must come within a period after the call.
async fn expect_health_report_within_period(control_plane: &mut ControlPlane, expected: bool) {
    let changed = Instant::now();
    expect_health_report(control_plane, expected).await;
    let took = changed.elapsed();
    assert!(took <= PERIOD + SLACK, "{expected} after {took:?}");
}

fn proxy_config(probed: u16, more: Value) -> String {
    let probe = json!({"host": "127.0.0.1", "port": probed});
    let mut proxy_config = more;
    proxy_config["readinessProbe"] = json!({"tcpSocket": probe, "periodSeconds": PERIOD.as_secs()});
    proxy_config.to_string()
}

#[tokio::test]
async fn istiod_learns_each_health_change_also_after_restarts_and_in_drains() {
    let Some(binary) = envoy_binary() else { return };
    let mut control_plane = ControlPlane::of(&[]).await;
    let port = free_port();
    let listener = TcpListener::bind(local(port)).await.unwrap();
    let proxy_config = proxy_config(port, json!({}));
    let settings =
        Settings { envoy: Some(&binary), environment: &[("PROXY_CONFIG", &proxy_config)] };
    let pod = Pod::serving(settings, &control_plane).await;
    expect_health_report(&mut control_plane, true).await;
    drop(listener);
    expect_health_report_within_period(&mut control_plane, false).await;
    // Each new stream begins with a report of the current health.
    control_plane = control_plane.kill().await.revive().await;
    expect_health_report(&mut control_plane, false).await;
    let _listener = TcpListener::bind(local(port)).await.unwrap();
    expect_health_report_within_period(&mut control_plane, true).await;
    pod.agent.signal(Signal::TERM);
    expect_health_report(&mut control_plane, false).await;
}

#[tokio::test]
async fn an_envoy_in_a_wrapper_reports_health_and_its_configuration_is_kept() {
    let Some(binary) = envoy_binary() else { return };
    let directory = tempfile::tempdir().unwrap();
    // Envoy runs as a child of the wrapper and ends with it.
    let wrapper = directory.path().join("wrapper");
    let program = binary.display();
    let script = format!("#!/bin/sh\nsetpriv --pdeathsig KILL {program} \"$@\" &\nwait\n");
    std::fs::write(&wrapper, script).unwrap();
    std::fs::set_permissions(&wrapper, PermissionsExt::from_mode(0o755)).unwrap();
    let mut control_plane = ControlPlane::of(&[answering("inbound", free_port())]).await;
    let probed = TcpListener::bind(local(0)).await.unwrap();
    let proxy_config = proxy_config(probed.local_addr().unwrap().port(), json!({}));
    let settings = Settings {
        envoy: Some(&wrapper),
        environment: &[
            ("PROXY_CONFIG", &proxy_config),
            ("ISTIO_AGENT_KEEP_CONFIG", directory.path().to_str().unwrap()),
        ],
    };
    let mut pod = Pod::serving(settings, &control_plane).await;
    expect_health_report(&mut control_plane, true).await;
    eventually("what is kept", async || {
        let page = pod.status(Method::GET, "/debug/xdsz").await?;
        let page: Value = serde_json::from_str(&page).ok()?;
        (!page["kept"].as_object()?.is_empty()).then_some(())
    })
    .await;
    pod.agent.signal(Signal::TERM);
    expect_health_report(&mut control_plane, false).await;
    soon(pod.agent.end()).await;
}

/// A TCP proxy to a port, whose connections the test can cut.
struct Path {
    port: u16,
    connections: Arc<Mutex<JoinSet<()>>>,
    _accepting: JoinSet<()>,
}

impl Path {
    async fn to(port: u16) -> Self {
        let listener = TcpListener::bind(local(0)).await.unwrap();
        let connections = Arc::<Mutex<JoinSet<()>>>::default();
        let mut accepting = JoinSet::new();
        Self {
            port: listener.local_addr().unwrap().port(),
            connections: Arc::clone(&connections),
            _accepting: {
                accepting.spawn(async move {
                    while let Ok((mut stream, _)) = listener.accept().await {
                        connections.lock().unwrap().spawn(async move {
                            // istiod may be stopped.
                            if let Ok(mut istiod) = TcpStream::connect(local(port)).await {
                                let _ = copy_bidirectional(&mut stream, &mut istiod).await;
                            }
                        });
                    }
                });
                accepting
            },
        }
    }

    fn cut(&self) {
        self.connections.lock().unwrap().abort_all();
    }
}

/// The load that goes to a machine and to an endpoint that is always available.
struct Traffic {
    load: Load,
    machine: String,
}

impl Traffic {
    fn to_machine(&self) -> usize {
        let tally = self.load.tally();
        tally.successes.get(&self.machine).copied().unwrap_or(0)
    }

    async fn reaches_the_machine(&self) {
        let before = self.to_machine();
        eventually("requests to the machine", async || {
            (self.to_machine() > before + 10).then_some(())
        })
        .await;
    }

    async fn assert_machine_gets_no_traffic(&self) {
        eventually("a hundred requests that the machine does not get", async || {
            let (machine, all) = (self.to_machine(), self.load.tally().attempts());
            self.load.wait_for_attempts(all + 100).await;
            (self.to_machine() == machine).then_some(())
        })
        .await;
    }
}

/// Returns a cluster of this endpoint and of the machines for the pod `cart-1`, and a listener for the pod
/// `machine-1`.
fn resources(client: u16, always: u16, machine: u16) -> Vec<Value> {
    let mut books = endpoints("books", &[always, machine]);
    let written = &mut books["endpoints"][0]["lb_endpoints"][1];
    written["endpoint"]["address"]["socket_address"]["address"] =
        json!("workload-group:shop/machines");
    vec![
        only("cart-1", cluster("books")),
        only("cart-1", books),
        only("cart-1", listener("plain", client, "all")),
        only("cart-1", routes("all", "books", "%UPSTREAM_REMOTE_ADDRESS%")),
        only("machine-1", answering("inbound", machine)),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_machine_gets_traffic_only_while_its_probe_succeeds() {
    let Some(binary) = envoy_binary() else { return };
    let (always, client, machine) = (Backend::start().await, free_port(), free_port());
    let resources = resources(client, always.port, machine);
    let mut control_plane = ControlPlane::of(&resources).await;
    let settings = Settings { envoy: Some(&binary), environment: &[] };
    let _client = Pod::serving(settings, &control_plane).await;
    eventually("an answer", async || get(client).await.ok()).await;
    let traffic = Traffic {
        load: Load::default().with(Fresh(client)).with(Lasting::new(client)),
        machine: format!("127.0.0.1:{machine}"),
    };
    let (path, probed) = (Path::to(control_plane.istiod.address.port()).await, free_port());
    let address = format!("localhost:{}", path.port);
    let proxy_config = proxy_config(probed, json!({ "discoveryAddress": address }));
    let settings = Settings {
        envoy: Some(&binary),
        environment: &[
            ("POD_NAME", "machine-1"),
            ("ISTIO_META_AUTO_REGISTER_GROUP", "machines"),
            ("PROXY_CONFIG", &proxy_config),
        ],
    };
    let mut pod = Pod::serving(settings, &control_plane).await;
    expect_health_report(&mut control_plane, false).await;
    assert_eq!(traffic.to_machine(), 0);
    let mut workload = TcpListener::bind(local(probed)).await.unwrap();
    for _ in 0..2 {
        expect_health_report_within_period(&mut control_plane, true).await;
        traffic.reaches_the_machine().await;
        drop(workload);
        expect_health_report_within_period(&mut control_plane, false).await;
        traffic.assert_machine_gets_no_traffic().await;
        workload = TcpListener::bind(local(probed)).await.unwrap();
    }
    expect_health_report_within_period(&mut control_plane, true).await;
    traffic.reaches_the_machine().await;
    // The agent loses its connection to istiod.
    path.cut();
    expect_health_report(&mut control_plane, true).await;
    traffic.reaches_the_machine().await;
    // The probe begins to fail while the control plane is stopped.
    let dead = control_plane.kill().await;
    let verdicts = || pod.agent.log().matches("marking as unhealthy").count();
    let before = verdicts();
    drop(workload);
    until("a failed probe", || verdicts() > before).await;
    control_plane = dead.revive().await;
    expect_health_report(&mut control_plane, false).await;
    traffic.assert_machine_gets_no_traffic().await;
    let _workload = TcpListener::bind(local(probed)).await.unwrap();
    expect_health_report_within_period(&mut control_plane, true).await;
    traffic.reaches_the_machine().await;
    pod.agent.signal(Signal::TERM);
    expect_health_report(&mut control_plane, false).await;
    assert!(soon(pod.agent.end()).await.success());
    traffic.assert_machine_gets_no_traffic().await;
    traffic.load.assert_flawless();
}
