//! Tests Envoy with a certificate and root certificates of a real SPIRE, without istiod's authority.
//!
//! The variable `SPIRE_TESTS` turns these tests on, and the first test builds SPIRE. Each test starts its own server
//! and agent of SPIRE.

use http::Method;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::envoy::certificates::handshakes;
use crate::envoy::doctor::{checks, diagnosed};
use crate::support::control_plane::ControlPlane;
use crate::support::http::{Attempt, Load};
use crate::support::pod::{Pod, Settings, ask};
use crate::support::process::Process;
use crate::support::programs::envoy_binary;
use crate::support::resources::secured_listener;
use crate::support::spire::{IDENTITY, LONG, Spire, spire_programs};
use crate::support::tls::{Handshake, client};
use crate::support::{eventually, free_port};

const EXTERNAL: &str = "ISTIO_AGENT_EXTERNAL_SDS";

/// A file in place of resolv.conf that has no upstream resolver, so that the doctor queries none.
const NO_RESOLVER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");

/// A pod, and a SPIRE of which at first only the server runs.
struct Sidecar {
    pod: Pod,
    spire: Spire,
    control_plane: ControlPlane,
    /// The ports of a listener for clients of the namespace `shop`, and of a listener for clients of another namespace.
    ports: [u16; 2],
}

impl Sidecar {
    /// Starts a sidecar whose agent does `absent` (`fail` or `wait`) while SPIRE does not serve. Returns None if the
    /// test is to be skipped.
    async fn start(absent: &str) -> Option<Self> {
        let (envoy, programs) = (envoy_binary()?, spire_programs()?);
        let spire = Spire::start(programs).await;
        let ports = [free_port(), free_port()];
        let listeners = [listener("shop", ports[0]), listener("bank", ports[1])];
        let control_plane = ControlPlane::of(&listeners).await;
        let control_plane = control_plane.kill().await.replace(spire.keys.clone()).await;
        let settings = Settings {
            envoy: Some(&envoy),
            environment: &[(EXTERNAL, absent), ("ISTIO_AGENT_RESOLV_CONF", NO_RESOLVER)],
        };
        Some(Self { pod: Pod::start(settings, &control_plane), spire, control_plane, ports })
    }

    /// Starts SPIRE's agent on the workload's socket.
    async fn serve(&self) -> Process {
        let socket = "var/run/secrets/workload-spiffe-uds/socket";
        self.spire.serve(&self.pod.path(socket)).await
    }

    async fn handshakes(&self) -> Load {
        handshakes(self.ports[0], &self.spire.keys).await
    }

    /// Waits until a listener of Envoy waits for the certificate.
    async fn wait_for_warming_listener(&self) {
        let waits = async || {
            let page = ask(&self.pod.envoy, "/init_dump").await?;
            page.contains("SdsApi default").then_some(())
        };
        eventually("a listener that waits", waits).await;
    }

    /// Waits until the pod is ready. Checks that the doctor finds no problem, that Envoy has SPIRE's certificate and
    /// that istiod has signed no certificate.
    async fn assert_healthy(&self) {
        self.pod.serves().await;
        let ready = async || self.pod.status(Method::GET, "/healthz/ready").await;
        eventually("a ready pod", ready).await;
        let (report, code) = diagnosed(&self.pod).await;
        assert_eq!(code, Some(0), "{report:#}");
        let certificates = ask(&self.pod.envoy, "/certs").await.unwrap();
        assert!(certificates.contains(IDENTITY), "{certificates}");
        assert_eq!(self.control_plane.istiod.certificates_signed(), 0);
    }

    /// Checks that the doctor reports SPIRE's socket as not served, with this finding, and says that a certificate that
    /// Envoy has can be used.
    async fn assert_socket_not_served(&self, found: &str) {
        let (report, _) = diagnosed(&self.pod).await;
        let checks = checks(&report);
        let is_it = |check: &Value| check["code"] == "SOCKET_NOT_SERVED";
        let check = checks.iter().find(|(_, check)| is_it(check));
        let (_, check) = check.unwrap_or_else(|| panic!("{report:#}"));
        let text = |name: &str| check[name].as_str().unwrap();
        assert!(text("found").contains(found), "{check}");
        assert!(text("consequence").contains("until it expires"), "{check}");
        assert!(text("remedy").contains(EXTERNAL), "{check}");
    }
}

/// Returns an inbound listener with mutual TLS as istiod configures it, for clients of a namespace.
fn listener(namespace: &str, port: u16) -> Value {
    let mut listener = secured_listener(namespace, port);
    let socket = &mut listener["filter_chains"][0]["transport_socket"];
    let context = &mut socket["typed_config"]["common_tls_context"];
    let roots = context["validation_context_sds_secret_config"].take();
    let prefix = format!("spiffe://cluster.local/ns/{namespace}/");
    *context = json!({
        "tls_certificate_sds_secret_configs": context["tls_certificate_sds_secret_configs"],
        "combined_validation_context": {
            "default_validation_context": { "match_typed_subject_alt_names": [
                { "san_type": "URI", "matcher": { "prefix": prefix } },
            ]},
            "validation_context_sds_secret_config": roots,
        },
    });
    listener
}

/// Waits until the clients have seen this number of different certificates.
async fn wait_for_certificates(load: &Load, count: usize) {
    let seen = async || (load.tally().successes.len() >= count).then_some(());
    eventually("another certificate in use", seen).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn envoy_serves_with_the_certificate_of_a_spire_agent_started_earlier() {
    let Some(mut sidecar) = Sidecar::start("fail").await else {
        return;
    };
    // Without SPIRE this agent exits. The next agent has the default setting.
    assert!(!sidecar.pod.agent.end().await.success());
    sidecar.spire.register(LONG);
    let _agent = sidecar.serve().await;
    sidecar.pod.restart(&[(EXTERNAL, "")]);
    let found = "Existing workload SDS socket found";
    sidecar.pod.agent.logs(found).await;
    sidecar.assert_healthy().await;
    sidecar.handshakes().await.assert_flawless();
    // SPIRE's roots come with a validator for SPIFFE. istiod's rules for names still apply: the second listener refuses
    // a client of the namespace `shop`.
    let client = client(&sidecar.spire.keys).await;
    let [_, port] = sidecar.ports;
    let refused = Handshake { port, client }.attempt().await.unwrap_err();
    assert!(!refused.starts_with("connect"), "{refused}");
    // The agent still serves secrets from files, and authenticates to istiod with its token.
    assert!(sidecar.pod.bootstrap().to_string().contains("sds-files-grpc"));
    let connection = sidecar.pod.status(Method::GET, "/debug/istiod").await;
    let connection = connection.unwrap();
    assert!(connection.contains(r#""client_certificate":false"#), "{connection}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn envoy_serves_with_the_certificate_of_an_awaited_spire_agent() {
    let Some(sidecar) = Sidecar::start("wait").await else {
        return;
    };
    sidecar.pod.agent.logs("[SDS_SOCKET_ABSENT]").await;
    sidecar.wait_for_warming_listener().await;
    assert_eq!(sidecar.pod.status(Method::GET, "/healthz/ready").await, None);
    sidecar.assert_socket_not_served("there is none").await;
    sidecar.spire.register(LONG);
    let _agent = sidecar.serve().await;
    sidecar.assert_healthy().await;
    sidecar.handshakes().await.assert_flawless();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificates_that_spire_rotates_fail_no_handshake() {
    let Some(sidecar) = Sidecar::start("wait").await else {
        return;
    };
    // SPIRE dates certificates back by 10 s, and renews them after half of the resulting lifetime.
    sidecar.spire.register(20);
    let _agent = sidecar.serve().await;
    sidecar.assert_healthy().await;
    let load = sidecar.handshakes().await;
    wait_for_certificates(&load, 3).await;
    load.assert_flawless();
    sidecar.assert_healthy().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarting_spire_agent_fails_no_handshake_and_its_certificate_is_used() {
    let Some(sidecar) = Sidecar::start("wait").await else {
        return;
    };
    sidecar.spire.register(LONG);
    let mut agent = sidecar.serve().await;
    sidecar.assert_healthy().await;
    let load = sidecar.handshakes().await;
    // After SIGKILL the socket of SPIRE's agent still exists.
    for (signal, found, count) in
        [(Signal::TERM, "there is none", 2), (Signal::KILL, "stale, no process listens", 3)]
    {
        agent.signal(signal);
        agent.end().await;
        sidecar.assert_socket_not_served(found).await;
        load.wait_for_attempts(load.tally().attempts() + 20).await;
        assert!(sidecar.pod.status(Method::GET, "/healthz/ready").await.is_some());
        agent = sidecar.serve().await;
        wait_for_certificates(&load, count).await;
        sidecar.assert_healthy().await;
    }
    load.assert_flawless();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_restarts_without_spire_leaves_it_the_socket() {
    let Some(mut sidecar) = Sidecar::start("wait").await else {
        return;
    };
    sidecar.spire.register(LONG);
    let mut agent = sidecar.serve().await;
    sidecar.assert_healthy().await;
    agent.signal(Signal::KILL);
    agent.end().await;
    sidecar.pod.kill_and_restart(|| ()).await;
    sidecar.pod.agent.logs("[SDS_SOCKET_ABSENT]").await;
    let _agent = sidecar.serve().await;
    sidecar.assert_healthy().await;
    sidecar.handshakes().await.assert_flawless();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_workload_is_unready_with_reason_until_spire_has_its_entry() {
    let Some(sidecar) = Sidecar::start("wait").await else {
        return;
    };
    let _agent = sidecar.serve().await;
    let refusal = "workload is not authorized for the requested identities";
    sidecar.pod.agent.logs(refusal).await;
    sidecar.wait_for_warming_listener().await;
    let (report, code) = diagnosed(&sidecar.pod).await;
    assert_eq!(code, Some(2), "{report:#}");
    let errors = checks(&report).into_iter();
    let errors = errors.filter(|(_, check)| check["level"] == "error");
    let names_the_log = |check: &Value| check["remedy"].to_string().contains("StreamSecrets");
    let codes: Vec<_> = errors
        .filter(|(_, check)| names_the_log(check))
        .map(|(_, check)| check["code"].as_str().unwrap())
        .collect();
    assert_eq!(codes, ["LISTENER_WARMING", "SECRET_AWAITED"], "{report:#}");
    sidecar.spire.register(LONG);
    sidecar.assert_healthy().await;
    sidecar.handshakes().await.assert_flawless();
}
