//! Tests the access to the status port from sockets of other users, from other addresses and with other host names.

use std::net::Ipv6Addr;
use std::sync::Arc;

use rustix::net::{AddressFamily, SocketType, bind, connect, socket};
use rustix::process::{Uid, geteuid};
use rustix::thread::set_thread_res_uid;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use super::*;
use crate::metrics::Registry;
use crate::runtime::lifecycle::{CancellationToken, Stop, StopAccepting};
use crate::status::tests::{any_port, config, own_metrics, sources};
use crate::status::{Probers, Router, server};

const ROOT: u32 = 0;
const APPLICATION: u32 = 4321;
const LISTED: u32 = 4322;
const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

impl Caller {
    /// Returns a caller without a connection.
    pub(in crate::status) fn of(address: &str, user: Option<u32>) -> Self {
        let from: SocketAddr = address.parse().expect("an address");
        Self {
            address: SocketAddr::new(from.ip().to_canonical(), from.port()),
            own: Err(io::ErrorKind::NotConnected.into()),
            user: OnceCell::new_with(user),
        }
    }
}

/// Starts a status port with these permitted users. Returns the port and its task.
fn start(debug: Option<BTreeSet<u32>>, control: Option<BTreeSet<u32>>) -> (u16, JoinSet<()>) {
    let metrics = Registry::default();
    let sources = sources(Stop::new(), own_metrics(metrics.clone()), metrics);
    let mut config = config(Probers::default());
    (config.debug_users, config.control_users) = (debug, control);
    let router = Arc::new(Router::new(config, sources).expect("a router"));
    let (listener, port) = any_port();
    let mut tasks = JoinSet::new();
    let (stop_accepting, stop) = (StopAccepting::default(), CancellationToken::new());
    tasks.spawn(server::serve(listener, server::UNREAD, router, stop_accepting, stop));
    (port, tasks)
}

/// Connects with a socket that belongs to this user. Returns None if this process may not become the user, or if the
/// machine has no IPv6.
fn connected(user: u32, from: IpAddr, to: SocketAddr) -> Option<TcpStream> {
    let own = geteuid();
    if !own.is_root() && user != own.as_raw() {
        return None;
    }
    let connecting = std::thread::spawn(move || {
        let user = Uid::from_raw(user);
        set_thread_res_uid(user, user, user).expect("another user");
        let family = match to {
            SocketAddr::V4(_) => AddressFamily::INET,
            SocketAddr::V6(_) => AddressFamily::INET6,
        };
        let socket = socket(family, SocketType::STREAM, None).ok()?;
        bind(&socket, &SocketAddr::new(from, 0)).ok()?;
        connect(&socket, &to).ok()?;
        Some(std::net::TcpStream::from(socket))
    });
    let stream = connecting.join().expect("connected")?;
    stream.set_nonblocking(true).expect("an option");
    Some(TcpStream::from_std(stream).expect("a stream"))
}

/// Sends a request. Returns the status and the body of the response.
async fn send_request(mut stream: TcpStream, line: &str, headers: &[&str]) -> (u16, String) {
    let headers: String = headers.iter().map(|header| format!("{header}\r\n")).collect();
    let request = format!("{line} HTTP/1.0\r\n{headers}\r\n");
    stream.write_all(request.as_bytes()).await.expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("an answer");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    let status = head.split(' ').nth(1).expect("a status");
    (status.parse().expect("a number"), body.to_owned())
}

#[tokio::test]
async fn the_user_of_the_callers_socket_decides() {
    let own = geteuid().as_raw();
    let by_default = start(Some(BTreeSet::new()), None);
    let listed = start(Some([LISTED].into()), Some([LISTED].into()));
    let open = start(None, None);
    let v6 = IpAddr::V6(Ipv6Addr::LOCALHOST);
    let mapped = IpAddr::V6(Ipv4Addr::LOCALHOST.to_ipv6_mapped());
    for (port, user, address, line, expected) in [
        (&by_default, APPLICATION, HERE, "GET /debug/log", 403),
        (&by_default, APPLICATION, v6, "GET /debug/log", 403),
        (&by_default, APPLICATION, mapped, "GET /debug/log", 403),
        (&by_default, APPLICATION, HERE, "POST /debug/logging?level=error", 403),
        (&by_default, APPLICATION, HERE, "GET /debug/config", 403),
        (&by_default, APPLICATION, HERE, "POST /drain", 200),
        (&by_default, APPLICATION, HERE, "GET /quitquitquit", 405),
        (&by_default, APPLICATION, HERE, "GET /metrics", 200),
        (&by_default, APPLICATION, HERE, "GET /healthz/ready", 200),
        (&by_default, LISTED, HERE, "GET /debug/log", 403),
        (&by_default, ROOT, HERE, "GET /debug/log", 200),
        (&by_default, ROOT, v6, "GET /debug/log", 200),
        (&by_default, ROOT, mapped, "GET /debug/log", 200),
        (&by_default, own, HERE, "GET /debug/log", 200),
        (&listed, LISTED, HERE, "GET /debug/log", 200),
        (&listed, LISTED, HERE, "POST /drain", 200),
        (&listed, own, HERE, "POST /drain", 200),
        (&listed, APPLICATION, HERE, "GET /debug/log", 403),
        (&listed, APPLICATION, HERE, "POST /drain", 403),
        (&listed, APPLICATION, HERE, "POST /quitquitquit", 403),
        (&open, APPLICATION, HERE, "GET /debug/log", 200),
    ] {
        let to = SocketAddr::new(address, port.0);
        // Not every machine has IPv6, and only root may become another user.
        let Some(stream) = connected(user, address, to) else {
            continue;
        };
        let (status, body) = send_request(stream, line, &["host: localhost"]).await;
        let case = format!("user {user} at {address}: {line}: {body}");
        assert_eq!(status, expected, "{case}");
        if status == 403 {
            let is_control = line.starts_with("POST /drain") || line.starts_with("POST /quit");
            let variable = ["ISTIO_AGENT_DEBUG_USERS", "ISTIO_AGENT_CONTROL_USERS"];
            assert!(body.contains(variable[usize::from(is_control)]), "{case}");
            assert!(body.contains(&format!("user {user}: ")), "{case}");
        }
    }
}

#[tokio::test]
async fn names_and_origins_of_pages_and_the_source_of_envoy_are_refused() {
    let own = geteuid().as_raw();
    let (port, _serving) = start(None, None);
    for (from, headers, expected) in [
        (HERE, &["host: localhost"][..], 200),
        (HERE, &["host: LocalHost:8080"], 200),
        (HERE, &["host: 127.0.0.1"], 200),
        (HERE, &["host: 10.0.0.7:15020"], 200),
        (HERE, &["host: [::1]:15020"], 200),
        (HERE, &[], 200),
        (HERE, &["host: rebound.example"], 403),
        (HERE, &["host: rebound.example:15020"], 403),
        (HERE, &["host: localhost.rebound.example"], 403),
        (HERE, &["host: 127.0.0.1.rebound.example"], 403),
        (HERE, &["host: "], 403),
        (HERE, &["host: localhost", "host: rebound.example"], 403),
        (HERE, &["host: localhost:1", "origin: http://localhost:1"], 200),
        (HERE, &["host: localhost:1", "origin: http://localhost:2"], 403),
        (HERE, &["host: localhost:1", "origin: https://localhost:1"], 403),
        (HERE, &["host: localhost:1", "origin: http://rebound.example"], 403),
        (HERE, &["host: localhost:1", "origin: null"], 403),
        (HERE, &["origin: http://localhost:1"], 403),
        (ENVOY, &["host: localhost"], 403),
    ] {
        for (line, is_guarded) in [
            ("GET /debug/log", true),
            ("POST /drain", true),
            ("GET /drain", true),
            ("GET /metrics", false),
            ("GET /healthz/ready", false),
        ] {
            let to = SocketAddr::new(HERE, port);
            let stream = connected(own, from, to).expect("a connection");
            let (status, body) = send_request(stream, line, headers).await;
            let expected = if is_guarded { expected } else { 200 };
            assert_eq!(status, expected, "{line} from {from}, {headers:?}: {body}");
        }
    }
    for line in ["GET http://rebound.example/debug/log", "GET http://localhost/debug/log"] {
        let stream = connected(own, HERE, SocketAddr::new(HERE, port)).expect("a connection");
        let (status, _) = send_request(stream, line, &["host: localhost"]).await;
        assert_eq!(status == 403, line.contains("rebound"), "{line}");
    }
}

#[tokio::test]
async fn a_connection_without_a_known_user_is_refused_and_told_the_variable() {
    let head = ::http::Request::new(()).into_parts().0;
    let variable = "ISTIO_AGENT_DEBUG_USERS";
    for (users, user, is_admitted) in [
        (Some([].into()), None, false),
        (Some([].into()), Some(65534), false),
        (Some([65534].into()), Some(65534), true),
        (None, None, true),
    ] {
        let access = Access { variable, users };
        let case = format!("{user:?} and {access:?}");
        match access.check(&Caller::of("127.0.0.1:1", user), &head).await {
            Ok(()) => assert!(is_admitted, "{case}"),
            Err(why) => {
                assert!(!is_admitted && why.to_string().contains(variable), "{case}: {why}");
            }
        }
    }
}

#[tokio::test]
async fn a_connection_that_its_process_has_closed_has_no_user() {
    let own = geteuid().as_raw();
    let listener = TcpListener::bind((HERE, 0)).await.expect("a port");
    let to = listener.local_addr().expect("an address");
    for (is_reset, is_closed) in [(false, false), (false, true), (true, true)] {
        let mut stream = connected(own, HERE, to).expect("a connection");
        let (accepted, from) = listener.accept().await.expect("a connection");
        let caller = Caller::new(&accepted, from);
        if is_reset {
            stream.set_zero_linger().expect("an option");
        } else {
            stream.shutdown().await.expect("half closed");
        }
        let _open = (!is_closed).then_some(stream);
        let user = caller.query_user().await;
        assert_eq!(user.ok(), (!is_closed).then_some(own), "{is_reset} {is_closed}");
    }
}

/// When the agent queries the kernel, another process may already use the port of a reset connection.
#[tokio::test]
async fn a_reset_connection_does_not_have_the_next_ones_user() {
    let listener = TcpListener::bind((HERE, 0)).await.expect("a port");
    let to = listener.local_addr().expect("an address");
    let own = geteuid().as_raw();
    let first = connected(own, HERE, to).expect("a connection");
    let from = first.local_addr().expect("an address");
    let (accepted, _) = listener.accept().await.expect("a connection");
    let caller = Caller::new(&accepted, from);
    first.set_zero_linger().expect("an option");
    drop(first);
    let next = socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
    bind(&next, &from).expect("the port of the first");
    connect(&next, &to).expect("connected");
    let owner = netlink::tcp_socket_owner(from, to).expect("an owner");
    assert_eq!(owner.0, own);
    assert!(caller.query_user().await.is_err());
}
