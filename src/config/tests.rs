//! Configurations read from complete sets of inputs.

use std::fs;
use std::time::Duration;

use serde_json::json;
use tempfile::TempDir;

use super::*;
use crate::ca::key::{Encoding, KeyType};
use crate::envoy::machine::Drain;
use crate::istiod::{Security, tls};

pub(super) struct Machine {
    root: TempDir,
    variables: Vec<(&'static str, &'static str)>,
}

/// A pod as the injector makes it.
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
    fn file(&self, path: &str, text: &str) {
        let path = self.root.path().join(path);
        fs::create_dir_all(path.parent().expect("a directory")).expect("made");
        fs::write(path, text).expect("written");
    }

    pub(super) fn load(&self, flags: &str) -> Result<Config, Vec<Problem>> {
        self.load_beside(flags, interfaces::of_this_machine())
    }

    fn load_beside(
        &self,
        flags: &str,
        interfaces: std::io::Result<Vec<Interface>>,
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
        problems
            .into_iter()
            .map(|problem| problem.subject)
            .collect()
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
fn another_authority_has_its_own_connection() {
    let config = machine(&[
        ("CA_ADDR", "ca.example:15010"),
        ("ISTIOD_SAN", "istiod.example"),
    ])
    .config();
    let ca = config.ca_istiod.expect("a second connection");
    assert_eq!(ca.address, "ca.example:15010");
    assert!(matches!(ca.security, Security::Plaintext));
    assert_eq!(tls(&config.istiod).server_name, "istiod.example");
}

#[test]
fn headers_of_one_use_split_the_connection_and_are_lower_case() {
    let config = machine(&[("XDS_HEADER_X-Team", "a=b")]).config();
    let (name, value) = &config.istiod.metadata[1];
    assert_eq!((name.as_str(), value.as_bytes()), ("x-team", &b"a=b"[..]));
    assert_eq!(
        config
            .ca_istiod
            .expect("a second connection")
            .metadata
            .len(),
        1
    );
}

#[test]
fn localhost_is_expected_to_have_istiods_name() {
    let config = machine(&[
        ("PROXY_CONFIG", "discoveryAddress: localhost:15012"),
        ("CA_ADDR", ""),
    ])
    .config();
    assert_eq!(tls(&config.istiod).server_name, "istiod.istio-system.svc");
    assert!(config.ca_istiod.is_none());
}

#[test]
fn plaintext_is_per_policy_for_discovery() {
    let plaintext = "{controlPlaneAuthPolicy: NONE, discoveryAddress: 'a:15010'}";
    let config = machine(&[("PROXY_CONFIG", plaintext), ("CA_ADDR", "a:15010")]).config();
    assert!(matches!(config.istiod.security, Security::Plaintext));
    assert!(config.ca_istiod.is_none());
    assert_eq!(config.bootstrap.node.istiod_san, None);
}

#[test]
fn roots_are_the_first_that_apply() {
    use tls::Roots::{File, System};
    let file = |path: &str| File(path.into());
    let mounted = "./etc/certs/root-cert.pem";
    for (variables, xds, ca) in [
        (
            &[("XDS_ROOT_CA", "SYSTEM"), ("CA_ROOT_CA", "own.pem")][..],
            System,
            file("own.pem"),
        ),
        (
            &[("PILOT_CERT_PROVIDER", "custom")],
            file(mounted),
            file(mounted),
        ),
        (
            &[("PROV_CERT", "prov")],
            file(mounted),
            file("prov/root-cert.pem"),
        ),
        (
            &[],
            file(mounted),
            file("./var/run/secrets/istio/root-cert.pem"),
        ),
    ] {
        let machine = machine(variables);
        for path in ["own.pem", "etc/certs/root-cert.pem", "prov/root-cert.pem"] {
            machine.file(path, "");
        }
        let config = machine.config();
        let ca_istiod = config.ca_istiod.as_ref().unwrap_or(&config.istiod);
        assert_eq!(
            (&tls(&config.istiod).roots, &tls(ca_istiod).roots),
            (&xds, &ca)
        );
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
fn problems_of_the_authority_wait_where_another_process_may_serve_secrets() {
    let bad = ("CA_ROOT_CA", "gone.pem");
    assert_eq!(machine(&[bad]).subjects().len(), 1);
    let machine = machine(&[bad]);
    machine.file("var/run/secrets/workload-spiffe-uds/socket", "");
    let problems = machine.config().authority_problems;
    assert_eq!(problems.len(), 1);
    assert_eq!(problems[0].found, "gone.pem");
}

#[test]
fn probes_come_from_an_address_of_the_applications_family() {
    for (address, origin) in [("10.0.0.9", "127.0.0.6"), ("fd00::9", "::6")] {
        // The pod has both families.
        let interfaces = ["10.0.0.9", "fd00::9"].map(|address| Interface {
            name: "eth0".to_owned(),
            address: address.parse().expect("an address"),
        });
        let machine = machine(&[("INSTANCE_IP", address)]);
        let config = machine.load_beside("sidecar", Ok(interfaces.into()));
        let config = config.expect("a good configuration");
        let status = config.status.expect("a status port");
        assert_eq!(status.application, address);
        assert_eq!(status.probes.source.to_string(), origin);
    }
}

#[test]
fn every_problem_is_reported_at_once() {
    let machine = machine(&[
        ("PILOT_CERT_PROVIDER", "none"),
        ("CA_ADDR", "nowhere"),
        ("ECC_SIGNATURE_ALGORITHM", "RSA"),
        ("SECRET_GRACE_PERIOD_RATIO", "1.5"),
        ("WORKLOAD_IDENTITY_SOCKET_FILE", "a/b"),
        (
            "PROXY_CONFIG",
            "{statusPort: x, drainDuration: 45, meshId: 5}",
        ),
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
        "SECRET_GRACE_PERIOD_RATIO",
    ] {
        assert!(
            subjects.iter().any(|s| s == subject),
            "{subject} in {subjects:?}"
        );
    }
}

#[test]
fn a_missing_root_file_is_a_problem_that_names_it() {
    let problems = machine(&[("XDS_ROOT_CA", "gone.pem")])
        .load("sidecar")
        .expect_err("a problem");
    assert_eq!(problems.len(), 1);
    assert_eq!(problems[0].found, "gone.pem");
}

#[test]
fn a_wrong_value_with_a_default_is_only_a_warning() {
    let config = machine(&[("SECRET_TTL", "1 day"), ("ISTIO_CPU_LIMIT", "")]).config();
    let subjects: Vec<_> = config.warnings.iter().map(|w| w.subject.as_str()).collect();
    assert_eq!(subjects, ["ISTIO_CPU_LIMIT", "SECRET_TTL"]);
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
    assert_eq!(envoy.admin_port, 15_999);
}

#[test]
fn keys_are_ecdsa_unless_rsa_is_configured() {
    for (variables, key) in [
        (&[][..], KeyType::P256),
        (&[("WORKLOAD_RSA_KEY_SIZE", "4096")], KeyType::Rsa(4096)),
        (
            &[("ECC_SIGNATURE_ALGORITHM", "ECDSA"), ("ECC_CURVE", "P384")],
            KeyType::P384,
        ),
        (
            &[
                ("ECC_SIGNATURE_ALGORITHM", "ECDSA"),
                ("WORKLOAD_RSA_KEY_SIZE", "2048"),
            ],
            KeyType::P256,
        ),
    ] {
        assert_eq!(machine(variables).config().secrets.renewal.key_type, key);
    }
}

#[test]
fn flags_reach_envoy_and_may_switch_it_off() {
    let config = machine(&[])
        .load("router --concurrency 3 --proxyLogLevel info,a:b:c")
        .expect("good");
    let envoy = config.envoy.expect("Envoy");
    assert_eq!(envoy.command.concurrency, Some(3));
    assert_eq!(envoy.command.log.level.as_deref(), Some("info"));
    assert!(!envoy.drain_inbound_only);
    let subjects: Vec<_> = config.warnings.iter().map(|w| w.subject.as_str()).collect();
    assert_eq!(subjects, ["--concurrency", "--proxyLogLevel"]);
    assert!(
        machine(&[("DISABLE_ENVOY", "true")])
            .config()
            .envoy
            .is_none()
    );
    let problems = machine(&[])
        .load("sidecar --templateFile x")
        .expect_err("refused");
    assert_eq!(
        problems[0].subject,
        "proxyBootstrapTemplatePath of --templateFile"
    );
}

#[test]
fn a_drain_ends_in_time_or_with_the_last_connection_and_before_the_pods_grace_period() {
    let seconds = Duration::from_secs;
    for (variables, at_least, at_most) in [
        (&[][..], 5, 3600),
        (&[("TERMINATION_GRACE_PERIOD_SECONDS", "120")], 5, 115),
        (&[("TERMINATION_GRACE_PERIOD_SECONDS", "6")], 5, 3),
        (
            &[
                ("TERMINATION_GRACE_PERIOD_SECONDS", "30"),
                ("ISTIO_AGENT_DRAIN_CEILING", "2m"),
                ("MINIMUM_DRAIN_DURATION", "10s"),
            ],
            10,
            120,
        ),
    ] {
        let until_idle = [("EXIT_ON_ZERO_ACTIVE_CONNECTIONS", "true")];
        let config = machine(&[&until_idle, variables].concat()).config();
        let expected = Drain::UntilIdle {
            at_least: seconds(at_least),
            at_most: seconds(at_most),
        };
        let envoy = config.envoy.expect("Envoy");
        assert_eq!(envoy.limits.drain, expected, "{variables:?}");
        assert_eq!(envoy.internal_ports, [15021, 15090]);
        assert_eq!(envoy.restarts, None);
    }
    let set = "ISTIO_AGENT_LAST_REQUESTS";
    let grace = "TERMINATION_GRACE_PERIOD_SECONDS";
    for (variables, outlast) in [
        (&[][..], 10),
        (&[(grace, "60")], 50),
        (&[(grace, "6")], 0),
        (&[(set, "2m")], 120),
        (&[(set, "2m"), (grace, "60")], 50),
        (&[(set, "3s"), (grace, "60")], 3),
        (&[(set, "0s"), (grace, "60")], 0),
    ] {
        let config = machine(variables).config();
        let counts = config.bootstrap.stats.of_requests.len();
        let limits = config.envoy.expect("Envoy").limits;
        assert_eq!(limits.long_requests, seconds(outlast), "{variables:?}");
        assert_eq!(counts > 0, outlast > 0, "{variables:?}");
    }
    let config = machine(&[("ISTIO_AGENT_ENVOY_RESTARTS", "often")]).config();
    let envoy = config.envoy.expect("Envoy");
    assert_eq!(envoy.limits.drain, Drain::For(seconds(5)));
    assert_eq!(config.warnings[0].subject, "ISTIO_AGENT_ENVOY_RESTARTS");
}

#[test]
fn hot_restart_is_off_by_default_and_an_old_envoy_outlives_its_drain() {
    assert!(
        machine(&[])
            .config()
            .envoy
            .expect("Envoy")
            .hot_restart
            .is_none()
    );
    let seconds = Duration::from_secs;
    for (time, drain, expected, warnings) in [
        ("60s", "45s", 60, 0),
        ("3s", "1s", 3, 0),
        ("45s", "45s", 46, 1),
        ("1s", "45s", 46, 1),
    ] {
        let proxy_config = format!("{{drainDuration: {drain}}}");
        let machine = machine(&[
            ("ISTIO_AGENT_HOT_RESTART", "true"),
            ("ISTIO_AGENT_PARENT_SHUTDOWN_TIME", time),
            ("PROXY_CONFIG", proxy_config.leak()),
            ("ISTIO_BOOTSTRAP_OVERRIDE", "in/override.json"),
        ]);
        machine.file("in/override.json", "{}");
        let config = machine.config();
        let limits = config.envoy.expect("Envoy").hot_restart.expect("on");
        assert_eq!(limits.parent_shutdown, seconds(expected));
        assert_eq!(config.warnings.len(), warnings, "{:?}", config.warnings);
        let inputs: Vec<_> = config.inputs.iter().map(|path| path.display()).collect();
        let inputs: Vec<_> = inputs.iter().map(ToString::to_string).collect();
        assert_eq!(
            inputs,
            [
                "./etc/istio/pod/labels",
                "./etc/istio/pod/annotations",
                "./etc/istio/config/mesh",
                "/usr/local/bin/envoy",
                "in/override.json",
            ]
        );
    }
}

#[test]
fn late_annotations_win_over_checked_values() {
    let machine = machine(&[("PROXY_CONFIG", "{statusPort: 15099}")]);
    let annotations = "sidecar.istio.io/discoveryAddress=\"a_b:15012\"\n\
                       status.sidecar.istio.io/port=\"0\"\n";
    machine.file("etc/istio/pod/annotations", annotations);
    let config = machine.config();
    assert_eq!(config.istiod.address, "a_b:15012");
    assert_eq!(config.bootstrap.agent_port, None);
    let document = config.bootstrap.node.proxy_config.document();
    assert!(!document.contains_key("statusPort"), "{document:?}");
    let env = machine.variables.iter().copied().collect();
    let of_command = || status_port(&env, machine.root.path());
    assert_eq!(of_command(), None);
    let bad = "status.sidecar.istio.io/port=\"http\"\n";
    machine.file("etc/istio/pod/annotations", bad);
    let config = machine.config();
    assert_eq!(config.bootstrap.agent_port, Some(15_099));
    assert_eq!(of_command(), Some(15_099));
    assert_eq!(config.warnings.len(), 1);
}

#[test]
fn a_mesh_file_is_read_for_its_default_config_and_refused_when_it_is_broken() {
    let machine = machine(&[]);
    machine.file(
        "etc/istio/config/mesh",
        "connectTimeout: 2h\ndefaultConfig:\n  statusPort: x\n",
    );
    let mesh = "./etc/istio/config/mesh";
    let expected = [
        format!("connectTimeout of {mesh} line 1"),
        format!("statusPort of defaultConfig of {mesh} line 3"),
    ];
    assert_eq!(machine.subjects(), expected);
}

#[test]
fn the_flag_names_the_service_cluster_only_where_the_configuration_empties_it() {
    for (document, expected) in [
        ("{}", json!("istio-proxy")),
        ("{serviceCluster: ''}", json!("from-flag")),
        ("{serviceCluster: own}", json!("own")),
        ("{tracingServiceName: 0}", json!(null)),
    ] {
        let config = machine(&[("PROXY_CONFIG", document)])
            .load("sidecar --serviceCluster from-flag")
            .expect("good");
        let canonical = config.bootstrap.node.proxy_config.document();
        let found = canonical.get("serviceCluster");
        assert_eq!(found.unwrap_or(&json!(null)), &expected, "{document}");
    }
}

#[test]
fn a_custom_bootstrap_is_passed_to_envoy() {
    let machine = machine(&[
        ("PROXY_CONFIG", "{customConfigFile: own/envoy.json}"),
        ("ISTIO_BOOTSTRAP", "not-looked-at.tmpl"),
    ]);
    let problem = &machine.load("sidecar").expect_err("missing")[0];
    assert_eq!(problem.subject, "customConfigFile of PROXY_CONFIG line 1");
    machine.file("own/envoy.json", "{}");
    let config = machine.config();
    assert!(config.has_custom_bootstrap);
    let envoy = config.envoy.expect("Envoy");
    assert_eq!(envoy.command.bootstrap, Path::new("own/envoy.json"));
}

#[test]
fn istios_own_template_is_recognised_and_no_other() {
    let path = "var/lib/istio/envoy/envoy_bootstrap_tmpl.json";
    for prefix in ["", "./", "/"] {
        let config = machine(&[]).load(&format!("sidecar --templateFile {prefix}{path}"));
        assert!(!config.expect("good").has_custom_bootstrap);
    }
    for template in ["../var/lib/istio/envoy/envoy_bootstrap_tmpl.json", "x"] {
        let config = machine(&[]).load(&format!("sidecar --templateFile {template}"));
        assert_eq!(config.expect_err("refused").len(), 1, "{template}");
    }
}

#[test]
fn metadata_of_the_wrong_type_is_a_problem() {
    let machine = machine(&[
        ("ISTIO_META_DNS_CAPTURE", "yes"),
        ("ISTIO_METAJSON_X", r#"{"NETWORK": 7}"#),
        ("ENVOY_SECURE_METRICS_PORT", "70000"),
        ("ISTIO_META_LOAD_STATS_CONFIG_JSON", "no"),
        ("PROXY_CONFIG", "statsdUdpAddress: nowhere"),
    ]);
    let subjects = machine.subjects();
    for subject in [
        "DNS_CAPTURE of the node metadata",
        "NETWORK of the node metadata",
        "ENVOY_SECURE_METRICS_PORT",
        "ISTIO_META_LOAD_STATS_CONFIG_JSON",
    ] {
        assert!(
            subjects.iter().any(|s| s == subject),
            "{subject} in {subjects:?}"
        );
    }
    assert_eq!(subjects.len(), 5, "{subjects:?}");
}

#[test]
fn a_cluster_is_named_after_the_first_known_name() {
    let labels =
        r#"{"app": "a", "app.kubernetes.io/name": "n", "service.istio.io/canonical-name": "c"}"#;
    let only = "tracingServiceName: CANONICAL_NAME_ONLY";
    let both = "tracingServiceName: CANONICAL_NAME_AND_NAMESPACE";
    for (labels, workload, proxy_config, expected) in [
        (labels, "w", "", "a.shop"),
        ("{}", "w", "", "w.shop"),
        ("{}", "", "", "istio-proxy.shop"),
        (labels, "w", "serviceCluster: mine", "mine"),
        (labels, "w", only, "c"),
        (labels, "w", both, "c.shop"),
        ("{}", "w", both, "w.shop"),
        ("{}", "", both, "istio-proxy.shop"),
        ("{}", "", only, "istio-proxy.shop"),
    ] {
        let config = machine(&[
            ("ISTIO_METAJSON_LABELS", labels),
            ("ISTIO_META_WORKLOAD_NAME", workload),
            ("PROXY_CONFIG", proxy_config),
        ])
        .config();
        let found = config.bootstrap.node.cluster;
        assert_eq!(found, expected, "{labels} {workload} {proxy_config}");
    }
}

#[test]
fn the_override_of_the_bootstrap_is_read_or_left_out() {
    let variables = [
        ("ISTIO_BOOTSTRAP_OVERRIDE", "over.yaml"),
        ("HOST_IP", "fd00::1"),
    ];
    let machine = machine(&variables);
    machine.file("over.yaml", "admin: {profile_path: '$(HOST_IP):1'}\n");
    let command = machine.config().envoy.expect("Envoy").command;
    let expected = r#"{"admin":{"profile_path":"[fd00::1]:1"}}"#;
    assert_eq!(command.override_json.as_deref(), Some(expected));
    machine.file("over.yaml", "- 1\n");
    let config = machine.config();
    assert_eq!(config.envoy.expect("Envoy").command.override_json, None);
    assert_eq!(config.warnings[0].subject, "ISTIO_BOOTSTRAP_OVERRIDE");
}

#[test]
fn an_invalid_statistics_annotation_is_left_out() {
    for (annotation, value, good) in [
        ("statsFlushInterval", "10s", true),
        ("statsFlushInterval", "5m", false),
        ("statsFlushInterval", "-1s", false),
        ("statsEvictionInterval", "10s", true),
        ("statsEvictionInterval", "11s", false),
        ("statsHistogramBuckets", "[1]", false),
    ] {
        let machine = machine(&[]);
        let line = format!("sidecar.istio.io/{annotation}={value:?}\n");
        machine.file("etc/istio/pod/annotations", &line);
        let config = machine.config();
        assert_eq!(config.warnings.is_empty(), good, "{annotation}={value}");
        let stats = config.bootstrap.stats;
        let taken = stats.flush.or(stats.eviction).is_some();
        assert_eq!(taken, good, "{annotation}={value}");
    }
}

#[test]
fn interfaces_may_be_left_out_of_the_address_list() {
    let machine = machine(&[]);
    let annotation = "traffic.sidecar.istio.io/excludeInterfaces=\"net9,none9\"\n";
    machine.file("etc/istio/pod/annotations", annotation);
    let subjects: Vec<_> = machine
        .config()
        .warnings
        .into_iter()
        .map(|w| w.found)
        .collect();
    assert_eq!(subjects, ["net9", "none9"]);
}

#[test]
fn the_grpc_bootstrap_may_be_switched_off() {
    assert!(machine(&[]).config().grpc.is_some());
    assert!(
        machine(&[("GRPC_XDS_BOOTSTRAP", "")])
            .config()
            .grpc
            .is_none()
    );
}

#[test]
fn dns_is_answered_where_it_is_captured_or_enabled() {
    let capture = ("ISTIO_META_DNS_CAPTURE", "true");
    let server = ("ISTIO_META_ENABLE_DNS_SERVER", "true");
    for (variables, kind, expected) in [
        (&[][..], "sidecar", false),
        (&[capture], "sidecar", true),
        (&[capture], "router", false),
        (&[server], "router", true),
    ] {
        let config = machine(variables).load(kind).expect("a good configuration");
        assert_eq!(config.dns.is_some(), expected, "{variables:?} {kind}");
    }
}

#[test]
fn dns_follows_the_pods_resolvers_and_runs_without_them() {
    let settings = [
        ("ISTIO_META_DNS_CAPTURE", "true"),
        ("ISTIO_AGENT_RESOLV_CONF", "resolv.conf"),
        ("DNS_FORWARD_TIMEOUT", "2s"),
    ];
    let machine = machine(&settings);
    let dns = machine.config();
    assert_eq!(dns.warnings.len(), 1, "{:?}", dns.warnings);
    let dns = dns.dns.expect("DNS");
    assert_eq!(dns.server.addresses, ["localhost:15053"]);
    machine.file(
        "resolv.conf",
        "nameserver fd00::1\nsearch shop.svc.cluster.local\n",
    );
    let dns = machine.config().dns.expect("DNS");
    assert_eq!(dns.server.addresses, ["[::1]:15053"]);
    assert_eq!(
        dns.forwarder.own_addresses,
        ["[::1]:15053".parse().unwrap()]
    );
    assert_eq!(dns.forwarder.timeout, Duration::from_secs(2));
    let search = ["shop.svc.cluster.local".to_owned()];
    let search_domains = crate::dns::SearchDomains::new("shop", "shop.svc.cluster.local", &search);
    assert_eq!(dns.server.search_domains, search_domains);
    assert_eq!(dns.server.policy.ttl, 30);
}

#[test]
fn answers_of_resolvers_are_cached_only_on_request() {
    let capture = ("ISTIO_META_DNS_CAPTURE", "true");
    let cache = |more: &[_]| {
        let settings = [&[capture], more].concat();
        machine(&settings)
            .config()
            .dns
            .expect("DNS")
            .forwarder
            .cache
    };
    let off = cache(&[]);
    let times = [off.max_ttl, off.max_negative_ttl, off.max_stale];
    assert_eq!(times, [Duration::ZERO; 3]);
    let on = cache(&[
        ("ISTIO_AGENT_DNS_CACHE_MAX_TTL", "10s"),
        ("ISTIO_AGENT_DNS_CACHE_MAX_NEGATIVE_TTL", "5s"),
        ("ISTIO_AGENT_DNS_CACHE_MAX_STALE", "5m"),
        ("ISTIO_AGENT_DNS_CACHE_MAX_ENTRIES", "7"),
        ("ISTIO_AGENT_DNS_CACHE_MAX_BYTES", "4096"),
    ]);
    let expected = crate::dns::forward::cache::Config {
        max_entries: 7,
        max_bytes: 4096,
        max_ttl: Duration::from_secs(10),
        max_negative_ttl: Duration::from_secs(5),
        max_stale: Duration::from_secs(300),
    };
    assert_eq!(on, expected);
}

#[test]
fn envoy_runs_as_the_exempt_user_where_the_agent_replaces_the_resolver() {
    let settings = [
        ("ISTIO_META_DNS_CAPTURE", "true"),
        ("DNS_PROXY_ADDR", "127.0.0.1:53"),
        ("ISTIO_AGENT_RESOLV_CONF", "resolv.conf"),
    ];
    let config = machine(&settings).config();
    let dns = config.dns.expect("DNS").server;
    let user = config.envoy.expect("Envoy").command.user;
    // Only root may use the privileged port; for other users the default applies.
    let expected = match rustix::process::getuid().is_root() {
        true => ("127.0.0.1:53", true, Some(1337)),
        false => ("localhost:15053", false, None),
    };
    let stands_in = dns.policy.forward_before_first_table;
    assert_eq!((&*dns.addresses[0], stands_in, user), expected);
    let config = machine(&[]).config();
    assert_eq!(config.envoy.expect("Envoy").command.user, None);
}

#[test]
fn certificates_are_kept_written_and_encoded_as_configured() {
    let config = machine(&[]).config();
    let secrets = &config.secrets;
    assert_eq!(secrets.renewal.encoding, Encoding::Traditional);
    assert!(secrets.renewal.cache.is_none() && secrets.output.is_none() && !secrets.mesh_roots);
    assert!(config.google_token.is_none() && !config.may_dump_core);
    for (in_kubernetes, readable_by_all) in [("", false), ("10.0.0.1", true)] {
        let config = machine(&[
            ("OUTPUT_CERTS", "./certs"),
            ("KUBERNETES_SERVICE_HOST", in_kubernetes),
            ("PKCS8_KEY", "true"),
            ("PROXY_CONFIG_XDS_AGENT", "true"),
            ("ISTIO_AGENT_KEEP_CERTS", "/run/keep"),
            ("CREDENTIAL_FETCHER_TYPE", "GoogleComputeEngine"),
            ("TRUST_DOMAIN", "td"),
        ])
        .config();
        let secrets = config.secrets;
        let output = secrets.output.expect("is asked for");
        assert_eq!(output.directory, Path::new("./certs"));
        assert_eq!(output.readable_by_all, readable_by_all);
        assert_eq!(secrets.renewal.encoding, Encoding::Pkcs8);
        assert_eq!(
            secrets.renewal.cache.as_deref(),
            Some(Path::new("/run/keep"))
        );
        assert!(secrets.mesh_roots);
        assert_eq!(config.google_token.expect("is asked for").audience, "td");
    }
}

#[test]
fn unknown_authorities_fetchers_and_policies_are_reported() {
    for (name, value) in [
        ("CA_PROVIDER", "GoogleCA"),
        ("CA_ADDR", "meshca.googleapis.com:443"),
        ("CREDENTIAL_FETCHER_TYPE", "jwt"),
    ] {
        assert_eq!(machine(&[(name, value)]).subjects(), [name]);
    }
    let config = machine(&[("COMPLIANCE_POLICY", "fips")]).config();
    assert_eq!(tls(&config.istiod).policy, Policy::None);
    let found: Vec<_> = config
        .warnings
        .iter()
        .map(|it| it.subject.as_str())
        .collect();
    assert_eq!(found, ["COMPLIANCE_POLICY"]);
    let config = machine(&[("COMPLIANCE_POLICY", "pqc")]).config();
    assert_eq!(tls(&config.istiod).policy, Policy::Pqc);
}
