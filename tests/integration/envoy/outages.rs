//! Tests outages of the control plane: it stops, and starts again later.

use std::process::Command;
use std::time::Duration;

use local_istiod::Event;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::support::control_plane::ControlPlane;
use crate::support::http::{Backend, Fresh, Lasting, Load, get, header};
use crate::support::pod::{Pod, Settings};
use crate::support::programs::envoy_binary;
use crate::support::resources::{cluster, endpoints, listener, routes};
use crate::support::{eventually, free_port, namespace};

fn resources(port: u16, backend: u16, mark: &str) -> Vec<Value> {
    vec![
        cluster("books"),
        endpoints("books", &[backend]),
        listener("plain", port, "all"),
        routes("all", "books", mark),
    ]
}

async fn marked(port: u16, mark: &str) {
    eventually("a route in force", async || {
        let head = get(port).await.ok()?;
        (header(&head, "x-mark") == Some(mark)).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_control_plane_costs_no_request_and_serves_within_5_s() {
    let Some(binary) = envoy_binary() else { return };
    let (backend, port) = (Backend::start().await, free_port());
    let mut control_plane = ControlPlane::of(&resources(port, backend.port, "0")).await;
    let settings = Settings { envoy: Some(&binary), environment: &[] };
    let _pod = Pod::serving(settings, &control_plane).await;
    marked(port, "0").await;
    let load = Load::default().with(Fresh(port)).with(Lasting::new(port));
    // The longer the outage, the longer the backoff of the agent and of Envoy.
    for (seconds, mark) in [(1, "1"), (12, "2")] {
        let dead = control_plane.kill().await;
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        dead.set(&resources(port, backend.port, mark)).await;
        control_plane = dead.revive().await;
        let returned = Instant::now();
        marked(port, mark).await;
        let took = returned.elapsed();
        assert!(took <= Duration::from_secs(5), "{took:?} after {seconds} s");
    }
    load.assert_flawless();
}

#[tokio::test]
async fn fifty_restarts_of_the_control_plane_leak_nothing_in_the_agent() {
    let Some(binary) = envoy_binary() else { return };
    let settings = Settings { envoy: Some(&binary), environment: &[] };
    let mut control_plane = ControlPlane::of(&resources(free_port(), 7001, "0")).await;
    let pod = Pod::serving(settings, &control_plane).await;
    // Each restart takes a second, because the agent dials at most once per second.
    for _ in 0..5 {
        control_plane = restarted(control_plane).await;
    }
    let (files, threads) = (pod.agent.open_files(), pod.agent.threads());
    let memory = pod.agent.memory("VmRSS");
    for _ in 0..50 {
        control_plane = restarted(control_plane).await;
    }
    eventually("as many open files and threads as before", async || {
        let now = (pod.agent.open_files(), pod.agent.threads());
        (now.0 == files && now.1 <= threads).then_some(())
    })
    .await;
    let grown = pod.agent.memory("VmRSS").saturating_sub(memory);
    assert!(grown <= 1024, "{grown} KiB more than {memory} KiB");
}

#[tokio::test]
async fn an_istiod_address_that_drops_syns_costs_a_second_once() {
    const TEST: &str = "outages::\
        an_istiod_address_that_drops_syns_costs_a_second_once";
    let Some(binary) = envoy_binary() else { return };
    if !namespace::is_inside(TEST) {
        return;
    }
    let lost = [
        "add table ip6 test; add counter ip6 test syns;",
        "add chain ip6 test input { type filter hook input priority 0; };",
        "add rule ip6 test input ip6 daddr 2001:db8::1 tcp flags syn counter name syns drop",
    ];
    namespace::run("nft", &[&lost.concat()]);
    namespace::add_address("2001:db8::1/128");
    let name = "istiod.istio-system.svc";
    namespace::put("/etc/hosts", &format!("2001:db8::1 {name}\n127.0.0.1 {name}\n"));
    let mut control_plane = ControlPlane::of(&resources(free_port(), 7001, "0")).await;
    let address = format!("{name}:{}", control_plane.istiod.address.port());
    let proxy_config = json!({ "discoveryAddress": address }).to_string();
    let settings =
        Settings { envoy: Some(&binary), environment: &[("PROXY_CONFIG", &proxy_config)] };
    let _pod = Pod::serving(settings, &control_plane).await;
    for _ in 0..3 {
        // The kernel would repeat a SYN after a second. By then the agent has connected over IPv4, and later it dials
        // the IPv6 address last. So there is one SYN.
        let mut list = Command::new("nft");
        list.args(["list", "counter", "ip6", "test", "syns"]);
        let counter = String::from_utf8(list.output().unwrap().stdout).unwrap();
        assert!(counter.contains("packets 1 "), "{counter}");
        control_plane = restarted(control_plane).await;
    }
}

/// Returns the warnings and errors in a log, those of the agent and those of its Envoy.
fn complaints(log: &str) -> Vec<&str> {
    let is_complaint = |line: &&str| {
        let level = line.split('\t').nth(1);
        level.is_some_and(|level| ["warn", "error", "warning"].contains(&level))
    };
    log.lines().filter(is_complaint).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thirty_seconds_without_istiod_take_at_most_fifteen_warnings_and_errors() {
    let Some(binary) = envoy_binary() else { return };
    let settings = Settings { envoy: Some(&binary), environment: &[] };
    let control_plane = ControlPlane::of(&resources(free_port(), 7001, "0")).await;
    let starting = Pod::start(settings, &control_plane);
    let dead = control_plane.kill().await;
    tokio::time::sleep(Duration::from_secs(30)).await;
    let log = starting.agent.log();
    let complaints = complaints(&log);
    println!("{}", complaints.join("\n"));
    assert!(complaints.len() <= 15, "{}: {complaints:#?}", complaints.len());
    drop(dead);
}

/// Kills the control plane, starts it again and waits until Envoy has accepted its routes.
async fn restarted(control_plane: ControlPlane) -> ControlPlane {
    let mut control_plane = control_plane.kill().await.revive().await;
    let all_acked = |event: &Event| matches!(event, Event::Acked { type_url, .. } if type_url.ends_with("RouteConfiguration"));
    control_plane.event("a stream in use", all_acked).await;
    control_plane
}
