//! The environment: the table of variables and the only code that reads them.
//!
//! [`Environment`] is a snapshot, which tests replace by a map. Each variable has a type; a value that
//! does not parse is reported as a warning and the default is used. An empty string is a value for text
//! only. The table has every variable of pilot-agent, with its state in this agent.

mod others;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::time::Duration;

use crate::duration;
use crate::problem::Problem;
use crate::spelling;

#[derive(Clone, Default)]
pub struct Environment(BTreeMap<String, OsString>);

#[derive(Debug)]
pub struct Variable<T> {
    pub name: &'static str,
    pub default: &'static str,
    parse: fn(&str) -> Option<T>,
}

/// A row of the table, for help and documentation.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    pub name: &'static str,
    pub kind: &'static str,
    /// Whether a text is of the variable's type.
    pub(super) is_good: fn(&str) -> bool,
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
            name: stringify!($name),
            default: $default,
            parse: <$type as Value>::parse,
        };)*

        /// Every variable the agent reads by name.
        pub const TABLE: &[Row] = &[$(Row {
            name: stringify!($name),
            kind: <$type as Value>::KIND,
            is_good: |text| <$type as Value>::parse(text).is_some(),
            default: $default,
            help: $help,
            counterpart: $counterpart,
            state: variables!(@state $($state)?),
        }),*];
    };
}

use Counterpart::{Default as Differs, Own, Same};

variables! {
    POD_NAME: String = "", "Name of the pod: part of the node id.", Same;
    POD_NAMESPACE: String = "", "Namespace of the pod: node id, identity and default domain.", Same;
    INSTANCE_IP: String = "", "Address of the pod: the first address of the node.", Same;
    SERVICE_ACCOUNT: String = "", "Service account of the pod: part of the identity.", Same;
    PROXY_CONFIG: String = "", "A ProxyConfig document (YAML or JSON) over the mesh's.", Same;
    TRUST_DOMAIN: String = "cluster.local", "Trust domain of the identity.", Same;
    ISTIO_META_CLUSTER_ID: String = "", "Cluster named in calls to istiod.", Same;
    ISTIO_META_ISTIO_VERSION: String = "", "Version told to istiod; empty is that of the image, or else of the release the agent follows.", Same;
    ISTIO_META_CERT_SIGNER: String = "", "Signer named in certificate requests.", Same;
    XDS_ROOT_CA: String = "", "Roots for discovery: a PEM file, or SYSTEM.", Same;
    CA_ROOT_CA: String = "", "Roots for the certificate authority: a PEM file, or SYSTEM.", Same;
    DISCOVERY_ADDRESS: String = "", "Addresses of control planes instead of discoveryAddress, separated by commas: the next is used while one fails.", Own;
    CA_ADDR: String = "", "Address of the certificate authority; empty means istiod's.", Same;
    ISTIOD_SAN: String = "", "Name expected in istiod's certificate.", Same;
    PILOT_CERT_PROVIDER: String = "istiod", "Provider of istiod's certificate, which decides the roots.", Same;
    JWT_POLICY: String = "third-party-jwt", "Kind of token; only logged.", Same;
    PROV_CERT: String = "", "Directory of a client certificate for istiod.", Same;
    CA_PROVIDER: String = "Citadel", "Kind of certificate authority; GkeWorkloadCertificate takes Google's mounted files.", Same;
    FILE_MOUNTED_CERTS: bool = "false", "Takes certificates from ./etc/certs instead of an authority.", Same;
    FILE_DEBOUNCE_DURATION: Duration = "100ms", "Time without further changes before a changed certificate file is read.", Same;
    PILOT_ENABLE_CA_CRL: bool = "true", "Sends Envoy the certificate revocation list with the workload's roots.", Same;
    ISTIO_AGENT_EXTERNAL_SDS: String = "", "What to do when no other process serves the SDS socket at the start: wait, fallback or fail; empty is fallback, or fail if the file name is not socket.", Own;
    ISTIO_AGENT_SDS_USERS: String = "1337", "Numbers of users that may read secrets besides root and the agent's own user, separated by commas, or any.", Own;
    SECRET_TTL: Duration = "24h", "Lifetime asked for in certificate requests.", Same;
    SECRET_GRACE_PERIOD_RATIO: f64 = "0.5", "Part of the lifetime left at renewal.", Same;
    SECRET_GRACE_PERIOD_RATIO_JITTER: f64 = "0.01", "Spread of that part.", Same;
    WORKLOAD_RSA_KEY_SIZE: u32 = "2048", "Bits of an RSA key, 2048 to 8192; when set, keys are RSA.", Same;
    ECC_SIGNATURE_ALGORITHM: String = "", "ECDSA, the default unless WORKLOAD_RSA_KEY_SIZE is set or privateKeyProvider is qat. Unset, RSA follows a refusal.", Differs("RSA");
    ECC_CURVE: String = "P256", "Curve of ECDSA keys: P256 or P384.", Same;
    WORKLOAD_IDENTITY_SOCKET_FILE: String = "socket", "File name of the SDS socket.", Same;
    HTTPS_PROXY: String = "", "HTTP proxy that leads to istiod, the certificate authority and Wasm modules of https and oci URLs, http://[user:password@]host:port; https_proxy is read as well.", Same;
    HTTP_PROXY: String = "", "HTTP proxy that leads to Wasm modules of http URLs, in the form of HTTPS_PROXY; http_proxy is read as well.", Same;
    NO_PROXY: String = "", "Hosts, domains, addresses and ranges that are reached without a proxy, separated by commas; no_proxy is read as well.", Same;
    SSL_CERT_FILE: String = "", "File of the system's roots; empty is the first of the usual ones that can be read.", Same;
    SSL_CERT_DIR: String = "", "Directories of further roots of the system, separated by colons; empty is /etc/ssl/certs and /etc/pki/tls/certs.", Same;
    GRPC_KEEPALIVE_INTERVAL: Duration = "30s", "Idle time before a keepalive ping to istiod.", Same;
    GRPC_KEEPALIVE_TIMEOUT: Duration = "10s", "Time limit for istiod's answer to a keepalive ping.", Same;
    ISTIO_GPRC_MAXRECVMSGSIZE: u32 = "209715200", "Largest message accepted from Envoy, in bytes.",
        Differs("4194304");
    ISTIO_DELTA_XDS: bool = "true", "Envoy uses delta xDS.", Same;
    ENVOY_STATUS_PORT: u16 = "15021", "Port of Envoy's health listener.", Same;
    ENVOY_PROMETHEUS_PORT: u16 = "15090", "Port of Envoy's metrics listener.", Same;
    ISTIO_PROMETHEUS_ANNOTATIONS: String = "", "Targets of the application's metrics, as JSON.", Same;
    PILOT_AGENT_MERGE_ENVOY_STATS: bool = "true", "Merges Envoy's metrics with the application's.", Same;
    ISTIO_AGENT_SCRAPE_LIMIT_BYTES: u32 = "10485760", "Most bytes read from each of several application targets.", Same;
    ISTIO_AGENT_SCRAPE_TIMEOUT: Duration = "10s", "Time limit of a scrape without a timeout of the scraper; pilot-agent has no limit.", Same;
    ENVOY_SKIP_DEPRECATED_LOGS: bool = "true", "Envoy does not log the use of deprecated fields.", Same;
    ISTIO_BOOTSTRAP: String = "", "A bootstrap template.", Same,
        State::Refused("this agent writes the bootstrap itself");
    ISTIO_CPU_LIMIT: u32 = "0", "CPUs of the pod: Envoy's concurrency unless configured.", Same;
    DISABLE_ENVOY: bool = "false", "Runs without Envoy.", Same;
    ENVOY_SECURE_METRICS_PORT: u32 = "0", "Port of Envoy's metrics with mutual TLS; 0 is none.", Same;
    ENVOY_SECURE_MERGED_METRICS_PORT: u32 = "0", "Port of the merged metrics with mutual TLS; 0 is none.", Same;
    ENVOY_STATUS_PORT_ENABLE_PROXY_PROTOCOL: bool = "false", "Envoy's health listener accepts the PROXY protocol.", Same;
    ISTIO_ENVOY_ENABLE_CORE_DUMP: bool = "false", "Lets Envoy dump core.", Same;
    ISTIO_BOOTSTRAP_OVERRIDE: String = "", "File merged over the bootstrap by Envoy.", Same;
    HTTP_STRIP_FRAGMENT_FROM_PATH_UNSAFE_IF_DISABLED: bool = "true", "Envoy strips fragments from paths.", Same;
    ISTIO_DUAL_STACK: bool = "false", "Envoy binds both address families in a pod that has both.", Same;
    PEER_METADATA_DISCOVERY: bool = "false", "Loads Envoy's extension for peer metadata discovery; unset follows ENABLE_HBONE.", Same;
    EXIT_ON_ZERO_ACTIVE_CONNECTIONS: bool = "false", "The drain ends with Envoy's last connection.", Same;
    MINIMUM_DRAIN_DURATION: Duration = "5s", "Shortest drain when it ends with the last connection.", Same;
    ISTIO_AGENT_DRAIN_CEILING: Duration = "1h", "Longest drain when it ends with the last connection; unset follows TERMINATION_GRACE_PERIOD_SECONDS.", Own;
    ISTIO_AGENT_LAST_REQUESTS: Duration = "10s", "How long requests may continue after the drain; 0s ends them at once. Unset follows TERMINATION_GRACE_PERIOD_SECONDS, or keeps drain and requests within 30s.", Own;
    TERMINATION_GRACE_PERIOD_SECONDS: u32 = "0", "The pod's grace period, which limits the drain and the requests after it; 0 is unknown.", Own;
    ISTIO_AGENT_ENVOY_RESTARTS: String = "", "Restarts of a crashed Envoy within a time, such as 3/10m; empty ends the agent with Envoy.", Own;
    ISTIO_AGENT_HOT_RESTART: bool = "false", "Hot restart of Envoy on SIGHUP, and when its binary or an input of its bootstrap changes.", Own;
    ISTIO_AGENT_PARENT_SHUTDOWN_TIME: Duration = "60s", "Time a replaced Envoy has for its open requests; longer than the drain duration.", Own;
    GRPC_XDS_BOOTSTRAP: String = "etc/istio/proxy/grpc-bootstrap.json", "Path of the bootstrap for gRPC applications; empty writes none.", Same;
    OUTPUT_CERTS: String = "", "Directory to write key, chain and roots to; named in the bootstrap of gRPC applications.", Same;
    COMPLIANCE_POLICY: String = "", "Limits TLS to istiod and Envoy's: fips-140-2, fips-140-3 or pqc.", Same;
    PKCS8_KEY: bool = "false", "Writes keys as PKCS #8, not as PKCS #1 or SEC 1.", Same;
    CREDENTIAL_FETCHER_TYPE: String = "JWT", "Source of tokens: JWT (a file), GoogleComputeEngine or Mock.", Same;
    PROXY_CONFIG_XDS_AGENT: bool = "false", "Takes further roots from istiod's ProxyConfig.", Same;
    KUBERNETES_SERVICE_HOST: String = "", "Set by Kubernetes: files of OUTPUT_CERTS are readable by all.", Same;
    ISTIO_AGENT_KEEP_CONFIG: String = "", "Directory that keeps the configuration Envoy has accepted, by delta, across a restart of the container; empty is none.", Own;
    ISTIO_AGENT_KEEP_CONFIG_AFTER: Duration = "5s", "How long a new Envoy waits for istiod before it is served the kept configuration.", Own;
    ISTIO_AGENT_KEEP_CONFIG_MAX_AGE: Duration = "24h", "Kept configuration is not served if its last response was accepted longer ago.", Own;
    ISTIO_AGENT_KEEP_CERTS: String = "", "Directory in memory that keeps key and certificate across a restart of the container; empty is none.", Own;
    ISTIO_AGENT_CORE_DUMP: bool = "false", "Lets the agent dump core and be debugged, which exposes its keys.", Own;
    ISTIO_META_DNS_CAPTURE: bool = "false", "Answers DNS in sidecars; part of node metadata.", Same;
    ISTIO_META_ENABLE_DNS_SERVER: bool = "false", "Answers DNS in nodes of any type.", Same;
    DNS_PROXY_ADDR: String = "", "Listen address of DNS; empty is localhost:15053. Part of node metadata.", Same;
    DNS_FORWARD_PARALLEL: bool = "false", "Queries all resolvers at once.", Same;
    DNS_FORWARD_TIMEOUT: Duration = "5s", "Time limit of a forwarded query, for all resolvers together.", Same;
    ISTIO_AGENT_DNS_TTL: u32 = "30", "TTL of answers from the name table, in seconds.", Own;
    ISTIO_AGENT_RESOLV_CONF: String = "/etc/resolv.conf", "The pod's resolvers.", Own;
    ISTIO_AGENT_DNS_CACHE_MAX_TTL: Duration = "0s", "Longest time a resolver's answer is cached; 0 caches nothing.", Own;
    ISTIO_AGENT_DNS_CACHE_MAX_NEGATIVE_TTL: Duration = "0s", "Longest time a negative answer is cached.", Own;
    ISTIO_AGENT_DNS_CACHE_MAX_STALE: Duration = "0s", "How long an expired answer is served while no resolver answers; 0 is never.", Own;
    ISTIO_AGENT_DNS_CACHE_MAX_ENTRIES: u32 = "1024", "Most answers in the cache.", Own;
    ISTIO_AGENT_DNS_CACHE_MAX_BYTES: u32 = "524288", "Most memory of the cache, in bytes.", Own;
    HOST_IP: String = "", "Replaces $(HOST_IP) in addresses of collectors.", Same;
    CLOUD_PLATFORM: String = "", "The cloud platform: aws, azure, gcp or none; otherwise it is detected.", Same;
    GCP_METADATA: String = "", "Google project, its number, cluster and location, joined by |.", Same;
    GCP_QUOTA_PROJECT: String = "", "Google project for quota.", Same;
    GCP_ZONE: String = "", "Google zone.", Same;
    ISTIO_KUBE_APP_PROBERS: String = "", "Probes of the application, taken over by the agent: JSON.", Same;
    ISTIO_ENABLE_HTTP2_PROBING: bool = "true", "Probes with TLS may speak HTTP/2.", Same;
    REWRITE_PROBE_LEGACY_LOCALHOST_DESTINATION: bool = "false", "Probes go to localhost instead of the pod's address.", Same;
    ENABLE_PROBE_KEEPALIVE_CONNECTIONS: bool = "false", "Probes keep their connections.", Same;
    METRICS_LOCALHOST_ACCESS_ONLY: bool = "false", "Metrics for callers on this machine only.", Same;
    ISTIO_AGENT_DEBUG_USERS: String = "", "Numbers of users that may read and set what is under /debug/ on the status port besides root and the agent's own user, separated by commas, or any.", Own;
    ISTIO_AGENT_CONTROL_USERS: String = "any", "Numbers of users that may call /drain and /quitquitquit besides root and the agent's own user, separated by commas, or any.", Own;
    ISTIO_AGENT_ENABLE_WASM_REMOTE_LOAD_CONVERSION: bool = "true", "Fetches Wasm modules for Envoy. Without, Envoy never gets them.", Same;
    WASM_INSECURE_REGISTRIES: String = "", "Hosts with ports, separated by commas, whose certificates are not verified; * is all.", Same;
    WASM_MODULE_EXPIRY: Duration = "24h", "Time after which unused Wasm modules are removed.", Same;
    WASM_PURGE_INTERVAL: Duration = "1h", "Pause between removals of Wasm modules.", Same;
    WASM_HTTP_REQUEST_TIMEOUT: Duration = "15s", "Time limit of one request for a Wasm module, until the head of its answer.", Same;
    WASM_HTTP_REQUEST_MAX_RETRIES: u32 = "5", "Attempts of each request for a Wasm module.", Same;
    ISTIO_WASM_MAX_BINARY_SIZE_BYTES: u32 = "268435456", "Largest Wasm module, before and after it is unpacked.", Same;
    BLOCKED_CIDRS_IN_WASM_FETCH: String = "", "Networks, separated by commas, that Wasm modules are never fetched from.", Same;
    DOCKER_CONFIG: String = "", "Directory of Docker's config.json with credentials for registries; empty is $HOME/.docker.", Same;
    HOME: String = "", "Home directory, where Docker's configuration is.", Same;
    REGISTRY_AUTH_FILE: String = "", "File of credentials for registries if Docker has none.", Same;
    XDG_RUNTIME_DIR: String = "", "Directory of containers/auth.json, with credentials if neither file above exists.", Same;
    ISTIO_AGENT_WASM_CACHE_MAX_BYTES: u32 = "1073741824", "Most bytes of cached Wasm modules together; those in use stay beyond it.", Own;
    ISTIO_AGENT_WASM_REQUIRE_DIGEST: bool = "false", "Refuses Wasm modules that are not pinned by a digest.", Own;
    ISTIO_AGENT_WASM_ALLOWED_REGISTRIES: String = "", "Prefixes of host and path, separated by commas, that Wasm modules may be fetched from; empty is any.", Own;
    NOTIFY_SOCKET: String = "", "Socket on which systemd hears that the agent is ready or stops.", Own;
    WATCHDOG_USEC: String = "", "Microseconds within which systemd expects a sign of life.", Own;
    WATCHDOG_PID: String = "", "Process that the watchdog of systemd is for; empty is any.", Own;
    GCE_METADATA_HOST: String = "", "Host of Google's metadata service.", Same;
}

/// Every variable of pilot-agent.
pub fn rows() -> impl Iterator<Item = &'static Row> {
    TABLE.iter().chain(others::OTHERS)
}

impl Environment {
    /// The environment of this process. Variables whose names are not text are left out.
    #[expect(clippy::disallowed_methods, reason = "this is the one reader")]
    pub fn of_process() -> Self {
        let named = std::env::vars_os().filter_map(|(k, v)| Some((k.into_string().ok()?, v)));
        Self(named.collect())
    }

    /// A warning for each variable that begins as this agent's own do and is none of them.
    pub fn unknown(&self) -> impl Iterator<Item = Problem> {
        const PREFIX: &str = "ISTIO_AGENT_";
        let names = rows().map(|row| row.name).chain(others::OF_OTHER_PROGRAMS);
        let known: Vec<_> = names.filter_map(|name| name.strip_prefix(PREFIX)).collect();
        self.with_prefix(PREFIX).filter_map(move |(name, _)| {
            let hint = spelling::hint(name, PREFIX, &known);
            let text = format!("unknown variable{hint}; ignored");
            let is_known = known.contains(&name);
            (!is_known).then(|| Problem::new(format!("{PREFIX}{name}"), text, ""))
        })
    }

    /// The variables that are set and have no effect, each with the reason.
    pub fn without_effect(&self) -> Vec<(&'static str, &'static str)> {
        let set = rows().filter(|row| self.0.contains_key(row.name));
        let ignored = set.filter_map(|row| match row.state {
            State::WithoutEffect(why) => Some((row.name, why)),
            State::Honoured | State::Refused(_) => None,
        });
        ignored.collect()
    }

    /// The variable's value, or its default; with a warning if the value is not of the variable's type.
    #[expect(
        clippy::expect_used,
        reason = "a default is of its variable's type, as a test shows"
    )]
    pub fn get<T: Value>(&self, variable: &Variable<T>, warnings: &mut Vec<Problem>) -> T {
        if let Some(found) = self.0.get(variable.name) {
            if let Some(value) = found.to_str().and_then(variable.parse) {
                return value;
            }
            let expected = format!("{}, using {:?}", T::EXPECTED, variable.default);
            let warning = Problem::new(variable.name, found.to_string_lossy(), expected);
            // Several modules may read one variable.
            if !warnings.contains(&warning) {
                warnings.push(warning);
            }
        }
        (variable.parse)(variable.default).expect("a default is of its variable's type")
    }

    /// Whether the variable is set to something that is not empty.
    pub fn is_set<T>(&self, variable: &Variable<T>) -> bool {
        self.0.get(variable.name).is_some_and(|v| !v.is_empty())
    }

    /// The variable as text; None when it is unset or not text.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.0.get(name)?.to_str()
    }

    /// Variables whose names begin with `prefix`, without it. Values that are not text are left out.
    pub fn with_prefix<'a>(
        &'a self,
        prefix: &'a str,
    ) -> impl Iterator<Item = (&'a str, &'a str)> + 'a {
        self.0.iter().filter_map(move |(name, value)| {
            let rest = name.strip_prefix(prefix)?;
            Some((rest, value.to_str()?)).filter(|(rest, _)| !rest.is_empty())
        })
    }
}

impl<K: Into<String>, V: Into<OsString>> FromIterator<(K, V)> for Environment {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(variables: I) -> Self {
        Self(
            variables
                .into_iter()
                .map(|(k, v)| (k.into(), v.into()))
                .collect(),
        )
    }
}

impl fmt::Debug for Environment {
    /// Values may be secrets, so only names are shown.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

/// Declares the types of variables: kind, expected form, and how a text is read.
macro_rules! values {
    ($($type:ty: $kind:literal, $expected:literal, |$text:ident| $parse:expr;)*) => {$(
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
    bool: "bool", "true or false", |text| boolean(text);
    u32: "int", "a whole number from 0 to 4294967295", |text| text.parse().ok();
    u16: "port", "a port from 1 to 65535", |text| text.parse().ok().filter(|port| *port != 0);
    f64: "float", "a number", |text| text.parse().ok().filter(|number: &f64| number.is_finite());
    Duration: "duration", "a duration such as 100ms or 1h30m", |text| duration::parse(text);
}

fn boolean(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "TRUE" | "true" | "True" => Some(true),
        "0" | "f" | "F" | "FALSE" | "false" | "False" => Some(false),
        _ => None,
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Honoured => f.write_str("honoured"),
            Self::WithoutEffect(why) => write!(f, "no effect: {why}"),
            Self::Refused(why) => write!(f, "refused: {why}"),
        }
    }
}

pub fn reference() -> String {
    let mut text = String::from("Environment:\n");
    for row in rows() {
        let there = match row.counterpart {
            Same => String::new(),
            Own => " Not known to pilot-agent.".to_owned(),
            Differs(default) => format!(" pilot-agent's default is {default}."),
        };
        let state = match row.state {
            State::Honoured => String::new(),
            state => format!(" [{state}]"),
        };
        let default = match row.default {
            "" => String::new(),
            default => format!(", default {default:?}"),
        };
        text += &format!(
            "  {} ({}{default}){state}\n        {}{there}\n",
            row.name, row.kind, row.help
        );
    }
    text
}

#[cfg(test)]
mod docs_tests;
#[cfg(test)]
mod tests;
