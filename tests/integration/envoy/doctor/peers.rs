//! Tests that the doctor says why calls of Envoy to a peer fail.

use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, SanType};
use rustls::pki_types::PrivatePkcs8KeyDer;
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::faults::pod_after_request;
use super::{checks, diagnosed, is_ready, pod};
use crate::support::eventually;
use crate::support::faults::{Fault, Faults};
use crate::support::free_port;
use crate::support::http::{Backend, Server, try_ask};
use crate::support::programs::envoy_binary;
use crate::support::resources::{cluster, endpoints, listener, routes, secret, secured};

const CART: &str = "outbound|8080||cart.shop";
const IDENTITY: &str = "spiffe://cluster.local/ns/shop/sa/cart";

type Authority = CertifiedIssuer<'static, KeyPair>;

fn authority() -> Authority {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "shop root");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// Returns the TLS settings of a peer with a certificate for this identity.
fn peer(
    issuer: &Authority,
    identity: &str,
    year: i32,
    clients: Option<&Authority>,
) -> ServerConfig {
    let mut params = CertificateParams::default();
    params.subject_alt_names = vec![SanType::URI(identity.try_into().unwrap())];
    params.not_before = rcgen::date_time_ymd(2000, 1, 1);
    params.not_after = rcgen::date_time_ymd(year, 1, 1);
    let key = KeyPair::generate().unwrap();
    let chain = vec![params.signed_by(&key, issuer).unwrap().der().clone()];
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .unwrap();
    let builder = match clients {
        None => builder.with_no_client_auth(),
        Some(clients) => {
            let mut roots = RootCertStore::empty();
            roots.add(clients.der().clone()).unwrap();
            let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), provider);
            builder.with_client_cert_verifier(verifier.build().unwrap())
        }
    };
    let key = PrivatePkcs8KeyDer::from(key.serialize_der());
    builder.with_single_cert(chain, key.into()).unwrap()
}

/// Returns a cluster like those of istiod, whose only endpoint has this port and the label of a peer with a sidecar.
fn with_sidecar(port: u16, roots: &str) -> Vec<Value> {
    let mut socket = secured(cluster(CART))["transport_socket"].take();
    let context = &mut socket["typed_config"]["common_tls_context"];
    context.as_object_mut().unwrap().remove("validation_context_sds_secret_config");
    context["combined_validation_context"] = json!({
        "default_validation_context": { "match_subject_alt_names": [{ "exact": IDENTITY }] },
        "validation_context_sds_secret_config": secret(roots),
    });
    context["alpn_protocols"] = json!(["istio-peer-exchange", "istio"]);
    socket["typed_config"]["sni"] = json!("outbound_.8080_._.cart.shop");
    let mut cluster = plain();
    let raw = json!({
        "name": "envoy.transport_sockets.raw_buffer",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.transport_sockets.raw_buffer.v3.RawBuffer",
        },
    });
    cluster["transport_socket_matches"] = json!([
        { "name": "tlsMode-istio", "match": { "tlsMode": "istio" }, "transport_socket": socket },
        { "name": "tlsMode-disabled", "match": {}, "transport_socket": raw },
    ]);
    let mut endpoints = endpoints(CART, &[port]);
    endpoints["endpoints"][0]["lb_endpoints"][0]["metadata"]["filter_metadata"] =
        json!({ "envoy.transport_socket_match": { "tlsMode": "istio" } });
    vec![cluster, endpoints]
}

fn plain() -> Value {
    let mut cluster = cluster(CART);
    cluster["eds_cluster_config"]["service_name"] = json!(CART);
    cluster
}

/// Writes the certificate of the authority to a file. Returns the name of its secret.
fn roots(authority: &Authority) -> (TempDir, String) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("root.pem");
    std::fs::write(&path, authority.pem()).unwrap();
    let name = format!("file-root:{}", path.display());
    (directory, name)
}

async fn serving(config: ServerConfig) -> Server {
    Server::secured(config, |_| Some((200, String::new(), "fine".to_owned()))).await
}

async fn closes(stream: TcpStream) {
    drop(stream);
}

/// Answers the first bytes as a server for HTTP/1.1 does if they are TLS.
async fn is_plain(mut stream: TcpStream) {
    let _ = stream.read_u8().await;
    let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n").await;
}

/// Closes the connection when it has got something.
async fn resets(mut stream: TcpStream) {
    let _ = stream.read_u8().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_peer_that_fails_is_named_with_what_is_wrong() {
    if envoy_binary().is_none() {
        return;
    }
    let mut faults = Faults::default();
    let (ours, other) = (authority(), authority());
    let (directory, own_roots) = roots(&ours);
    const FOREIGN: &str = "spiffe://other.domain/ns/shop/sa/cart";
    for (name, config, roots, code, words) in [
        (
            "an expired certificate of the peer",
            peer(&ours, IDENTITY, 2001, None),
            &*own_roots,
            "PEER_CERTIFICATE_REFUSED",
            [IDENTITY, "until 2001-01-01T00:00:00Z"],
        ),
        (
            "a peer of another authority",
            peer(&other, IDENTITY, 2999, None),
            "ROOTCA",
            "PEER_CERTIFICATE_REFUSED",
            [IDENTITY, "issued by CN=shop root"],
        ),
        (
            "a peer of another trust domain",
            peer(&ours, FOREIGN, 2999, None),
            &*own_roots,
            "PEER_CERTIFICATE_REFUSED",
            [FOREIGN, "Envoy expects spiffe://cluster.local/ns/shop/sa/cart"],
        ),
        (
            "a peer that does not trust the workload",
            peer(&ours, IDENTITY, 2999, Some(&other)),
            &*own_roots,
            "PEER_REFUSES_HANDSHAKE",
            ["after the handshake", "alert"],
        ),
    ] {
        let roots = roots.to_owned();
        faults.add(name, async move {
            let server = serving(config).await;
            let at = format!("127.0.0.1:{}", server.port);
            let (pod, control_plane) =
                pod_after_request(with_sidecar(server.port, &roots), CART).await;
            let words = [CART, &at, words[0], words[1]];
            let fault = Fault::new(pod, (code, &words, &["istioctl proxy-config secret"]));
            fault.with((control_plane, server)).warns()
        });
    }
    faults.add("a peer in plain text", async {
        let server = Backend::serving(is_plain).await;
        let (pod, control_plane) =
            pod_after_request(with_sidecar(server.port, "ROOTCA"), CART).await;
        let says = ("PEER_IN_PLAIN_TEXT", &[CART, "plain text"][..], &["tls.mode: DISABLE"][..]);
        Fault::new(pod, says).with((control_plane, server)).warns()
    });
    for (name, server) in [
        ("a peer that closes handshakes", Backend::serving(closes).await),
        ("a peer that never answers handshakes", Backend::start().await),
    ] {
        faults.add(name, async {
            let (pod, control_plane) =
                pod_after_request(with_sidecar(server.port, "ROOTCA"), CART).await;
            let cure = &["tls.mode: DISABLE"][..];
            let says = ("PEER_REFUSES_HANDSHAKE", &[CART, "not complete the handshake"][..], cure);
            Fault::new(pod, says).with((control_plane, server)).warns()
        });
    }
    let strict = peer(&ours, IDENTITY, 2999, Some(&ours));
    faults.add("plain text to a peer with mutual TLS", async {
        let server = serving(strict).await;
        let resources = vec![plain(), endpoints(CART, &[server.port])];
        let (pod, control_plane) = pod_after_request(resources, CART).await;
        let says = ("PEER_EXPECTS_TLS", &[CART, IDENTITY][..], &["tls.mode: DISABLE"][..]);
        Fault::new(pod, says).with((control_plane, server)).warns()
    });
    for cluster_name in [CART, "inbound|8080||"] {
        faults.add("an application that resets connections", async move {
            let server = Backend::serving(resets).await;
            let mut cluster = plain();
            cluster["name"] = json!(cluster_name);
            let resources = vec![cluster, endpoints(CART, &[server.port])];
            let (pod, control_plane) = pod_after_request(resources, cluster_name).await;
            let says = ("REQUESTS_FAIL", &[cluster_name, "connections work"][..], &["the log"][..]);
            Fault::new(pod, says).with((control_plane, server)).noted()
        });
    }
    faults.add("an application that fails for long", async {
        let answer = |_: &str| Some((500, String::new(), String::new()));
        let server = Server::start(0, answer).await;
        let port = free_port();
        let resources = [
            plain(),
            endpoints(CART, &[server.port]),
            listener("plain", port, "all"),
            routes("all", CART, "x"),
        ];
        let (pod, control_plane) = pod(&resources, &[]).await;
        is_ready(&pod).await;
        for _ in 0..10 {
            eventually("an answer", async || try_ask(port, "GET /", "").await).await;
        }
        let words = [CART, "10 requests failed (0 of them without an answer in time), 0 did not"];
        let fault = Fault::new(pod, ("REQUESTS_FAIL", &words, &["5xx"]));
        fault.with((control_plane, server)).warns()
    });
    faults.add("an application that is slower than the route's timeout", async {
        let server = Server::start(0, |_| None).await;
        let port = free_port();
        let mut routes = routes("all", CART, "x");
        routes["virtual_hosts"][0]["routes"][0]["route"]["timeout"] = json!("0.1s");
        let resources =
            [plain(), endpoints(CART, &[server.port]), listener("plain", port, "all"), routes];
        let (pod, control_plane) = pod(&resources, &[]).await;
        is_ready(&pod).await;
        for _ in 0..10 {
            eventually("an answer", async || try_ask(port, "GET /", "").await).await;
        }
        let words = [CART, "10 requests failed (10 of them without an answer in time), 0 did not"];
        let fault =
            Fault::new(pod, ("REQUESTS_FAIL", &words, &["slower than the route's timeout"]));
        fault.with((control_plane, server)).warns()
    });
    faults.assert_all_reported().await;
    drop(directory);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_serves_again_is_no_finding() {
    if envoy_binary().is_none() {
        return;
    }
    let ours = authority();
    let (_directory, roots_name) = roots(&ours);
    let closed = free_port();
    let (pod, control_plane) = pod_after_request(with_sidecar(closed, &roots_name), CART).await;
    let (report, _) = diagnosed(&pod).await;
    assert!(report.to_string().contains("UPSTREAM_UNREACHABLE"), "{report:#}");
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", closed)).await.unwrap();
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(peer(&ours, IDENTITY, 2999, None)));
    let serving = tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let mut stream = acceptor.accept(stream).await?;
                stream.read_u8().await
            });
        }
    });
    let (report, exit) = diagnosed(&pod).await;
    let checks = checks(&report);
    let (_, check) = checks.iter().find(|(_, check)| check["name"] == CART).expect("a check");
    assert!(check["found"].as_str().unwrap().ends_with("connections work again"), "{report:#}");
    assert_eq!(exit, Some(0), "{report:#}");
    serving.abort();
    drop(control_plane);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_report_on_6000_services_takes_at_most_30_mb() {
    if envoy_binary().is_none() {
        return;
    }
    let name = |index| format!("outbound|8080||service-{index}.shop.svc.cluster.local");
    let others = (0..6000).flat_map(|index| {
        let name = name(index);
        [cluster(&name), endpoints(&name, &[1])]
    });
    let closed = free_port();
    let resources = with_sidecar(closed, "ROOTCA").into_iter().chain(others).collect();
    let (pod, _control_plane) = pod_after_request(resources, CART).await;
    eventually("all clusters", async || {
        let page = crate::support::pod::ask(&pod.envoy, "/stats?filter=active_clusters").await?;
        page.contains(": 600").then_some(())
    })
    .await;
    let before = pod.agent.memory("VmRSS") - pod.agent.memory("RssFile");
    pod.agent.reset_peak();
    let (report, _) = diagnosed(&pod).await;
    assert!(report.to_string().contains("UPSTREAM_UNREACHABLE"), "{report:#}");
    assert!(!report.to_string().contains("ENVOY_NOT_INSPECTED"), "{report:#}");
    let peak = pod.agent.memory("VmHWM") - pod.agent.memory("RssFile");
    eprintln!("PEAK {peak} rss {} {}", pod.agent.memory("VmRSS"), before);
    assert!(peak < 30 * 1024, "{peak} KiB beside the code");
}
