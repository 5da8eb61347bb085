//! `pilot-agent doctor` beside a real Envoy: the first error of its report names the cause.

mod capture;
mod faults;

use std::any::Any;
use std::fs;
use std::os::unix::net::UnixListener;
use std::time::Duration;

use futures_util::future::{LocalBoxFuture, join_all};
use http::Method;
use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::support::control_plane::ControlPlane;
use crate::support::http::Backend;
use crate::support::pod::{Pod, Settings, ask};
use crate::support::process::Process;
use crate::support::programs::envoy_binary;
use crate::support::resources::{
    ads, answering, cluster, endpoints, listener, secret, secured, secured_listener,
};
use crate::support::{eventually, free_port};

const XDS: &str = "etc/istio/proxy/XDS";
const SDS: &str = "var/run/secrets/workload-spiffe-uds/socket";

/// A secret of files that do not exist.
const FILE: &str = "file-cert:/nonexistent/cert.pem~/nonexistent/key.pem";

/// A set-up with one fault.
struct Row {
    name: &'static str,
    pod: Pod,
    /// What the first error of its report contains, all of it.
    says: Vec<String>,
    /// What lives until the report is there.
    keeps: Vec<Box<dyn Any>>,
}

impl Row {
    fn new(name: &'static str, pod: Pod, says: &[&str]) -> Self {
        Self {
            name,
            pod,
            says: says.iter().map(|&words| words.to_owned()).collect(),
            keeps: Vec::new(),
        }
    }

    fn with(mut self, kept: impl Any) -> Self {
        self.keeps.push(Box::new(kept));
        self
    }

    async fn assert(self) {
        let (report, code) = diagnosed(&self.pod).await;
        let text = format!("{}: {report:#}\n{}", self.name, self.pod.agent.log());
        assert_eq!(code, Some(2), "{text}");
        let mut checks = checks(&report).into_iter();
        let first = checks.find(|(_, check)| check["level"] == "error");
        let (_, first) = first.unwrap_or_else(|| panic!("{text}"));
        let first = first.to_string();
        for words in self.says {
            assert!(
                first.contains(&words),
                "{words:?} is not in {first}\n{text}"
            );
        }
    }
}

/// The report of the command, within three seconds, and its exit code.
async fn diagnosed(pod: &Pod) -> (Value, Option<i32>) {
    let mut command = pod.command_as_agent();
    command.args(["doctor", "--json"]);
    let began = Instant::now();
    let mut process = Process::start(&mut command, &pod.path("doctor.log"));
    let status = process.end().await;
    let (took, log) = (began.elapsed(), process.log());
    assert!(took < Duration::from_secs(3), "{took:?}: {log}");
    let report = serde_json::from_str(&log).unwrap_or_else(|error| panic!("{error}: {log}"));
    (report, status.code())
}

/// All checks with the names of their groups.
fn checks(report: &Value) -> Vec<(&str, &Value)> {
    let mut all = Vec::new();
    for group in report["groups"].as_array().unwrap() {
        let checks = group["checks"].as_array().unwrap().iter();
        all.extend(checks.map(|check| (group["name"].as_str().unwrap(), check)));
    }
    all
}

/// A pod whose control plane sends these resources.
async fn pod(resources: &[Value], environment: &[(&str, &str)]) -> (Pod, ControlPlane) {
    let binary = envoy_binary().unwrap();
    let control_plane = ControlPlane::of(resources).await;
    let settings = Settings {
        envoy: Some(&binary),
        environment,
    };
    (Pod::start(settings, &control_plane), control_plane)
}

/// One that is ready, without a resolver.
async fn ready(environment: &[(&str, &str)]) -> (Pod, ControlPlane) {
    let none = (
        "ISTIO_AGENT_RESOLV_CONF",
        concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"),
    );
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
    let look = async || {
        ask(&pod.envoy, page)
            .await
            .filter(|page| page.contains(words))
    };
    eventually(words, look).await;
}

/// Another process' socket in place of the agent's.
fn replaced(pod: &Pod, path: &str) -> UnixListener {
    fs::remove_file(pod.path(path)).unwrap();
    UnixListener::bind(pod.path(path)).unwrap()
}

/// Ends the agent, by itself or by a signal.
async fn ended(pod: &mut Pod, signal: Option<Signal>) {
    if let Some(signal) = signal {
        pod.agent.signal(signal);
    }
    pod.agent.end().await;
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
    // An open stream shows that istiod accepts it.
    pod.replace_token(&control_plane.token_for("another-audience"));
    let (report, _) = diagnosed(&pod).await;
    assert!(
        !report.to_string().contains("another-audience"),
        "{report:#}"
    );
    let checks = checks(&report);
    for group in ["sockets", "Envoy", "probes"] {
        let of_group = checks.iter().filter(|(name, _)| *name == group);
        let of_group: Vec<_> = of_group.map(|(_, check)| check).collect();
        assert!(of_group.len() > 1, "{report:#}");
        for check in of_group {
            // Envoy counts handshakes only if told to.
            let is_uncounted = check["name"] == "handshakes and RBAC";
            let expected = if is_uncounted { "skipped" } else { "ok" };
            assert_eq!(check["level"], expected, "{report:#}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_fault_of_a_socket_or_of_envoys_process_is_the_first_error() {
    if envoy_binary().is_none() {
        return;
    }
    let own = std::process::id().to_string();
    let rows: [LocalBoxFuture<'_, Row>; 7] = [
        Box::pin(async {
            let (pod, control_plane) = ready(&[]).await;
            let other = replaced(&pod, XDS);
            Row::new("XDS of another process", pod, &["XDS socket", XDS, &own])
                .with((control_plane, other))
        }),
        Box::pin(async {
            let (pod, control_plane) = ready(&[]).await;
            drop(replaced(&pod, SDS));
            Row::new("stale SDS", pod, &["SDS socket", SDS, "stale"]).with(control_plane)
        }),
        Box::pin(async {
            let (mut pod, control_plane) =
                pod(&[], &[("WORKLOAD_IDENTITY_SOCKET_FILE", "spire")]).await;
            ended(&mut pod, None).await;
            let says = [
                "SDS socket",
                "workload-spiffe-uds/spire",
                "there is none",
                "SPIRE",
            ];
            Row::new("no SDS of another process", pod, &says).with(control_plane)
        }),
        Box::pin(async {
            let (mut pod, control_plane) = ready(&[]).await;
            ended(&mut pod, Some(Signal::TERM)).await;
            fs::create_dir(pod.path(XDS)).unwrap();
            Row::new(
                "a directory as XDS",
                pod,
                &["XDS socket", XDS, "a directory"],
            )
            .with(control_plane)
        }),
        Box::pin(async {
            let restarts = ("ISTIO_AGENT_ENVOY_RESTARTS", "0");
            let (mut pod, control_plane) = ready(&[restarts]).await;
            kill_process(pod.envoy_pid().unwrap(), Signal::SEGV).unwrap();
            ended(&mut pod, None).await;
            let says = ["ENVOY_CRASHED", "signal 11", "Caught Segmentation fault"];
            Row::new("crashed Envoy", pod, &says).with(control_plane)
        }),
        Box::pin(async {
            let other = Backend::start().await;
            let admin = json!({ "proxyAdminPort": other.port }).to_string();
            let (mut pod, control_plane) = pod(&[], &[("PROXY_CONFIG", &admin)]).await;
            ended(&mut pod, None).await;
            let why = format!(
                "cannot bind '127.0.0.1:{}': Address already in use",
                other.port
            );
            let mut log = pod
                .agent
                .log()
                .lines()
                .map(str::to_owned)
                .collect::<Vec<_>>();
            log.retain(|line| line.contains("Envoy exited with error: exit status 1"));
            assert!(
                !log.is_empty() && log.iter().all(|line| line.contains(&why)),
                "{log:?}"
            );
            let says = ["PORT_TAKEN", &format!("{}", other.port)];
            Row::new("an admin port that is taken", pod, &says).with((control_plane, other))
        }),
        Box::pin(async {
            let (pod, control_plane) = ready(&[]).await;
            kill_process(pod.envoy_pid().unwrap(), Signal::STOP).unwrap();
            let says = ["admin port", "no answer from 127.0.0.1:", "ENVOY_HANGS"];
            Row::new("hung Envoy", pod, &says).with(control_plane)
        }),
    ];
    assert_rows(rows).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_fault_of_envoys_configuration_is_the_first_error() {
    if envoy_binary().is_none() {
        return;
    }
    let rows: [LocalBoxFuture<'_, Row>; 5] = [
        Box::pin(async {
            let (pod, control_plane) = ready(&[]).await;
            let mut refused = answering("refused", free_port());
            refused["filter_chains"][0]["filters"][0]["name"] = json!("");
            control_plane.set(&[refused]).await;
            let look = async || {
                let page = pod.status(Method::GET, "/debug/xdsz").await?;
                page.contains("\"last_nack\":{").then_some(())
            };
            eventually("a NACK", look).await;
            Row::new("NACK", pod, &["NACK of Listener", "Filters[0]"]).with(control_plane)
        }),
        Box::pin(async {
            let mut listener = secured_listener("tls", free_port());
            listener["filter_chains"][0]["transport_socket"]["typed_config"]["common_tls_context"] =
                certificate(secret(FILE));
            let (pod, control_plane) = pod(&[listener], &[]).await;
            envoy_says(&pod, "/init_dump", FILE).await;
            let says = ["SECRET_FILE_MISSING", "/nonexistent/cert.pem"];
            Row::new("listener without its secret", pod, &says).with(control_plane)
        }),
        Box::pin(async {
            // local-istiod says of a secret that there is none, so that the listener does not wait.
            const NAME: &str = "kubernetes://shop-tls";
            let mut listener = secured_listener("tls", free_port());
            listener["filter_chains"][0]["transport_socket"]["typed_config"]["common_tls_context"] =
                certificate(json!({ "name": NAME, "sds_config": ads() }));
            let (pod, control_plane) = pod(&[listener], &[]).await;
            pod.serves().await;
            let says = ["SECRET_AWAITED", NAME];
            Row::new("secret that istiod does not have", pod, &says).with(control_plane)
        }),
        Box::pin(async {
            let (pod, control_plane) = pod(&[listener("plain", free_port(), "all")], &[]).await;
            envoy_says(&pod, "/init_dump", "all").await;
            let says = ["LISTENER_WARMING", "plain waits for", "RDS init all"];
            Row::new("missing route", pod, &says).with(control_plane)
        }),
        Box::pin(async {
            let (pod, control_plane) = ready(&[]).await;
            let mut books = secured(cluster("books"));
            books["transport_socket"]["typed_config"]["common_tls_context"] =
                certificate(secret(FILE));
            let plain = answering("plain", free_port());
            let some = endpoints("books", &[1]);
            control_plane.set(&[plain, books, some]).await;
            let page = "/config_dump?resource=dynamic_warming_clusters";
            envoy_says(&pod, page, "books").await;
            let says = ["SECRET_FILE_MISSING", "/nonexistent/cert.pem"];
            Row::new("cluster without its secret", pod, &says).with(control_plane)
        }),
    ];
    assert_rows(rows).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_probe_of_the_application_is_the_first_error() {
    if envoy_binary().is_none() {
        return;
    }
    let port = free_port();
    let address = format!("127.0.0.1:{port}");
    let probers = json!({ "/app-health/cart/readyz": { "tcpSocket": { "port": port } } });
    let (pod, _control_plane) = ready(&[("ISTIO_KUBE_APP_PROBERS", &probers.to_string())]).await;
    let says = [
        "/app-health/cart/readyz",
        &address,
        "the pod is not ready",
        "ISTIO_KUBE_APP_PROBERS",
        "PROBE_PORT_CLOSED",
    ];
    Row::new("failed readiness probe", pod, &says)
        .assert()
        .await;
}

/// TLS with this certificate.
fn certificate(secret: Value) -> Value {
    json!({ "tls_certificate_sds_secret_configs": [secret] })
}

/// Sets up and examines all side by side.
async fn assert_rows<const N: usize>(rows: [LocalBoxFuture<'_, Row>; N]) {
    join_all(rows.map(|row| async { row.await.assert().await })).await;
}
