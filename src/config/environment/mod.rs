//! The environment: the table of variables and the only code that reads them.
//!
//! [`Environment`] is a snapshot, which tests replace by a map. [`Environment::get`] reads one variable. The
//! type of a variable is the type of its value in [`Config`](super::Config). If a value does not parse, the
//! default is used, and [`Environment::malformed`] reports it, even if the feature is off. Only text and
//! optional values may be empty. The table has every variable of pilot-agent, with its state in this agent.

mod others;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::net::IpAddr;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use indexmap::IndexSet;

use super::{IGNORED, entries};
use crate::envoy::restart_budget::Budget;
use crate::problem::{Code, Problem};
use crate::runtime::duration;
use crate::spelling;
use crate::trust::compliance::Policy;

/// The reason of variables that have no effect in pilot-agent either.
pub const UNUSED: &str = "pilot-agent does not use it either";

/// The variables by name.
#[derive(Clone, Default)]
pub struct Environment(BTreeMap<String, OsString>);

/// A variable that the agent reads by [`Environment::get`], and its row.
#[derive(Debug)]
pub struct Variable<T> {
    pub row: Row,
    parse: fn(&str) -> Option<T>,
}

/// A row of the table, for help and documentation.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    pub name: &'static str,
    pub kind: &'static str,
    /// Returns true if a text is of the variable's type.
    pub(super) is_valid: fn(&str) -> bool,
    /// The form of a value, for warnings.
    expected: &'static str,
    pub default: &'static str,
    pub help: &'static str,
    pub counterpart: Counterpart,
    pub state: State,
}

/// The support for a variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Honoured,
    /// Accepted without effect, with the reason.
    WithoutEffect(&'static str),
    /// Refused, with the reason.
    Refused(&'static str),
}

/// The variable of the same name in pilot-agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counterpart {
    Same,
    /// The same meaning with another default.
    Default(&'static str),
    /// Unknown to pilot-agent.
    Own,
}

/// A type of variables.
pub trait Value: Sized {
    const KIND: &'static str;
    const EXPECTED: &'static str;
    fn parse(text: &str) -> Option<Self>;
}

macro_rules! variables {
    (@state) => { State::Honoured };
    (@state $state:expr) => { $state };
    ($($name:ident: $type:ty = $default:literal, $help:literal, $counterpart:expr
       $(, $state:expr)?;)*) => {
        $(pub const $name: Variable<$type> = Variable {
            row: Row {
                name: stringify!($name),
                kind: <$type as Value>::KIND,
                is_valid: |text| <$type as Value>::parse(text).is_some(),
                expected: <$type as Value>::EXPECTED,
                default: $default,
                help: $help,
                counterpart: $counterpart,
                state: variables!(@state $($state)?),
            },
            parse: <$type as Value>::parse,
        };)*

        /// Every variable the agent reads by name.
        pub const TABLE: &[Row] = &[$($name.row),*];
    };
}

use Counterpart::{Default as Differs, Own, Same};

variables! {
    POD_NAME: String = "", "Name of the pod; part of the node ID.", Same;
    POD_NAMESPACE: String = "", "Namespace of the pod; used in the node ID, the identity and the default domain.", Same;
    INSTANCE_IP: Option<IpAddr> = "", "IP address of the pod; the first address of the node.", Same;
    SERVICE_ACCOUNT: String = "", "Service account of the pod; part of the identity.", Same;
    PROXY_CONFIG: String = "", "ProxyConfig document (YAML or JSON) that overrides the mesh's defaultConfig.", Same;
    TRUST_DOMAIN: String = "cluster.local", "Trust domain of the workload's identity.", Same;
    ISTIO_META_CLUSTER_ID: String = "", "Cluster name that the agent sends to istiod with each call.", Same;
    ISTIO_META_ISTIO_VERSION: String = "", "Istio version that the agent reports to istiod. If empty, the version in the image is reported, or 1.31.0 if the image has none.", Same;
    ISTIO_META_CERT_SIGNER: String = "", "Signer that certificate requests name.", Same;
    XDS_ROOT_CA: Option<String> = "", "Root certificates for the connection to istiod: a PEM file, or SYSTEM for the system's roots.", Same;
    CA_ROOT_CA: Option<String> = "", "Root certificates for the connection to the certificate authority: a PEM file, or SYSTEM for the system's roots.", Same;
    DISCOVERY_ADDRESS: IndexSet<String> = "", "Comma-separated control plane addresses that replace discoveryAddress. If one fails, the agent uses the next.", Own;
    CA_ADDR: Option<String> = "", "Address of the certificate authority. If empty, istiod signs certificates.", Same;
    ISTIOD_SAN: Option<String> = "", "Name that istiod's certificate must contain.", Same;
    PILOT_CERT_PROVIDER: String = "istiod", "Provider of istiod's certificate; it decides which root certificates the agent trusts.", Same;
    JWT_POLICY: String = "third-party-jwt", "Kind of token; it is only logged.", Same;
    PROV_CERT: Option<PathBuf> = "", "Directory of a client certificate that the agent presents to istiod.", Same;
    CA_PROVIDER: String = "Citadel", "Kind of certificate authority. GkeWorkloadCertificate uses the certificates that GKE mounts.", Same;
    FILE_MOUNTED_CERTS: bool = "false", "Reads certificates from ./etc/certs and requests none.", Same;
    FILE_DEBOUNCE_DURATION: Duration = "100ms", "The agent reads a changed certificate file after this time without another change.", Same;
    PILOT_ENABLE_CA_CRL: bool = "true", "Sends the certificate revocation list to Envoy together with the workload's root certificates.", Same;
    ISTIO_AGENT_EXTERNAL_SDS: String = "", "What the agent does if no other process serves the SDS socket at start-up: wait, fallback (serve the socket itself) or fail (exit). If empty, fallback for the file name socket, otherwise fail.", Own;
    ISTIO_AGENT_SDS_USERS: String = "1337", "Comma-separated user IDs that may read secrets, in addition to root and the agent's user, or any.", Own;
    SECRET_TTL: Duration = "24h", "Certificate lifetime that the agent requests.", Same;
    SECRET_GRACE_PERIOD_RATIO: f64 = "0.5", "The agent renews a certificate when this fraction of its lifetime is left.", Same;
    SECRET_GRACE_PERIOD_RATIO_JITTER: f64 = "0.01", "Random variation of SECRET_GRACE_PERIOD_RATIO.", Same;
    WORKLOAD_RSA_KEY_SIZE: u32 = "2048", "RSA key size in bits, 2048 to 8192. If set, the agent makes RSA keys.", Same;
    ECC_SIGNATURE_ALGORITHM: String = "", "ECDSA makes ECDSA keys. If unset, the agent makes ECDSA keys, and RSA keys after the authority has refused an ECDSA key, if WORKLOAD_RSA_KEY_SIZE is set, or if privateKeyProvider is qat.", Differs("RSA");
    ECC_CURVE: String = "P256", "Curve of ECDSA keys: P256 or P384.", Same;
    WORKLOAD_IDENTITY_SOCKET_FILE: String = "socket", "File name of the SDS socket.", Same;
    HTTPS_PROXY: String = "", "HTTP proxy for connections to istiod and the certificate authority, and for Wasm modules with https and oci URLs, as http://[user:password@]host:port. The agent also reads https_proxy.", Same;
    HTTP_PROXY: String = "", "HTTP proxy for Wasm modules with http URLs, in the form of HTTPS_PROXY. The agent also reads http_proxy.", Same;
    NO_PROXY: String = "", "Comma-separated hosts, domains, addresses and ranges that the agent connects to without a proxy. The agent also reads no_proxy.", Same;
    SSL_CERT_FILE: String = "", "File with the system's root certificates. If empty, the agent uses the first of the usual files that it can read.", Same;
    SSL_CERT_DIR: String = "", "Colon-separated directories with further system root certificates. If empty, /etc/ssl/certs and /etc/pki/tls/certs.", Same;
    GRPC_KEEPALIVE_INTERVAL: Duration = "30s", "Idle time before the agent sends a keepalive ping to istiod.", Same;
    GRPC_KEEPALIVE_TIMEOUT: Duration = "10s", "Time limit for istiod's answer to a keepalive ping.", Same;
    ISTIO_GPRC_MAXRECVMSGSIZE: usize = "209715200", "Maximum size of a message from Envoy, in bytes.",
        Differs("4194304");
    ISTIO_DELTA_XDS: bool = "true", "Envoy uses delta xDS.", Same;
    ENVOY_STATUS_PORT: u16 = "15021", "Port of Envoy's health listener.", Same;
    ENVOY_PROMETHEUS_PORT: u16 = "15090", "Port of Envoy's metrics listener.", Same;
    ISTIO_PROMETHEUS_ANNOTATIONS: String = "", "Application metrics targets, as JSON.", Same;
    PILOT_AGENT_MERGE_ENVOY_STATS: bool = "true", "Merges Envoy's metrics with the application's metrics.", Same;
    ISTIO_AGENT_SCRAPE_LIMIT_BYTES: u64 = "10485760", "Maximum number of bytes that the agent reads from an application target if there are several targets.", Same;
    ISTIO_AGENT_SCRAPE_TIMEOUT: Duration = "10s", "Time limit of a scrape if the scraper does not send a timeout. pilot-agent has no limit.", Same;
    ISTIO_AGENT_SCRAPE_TLS: String = "", "Application metrics ports with HTTPS, as JSON: the files caFile, certFile and keyFile by port, such as {\"9443\": {\"caFile\": \"/etc/app/ca.pem\"}}. Without caFile any certificate is accepted.", Own;
    ENVOY_SKIP_DEPRECATED_LOGS: bool = "true", "Envoy does not log the use of deprecated fields.", Same;
    ISTIO_BOOTSTRAP: String = "", "Bootstrap template.", Same,
        State::Refused("this agent writes the bootstrap itself");
    ISTIO_CPU_LIMIT: u32 = "0", "CPU limit of the pod, in cores. Envoy starts this many worker threads unless concurrency is configured.", Same;
    DISABLE_ENVOY: bool = "false", "Runs the agent without Envoy.", Same;
    ENVOY_SECURE_METRICS_PORT: u32 = "0", "Port of Envoy's metrics with mutual TLS; 0 disables it.", Same;
    ENVOY_SECURE_MERGED_METRICS_PORT: u32 = "0", "Port of the merged metrics with mutual TLS; 0 disables it.", Same;
    ENVOY_STATUS_PORT_ENABLE_PROXY_PROTOCOL: bool = "false", "Envoy's health listener accepts the PROXY protocol.", Same;
    ISTIO_ENVOY_ENABLE_CORE_DUMP: bool = "false", "Allows Envoy to dump core.", Same;
    ISTIO_BOOTSTRAP_OVERRIDE: Option<PathBuf> = "", "File that Envoy merges over its bootstrap.", Same;
    HTTP_STRIP_FRAGMENT_FROM_PATH_UNSAFE_IF_DISABLED: bool = "true", "Envoy strips fragments from paths.", Same;
    ISTIO_DUAL_STACK: bool = "false", "Envoy binds both address families if the pod has both.", Same;
    ISTIO_META_ENABLE_SELF_DISCOVERY: bool = "false", "The bootstrap names Envoy's local cluster.", Same;
    PEER_METADATA_DISCOVERY: bool = "false", "Loads Envoy's extension for peer metadata discovery. If unset, ENABLE_HBONE decides.", Same;
    ISTIO_ENVOY_ADMIN_TRANSPORT: String = "TCP", "Address of Envoy's admin interface: TCP (proxyAdminPort), or UDS (the Unix socket admin/admin.sock below configPath; needs ISTIO_NATIVE_SIDECAR). A setting of later releases of Istio.", Own;
    ISTIO_NATIVE_SIDECAR: bool = "false", "The sidecar is an init container that restarts. Only read with ISTIO_ENVOY_ADMIN_TRANSPORT=UDS. A setting of later releases of Istio.", Own;
    ISTIO_AGENT_ADMIN_SOCKET: bool = "false", "Moves Envoy's admin interface to the same Unix socket, in all kinds of pods ([page](operations/admin-socket.md)).", Own;
    PROXY_READINESS_PROBE_TIMEOUT: Duration = "3s", "Time limit of each request to Envoy for a readiness probe. A setting of later releases of Istio.", Own;
    EXIT_ON_ZERO_ACTIVE_CONNECTIONS: bool = "false", "The drain ends when Envoy's last connection is closed.", Same;
    MINIMUM_DRAIN_DURATION: Duration = "5s", "Minimum drain time if EXIT_ON_ZERO_ACTIVE_CONNECTIONS is true.", Same;
    ISTIO_AGENT_DRAIN_CEILING: Duration = "1h", "Maximum drain time if EXIT_ON_ZERO_ACTIVE_CONNECTIONS is true. If unset, TERMINATION_GRACE_PERIOD_SECONDS limits the drain.", Own;
    ISTIO_AGENT_LAST_REQUESTS: Duration = "10s", "Time that in-flight requests have after the drain; 0s ends them immediately. If unset, TERMINATION_GRACE_PERIOD_SECONDS limits it; if that is unset too, drain and in-flight requests together take at most 25s.", Own;
    ISTIO_AGENT_DRAIN_DELAY: Duration = "0s", "Time between the preStop hook or SIGTERM and the drain, in which Envoy accepts connections as before, because other nodes learn of the end of a pod some seconds late ([page](operations/upgrades.md#a-delay-before-the-drain)).", Own;
    ISTIO_AGENT_DRAIN_JITTER: Duration = "0s", "A random part of up to this time is added to ISTIO_AGENT_DRAIN_DELAY, so that pods that end together do not drain together.", Own;
    TERMINATION_GRACE_PERIOD_SECONDS: u64 = "0", "Termination grace period of the pod, which limits the drain and the in-flight requests after it; 0 means unknown.", Own;
    ISTIO_AGENT_ENVOY_RESTARTS: Option<Budget> = "3/10m", "How often the agent restarts a crashed Envoy within a time. If 0 or empty, the agent exits when Envoy exits.", Own;
    ISTIO_AGENT_HOT_RESTART: bool = "false", "Hot-restarts Envoy on SIGHUP, and when its binary or an input of its bootstrap changes.", Own;
    ISTIO_AGENT_STANDBY: String = "", "Name of this container, if a second container of the pod runs this agent and takes over from it.", Own;
    ISTIO_AGENT_PARENT_SHUTDOWN_TIME: Duration = "60s", "Time that a replaced Envoy has for its open requests; it must exceed the drain duration. If unset, 10m with ISTIO_AGENT_STANDBY.", Own;
    GRPC_XDS_BOOTSTRAP: Option<PathBuf> = "etc/istio/proxy/grpc-bootstrap.json", "Path of the bootstrap for proxyless gRPC applications. If empty, none is written.", Same;
    OUTPUT_CERTS: Option<PathBuf> = "", "Directory that key, certificate chain and root certificates are written to; the gRPC bootstrap refers to it.", Same;
    COMPLIANCE_POLICY: Policy = "", "Restricts TLS of the agent and of Envoy: fips-140-2, fips-140-3 or pqc.", Same;
    PKCS8_KEY: bool = "false", "Writes keys as PKCS #8 instead of PKCS #1 or SEC 1.", Same;
    CREDENTIAL_FETCHER_TYPE: String = "JWT", "Source of tokens: JWT (a file), GoogleComputeEngine or Mock.", Same;
    PROXY_CONFIG_XDS_AGENT: bool = "false", "Takes additional root certificates from istiod's ProxyConfig.", Same;
    KUBERNETES_SERVICE_HOST: String = "", "Set by Kubernetes. If set, files in OUTPUT_CERTS are world-readable.", Same;
    ISTIO_AGENT_KEEP_CONFIG: Option<PathBuf> = "./var/lib/istio/data", "Directory that stores the last known good configuration (delta xDS only), so that it survives a restart of the container. The default is used if it is on a disk volume with 10 % free space, or on a machine. If empty, nothing is stored.", Own;
    ISTIO_AGENT_KEEP_CONFIG_AFTER: Duration = "5s", "Time that a new Envoy waits for istiod before the agent serves the last known good configuration.", Own;
    ISTIO_AGENT_KEEP_CONFIG_MAX_AGE: Duration = "24h", "The last known good configuration is not served if the stream to istiod was last open longer ago than this.", Own;
    ISTIO_AGENT_KEEP_CONFIG_MAX_BYTES: u64 = "16777216", "Maximum size of the stored configuration in memory, in bytes: compressed resources and their index. If it needs more, nothing is stored. The file has up to twice this size.", Own;
    ISTIO_AGENT_KEEP_CONFIG_ON_NACK: bool = "true", "If a new Envoy refuses resources of istiod, the agent sends it the stored versions of these resources.", Own;
    ISTIO_AGENT_ON_DEMAND_CLUSTERS: bool = "false", "Envoy gets a cluster when the workload first uses it, instead of all clusters ([page](operations/on-demand-clusters.md)). Only for sidecars with delta xDS and Envoy 1.39.0 or later.", Own;
    ISTIO_AGENT_KEEP_CERTS: Option<PathBuf> = "./etc/istio/proxy", "In-memory directory that stores key and certificate, so that they survive a restart of the container. The default is used if it is a volume in memory. If empty, nothing is stored.", Own;
    ISTIO_AGENT_CORE_DUMP: bool = "false", "Allows the agent to dump core and to be debugged, which exposes its keys.", Own;
    ISTIO_META_DNS_CAPTURE: bool = "false", "Answers DNS queries in sidecars; also sent as node metadata.", Same;
    ISTIO_META_ENABLE_DNS_SERVER: bool = "false", "Answers DNS queries in nodes of any type.", Same;
    DNS_PROXY_ADDR: String = "", "Listen address for DNS. If empty, localhost:15053. Also sent as node metadata.", Same;
    DNS_FORWARD_PARALLEL: bool = "false", "Forwards each query to all resolvers at the same time.", Same;
    DNS_FORWARD_TIMEOUT: Duration = "5s", "Time limit of a forwarded query, for all resolvers together.", Same;
    ISTIO_AGENT_DNS_TTL: u32 = "30", "TTL of answers from the name table, in seconds.", Own;
    ISTIO_AGENT_RESOLV_CONF: String = "/etc/resolv.conf", "File with the pod's resolvers.", Own;
    ISTIO_AGENT_DNS_CACHE_MAX_TTL: Duration = "0s", "Maximum time that a resolver's answer is cached; 0 disables the cache.", Own;
    ISTIO_AGENT_DNS_CACHE_MAX_NEGATIVE_TTL: Duration = "0s", "Maximum time that a negative answer is cached.", Own;
    ISTIO_AGENT_DNS_CACHE_MAX_STALE: Duration = "0s", "Time that an expired answer may be served while resolvers fail or do not answer; 0 disables this.", Own;
    ISTIO_AGENT_DNS_CACHE_MAX_ENTRIES: usize = "1024", "Maximum number of cached answers.", Own;
    ISTIO_AGENT_DNS_CACHE_MAX_BYTES: usize = "524288", "Maximum memory of the cache, in bytes.", Own;
    HOST_IP: String = "", "Replaces $(HOST_IP) in addresses of telemetry collectors.", Same;
    CLOUD_PLATFORM: String = "", "Cloud platform: aws, azure, gcp or none. If empty, the agent detects it.", Same;
    GCP_METADATA: Option<[String; 4]> = "", "Google Cloud project, project number, cluster and location, separated by |.", Same;
    GCP_QUOTA_PROJECT: String = "", "Google Cloud project that quota is charged to.", Same;
    GCP_ZONE: String = "", "Google Cloud zone.", Same;
    ISTIO_KUBE_APP_PROBERS: String = "", "Application probes that the agent performs for the kubelet, as JSON.", Same;
    ISTIO_ENABLE_HTTP2_PROBING: bool = "true", "Probes with TLS may use HTTP/2.", Same;
    REWRITE_PROBE_LEGACY_LOCALHOST_DESTINATION: bool = "false", "Sends probes to localhost instead of the pod's address.", Same;
    ENABLE_PROBE_KEEPALIVE_CONNECTIONS: bool = "false", "Reuses connections for probes.", Same;
    METRICS_LOCALHOST_ACCESS_ONLY: bool = "false", "Serves metrics to callers on this machine only.", Same;
    ISTIO_AGENT_DEBUG_USERS: String = "", "Comma-separated user IDs that may use /debug/ on the status port, in addition to root and the agent's user, or any.", Own;
    ISTIO_AGENT_CONTROL_USERS: String = "any", "Comma-separated user IDs that may call /drain and /quitquitquit, in addition to root and the agent's user, or any.", Own;
    ISTIO_AGENT_ENABLE_WASM_REMOTE_LOAD_CONVERSION: bool = "true", "Fetches Wasm modules for Envoy. If false, Envoy never receives them.", Same;
    WASM_INSECURE_REGISTRIES: Vec<String> = "", "Comma-separated registries (host:port) whose certificates the agent does not verify; * means all.", Same;
    WASM_MODULE_EXPIRY: Duration = "24h", "Wasm modules that were not used for this time are removed.", Same;
    WASM_PURGE_INTERVAL: Duration = "1h", "Interval at which expired Wasm modules are removed.", Same;
    WASM_HTTP_REQUEST_TIMEOUT: Duration = "15s", "Time limit of one request for a Wasm module, until the response headers arrive.", Same;
    WASM_HTTP_REQUEST_MAX_RETRIES: u32 = "5", "Maximum number of attempts of each request for a Wasm module.", Same;
    ISTIO_WASM_MAX_BINARY_SIZE_BYTES: u64 = "268435456", "Maximum size of a Wasm module, compressed and uncompressed, in bytes.", Same;
    BLOCKED_CIDRS_IN_WASM_FETCH: Vec<String> = "", "Comma-separated networks that Wasm modules are never fetched from.", Same;
    DOCKER_CONFIG: Option<PathBuf> = "", "Directory of Docker's config.json with registry credentials. If empty, $HOME/.docker.", Same;
    HOME: Option<PathBuf> = "", "Home directory, which contains Docker's configuration.", Same;
    REGISTRY_AUTH_FILE: Option<PathBuf> = "", "File with registry credentials, used if Docker's config.json does not exist.", Same;
    XDG_RUNTIME_DIR: Option<PathBuf> = "", "Directory of containers/auth.json with registry credentials, used if the files above do not exist.", Same;
    ISTIO_AGENT_WASM_CACHE_MAX_BYTES: u64 = "1073741824", "Maximum size of all cached Wasm modules, in bytes. Modules in use are kept even if they exceed it.", Own;
    ISTIO_AGENT_WASM_REQUIRE_DIGEST: bool = "false", "Rejects Wasm modules that are not pinned by a digest.", Own;
    ISTIO_AGENT_WASM_ALLOWED_REGISTRIES: Vec<String> = "", "Comma-separated prefixes of host and path that Wasm modules may be fetched from. If empty, any.", Own;
    NOTIFY_SOCKET: Option<String> = "", "Socket on which the agent tells systemd that it is ready or stopping.", Own;
    WATCHDOG_USEC: Option<NonZeroU64> = "", "Interval, in microseconds, within which systemd expects a watchdog notification.", Own;
    WATCHDOG_PID: Option<String> = "", "Process ID that systemd's watchdog applies to. If empty, any.", Own;
    GCE_METADATA_HOST: Option<String> = "", "Host of Google Cloud's metadata service.", Same;
}

/// Every variable of pilot-agent.
pub fn rows() -> impl Iterator<Item = &'static Row> {
    TABLE.iter().chain(others::OTHERS)
}

impl Environment {
    /// Reads the environment of this process. Variables whose names are not text are left out.
    #[expect(clippy::disallowed_methods, reason = "this is the one reader")]
    pub fn from_process() -> Self {
        Self(std::env::vars_os().filter_map(|(k, v)| Some((k.into_string().ok()?, v))).collect())
    }

    /// Returns a warning for each variable that has this agent's prefix and is unknown.
    pub fn unknown(&self) -> impl Iterator<Item = Problem> {
        const PREFIX: &str = "ISTIO_AGENT_";
        let names = rows().map(|row| row.name).chain(others::OTHER_PROGRAMS);
        let known: Vec<_> = names.filter_map(|name| name.strip_prefix(PREFIX)).collect();
        self.with_prefix(PREFIX).filter_map(move |(name, _)| {
            if known.contains(&name) {
                return None;
            }
            let found = format!("unknown variable{}", spelling::hint(name, PREFIX, &known));
            Some(Problem::new(Code::SettingUnknown, format!("{PREFIX}{name}"), found))
        })
    }

    /// Returns the variables that are set and have no effect, each with the reason.
    pub fn without_effect(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        rows().filter(|row| self.0.contains_key(row.name)).filter_map(|row| match row.state {
            State::WithoutEffect(why) => Some((row.name, why)),
            State::Honoured | State::Refused(_) => None,
        })
    }

    /// Returns a warning for each variable whose value is not of the variable's type.
    pub fn malformed(&self) -> impl Iterator<Item = Problem> {
        TABLE.iter().filter_map(|row| {
            let value = self.0.get(row.name)?;
            if value.to_str().is_some_and(row.is_valid) {
                return None;
            }
            let used = match row.default {
                "" => IGNORED.to_owned(),
                default => format!("{default:?} is used"),
            };
            Some(Problem::replaced(row.name, &value.to_string_lossy(), row.expected, used))
        })
    }

    /// Returns the variable's value, or its default if the variable is unset or malformed.
    #[expect(clippy::expect_used, reason = "a default is of its variable's type, as a test shows")]
    pub fn get<T: Value>(&self, variable: &Variable<T>) -> T {
        self.text(variable.row.name)
            .and_then(variable.parse)
            .or_else(|| (variable.parse)(variable.row.default))
            .expect("a default is of its variable's type")
    }

    /// Returns true if the variable is set and not empty.
    pub fn is_set<T>(&self, variable: &Variable<T>) -> bool {
        self.0.get(variable.row.name).is_some_and(|value| !value.is_empty())
    }

    /// Returns the variable as text; None if it is unset or not text.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.0.get(name)?.to_str()
    }

    /// Returns the variables whose names begin with `prefix`, without it. Values that are not text are left out.
    pub fn with_prefix(&self, prefix: &str) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().filter_map(move |(name, value)| match name.strip_prefix(prefix)? {
            "" => None,
            rest => Some((rest, value.to_str()?)),
        })
    }
}

impl<K: Into<String>, V: Into<OsString>> FromIterator<(K, V)> for Environment {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(variables: I) -> Self {
        Self(variables.into_iter().map(|(k, v)| (k.into(), v.into())).collect())
    }
}

impl fmt::Debug for Environment {
    /// Writes names only, because values may be secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

/// Declares the types of variables: kind, expected form, and how a text is read.
macro_rules! values {
    ($($type:ty: $kind:literal, $expected:expr, |$text:ident| $parse:expr;)*) => {$(
        impl Value for $type {
            const KIND: &'static str = $kind;
            const EXPECTED: &'static str = $expected;
            fn parse($text: &str) -> Option<Self> {
                $parse
            }
        }
    )*};
}

values! {
    String: "string", "text", |text| Some(text.to_owned());
    Option<String>: "string", "text", |text| optional(text);
    Option<PathBuf>: "string", "text", |text| optional(text);
    Option<IpAddr>: "string", "an IP address", |text| optional(text);
    Option<NonZeroU64>: "string", "microseconds", |text| optional(text);
    Option<Budget>: "string", "restarts in a duration, such as 3/10m", |text| budget(text);
    Option<[String; 4]>: "string", "project|number|cluster|location", |text| match text {
        "" => Some(None),
        text => Vec::from_iter(text.split('|').map(str::to_owned)).try_into().ok().map(Some),
    };
    Policy: "string", "fips-140-2, fips-140-3 or pqc", |text| Policy::parse(text);
    // Comma-separated.
    Vec<String>: "string", "text", |text| Some(entries(text).map(str::to_owned).collect());
    IndexSet<String>: "string", "text", |text| Some(entries(text).map(str::to_owned).collect());
    bool: "bool", "true or false", |text| match text {
        "1" | "t" | "T" | "TRUE" | "true" | "True" => Some(true),
        "0" | "f" | "F" | "FALSE" | "false" | "False" => Some(false),
        _ => None,
    };
    u32: "int", "a whole number from 0 to 4294967295", |text| text.parse().ok();
    u64: "int", u32::EXPECTED, |text| u32::parse(text).map(Self::from);
    usize: "int", u32::EXPECTED, |text| Self::try_from(u32::parse(text)?).ok();
    u16: "port", "a port from 1 to 65535", |text| text.parse().ok().filter(|port| *port != 0);
    f64: "float", "a number", |text| text.parse().ok().filter(|number: &f64| number.is_finite());
    Duration: "duration", "a duration such as 100ms or 1h30m", |text| duration::parse(text);
}

/// Reads a value that may be empty.
fn optional<T: FromStr>(text: &str) -> Option<Option<T>> {
    match text {
        "" => Some(None),
        text => text.parse().ok().map(Some),
    }
}

/// Parses a number of restarts in a duration, such as `3/10m`; `Some(None)` for an empty text or zero restarts.
fn budget(text: &str) -> Option<Option<Budget>> {
    if text.is_empty() || text.split('/').next() == Some("0") {
        return Some(None);
    }
    let (restarts, within) = text.split_once('/')?;
    Some(Some(Budget {
        restarts: restarts.parse().ok().filter(|restarts| *restarts > 0)?,
        within: duration::parse(within).filter(|within| !within.is_zero())?,
    }))
}

/// Writes the table for the help of `proxy`.
pub fn reference() -> String {
    let mut text = String::from("Environment:\n");
    for row in rows() {
        let counterpart = match row.counterpart {
            Same => String::new(),
            Own => " Not known to pilot-agent.".to_owned(),
            Differs(default) => format!(" pilot-agent's default is {default}."),
        };
        let state = match row.state {
            State::Honoured => String::new(),
            State::WithoutEffect(why) => format!(" [no effect: {why}]"),
            State::Refused(why) => format!(" [refused: {why}]"),
        };
        let default = match row.default {
            "" => String::new(),
            default => format!(", default {default:?}"),
        };
        text += &format!(
            "  {} ({}{default}){state}\n        {}{counterpart}\n",
            row.name, row.kind, row.help
        );
    }
    text
}

#[cfg(test)]
pub(crate) mod docs_tests;
#[cfg(test)]
mod tests;
