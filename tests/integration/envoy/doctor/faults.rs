//! Faults of peers, ports and programs: each has its code, and words that name the cause.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;

use futures_util::future::{LocalBoxFuture, join_all};
use http::Method;
use rustix::process::Signal;
use serde_json::{Value, json};

use super::{checks, diagnosed, ended, envoy_says, is_ready, pod, ready};
use crate::support::control_plane::ControlPlane;
use crate::support::http::{Backend, try_ask};
use crate::support::pod::Pod;
use crate::support::programs::envoy_binary;
use crate::support::resources::{
    answering, cluster, endpoints, listener, routes, secured_listener,
};
use crate::support::{eventually, free_port};

/// A cluster with one endpoint at this port of the pod.
fn fixed(name: &str, port: u16, health: &str) -> Value {
    let address = json!({ "address": "127.0.0.1", "port_value": port });
    let endpoint = json!({
        "health_status": health,
        "endpoint": { "address": { "socket_address": address } },
    });
    json!({
        "@type": "type.googleapis.com/envoy.config.cluster.v3.Cluster",
        "name": name,
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": { "cluster_name": name, "endpoints": [{ "lb_endpoints": [endpoint] }] },
    })
}

/// A ready pod that has sent one request to this cluster.
async fn calling(mut resources: Vec<Value>, name: &str) -> (Pod, ControlPlane) {
    let port = free_port();
    resources.extend([listener("plain", port, "all"), routes("all", name, "x")]);
    let (pod, control_plane) = pod(&resources, &[]).await;
    is_ready(&pod).await;
    eventually("an answer", async || try_ask(port, "GET /", "").await).await;
    (pod, control_plane)
}

/// The check with this code contains these words, and the exit code is that of its level.
async fn assert_found(pod: &Pod, code: &str, words: &[&str]) {
    let (report, exit) = diagnosed(pod).await;
    let text = format!("{code}: {report:#}\n{}", pod.agent.log());
    let found = checks(&report)
        .into_iter()
        .find(|(_, check)| check["code"] == code);
    let (_, check) = found.unwrap_or_else(|| panic!("{text}"));
    let shown = check.to_string();
    for words in words {
        assert!(shown.contains(words), "{words:?} is not in {shown}\n{text}");
    }
    assert!(
        !check["remedy"].as_str().unwrap_or_default().is_empty(),
        "{text}"
    );
    let least = match check["level"].as_str() {
        Some("error") => 2,
        Some("warning") => 1,
        _ => 0,
    };
    assert!(exit.is_some_and(|exit| exit >= least), "{exit:?} {text}");
    let verdict = report["verdict"].as_str().unwrap_or_default();
    assert!(exit != Some(0) || verdict.contains(words[0]), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn each_fault_of_an_endpoint_has_its_code() {
    if envoy_binary().is_none() {
        return;
    }
    let closed = free_port();
    let at_closed = format!("127.0.0.1:{closed}");
    let (inbound, outbound) = ("inbound|8080||", "outbound|80||cart.shop");
    let mut empty = cluster(outbound);
    empty["eds_cluster_config"]["service_name"] = json!(outbound);
    let lost = fixed(outbound, closed, "HEALTHY");
    let unhealthy = fixed(outbound, closed, "UNHEALTHY");
    let rows: [(&str, &str, Vec<Value>, &[&str]); 4] = [
        (
            "APPLICATION_PORT_CLOSED",
            inbound,
            vec![fixed(inbound, closed, "HEALTHY")],
            &[inbound, &at_closed, "refused", "targetPort"],
        ),
        (
            "UPSTREAM_UNREACHABLE",
            outbound,
            vec![lost],
            &[outbound, &at_closed, "refused"],
        ),
        (
            "NO_HEALTHY_ENDPOINT",
            outbound,
            vec![unhealthy],
            &["cart.shop"],
        ),
        (
            "NO_HEALTHY_ENDPOINT",
            outbound,
            vec![empty, endpoints(outbound, &[])],
            &["cart.shop", "selector"],
        ),
    ];
    join_all(rows.map(|(code, name, resources, words)| async move {
        let (pod, _control_plane) = calling(resources, name).await;
        assert_found(&pod, code, words).await;
    }))
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_refused_call_is_found_where_envoy_counts_it_and_named_where_it_does_not() {
    if envoy_binary().is_none() {
        return;
    }
    let port = free_port();
    let mut strict = secured_listener("strict", port);
    strict["filter_chains"][0]["filter_chain_match"] = json!({ "transport_protocol": "tls" });
    strict["listener_filters"] = json!([{
        "name": "envoy.filters.listener.tls_inspector",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.listener.tls_inspector.v3.TlsInspector",
        },
    }]);
    let matcher = json!({ "inclusionRegexps": [r"listener\..*(no_filter_chain_match|ssl\..*)"] });
    let counting = json!({ "proxyStatsMatcher": matcher }).to_string();
    for (environment, code) in [
        (
            &[("PROXY_CONFIG", &*counting)][..],
            Some("INBOUND_NOT_MATCHED"),
        ),
        (&[], None),
    ] {
        let (pod, _control_plane) = pod(&[strict.clone()], environment).await;
        is_ready(&pod).await;
        try_ask(port, "GET /", "").await;
        match code {
            Some(code) => {
                assert_found(
                    &pod,
                    code,
                    &[&port.to_string(), "STRICT", "PeerAuthentication"],
                )
                .await
            }
            None => {
                let (report, exit) = diagnosed(&pod).await;
                let text = report.to_string();
                assert!(text.contains("statsInclusionRegexps"), "{report:#}");
                assert_eq!(exit, Some(0), "{report:#}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_port_that_is_taken_is_named_with_its_process() {
    if envoy_binary().is_none() {
        return;
    }
    // A child that another test has just forked holds the socket too, until it runs its program.
    let us = "process ".to_owned();
    let rows: [LocalBoxFuture<'_, ()>; 3] = [
        Box::pin(async {
            let taken = TcpListener::bind("127.0.0.1:0").unwrap();
            let port = taken.local_addr().unwrap().port();
            let (pod, control_plane) = ready(&[]).await;
            control_plane.set(&[answering("inbound", port)]).await;
            let look = async || {
                let page = pod.status(Method::GET, "/debug/xdsz").await?;
                page.contains("\"last_nack\":{").then_some(())
            };
            eventually("a NACK", look).await;
            let port = format!("port {port}");
            assert_found(&pod, "PORT_TAKEN", &[&port, &us, "inbound"]).await;
        }),
        Box::pin(async {
            let taken = TcpListener::bind("0.0.0.0:0").unwrap();
            let port = taken.local_addr().unwrap().port().to_string();
            let (mut pod, _control_plane) = pod(&[], &[("ENVOY_STATUS_PORT", &port)]).await;
            ended(&mut pod, None).await;
            let log = pod.agent.log();
            let error = log.lines().find(|line| line.contains("[PORT_TAKEN]"));
            let error = error.unwrap_or_else(|| panic!("{log}"));
            for words in ["Envoy exited with error: ", &port, &us] {
                assert!(error.contains(words), "{words}: {error}");
            }
            assert_found(&pod, "PORT_TAKEN", &[&port, &us]).await;
        }),
        Box::pin(async {
            let (mut pod, _control_plane) = ready(&[]).await;
            ended(&mut pod, Some(Signal::TERM)).await;
            let taken = TcpListener::bind(("127.0.0.1", pod.status_port)).unwrap();
            let _taken = Backend::naming_clients(taken);
            let port = format!("port {}", pod.status_port);
            assert_found(&pod, "STATUS_PORT_TAKEN", &[&port, &us, "statusPort"]).await;
        }),
    ];
    join_all(rows).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_prevents_a_start_is_an_error_of_the_agent_and_of_the_doctor() {
    let place = tempfile::tempdir().unwrap();
    let own = fs::read(env!("CARGO_BIN_EXE_pilot-agent")).unwrap();
    let foreign = place.path().join("foreign");
    fs::write(&foreign, [&own[..18], &[42, 0], &own[20..64]].concat()).unwrap();
    let plain = place.path().join("plain");
    fs::write(&plain, "").unwrap();
    fs::set_permissions(&foreign, fs::Permissions::from_mode(0o755)).unwrap();
    let missing = place.path().join("missing");
    for (program, code) in [
        (&missing, "ENVOY_MISSING"),
        (&plain, "ENVOY_NOT_EXECUTABLE"),
        (&foreign, "ENVOY_WRONG_ARCHITECTURE"),
    ] {
        let control_plane = ControlPlane::of(&[]).await;
        let envoy = Some(program.as_path());
        let settings = super::Settings {
            envoy,
            environment: &[],
        };
        let mut pod = Pod::start(settings, &control_plane);
        let status = pod.agent.end().await;
        assert_eq!(status.code(), Some(255));
        let log = pod.agent.log();
        let error = log
            .lines()
            .find(|line| line.starts_with("Error: "))
            .unwrap();
        assert!(error.contains(&format!("[{code}]")), "{error}");
        assert_found(&pod, code, &[program.to_str().unwrap()]).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn readiness_names_what_envoy_waits_for() {
    if envoy_binary().is_none() {
        return;
    }
    let (pod, _control_plane) = pod(&[listener("plain", free_port(), "all")], &[]).await;
    envoy_says(&pod, "/init_dump", "RDS").await;
    let log = async || {
        assert_eq!(pod.status(Method::GET, "/healthz/ready").await, None);
        let log = pod.agent.log();
        let line = log
            .lines()
            .rfind(|line| line.contains("Envoy proxy is NOT ready: "))?;
        line.contains("[LISTENER_WARMING]").then(|| line.to_owned())
    };
    let line = eventually("the cause in the log", log).await;
    assert!(line.contains("plain waits for"), "{line}");
    assert!(line.ends_with("see `pilot-agent doctor`"), "{line}");
}
