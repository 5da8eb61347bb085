//! Tests Envoy with secrets from files, also with hundreds of them, and from an external SDS server.

use std::path::{Path, PathBuf};
use std::time::Duration;

use istio_agent::ca::Ca;
use istio_agent::ca::csr;
use istio_agent::ca::key::{Encoding, KeyType};
use istio_agent::metrics::Registry;
use istio_agent::net::unix_socket;
use istio_agent::runtime::clock::Clock;
use istio_agent::runtime::lifecycle::CancellationToken;
use istio_agent::sds;
use istio_agent::secrets::files::{self, WorkloadFiles};
use istio_agent::trust::identity::SpiffeId;
use local_istiod::Keys;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DistinguishedName,
    DnType, IsCa, Issuer, KeyIdMethod, KeyPair, SerialNumber, date_time_ymd,
};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::envoy::certificates::{handshakes, serve_secrets, static_bootstrap};
use crate::support::control_plane::{ACCOUNT, ControlPlane, NAMESPACE};
use crate::support::pod::{BareEnvoy, Pod, Settings, ask, ready};
use crate::support::programs::envoy_binary;
use crate::support::resources::secured_listener;
use crate::support::tls::Connection;
use crate::support::{eventually, free_port};

const LIFE: Duration = Duration::from_secs(3600);

/// Gets a certificate from the authority and writes its files. Each file replaces the old one by a rename.
async fn write_signed(connection: &Connection, directory: &Path, roots: &str) {
    let identity = SpiffeId::new("cluster.local", NAMESPACE, ACCOUNT);
    let request = csr::generate(KeyType::P256, Encoding::Pkcs8, &identity).unwrap();
    let chain = connection.authority().sign(&request.csr_pem, LIFE).await.unwrap();
    for (name, content) in [
        ("cert-chain.pem", chain[0].as_str()),
        ("key.pem", request.key_pem.as_str()),
        ("root-cert.pem", roots),
    ] {
        std::fs::write(directory.join("draft"), content).unwrap();
        std::fs::rename(directory.join("draft"), directory.join(name)).unwrap();
    }
}

/// Serves files on a socket.
fn serve_files(workload: Option<WorkloadFiles>, socket: &Path) -> JoinSet<()> {
    serve_with_crl(workload, socket, None, sds::Rejections::default())
}

/// Serves files and a revocation list on a socket, and records in `rejections` which secrets Envoy refuses.
fn serve_with_crl(
    workload: Option<WorkloadFiles>,
    socket: &Path,
    crl: Option<PathBuf>,
    rejections: sds::Rejections,
) -> JoinSet<()> {
    let registry = Registry::default();
    let config = files::Config {
        workload,
        system_roots: "none".into(),
        debounce: Duration::from_millis(100),
    };
    let (files, watcher) = files::new(config, Clock::system(), &registry);
    let sources = sds::Sources {
        secrets: None,
        files,
        serves_workload: true,
        options: sds::SecretOptions { key_provider: None, crl },
        rejections,
    };
    let listener = unix_socket::bind(socket).unwrap();
    let mut tasks = JoinSet::new();
    tasks.spawn(watcher);
    tasks.spawn(sds::serve(listener, sources, &registry, CancellationToken::new()));
    tasks
}

/// Returns the paths of the files that [`write_signed`] writes.
fn workload(directory: &Path) -> WorkloadFiles {
    let [chain, key, roots] =
        ["cert-chain.pem", "key.pem", "root-cert.pem"].map(|name| directory.join(name));
    WorkloadFiles { chain, key, roots, is_only_source: true }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mounted_files_that_rotate_fail_no_handshake() {
    let Some(binary) = envoy_binary() else { return };
    let control_plane = ControlPlane::of(&[]).await;
    let connection = Connection::to(&control_plane.istiod);
    let roots = control_plane.istiod.root_pem();
    let directory = tempfile::tempdir().unwrap();
    write_signed(&connection, directory.path(), &roots).await;
    let socket = directory.path().join("socket");
    let _tasks = serve_files(Some(workload(directory.path())), &socket);
    let port = free_port();
    let _envoy = BareEnvoy::serving(&binary, static_bootstrap(&socket, port)).await;
    let load = handshakes(port, &control_plane.keys).await;
    for turn in 2..5 {
        write_signed(&connection, directory.path(), &roots).await;
        eventually("the next certificate in use", async || {
            (load.tally().successes.len() >= turn).then_some(())
        })
        .await;
    }
    load.assert_flawless();
}

/// Returns a bootstrap whose listener has a filter chain for each of these secrets. Envoy gets the certificates by SDS.
fn gateway(socket: &Path, port: u16, names: &[String]) -> Value {
    let mut bootstrap = static_bootstrap(socket, port);
    let listener = &mut bootstrap["static_resources"]["listeners"][0];
    let chain = listener["filter_chains"][0].clone();
    let chains = names.iter().enumerate().map(|(n, name)| {
        let mut chain = chain.clone();
        chain["filter_chain_match"] = json!({ "server_names": [format!("{n}.example")] });
        let context = &mut chain["transport_socket"]["typed_config"];
        context["require_client_certificate"] = false.into();
        context["common_tls_context"] = json!({
            "tls_certificate_sds_secret_configs": [{ "name": name, "sds_config": {
                "resource_api_version": "V3",
                "api_config_source": {
                    "api_type": "GRPC",
                    "transport_api_version": "V3",
                    "set_node_on_first_message_only": true,
                    "grpc_services": [{ "envoy_grpc": { "cluster_name": "sds-grpc" } }],
                },
            }}],
        });
        chain
    });
    listener["filter_chains"] = chains.collect();
    bootstrap
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_gets_499_certificates_at_once_and_the_last_later() {
    let Some(binary) = envoy_binary() else { return };
    let directory = tempfile::tempdir().unwrap();
    let control_plane = ControlPlane::of(&[]).await;
    let connection = Connection::to(&control_plane.istiod);
    let of = |n: usize| directory.path().join(n.to_string());
    std::fs::create_dir(of(0)).unwrap();
    write_signed(&connection, &of(0), &control_plane.istiod.root_pem()).await;
    let copy = |n: usize| {
        std::fs::create_dir(of(n)).unwrap();
        for name in ["cert-chain.pem", "key.pem"] {
            std::fs::copy(of(0).join(name), of(n).join(name)).unwrap();
        }
    };
    (1..500).filter(|n| *n != 321).for_each(copy);
    let names: Vec<String> = (0..500)
        .map(|n| of(n).display().to_string())
        .map(|at| format!("file-cert:{at}/cert-chain.pem~{at}/key.pem"))
        .collect();
    let socket = directory.path().join("socket");
    let _tasks = serve_files(None, &socket);
    let bootstrap = gateway(&socket, free_port(), &names);
    // The missing certificate delays the others at most until Envoy stops waiting for it.
    let envoy = BareEnvoy::serving(&binary, bootstrap).await;
    let active = async || {
        let path = "/config_dump?resource=dynamic_active_secrets";
        let dump: Value = serde_json::from_str(&ask(&envoy.admin, path).await?).ok()?;
        let secrets = dump["configs"].as_array()?;
        let loaded = |secret: &&Value| secret["secret"]["tls_certificate"].is_object();
        Some(secrets.iter().filter(loaded).count())
    };
    eventually("499 certificates", async || (active().await? == 499).then_some(())).await;
    copy(321);
    eventually("the last one", async || (active().await? == 500).then_some(())).await;
}

/// Joins the END line of each block with the BEGIN line of the next block.
fn joined(pem: &str) -> String {
    pem.replace("-----\n-----", "----------")
}

/// The forms in which a reader of PEM may find a text of several blocks.
const FORMS: [fn(&str) -> String; 18] = [
    str::to_owned,
    joined,
    |pem| pem.replace('\n', "\r"),
    |pem| pem.replace('\n', "\r\n"),
    |pem| pem.replace('\n', "\r\r\n"),
    |pem| joined(pem).replace('\n', "\r"),
    |pem| format!("\u{feff}{pem}"),
    |pem| format!(" \t{pem}"),
    |pem| pem.replace('\n', "\n    "),
    |pem| pem.replace('\n', "\n\n"),
    |pem| pem.replace('\n', " \t\n"),
    |pem| pem.replace("END CERTIFICATE-----\n", "END CERTIFICATE----- x\n"),
    |pem| pem.trim().to_owned(),
    |pem| format!("subject=/CN=x\n\n{pem}Bag Attributes\n    friendlyName: é\n"),
    |pem| pem.replace("-----\n", "-----").replace("-----END", "\n-----END"),
    |pem| format!("-----BEGIN X-----\n!!\n-----END X-----\n{pem}"),
    |pem| format!("-----BEGIN X-----\n{pem}-----END X-----\n-----BEGIN X-----\n"),
    in_lines_of_253,
];

/// Puts the base64 of each block in lines of 253 characters. Such a line fills the buffer with which BoringSSL reads
/// lines, which hides the line feed.
fn in_lines_of_253(pem: &str) -> String {
    let (mut text, mut column) = (String::new(), 0);
    for line in pem.lines() {
        if line.starts_with("-----") {
            text.push_str(&format!("{}{line}\n", if column > 0 { "\n" } else { "" }));
            column = 0;
            continue;
        }
        for character in line.chars() {
            text.push(character);
            column = (column + 1) % 253;
            if column == 0 {
                text.push('\n');
            }
        }
    }
    text
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn envoy_takes_certificates_keys_and_roots_in_every_form_that_is_read() {
    let Some(binary) = envoy_binary() else { return };
    let directory = tempfile::tempdir().unwrap();
    let control_plane = ControlPlane::of(&[]).await;
    let root = control_plane.istiod.root_pem();
    write_signed(&Connection::to(&control_plane.istiod), directory.path(), &root).await;
    let read = |name: &str| std::fs::read_to_string(directory.path().join(name)).unwrap();
    let (leaf, key) = (read("cert-chain.pem"), read("key.pem"));
    let at = |n: usize| directory.path().join(n.to_string());
    for (n, form) in FORMS.into_iter().enumerate() {
        std::fs::create_dir(at(n)).unwrap();
        std::fs::write(at(n).join("chain"), form(&format!("{leaf}{root}"))).unwrap();
        std::fs::write(at(n).join("key"), form(&format!("{leaf}{key}"))).unwrap();
        std::fs::write(at(n).join("roots"), form(&format!("{root}{leaf}"))).unwrap();
    }
    let socket = directory.path().join("socket");
    let rejections = sds::Rejections::default();
    let _tasks = serve_with_crl(None, &socket, None, rejections.clone());
    let paths: Vec<_> = (0..FORMS.len()).map(|n| at(n).display().to_string()).collect();
    let names = paths.iter().map(|at| format!("file-cert:{at}/chain~{at}/key"));
    let mut bootstrap = gateway(&socket, free_port(), &Vec::from_iter(names));
    let chains = &mut bootstrap["static_resources"]["listeners"][0]["filter_chains"];
    for (chain, at) in chains.as_array_mut().unwrap().iter_mut().zip(&paths) {
        let context = &mut chain["transport_socket"]["typed_config"]["common_tls_context"];
        let mut roots = context["tls_certificate_sds_secret_configs"][0].clone();
        roots["name"] = format!("file-root:{at}/roots").into();
        context["validation_context_sds_secret_config"] = roots;
    }
    let envoy = BareEnvoy::serving(&binary, bootstrap).await;
    eventually("all secrets", async || {
        let stats = ask(&envoy.admin, "/stats?filter=sds.*update_success").await?;
        let count = |line: &str| line.rsplit(": ").next()?.parse::<usize>().ok();
        let accepted: usize = stats.lines().filter_map(count).sum();
        let refused = Vec::from_iter(rejections.lock().values().cloned());
        assert_eq!(refused, []);
        (accepted >= 2 * FORMS.len()).then_some(())
    })
    .await;
}

/// The keys of a mesh, and the key and parameters that sign further certificates of its root.
struct Mesh {
    keys: Keys,
    root: String,
    key: KeyPair,
    params: CertificateParams,
}

impl Mesh {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let keys = Keys::load_or_generate(folder.path(), "cluster.local").unwrap();
        let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        let name = &mut params.distinguished_name;
        name.push(DnType::OrganizationName, "cluster.local");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self {
            keys,
            root: read("root-cert.pem"),
            key: KeyPair::from_pem(&read("root-key.pem")).unwrap(),
            params,
        }
    }

    async fn control_plane(&self) -> ControlPlane {
        let control_plane = ControlPlane::of(&[]).await;
        control_plane.kill().await.replace(self.keys.clone()).await
    }

    /// Signs another certificate of the root, which is valid between the beginnings of these years.
    fn issue(&self, begin: i32, end: i32) -> String {
        let mut params = self.params.clone();
        params.not_before = date_time_ymd(begin, 1, 1);
        params.not_after = date_time_ymd(end, 1, 1);
        params.self_signed(&self.key).unwrap().pem()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_issues_of_a_root_fail_no_handshake_at_any_position() {
    let Some(binary) = envoy_binary() else { return };
    let mesh = Mesh::new();
    let control_plane = mesh.control_plane().await;
    let directory = tempfile::tempdir().unwrap();
    let (expired, future) = (mesh.issue(2000, 2020), mesh.issue(2090, 2120));
    let roots = format!("{expired}{future}{}", mesh.root);
    let connection = Connection::to(&control_plane.istiod);
    write_signed(&connection, directory.path(), &roots).await;
    let socket = directory.path().join("socket");
    let _tasks = serve_files(Some(workload(directory.path())), &socket);
    let port = free_port();
    let _envoy = BareEnvoy::serving(&binary, static_bootstrap(&socket, port)).await;
    handshakes(port, &mesh.keys).await.assert_flawless();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_der_revocation_list_is_in_force_and_a_refused_one_reported() {
    let Some(binary) = envoy_binary() else { return };
    let mesh = Mesh::new();
    let control_plane = mesh.control_plane().await;
    let directory = tempfile::tempdir().unwrap();
    let connection = Connection::to(&control_plane.istiod);
    write_signed(&connection, directory.path(), &mesh.root).await;
    let [socket, crl] = ["socket", "crl.pem"].map(|name| directory.path().join(name));
    let broken = "-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n";
    std::fs::write(&crl, broken).unwrap();
    let rejections = sds::Rejections::default();
    let files = Some(workload(directory.path()));
    let _tasks = serve_with_crl(files, &socket, Some(crl.clone()), rejections.clone());
    let port = free_port();
    let _envoy = BareEnvoy::serving(&binary, static_bootstrap(&socket, port)).await;
    let refused =
        eventually("a refusal", async || rejections.lock().values().next().cloned()).await;
    let (code, subject) = (refused.code.name(), refused.subject.as_str());
    assert_eq!((code, subject), ("SECRET_REFUSED", "secret ROOTCA"));
    // A file with the word `null` counts as no revocation list.
    std::fs::write(&crl, "null\n").unwrap();
    eventually("an accepted secret", async || rejections.lock().is_empty().then_some(())).await;
    let load = handshakes(port, &mesh.keys).await;
    load.assert_flawless();
    let list_of = |params, key| {
        let list = CertificateRevocationListParams {
            this_update: date_time_ymd(2020, 1, 1),
            next_update: date_time_ymd(2120, 1, 1),
            crl_number: SerialNumber::from(1_u64),
            issuing_distribution_point: None,
            revoked_certs: Vec::new(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        list.signed_by(&Issuer::new(params, key)).unwrap()
    };
    // With a list of another authority only, Envoy refuses the clients of this authority, because it has no list for
    // them.
    let mut other = mesh.params.clone();
    other.distinguished_name = DistinguishedName::new();
    let other = list_of(other, KeyPair::generate().unwrap());
    std::fs::write(&crl, other.der()).unwrap();
    eventually("a client without a list", async || {
        (!load.tally().failures.is_empty()).then_some(())
    })
    .await;
    let list = list_of(mesh.params.clone(), mesh.key);
    std::fs::write(&crl, list.der()).unwrap();
    handshakes(port, &mesh.keys).await.assert_flawless();
    assert!(rejections.lock().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn envoy_serves_with_secrets_of_an_external_sds_server_that_starts_late() {
    let Some(binary) = envoy_binary() else { return };
    let port = free_port();
    let control_plane = ControlPlane::start(&[secured_listener("tls", port)], LIFE).await;
    let settings =
        Settings { envoy: Some(&binary), environment: &[("ISTIO_AGENT_EXTERNAL_SDS", "wait")] };
    let pod = Pod::start(settings, &control_plane);
    let ours = pod.path("var/run/secrets/credential-uds/files-socket");
    eventually("the agent's own socket", async || ours.exists().then_some(())).await;
    assert_eq!(control_plane.istiod.certificates_signed(), 0);
    // This server stands for an external one. Its certificates are of the same mesh.
    let connection = Connection::to(&control_plane.istiod);
    let socket = pod.path("var/run/secrets/workload-spiffe-uds/socket");
    let _other = serve_secrets(&connection, &socket);
    ready(&pod.envoy).await;
    handshakes(port, &control_plane.keys).await.assert_flawless();
    assert!(pod.bootstrap().to_string().contains("sds-files-grpc"));
}
