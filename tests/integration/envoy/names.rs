//! Tests DNS in a pod whose port 53 is captured, with the resolvers of applications and with Envoy.
//!
//! Every test runs in its own network namespace: see [`crate::support::namespace`]. The pod's upstream resolver has an
//! address in that namespace and counts its queries, which would show a loop.

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::process::Command;

use crate::support::control_plane::{ControlPlane, NAMESPACE};
use crate::support::http::{Backend, get};
use crate::support::names::{Resolver, addresses, name_table};
use crate::support::namespace::{self, AGENT, APPLICATION};
use crate::support::pod::{Pod, Settings};
use crate::support::process::is_alive;
use crate::support::programs::envoy_binary;
use crate::support::resources::{listener, logged, routes};
use crate::support::{PATIENCE, eventually, free_port};

const RESOLVER: &str = "192.0.2.53";
const CAPTURE: (&str, &str) = ("ISTIO_META_DNS_CAPTURE", "true");

const SERVICES: &[(&str, &[&str])] =
    &[("books", &["127.0.0.1"]), ("many", &["10.1.0.1", "10.1.0.2", "10.1.0.3", "2001:db8::7"])];

/// Returns the resolv.conf of a pod of [`NAMESPACE`], with this nameserver in place of the cluster's.
fn resolv_conf(nameserver: &str) -> String {
    format!(
        "search {NAMESPACE}.svc.cluster.local svc.cluster.local cluster.local\n\
         nameserver {nameserver}\noptions ndots:5\n"
    )
}

struct Captured {
    pod: Pod,
    resolver: Resolver,
    backend: Backend,
    _control_plane: ControlPlane,
    /// The ports of Envoy's listeners for `books`, which Envoy resolves through the agent, and for
    /// `outside.example`, which Envoy resolves in the way that any program does.
    ports: [u16; 2],
}

/// Starts a pod whose agent is not root. All queries to port 53 except those of the agent's user are redirected to the
/// agent.
async fn captured() -> Captured {
    namespace::add_address(&format!("{RESOLVER}/32"));
    namespace::add_address("2001:db8::1/128");
    namespace::put("/etc/resolv.conf", &resolv_conf(RESOLVER));
    namespace::capture_dns(15053);
    start(Some((AGENT, AGENT)), &[CAPTURE]).await
}

async fn start(user: Option<(u32, u32)>, environment: &[(&str, &str)]) -> Captured {
    let binary = namespace::reachable(&envoy_binary().unwrap());
    let resolver = Resolver::start(SocketAddr::new(RESOLVER.parse().unwrap(), 53));
    let backend = Backend::start().await;
    let ports = [free_port(), free_port()];
    let mut books = named("books", "books.shop.svc.cluster.local", backend.port);
    books["typed_dns_resolver_config"] = agent_resolver();
    let control_plane = ControlPlane::of(&[
        books,
        named("outside", "outside.example", backend.port),
        logged(listener("to-books", ports[0], "books"), "/dev/stdout", "books\n"),
        listener("to-outside", ports[1], "outside"),
        routes("books", "books", "0"),
        routes("outside", "outside", "0"),
    ])
    .await;
    control_plane.add(name_table(NAMESPACE, SERVICES));
    let settings = Settings { envoy: Some(&binary), environment };
    let pod = Pod::serving_as(user, settings, &control_plane).await;
    Captured { pod, resolver, backend, _control_plane: control_plane, ports }
}

/// Returns a cluster whose endpoint is a host name, which Envoy resolves.
fn named(cluster: &str, host: &str, port: u16) -> Value {
    let address = json!({ "socket_address": { "address": host, "port_value": port } });
    json!({
        "@type": "type.googleapis.com/envoy.config.cluster.v3.Cluster",
        "name": cluster,
        "type": "STRICT_DNS",
        "dns_lookup_family": "V4_ONLY",
        "connect_timeout": "1s",
        "dns_refresh_rate": "1s",
        "load_assignment": {
            "cluster_name": cluster,
            "endpoints": [{ "lb_endpoints": [{ "endpoint": { "address": address } }] }],
        },
    })
}

/// Returns the resolver configuration with which istiod has Envoy resolve names of wildcard hosts through the agent.
fn agent_resolver() -> Value {
    json!({
        "name": "envoy.network.dns_resolver.cares",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.network.dns_resolver.cares.v3.\
                      CaresDnsResolverConfig",
            "resolvers": [
                { "socket_address": { "address": "127.0.0.1", "port_value": 15053 } },
            ],
        },
    })
}

#[tokio::test]
async fn captured_names_resolve_for_applications_and_envoy_without_a_loop() {
    const TEST: &str = "names::captured_names_resolve_for_applications_and_envoy_without_a_loop";
    if envoy_binary().is_none() || !namespace::is_inside(TEST) {
        return;
    }
    let captured = captured().await;
    for port in captured.ports {
        eventually("a name Envoy looked up", async || get(port).await.ok()).await;
    }
    let port = captured.backend.port;
    for host in ["books", "books.shop.svc.cluster.local", "outside.example"] {
        let url = format!("http://{host}:{port}/");
        let said = application(&["curl", "--silent", "--show-error", &url]).await;
        assert_eq!(said, Ok("ok".to_owned()), "{url}");
    }
    let before = captured.resolver.total();
    let asked_before = captured.resolver.asked("outside.example.");
    let said = application(&["getent", "ahostsv4", "outside.example."]).await;
    assert_eq!(addresses(&said.unwrap()), ips(&["127.0.0.1"]));
    // Meanwhile Envoy resolves `outside.example` too, once each second.
    let asked = captured.resolver.asked("outside.example.") - asked_before;
    assert!((1..=4).contains(&asked), "asked {asked} times for one");
    let total = captured.resolver.total() - before;
    assert!(total <= 5, "{total} queries for one");
    assert_eq!(captured.resolver.asked("books.shop.svc.cluster.local."), 0);
    assert!(!captured.pod.agent.log().contains("all upstream failed"));
}

#[tokio::test]
async fn resolvers_of_all_kinds_get_what_they_ask_for() {
    const TEST: &str = "names::resolvers_of_all_kinds_get_what_they_ask_for";
    if envoy_binary().is_none() || !namespace::is_inside(TEST) {
        return;
    }
    let programs = tempfile::tempdir().unwrap();
    let kinds = kinds(programs.path());
    let captured = captured().await;
    for Kind { name, command, searches, retries_over_tcp } in kinds {
        let many = ["10.1.0.1", "10.1.0.2", "10.1.0.3", "2001:db8::7"];
        let mut cases = vec![
            ("many.shop.svc.cluster.local", ips(&many)),
            ("outside.example", ips(&["127.0.0.1"])),
            ("missing.example", Vec::new()),
        ];
        if searches {
            cases.extend([("many", ips(&many)), ("many.shop", ips(&many))]);
        }
        if retries_over_tcp {
            let giant = (0..64).map(|last| [240, 0, 0, last].into()).collect();
            cases.push(("giant.example", giant));
        }
        for (host, expected) in cases {
            let words: Vec<&str> = command.iter().map(String::as_str).chain([host]).collect();
            let said = application(&words).await;
            // Most of the programs fail if a name does not exist.
            let found = addresses(said.as_deref().unwrap_or_default());
            assert_eq!(found, expected, "{name}, {host}: {said:?}");
        }
        eprintln!("{name} resolves.");
    }
    assert!(!captured.pod.agent.log().contains("all upstream failed"));
}

#[tokio::test]
async fn an_agent_that_replaces_the_resolver_runs_envoy_as_the_exempt_user() {
    const TEST: &str = "names::an_agent_that_replaces_the_resolver_runs_envoy_as_the_exempt_user";
    if envoy_binary().is_none() || !namespace::is_inside(TEST) {
        return;
    }
    namespace::add_address(&format!("{RESOLVER}/32"));
    namespace::put("/etc/resolv.conf", &resolv_conf("127.0.0.1"));
    namespace::put("/var/lib/istio/resolv.conf", &resolv_conf(RESOLVER));
    let environment = [CAPTURE, ("DNS_PROXY_ADDR", "127.0.0.1:53")];
    let mut captured = start(None, &environment).await;
    let envoy = captured.pod.envoy_pid().unwrap();
    let status = fs::read_to_string(format!("/proc/{}/status", envoy.as_raw_nonzero())).unwrap();
    let of = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().skip(1).collect::<Vec<_>>()
    };
    assert_eq!((of("Uid:"), of("Gid:")), (vec!["1337"; 4], vec!["1337"; 4]));
    assert!(of("Groups:").is_empty(), "{status}");
    for host in ["books", "outside.example"] {
        // In place of the machine's resolver, the agent forwards all queries until it has a name table.
        let said = eventually(host, async || application(&["getent", "ahostsv4", host]).await.ok());
        assert_eq!(addresses(&said.await), ips(&["127.0.0.1"]), "{host}");
    }
    // Envoy writes to the agent's output, although that belongs to root.
    eventually("an access log in /dev/stdout", async || {
        let _ = get(captured.ports[0]).await; // Envoy logs the request, whatever the response is.
        let log = captured.pod.agent.log();
        log.lines().any(|line| line == "books").then_some(())
    })
    .await;
    captured.pod.agent.signal(Signal::KILL);
    captured.pod.agent.end().await;
    eventually("Envoy is gone", async || (!is_alive(envoy)).then_some(())).await;
}

struct Kind {
    name: &'static str,
    /// The program and its arguments, to which the name is appended.
    command: Vec<String>,
    /// True if the resolver appends search domains.
    searches: bool,
    /// True if the resolver repeats a query over TCP after a truncated answer.
    retries_over_tcp: bool,
}

/// Returns the resolvers that are installed on this machine.
fn kinds(programs: &Path) -> Vec<Kind> {
    const NODE: &str = "const {promises: dns} = require('dns');\
        const host = process.argv[1];\
        Promise.allSettled([dns.resolve4(host), dns.resolve6(host)]).then(found =>\
        found.forEach(({value}) => (value || []).forEach(ip => console.log(ip))))";
    const PYTHON: &str = "import socket, sys\n\
        for found in socket.getaddrinfo(sys.argv[1], None): print(found[4][0])";
    let kind = |name, command: &[&str], searches| Kind {
        name,
        command: command.iter().map(ToString::to_string).collect(),
        searches,
        retries_over_tcp: true,
    };
    let mut kinds = vec![kind("glibc's getent", &["getent", "ahosts"], true)];
    if namespace::has("dig") {
        const BOTH: &str = "dig +short \"$1\" A \"$1\" AAAA";
        kinds.push(kind("dig", &["sh", "-c", BOTH, "sh"], false));
        let tcp = BOTH.replace("+short", "+tcp +noedns +short");
        kinds.push(kind("dig by TCP", &["sh", "-c", &tcp, "sh"], false));
        let search = BOTH.replace("+short", "+search +short");
        kinds.push(kind("dig with search domains", &["sh", "-c", &search, "sh"], true));
    }
    if namespace::has("python3") {
        kinds.push(kind("glibc's getaddrinfo", &["/usr/bin/python3", "-c", PYTHON], true));
    }
    if namespace::has("node") {
        kinds.push(kind("c-ares, through Node", &["node", "-e", NODE], false));
    }
    if namespace::has("go") {
        let program = build_go(programs);
        kinds.push(kind("Go's own", &[&program], true));
    }
    if namespace::has("musl-gcc") {
        let program = build_musl(programs);
        kinds.push(Kind {
            // Old versions of musl query over UDP only, and use a truncated answer.
            retries_over_tcp: false,
            ..kind("musl", &[&program], true)
        });
    }
    kinds
}

fn build_go(programs: &Path) -> String {
    const PROGRAM: &str = "package main\n\
        import (\"context\"; \"fmt\"; \"net\"; \"os\")\n\
        func main() {\n\
        resolver := net.Resolver{PreferGo: true}\n\
        found, err := resolver.LookupHost(context.Background(), os.Args[1])\n\
        if err != nil { fmt.Fprintln(os.Stderr, err); os.Exit(1) }\n\
        for _, ip := range found { fmt.Println(ip) } }\n";
    let (source, program) = (programs.join("look.go"), programs.join("look-go"));
    fs::write(&source, PROGRAM).unwrap();
    let mut build = std::process::Command::new("go");
    build
        .args(["build", "-tags", "netgo", "-o"])
        .args([&program, &source])
        .env("CGO_ENABLED", "0")
        .env("GO111MODULE", "off")
        .env("GOTOOLCHAIN", "local");
    built(build, &program)
}

fn build_musl(programs: &Path) -> String {
    const PROGRAM: &str = "#include <netdb.h>\n#include <stdio.h>\n#include <sys/socket.h>\n\
        int main(int count, char **words) {\n\
        struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found; char text[256];\n\
        if (getaddrinfo(words[1], 0, &hints, &found)) return 1;\n\
        for (; found; found = found->ai_next) {\n\
        getnameinfo(found->ai_addr, found->ai_addrlen, text, sizeof text, 0, 0, NI_NUMERICHOST);\n\
        puts(text); } return 0; }\n";
    let (source, program) = (programs.join("look.c"), programs.join("look-musl"));
    fs::write(&source, PROGRAM).unwrap();
    let mut build = std::process::Command::new("musl-gcc");
    build.arg("-static").arg("-o").args([&program, &source]);
    built(build, &program)
}

/// Builds a program, and returns a path at which the application's user can run it.
fn built(mut build: std::process::Command, program: &Path) -> String {
    let output = build.output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{build:?}: {error}");
    let place = namespace::reachable(program);
    place.to_str().unwrap().to_owned()
}

/// Runs a program as the application's user. Returns its output, or its status and errors if it fails.
pub async fn application(words: &[&str]) -> Result<String, String> {
    run_as(APPLICATION, words).await
}

/// Runs a program as a user. Returns its output, or its status and errors if it fails.
pub async fn run_as(user: u32, words: &[&str]) -> Result<String, String> {
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).uid(user).gid(user).kill_on_drop(true);
    let output = tokio::time::timeout(PATIENCE, command.output()).await;
    let output = output
        .unwrap_or_else(|_| panic!("{words:?}: not within {PATIENCE:?}"))
        .unwrap_or_else(|error| panic!("{words:?}: {error}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() {
        Ok(text(&output.stdout))
    } else {
        Err(format!("{}: {}", output.status, text(&output.stderr)))
    }
}

fn ips(texts: &[&str]) -> Vec<IpAddr> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}
