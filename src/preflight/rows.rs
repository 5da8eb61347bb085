//! The rows of `docs/differences.md`, and the settings that each is about.

use crate::problem::Problem;

pub(super) const PAGE: &str = include_str!("../../docs/differences.md");

pub(super) const CONFIGURATION: &str = "configuration errors";
pub(super) const KEY: &str = "key of the workload";
pub(super) const NODE_TYPE: &str = "`proxy ztunnel`, `proxy agentgateway`";
pub(super) const PROBE_TIMEOUT: &str = "probe without `timeoutSeconds`";
pub(super) const THREADS: &str = "Envoy's threads, where nothing says how many";
pub(super) const UNKNOWN_FLAG: &str = "unknown flags of `proxy`";
pub(super) const WITHOUT_EFFECT: &str = "variables and flags without effect";
const MODE: &str = "an unknown interception mode";
const OPTIONS: &str = "ports, users, groups, interfaces, marks";
const OUTSIDE_NAMESPACE: &str = "`--cni-mode`, `--network-namespace`";
const REPEATED: &str = "repeated members of ProxyConfig";
const STATUS_PORT: &str = "a bad `status.sidecar.istio.io/port`";
const STATISTICS: &str = "statistics intervals";
const TEMPLATE: &str = "own bootstrap template";
const UNKNOWN_MEMBER: &str = "unknown members of ProxyConfig";
const WASM_PROXY: &str = "Wasm through a proxy, blocked addresses in URLs";

/// How the text of a problem begins, or its subject, and the row it belongs to; the first counts.
pub(super) const PROBLEMS: &[(&str, &str)] = &[
    ("unknown member", UNKNOWN_MEMBER),
    ("another member", REPEATED),
    ("member ", REPEATED),
    ("proxyBootstrapTemplatePath", TEMPLATE),
    ("ISTIO_BOOTSTRAP", TEMPLATE),
    ("status.sidecar.istio.io/port", STATUS_PORT),
    ("sidecar.istio.io/stats", STATISTICS),
    ("ECC_SIGNATURE_ALGORITHM", KEY),
    ("WORKLOAD_RSA_KEY_SIZE", KEY),
    (
        "ISTIO_META_LOAD_STATS_CONFIG_JSON",
        "JSON of `LOAD_STATS_CONFIG_JSON` that cannot be read",
    ),
    ("--istio-inbound-interception-mode", MODE),
    ("--", OPTIONS),
    ("an item of --", OPTIONS),
];

/// Variables, flags, annotations and members of ProxyConfig that have an effect of their own here.
pub(super) const SETTINGS: &[(&str, &str)] = &[
    ("BLOCKED_CIDRS_IN_WASM_FETCH", WASM_PROXY),
    ("DNS_FORWARD_TIMEOUT", "`DNS_FORWARD_TIMEOUT`"),
    (
        "EXIT_ON_ZERO_ACTIVE_CONNECTIONS",
        "wait for the last connection",
    ),
    ("FILE_MOUNTED_CERTS", "files of `default` vanish"),
    ("HTTPS_PROXY", WASM_PROXY),
    ("HTTP_PROXY", "metadata of AWS and Azure with `HTTP_PROXY`"),
    ("ISTIO_DUAL_STACK", "dual stack, IPv6 first"),
    (
        "ISTIO_META_DNS_CAPTURE",
        "a resolver that answers SERVFAIL, REFUSED or NOTIMP",
    ),
    (
        "ISTIO_WASM_MAX_BINARY_SIZE_BYTES",
        "body over `ISTIO_WASM_MAX_BINARY_SIZE_BYTES`",
    ),
    ("OUTPUT_CERTS", "`OUTPUT_CERTS`"),
    ("PROV_CERT", "expired token"),
    ("UNSAFE_PILOT_ENABLE_RUNTIME_ASSERTIONS", WITHOUT_EFFECT),
    ("WASM_HTTP_REQUEST_MAX_RETRIES", "further attempts"),
    ("WASM_HTTP_REQUEST_TIMEOUT", "`WASM_HTTP_REQUEST_TIMEOUT`"),
    ("WASM_INSECURE_REGISTRIES", "registry without TLS"),
    ("WASM_MODULE_EXPIRY", "unused modules"),
    ("--log_rotate", WITHOUT_EFFECT),
    ("--log_rotate_max_age", WITHOUT_EFFECT),
    ("--log_rotate_max_backups", WITHOUT_EFFECT),
    ("--log_rotate_max_size", WITHOUT_EFFECT),
    ("--log_stacktrace_level", WITHOUT_EFFECT),
    ("--vklog", WITHOUT_EFFECT),
    ("sidecar.istio.io/bootstrapOverride", TEMPLATE),
    ("sidecar.istio.io/statsEvictionInterval", STATISTICS),
    ("sidecar.istio.io/statsFlushInterval", STATISTICS),
    (
        "envoyMetricsServiceAddress",
        "`envoyMetricsServiceAddress` alone",
    ),
    ("privateKeyProvider.qat", KEY),
    ("readinessProbe.grpc", "`readinessProbe`, TCP and gRPC"),
    ("readinessProbe.httpGet.scheme", "`readinessProbe`, HTTPS"),
    ("readinessProbe.tcpSocket", "`readinessProbe`, TCP and gRPC"),
    ("terminationDrainDuration", "requests longer than the drain"),
    ("tracing.lightstep", "bootstrap file, Lightstep token"),
    (
        "tracing.stackdriver",
        "`stackdriver` tracing outside Google Cloud",
    ),
    ("--cleanup-only", "`istio-iptables --cleanup-only`"),
    ("--cni-mode", OUTSIDE_NAMESPACE),
    ("--dry-run", "`istio-iptables --dry-run`"),
    (
        "--force-apply",
        "`istio-iptables --force-apply` with equal rules",
    ),
    (
        "--native-nftables",
        "`istio-iptables --native-nftables`: another run",
    ),
    ("--network-namespace", OUTSIDE_NAMESPACE),
    ("--reconcile", "rules that differ from what is wanted"),
    ("--run-validation", "`istio-iptables --run-validation`"),
];

/// What the page says in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) pilot_agent: &'static str,
    pub(super) here: &'static str,
    /// Whom the difference can surprise; empty where no such case is known.
    pub(super) surprise: &'static str,
}

/// The row whose first cell is `name`.
pub(super) fn row(name: &str) -> Option<Row> {
    PAGE.lines().find_map(|line| {
        let rest = line.strip_prefix("| ")?.strip_prefix(name)?;
        let mut cells = rest.strip_prefix(" |")?.split('|').map(str::trim);
        let (pilot_agent, here) = (cells.next()?, cells.next()?);
        Some(Row {
            pilot_agent,
            here,
            surprise: cells.nth(1).unwrap_or_default(),
        })
    })
}

/// How pilot-agent and this agent differ by the row.
pub(super) fn sentence(name: &str) -> String {
    row(name).map_or_else(String::new, |row| {
        let Row {
            pilot_agent, here, ..
        } = row;
        format!("pilot-agent: {pilot_agent}; here: {here}")
    })
}

/// The row that a problem belongs to.
pub(super) fn of_problem(problem: &Problem) -> &'static str {
    let belongs = |start: &str| {
        problem.expected.is_empty() && problem.found.starts_with(start)
            || problem.subject.starts_with(start)
    };
    let found = PROBLEMS.iter().find(|(start, _)| belongs(start));
    found.map_or(CONFIGURATION, |(_, row)| row)
}
