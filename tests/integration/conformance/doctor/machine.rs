//! Tests `pilot-agent doctor` with faults of the machine: of DNS and of directories, and with peers that hang.

use std::net::Ipv4Addr;

use local_istiod::LocalIstiod;
use rustix::process::Signal;
use serde_json::json;
use tokio::net::{TcpListener, TcpSocket, TcpStream, UdpSocket};
use tokio::task::JoinSet;

use crate::conformance::doctor::{checks, diagnosed};
use crate::support::faults::{Fault, Faults, Says};
use crate::support::http::ask;
use crate::support::place::{FAKE_ENVOY, Place};
use crate::support::{answering_istiod, free_port, options, until};

/// Returns a place whose agent answers DNS at `address`, and forwards queries to these upstream resolvers.
fn with_dns(istiod: &LocalIstiod, address: &str, resolvers: &[String]) -> Place {
    let place = Place::of(istiod)
        .set("ISTIO_META_DNS_CAPTURE", "true")
        .set("DNS_PROXY_ADDR", address)
        .set("ISTIO_AGENT_RESOLV_CONF", "resolv.conf");
    let lines = resolvers.iter().map(|at| format!("nameserver {at}\n"));
    let lines: String = lines.collect();
    place.write("resolv.conf", format!("search default.svc.cluster.local\n{lines}"));
    place
}

/// Starts a resolver that answers every query with NXDOMAIN, or no query. Returns its address in the notation of
/// `resolv.conf`.
async fn resolver(is_silent: bool) -> (String, JoinSet<()>) {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = socket.local_addr().unwrap().port();
    let mut serving = JoinSet::new();
    serving.spawn(async move {
        let mut message = [0; 512];
        loop {
            let (length, from) = socket.recv_from(&mut message).await.unwrap();
            message[2] |= 0x80;
            message[3] |= 3;
            if !is_silent {
                socket.send_to(&message[..length], from).await.unwrap();
            }
        }
    });
    (format!("[127.0.0.1]:{port}"), serving)
}

#[tokio::test(flavor = "multi_thread")]
async fn each_fault_of_dns_is_named_with_its_cure() {
    let mut faults = Faults::default();
    faults.add("a resolver that is the agent", async {
        let istiod = answering_istiod().await;
        let port = free_port();
        let own = [format!("[127.0.0.1]:{port}")];
        let place = with_dns(&istiod, &format!("127.0.0.1:{port}"), &own);
        let says: Says = (
            "DNS_RESOLVER_MISSING",
            &["resolv.conf", "no resolver other than this agent"],
            &["dnsConfig.nameservers", "ISTIO_AGENT_RESOLV_CONF"],
        );
        Fault::new(place, says).with(istiod)
    });
    faults.add("no resolver", async {
        let istiod = answering_istiod().await;
        let place = with_dns(&istiod, "127.0.0.1:15053", &[]);
        let says: Says = (
            "DNS_RESOLVER_MISSING",
            &["resolv.conf", "names no resolver"],
            &["dnsConfig.nameservers"],
        );
        Fault::new(place, says).with(istiod)
    });
    faults.add("resolvers that do not answer", async {
        let istiod = answering_istiod().await;
        let (at, silent) = resolver(true).await;
        let other = UdpSocket::bind("127.0.0.1:0").await.unwrap().local_addr();
        let closed = format!("[127.0.0.1]:{}", other.unwrap().port());
        let place = with_dns(&istiod, "127.0.0.1:15053", &[at.clone(), closed]);
        let at = at.replace(['[', ']'], "");
        let says: Says = (
            "DNS_RESOLVER_SILENT",
            &["resolver", &at, "no answer"],
            &["check that DNS server", "network policies"],
        );
        Fault::new(place, says).with((istiod, silent))
    });
    faults.add("a resolver of applications that does not answer", async {
        let istiod = answering_istiod().await;
        let (at, silent) = resolver(true).await;
        let place = Place::of(&istiod);
        place.write("resolv.conf", format!("nameserver {at}\n"));
        let at = format!("resolver {}", at.replace(['[', ']'], ""));
        let says: Says =
            ("DNS_RESOLVER_SILENT", &[&at, "no answer within 1.5 s"], &["network policies"]);
        Fault::new(place, says).with((istiod, silent))
    });
    faults.add("a resolver with a closed port", async {
        let istiod = answering_istiod().await;
        let place = Place::of(&istiod);
        let at = format!("127.0.0.1:{}", free_port());
        place.write(
            "resolv.conf",
            format!("nameserver {}\n", at.replace("127.0.0.1", "[127.0.0.1]")),
        );
        let says: Says =
            ("DNS_RESOLVER_UNREACHABLE", &["resolver", &at], &["dnsConfig.nameservers"]);
        Fault::new(place, says).with(istiod)
    });
    faults.add("a name table that does not arrive", async {
        let istiod = answering_istiod().await;
        let (at, resolver) = resolver(false).await;
        let place = with_dns(&istiod, &format!("127.0.0.1:{}", free_port()), &[at]);
        let agent = place.start().await;
        let says: Says =
            ("DNS_NAME_TABLE_MISSING", &["name table", "not received"], &["istioctl proxy-status"]);
        Fault::new(place, says).with((agent, istiod, resolver))
    });
    faults.assert_all_reported().await;
}

/// Returns a place whose programs run in new namespaces that a script prepares.
async fn in_namespace(kinds: &[&str], script: &str) -> (Place, LocalIstiod) {
    let istiod = answering_istiod().await;
    let script = format!("{script}; exec \"$@\"");
    let command = [&["unshare"], kinds, &["sh", "-ec", &script, "-"]].concat();
    (Place::of(&istiod).started_by(&command), istiod)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_virtual_address_of_the_loopback_interface_is_not_the_nodes() {
    if std::env::var_os("NETNS_TESTS").is_none() {
        return eprintln!("A network of its own takes root: run under NETNS_TESTS only.");
    }
    let script = "ip link set lo up; ip address add 10.7.7.7/32 dev lo";
    let (place, _istiod) = in_namespace(&["--net"], script).await;
    let (report, _) = diagnosed(&place.set("INSTANCE_IP", ""));
    let node = report["node"].as_str().unwrap();
    assert!(node.starts_with("sidecar~127.0.0.1~"), "{node}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_doctor_names_used_up_local_ports_instead_of_a_missing_agent() {
    if std::env::var_os("NETNS_TESTS").is_none() {
        return eprintln!("A network of its own takes root: run under NETNS_TESTS only.");
    }
    // The only port is that of a connection.
    let script = r#"ip link set lo up; echo 40001 40001 >/proc/sys/net/ipv4/ip_local_port_range
        python3 -c 'if True:
            import socket, time
            server, client = socket.socket(), socket.socket()
            server.bind(("127.0.0.1", 39999)); server.listen()
            client.bind(("127.0.0.1", 40001)); client.connect(("127.0.0.1", 39999))
            time.sleep(10)' >/dev/null 2>&1 &
        until grep -q 9C41 /proc/net/tcp; do sleep 0.05; done"#;
    let mut faults = Faults::default();
    faults.add("no local port", async move {
        let (place, istiod) = in_namespace(&["--net"], script).await;
        let says: Says = (
            "PORTS_USED_UP",
            &["local ports of the pod", "1 of 1 are in use"],
            &["reuse connections", "ip_local_port_range"],
        );
        Fault::new(place, says).with(istiod)
    });
    faults.assert_all_reported().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_directory_that_cannot_be_written_is_named_with_its_cure() {
    if std::env::var_os("NETNS_TESTS").is_none() {
        return eprintln!("A file system of its own takes root: run under NETNS_TESTS only.");
    }
    const MOUNT: &str = "mkdir -p etc/istio/proxy; mount -t tmpfs tmpfs etc/istio/proxy -o";
    // User 1337 may have no access to the directory of the build, so the script mounts the program here.
    const FORBIDDEN: &str = "touch agent; mount --bind \"$1\" agent; shift; chmod 755 .; \
        mkdir -p etc/istio/proxy; exec setpriv --reuid 1337 --regid 1337 --clear-groups ./agent \"$@\"; #";
    let rows: [(_, _, Says); 3] = [
        (
            "a read-only directory",
            format!("{MOUNT} ro"),
            (
                "DIRECTORY_READ_ONLY",
                &["etc/istio/proxy", "cannot write"],
                &["mount a writable volume", "emptyDir"],
            ),
        ),
        (
            "a full disk",
            format!("{MOUNT} size=4k; head -c 9k /dev/zero >etc/istio/proxy/full || true"),
            ("DISK_FULL", &["etc/istio/proxy", "cannot write"], &["free space", "sizeLimit"]),
        ),
        (
            "a directory of root",
            FORBIDDEN.to_owned(),
            (
                "DIRECTORY_FORBIDDEN",
                &["etc/istio/proxy", "belongs to user 0", "runs as user 1337"],
                &["fsGroup", "chown"],
            ),
        ),
    ];
    let mut faults = Faults::default();
    for (name, script, says) in rows {
        faults.add(name, async move {
            let (place, istiod) = in_namespace(&["--mount"], &script).await;
            let place = place.set("DISABLE_ENVOY", "false").proxy("binaryPath", json!("/bin/true"));
            Fault::new(place, says).with(istiod)
        });
    }
    faults.add("kept configuration in a read-only directory", async {
        let script = "mkdir -p kept; mount -t tmpfs tmpfs kept -o ro";
        let (place, istiod) = in_namespace(&["--mount"], script).await;
        let place = place.set("ISTIO_AGENT_KEEP_CONFIG", "kept");
        let agent = place.start().await;
        agent.logs("generated new workload certificate").await;
        let says: Says = (
            "KEPT_CONFIG_UNWRITABLE",
            &["ISTIO_AGENT_KEEP_CONFIG=kept", "Read-only file system"],
            &["mount a directory"],
        );
        Fault::new(place, says).with((agent, istiod))
    });
    faults.assert_all_reported().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_report_takes_less_than_three_seconds_when_everything_hangs() {
    let istiod = answering_istiod().await;
    // A listener with a backlog of 0 that accepts nothing is full after one connection; the kernel drops further
    // SYN packets.
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(options().listen).unwrap();
    let black_hole = socket.listen(0).unwrap();
    let address = black_hole.local_addr().unwrap();
    let _first = TcpStream::connect(address).await.unwrap();
    let admin = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let admin_port = admin.local_addr().unwrap().port();
    let (one, _one) = resolver(true).await;
    let (other, _other) = resolver(true).await;
    let dns = format!("127.0.0.1:{}", free_port());
    let targets = json!({ "scrape": "true", "port": admin_port.to_string() });
    let place = with_dns(&istiod, &dns, &[one, other])
        .set("DISABLE_ENVOY", "false")
        .set("ISTIO_PROMETHEUS_ANNOTATIONS", &targets.to_string())
        .proxy("binaryPath", json!(FAKE_ENVOY))
        .proxy("proxyAdminPort", json!(admin_port))
        .proxy("discoveryAddress", json!(address.to_string()));
    let agent = place.start().await;
    // The agent makes both of these reports, and each takes less than 3 s, although the checks hang.
    for _ in 0..2 {
        let (report, code) = diagnosed(&place);
        assert_eq!(code, 2, "{report:#}");
        let checks = checks(&report);
        let says = |words: &str| checks.iter().any(|check| check.to_string().contains(words));
        assert!(says("timed out after"), "{report:#}");
        assert!(says("no answer within 1.5 s"), "{report:#}");
    }
    assert!(agent.threads() < 32, "{}", agent.threads());
    // A stopped agent does not respond on its port, so the command makes the report itself.
    agent.signal(Signal::STOP);
    let (report, code) = diagnosed(&place);
    assert_eq!(code, 2, "{report:#}");
    agent.signal(Signal::CONT);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_reports_leave_neither_memory_nor_threads_behind() {
    let istiod = answering_istiod().await;
    let (at, _resolver) = resolver(false).await;
    let place = with_dns(&istiod, &format!("127.0.0.1:{}", free_port()), &[at]);
    let agent = place.start().await;
    agent.logs("generated new workload certificate").await;
    let reports = async |count| {
        for _ in 0..count {
            let answer = ask(place.status_port(), "GET /debug/doctor").await;
            assert_eq!(answer.status, 200, "{}", answer.body);
        }
    };
    reports(20).await;
    let (memory, threads, files) = (agent.memory("VmRSS"), agent.threads(), agent.open_files());
    reports(100).await;
    let grown = agent.memory("VmRSS").saturating_sub(memory);
    assert!(grown < 2 << 10, "{grown} KiB more");
    // Threads for file operations end after ten idle seconds.
    until("the end of threads and files of reports", || {
        agent.threads() <= threads + 2 && agent.open_files() <= files + 2
    })
    .await;
}
