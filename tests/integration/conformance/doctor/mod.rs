//! Tests `pilot-agent doctor` in set-ups with one fault each, with and without a running agent.

mod certificates;
mod machine;

use std::future::pending;
use std::net::{Ipv4Addr, SocketAddr};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use local_istiod::{Claims, Keys, LocalIstiod, Options};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::ServerConfig;
use rustls::pki_types::PrivateKeyDer;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::{JoinSet, block_in_place};
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;
use tonic::Status;

use crate::support::faults::{Fault, Faults, Says};
use crate::support::place::{Place, ROOT, TOKEN, token};
use crate::support::{
    accepted, answering_istiod, ask_for_clusters, local_istiod, options, refusing, relays, until,
};

/// Returns the report of `pilot-agent doctor --json` and its exit code. Asserts that the command takes less than
/// 10 s, also on a busy machine.
pub fn diagnosed(place: &Place) -> (Value, i32) {
    let began = Instant::now();
    let output = block_in_place(|| place.run(&["doctor", "--json"]));
    let took = began.elapsed();
    let errors = String::from_utf8_lossy(&output.stderr);
    let report = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{errors}"));
    assert!(took < Duration::from_secs(10), "{took:?}: {report:#}");
    (report, output.status.code().unwrap_or(-1))
}

/// Returns the checks of all groups in order.
pub fn checks(report: &Value) -> Vec<&Value> {
    let groups = report["groups"].as_array().into_iter().flatten();
    let checks = groups.flat_map(|group| group["checks"].as_array().into_iter().flatten());
    checks.collect()
}

/// Makes a set-up whose files `spoil` has changed.
async fn files(spoil: impl FnOnce(&LocalIstiod, &Place), says: Says<'_>) -> Fault {
    let istiod = answering_istiod().await;
    let place = Place::of(&istiod);
    spoil(&istiod, &place);
    Fault::new(place, says).with(istiod)
}

/// Makes a set-up in which another server has the address of istiod, and serves connections with `talk`.
async fn with_other_server<F: Future<Output = ()> + Send + 'static>(
    talk: impl Fn(TcpStream) -> F + Send + 'static,
    says: Says<'_>,
) -> Fault {
    let istiod = local_istiod().await;
    let place = Place::of(&istiod);
    let address = istiod.kill().await.listen;
    Fault::new(place, says).with(listen(address, talk).await)
}

/// Makes a set-up whose istiod denies the agent its streams.
async fn denied(change: impl FnOnce(Place) -> Place, says: Says<'_>) -> Fault {
    let istiod = local_istiod().await;
    let place = change(Place::of(&istiod));
    let status = Status::permission_denied("no identities matched");
    Fault::new(place, says).with(refusing(istiod, status))
}

/// Serves connections with `talk` until the returned tasks are dropped.
async fn listen<F: Future<Output = ()> + Send + 'static>(
    address: SocketAddr,
    talk: impl Fn(TcpStream) -> F + Send + 'static,
) -> JoinSet<()> {
    // A child process that was just forked may hold the former listener until it calls `exec`.
    let mut listener = None;
    until("a free port", || {
        listener = std::net::TcpListener::bind(address).ok();
        listener.is_some()
    })
    .await;
    let listener = listener.unwrap();
    listener.set_nonblocking(true).unwrap();
    let listener = TcpListener::from_std(listener).unwrap();
    let mut serving = JoinSet::new();
    serving.spawn(async move {
        let mut open = JoinSet::new();
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            open.spawn(talk(stream));
        }
    });
    serving
}

/// Keeps the connection open without a response.
async fn silent(stream: TcpStream) {
    let _stream = stream;
    pending().await
}

/// Sends `answer` after the first bytes, whatever they are, and keeps the connection open.
async fn answer(mut stream: TcpStream, answer: &'static str) {
    let mut heard = [0; 1024];
    if stream.read(&mut heard).await.is_ok() {
        stream.write_all(answer.as_bytes()).await.unwrap();
    }
    pending().await
}

/// Answers each HTTP/2 request with a page.
async fn answer_over_http2(stream: TcpStream, status: u16, page: &'static str) {
    let service = service_fn(move |_| async move {
        let answer = http::Response::builder().status(status).header("content-type", "text/html");
        answer.body(http_body_util::Full::new(Bytes::from_static(page.as_bytes())))
    });
    let server = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
    // The agent closes its connections.
    let _ = server.serve_connection(TokioIo::new(stream), service).await;
}

/// Makes a set-up in which istiod's address presents this certificate, signed by a trusted root.
async fn certificate(change: impl FnOnce(&mut CertificateParams), says: Says<'_>) -> Fault {
    let istiod = local_istiod().await;
    let place = Place::of(&istiod);
    let address = istiod.kill().await.listen;
    let mut params = CertificateParams::new([address.ip().to_string()]).unwrap();
    change(&mut params);
    let key = KeyPair::generate().unwrap();
    let mut of_root = CertificateParams::default();
    of_root.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let root = CertifiedIssuer::self_signed(of_root, KeyPair::generate().unwrap()).unwrap();
    let leaf = params.signed_by(&key, &root).unwrap();
    place.write(ROOT, root.pem());
    let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![leaf.der().clone()], key)
        .unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let talk = move |stream| {
        let accept = acceptor.accept(stream);
        async move {
            let _stream = accept.await; // The client may refuse the certificate.
            pending().await
        }
    };
    Fault::new(place, says).with(listen(address, talk).await)
}

#[tokio::test(flavor = "multi_thread")]
async fn each_fault_of_settings_and_files_is_named_with_its_cure() {
    let mut faults = Faults::default();
    faults.add(
        "no agent",
        files(
            |_, _| {},
            ("AGENT_NOT_RUNNING", &["no agent answers on port", "refused"], &["start the agent"]),
        ),
    );
    faults.add("an agent that hangs", async {
        let istiod = answering_istiod().await;
        let place = Place::of(&istiod);
        let port = (Ipv4Addr::LOCALHOST, place.status_port());
        let hangs = listen(port.into(), silent).await;
        let says = ("AGENT_SILENT", &["agent", "no answer"][..], &["restart the container"][..]);
        Fault::new(place, says).with((istiod, hangs))
    });
    faults.add("another program in place of the agent", async {
        let istiod = answering_istiod().await;
        let place = Place::of(&istiod);
        let port = (Ipv4Addr::LOCALHOST, place.status_port());
        let http = |stream| answer(stream, "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n");
        let other = listen(port.into(), http).await;
        let port = format!("port {}", place.status_port());
        let says = ("AGENT_UNKNOWN", &[&*port, "404 Not Found"][..], &["the other process"][..]);
        Fault::new(place, says).with((istiod, other))
    });
    let setting = async |change: fn(Place) -> Place, says: Says<'static>| {
        let istiod = local_istiod().await;
        Fault::new(change(Place::of(&istiod)), says).with(istiod)
    };
    faults.add(
        "a member of another type",
        setting(
            |place| place.proxy("drainDuration", json!("soon")),
            ("SETTING_INVALID", &["drainDuration", "soon", "a duration"], &["pilot-agent config"]),
        ),
    );
    faults.add(
        "a variable of another type",
        setting(
            |place| place.set("ISTIO_META_DNS_CAPTURE", "yes please"),
            (
                "SETTING_INVALID",
                &["ISTIO_META_DNS_CAPTURE", "yes please", "true or false"],
                &["pilot-agent config"],
            ),
        ),
    );
    faults.add(
        "an address that is none",
        setting(
            |place| place.proxy("discoveryAddress", json!("istiod")),
            (
                "SETTING_INVALID",
                &["discoveryAddress", "istiod", "host:port"],
                &["pilot-agent config"],
            ),
        ),
    );
    let remove = |path: &'static str| {
        move |_: &LocalIstiod, place: &Place| std::fs::remove_file(place.path(path)).unwrap()
    };
    let write = |path: &'static str, text: &'static str| {
        move |_: &LocalIstiod, place: &Place| place.write(path, text)
    };
    let says: Says = ("FILE_MISSING", &[ROOT], &["mount the file"]);
    faults.add("no roots at the start", files(remove(ROOT), says));
    let says: Says = ("ISTIOD_ROOTS_UNUSABLE", &[ROOT], &["istio-ca-root-cert"]);
    faults.add("roots that are none", files(write(ROOT, "no roots"), says));
    let says: Says =
        ("ISTIOD_TOKEN_MISSING", &[TOKEN, "No such file"], &["projected volume istio-token"]);
    faults.add("no token", files(remove(TOKEN), says));
    let says: Says = ("ISTIOD_TOKEN_INVALID", &[TOKEN, "empty"], &["projected volume istio-token"]);
    faults.add("an empty token", files(write(TOKEN, ""), says));
    let expired = |istiod: &LocalIstiod, place: &Place| {
        let token = istiod.mint_token("default", "bench", Duration::ZERO);
        place.write(TOKEN, token.unwrap());
    };
    let says: Says =
        ("ISTIOD_TOKEN_EXPIRED", &[TOKEN, "expired "], &["the kubelet renews", "date -u"]);
    faults.add("an expired token", files(expired, says));
    let foreign = |istiod: &LocalIstiod, place: &Place| {
        let claims = Claims {
            audiences: vec!["vault".to_owned()],
            ..Claims::of("default", "bench", SystemTime::now(), Duration::from_secs(600))
        };
        place.write(TOKEN, istiod.mint(&claims).unwrap());
    };
    let says: Says = (
        "ISTIOD_TOKEN_AUDIENCE",
        &["Unauthenticated", "for vault", "istio-ca"],
        &["istio-token", "TOKEN_AUDIENCES"],
    );
    faults.add("a token for another audience", files(foreign, says));
    faults.add("a token that istiod does not know", async {
        let other = token(&local_istiod().await);
        let write = |_: &LocalIstiod, place: &Place| place.write(TOKEN, other);
        let says: Says = (
            "ISTIOD_UNAUTHENTICATED",
            &["discoveryAddress", "Unauthenticated"],
            &["kubectl logs", "ISTIO_META_CLUSTER_ID"],
        );
        files(write, says).await
    });
    faults.add("OUTPUT_CERTS without its directory", async {
        let istiod = answering_istiod().await;
        let place = Place::of(&istiod).set("OUTPUT_CERTS", "./absent");
        let agent = place.start().await;
        agent.logs("error when output the resource: OUTPUT_CERTS=./absent: No such file").await;
        let says: Says = (
            "OUTPUT_CERTS_UNWRITABLE",
            &["OUTPUT_CERTS=./absent", "No such file"],
            &["mount a directory"],
        );
        Fault::new(place, says).with((agent, istiod))
    });
    faults.add("kept configuration in a directory that does not work", async {
        let istiod = answering_istiod().await;
        let place = Place::of(&istiod).set("ISTIO_AGENT_KEEP_CONFIG", "./absent");
        let agent = place.start().await;
        agent.logs("generated new workload certificate").await;
        let says: Says = (
            "KEPT_CONFIG_UNWRITABLE",
            &["ISTIO_AGENT_KEEP_CONFIG=./absent", "No such file"],
            &["mount a directory"],
        );
        Fault::new(place, says).with((agent, istiod))
    });
    faults.add("a misspelt variable", async {
        let istiod = answering_istiod().await;
        let place = Place::of(&istiod).set("ISTIO_AGENT_KEEP_CONFIGURATION", "/tmp");
        let agent = place.start().await;
        agent.logs("generated new workload certificate").await;
        let says: Says = (
            "SETTING_UNKNOWN",
            &["ISTIO_AGENT_KEEP_CONFIGURATION", "ISTIO_AGENT_KEEP_CONFIG?"],
            &["correct its name, or remove it"],
        );
        Fault::new(place, says).with((agent, istiod)).warns()
    });
    faults.assert_all_reported().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_fault_of_the_way_to_istiod_is_named_with_its_cure() {
    let mut faults = Faults::default();
    faults.add("roots of another mesh", async {
        let other = local_istiod().await;
        let write = |_: &LocalIstiod, place: &Place| place.write(ROOT, other.root_pem());
        files(
            write,
            (
                "ISTIOD_CERTIFICATE_UNTRUSTED",
                &["discoveryAddress"],
                &["istio-ca-root-cert", "another mesh"],
            ),
        )
        .await
    });
    faults.add("a name that does not resolve", async {
        let istiod = local_istiod().await;
        let place = Place::of(&istiod).proxy("discoveryAddress", json!("istiod.invalid:15012"));
        let says: Says = (
            "ISTIOD_NAME_NOT_RESOLVED",
            &["discoveryAddress", "istiod.invalid:15012"],
            &["/etc/resolv.conf", "kubectl get service"],
        );
        Fault::new(place, says).with(istiod)
    });
    faults.add("no listener", async {
        let istiod = local_istiod().await;
        let place = Place::of(&istiod);
        let listen = istiod.kill().await.listen.to_string();
        Fault::new(
            place,
            ("ISTIOD_CONNECTION_REFUSED", &["discoveryAddress", &listen], &["kubectl get pods"]),
        )
    });
    faults.add("packets are dropped", async {
        // A listener with a backlog of 0 that accepts nothing is full after one connection; the kernel drops
        // further SYN packets.
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(options().listen).unwrap();
        let listener = socket.listen(0).unwrap();
        let address = listener.local_addr().unwrap();
        let first = TcpStream::connect(address).await.unwrap();
        let istiod = local_istiod().await;
        let place = Place::of(&istiod).proxy("discoveryAddress", json!(address.to_string()));
        let says: Says = (
            "ISTIOD_NOT_REACHABLE",
            &["discoveryAddress", "timed out after"],
            &["kubectl get networkpolicy"],
        );
        Fault::new(place, says).with((listener, first, istiod))
    });
    faults.add("a certificate for another name", async {
        let istiod = LocalIstiod::start(Options { extra_names: Vec::new(), ..options() });
        let istiod = istiod.await.unwrap();
        let name = istiod.address.ip().to_string();
        let says: Says =
            ("ISTIOD_CERTIFICATE_NAME", &["istiod.istio-system.svc", &name], &["ISTIOD_SAN"]);
        Fault::new(Place::of(&istiod), says).with(istiod)
    });
    let early =
        |params: &mut CertificateParams| params.not_before = rcgen::date_time_ymd(2090, 1, 1);
    let says: Says = (
        "ISTIOD_CERTIFICATE_NOT_YET_VALID",
        &["is not valid before 2090-01-01"],
        &["clock of this machine", "date -u"],
    );
    faults.add("a clock that is late", certificate(early, says));
    let late = |params: &mut CertificateParams| params.not_after = rcgen::date_time_ymd(2020, 1, 1);
    let says: Says = (
        "ISTIOD_CERTIFICATE_EXPIRED",
        &["expired", "2020-01-01"],
        &["date -u", "kubectl rollout restart deployment/istiod"],
    );
    faults
        .add("an expired certificate of istiod, or a clock that is ahead", certificate(late, says));
    let says: Says = ("ISTIOD_NOT_GRPC", &["does not offer HTTP/2"], &["15012"]);
    faults.add("TLS without HTTP/2", certificate(|_| {}, says));
    let http = |stream| answer(stream, "HTTP/1.1 400 Bad Request\r\n\r\n");
    let says: Says = (
        "ISTIOD_NOT_TLS",
        &["discoveryAddress", "TLS"],
        &["15012", "controlPlaneAuthPolicy: NONE"],
    );
    faults.add("a plain HTTP server", with_other_server(http, says));
    let says: Says =
        ("ISTIOD_TIMEOUT", &["discoveryAddress", "in the TLS handshake"], &["kubectl get pods"]);
    faults.add("a silent server", with_other_server(silent, says));
    for (is_running, status, page, shown) in [
        (
            false,
            503,
            "<html><body>no healthy upstream\u{1b}[0m</body></html>",
            "no healthy upstream\\u{1b}",
        ),
        (false, 429, "Too many requests", "HTTP status 429"),
        (true, 404, "<html>not found</html>", "HTTP status 404 Not Found"),
        (true, 200, "<html>Welcome</html>", "Welcome"),
    ] {
        let talk = move |stream| answer_over_http2(stream, status, page);
        faults.add("a load balancer that answers for istiod", async move {
            let istiod = local_istiod().await;
            let place = Place::of(&istiod).proxy("controlPlaneAuthPolicy", json!("NONE"));
            let server = listen(istiod.kill().await.listen, talk).await;
            let agent = if is_running { Some(place.start_only()) } else { None };
            let says: Says =
                ("ISTIOD_NOT_GRPC", &["discoveryAddress", shown, "no gRPC"], &["healthy istiod"]);
            Fault::new(place, says).with((server, agent))
        });
    }
    faults.add("a proxy that refuses", async {
        let istiod = local_istiod().await;
        let place = Place::of(&istiod);
        let address = istiod.kill().await.listen;
        let no = |stream| answer(stream, "HTTP/1.1 403 Forbidden\r\n\r\n");
        let proxy = listen(address, no).await;
        let place = place
            .proxy("discoveryAddress", json!("istiod.invalid:15012"))
            .set("HTTPS_PROXY", &format!("http://{address}"));
        let says: Says = (
            "ISTIOD_PROXY_REFUSED",
            &["istiod.invalid:15012", "403", "HTTPS_PROXY"],
            &["NO_PROXY"],
        );
        Fault::new(place, says).with(proxy)
    });
    faults.add("a dead proxy", async {
        let istiod = local_istiod().await;
        let place = Place::of(&istiod);
        let address = istiod.kill().await.listen;
        let place = place
            .proxy("discoveryAddress", json!("istiod.invalid:15012"))
            .set("HTTPS_PROXY", &format!("http://{address}"));
        Fault::new(
            place,
            (
                "ISTIOD_PROXY_UNREACHABLE",
                &["HTTPS_PROXY", &address.to_string(), "refused"],
                &["correct `HTTPS_PROXY`", "NO_PROXY"],
            ),
        )
    });
    for is_running in [false, true] {
        faults.add("a wrong CA_ADDR beside a right discoveryAddress", async move {
            let istiod = answering_istiod().await;
            let dead = local_istiod().await.kill().await.listen.to_string();
            let place = Place::of(&istiod).set("CA_ADDR", &dead);
            let agent = if is_running { Some(place.start().await) } else { None };
            if let Some(agent) = &agent {
                agent.logs("ISTIOD_CONNECTION_REFUSED").await;
            }
            Fault::new(
                place,
                ("ISTIOD_CONNECTION_REFUSED", &["CA_ADDR", &dead], &["that the port is right"]),
            )
            .with((istiod, agent))
        });
    }
    faults.assert_all_reported().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_refusal_by_istiod_is_named_with_its_cure() {
    const DENIED: &str = "ISTIOD_PERMISSION_DENIED";
    let mut faults = Faults::default();
    let of = |name, value: &'static str| move |place: Place| place.set(name, value);
    let says: Says = (
        DENIED,
        &["POD_NAMESPACE is \"shop\"", "token is for default"],
        &["set POD_NAMESPACE to default"],
    );
    faults.add("a namespace other than the token's", denied(of("POD_NAMESPACE", "shop"), says));
    let says: Says = (
        DENIED,
        &["POD_NAMESPACE is \"\"", "token is for default"],
        &["set POD_NAMESPACE to default"],
    );
    faults.add("no namespace", denied(of("POD_NAMESPACE", ""), says));
    let says: Says = (
        DENIED,
        &["SERVICE_ACCOUNT is \"cart\"", "token is for bench"],
        &["set SERVICE_ACCOUNT to bench"],
    );
    faults.add("an account other than the token's", denied(of("SERVICE_ACCOUNT", "cart"), says));
    let says: Says = (
        DENIED,
        &["TRUST_DOMAIN is \"other.test\"", "no identities matched"],
        &["compare `TRUST_DOMAIN`", "kubectl get configmap istio"],
    );
    faults.add("another trust domain", denied(of("TRUST_DOMAIN", "other.test"), says));
    faults.add("a CSR that is refused", async {
        let istiod = answering_istiod().await;
        istiod.refuse_certificates(Some(Status::permission_denied("not this one")));
        let place = Place::of(&istiod);
        let agent = place.start().await;
        agent.logs("not this one").await;
        let says: Says = (DENIED, &["not this one", "TRUST_DOMAIN"], &["compare `TRUST_DOMAIN`"]);
        Fault::new(place, says).with((agent, istiod))
    });
    faults.add("an istiod that does not sign", async {
        let istiod = answering_istiod().await;
        istiod.refuse_certificates(Some(Status::unimplemented("unknown service")));
        let place = Place::of(&istiod);
        let agent = place.start().await;
        agent.logs("unknown service").await;
        let says: Says =
            ("ISTIOD_WITHOUT_CA", &["discoveryAddress", "Unimplemented"], &["CA_ADDR"]);
        Fault::new(place, says).with((agent, istiod))
    });
    faults.assert_all_reported().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_scope_of_the_log_that_is_off_is_a_warning() {
    let istiod = answering_istiod().await;
    let silenced = r#"exec "$@" --log_output_level=ca:none"#;
    let place = Place::of(&istiod).started_by(&["sh", "-c", silenced, "sh"]);
    let _agent = place.start().await;
    let (report, _) = diagnosed(&place);
    let checks = checks(&report);
    let level = checks.iter().find(|check| check["name"] == "log level");
    let level = level.unwrap_or_else(|| panic!("{report:#}"));
    assert_eq!(level["level"], "warning");
    assert_eq!(level["found"], "none for ca");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failing_first_control_plane_is_an_error_without_a_working_next() {
    let mut faults = Faults::default();
    faults.add("the next one accepts the stream and says nothing", async {
        let keys = Keys::generate("cluster.local").unwrap();
        let start = || LocalIstiod::start(Options { keys: Some(keys.clone()), ..options() });
        let (mut first, mut second) = (start().await.unwrap(), start().await.unwrap());
        let addresses = format!("{}, {}", first.address, second.address);
        let place = Place::with_envoy(&first).set("DISCOVERY_ADDRESS", &addresses);
        let agent = place.start().await;
        relays(&place, &mut first).await;
        // The times in the agent's record are in whole seconds, so the next failure has to happen in a later
        // second.
        let second_of =
            |time: SystemTime| time.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
        let answered = second_of(SystemTime::now());
        until("a later second", || second_of(SystemTime::now()) > answered).await;
        let first = first.kill().await.listen.to_string();
        let envoy = ask_for_clusters(&place).await;
        let stream = accepted(&mut second).await;
        let says: Says =
            ("ISTIOD_CONNECTION_REFUSED", &["DISCOVERY_ADDRESS", &first], &["kubectl get pods"]);
        Fault::new(place, says).with((agent, envoy, stream, second))
    });
    faults.assert_all_reported().await;
    let (first, second) = (local_istiod().await, answering_istiod().await);
    let first = first.kill().await.listen.to_string();
    let place = Place::of(&second);
    let place = place.set("DISCOVERY_ADDRESS", &format!("{first}, {}", second.address));
    let (report, _) = diagnosed(&place);
    let checks = checks(&report).into_iter();
    let of_first = checks.filter(|check| check["name"].as_str().unwrap().contains(&first));
    let levels: Vec<_> = of_first.map(|check| &check["level"]).collect();
    assert_eq!(levels, ["warning"], "{report:#}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_healthy_agent_has_no_warning_about_istiod_and_certificates() {
    let istiod = answering_istiod().await;
    let place = Place::of(&istiod);
    let agent = place.start().await;
    agent.logs("generated new workload certificate").await;
    let (report, _) = diagnosed(&place);
    let groups = ["agent", "configuration", "token and roots", "istiod", "certificate"];
    assert_ne!(report["level"], "skipped", "{report:#}");
    for group in report["groups"].as_array().unwrap() {
        let name = group["name"].as_str().unwrap();
        for check in group["checks"].as_array().unwrap() {
            let is_well = check["level"] == "ok" || check["level"] == "skipped";
            assert!(is_well || !groups.contains(&name), "{name}: {check}");
        }
    }
    let verdict = report["verdict"].as_str().unwrap();
    assert!(!verdict.starts_with("no agent"), "{verdict}");
    let text = place.run(&["doctor", "--verbose"]);
    let text = String::from_utf8_lossy(&text.stdout);
    assert!(!text.contains(token(&istiod).split('.').nth(1).unwrap()), "{text}");
    assert!(text.contains("ok       discovery request to"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_without_permission_gets_one_sentence_and_an_exit_code() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("Only root can be another user.");
    }
    let istiod = answering_istiod().await;
    let place = Place::of(&istiod);
    let _agent = place.start().await;
    // Other users may have no access to the directory of the build, so the program is copied.
    let folder = tempfile::tempdir().unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(folder.path(), mode).unwrap();
    let program = folder.path().join("pilot-agent");
    std::fs::copy(env!("CARGO_BIN_EXE_pilot-agent"), &program).unwrap();
    for flag in [None, Some("--json")] {
        let mut command = Command::new("setpriv");
        command
            .args(["--reuid=4321", "--regid=4321", "--clear-groups"])
            .arg(&program)
            .arg("doctor")
            .args(flag)
            .current_dir("/")
            .env("PROXY_CONFIG", json!({ "statusPort": place.status_port() }).to_string());
        let output = block_in_place(|| command.output().unwrap());
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(output.status.code(), Some(4), "{text}");
        let text = match flag {
            None => text,
            Some(_) => {
                let json: Value = serde_json::from_str(&text).unwrap();
                assert_eq!(json["code"], "CALLER_REFUSED");
                json["found"].as_str().unwrap().to_owned()
            }
        };
        for words in ["user 4321", "ISTIO_AGENT_DEBUG_USERS"] {
            assert!(text.contains(words), "{text}");
        }
        assert!(text.trim_end().lines().count() == 1, "{text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn on_a_terminal_no_line_is_too_wide_and_levels_have_colours() {
    let istiod = answering_istiod().await;
    for (variables, has_colours) in [("TERM=xterm", true), ("TERM=xterm NO_COLOR=1", false)] {
        // `script` gives the command a terminal.
        let script = format!("{variables} exec script -qec \"$*\" /dev/null");
        let place = Place::of(&istiod).started_by(&["sh", "-c", &script, "-"]);
        let output = block_in_place(|| place.run(&["doctor", "--verbose"]));
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(text.starts_with("no agent answers"), "{text}");
        assert_eq!(text.contains("\u{1b}[31merror\u{1b}[0m "), has_colours, "{text:?}");
        let colours = ["\u{1b}[31m", "\u{1b}[33m", "\u{1b}[32m", "\u{1b}[2m", "\u{1b}[0m"];
        let plain = colours.iter().fold(text, |text, colour| text.replace(colour, ""));
        assert!(!plain.contains('\u{1b}'), "{plain:?}");
        let widths = plain.lines().map(|line| line.trim_end().chars().count());
        assert!(widths.max() <= Some(120), "{plain}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn on_a_machine_the_command_runs_with_the_settings_of_the_unit() {
    if std::env::var_os("NETNS_TESTS").is_none() {
        return eprintln!("A file system of its own takes root: run under NETNS_TESTS only.");
    }
    let istiod = answering_istiod().await;
    // This script takes the place of the unit's start script: it sets `PROXY_CONFIG`, prints its directory, and
    // runs the command again.
    let place = Place::of(&istiod);
    let agent = env!("CARGO_BIN_EXE_pilot-agent");
    let unit =
        format!("#!/bin/sh\nexport PROXY_CONFIG='statusPort: 1'\npwd\nexec {agent} \"$@\"\n");
    place.write("istio-agent/start", unit);
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(place.path("istio-agent/start"), mode).unwrap();
    let script = "mount --bind . /usr/libexec; exec \"$@\"";
    let place = place.started_by(&["unshare", "--mount", "sh", "-ec", script, "-"]);
    let output = block_in_place(|| place.run(&["doctor"]));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.starts_with("/\nno agent answers on port 1: "), "{text}");
}
