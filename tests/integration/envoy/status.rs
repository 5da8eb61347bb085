//! Tests readiness as the kubelet sees it, through Envoy's health listener, merged metrics, and the `wait` command.

use std::collections::BTreeSet;
use std::time::Duration;

use http::Method;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::Instant;

use crate::support::control_plane::{ControlPlane, Dead};
use crate::support::http::connect;
use crate::support::pod::{self, BareEnvoy, Pod, Settings};
use crate::support::process::Process;
use crate::support::programs::envoy_binary;
use crate::support::prometheus::Prometheus;
use crate::support::resources::{cluster, endpoints, listener, routes, secured_listener};
use crate::support::scraped::{Source, TEXT};
use crate::support::{eventually, free_port};

/// Sends a GET. Returns the status and body of the response; None if there is no response.
async fn ask(port: u16, path: &str) -> Option<(u16, String)> {
    let mut stream = connect(port).await.ok()?;
    let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
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
async fn a_pod_is_ready_through_envoy_once_envoy_is_configured() {
    let Some(binary) = envoy_binary() else { return };
    let health = free_port();
    let port = health.to_string();
    let settings = Settings { envoy: Some(&binary), environment: &[("ENVOY_STATUS_PORT", &port)] };
    let (pod, dead) = without_istiod(settings).await;
    // Without configuration Envoy may listen, but is not ready.
    eventually("an agent that answers", async || {
        let (status, body) = ask(pod.status_port, "/healthz/ready").await?;
        assert_eq!(status, 503, "{body}");
        body.contains("config not received from XDS server").then_some(())
    })
    .await;
    let through_envoy = ask(health, "/healthz/ready").await;
    assert!(through_envoy.is_none_or(|(status, _)| status == 503));
    let _control_plane = dead.revive().await;
    becomes(health, "/healthz/ready", 200).await;
    becomes(pod.status_port, "/healthz/ready", 200).await;
    let (_, page) = ask(pod.status_port, "/metrics").await.unwrap();
    assert!(page.contains("\nistio_agent_startup_duration_seconds "), "{page}");
}

/// Checks a pod with a private key provider: an Envoy without that extension refuses the certificate.
#[tokio::test]
async fn a_pod_whose_envoy_refused_its_certificate_says_why_it_is_unready() {
    let Some(binary) = envoy_binary() else { return };
    let port = free_port();
    let control_plane = ControlPlane::of(&[secured_listener("tls", port)]).await;
    let provider = json!({
        "privateKeyProvider": { "cryptomb": { "pollDelay": "1s" } },
        "drainDuration": "1s",
    });
    let settings =
        Settings { envoy: Some(&binary), environment: &[("PROXY_CONFIG", &provider.to_string())] };
    let pod = Pod::start(settings, &control_plane);
    let expected = "[SECRET_REFUSED]";
    eventually("the reason", async || {
        let (status, body) = ask(pod.status_port, "/healthz/ready").await?;
        assert_eq!(status, 503, "{body}");
        body.contains(expected).then_some(())
    })
    .await;
    let (_, page) = ask(pod.status_port, "/metrics").await.unwrap();
    assert!(page.contains("\nistio_agent_sds_refused_secrets 1\n"), "{page}");
    let log = pod.agent.log();
    let is_error = |line: &str| line.contains("\terror\t") && line.contains(expected);
    assert!(log.lines().any(is_error), "{log}");
    // Once no listener uses the certificate, its refusal does not matter.
    control_plane.set(&[]).await;
    becomes(pod.status_port, "/healthz/ready", 200).await;
}

#[tokio::test]
async fn a_stopped_envoy_that_has_not_passed_is_not_ready() {
    let Some(binary) = envoy_binary() else { return };
    let control_plane = ControlPlane::of(&[]).await;
    let settings = Settings { envoy: Some(&binary), environment: &[] };
    let pod = Pod::start(settings, &control_plane);
    // If the process were stopped before its exec, it would block the agent, which waits for the exec.
    let envoy = eventually("a process that is Envoy", async || {
        let envoy = pod.envoy_pid()?;
        let program = format!("/proc/{}/exe", envoy.as_raw_nonzero());
        (std::fs::read_link(program).ok()? == binary).then_some(envoy)
    })
    .await;
    rustix::process::kill_process(envoy, rustix::process::Signal::STOP).unwrap();
    eventually("an answer in time", async || {
        let (status, body) = ask(pod.status_port, "/healthz/ready").await?;
        assert_eq!(status, 503, "{body}");
        Some(())
    })
    .await;
}

#[tokio::test]
async fn an_application_that_is_an_envoy_shares_the_metrics_page() {
    let Some(binary) = envoy_binary() else { return };
    let control_plane = ControlPlane::of(&[]).await;
    let application = BareEnvoy::serving(&binary, json!({})).await;
    let path = "/stats/prometheus";
    let target = json!({ "port": application.admin_port.to_string(), "path": path }).to_string();
    let port = free_port();
    let settings = Settings {
        envoy: Some(&binary),
        environment: &[
            ("ENVOY_PROMETHEUS_PORT", &port.to_string()),
            ("ISTIO_PROMETHEUS_ANNOTATIONS", &target),
        ],
    };
    let pod = Pod::serving(settings, &control_plane).await;
    let series = async |envoy| names_and_labels(&pod::ask(envoy, path).await.unwrap());
    let (own, application) = (series(&pod.envoy).await, series(&application.admin).await);
    let page = eventually("both Envoys on the page", async || {
        let page = pod.status(Method::GET, path).await?;
        (page.contains("\nistio_agent_scrape_duplicate_series_total{")).then_some(page)
    })
    .await;
    let merged = names_and_labels(&page);
    let missing: Vec<_> = own.union(&application).filter(|s| !merged.contains(*s)).collect();
    assert_eq!(missing, Vec::<&String>::new());
    let lines: Vec<_> = page.lines().filter(|line| line.starts_with("# TYPE ")).collect();
    assert_eq!(lines.iter().collect::<BTreeSet<_>>().len(), lines.len(), "a family twice");
    let shared = own.intersection(&application).count();
    let dropped = "istio_agent_scrape_duplicate_series_total{source=\"envoy\"}";
    assert!(shared > 10, "{shared} series of both Envoys");
    assert!(page.contains(dropped), "{shared} dropped");
}

#[tokio::test]
async fn prometheus_has_envoys_native_histograms_beside_an_application_in_text() {
    let Some(binary) = envoy_binary() else { return };
    let control_plane = ControlPlane::of(&[]).await;
    let application = Source::start().await;
    application.has(TEXT, "# TYPE app counter\napp_total 1\n");
    let target = json!({ "port": application.port.to_string(), "path": "/" }).to_string();
    let port = free_port().to_string();
    let environment =
        &[("ENVOY_PROMETHEUS_PORT", &*port), ("ISTIO_PROMETHEUS_ANNOTATIONS", &target)];
    let settings = Settings { envoy: Some(&binary), environment };
    let pod = Pod::serving(settings, &control_plane).await;
    // Envoy answers 400 to this query if it is asked for text.
    let job = "  params: {histogram_buckets: [prometheusnative]}\n";
    let native = ["--enable-feature=native-histograms"];
    let Some(by_protobuf) = Prometheus::scraping(pod.status_port, &native, job) else { return };
    let Some(by_text) = Prometheus::scraping(pod.status_port, &[], job) else { return };
    for (prometheus, is_native) in [(by_protobuf, true), (by_text, false)] {
        let found = async |selector: &str| {
            eventually(selector, async || prometheus.query(selector).await).await
        };
        found("app_total and on() istio_agent_scrapes_total").await;
        let connects = "envoy_cluster_upstream_cx_connect_ms";
        let series = if is_native { connects.to_owned() } else { format!("{connects}_bucket") };
        let has_histogram = found(&series).await.values().any(|value| value == "histogram");
        assert_eq!(has_histogram, is_native);
    }
}

/// Returns the series of a page. Fails if a series occurs twice.
fn names_and_labels(page: &str) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for line in page.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
        let (series, _) = line.rsplit_once(' ').unwrap();
        assert!(all.insert(series.to_owned()), "{series} twice");
    }
    all
}

/// Starts a pod and kills its control plane, which can be started again.
async fn without_istiod(settings: Settings<'_>) -> (Pod, Dead) {
    let control_plane = ControlPlane::of(&[
        cluster("books"),
        endpoints("books", &[free_port()]),
        listener("plain", free_port(), "all"),
        routes("all", "books", "0"),
    ])
    .await;
    let pod = Pod::start(settings, &control_plane);
    (pod, control_plane.kill().await)
}

/// Starts a command in the agent's container.
fn start_command(pod: &Pod, arguments: &[&str]) -> Process {
    let mut command = pod.command();
    command.args(arguments);
    Process::start(&mut command, &pod.path("command.log"))
}

/// Runs `wait` like the postStart hook of the agent's container: Kubernetes starts the next containers when it ends.
#[tokio::test]
async fn wait_holds_the_application_until_envoy_is_ready_and_no_longer() {
    let Some(binary) = envoy_binary() else { return };
    let health = free_port();
    let port = health.to_string();
    let settings = Settings { envoy: Some(&binary), environment: &[("ENVOY_STATUS_PORT", &port)] };
    let (pod, dead) = without_istiod(settings).await;
    let url = format!("--url=http://localhost:{health}/healthz/ready");
    let mut wait = start_command(&pod, &["wait", &url]);
    eventually("an Envoy that has started", async || pod.envoy_pid()).await;
    // This is longer than the pauses between the requests of the command.
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(wait.is_running(), "Envoy has no configuration");
    let _control_plane = dead.revive().await;
    becomes(health, "/healthz/ready", 200).await;
    let ready = Instant::now();
    let status = wait.end().await;
    let took = ready.elapsed();
    assert!(status.success(), "{}", wait.log());
    assert!(took < Duration::from_millis(500), "{took:?} is a long poll");
}
