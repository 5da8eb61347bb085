//! `pilot-agent doctor` against set-ups with one fault each: the first error of its report names the
//! cause, with and without a running agent.
//!
//! A row is a [`SetUp`]; all of a test are made and examined side by side.

mod machine;

use std::any::Any;
use std::future::pending;
use std::net::SocketAddr;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use local_istiod::{Claims, Keys, LocalIstiod, Options, Snapshot};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use rustls::ServerConfig;
use rustls::pki_types::PrivateKeyDer;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinSet, block_in_place};
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;
use tonic::Status;

use crate::support::place::{Place, ROOT, TOKEN, token};
use crate::support::{accepted, ask_for_clusters, local_istiod, options, relays, until};

/// A set-up with one fault.
pub struct SetUp {
    place: Place,
    /// What the first error of its report contains, all of them.
    says: Vec<String>,
    /// What must live until the report is there, such as a control plane or an agent.
    keeps: Box<dyn Any + Send>,
}

/// The set-ups of a test, being made and examined.
#[derive(Default)]
pub struct Rows(JoinSet<()>);

impl Rows {
    pub fn add(
        &mut self,
        name: &'static str,
        set_up: impl Future<Output = SetUp> + Send + 'static,
    ) {
        self.0.spawn(async move {
            let SetUp { place, says, keeps } = set_up.await;
            let (report, code) = diagnosed(&place);
            let text = format!("{name}: {report:#}");
            assert_eq!(code, 2, "{text}");
            let checks = checks(&report);
            let first = checks.iter().find(|check| check["level"] == "error");
            let first = first.unwrap_or_else(|| panic!("{text}")).to_string();
            for words in says {
                assert!(
                    first.contains(&words),
                    "{words:?} is not in {first}\n{text}"
                );
            }
            drop(keeps);
        });
    }

    pub async fn all_name_their_cause(mut self) {
        let mut failed = 0;
        while let Some(row) = self.0.join_next().await {
            failed += usize::from(row.is_err());
        }
        assert_eq!(failed, 0, "rows failed, see above");
    }
}

/// The report of `pilot-agent doctor --json`, and its exit code. It takes less than 3 s.
pub fn diagnosed(place: &Place) -> (Value, i32) {
    let began = Instant::now();
    let output = block_in_place(|| place.run(&["doctor", "--json"]));
    let took = began.elapsed();
    let errors = String::from_utf8_lossy(&output.stderr);
    let report = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{errors}"));
    assert!(took < Duration::from_secs(3), "{took:?}: {report:#}");
    (report, output.status.code().unwrap_or(-1))
}

/// The checks of all groups in order.
pub fn checks(report: &Value) -> Vec<&Value> {
    let groups = report["groups"].as_array().into_iter().flatten();
    let checks = groups.flat_map(|group| group["checks"].as_array().into_iter().flatten());
    checks.collect()
}

impl SetUp {
    pub fn new(place: Place, keeps: impl Any + Send, says: &[&str]) -> Self {
        Self {
            place,
            says: says.iter().map(|&words| words.to_owned()).collect(),
            keeps: Box::new(keeps),
        }
    }
}

/// A control plane that answers discovery requests.
pub async fn answering_istiod() -> LocalIstiod {
    let (_, snapshots) = watch::channel(Arc::new(Snapshot::default()));
    let options = Options {
        snapshots: Some(snapshots),
        ..options()
    };
    LocalIstiod::start(options).await.unwrap()
}

/// A set-up of files: what `spoil` does to it, and what the report says.
async fn files(spoil: impl FnOnce(&LocalIstiod, &Place), says: &[&str]) -> SetUp {
    let istiod = answering_istiod().await;
    let place = Place::of(&istiod);
    spoil(&istiod, &place);
    SetUp::new(place, istiod, says)
}

/// A set-up in which something else than istiod listens on its address.
async fn instead<F: Future<Output = ()> + Send + 'static>(
    talk: impl Fn(TcpStream) -> F + Send + 'static,
    says: &[&str],
) -> SetUp {
    let istiod = local_istiod().await;
    let place = Place::of(&istiod);
    let address = istiod.kill().await.listen;
    SetUp::new(place, listen(address, talk).await, says)
}

/// Serves connections until dropped.
async fn listen<F: Future<Output = ()> + Send + 'static>(
    address: SocketAddr,
    talk: impl Fn(TcpStream) -> F + Send + 'static,
) -> JoinSet<()> {
    // A child that was just forked may hold a former listener until it execs.
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

/// Never answers.
async fn silent(stream: TcpStream) {
    let _stream = stream;
    pending().await
}

/// Answers the first bytes, whatever they are.
async fn answer(mut stream: TcpStream, answer: &'static str) {
    let mut heard = [0; 1024];
    if stream.read(&mut heard).await.is_ok() {
        stream.write_all(answer.as_bytes()).await.unwrap();
    }
    pending().await
}

/// A set-up whose istiod shows this certificate, trusted as it is its own root.
async fn certificate(change: impl FnOnce(&mut CertificateParams), says: &[&str]) -> SetUp {
    let istiod = local_istiod().await;
    let place = Place::of(&istiod);
    let address = istiod.kill().await.listen;
    let mut params = CertificateParams::new([address.ip().to_string()]).unwrap();
    change(&mut params);
    let key = KeyPair::generate().unwrap();
    let leaf = params.self_signed(&key).unwrap();
    place.write(ROOT, leaf.pem());
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
            let _stream = accept.await; // The client may refuse.
            pending().await
        }
    };
    SetUp::new(place, listen(address, talk).await, says)
}

#[tokio::test(flavor = "multi_thread")]
async fn each_fault_of_configuration_and_files_is_the_first_error() {
    let mut rows = Rows::default();
    rows.add("unusable PROXY_CONFIG", async {
        let istiod = local_istiod().await;
        let place = Place::of(&istiod).proxy("drainDuration", json!("soon"));
        SetUp::new(place, istiod, &["drainDuration", "soon", "a duration"])
    });
    rows.add("a value of another type", async {
        let istiod = local_istiod().await;
        let place = Place::of(&istiod).set("ISTIO_META_DNS_CAPTURE", "yes please");
        let says = &[
            "ISTIO_META_DNS_CAPTURE",
            "yes please",
            "true or false",
            "SETTING_INVALID",
        ];
        SetUp::new(place, istiod, says)
    });
    let remove = |path: &'static str| {
        move |_: &LocalIstiod, place: &Place| std::fs::remove_file(place.path(path)).unwrap()
    };
    let says = &[ROOT, "an existing file of root certificates"];
    rows.add("no roots at the start", files(remove(ROOT), says));
    let says = &[TOKEN, "No such file", "projected volume"];
    rows.add("no token", files(remove(TOKEN), says));
    let expired = |istiod: &LocalIstiod, place: &Place| {
        let token = istiod.mint_token("default", "bench", Duration::ZERO);
        place.write(TOKEN, token.unwrap());
    };
    let says = &[TOKEN, "expired ", "the kubelet renews"];
    rows.add("an expired token", files(expired, says));
    let foreign = |istiod: &LocalIstiod, place: &Place| {
        let claims = Claims {
            audiences: vec!["vault".to_owned()],
            ..Claims::of(
                "default",
                "bench",
                SystemTime::now(),
                Duration::from_secs(600),
            )
        };
        place.write(TOKEN, istiod.mint(&claims).unwrap());
    };
    let says = &[
        "ISTIOD_TOKEN_AUDIENCE",
        "Unauthenticated",
        "istio-ca",
        "vault",
    ];
    rows.add("a token for another audience", files(foreign, says));
    let garbage = |_: &LocalIstiod, place: &Place| place.write(ROOT, "no roots");
    let says = &[ROOT, "ISTIOD_ROOTS_UNUSABLE", "istio-ca-root-cert"];
    rows.add("roots that are none", files(garbage, says));
    rows.all_name_their_cause().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_fault_of_the_way_to_istiod_is_the_first_error() {
    let mut rows = Rows::default();
    rows.add("roots of another mesh", async {
        let (istiod, other) = (answering_istiod().await, local_istiod().await);
        let place = Place::of(&istiod);
        place.write(ROOT, other.root_pem());
        let says = &[
            "ISTIOD_CERTIFICATE_UNTRUSTED",
            "istio-ca-root-cert",
            "another mesh",
        ];
        SetUp::new(place, istiod, says)
    });
    rows.add("a name that does not resolve", async {
        let istiod = local_istiod().await;
        let place = Place::of(&istiod).proxy("discoveryAddress", json!("istiod.invalid:15012"));
        SetUp::new(
            place,
            istiod,
            &[
                "istiod.invalid:15012",
                "ISTIOD_NAME_NOT_RESOLVED",
                "resolv.conf",
            ],
        )
    });
    rows.add("no listener", async {
        let istiod = local_istiod().await;
        let place = Place::of(&istiod);
        let listen = istiod.kill().await.listen.to_string();
        SetUp::new(
            place,
            (),
            &[&listen, "Connection refused", "is istiod ready"],
        )
    });
    rows.add("packets are dropped", async {
        // The queue of a listener that accepts nothing is full after one connection.
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(options().listen).unwrap();
        let listener = socket.listen(0).unwrap();
        let address = listener.local_addr().unwrap();
        let first = TcpStream::connect(address).await.unwrap();
        let istiod = local_istiod().await;
        let place = Place::of(&istiod).proxy("discoveryAddress", json!(address.to_string()));
        let says = &["timed out after", "ISTIOD_NOT_REACHABLE", "NetworkPolicy"];
        SetUp::new(place, (listener, first, istiod), says)
    });
    rows.add("a certificate for another name", async {
        let istiod = LocalIstiod::start(Options {
            extra_names: Vec::new(),
            ..options()
        });
        let istiod = istiod.await.unwrap();
        let name = istiod.address.ip().to_string();
        let says = &["istiod.istio-system.svc", &name, "ISTIOD_SAN"];
        SetUp::new(Place::of(&istiod), istiod, says)
    });
    let early =
        |params: &mut CertificateParams| params.not_before = rcgen::date_time_ymd(2090, 1, 1);
    let says = &["is not valid before 2090-01-01", "clock of this machine"];
    rows.add("a clock that is late", certificate(early, says));
    let late = |params: &mut CertificateParams| params.not_after = rcgen::date_time_ymd(2020, 1, 1);
    rows.add("an expired certificate", certificate(late, &["expired"]));
    let says = &["does not offer HTTP/2", "15012"];
    rows.add("TLS without HTTP/2", certificate(|_| {}, says));
    let http = |stream| answer(stream, "HTTP/1.1 400 Bad Request\r\n\r\n");
    rows.add(
        "a plain HTTP server",
        instead(http, &["ISTIOD_NOT_TLS", "15010"]),
    );
    rows.add(
        "a silent server",
        instead(silent, &["in the TLS handshake", "kubectl get pods"]),
    );
    rows.add("a proxy that refuses", async {
        let istiod = local_istiod().await;
        let place = Place::of(&istiod);
        let address = istiod.kill().await.listen;
        let no = |stream| answer(stream, "HTTP/1.1 403 Forbidden\r\n\r\n");
        let proxy = listen(address, no).await;
        let place = place
            .proxy("discoveryAddress", json!("istiod.invalid:15012"))
            .set("HTTPS_PROXY", &format!("http://{address}"));
        SetUp::new(place, proxy, &["the proxy", "403", "NO_PROXY"])
    });
    rows.all_name_their_cause().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_by_istiod_is_the_first_error() {
    let mut rows = Rows::default();
    rows.add("a token istiod does not know", async {
        let istiod = answering_istiod().await;
        let place = Place::of(&istiod);
        place.write(TOKEN, token(&local_istiod().await));
        let says = &["ISTIOD_UNAUTHENTICATED", "kubectl logs"];
        SetUp::new(place, istiod, says)
    });
    rows.add("an identity istiod does not admit", async {
        let mut istiod = local_istiod().await;
        let place = Place::of(&istiod);
        let mut refusing = JoinSet::new();
        refusing.spawn(async move {
            let stream = accepted(&mut istiod).await;
            let status = Status::permission_denied("no identities matched");
            stream.end(status).await;
            pending::<()>().await;
        });
        let says = &[
            "ISTIOD_PERMISSION_DENIED",
            "no identities matched",
            "TRUST_DOMAIN",
        ];
        SetUp::new(place, refusing, says)
    });
    rows.add("an agent that hangs", async {
        let istiod = answering_istiod().await;
        let place = Place::of(&istiod);
        let port = (std::net::Ipv4Addr::LOCALHOST, place.status_port());
        let hangs = listen(port.into(), silent).await;
        SetUp::new(
            place,
            (istiod, hangs),
            &["AGENT_SILENT", "restart the container"],
        )
    });
    rows.add("OUTPUT_CERTS without its directory", async {
        let istiod = answering_istiod().await;
        let place = Place::of(&istiod).set("OUTPUT_CERTS", "./absent");
        let agent = place.start().await;
        agent
            .logs("error when output the resource: OUTPUT_CERTS=./absent: No such file")
            .await;
        let says = &[
            "OUTPUT_CERTS_UNWRITABLE",
            "OUTPUT_CERTS=./absent",
            "mount a directory",
        ];
        SetUp::new(place, (agent, istiod), says)
    });
    rows.add("a CSR that is refused", async {
        let istiod = answering_istiod().await;
        istiod.refuse_certificates(Some(Status::permission_denied("not this one")));
        let place = Place::of(&istiod);
        let agent = place.start().await;
        agent.logs("not this one").await;
        SetUp::new(
            place,
            (agent, istiod),
            &["ISTIOD_PERMISSION_DENIED", "not this one"],
        )
    });
    rows.all_name_their_cause().await;
}

/// Files of a workload whose intermediate is valid until `year`, with the key of another one or its own.
fn mount(place: &Place, year: i32, is_own_key: bool) {
    let authority = |name: &str, year| {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.not_after = rcgen::date_time_ymd(year, 1, 1);
        params
    };
    let [root, middle, key, other] = std::array::from_fn(|_| KeyPair::generate().unwrap());
    let root = CertifiedIssuer::self_signed(authority("root", 2999), root).unwrap();
    let middle = CertifiedIssuer::signed_by(authority("middle", year), middle, &root).unwrap();
    let leaf = CertificateParams::new(["workload.test".to_owned()]).unwrap();
    let leaf = leaf.signed_by(&key, &middle).unwrap();
    place.write("etc/certs/cert-chain.pem", leaf.pem() + &middle.pem());
    place.write("etc/certs/root-cert.pem", root.pem());
    let key = if is_own_key { key } else { other };
    place.write("etc/certs/key.pem", key.serialize_pem());
}

/// A set-up with files of the workload in place of an authority.
async fn mounted(year: i32, is_own_key: bool, is_running: bool, says: &[&str]) -> SetUp {
    let istiod = answering_istiod().await;
    let place = Place::of(&istiod)
        .set("FILE_MOUNTED_CERTS", "true")
        .set("XDS_ROOT_CA", ROOT);
    mount(&place, year, is_own_key);
    let agent = match is_running {
        true => Some(place.start().await),
        false => None,
    };
    SetUp::new(place, (istiod, agent), says)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chain_that_peers_refuse_and_a_key_of_another_certificate_are_errors() {
    let mut rows = Rows::default();
    for is_running in [false, true] {
        let says = &[
            "workload certificate",
            "peers reject",
            "CN=middle",
            "2001-01-01",
        ];
        let expired = mounted(2001, true, is_running, says);
        rows.add("mounted files with an expired intermediate", expired);
        let says = &["etc/certs/key.pem", "does not belong to the certificate"];
        rows.add(
            "a mounted key of another certificate",
            mounted(2999, false, is_running, says),
        );
    }
    rows.add("an authority whose roots are others", async {
        let istiod = answering_istiod().await;
        istiod.publish_roots(Some(local_istiod().await.root_pem()));
        let place = Place::of(&istiod);
        let agent = place.start().await;
        agent.logs("generated new workload certificate").await;
        let says = &["workload certificate", "peers reject", "istio-ca-root-cert"];
        SetUp::new(place, (agent, istiod), says)
    });
    rows.all_name_their_cause().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn mounted_files_that_peers_accept_are_in_order_and_a_bad_rotation_is_a_warning() {
    let istiod = answering_istiod().await;
    let place = Place::of(&istiod)
        .set("FILE_MOUNTED_CERTS", "true")
        .set("XDS_ROOT_CA", ROOT);
    mount(&place, 2999, true);
    let level = || {
        let (report, _) = diagnosed(&place);
        let groups = report["groups"].as_array().unwrap().iter();
        let mut group = groups.filter(|group| group["name"] == "certificate");
        let checks = group.next().unwrap()["checks"].as_array().unwrap().clone();
        let worst = ["error", "warning", "ok"];
        let has = |level: &&&str| checks.iter().any(|check| check["level"] == **level);
        (*worst.iter().find(has).unwrap(), format!("{report:#}"))
    };
    assert_eq!(level().0, "ok", "{}", level().1);
    let _agent = place.start().await;
    assert_eq!(level().0, "ok", "{}", level().1);
    // What was read before is served until the agent ends.
    place.write(
        "etc/certs/key.pem",
        KeyPair::generate().unwrap().serialize_pem(),
    );
    assert_eq!(level().0, "warning", "{}", level().1);
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
async fn a_first_control_plane_that_fails_is_an_error_unless_the_next_one_works() {
    let mut rows = Rows::default();
    rows.add("the next one accepts the stream and says nothing", async {
        let keys = Keys::generate("cluster.local").unwrap();
        let start = || {
            LocalIstiod::start(Options {
                keys: Some(keys.clone()),
                ..options()
            })
        };
        let (mut first, mut second) = (start().await.unwrap(), start().await.unwrap());
        let addresses = format!("{}, {}", first.address, second.address);
        let place = Place::with_envoy(&first).set("DISCOVERY_ADDRESS", &addresses);
        let agent = place.start().await;
        relays(&place, &mut first).await;
        // Times of the record are in whole seconds.
        let second_of = |time: SystemTime| {
            time.duration_since(SystemTime::UNIX_EPOCH)
                .unwrap()
                .as_secs()
        };
        let answered = second_of(SystemTime::now());
        until("a later second", || second_of(SystemTime::now()) > answered).await;
        let first = first.kill().await.listen.to_string();
        let envoy = ask_for_clusters(&place).await;
        let stream = accepted(&mut second).await;
        let says = &[&first, "Connection refused"];
        SetUp::new(place, (agent, envoy, stream, second), says)
    });
    rows.all_name_their_cause().await;
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
    let groups = [
        "agent",
        "configuration",
        "token and roots",
        "istiod",
        "certificate",
    ];
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
    assert!(
        !text.contains(token(&istiod).split('.').nth(1).unwrap()),
        "{text}"
    );
    assert!(text.contains("ok       discovery request to"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_an_agent_the_first_line_says_so_with_the_cause_and_the_second_what_to_do() {
    let istiod = answering_istiod().await;
    let mut place = Place::of(&istiod);
    let state = format!("no agent answers on port {}: ", place.status_port());
    // Of nothing that prevents the start, of files, and of settings.
    for (says, code, remedy) in [
        ("Connection refused", "AGENT_NOT_RUNNING", "start the agent"),
        ("drainDuration", "SETTING_INVALID", "pilot-agent config"),
    ] {
        let output = block_in_place(|| place.run(&["doctor"]));
        assert_eq!(output.status.code(), Some(2));
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let mut lines = text.lines();
        let verdict = lines.next().unwrap();
        assert!(
            verdict.starts_with(&state) && verdict.contains(says),
            "{text}"
        );
        assert!(verdict.ends_with(&format!(" [{code}]")), "{text}");
        let second = lines.next().unwrap();
        assert!(
            second.starts_with("what to do: ") && second.contains(remedy),
            "{text}"
        );
        let last = lines.last().unwrap();
        assert!(last.starts_with("errors: 1, "), "{text}");
        assert!(!text.contains("\nok "), "{text}");
        place = place.proxy("drainDuration", json!("soon"));
    }
    let other = instead_of_the_agent(&place).await;
    let (report, code) = diagnosed(&place);
    assert_eq!(code, 2, "{report:#}");
    let found = checks(&report)
        .into_iter()
        .find(|check| check["level"] == "error");
    assert_eq!(found.unwrap()["code"], "AGENT_UNKNOWN", "{report:#}");
    drop(other);
}

/// Another program on the status port.
async fn instead_of_the_agent(place: &Place) -> JoinSet<()> {
    let port = (std::net::Ipv4Addr::LOCALHOST, place.status_port());
    let http = |stream| {
        answer(
            stream,
            "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
        )
    };
    listen(port.into(), http).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_without_permission_gets_one_sentence_and_an_exit_code() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("Only root can be another user.");
    }
    let istiod = answering_istiod().await;
    let place = Place::of(&istiod);
    let _agent = place.start().await;
    // The folder of the build may be closed to other users.
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
            .env(
                "PROXY_CONFIG",
                json!({ "statusPort": place.status_port() }).to_string(),
            );
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
async fn no_line_is_wider_than_a_terminal() {
    let istiod = answering_istiod().await;
    let place = Place::of(&istiod);
    // `script` gives the command a terminal.
    let place = place.started_by(&["sh", "-c", "exec script -qec \"$*\" /dev/null", "-"]);
    let output = block_in_place(|| place.run(&["doctor", "--verbose"]));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.starts_with("no agent answers"), "{text}");
    let widths = text.lines().map(|line| line.trim_end().chars().count());
    assert!(widths.max() <= Some(120), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn on_a_machine_the_command_runs_with_the_settings_of_the_unit() {
    if std::env::var_os("NETNS_TESTS").is_none() {
        return eprintln!("A file system of its own takes root: run under NETNS_TESTS only.");
    }
    let istiod = answering_istiod().await;
    // The script of a unit, which sets `PROV_CERT` and runs the command again.
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
    assert!(
        text.starts_with("/\nno agent answers on port 1: "),
        "{text}"
    );
}
