//! The table of deliberate differences from pilot-agent that depend on a pod's settings. `preflight` reports its rows
//! for pods by their selectors. `docs/differences.md` has these rows, and those that hold for all pods.
//!
//! Each text is a sentence without capital and full stop, because `preflight` joins texts by semicolons. Texts may be
//! edited freely; ids and levels may not, because scripts depend on them.

use crate::problem::Code;
use crate::problem::Level::{self, Ok, Warning};

/// A row of the table.
#[derive(Clone, Copy, Debug)]
pub struct Difference {
    /// The unique and stable name of the row, because scripts search reports for it.
    pub id: &'static str,
    /// A warning if the difference can surprise an operator.
    pub level: Level,
    pub selectors: &'static [Selector],
    pub pilot_agent: &'static str,
    pub this_agent: &'static str,
    /// The advice for an operator, if there is one.
    pub advice: &'static str,
}

/// A property of a pod that a row is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Selector {
    /// A variable, flag, annotation or member of ProxyConfig with a value other than 0 and false, or `NAME=VALUE` for
    /// one value. Several ones, separated by spaces, must all have such a value.
    Set(&'static str),
    /// A problem with this code. Other problems belong to the row of `SETTING_INVALID`.
    Problem(Code),
    ProbeWithoutTimeout,
    UnknownFlag,
    VariableWithoutEffect,
}

macro_rules! differences {
    ($($id:ident: $level:ident, [$($selector:expr),*],
       $pilot_agent:literal, $this_agent:literal $(, $advice:literal)?;)*) => {
        pub const TABLE: &[Difference] = &[$(Difference {
            id: stringify!($id),
            level: $level,
            selectors: &[$($selector),*],
            pilot_agent: $pilot_agent,
            this_agent: $this_agent,
            advice: concat!($($advice)?),
        },)*];
    };
}

use Selector::{ProbeWithoutTimeout, Problem, Set, UnknownFlag, VariableWithoutEffect};

differences! {
    WORKLOAD_KEY: Warning, [Problem(Code::WorkloadKeySize)], "pilot-agent creates an RSA key of 2048 bits or of `WORKLOAD_RSA_KEY_SIZE`, unless `ECC_SIGNATURE_ALGORITHM` is set", "this agent creates an ECDSA P-256 key. It creates an RSA key if `WORKLOAD_RSA_KEY_SIZE` or `privateKeyProvider.qat` is set, or once the authority has rejected an ECDSA key that no setting asks for, unless the authority rejects RSA keys as well", "peers that verify RSA keys only reject the certificate: set `WORKLOAD_RSA_KEY_SIZE`";
    OUTPUT_CERTS: Ok, [Set("OUTPUT_CERTS")], "pilot-agent writes and renames the files of `OUTPUT_CERTS` one after the other, and only while an SDS client asks for secrets", "this agent writes all files before it renames them, and does so on every rotation";
    EXPIRED_TOKEN: Ok, [Set("PROV_CERT")], "pilot-agent sends an expired token", "this agent does not send an expired token while the client certificate is in use";
    CLOUD_METADATA_PROXY: Ok, [Set("HTTP_PROXY")], "pilot-agent sends requests for the metadata of AWS and Azure through the proxy in `HTTP_PROXY`", "this agent sends them directly, as both agents do for Google";
    IN_FLIGHT_REQUESTS: Warning, [Set("terminationDrainDuration")], "pilot-agent cuts requests that take longer than `terminationDrainDuration`", "this agent waits for them until 5 s before the end of the grace period. If it does not know the grace period, it waits for at most 10 s, and for 25 s together with the drain. `ISTIO_AGENT_LAST_REQUESTS=0s` turns the wait off", "pods with long requests end later, within the grace period";
    LAST_CONNECTION: Ok, [Set("EXIT_ON_ZERO_ACTIVE_CONNECTIONS")], "with `EXIT_ON_ZERO_ACTIVE_CONNECTIONS`, pilot-agent waits for the last connection without limit, and does not recognise Envoy's probe and metrics listeners by their IPv6 names", "this agent waits with a limit, and recognises IPv6 names";
    SDS_FILES_VANISH: Ok, [Set("FILE_MOUNTED_CERTS")], "if mounted certificate files vanish, pilot-agent requests another certificate from the authority. With `FILE_MOUNTED_CERTS` it ends the stream instead", "this agent keeps the last good pair";
    CAPTURE_OPTIONS: Warning, [Problem(Code::CaptureOptionInvalid), Problem(Code::CaptureOptionReplaced)], "pilot-agent passes ports, users, groups, interfaces and marks to iptables without a check", "this agent checks them, and names every problem before it builds a rule", "values that iptables accepts and Istio does not document are errors";
    CAPTURE_CNI_FLAGS: Ok, [Set("--cni-mode"), Set("--network-namespace")], "pilot-agent has `--cni-mode` and `--network-namespace` for the CNI plugin, which calls the same code", "this agent accepts both without effect";
    CAPTURE_VALIDATION: Ok, [Set("--run-validation")], "pilot-agent's `--run-validation` does not open another connection after one that hangs", "this agent opens another connection each second";
    CAPTURE_MODE: Ok, [Problem(Code::CaptureModeUnknown)], "pilot-agent treats an unknown `--istio-inbound-interception-mode` as REDIRECT", "this agent does the same, with a warning";
    CAPTURE_RECONCILE: Ok, [Set("--reconcile")], "pilot-agent fails if the existing rules differ from the wanted ones. With `--reconcile` it replaces them, and drops traffic meanwhile", "this agent always replaces rules that differ, each table at once";
    CAPTURE_CLEANUP: Warning, [Set("--cleanup-only")], "with `--cleanup-only`, pilot-agent removes the rules that the same arguments set up, ignores errors, and leaves the routes", "this agent removes all rules of Istio by any back end, DNS rules since Istio 1.8, and the routes. This agent reports errors, except for IPv6 where Istio has no rules", "rules of another Istio are removed too";
    CAPTURE_FORCE: Ok, [Set("--force-apply")], "pilot-agent's `--force-apply` fails if the rules are equal", "this agent sets up equal rules again";
    NFTABLES_ANOTHER_RUN: Ok, [Set("--native-nftables")], "with `--native-nftables`, another run of pilot-agent leaves the rules of tables that the run does not need", "this agent replaces all tables in one transaction";
    NFTABLES_DRY_RUN: Ok, [Set("--native-nftables --dry-run")], "pilot-agent applies the rules of `--native-nftables` even with `--dry-run`", "this agent prints the rules";
    NFTABLES_WITHOUT_IPV6: Ok, [Set("--native-nftables")], "in a pod without IPv6, pilot-agent's rules of `--native-nftables` capture IPv6 too if they do not name an address", "this agent does not capture IPv6 then, as with iptables";
    NFTABLES_DNS: Ok, [Set("--native-nftables")], "in a pod without IPv6, pilot-agent's `--native-nftables` fails if all DNS servers have IPv6 addresses", "this agent captures no DNS then";
    CAPTURE_VERIFY: Ok, [Set("--verify")], "pilot-agent does not have `--verify`", "`--verify` of this agent says how the live rules differ. It exits with 3 if a rule is missing, extra or misplaced, or if a rule of others comes first";
    CAPTURE_ADMIN_PORT: Ok, [Set("--protect-admin")], "pilot-agent does not have `--protect-admin`", "`--protect-admin` of this agent resets connections of applications to Envoy's admin port";
    CAPTURE_OWNER_GROUPS: Ok, [Set("ISTIO_OUTBOUND_OWNER_GROUPS")], "pilot-agent accepts at most 64 groups in `ISTIO_OUTBOUND_OWNER_GROUPS`", "this agent accepts as many as iptables does";
    CAPTURE_DRY_RUN: Ok, [Set("--dry-run")], "with `--dry-run`, pilot-agent writes the rules to its log and to `DRY_RUN_FILE_PATH`", "this agent writes them to standard output, and replaces the file as a whole";
    UNKNOWN_FLAG: Ok, [UnknownFlag], "pilot-agent silently ignores an unknown flag of `proxy` and the word after it", "this agent ignores the flag, names it in the log with the nearest known flag, and keeps the node type";
    VARIABLE_WITHOUT_EFFECT: Ok, [VariableWithoutEffect], "some variables of pilot-agent set Go's runtime, Google's credentials or limits of sockets", "this agent accepts them without effect; [settings](settings.md) has the reasons";
    FLAG_WITHOUT_EFFECT: Ok, [Set("--log_stacktrace_level"), Set("--vklog"), Set("UNSAFE_PILOT_ENABLE_RUNTIME_ASSERTIONS"), Set("--log_rotate"), Set("--log_rotate_max_age"), Set("--log_rotate_max_backups"), Set("--log_rotate_max_size")], "these settings of pilot-agent, some of them of older releases, set stack traces, further logs, internal assertions and rotated log files", "this agent accepts them without effect";
    BOOTSTRAP_TEMPLATE: Warning, [Problem(Code::BootstrapTemplateSet)], "pilot-agent executes a custom bootstrap template in Go's template language (`proxyBootstrapTemplatePath`, `ISTIO_BOOTSTRAP`)", "this agent rejects it by name and does not start", "pods with a custom template do not start: use `customConfigFile` or `ISTIO_BOOTSTRAP_OVERRIDE`";
    ADMIN_SOCKET: Warning, [Set("ISTIO_ENVOY_ADMIN_TRANSPORT=UDS"), Set("ISTIO_AGENT_ADMIN_SOCKET"), Problem(Code::AdminSocketUnsupported)], "pilot-agent 1.31 ignores `ISTIO_ENVOY_ADMIN_TRANSPORT=UDS`, and Envoy's admin port stays open", "this agent moves Envoy's admin interface to a Unix socket with this value or with `ISTIO_AGENT_ADMIN_SOCKET`, and does not start where later releases reject the value", "`istioctl` up to 1.31 cannot read such a pod: use `kubectl exec POD -c istio-proxy -- pilot-agent request GET config_dump > FILE` and `istioctl proxy-config ... --file FILE`";
    READINESS_TIMEOUT: Ok, [Set("PROXY_READINESS_PROBE_TIMEOUT")], "pilot-agent 1.31 ignores `PROXY_READINESS_PROBE_TIMEOUT`, a setting of later releases", "this agent uses it as those releases do";
    CONFIGURATION_ERROR: Warning, [Problem(Code::SettingInvalid)], "pilot-agent reports the first configuration error, and reads some values of the wrong form as zero", "this agent reports all errors at once, with member and line. A value of the wrong form is an error", "a pod with such a value does not start: `preflight` lists the value";
    STATUS_PORT_VALUE: Ok, [Problem(Code::StatusPortAnnotation)], "pilot-agent switches the status port off if `status.sidecar.istio.io/port` is not a number", "this agent logs a warning and uses the configured port";
    STATISTICS_INTERVALS: Ok, [Set("sidecar.istio.io/statsFlushInterval"), Set("sidecar.istio.io/statsEvictionInterval")], "pilot-agent writes the flush interval in Go's notation, which Envoy rejects below a second and from a minute on. It rounds the eviction interval down to seconds, and crashes at a flush interval of zero with an eviction interval", "this agent writes exact intervals in seconds, and does not crash";
    METRICS_SERVICE_ADDRESS: Ok, [Set("envoyMetricsServiceAddress")], "pilot-agent crashes if `envoyMetricsServiceAddress` is set and `envoyMetricsService` is not", "this agent uses the address";
    STACKDRIVER: Ok, [Set("tracing.stackdriver")], "pilot-agent does not start with `tracing.stackdriver` outside Google Cloud", "this agent starts without a tracer, as both agents do inside Google Cloud";
    IPV6_FIRST: Ok, [Set("ISTIO_DUAL_STACK")], "in a pod with two address families, IPv6 first, pilot-agent polls Envoy's admin port on `127.0.0.1`", "this agent polls it on `::1`";
    BOOTSTRAP_FILES: Ok, [Set("tracing.lightstep")], "pilot-agent writes the bootstrap and the token of `tracing.lightstep` in place, readable by all, and leaves the token behind", "this agent moves complete files into place. The token has mode 0600 and is removed with the bootstrap";
    ON_DEMAND_CLUSTERS: Ok, [Set("ISTIO_AGENT_ON_DEMAND_CLUSTERS"), Problem(Code::OnDemandOff)], "pilot-agent sends Envoy all clusters that istiod sends", "with `ISTIO_AGENT_ON_DEMAND_CLUSTERS`, this agent sends Envoy a cluster when the workload first uses it. Gateways, SotW and an Envoy before 1.39.0 get all clusters, with a warning";
    LOAD_STATISTICS: Ok, [Problem(Code::LoadStatsConfigInvalid)], "pilot-agent copies `ISTIO_META_LOAD_STATS_CONFIG_JSON` to the bootstrap, and Envoy fails if the value is not valid JSON", "this agent reports an error that names the variable";
    UNKNOWN_MEMBER: Ok, [Problem(Code::MemberUnknown)], "pilot-agent silently ignores unknown members of ProxyConfig", "this agent ignores them, and names them in the log with their line and the nearest known member";
    REPEATED_MEMBER: Ok, [Problem(Code::MemberRepeated)], "pilot-agent uses the last of repeated members of ProxyConfig", "this agent uses the last one too, and names it in the log";
    PROBE_TIMEOUT: Warning, [ProbeWithoutTimeout], "in pilot-agent an application probe without `timeoutSeconds` has no time limit, and fails at once over gRPC", "in this agent it has the kubelet's default of 1 s, and a lifecycle hook has an hour", "slow probes fail after 1 s, as without Istio: set `timeoutSeconds`";
    HEALTH_TLS: Ok, [Set("readinessProbe.httpGet.scheme")], "pilot-agent verifies the certificate of a `readinessProbe` over HTTPS against the system's roots", "this agent does not verify the certificate, as the kubelet does not";
    HEALTH_SOURCE: Warning, [Set("readinessProbe.tcpSocket"), Set("readinessProbe.grpc")], "traffic capture hands pilot-agent's connection for `readinessProbe.tcpSocket` or `readinessProbe.grpc` to Envoy, which always accepts", "this agent connects from 127.0.0.6 or ::6, as for HTTP, so capture does not take the connection", "a workload that does not accept connections is unhealthy now";
    HEALTH_CRASH: Ok, [Set("readinessProbe.grpc")], "pilot-agent crashes if `readinessProbe.grpc` answers anything other than SERVING, or if `readinessProbe` has no kind of check", "this agent treats the workload as unhealthy in the first case, and does not start in the second";
    HEALTH_AT_END: Ok, [Set("readinessProbe")], "when pilot-agent stops, the last result of `readinessProbe` remains valid", "this agent reports the workload as unhealthy as soon as the agent stops or Envoy drains";
    DNS_DELTA_TABLE: Ok, [Set("ISTIO_META_DELTA_NDS")], "pilot-agent subscribes to a delta name table and reads a response as an empty table", "this agent does not subscribe to it. It rejects such a response and keeps the last table";
    DNS_RESOLVER_ERRORS: Warning, [Set("ISTIO_META_DNS_CAPTURE")], "if a resolver answers SERVFAIL, REFUSED or NOTIMP, pilot-agent passes that answer to the client", "this agent asks the other resolvers as well, for a second at most", "if a split-horizon resolver refuses a name on purpose, another resolver may answer";
    DNS_TIMEOUT: Ok, [Set("DNS_FORWARD_TIMEOUT")], "in pilot-agent `DNS_FORWARD_TIMEOUT` limits the query to each resolver, and twice as long for TCP", "in this agent it limits the query to all resolvers together";
    WASM_EXPIRY: Ok, [Set("WASM_MODULE_EXPIRY")], "pilot-agent removes modules that no response has used for `WASM_MODULE_EXPIRY`, even if Envoy uses them", "this agent does not remove a module that a resource uses. It removes others earlier beyond `ISTIO_AGENT_WASM_CACHE_MAX_BYTES`";
    WASM_SIZE: Warning, [Set("ISTIO_WASM_MAX_BINARY_SIZE_BYTES")], "pilot-agent silently truncates a module at `ISTIO_WASM_MAX_BINARY_SIZE_BYTES`", "this agent reports an error, also for an archive that is truncated or unpacks to more", "a module that was silently truncated fails now: raise the limit";
    WASM_PLAIN_REGISTRY: Warning, [Set("WASM_INSECURE_REGISTRIES")], "pilot-agent uses HTTP for a registry without TLS", "this agent does too. It sends credentials only if the registry is local or in `WASM_INSECURE_REGISTRIES`", "plain registries with credentials fail: list them in `WASM_INSECURE_REGISTRIES`";
    WASM_PROXY: Ok, [Set("HTTPS_PROXY"), Set("BLOCKED_CIDRS_IN_WASM_FETCH")], "with `HTTPS_PROXY`, pilot-agent leaves URLs with addresses of `BLOCKED_CIDRS_IN_WASM_FETCH` to the proxy", "this agent rejects such URLs, and leaves names to the proxy";
    WASM_ATTEMPTS: Ok, [Set("WASM_HTTP_REQUEST_MAX_RETRIES")], "over HTTP, pilot-agent makes up to `WASM_HTTP_REQUEST_MAX_RETRIES` attempts after errors and statuses from 500; at registries it makes three", "this agent makes up to that number at both, also after 408 and 429";
    WASM_TIMEOUT: Ok, [Set("WASM_HTTP_REQUEST_TIMEOUT")], "in pilot-agent `WASM_HTTP_REQUEST_TIMEOUT` limits a whole HTTP response, and does not apply to registries", "in this agent it limits the time until the response headers arrive. The body has the rest of the plugin's time";
}
