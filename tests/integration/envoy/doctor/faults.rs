//! Tests that the doctor names faults of sockets, ports, programs and endpoints.

use std::fs;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;

use http::Method;
use rustix::process::{Resource, Rlimit, Signal, kill_process, prlimit};
use serde_json::{Value, json};

use super::{checks, diagnosed, ended, envoy_says, is_ready, nack, pod, ready};
use crate::envoy::lifecycle::wait_until_agent_sees_envoy_running;
use crate::support::control_plane::ControlPlane;
use crate::support::faults::{Fault, Faults, Says};
use crate::support::http::{Backend, try_ask};
use crate::support::names::Resolver;
use crate::support::namespace;
use crate::support::pod::Pod;
use crate::support::programs::envoy_binary;
use crate::support::resources::{answering, cluster, endpoints, listener, routes};
use crate::support::{eventually, free_port};

const XDS: &str = "etc/istio/proxy/XDS";
const SDS: &str = "var/run/secrets/workload-spiffe-uds/socket";

/// Replaces a socket of the agent with a socket of this test process.
fn replaced(pod: &Pod, path: &str) -> UnixListener {
    fs::remove_file(pod.path(path)).unwrap();
    UnixListener::bind(pod.path(path)).unwrap()
}

/// Returns the part of a bootstrap that has Envoy ask this resolver.
fn bootstrap_with(resolver: SocketAddr) -> Value {
    let address = json!({ "address": resolver.ip(), "port_value": resolver.port() });
    let kind = "envoy.extensions.network.dns_resolver.cares.v3.CaresDnsResolverConfig";
    json!({ "typed_dns_resolver_config": {
        "name": "envoy.network.dns_resolver.cares",
        "typed_config": {
            "@type": format!("type.googleapis.com/{kind}"),
            "resolvers": [{ "socket_address": address }],
        },
    }})
}

#[tokio::test(flavor = "multi_thread")]
async fn each_fault_of_a_socket_or_of_envoys_process_has_its_cure() {
    if envoy_binary().is_none() {
        return;
    }
    let mut faults = Faults::default();
    faults.add("XDS of another process", async {
        let (pod, control_plane) = ready(&[]).await;
        let other = replaced(&pod, XDS);
        let own = format!("process {}", std::process::id());
        Fault::new(
            pod,
            ("SOCKET_TAKEN", &["XDS socket", XDS, &own], &["end it", "restart this container"]),
        )
        .with((control_plane, other))
    });
    faults.add("a stale SDS", async {
        let (pod, control_plane) = ready(&[]).await;
        drop(replaced(&pod, SDS));
        let says: Says =
            ("SOCKET_TAKEN", &["SDS socket", SDS, "stale"], &["restart this container"]);
        Fault::new(pod, says).with(control_plane)
    });
    faults.add("no SDS of another process that is waited for", async {
        let external = ("ISTIO_AGENT_EXTERNAL_SDS", "wait");
        let (pod, control_plane) = ready(&[external]).await;
        let says: Says = (
            "SOCKET_NOT_SERVED",
            &["SDS socket", SDS, "there is none"],
            &["SPIRE", "unset `ISTIO_AGENT_EXTERNAL_SDS`"],
        );
        Fault::new(pod, says).with(control_plane)
    });
    faults.add("no SDS of another process", async {
        let external = ("WORKLOAD_IDENTITY_SOCKET_FILE", "spire");
        let (mut pod, control_plane) = pod(&[], &[external]).await;
        ended(&mut pod, None).await;
        let says: Says = (
            "SOCKET_NOT_SERVED",
            &["SDS socket", "workload-spiffe-uds/spire", "there is none"],
            &["SPIRE", "`WORKLOAD_IDENTITY_SOCKET_FILE`"],
        );
        Fault::new(pod, says).with(control_plane)
    });
    faults.add("a directory as XDS", async {
        let (mut pod, control_plane) = ready(&[]).await;
        ended(&mut pod, Some(Signal::TERM)).await;
        fs::create_dir(pod.path(XDS)).unwrap();
        let says: Says = ("SOCKET_DIRECTORY", &["XDS socket", XDS, "a directory"], &["remove it"]);
        Fault::new(pod, says).with(control_plane)
    });
    const CRASH: Says = (
        "ENVOY_CRASHED",
        &["Envoy exited", "signal 11", "Caught Segmentation fault"],
        &["kubectl logs", "--previous"],
    );
    faults.add("a crashed Envoy", async {
        let (mut pod, control_plane) = ready(&[("ISTIO_AGENT_ENVOY_RESTARTS", "0")]).await;
        kill_process(pod.envoy_pid().unwrap(), Signal::SEGV).unwrap();
        ended(&mut pod, None).await;
        Fault::new(pod, CRASH).with(control_plane)
    });
    faults.add("an Envoy without room for open files", async {
        let (pod, control_plane) = ready(&[]).await;
        wait_until_agent_sees_envoy_running(&pod).await;
        let envoy = pod.envoy_pid().unwrap();
        let open = fs::read_dir(format!("/proc/{}/fd", envoy.as_raw_nonzero())).unwrap().count();
        let limit = Rlimit { current: Some(open as u64), maximum: Some(open as u64) };
        prlimit(Some(envoy), Resource::Nofile, limit).unwrap();
        let says: Says = ("FILES_USED_UP", &["open files of Envoy"], &["ulimit -n"]);
        Fault::new(pod, says).with(control_plane)
    });
    faults.add("an Envoy that has crashed and was restarted", async {
        let (pod, control_plane) = ready(&[]).await;
        wait_until_agent_sees_envoy_running(&pod).await;
        let first = pod.envoy_pid();
        kill_process(first.unwrap(), Signal::SEGV).unwrap();
        let next = async || pod.envoy_pid().filter(|next| Some(*next) != first);
        eventually("another Envoy", next).await;
        is_ready(&pod).await;
        Fault::new(pod, CRASH).with(control_plane).warns()
    });
    for (name, request, state) in [
        ("closed listeners", "/drain_listeners", "LIVE"),
        ("a failed health check", "/healthcheck/fail", "DRAINING"),
    ] {
        faults.add(name, async move {
            let (pod, control_plane) = ready(&[]).await;
            wait_until_agent_sees_envoy_running(&pod).await;
            pod.envoy.request(Method::POST, request).await.unwrap();
            envoy_says(&pod, "/server_info", state).await;
            let cure = &["POST healthcheck/ok", "restart of the container"];
            let says: Says = ("ENVOY_STOPPING", &[request, "not by the agent"], cure);
            Fault::new(pod, says).with(control_plane)
        });
    }
    faults.add("an Envoy that another process ends", async {
        let (mut pod, control_plane) = ready(&[]).await;
        wait_until_agent_sees_envoy_running(&pod).await;
        kill_process(pod.envoy_pid().unwrap(), Signal::TERM).unwrap();
        ended(&mut pod, None).await;
        let says: Says =
            ("ENVOY_EXITED", &["Envoy: exit status 0 after"], &["`/quitquitquit`", "SIGTERM"]);
        Fault::new(pod, says).with(control_plane)
    });
    faults.add("an Envoy that hangs", async {
        let (pod, control_plane) = ready(&[]).await;
        kill_process(pod.envoy_pid().unwrap(), Signal::STOP).unwrap();
        let says: Says = (
            "ENVOY_HANGS",
            &["admin port", "no answer from 127.0.0.1:"],
            &["restart the container"],
        );
        Fault::new(pod, says).with(control_plane)
    });
    faults.assert_all_reported().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_part_of_the_bootstrap_without_effect_is_named_with_its_cure() {
    if envoy_binary().is_none() {
        return;
    }
    let mut faults = Faults::default();
    faults.add("a bootstrap that Envoy refuses", async {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        std::io::Write::write_all(&mut file, br#"{"stats_flush_interval": "soon"}"#).unwrap();
        let path = file.path().to_str().unwrap().to_owned();
        let (mut pod, control_plane) = pod(&[], &[("ISTIO_BOOTSTRAP_OVERRIDE", &path)]).await;
        ended(&mut pod, None).await;
        let says: Says = (
            "ENVOY_BOOTSTRAP_REFUSED",
            &["Envoy exited", "stats_flush_interval"],
            &["ISTIO_BOOTSTRAP_OVERRIDE"],
        );
        Fault::new(pod, says).with((control_plane, file))
    });
    faults.add("a bootstrap override with a member that Envoy does not know", async {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        std::io::Write::write_all(&mut file, br#"{"stats_flush_intervall": "1s"}"#).unwrap();
        let path = file.path().to_str().unwrap().to_owned();
        let (pod, control_plane) = ready(&[("ISTIO_BOOTSTRAP_OVERRIDE", &path)]).await;
        assert!(pod.agent.log().contains("stats_flush_intervall"), "{}", pod.agent.log());
        let says: Says = (
            "BOOTSTRAP_MEMBER_IGNORED",
            &["bootstrap", "unknown members: 1"],
            &["Envoy's log names", "ISTIO_BOOTSTRAP_OVERRIDE"],
        );
        Fault::new(pod, says).with((control_plane, file)).warns()
    });
    faults.add("a tracing host without an address", async {
        let resolver = ([127, 0, 0, 1], free_port()).into();
        let mut file = tempfile::NamedTempFile::new().unwrap();
        std::io::Write::write_all(&mut file, bootstrap_with(resolver).to_string().as_bytes())
            .unwrap();
        let resolver = Resolver::start(resolver);
        let tracing = json!({ "tracing": { "zipkin": { "address": "zipkin.missing:9411" } } });
        let environment = [
            ("PROXY_CONFIG", &*tracing.to_string()),
            ("ISTIO_BOOTSTRAP_OVERRIDE", file.path().to_str().unwrap()),
        ];
        let (pod, control_plane) = ready(&environment).await;
        assert!(resolver.asked("zipkin.missing.") > 0);
        let says: Says = ("BOOTSTRAP_HOST_UNRESOLVED", &["zipkin"], &["`tracing`"]);
        Fault::new(pod, says).with((control_plane, resolver, file)).warns()
    });
    for (name, path, why) in [
        ("no bootstrap override", "etc/missing.json", "No such file"),
        (
            "a bootstrap override of another format",
            "agent.log",
            "(ISTIO_BOOTSTRAP_OVERRIDE): line ",
        ),
    ] {
        faults.add(name, async move {
            let (pod, control_plane) = ready(&[("ISTIO_BOOTSTRAP_OVERRIDE", path)]).await;
            let says: Says = (
                "BOOTSTRAP_OVERRIDE_UNREADABLE",
                &[path, "(ISTIO_BOOTSTRAP_OVERRIDE): ", why],
                &["mount the file", "correct its path or its content"],
            );
            Fault::new(pod, says).with(control_plane).warns()
        });
    }
    faults.assert_all_reported().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_program_that_is_not_an_envoy_is_named_with_its_cure() {
    let place = tempfile::tempdir().unwrap();
    let own = fs::read(env!("CARGO_BIN_EXE_pilot-agent")).unwrap();
    let foreign = [&own[..18], &[42, 0], &own[20..64]].concat();
    let mut faults = Faults::default();
    for (name, content, mode, code, cure) in [
        ("no Envoy", None, 0, "ENVOY_MISSING", "`binaryPath`"),
        ("an Envoy without mode", Some(&b""[..]), 0o644, "ENVOY_NOT_EXECUTABLE", "chmod 755"),
        (
            "an Envoy for another machine",
            Some(&foreign),
            0o755,
            "ENVOY_WRONG_ARCHITECTURE",
            "uname -m",
        ),
    ] {
        let program = place.path().join(code);
        if let Some(content) = content {
            fs::write(&program, content).unwrap();
            fs::set_permissions(&program, fs::Permissions::from_mode(mode)).unwrap();
        }
        faults.add(name, async move {
            let control_plane = ControlPlane::of(&[]).await;
            let settings = super::Settings { envoy: Some(&program), environment: &[] };
            let mut pod = Pod::start(settings, &control_plane);
            assert_eq!(pod.agent.end().await.code(), Some(255));
            let log = pod.agent.log();
            let mut lines = log.lines();
            let error = lines.find(|line| line.starts_with("Error: ")).unwrap();
            assert!(error.contains(&format!("[{code}]")), "{error}");
            Fault::new(pod, (code, &[program.to_str().unwrap()], &[cure])).with(control_plane)
        });
    }
    faults.assert_all_reported().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_taken_port_is_named_with_its_process_and_a_cure() {
    if envoy_binary().is_none() {
        return;
    }
    // The pid is not checked: a child that another test has just forked also holds the socket, until it
    // executes its program.
    const HOLDER: &str = "process ";
    const CURE: &[&str] = &["end that process", "15000 to 15090"];
    let mut faults = Faults::default();
    faults.add("a port of a listener, such as 15006", async {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let (pod, control_plane) = ready(&[]).await;
        control_plane.set(&[answering("inbound", port)]).await;
        nack(&pod).await;
        let port = format!("port {port}");
        Fault::new(pod, ("PORT_TAKEN", &[&port, HOLDER, "inbound"], CURE))
            .with((control_plane, taken))
    });
    faults.add("the port of Envoy's readiness, 15021", async {
        let taken = TcpListener::bind("0.0.0.0:0").unwrap();
        let port = taken.local_addr().unwrap().port().to_string();
        let (mut pod, control_plane) = pod(&[], &[("ENVOY_STATUS_PORT", &port)]).await;
        ended(&mut pod, None).await;
        let log = pod.agent.log();
        let error = log.lines().find(|line| line.contains("[PORT_TAKEN]"));
        let error = error.unwrap_or_else(|| panic!("{log}"));
        for words in ["Envoy exited with error: ", &port, HOLDER] {
            assert!(error.contains(words), "{words}: {error}");
        }
        Fault::new(pod, ("PORT_TAKEN", &[&port, HOLDER], CURE)).with((control_plane, taken))
    });
    faults.add("the port of DNS, 15053", async {
        let taken = UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = taken.local_addr().unwrap();
        let dns = [("ISTIO_META_DNS_CAPTURE", "true"), ("DNS_PROXY_ADDR", &address.to_string())];
        let (mut pod, control_plane) = pod(&[], &dns).await;
        ended(&mut pod, None).await;
        let port = format!("port {}", address.port());
        let says = ("DNS_PORT_TAKEN", &[&*port, "in use"][..], &["`DNS_PROXY_ADDR`"][..]);
        Fault::new(pod, says).with((control_plane, taken))
    });
    faults.add("the status port, 15020", async {
        let (mut pod, control_plane) = ready(&[]).await;
        ended(&mut pod, Some(Signal::TERM)).await;
        let taken = TcpListener::bind(("127.0.0.1", pod.status_port)).unwrap();
        let taken = Backend::naming_clients(taken);
        let port = format!("port {}", pod.status_port);
        let says =
            ("STATUS_PORT_TAKEN", &[&*port, HOLDER][..], &["end the process", "`statusPort`"][..]);
        Fault::new(pod, says).with((control_plane, taken))
    });
    faults.add("the admin port, 15000", async {
        let other = Backend::start().await;
        let admin = json!({ "proxyAdminPort": other.port }).to_string();
        let (mut pod, control_plane) = pod(&[], &[("PROXY_CONFIG", &admin)]).await;
        ended(&mut pod, None).await;
        let port = other.port.to_string();
        let why = format!("cannot bind '127.0.0.1:{port}': Address already in use");
        let log = pod.agent.log();
        let mut errors = log.lines().filter(|line| line.contains("Envoy exited with error: "));
        assert!(errors.all(|line| line.contains(&why)) && log.contains(&why), "{log}");
        Fault::new(pod, ("PORT_TAKEN", &[&port, HOLDER], CURE)).with((control_plane, other))
    });
    faults.assert_all_reported().await;
}

/// Returns a cluster with one endpoint, at this port of the pod.
fn static_cluster(name: &str, port: u16, health: &str) -> Value {
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

/// Starts a pod, waits until it is ready, and sends a request to this cluster through its Envoy.
pub(super) async fn pod_after_request(
    mut resources: Vec<Value>,
    name: &str,
) -> (Pod, ControlPlane) {
    let port = free_port();
    resources.extend([listener("plain", port, "all"), routes("all", name, "x")]);
    let (pod, control_plane) = pod(&resources, &[]).await;
    is_ready(&pod).await;
    eventually("an answer", async || try_ask(port, "GET /", "").await).await;
    (pod, control_plane)
}

#[tokio::test(flavor = "multi_thread")]
async fn each_fault_of_an_endpoint_is_named_with_its_cure() {
    if envoy_binary().is_none() {
        return;
    }
    const INBOUND: &str = "inbound|8080||";
    const OUTBOUND: &str = "outbound|80||cart.shop";
    let mut faults = Faults::default();
    for (name, of, code, cure) in [
        ("a closed port of the application", INBOUND, "APPLICATION_PORT_CLOSED", "targetPort"),
        ("an upstream that cannot be reached", OUTBOUND, "UPSTREAM_UNREACHABLE", "NetworkPolicy"),
    ] {
        faults.add(name, async move {
            let closed = free_port();
            let (pod, control_plane) =
                pod_after_request(vec![static_cluster(of, closed, "HEALTHY")], of).await;
            let at = format!("127.0.0.1:{closed}");
            let fault = Fault::new(pod, (code, &[of, &at, "refused"], &[cure])).with(control_plane);
            if of == INBOUND { fault } else { fault.warns() }
        });
    }
    faults.add("a closed port of a probe", async {
        let port = free_port();
        let probers = json!({ "/app-health/cart/readyz": { "tcpSocket": { "port": port } } });
        let (pod, control_plane) = ready(&[("ISTIO_KUBE_APP_PROBERS", &probers.to_string())]).await;
        let address = format!("127.0.0.1:{port}");
        let says = (
            "PROBE_PORT_CLOSED",
            &["/app-health/cart/readyz", &*address][..],
            &["let the application listen", "ISTIO_KUBE_APP_PROBERS"][..],
        );
        Fault::new(pod, says).with(control_plane)
    });
    faults.add("a probe that was not injected", async {
        let (pod, control_plane) = ready(&[]).await;
        for _ in 0..3 {
            assert_eq!(pod.status(Method::GET, "/app-health/cart/livez").await, None);
        }
        let says: Says = (
            "PROBE_UNKNOWN",
            &["Prober does not exists url /app-health/cart/livez", "3 times"],
            &["inject the pod again"],
        );
        Fault::new(pod, says).with(control_plane)
    });
    let mut empty = cluster(OUTBOUND);
    empty["eds_cluster_config"]["service_name"] = json!(OUTBOUND);
    let none = vec![empty, endpoints(OUTBOUND, &[])];
    // Envoy sends requests to this endpoint, because all endpoints of the cluster are unhealthy.
    let application = Backend::start().await;
    let unhealthy = vec![static_cluster(OUTBOUND, application.port, "UNHEALTHY")];
    for (name, resources) in [("no healthy upstream", unhealthy), ("no upstream", none)] {
        faults.add(name, async {
            let (pod, control_plane) = pod_after_request(resources, OUTBOUND).await;
            let says: Says =
                ("NO_HEALTHY_ENDPOINT", &["cart.shop"], &["kubectl get endpointslices"]);
            Fault::new(pod, says).with(control_plane).noted()
        });
    }
    faults.assert_all_reported().await;
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
        let line = log.lines().rfind(|line| line.contains("Envoy proxy is NOT ready: "))?;
        line.contains("[LISTENER_WARMING]").then(|| line.to_owned())
    };
    let line = eventually("the cause in the log", log).await;
    assert!(line.contains("plain waits for"), "{line}");
    assert!(line.ends_with("see `pilot-agent doctor`"), "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn each_exhausted_limit_of_the_container_is_named_with_its_cure() {
    const TEST: &str =
        "doctor::faults::each_exhausted_limit_of_the_container_is_named_with_its_cure";
    if envoy_binary().is_none() || !namespace::is_inside(TEST) {
        return;
    }
    let groups = Path::new("/sys/fs/cgroup");
    namespace::run("mount", &["-t", "tmpfs", "tmpfs", "/sys/fs/cgroup"]);
    for group in ["memory", "pids"] {
        fs::create_dir(groups.join(group)).unwrap();
    }
    // The names of version 2 at the top, and those of version 1 below.
    for (file, content) in [
        ("memory.stat", "inactive_file 1048576\n"),
        ("memory.max", "104857600\n"),
        ("memory.current", "104857600\n"),
        ("pids.max", "40\n"),
        ("pids.current", "40\n"),
        ("memory/memory.stat", "total_inactive_file 1048576\n"),
        ("memory/memory.limit_in_bytes", "104857600\n"),
        ("memory/memory.usage_in_bytes", "104857600\n"),
        ("pids/pids.max", "40\n"),
        ("pids/pids.current", "40\n"),
    ] {
        fs::write(groups.join(file), content).unwrap();
    }
    let (pod, _control_plane) = ready(&[]).await;
    let (report, _) = diagnosed(&pod).await;
    for (code, level, found, remedy) in [
        ("MEMORY_USED_UP", "warning", "99 of 100 are in use", "memory limit of the container"),
        ("TASKS_USED_UP", "error", "40 of 40 are in use", "podPidsLimit"),
    ] {
        let checks = checks(&report);
        let check = checks.iter().find(|(_, check)| check["code"] == code);
        let (_, check) = check.unwrap_or_else(|| panic!("{code}: {report:#}"));
        assert_eq!((&check["level"], &check["found"]), (&json!(level), &json!(found)));
        assert!(check["remedy"].as_str().unwrap().contains(remedy), "{check}");
    }
}
