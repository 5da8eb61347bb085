//! Tests secrets from files and from an external SDS server: each mode, hundreds of names, and rotation.

use std::collections::HashSet;
use std::path::Path;

use envoy_types::pb::envoy::extensions::transport_sockets::tls::v3::{Secret, secret};
use prost::Message;
use rcgen::{CertificateParams, KeyPair};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpStream, UnixListener};
use tonic::Code;

use crate::support::envoy::Envoy;
use crate::support::place::Place;
use crate::support::{
    SECRET, STREAM_SECRETS, ask_for_secrets, local, local_istiod, next_response, request, soon,
    until,
};

const FILES_SOCKET: &str = "var/run/secrets/credential-uds/files-socket";
const MOUNTED: &str = "var/run/secrets/workload-spiffe-credentials";

/// Returns a self-signed certificate and its key, as PEM.
fn generated() -> (String, String) {
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::default().self_signed(&key).unwrap();
    (certificate.pem(), key.serialize_pem())
}

/// Writes the chain, the key and the roots of a workload, and returns the chain.
fn workload(place: &Place, directory: &str, names: [&str; 3]) -> String {
    let (chain, key) = generated();
    for (name, content) in names.into_iter().zip([&chain, &key, &chain]) {
        place.write(&format!("{directory}/{name}"), content);
    }
    chain
}

const NAMES: [&str; 3] = ["cert-chain.pem", "key.pem", "root-cert.pem"];

/// Returns the name and the certificates of each secret of a response.
fn contents(resources: impl IntoIterator<Item = impl AsRef<[u8]>>) -> Vec<(String, String)> {
    let content = |bytes: &[u8]| {
        let secret = Secret::decode(bytes).unwrap();
        let source = match secret.r#type.unwrap() {
            secret::Type::TlsCertificate(pair) => pair.certificate_chain,
            secret::Type::ValidationContext(context) => context.trusted_ca,
            other => panic!("unexpected secret {other:?}"),
        };
        let pem = String::from_utf8_lossy(&source.unwrap().encode_to_vec()).into_owned();
        (secret.name, pem)
    };
    let resources = resources.into_iter();
    resources.map(|bytes| content(bytes.as_ref())).collect()
}

/// Requests secrets, and returns the name and the certificates of each secret in the first response.
async fn fetch_secrets(place: &Place, names: &[&str]) -> Vec<(String, String)> {
    let mut envoy = ask_for_secrets(place, names).await;
    let response = next_response(&mut envoy).await;
    contents(response.resources.into_iter().map(|any| any.value))
}

/// Serves a socket that a probe takes for an external SDS server: it sends an HTTP/2 SETTINGS frame to each client.
async fn greet_clients(path: &Path) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    let listener = UnixListener::bind(path).unwrap();
    loop {
        let (mut stream, _) = listener.accept().await.unwrap();
        tokio::spawn(async move {
            let _ = stream.write_all(b"\0\0\0\x04\0\0\0\0\0").await;
            std::future::pending::<()>().await;
        });
    }
}

#[tokio::test]
async fn every_mode_of_files_serves_them_without_an_authority() {
    let google = ["certificates.pem", "private_key.pem", "ca_certificates.pem"];
    let mounted = ("FILE_MOUNTED_CERTS", "true");
    let gke = ("CA_PROVIDER", "GkeWorkloadCertificate");
    let none = ("POD_NAME", "bench");
    for (directory, names, (variable, value)) in [
        ("etc/certs", NAMES, mounted),
        (MOUNTED, google, gke),
        (MOUNTED, NAMES, none),
        ("etc/certs", NAMES, none),
    ] {
        let istiod = local_istiod().await;
        let root = "var/root.pem";
        let place = Place::with_envoy(&istiod).set(variable, value).set("XDS_ROOT_CA", root);
        place.write(root, istiod.root_pem());
        let chain = workload(&place, directory, names);
        let _agent = place.start().await;
        let served = fetch_secrets(&place, &["default", "ROOTCA"]).await;
        assert_eq!(served.len(), 2, "{directory} {variable}");
        assert!(served.iter().all(|(_, pem)| pem.contains(&chain)), "{directory} {variable}");
        assert_eq!(istiod.certificates_signed(), 0, "{directory} {variable}");
    }
}

#[tokio::test]
async fn text_that_is_not_pem_is_logged_without_content() {
    let istiod = local_istiod().await;
    let place = Place::with_envoy(&istiod);
    let ((chain, key), (other, _)) = (generated(), generated());
    let secret = key.lines().nth(1).unwrap();
    let comment = format!("Bag Attributes\n    friendlyName: x\nsubject=CN = x\n{chain}");
    place.write("chain.pem", &comment);
    place.write("key.pem", format!("{key}-----BEGIN PRIVATE KEY-----\n{secret}\n"));
    place.write("good-key.pem", &key);
    place.write("roots.pem", format!("{chain}\0{other}"));
    let agent = place.start().await;
    let names =
        ["file-cert:chain.pem~key.pem", "file-cert:chain.pem~good-key.pem", "file-root:roots.pem"];
    for name in names {
        fetch_secrets(&place, &[name]).await;
    }
    for expected in [
        "file-cert:chain.pem~key.pem: an incomplete PEM block, expected complete ones; the part is left out",
        "file-root:roots.pem: bytes that are not text, expected PEM and comments; the part is left out",
    ] {
        agent.logs(expected).await;
    }
    let log = agent.log();
    assert!(!log.contains(secret), "{log}");
    assert!(!log.contains("good-key.pem: "), "{log}");
}

#[tokio::test]
async fn impossible_configurations_of_files_are_errors() {
    let istiod = local_istiod().await;
    for (variables, expected) in [
        (
            &[("CA_PROVIDER", "GkeWorkloadCertificate")][..],
            "GKE workload certificates: files do not exist",
        ),
        (&[("CA_PROVIDER", "Vault")], "CA_PROVIDER is \"Vault\""),
        (
            &[("FILE_MOUNTED_CERTS", "1"), ("PROV_CERT", "etc")],
            "nothing, because FILE_MOUNTED_CERTS is set",
        ),
        (&[("ISTIO_AGENT_EXTERNAL_SDS", "maybe")], "wait, fallback or fail"),
        (&[("ISTIO_AGENT_SDS_USERS", "root")], "numbers of users"),
    ] {
        let place = Place::with_envoy(&istiod);
        let place = variables.iter().fold(place, |place, (name, value)| place.set(name, value));
        let (code, log) = place.ends().await;
        assert_ne!(code, 0);
        assert!(log.contains(expected), "{expected} in {log}");
    }
}

#[tokio::test]
async fn mounted_files_that_rotate_and_vanish_are_pushed_and_kept() {
    let istiod = local_istiod().await;
    let place = Place::with_envoy(&istiod);
    let first = workload(&place, MOUNTED, NAMES);
    let _agent = place.start().await;
    let mut envoy = ask_for_secrets(&place, &["default"]).await;
    let response = next_response(&mut envoy).await;
    assert!(contents(response.resources.iter().map(|any| &any.value))[0].1.contains(&first));
    let second = workload(&place, MOUNTED, NAMES);
    let response = next_response(&mut envoy).await;
    assert!(contents(response.resources.iter().map(|any| &any.value))[0].1.contains(&second));
    for name in NAMES {
        std::fs::remove_file(place.path(MOUNTED).join(name)).unwrap();
    }
    tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    assert!(fetch_secrets(&place, &["default"]).await[0].1.contains(&second));
    assert_eq!(istiod.certificates_signed(), 0);
}

/// Writes `count` pairs of certificate and key, except the pair `absent`, and returns the secret names of all
/// pairs.
fn write_pairs(place: &Place, count: usize, absent: usize) -> Vec<String> {
    let (chain, key) = generated();
    let name = |n: usize| {
        let [chain, key] = ["chain", "key"].map(|kind| format!("certs/{n}.{kind}"));
        (format!("file-cert:{chain}~{key}"), chain, key)
    };
    let names = (0..count).map(name).map(|(text, chain_path, key_path)| {
        if !text.contains(&format!("/{absent}.")) {
            place.write(&chain_path, &chain);
            place.write(&key_path, &key);
        }
        text
    });
    names.collect()
}

#[tokio::test]
async fn a_request_for_500_names_is_answered_with_the_499_existing() {
    let istiod = local_istiod().await;
    let place = Place::with_envoy(&istiod).kind("router");
    let names = write_pairs(&place, 500, 77);
    let _agent = place.start().await;
    let asked: Vec<&str> = names.iter().map(String::as_str).collect();
    let expected: HashSet<&str> = asked.iter().copied().filter(|&name| name != asked[77]).collect();

    let mut whole = ask_for_secrets(&place, &asked).await;
    let mut got = Vec::new();
    while got.len() < expected.len() {
        let response = next_response(&mut whole).await;
        got.extend(contents(response.resources.iter().map(|any| &any.value)));
    }
    let got: HashSet<&str> = got.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(got, expected);
    // The last secret is pushed when its files exist.
    let (chain, key) = generated();
    place.write("certs/77.chain", &chain);
    place.write("certs/77.key", &key);
    assert_eq!(next_response(&mut whole).await.resources.len(), 1);
}

#[tokio::test]
async fn the_agent_serves_only_file_secrets_next_to_external_sds() {
    let istiod = local_istiod().await;
    let place = Place::with_envoy(&istiod);
    let socket = place.sds_socket();
    let credentials = place.path("var/run/secrets/credential-uds/socket");
    let testing = async {
        let agent = place.start().await;
        agent.logs("Existing workload SDS socket found").await;
        agent.logs("Credential SDS socket found").await;
        agent.logs("Starting SDS server for file certificates only").await;
        let bootstrap = place.path("etc/istio/proxy/envoy-rev.json");
        until("a bootstrap", || bootstrap.exists()).await;
        let bootstrap = std::fs::read_to_string(bootstrap).unwrap();
        assert!(bootstrap.contains("sds-files-grpc") && bootstrap.contains("\"credential\""));
        place.write("root.pem", generated().0);
        let ask = async |name: &str| {
            let envoy = Envoy::open_path(&place.path(FILES_SOCKET), STREAM_SECRETS).await;
            envoy.send(&request(SECRET, &[name]));
            envoy
        };
        let response = next_response(&mut ask("file-root:root.pem").await).await;
        assert_eq!(response.resources.len(), 1);
        let status = ask("default").await.end().await;
        assert_eq!(status.code(), Code::InvalidArgument);
        assert_eq!(istiod.certificates_signed(), 0);
    };
    tokio::select! {
        biased; // The sockets exist before the agent starts.
        () = greet_clients(&socket) => {}
        () = greet_clients(&credentials) => {}
        () = testing => {}
    }
}

#[tokio::test]
async fn a_read_only_root_next_to_external_sds_disables_file_secrets() {
    let istiod = local_istiod().await;
    let place = Place::with_envoy(&istiod);
    // This file prevents the agent from creating the directory, as a read-only root file system would.
    place.write("var/run/secrets/credential-uds", "");
    let socket = place.sds_socket();
    let testing = async {
        let agent = place.start().await;
        agent.logs("[SDS_SOCKET_UNUSABLE]").await;
        let bootstrap = place.path("etc/istio/proxy/envoy-rev.json");
        until("a bootstrap", || bootstrap.exists()).await;
        let bootstrap = std::fs::read_to_string(bootstrap).unwrap();
        assert!(!bootstrap.contains("sds-files-grpc") && !bootstrap.contains("file-credential"));
    };
    tokio::select! {
        biased; // The socket exists before the agent starts.
        () = greet_clients(&socket) => {}
        () = testing => {}
    }
}

#[tokio::test]
async fn an_external_sds_server_that_starts_late_is_waited_for_if_configured() {
    let istiod = local_istiod().await;
    let place = Place::with_envoy(&istiod).set("ISTIO_AGENT_EXTERNAL_SDS", "wait");
    let agent = place.start().await;
    agent.logs("[SDS_SOCKET_ABSENT]").await;
    assert!(!place.sds_socket().exists() && place.path(FILES_SOCKET).exists());
    let place = Place::with_envoy(&istiod).set("ISTIO_AGENT_EXTERNAL_SDS", "fail");
    let (_, log) = place.ends().await;
    assert!(log.contains("agent configured for non-default SDS socket path"), "{log}");
}

#[tokio::test]
async fn a_dead_socket_is_replaced() {
    let istiod = local_istiod().await;
    let place = Place::with_envoy(&istiod);
    std::fs::create_dir_all(place.sds_socket().parent().unwrap()).unwrap();
    let _silent = UnixListener::bind(place.sds_socket()).unwrap();
    let _agent = place.start().await;
    assert_eq!(fetch_secrets(&place, &["default"]).await.len(), 1);
}

#[tokio::test]
async fn the_status_port_is_bound_before_the_sds_socket_is_probed() {
    let place = Place::with_envoy(&local_istiod().await);
    std::fs::create_dir_all(place.sds_socket().parent().unwrap()).unwrap();
    let silent = UnixListener::bind(place.sds_socket()).unwrap();
    let _agent = place.start_only();
    let _asking = soon(silent.accept()).await.unwrap();
    TcpStream::connect(local(place.status_port())).await.unwrap();
}
