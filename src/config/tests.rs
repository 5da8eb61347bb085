//! Tests configurations that are read from complete sets of inputs.

use std::fs;

use tempfile::TempDir;

use super::environment::TABLE;
use super::*;
use crate::istiod::{Security, tls};

pub(super) struct Machine {
    pub(super) root: TempDir,
    pub(super) variables: Vec<(&'static str, &'static str)>,
}

/// Returns the inputs of an injected pod, with additional environment variables.
pub(super) fn machine(more: &[(&'static str, &'static str)]) -> Machine {
    let machine = Machine {
        root: TempDir::new().expect("a directory"),
        variables: [
            ("POD_NAME", "cart-0"),
            ("POD_NAMESPACE", "shop"),
            ("SERVICE_ACCOUNT", "cart"),
            ("INSTANCE_IP", "10.0.0.9"),
            ("CA_ADDR", "istiod.istio-system.svc:15012"),
            ("ISTIO_META_CLUSTER_ID", "Kubernetes"),
        ]
        .into_iter()
        .chain(more.iter().copied())
        .collect(),
    };
    machine.file("var/run/secrets/istio/root-cert.pem", "");
    machine
}

impl Machine {
    pub(super) fn file(&self, path: &str, text: &str) {
        let path = self.root.path().join(path);
        fs::create_dir_all(path.parent().expect("a directory")).expect("made");
        fs::write(path, text).expect("written");
    }

    pub(super) fn load(&self, flags: &str) -> Result<Config, Vec<Problem>> {
        self.load_with_interfaces(flags, pod::interfaces())
    }

    fn load_with_interfaces(
        &self,
        flags: &str,
        interfaces: io::Result<Vec<Interface>>,
    ) -> Result<Config, Vec<Problem>> {
        let (flags, log, _) = flags::parse(flags);
        let env = self.variables.iter().copied().collect();
        load_with(&flags, &log, &env, self.root.path(), interfaces)
    }

    pub(super) fn config(&self) -> Config {
        self.load("sidecar").expect("a good configuration")
    }

    pub(super) fn subjects(&self) -> Vec<String> {
        let problems = self.load("sidecar").expect_err("problems");
        problems.into_iter().map(|problem| problem.subject).collect()
    }
}

fn tls(istiod: &istiod::Config) -> &tls::Config {
    match &istiod.security {
        Security::Tls(tls) => tls,
        Security::Plaintext => panic!("plaintext"),
    }
}

#[test]
fn an_injected_pod_has_one_connection_to_istiod() {
    let config = machine(&[]).config();
    assert_eq!(config.istiod.address, "istiod.istio-system.svc:15012");
    assert_eq!(tls(&config.istiod).server_name, "istiod.istio-system.svc");
    let root = "./var/run/secrets/istio/root-cert.pem";
    assert_eq!(tls(&config.istiod).roots, tls::Roots::File(root.into()));
    assert!(config.ca_istiod.is_none());
    assert_eq!(config.istiod.metadata[0].0, "clusterid");
    assert_eq!(
        config.secrets.renewal.identity.to_string(),
        "spiffe://cluster.local/ns/shop/sa/cart"
    );
    assert_eq!(config.xds_socket, Path::new("./etc/istio/proxy/XDS"));
    assert_eq!(config.max_request_bytes, 209_715_200);
    assert_eq!(config.warnings, []);
}

#[test]
fn each_malformed_variable_is_reported_once_also_if_its_feature_is_off() {
    // Node metadata of the wrong type is refused, as pilot-agent does.
    const REFUSED: [&str; 2] = ["ISTIO_META_DNS_CAPTURE", "ISTIO_META_ENABLE_SELF_DISCOVERY"];
    let typed = TABLE.iter().filter(|row| !(row.is_valid)("?"));
    let names = typed.map(|row| row.name);
    let names: Vec<_> = names.filter(|name| !REFUSED.contains(name)).collect();
    let malformed: Vec<_> = names.iter().map(|name| (*name, "?")).collect();
    let warnings = machine(&malformed).config().warnings;
    let found: Vec<_> = warnings
        .iter()
        .filter(|warning| warning.found == "\"?\"")
        .map(|warning| warning.subject.as_str())
        .collect();
    assert_eq!(found, names);
}

#[test]
fn another_authority_has_its_own_connection() {
    let config =
        machine(&[("CA_ADDR", "ca.example:15010"), ("ISTIOD_SAN", "istiod.example")]).config();
    let ca = config.ca_istiod.expect("a second connection");
    assert_eq!(ca.address, "ca.example:15010");
    assert!(matches!(ca.security, Security::Plaintext));
    assert_eq!(tls(&config.istiod).server_name, "istiod.example");
}

#[test]
fn several_control_planes_have_names_of_their_own_and_share_everything_else() {
    let list = " a.test:15012,localhost:1,, [fd00::1]:443 ,a.test:15012";
    let with_ca = |address| {
        let variables = [("DISCOVERY_ADDRESS", list), ("CA_HEADER_X", "1"), ("CA_ADDR", address)];
        machine(&variables).config()
    };
    let config = with_ca("a.test:15012");
    let ca = config.ca_istiod.expect("a second connection");
    for istiod in [&config.istiod, &ca] {
        let all = std::iter::once(istiod).chain(&istiod.fallbacks);
        let found: Vec<_> =
            all.map(|istiod| (istiod.address.as_str(), tls(istiod).server_name.as_str())).collect();
        let expected = [
            ("a.test:15012", "a.test"),
            ("localhost:1", "istiod.istio-system.svc"),
            ("[fd00::1]:443", "fd00::1"),
        ];
        assert_eq!(found, expected);
        for other in &istiod.fallbacks {
            assert_eq!(other.metadata, istiod.metadata);
            assert_eq!(tls(other).roots, tls(istiod).roots);
        }
    }
    assert_eq!(config.warnings, []);
    // An authority with the first address of the list, or without an address, has the same fallbacks as discovery.
    for (address, count) in [("a.test:15012", 2), ("", 2), ("c:1", 0)] {
        let ca = with_ca(address).ca_istiod.expect("a second connection");
        assert_eq!(ca.fallbacks.len(), count, "{address}");
    }
    for (address, is_same) in [("a:1", true), ("", true), ("b:1", false)] {
        let config = machine(&[("DISCOVERY_ADDRESS", "a:1,b:1"), ("CA_ADDR", address)]);
        assert_eq!(config.config().ca_istiod.is_none(), is_same, "{address}");
    }
}

#[test]
fn an_invalid_control_plane_address_is_reported() {
    for (list, count) in [
        ("a", 1),
        ("a:1,b", 1),
        ("a:1 b:1", 1),
        ("a:1;b:1", 1),
        ("a:0,b:65536", 2),
        ("https://a:1", 1),
        (",", 0),
        ("a:1,a:2", 0),
    ] {
        let machine = machine(&[("DISCOVERY_ADDRESS", list)]);
        let found = match count {
            0 => machine.config().warnings.len(),
            _ => machine.subjects().iter().filter(|it| *it == "DISCOVERY_ADDRESS").count(),
        };
        assert_eq!(found, count, "{list}");
    }
}

#[test]
fn headers_for_xds_only_need_a_second_connection_and_are_lower_case() {
    let config = machine(&[("XDS_HEADER_X-Team", "a=b")]).config();
    let (name, value) = &config.istiod.metadata[1];
    assert_eq!((name.as_str(), value.as_bytes()), ("x-team", &b"a=b"[..]));
    assert_eq!(config.ca_istiod.expect("a second connection").metadata.len(), 1);
}

#[test]
fn localhost_is_expected_to_have_istiods_name() {
    let config =
        machine(&[("PROXY_CONFIG", "discoveryAddress: localhost:15012"), ("CA_ADDR", "")]).config();
    assert_eq!(tls(&config.istiod).server_name, "istiod.istio-system.svc");
    assert!(config.ca_istiod.is_none());
}

#[test]
fn control_plane_auth_policy_none_uses_plaintext() {
    let plaintext = "{controlPlaneAuthPolicy: NONE, discoveryAddress: 'a:15010'}";
    let config = machine(&[("PROXY_CONFIG", plaintext), ("CA_ADDR", "a:15010")]).config();
    assert!(matches!(config.istiod.security, Security::Plaintext));
    assert!(config.ca_istiod.is_none());
    assert_eq!(config.bootstrap.node.metadata.get("PILOT_SAN"), None);
}

#[test]
fn the_first_applicable_root_setting_is_used_for_xds_and_ca() {
    use crate::trust::trust_anchors::SystemRoots;
    use tls::Roots::{File, System};
    let file = |path: &str| File(path.into());
    let mounted = "./etc/certs/root-cert.pem";
    for (variables, xds, ca) in [
        (
            &[("XDS_ROOT_CA", "SYSTEM"), ("CA_ROOT_CA", "own.pem")][..],
            System(SystemRoots::new("", "")),
            file("own.pem"),
        ),
        (
            &[("CA_ROOT_CA", "SYSTEM"), ("SSL_CERT_FILE", "f"), ("SSL_CERT_DIR", "d:e")],
            file(mounted),
            System(SystemRoots::new("f", "d:e")),
        ),
        (&[("PILOT_CERT_PROVIDER", "custom")], file(mounted), file(mounted)),
        (&[("PROV_CERT", "prov")], file(mounted), file("prov/root-cert.pem")),
        (&[], file(mounted), file("./var/run/secrets/istio/root-cert.pem")),
    ] {
        let machine = machine(variables);
        for path in ["own.pem", "etc/certs/root-cert.pem", "prov/root-cert.pem"] {
            machine.file(path, "");
        }
        let config = machine.config();
        let ca_istiod = config.ca_istiod.as_ref().unwrap_or(&config.istiod);
        assert_eq!((&tls(&config.istiod).roots, &tls(ca_istiod).roots), (&xds, &ca));
    }
}

#[test]
fn metadata_names_the_root_of_mounted_certificates() {
    let metadata = "{proxyMetadata: {ISTIO_META_TLS_CLIENT_ROOT_CERT: named.pem}}";
    let machine = machine(&[("PROXY_CONFIG", metadata)]);
    machine.file("named.pem", "");
    let roots = || tls(&machine.config().istiod).roots.clone();
    let file = |path: &str| tls::Roots::File(path.into());
    assert_eq!(roots(), file("./var/run/secrets/istio/root-cert.pem"));
    for name in ["cert-chain.pem", "key.pem", "root-cert.pem"] {
        let mounted = format!("var/run/secrets/workload-spiffe-credentials/{name}");
        machine.file(&mounted, "");
    }
    assert_eq!(roots(), file("named.pem"));
}

#[test]
fn ca_configuration_errors_are_deferred_if_another_process_may_serve_sds() {
    let bad = ("CA_ROOT_CA", "gone.pem");
    assert_eq!(machine(&[bad]).subjects().len(), 1);
    let machine = machine(&[bad]);
    machine.file("var/run/secrets/workload-spiffe-uds/socket", "");
    let problems = machine.config().authority_problems;
    assert_eq!(problems.len(), 1);
    assert_eq!(problems[0].found, "\"gone.pem\"");
}

#[test]
fn probes_come_from_an_address_of_the_applications_family() {
    for (address, origin) in [("10.0.0.9", "127.0.0.6"), ("fd00::9", "::6")] {
        // The pod has addresses of both families.
        let interfaces = ["10.0.0.9", "fd00::9"].map(|address| Interface {
            name: "eth0".to_owned(),
            address: address.parse().expect("an address"),
            is_loopback: false,
        });
        let machine = machine(&[("INSTANCE_IP", address)]);
        let config = machine.load_with_interfaces("sidecar", Ok(interfaces.into()));
        let config = config.expect("a good configuration");
        let status = config.status.expect("a status port");
        assert_eq!(status.application_host, address);
        assert_eq!(status.probes.source.to_string(), origin);
    }
}

#[test]
fn every_problem_is_reported_at_once() {
    let machine = machine(&[
        ("PILOT_CERT_PROVIDER", "none"),
        ("CA_ADDR", "nowhere"),
        ("ECC_SIGNATURE_ALGORITHM", "RSA"),
        ("WORKLOAD_IDENTITY_SOCKET_FILE", "a/b"),
        ("PROXY_CONFIG", "{statusPort: x, drainDuration: 45, meshId: 5}"),
        ("CA_HEADER_bad name", "x"),
        ("ISTIO_BOOTSTRAP", "template.json"),
    ]);
    let subjects = machine.subjects();
    for subject in [
        "drainDuration of PROXY_CONFIG line 1",
        "statusPort of PROXY_CONFIG line 1",
        "meshId of PROXY_CONFIG line 1",
        "WORKLOAD_IDENTITY_SOCKET_FILE",
        "PILOT_CERT_PROVIDER",
        "CA_ADDR",
        "CA_HEADER_bad name",
        "ISTIO_BOOTSTRAP",
        "ECC_SIGNATURE_ALGORITHM",
    ] {
        assert!(subjects.iter().any(|s| s == subject), "{subject} in {subjects:?}");
    }
}

#[test]
fn the_agent_does_not_start_if_envoys_admin_port_cannot_be_closed() {
    const TRANSPORT: &str = "ISTIO_ENVOY_ADMIN_TRANSPORT";
    assert_eq!(machine(&[(TRANSPORT, "UDS")]).subjects(), [TRANSPORT]);
    let native = [(TRANSPORT, "UDS"), ("ISTIO_NATIVE_SIDECAR", "true")];
    let own = [("ISTIO_AGENT_ADMIN_SOCKET", "true")];
    for (variables, has_control) in [(&native[..], false), (&own, true)] {
        let config = machine(variables).config();
        assert_eq!(config.status.expect("a status port").has_control, has_control);
        let admin = config.envoy.expect("Envoy").admin.address;
        assert_eq!(admin.to_string(), "./etc/istio/proxy/admin/admin.sock");
    }
}

#[test]
fn the_last_of_equal_keys_in_a_document_wins_with_a_warning() {
    let config = machine(&[(
        "PROXY_CONFIG",
        "drainDuration: 3s\nproxyMetadata: {A: x1, A: x2}\ndrainDuration: 7s\n",
    )])
    .config();
    let subjects: Vec<_> = config.warnings.iter().map(|w| w.subject.as_str()).collect();
    assert_eq!(subjects, ["PROXY_CONFIG line 3", "PROXY_CONFIG line 2"]);
    assert_eq!(config.warnings[0].found, "another member drainDuration");
    let envoy = config.envoy.expect("Envoy");
    assert_eq!(envoy.command.drain_time.as_secs(), 7);
}

#[test]
fn a_missing_root_file_is_a_problem_that_names_it() {
    let problems = machine(&[("XDS_ROOT_CA", "gone.pem")]).load("sidecar").expect_err("a problem");
    assert_eq!(problems.len(), 1);
    assert_eq!(problems[0].found, "\"gone.pem\"");
}

#[test]
fn the_pods_annotation_wins_over_the_variable_and_that_over_the_mesh() {
    let machine = machine(&[("PROXY_CONFIG", "{drainDuration: 2s, concurrency: 0}")]);
    machine.file(
        "etc/istio/config/mesh",
        "trustDomain: x\ndefaultConfig:\n  drainDuration: 1s\n  proxyAdminPort: 15999\n",
    );
    let annotation = r#"proxy.istio.io/config="drainDuration: 3s\nbinaryPath: /bin/true\n""#;
    machine.file("etc/istio/pod/annotations", annotation);
    let envoy = machine.config().envoy.expect("Envoy");
    assert_eq!(envoy.command.drain_time.as_secs(), 3);
    assert_eq!(envoy.command.binary, Path::new("/bin/true"));
    assert_eq!(envoy.command.concurrency, None);
    assert_eq!(envoy.admin.address.port(), Some(15_999));
}

#[test]
fn interfaces_may_be_left_out_of_the_address_list() {
    let machine = machine(&[]);
    let annotation = "traffic.sidecar.istio.io/excludeInterfaces=\"net9,none9\"\n";
    machine.file("etc/istio/pod/annotations", annotation);
    let subjects: Vec<_> = machine.config().warnings.into_iter().map(|w| w.found).collect();
    assert_eq!(subjects, ["\"net9\"", "\"none9\""]);
}

#[test]
fn the_grpc_bootstrap_may_be_switched_off() {
    assert!(machine(&[]).config().grpc.is_some());
    assert!(machine(&[("GRPC_XDS_BOOTSTRAP", "")]).config().grpc.is_none());
}

#[test]
fn unknown_authorities_fetchers_and_policies_are_reported() {
    for (name, value) in [("CA_PROVIDER", "GoogleCA"), ("CREDENTIAL_FETCHER_TYPE", "jwt")] {
        assert_eq!(machine(&[(name, value)]).subjects(), [name]);
    }
    let config = machine(&[("COMPLIANCE_POLICY", "fips")]).config();
    assert_eq!(tls(&config.istiod).policy, Policy::None);
    let found: Vec<_> = config.warnings.iter().map(|it| it.subject.as_str()).collect();
    assert_eq!(found, ["COMPLIANCE_POLICY"]);
    for (name, policy, warns) in
        [("pqc", Policy::Pqc, false), ("fips-140-3", Policy::Fips140_3, !cfg!(feature = "fips"))]
    {
        let config = machine(&[("COMPLIANCE_POLICY", name)]).config();
        assert_eq!(tls(&config.istiod).policy, policy);
        let found = config.warnings.first();
        assert_eq!(found.is_some_and(|it| it.expected.contains("FIPS=1")), warns, "{name}");
    }
}

#[test]
fn proxies_are_read_in_either_case_for_istiod_and_for_modules() {
    let config = machine(&[
        ("http_proxy", "plain:1"),
        ("HTTPS_PROXY", ""),
        ("https_proxy", "http://u:p@tls:2"),
        ("HTTP_PROXY", "upper:3"),
        ("no_proxy", "direct.test"),
    ])
    .config();
    let fetch = config.wasm.expect("enabled").fetch;
    let found = |has_tls, host| {
        let proxy = fetch.proxies.find(has_tls, host, 1);
        proxy.map(|proxy| proxy.host.clone())
    };
    assert_eq!(found(false, "a.test").as_deref(), Some("upper"));
    assert_eq!(found(true, "a.test").as_deref(), Some("tls"));
    assert_eq!(found(true, "direct.test"), None);
    assert_eq!(config.istiod.proxy.map(|proxy| proxy.port), Some(2));
}

#[test]
fn a_proxy_that_cannot_be_used_is_a_warning_without_its_text() {
    let config = machine(&[("HTTPS_PROXY", "socks5://u:hush@proxy:1")]).config();
    let warnings = config.warnings.iter();
    let texts: Vec<_> = warnings.map(ToString::to_string).collect();
    let about = texts.iter().filter(|text| text.contains("HTTPS_PROXY"));
    assert_eq!(about.count(), 1, "{texts:?}");
    assert!(!texts.concat().contains("hush"), "{texts:?}");
    assert!(config.istiod.proxy.is_none());
}
