//! Tests that the agent starts with the environments and command lines of Istio's injection templates.

use std::fs;

use tempfile::TempDir;

use super::*;
use crate::config::{self, Config, environment::Environment};

/// The arguments and environment variables that an injection template gives to the container.
struct Template {
    arguments: Vec<&'static str>,
    variables: Vec<(&'static str, &'static str)>,
}

/// The configuration that results from a template, and all warnings.
struct Start {
    config: Config,
    warnings: Vec<String>,
}

const SIDECAR_ARGUMENTS: [&str; 9] = [
    "pilot-agent",
    "proxy",
    "sidecar",
    "--domain",
    "shop.svc.cluster.local",
    "--proxyLogLevel=warning",
    "--proxyComponentLogLevel=misc:error",
    "--log_output_level=default:info",
    "--log_as_json",
];

fn sidecar() -> Template {
    Template {
        arguments: SIDECAR_ARGUMENTS
            .into_iter()
            .chain(["--stsPort=15463", "--outlierLogPath=/dev/stdout"])
            .collect(),
        variables: vec![
            ("PILOT_CERT_PROVIDER", "istiod"),
            ("CA_ADDR", "istiod.istio-system.svc:15012"),
            ("POD_NAME", "cart-5d4f8-x7k2p"),
            ("POD_NAMESPACE", "shop"),
            ("INSTANCE_IP", "10.0.0.9"),
            ("SERVICE_ACCOUNT", "cart"),
            ("HOST_IP", "192.168.0.4"),
            ("ISTIO_CPU_LIMIT", "2"),
            ("PROXY_CONFIG", "{}\n"),
            (
                "ISTIO_META_POD_PORTS",
                "[\n    {\"name\":\"http\",\"containerPort\":8080,\"protocol\":\"TCP\"}\n]",
            ),
            ("ISTIO_META_APP_CONTAINERS", "cart"),
            ("GOMEMLIMIT", "1073741824"),
            ("ISTIO_META_CLUSTER_ID", "Kubernetes"),
            ("ISTIO_META_NODE_NAME", "node-1"),
            ("ISTIO_META_INTERCEPTION_MODE", "REDIRECT"),
            ("ISTIO_META_NETWORK", "network1"),
            ("ISTIO_META_WORKLOAD_NAME", "cart"),
            ("ISTIO_META_OWNER", "kubernetes://apis/apps/v1/namespaces/shop/deployments/cart"),
            ("ISTIO_META_MESH_ID", "cluster.local"),
            ("TRUST_DOMAIN", "cluster.local"),
            ("OTEL_RESOURCE_ATTRIBUTES", "k8s.pod.name=cart"),
            ("ISTIO_META_ISTIO_PROXY_SHA", "0123abcd"),
            ("KUBERNETES_SERVICE_HOST", "10.96.0.1"),
            ("KUBERNETES_SERVICE_PORT", "443"),
            ("PATH", "/usr/bin:/bin"),
        ],
    }
}

impl Template {
    fn with(mut self, more: &[(&'static str, &'static str)]) -> Self {
        self.variables.extend(more);
        self
    }

    fn start(&self) -> Start {
        let root = TempDir::new().expect("a directory");
        for (path, text) in [
            ("var/run/secrets/istio/root-cert.pem", ""),
            ("etc/istio/pod/labels", "app=\"cart\"\npod-template-hash=\"5d4f8\"\n"),
            ("etc/istio/pod/annotations", "sidecar.istio.io/status=\"{\\\"x\\\":1}\"\n"),
        ] {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("a folder")).expect("made");
            fs::write(path, text).expect("written");
        }
        let typed = parse(self.arguments.iter().map(|word| (*word).to_owned())).expect("a line");
        let Some(Command::Proxy(flags)) = &typed.cli.command else {
            panic!("{:?}", typed.cli.command);
        };
        typed.cli.log.options().expect("logging is set up");
        let env: Environment = self.variables.iter().copied().collect();
        let config = config::load(flags, &typed.cli.log, &env, root.path()).expect("it starts");
        let flags = typed.unknown_flags.iter().map(ToString::to_string);
        let values = config.warnings.iter().map(ToString::to_string);
        Start { warnings: flags.chain(values).collect(), config }
    }
}

#[test]
fn a_sidecar_starts_without_a_warning() {
    let start = sidecar().start();
    assert_eq!(start.warnings, [""; 0]);
    let config = start.config;
    assert!(config.ca_istiod.is_none());
    assert!(config.bootstrap.log_as_json);
    let envoy = config.envoy.expect("Envoy");
    assert_eq!(envoy.command.concurrency, Some(2));
}

#[test]
fn optional_settings_of_a_sidecar_are_accepted() {
    let start = sidecar()
        .with(&[
            ("REWRITE_PROBE_LEGACY_LOCALHOST_DESTINATION", "true"),
            ("GODEBUG", "fips140=only"),
            ("ISTIO_PROMETHEUS_ANNOTATIONS", "{\"scrape\":\"true\"}"),
            ("ISTIO_KUBE_APP_PROBERS", "{}"),
            ("ISTIO_META_DNS_CAPTURE", "true"),
        ])
        .start();
    let expected: [&str; 0] = [];
    assert_eq!(start.warnings, expected);
    let status = start.config.status.expect("a status port");
    assert_eq!((status.port, status.application_host.as_str()), (15020, "localhost"));
}

#[test]
fn a_gateway_starts_with_flags_as_words_of_their_own() {
    let mut template = sidecar().with(&[("ISTIO_META_REQUESTED_NETWORK_VIEW", "network1")]);
    template
        .variables
        .retain(|(name, _)| !["ISTIO_META_POD_PORTS", "ISTIO_META_APP_CONTAINERS"].contains(name));
    let template =
        template.with(&[("ISTIO_META_POD_PORTS", "[]"), ("ISTIO_META_APP_CONTAINERS", "")]);
    let arguments = "pilot-agent proxy router --domain shop.svc.cluster.local \
                     --proxyLogLevel warning --proxyComponentLogLevel misc:error \
                     --log_output_level default:info";
    let arguments = arguments.split_whitespace().collect();
    let start = Template { arguments, ..template }.start();
    assert_eq!(start.warnings, [""; 0]);
    assert!(start.config.bootstrap.node.id.starts_with("router~10.0.0.9~"));
}

#[test]
fn a_grpc_agent_starts_without_envoy() {
    let mut template = sidecar();
    template.arguments = SIDECAR_ARGUMENTS.to_vec();
    let start = template
        .with(&[
            ("ISTIO_META_GENERATOR", "grpc"),
            ("OUTPUT_CERTS", "/var/lib/istio/data"),
            ("ISTIO_META_DNS_CAPTURE", "false"),
            ("DISABLE_ENVOY", "true"),
        ])
        .start();
    assert_eq!(start.warnings, [] as [&str; 0]);
    assert!(start.config.envoy.is_none());
}
