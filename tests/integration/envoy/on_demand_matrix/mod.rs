//! Compares the results of many kinds of requests with on-demand clusters and without.
//!
//! Two pods have the same resources and the same backends. Each kind of request has its own listener, route table and
//! two services, so its first request is the first use of these services. The client's view and Envoy's access log must
//! be equal in both pods, except for the differences in [`EXPECTED`]. Envoy's listeners get the connections directly, or
//! as in a pod: redirected to one listener, which hands them over by their original destination.

mod cases;
mod resources;
mod traffic;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use futures_util::future::join_all;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::time::timeout;

use self::cases::cases;
use self::resources::{Case, END, LISTENER_REPLACED, ROUTES_REPLACED, resources, service};
use self::traffic::{Client, PAUSE, serve_http, serve_tcp, serve_upgrade};
use super::on_demand::{ON, loaded, tcp_listener};
use crate::support::control_plane::ControlPlane;
use crate::support::http::Backend;
use crate::support::namespace;
use crate::support::pod::{Pod, Settings, ask};
use crate::support::programs::envoy_binary;
use crate::support::{eventually, free_port};

/// The differences that there may be: the kind of request, where the differences are, and the reason.
const EXPECTED: &[(&str, &[&str], &str)] = &[
    ("buffer overflow", &[CLIENT, LOG], AT_ONCE),
    ("buffer overflow with length", &[CLIENT, LOG], AT_ONCE),
    (
        "client leaves",
        &[LOG],
        "with the mode off, the request has reached its service when the client leaves",
    ),
    ("grpc missing", &[LOG], "the body arrives during the wait, so the log counts its bytes"),
    (
        "internal redirect",
        &[LOG],
        "Envoy logs the second service's cluster for the first request, if it has it",
    ),
    (
        "lua body of 5 MB",
        &[CLIENT, LOG],
        "a body that fills Envoy's buffer during the wait and that a filter then buffers is not \
         refused with 413: the request stops until it is idle for too long",
    ),
    (
        "max pending",
        &[CLIENT, LOG],
        "requests that have waited continue at the same moment, and all but one are refused until there is a connection",
    ),
    ("sni passthrough", &[LOG], "the length of a TLS signature varies"),
    ("tcp missing", &[CLIENT], UNREAD),
    ("tcp refused", &[CLIENT], UNREAD),
    ("tcp without endpoints", &[CLIENT], UNREAD),
];
const AT_ONCE: &str =
    "the filter gets the body at once and complete, and then does not compare its size";
const UNREAD: &str = "the kernel resets a connection that Envoy closes before it has read everything, which depends on \
                      when Envoy closes it";
const CLIENT: &str = "client";
const LOG: &str = "log";
const RESULT: &str = "result";

/// The services that Envoy has before their first request, because it does not ask for them or discovers only clusters of
/// type EDS.
const PINNED: &[(&str, &str)] = &[
    ("mirror", "2"),
    ("ext_authz allow", "2"),
    ("ext_authz deny", "2"),
    ("ext_authz 5 MB", "2"),
    ("ext_authz with body", "2"),
    ("lua call", "2"),
    ("aggregate", "1"),
    ("aggregate", "2"),
    ("strict_dns", "1"),
    ("logical_dns", "1"),
    ("static", "1"),
    ("original_dst", "1"),
];

/// The kinds of requests in which Envoy chooses the order of services or endpoints.
const UNORDERED: &[&str] = &["retry previous hosts", "tcp weighted clusters"];

/// The time limit of a request.
const LIMIT: Duration = Duration::from_secs(10);

/// A pod with its own control plane.
struct World {
    control_plane: ControlPlane,
    pod: Pod,
    port: u16,
    log: PathBuf,
    /// The resources of each case.
    resources: Vec<Vec<Value>>,
    _folder: TempDir,
}

impl World {
    async fn start(
        mode: &str,
        cases: &[Case],
        ports: [u16; 2],
        is_redirected: bool,
    ) -> Option<Self> {
        let binary = envoy_binary()?;
        let (folder, port) = (tempfile::tempdir().unwrap(), free_port());
        let log = folder.path().join("access.log");
        let mut resources: Vec<_> = (0..cases.len())
            .map(|it| resources(&cases[it], address(port, it), log.to_str().unwrap(), ports))
            .collect();
        if is_redirected {
            resources.iter_mut().for_each(|it| it[0]["bind_to_port"] = json!(false));
            resources.push(vec![redirect(port)]);
        }
        let control_plane = ControlPlane::of(&resources.concat()).await;
        let settings = Settings { envoy: Some(&binary), environment: &[(ON.0, mode)] };
        let pod = Pod::serving(settings, &control_plane).await;
        // A connection to a listener would be a first use.
        eventually("all listeners", async || {
            let listeners = ask(&pod.envoy, "/listeners").await?;
            cases.iter().all(|it| listeners.contains(&format!("{}::", it.0))).then_some(())
        })
        .await;
        Some(Self { control_plane, pod, port, log, resources, _folder: folder })
    }

    async fn ask(&self, number: usize, client: &Client) -> String {
        let result = timeout(LIMIT, client(address(self.port, number))).await;
        result.unwrap_or("no end".to_owned())
    }

    /// Returns the log lines of each case, sorted.
    async fn logged(&self) -> BTreeMap<String, Vec<String>> {
        let text = eventually("the log", async || {
            let text = std::fs::read_to_string(&self.log).ok()?;
            (text.matches(&format!("{END}: ")).count() == 2).then_some(text)
        })
        .await;
        let mut lines = BTreeMap::<_, Vec<_>>::new();
        for line in text.lines() {
            // A line as JSON has the name in quotes.
            let (start, _) = line.split_once(": ").unwrap();
            let case = start.rsplit('"').next().unwrap();
            lines.entry(case.to_owned()).or_default().push(line.to_owned());
        }
        lines.values_mut().for_each(|lines| lines.sort());
        lines
    }

    /// Sends requests while istiod is unreachable. When istiod is back, it has another listener and other routes for them.
    /// Returns the results, and whether the requests have waited for istiod.
    async fn replace(mut self, cases: &[Case]) -> (Vec<String>, bool) {
        let replaced = |name: &str| cases.iter().position(|it| it.0 == name).unwrap();
        let [listener, routes] = [LISTENER_REPLACED, ROUTES_REPLACED].map(replaced);
        let dead = self.control_plane.kill().await;
        let clients = [listener, routes].map(|it| cases[it].3(address(self.port, it)));
        let mut waiting = Box::pin(timeout(LIMIT * 3, join_all(clients)));
        let early = timeout(PAUSE * 2, &mut waiting).await;
        let manager = &mut self.resources[listener][0]["filter_chains"][0]["filters"][0];
        manager["typed_config"]["server_name"] = json!("replaced");
        self.resources[routes][1]["response_headers_to_add"][0]["header"]["value"] =
            json!("replaced");
        dead.set(&self.resources.concat()).await;
        let _control_plane = dead.revive().await;
        let has_waited = early.is_err();
        let results = match early {
            Ok(results) => results,
            Err(_) => waiting.await,
        };
        for it in [listener, routes] {
            let later = async || {
                cases[it].3(address(self.port, it)).await.contains("replaced").then_some(())
            };
            eventually("the replacement", later).await;
        }
        (results.unwrap(), has_waited)
    }
}

/// Redirects connections to the addresses of all cases with this port. Returns the listener that hands them over.
fn redirect(port: u16) -> Value {
    let (of_cases, virtual_port) = (port.to_string(), free_port());
    let rule = "-t nat -A OUTPUT -p tcp -d 127.7.0.0/16 --dport";
    let target = ["-j", "REDIRECT", "--to-ports", &virtual_port.to_string()];
    namespace::run(
        "iptables",
        &[&rule.split(' ').collect::<Vec<_>>(), &[&*of_cases][..], &target].concat(),
    );
    let mut listener = tcp_listener("virtualOutbound", virtual_port, "PassthroughCluster");
    listener["use_original_dst"] = json!(true);
    listener
}

/// Returns the address of a case's listener.
fn address(port: u16, number: usize) -> SocketAddr {
    ([127, 7, 0, u8::try_from(number + 1).unwrap()], port).into()
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_have_the_same_results_with_the_mode_on_and_off() {
    compare(false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn redirected_requests_have_the_same_results_with_the_mode_on_and_off() {
    if namespace::is_inside(
        "on_demand_matrix::redirected_requests_have_the_same_results_with_the_mode_on_and_off",
    ) {
        compare(true).await;
    }
}

async fn compare(is_redirected: bool) {
    let (a, b) = (Backend::serving(serve_http).await, Backend::serving(serve_http).await);
    let stream = Backend::serving(serve_tcp).await;
    let upgrade = Backend::serving(serve_upgrade).await;
    let cases = cases([a.port, b.port, stream.port, upgrade.port, free_port()]);
    let ports = [a.port, b.port];
    let Some(off) = World::start("false", &cases, ports, is_redirected).await else { return };
    let Some(on) = World::start("true", &cases, ports, is_redirected).await else { return };
    let pinned: BTreeSet<_> = PINNED.iter().map(|(case, number)| service(case, number)).collect();
    // Clusters that routes name follow the routes.
    eventually("the pinned clusters", async || (loaded(&on.pod).await == pinned).then_some(()))
        .await;
    let comparable = |name: &str, text: &str| {
        if UNORDERED.contains(&name) {
            text.replace(&b.port.to_string(), &a.port.to_string())
        } else {
            text.to_owned()
        }
    };
    let mut differences = Vec::new();
    let end = cases.iter().position(|it| it.0 == END).unwrap();
    for (number, (name, expected, _, client)) in cases.iter().enumerate().take(end + 1) {
        for time in ["first", "second"] {
            let (off, on) = (off.ask(number, client).await, on.ask(number, client).await);
            if !off.contains(expected) {
                differences.push((*name, RESULT, format!("expected {expected}: {off}")));
            }
            if comparable(name, &off) != comparable(name, &on) {
                differences.push((*name, CLIENT, format!("{time} time\noff: {off}\non: {on}")));
            }
        }
    }
    let [mut logged_off, mut logged_on] = [off.logged().await, on.logged().await];
    for (name, ..) in &cases[..=end] {
        let [off, on] = [&mut logged_off, &mut logged_on].map(|it| {
            let lines = it.remove(*name).unwrap_or_default();
            let mut lines: Vec<_> = lines.iter().map(|line| comparable(name, line)).collect();
            if UNORDERED.contains(name) {
                lines.sort();
                lines.dedup();
            }
            lines
        });
        if off != on || off.is_empty() {
            differences.push((*name, LOG, format!("off: {off:#?}\non: {on:#?}")));
        }
    }
    let (off, _) = off.replace(&cases).await;
    let (on, has_waited) = on.replace(&cases).await;
    if off != on || !has_waited {
        differences.push(("replaced", CLIENT, format!("off: {off:#?}\non: {on:#?}")));
    }
    differences.retain(|(name, place, text)| {
        let expected = EXPECTED.iter().find(|it| it.0 == *name && it.1.contains(place));
        let reason = expected.map_or("", |it| it.2);
        eprintln!("{name}, {place}: {text}\n{reason}\n");
        reason.is_empty()
    });
    assert!(differences.is_empty(), "{} differences of {} kinds", differences.len(), cases.len());
}
