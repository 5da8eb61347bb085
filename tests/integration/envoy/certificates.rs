//! Tests that no handshake with Envoy fails when its certificate changes, and that the agent trusts only the
//! current root certificate when it dials istiod.

use std::ops::RangeInclusive;
use std::path::Path;
use std::time::Duration;

use istio_agent::ca::key::KeyType;
use istio_agent::metrics::Registry;
use istio_agent::net::unix_socket;
use istio_agent::runtime::clock::Clock;
use istio_agent::runtime::lifecycle::CancellationToken;
use istio_agent::trust::identity::SpiffeId;
use istio_agent::{sds, secrets};
use local_istiod::{Event, Keys};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tonic::Status;

use crate::support::control_plane::{ACCOUNT, ControlPlane, NAMESPACE};
use crate::support::http::Load;
use crate::support::pod::{BareEnvoy, Pod, Settings, ask};
use crate::support::programs::envoy_binary;
use crate::support::resources::secured_listener;
use crate::support::tls::{Connection, Handshake, client};
use crate::support::{eventually, free_port, soon};

/// Makes mutual handshakes continuously, once a first handshake has succeeded. Returns the load after some of them.
pub async fn handshakes(port: u16, keys: &Keys) -> Load {
    let client = client(keys).await;
    let handshake = || Handshake { port, client: client.clone() };
    eventually("a first handshake", async || {
        let load = Load::default().with(handshake());
        eventually("an outcome", async || load.tally().attempts().gt(&0).then_some(())).await;
        load.tally().failures.is_empty().then_some(())
    })
    .await;
    let workers = (0..4).map(|_| handshake());
    let load = workers.fold(Load::default(), Load::with);
    load.wait_for_attempts(4).await;
    load
}

fn is_issued(event: &Event) -> bool {
    matches!(event, Event::Issued { .. })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_rotations_fail_no_handshake() {
    let Some(binary) = envoy_binary() else { return };
    let port = free_port();
    let listener = secured_listener("tls", port);
    let control_plane = ControlPlane::start(&[listener], Duration::from_secs(10)).await;
    let settings = Settings {
        envoy: Some(&binary),
        // With this ratio, the agent renews a certificate as soon as it may.
        environment: &[("SECRET_GRACE_PERIOD_RATIO", "1")],
    };
    let _pod = Pod::serving(settings, &control_plane).await;
    let load = handshakes(port, &control_plane.keys).await;
    eventually("eleven certificates in use", async || {
        (load.tally().successes.len() > 10).then_some(())
    })
    .await;
    load.assert_flawless();
}

const LIFE: Duration = Duration::from_secs(20);

/// The time from the start of the pod until the authority fails, shortly before the agent renews its
/// certificate after half of the lifetime.
const AUTHORITY_FAILS_AT: Duration = Duration::from_secs(9);

/// The time from the start of the pod until the authority works again, shortly before the certificate
/// expires. The expiry is rounded down to a second; the rest of the lifetime is enough for two dials and the
/// wait between them.
const AUTHORITY_RETURNS_AT: Duration = Duration::from_millis(16_500);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_authority_that_refuses_for_half_a_certificate_lifetime_fails_no_handshake() {
    let Some(binary) = envoy_binary() else { return };
    let port = free_port();
    let mut control_plane = ControlPlane::start(&[secured_listener("tls", port)], LIFE).await;
    let settings = Settings { envoy: Some(&binary), environment: &[] };
    // The certificate is issued while Envoy starts, which can take seconds. The times are counted from this moment.
    let begun = Instant::now();
    let _pod = Pod::serving(settings, &control_plane).await;
    control_plane.event("a certificate", is_issued).await;
    let load = handshakes(port, &control_plane.keys).await;

    tokio::time::sleep_until(begun + AUTHORITY_FAILS_AT).await;
    let down = Status::unavailable("down");
    control_plane.istiod.refuse_certificates(Some(down));
    tokio::time::sleep_until(begun + AUTHORITY_RETURNS_AT).await;
    assert_eq!(control_plane.istiod.certificates_signed(), 1);
    let refused = control_plane.told(|event| matches!(event, Event::Refused { .. }));
    assert!(refused.is_some(), "the agent has not asked");
    control_plane.istiod.refuse_certificates(None);
    assert_outlived(&load, begun).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_authority_that_hangs_for_half_a_certificate_lifetime_fails_no_handshake() {
    let Some(binary) = envoy_binary() else { return };
    let port = free_port();
    let mut authority = ControlPlane::start(&[], LIFE).await;
    let keys = authority.keys.clone();
    let discovery = ControlPlane::of(&[secured_listener("tls", port)]).await;
    let discovery = discovery.kill().await.replace(keys.clone()).await;
    let address = authority.address();
    let settings = Settings { envoy: Some(&binary), environment: &[("CA_ADDR", &address)] };
    let begun = Instant::now();
    let _pod = Pod::serving(settings, &discovery).await;
    authority.event("a certificate", is_issued).await;
    let load = handshakes(port, &keys).await;

    tokio::time::sleep_until(begun + AUTHORITY_FAILS_AT).await;
    let address = authority.istiod.address;
    let dead = authority.kill().await;
    // This authority accepts connections and sends nothing.
    let hung = TcpListener::bind(address).await.unwrap();
    let held = soon(hung.accept()).await.unwrap();
    tokio::time::sleep_until(begun + AUTHORITY_RETURNS_AT).await;
    drop((hung, held));
    let _authority = dead.revive().await;
    assert_outlived(&load, begun).await;
}

/// Asserts that no handshake fails until the first certificate has expired, and that a second certificate is
/// then in use.
async fn assert_outlived(load: &Load, begun: Instant) {
    tokio::time::sleep_until(begun + LIFE + Duration::from_secs(4)).await;
    let serials = load.assert_flawless().successes.len();
    assert_eq!(serials, 2, "one certificate after the other");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_rotations_in_a_row_fail_no_handshake() {
    const ROTATIONS: u64 = 1_000;
    let Some(binary) = envoy_binary() else { return };
    let control_plane = ControlPlane::of(&[]).await;
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("socket");
    let connection = Connection::to(&control_plane.istiod);
    let _tasks = serve_secrets(&connection, &socket);
    let port = free_port();
    let envoy = BareEnvoy::serving(&binary, static_bootstrap(&socket, port)).await;
    let load = handshakes(port, &control_plane.keys).await;
    let applied = "sds.default.update_success";
    for target in (100..=ROTATIONS).step_by(100) {
        eventually("a hundred rotations more", async || {
            let updates = counter(&ask(&envoy.admin, "/stats").await?, applied)?;
            (updates > target).then_some(())
        })
        .await;
    }
    let tally = load.assert_flawless();
    assert!(control_plane.istiod.certificates_signed() > ROTATIONS);
    let certificates = tally.successes.len();
    assert!(certificates > 250, "only {certificates} certificates seen");
}

/// Starts the agent's tasks for certificates in this process. They renew more often than any setting in
/// production allows.
pub fn serve_secrets(connection: &Connection, socket: &Path) -> JoinSet<()> {
    const PAUSE: RangeInclusive<Duration> = Duration::from_millis(5)..=Duration::from_millis(5);
    let config = secrets::Config {
        identity: SpiffeId::new("cluster.local", NAMESPACE, ACCOUNT),
        key_type: KeyType::P256,
        falls_back_to_rsa: false,
        encoding: Default::default(),
        ttl: Duration::from_secs(3600),
        grace_ratio: 1.0,
        grace_jitter: 0.0,
        least_pause: PAUSE,
        cache: None,
    };
    let registry = Registry::default();
    let (secrets, renewal) =
        secrets::new(config, connection.authority(), Clock::system(), &registry);
    let config = secrets::files::Config {
        workload: None,
        system_roots: "none".into(),
        debounce: Duration::ZERO,
    };
    let (files, _watcher) = secrets::files::new(config, Clock::system(), &registry);
    let sources = sds::Sources {
        secrets: Some(secrets),
        files,
        serves_workload: true,
        options: sds::SecretOptions::default(),
        rejections: sds::Rejections::default(),
    };
    let listener = unix_socket::bind(socket).unwrap();
    let mut tasks = JoinSet::new();
    tasks.spawn(renewal);
    tasks.spawn(sds::serve(listener, sources, &registry, CancellationToken::new()));
    tasks
}

/// Returns a bootstrap with a listener for mutual TLS and the cluster of its secrets, without discovery.
pub fn static_bootstrap(socket: &Path, port: u16) -> Value {
    let mut listener = secured_listener("tls", port);
    listener.as_object_mut().unwrap().remove("@type");
    let address = json!({ "pipe": { "path": socket } });
    json!({
        "node": { "id": "envoy", "cluster": "envoy" },
        "static_resources": {
            "listeners": [listener],
            "clusters": [{
                "name": "sds-grpc",
                "type": "STATIC",
                "load_assignment": {
                    "cluster_name": "sds-grpc",
                    "endpoints": [{ "lb_endpoints": [{ "endpoint": { "address": address } }] }],
                },
                "typed_extension_protocol_options": {
                    "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                        "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
                        "explicit_http_config": { "http2_protocol_options": {} },
                    },
                },
            }],
        },
    })
}

fn counter(stats: &str, name_end: &str) -> Option<u64> {
    let mut lines = stats.lines().filter_map(|line| line.split_once(": "));
    let (_, value) = lines.find(|(name, _)| name.ends_with(name_end))?;
    value.parse().ok()
}

#[tokio::test]
async fn a_root_replaced_on_disk_is_alone_trusted_at_the_next_dial() {
    let Some(binary) = envoy_binary() else { return };
    let is_opened = |event: &Event| matches!(event, Event::Opened { .. });
    let mut control_plane = ControlPlane::of(&[]).await;
    let (old_keys, settings) =
        (control_plane.keys.clone(), Settings { envoy: Some(&binary), environment: &[] });
    let pod = Pod::serving(settings, &control_plane).await;
    control_plane.event("a stream", is_opened).await;

    let new_keys = Keys::generate("cluster.local").unwrap();
    let mut control_plane = control_plane.kill().await.replace(new_keys).await;
    assert_refused(&mut control_plane).await;
    pod.replace_token(&control_plane.token());
    assert_refused(&mut control_plane).await;
    pod.replace_root(&control_plane.istiod.root_pem());
    control_plane.event("a stream", is_opened).await;

    let mut control_plane = control_plane.kill().await.replace(old_keys).await;
    pod.replace_token(&control_plane.token());
    assert_refused(&mut control_plane).await;
    assert!(pod.agent.is_running());
}

/// Waits until the agent has dialed twice, and has aborted both handshakes with an alert. Fails if a stream
/// is opened.
async fn assert_refused(control_plane: &mut ControlPlane) {
    let failed = |event: &Event| {
        assert!(!matches!(event, Event::Opened { .. }), "a stream was opened");
        matches!(event, Event::ConnectionFailed { .. })
    };
    for _ in 0..2 {
        let event = control_plane.event("a refused connection", failed).await;
        let text = event.to_string();
        assert!(text.contains("received fatal alert"), "{text}");
    }
}
