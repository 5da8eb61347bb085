//! Tests traffic capture with real rules, which `istio-iptables` sets up.
//!
//! Every test runs in its own network namespace: see [`crate::support::namespace`].

mod flows;
mod iptables;
mod nftables;

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Command, Output};

use serde_json::json;
use tokio::net::TcpStream;
use tokio::time::Instant;

use crate::envoy::names::{application, run_as};
use crate::support::control_plane::{ControlPlane, NAMESPACE};
use crate::support::http::{Backend, header, request};
use crate::support::names::{Resolver, addresses, bound, name_table};
use crate::support::namespace::{self, AGENT, APPLICATION, Peer};
use crate::support::pod::{Pod, Settings};
use crate::support::programs::envoy_binary;
use crate::support::resources::{captured, endpoints, passthrough, transparent};
use crate::support::soon;

/// Runs `istio-iptables` with the privileges of an init container: root has only NET_ADMIN and NET_RAW, other
/// users have no capability.
pub fn istio_iptables(user: u32, words: &str) -> Output {
    let program = namespace::reachable(Path::new(env!("CARGO_BIN_EXE_pilot-agent")));
    let capabilities = match user {
        0 => "-all,+net_admin,+net_raw",
        _ => "-all",
    };
    let (user, mut command) = (user.to_string(), Command::new("setpriv"));
    command
        .args(["--reuid", &user, "--regid", &user, "--clear-groups"])
        .args(["--no-new-privs", "--inh-caps", "-all"])
        .args(["--bounding-set", capabilities])
        .arg(program)
        .arg("istio-iptables")
        .args(words.split_whitespace());
    command.output().unwrap()
}

pub fn text(output: &Output) -> String {
    let both = [&output.stdout[..], &output.stderr].concat();
    String::from_utf8_lossy(&both).into_owned()
}

/// Sets up the rules of a usual sidecar; `words` are further arguments.
fn capture(words: &str) {
    let usual = "-p 15001 -z 15006 -u 1337,2000-2001 -i * -b *";
    let output = istio_iptables(0, &format!("{usual} {words}"));
    assert!(output.status.success(), "{}", text(&output));
}

#[test]
fn validation_passes_as_the_proxys_user_and_fails_as_root() {
    const TEST: &str = "capture::validation_passes_as_the_proxys_user_and_fails_as_root";
    if !namespace::is_inside(TEST) {
        return;
    }
    let validate = |user, timeout| {
        let words = format!(
            "-p 15001 -z 15006 -u 1337 -m REDIRECT -i * -b * -d 15090,15021,15020 \
             --run-validation --skip-rule-apply --probe-timeout {timeout}"
        );
        let started = Instant::now();
        let output = istio_iptables(user, &words);
        (output.status.code(), text(&output), started.elapsed())
    };
    for (address, destination) in
        [("10.9.0.1/24", "127.0.0.6:15002"), ("2001:db8::1/64", "[::6]:15002")]
    {
        namespace::add_address(address);
        let (code, said, time) = validate(AGENT, "1500ms");
        assert_eq!(code, Some(126), "{said}");
        let hint = format!("no connection of user 1337 to {destination} was redirected");
        assert!(said.contains(&hint) && said.contains("cni.repair"), "{said}");
        assert!(time < std::time::Duration::from_secs(30), "{time:?}");
        for (mode, back_end) in [
            ("REDIRECT", ""),
            ("TPROXY", ""),
            ("REDIRECT", "--native-nftables"),
            ("TPROXY", "--native-nftables"),
        ] {
            capture(&format!("-m {mode} {back_end}"));
            let (code, said, _) = validate(AGENT, "30s");
            assert_eq!(code, Some(0), "{mode} {back_end}: {said}");
            let (code, said, _) = validate(0, "200ms");
            assert_eq!(code, Some(126), "{mode} {back_end}: {said}");
            let output = istio_iptables(0, &format!("--cleanup-only {back_end}"));
            assert!(output.status.success(), "{}", text(&output));
        }
        namespace::run("ip", &["address", "del", address, "dev", "lo"]);
    }
}

/// The addresses of one family.
#[derive(Clone, Copy)]
struct Addresses {
    pod: &'static str,
    peer: &'static str,
    /// Another address of the peer, which is excluded from capture.
    excluded: &'static str,
    /// The address of the pod's own service, which no machine has.
    service: &'static str,
    passthrough: &'static str,
    length: u8,
}

const V4: Addresses = Addresses {
    pod: "10.9.0.1",
    peer: "10.9.0.2",
    excluded: "10.9.1.1",
    service: "10.96.0.10",
    passthrough: "127.0.0.6",
    length: 24,
};
const V6: Addresses = Addresses {
    pod: "2001:db8:9::1",
    peer: "2001:db8:9::2",
    excluded: "2001:db8:91::1",
    service: "2001:db8:96::10",
    passthrough: "::6",
    length: 64,
};

/// A captured pod next to another machine, the peer.
struct Captured {
    peer: Peer,
    pod: Pod,
    resolver: Resolver,
    _backends: Vec<Backend>,
    _control_plane: ControlPlane,
}

const ARGUMENTS: &str = "-d 15090,15021,15020,7000-7010 -o 9000:9010 \
    -x 10.9.1.0/24,2001:db8:91::/64 --redirect-dns --dual-stack";

impl Captured {
    /// Starts a pod with these addresses; `words` are further settings of its capture. The peer has an
    /// application at port 80, and one at port 9005, which is not captured. The pod has an application at
    /// port 8080, and one at port 7005, which is not captured. The resolver runs on the peer.
    async fn start(families: &[Addresses], words: &str) -> Self {
        let pairs = families.iter().map(|family| {
            let with_length = |address| format!("{address}/{}", family.length);
            (with_length(family.pod), with_length(family.peer))
        });
        let pairs: Vec<_> = pairs.collect();
        let pairs: Vec<_> = pairs.iter().map(|(pod, peer)| (&**pod, &**peer)).collect();
        let peer = Peer::join(&pairs);
        for family in families {
            peer.ip(&["address", "add", family.excluded, "dev", "lo"]);
        }
        let nameserver = families[0].peer;
        let search = format!("search {NAMESPACE}.svc.cluster.local\n");
        namespace::put("/etc/resolv.conf", &format!("{search}nameserver {nameserver}\n"));
        capture(&format!("{ARGUMENTS} {words}"));

        let listen = |port| TcpListener::bind(format!("[::]:{port}")).unwrap();
        let backends = [8080, 7005].map(listen).into_iter();
        let others = peer.within(|| [80, 9005].map(listen));
        let resolver = SocketAddr::new(nameserver.parse().unwrap(), 53);
        let resolver = Resolver::of(peer.within(|| bound(resolver)));

        let is_transparent = words.contains("TPROXY");
        let sources: Vec<_> = if is_transparent {
            Vec::new()
        } else {
            families.iter().map(|family| family.passthrough).collect()
        };
        let mut own = json!({
            "@type": "type.googleapis.com/envoy.config.cluster.v3.Cluster",
            "name": "own",
            "connect_timeout": "1s",
            "load_assignment": endpoints("own", &[8080]),
        });
        own["load_assignment"].as_object_mut().unwrap().remove("@type");
        *own.pointer_mut(
            "/load_assignment/endpoints/0/lb_endpoints/0/endpoint/address/socket_address/address",
        )
        .unwrap() = json!(families[0].pod);
        let control_plane = ControlPlane::of(&[
            if is_transparent {
                transparent(captured("inbound", 15006, &[]))
            } else {
                captured("inbound", 15006, &[])
            },
            captured("outbound", 15001, &["own"]),
            passthrough("inbound", &sources),
            passthrough("outbound", &[]),
            own,
        ])
        .await;
        control_plane.add(name_table(NAMESPACE, &[("books", &["10.1.0.1"])]));
        let binary = namespace::reachable(&envoy_binary().unwrap());
        let settings = Settings {
            envoy: Some(&binary),
            environment: &[
                ("INSTANCE_IP", families[0].pod),
                ("ISTIO_META_DNS_CAPTURE", "true"),
                ("ISTIO_DUAL_STACK", if families.len() > 1 { "true" } else { "false" }),
                ("ENVOY_STATUS_PORT", "15021"),
                ("PROXY_CONFIG", r#"{"statusPort": 15020}"#),
                (
                    "ISTIO_KUBE_APP_PROBERS",
                    r#"{"/app-health/cart/readyz": {"httpGet": {"path": "/ready", "port": 8080}}}"#,
                ),
            ],
        };
        // In mode TPROXY, Envoy needs root, because it sets the marks and the source addresses of its sockets.
        let user = if is_transparent { 0 } else { AGENT };
        let pod = Pod::serving_as(Some((user, AGENT)), settings, &control_plane).await;
        Self {
            peer,
            pod,
            resolver,
            _backends: backends.chain(others).map(Backend::naming_clients).collect(),
            _control_plane: control_plane,
        }
    }

    /// Sends a request from the peer to the pod. Returns the head of the response.
    async fn peer_gets(&self, address: &str, port: u16, path: &str) -> String {
        let address = SocketAddr::new(address.parse().unwrap(), port);
        let stream = self.peer.within(|| std::net::TcpStream::connect(address));
        let stream = stream.unwrap_or_else(|error| panic!("{address}: {error}"));
        stream.set_nonblocking(true).unwrap();
        let mut stream = TcpStream::from_std(stream).unwrap();
        let what = format!("{address}{path} from the peer");
        soon(request(&mut stream, "cart", path)).await.expect(&what)
    }
}

/// Sends a request from an application of the pod. Returns the head of the response.
async fn pod_gets(address: &str, port: u16, host: &str) -> String {
    let address = SocketAddr::new(address.parse::<IpAddr>().unwrap(), port);
    let what = format!("{address} from the pod");
    soon(async {
        let mut stream = TcpStream::connect(address).await.expect(&what);
        request(&mut stream, host, "/").await.expect(&what)
    })
    .await
}

/// Sends a request from the pod as this user. Returns the response with its head.
async fn as_user(user: u32, address: &str, port: u16) -> String {
    let url = format!("http://{}/", SocketAddr::new(address.parse().unwrap(), port));
    let curl = ["curl", "--silent", "--show-error", "--include", &url];
    run_as(user, &curl).await.expect(&url)
}

/// Returns the names of the listeners that a response has passed, beginning with the listener next to the
/// application.
fn marks(head: &str) -> Vec<&str> {
    let fields = head.lines().filter_map(|line| line.split_once(": "));
    let marks = fields.filter(|(name, _)| *name == "x-mark");
    marks.map(|(_, value)| value).collect()
}

fn client(head: &str) -> &str {
    header(head, "x-client").unwrap()
}

/// Opens connections of all kinds, and asserts which listeners they pass and which client address arrives.
async fn both_directions(test: &str, families: &[Addresses], words: &str) {
    if envoy_binary().is_none() || !namespace::is_inside(test) {
        return;
    }
    let captured = Captured::start(families, words).await;
    for family in families {
        let inbound = captured.peer_gets(family.pod, 8080, "/").await;
        assert_eq!(marks(&inbound), ["inbound"]);
        let expected = if words.contains("TPROXY") { family.peer } else { family.passthrough };
        assert_eq!(client(&inbound), expected);
        let excluded = captured.peer_gets(family.pod, 7005, "/").await;
        assert_eq!((marks(&excluded), client(&excluded)), (vec![], family.peer));

        let outbound = pod_gets(family.peer, 80, "peer").await;
        assert_eq!(marks(&outbound), ["outbound"]);
        assert_eq!(client(&outbound), family.pod);
        for (address, port) in [(family.peer, 9005), (family.excluded, 80)] {
            assert_eq!(marks(&pod_gets(address, port, "peer").await), [""; 0], "{address}:{port}");
        }
        assert_eq!(marks(&as_user(APPLICATION, family.peer, 80).await), ["outbound"]);
        for user in [AGENT, 2000, 2001] {
            assert_eq!(marks(&as_user(user, family.peer, 80).await), [""; 0], "{user}");
        }
        assert_eq!(marks(&pod_gets(family.service, 80, "own").await), ["inbound", "outbound"]);
        assert_eq!(marks(&pod_gets(family.pod, 8080, "cart").await), [""; 0]);

        for (port, path) in [
            (15020, "/healthz/ready"),
            (15021, "/healthz/ready"),
            (15020, "/app-health/cart/readyz"),
        ] {
            captured.peer_gets(family.pod, port, path).await;
        }
    }
    captured.names().await;
}

impl Captured {
    /// Asks for names over UDP and TCP. Asserts that the agent answers from its name table, and that its own
    /// queries to the upstream resolver are not redirected back to it.
    async fn names(&self) {
        if !namespace::has("dig") {
            return;
        }
        for protocol in ["+notcp", "+tcp"] {
            let dig = async |name| {
                let said =
                    application(&["dig", protocol, "+short", "+tries=1", "+time=10", name]).await;
                addresses(&said.unwrap())
            };
            let expected: [IpAddr; 1] = [[10, 1, 0, 1].into()];
            assert_eq!(dig("books.shop.svc.cluster.local").await, expected, "{protocol}");
            let before = self.resolver.asked("outside.example.");
            let expected: [IpAddr; 1] = [[127, 0, 0, 1].into()];
            assert_eq!(dig("outside.example").await, expected, "{protocol}");
            assert_eq!(self.resolver.asked("outside.example.") - before, 1, "{protocol}");
        }
        assert_eq!(self.resolver.asked("books.shop.svc.cluster.local."), 0);
        assert!(!self.pod.agent.log().contains("all upstream failed"));
    }
}

#[tokio::test]
async fn redirect_captures_both_families_with_iptables() {
    const TEST: &str = "capture::redirect_captures_both_families_with_iptables";
    both_directions(TEST, &[V4, V6], "-m REDIRECT").await;
}

#[tokio::test]
async fn redirect_captures_both_families_with_legacy_iptables() {
    const TEST: &str = "capture::redirect_captures_both_families_with_legacy_iptables";
    both_directions(TEST, &[V4, V6], "-m REDIRECT --force-iptables-binary legacy").await;
}

#[tokio::test]
async fn redirect_captures_both_families_with_nftables() {
    const TEST: &str = "capture::redirect_captures_both_families_with_nftables";
    both_directions(TEST, &[V4, V6], "-m REDIRECT --native-nftables").await;
}

#[tokio::test]
async fn redirect_captures_a_pod_of_ipv4() {
    const TEST: &str = "capture::redirect_captures_a_pod_of_ipv4";
    both_directions(TEST, &[V4], "-m REDIRECT").await;
}

#[tokio::test]
async fn redirect_captures_a_pod_of_ipv6() {
    const TEST: &str = "capture::redirect_captures_a_pod_of_ipv6";
    both_directions(TEST, &[V6], "-m REDIRECT").await;
}

#[tokio::test]
async fn tproxy_captures_both_families_and_keeps_clients_with_iptables() {
    const TEST: &str = "capture::tproxy_captures_both_families_and_keeps_clients_with_iptables";
    both_directions(TEST, &[V4, V6], "-m TPROXY").await;
}

#[tokio::test]
async fn tproxy_captures_both_families_and_keeps_clients_with_nftables() {
    const TEST: &str = "capture::tproxy_captures_both_families_and_keeps_clients_with_nftables";
    both_directions(TEST, &[V4, V6], "-m TPROXY --native-nftables").await;
}
