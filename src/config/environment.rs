//! The environment: one table of variables and the only code that reads them.
//!
//! [`Environment`] is a snapshot, so the rest of the program takes the environment as an argument
//! and tests hand in a map. Each variable has a type; a value that does not parse is reported as a
//! warning and its default is used. An empty string is a value for text and no value for the rest.
//!
//! Does not decide what a value means; [`super::load`] does.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::time::Duration;

use super::Problem;
use super::duration;

/// The variables of one process.
#[derive(Clone, Default)]
pub struct Environment(BTreeMap<String, OsString>);

/// A variable of type `T`.
#[derive(Debug)]
pub struct Variable<T> {
    pub name: &'static str,
    pub default: &'static str,
    pub help: &'static str,
    parse: fn(&str) -> Option<T>,
    expected: &'static str,
}

/// A line of the table, for people.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    pub name: &'static str,
    pub kind: &'static str,
    pub default: &'static str,
    pub help: &'static str,
    pub counterpart: Counterpart,
}

/// How pilot-agent treats the variable of the same name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counterpart {
    Same,
    /// The same meaning, with this default there.
    Default(&'static str),
}

/// A type a variable can have.
pub trait Value: Sized {
    const KIND: &'static str;
    const EXPECTED: &'static str;
    fn parse(text: &str) -> Option<Self>;
}

macro_rules! variables {
    ($($name:ident: $type:ty = $default:literal, $help:literal, $counterpart:expr;)*) => {
        $(pub const $name: Variable<$type> = Variable {
            name: stringify!($name),
            default: $default,
            help: $help,
            parse: <$type as Value>::parse,
            expected: <$type as Value>::EXPECTED,
        };)*

        /// Every variable the agent reads by name.
        pub const TABLE: &[Row] = &[$(Row {
            name: stringify!($name),
            kind: <$type as Value>::KIND,
            default: $default,
            help: $help,
            counterpart: $counterpart,
        }),*];
    };
}

use Counterpart::{Default as Differs, Same};

variables! {
    POD_NAME: String = "", "Name of the pod: part of the node id.", Same;
    POD_NAMESPACE: String = "", "Namespace of the pod: node id, identity and default domain.", Same;
    INSTANCE_IP: String = "", "Address of the pod: the first address of the node.", Same;
    SERVICE_ACCOUNT: String = "", "Service account of the pod: part of the identity.", Same;
    PROXY_CONFIG: String = "", "A ProxyConfig document (YAML or JSON) over the mesh's.", Same;
    TRUST_DOMAIN: String = "cluster.local", "Trust domain of the identity.", Same;
    ISTIO_META_CLUSTER_ID: String = "", "Cluster named in calls to istiod.", Same;
    ISTIO_META_CERT_SIGNER: String = "", "Signer named in certificate requests.", Same;
    XDS_ROOT_CA: String = "", "Roots for discovery: a PEM file, or SYSTEM.", Same;
    CA_ROOT_CA: String = "", "Roots for the certificate authority: a PEM file, or SYSTEM.", Same;
    CA_ADDR: String = "", "Address of the certificate authority; empty means istiod's.", Same;
    ISTIOD_SAN: String = "", "Name expected in istiod's certificate.", Same;
    PILOT_CERT_PROVIDER: String = "istiod", "Who provides istiod's certificate: picks roots.", Same;
    JWT_POLICY: String = "third-party-jwt", "Kind of token; only logged.", Same;
    PROV_CERT: String = "", "Directory of a client certificate for istiod.", Same;
    SECRET_TTL: Duration = "24h", "Lifetime asked for in certificate requests.", Same;
    SECRET_GRACE_PERIOD_RATIO: f64 = "0.5", "Part of the lifetime left at renewal.", Same;
    SECRET_GRACE_PERIOD_RATIO_JITTER: f64 = "0.01", "Spread of that part.", Same;
    WORKLOAD_RSA_KEY_SIZE: u32 = "2048", "Bits of an RSA key; when set, keys are RSA.", Same;
    ECC_SIGNATURE_ALGORITHM: String = "", "ECDSA, the default unless RSA is asked for.", Differs("RSA");
    ECC_CURVE: String = "P256", "Curve of ECDSA keys: P256 or P384.", Same;
    WORKLOAD_IDENTITY_SOCKET_FILE: String = "socket", "File name of the secret socket.", Same;
    GRPC_KEEPALIVE_INTERVAL: Duration = "30s", "Silence before a ping to istiod.", Same;
    GRPC_KEEPALIVE_TIMEOUT: Duration = "10s", "How long istiod may take to answer a ping.", Same;
    ISTIO_GPRC_MAXRECVMSGSIZE: u32 = "209715200", "Largest message taken from Envoy, in bytes.",
        Differs("4194304");
    ISTIO_DELTA_XDS: bool = "true", "Whether Envoy asks for changes only.", Same;
    ENVOY_STATUS_PORT: u16 = "15021", "Port of Envoy's health listener.", Same;
    ENVOY_PROMETHEUS_PORT: u16 = "15090", "Port of Envoy's metrics listener.", Same;
    ENVOY_SKIP_DEPRECATED_LOGS: bool = "true", "Keeps Envoy silent on deprecated fields.", Same;
    ISTIO_BOOTSTRAP: String = "", "A bootstrap template: refused, as this agent writes the bootstrap itself.", Same;
    ISTIO_CPU_LIMIT: u32 = "0", "CPUs of the pod: Envoy's concurrency unless configured.", Same;
    DISABLE_ENVOY: bool = "false", "Runs without Envoy.", Same;
    ENVOY_SECURE_METRICS_PORT: u32 = "0", "Port of Envoy's metrics for callers of the mesh; 0 is none.", Same;
    ENVOY_SECURE_MERGED_METRICS_PORT: u32 = "0", "Port of all metrics for callers of the mesh; 0 is none.", Same;
    ENVOY_STATUS_PORT_ENABLE_PROXY_PROTOCOL: bool = "false", "The health listener takes the PROXY protocol.", Same;
    ISTIO_ENVOY_ENABLE_CORE_DUMP: bool = "false", "Lets Envoy dump core.", Same;
    ISTIO_BOOTSTRAP_OVERRIDE: String = "", "File merged over the bootstrap by Envoy.", Same;
    HTTP_STRIP_FRAGMENT_FROM_PATH_UNSAFE_IF_DISABLED: bool = "true", "Envoy cuts fragments off paths.", Same;
    ISTIO_DUAL_STACK: bool = "false", "Envoy binds both address families in a pod that has both.", Same;
    PEER_METADATA_DISCOVERY: bool = "false", "Loads Envoy's extension that finds peers' metadata; unset follows ENABLE_HBONE.", Same;
    EXIT_ON_ZERO_ACTIVE_CONNECTIONS: bool = "false", "Has Envoy count its connections.", Same;
    GRPC_XDS_BOOTSTRAP: String = "etc/istio/proxy/grpc-bootstrap.json", "Where the bootstrap of gRPC applications goes; empty is nowhere.", Same;
    OUTPUT_CERTS: String = "", "Directory of certificates named in the bootstrap of gRPC applications.", Same;
    COMPLIANCE_POLICY: String = "", "fips-140-2 limits the TLS of Envoy's gRPC library.", Same;
    DNS_PROXY_ADDR: String = "", "Where DNS is answered; told to istiod.", Same;
    HOST_IP: String = "", "Replaces $(HOST_IP) in addresses of collectors.", Same;
    CLOUD_PLATFORM: String = "", "The cloud to ask where this is: aws, azure, gcp or none; otherwise it is found out.", Same;
    GCP_METADATA: String = "", "Google project, its number, cluster and location, joined by |.", Same;
    GCP_QUOTA_PROJECT: String = "", "Google project that pays.", Same;
    GCP_ZONE: String = "", "Google zone.", Same;
    GCE_METADATA_HOST: String = "", "Where Google's metadata service is.", Same;
}

impl Environment {
    /// The environment of this process. Names that are not text cannot be any of ours.
    #[expect(clippy::disallowed_methods, reason = "this is the one reader")]
    pub fn of_process() -> Self {
        let named = std::env::vars_os().filter_map(|(k, v)| Some((k.into_string().ok()?, v)));
        Self(named.collect())
    }

    /// The variable's value, or its default: with a warning when what is there is not of its type.
    #[expect(
        clippy::expect_used,
        reason = "a default is of its variable's type, as a test shows"
    )]
    pub fn get<T>(&self, variable: &Variable<T>, warnings: &mut Vec<Problem>) -> T {
        if let Some(found) = self.0.get(variable.name) {
            if let Some(value) = found.to_str().and_then(variable.parse) {
                return value;
            }
            let warning = Problem {
                subject: variable.name.to_owned(),
                found: found.to_string_lossy().into_owned(),
                expected: format!("{}, using {:?}", variable.expected, variable.default),
            };
            // Several rooms may ask for one variable.
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

impl std::fmt::Debug for Environment {
    /// Values may be secrets, so only names are shown.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

impl Value for String {
    const KIND: &'static str = "string";
    const EXPECTED: &'static str = "text";
    fn parse(text: &str) -> Option<Self> {
        Some(text.to_owned())
    }
}

impl Value for bool {
    const KIND: &'static str = "bool";
    const EXPECTED: &'static str = "true or false";
    fn parse(text: &str) -> Option<Self> {
        match text {
            "1" | "t" | "T" | "TRUE" | "true" | "True" => Some(true),
            "0" | "f" | "F" | "FALSE" | "false" | "False" => Some(false),
            _ => None,
        }
    }
}

impl Value for u32 {
    const KIND: &'static str = "int";
    const EXPECTED: &'static str = "a whole number from 0 to 4294967295";
    fn parse(text: &str) -> Option<Self> {
        text.parse().ok()
    }
}

impl Value for u16 {
    const KIND: &'static str = "port";
    const EXPECTED: &'static str = "a port from 1 to 65535";
    fn parse(text: &str) -> Option<Self> {
        text.parse().ok().filter(|port| *port != 0)
    }
}

impl Value for f64 {
    const KIND: &'static str = "float";
    const EXPECTED: &'static str = "a number";
    fn parse(text: &str) -> Option<Self> {
        text.parse().ok().filter(|n: &f64| n.is_finite())
    }
}

impl Value for Duration {
    const KIND: &'static str = "duration";
    const EXPECTED: &'static str = "a duration such as 100ms or 1h30m";
    fn parse(text: &str) -> Option<Self> {
        duration::parse(text)
    }
}

/// The table as lines of text.
pub fn reference() -> String {
    let mut text = String::from("Environment:\n");
    for row in TABLE {
        let there = match row.counterpart {
            Same => String::new(),
            Differs(default) => format!(" pilot-agent's default is {default}."),
        };
        text += &format!(
            "  {} ({}, default {:?})\n        {}{there}\n",
            row.name, row.kind, row.default, row.help
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read<T>(variable: &Variable<T>, value: Option<&str>) -> (T, usize) {
        let env: Environment = value.map(|v| (variable.name, v)).into_iter().collect();
        let mut warnings = Vec::new();
        (env.get(variable, &mut warnings), warnings.len())
    }

    #[test]
    fn every_default_is_of_its_variables_type() {
        for row in TABLE {
            let good = match row.kind {
                "string" => true,
                "bool" => bool::parse(row.default).is_some(),
                "int" => u32::parse(row.default).is_some(),
                "port" => u16::parse(row.default).is_some(),
                "float" => f64::parse(row.default).is_some(),
                "duration" => Duration::parse(row.default).is_some(),
                _ => false,
            };
            assert!(good, "{}", row.name);
        }
    }

    #[test]
    fn an_empty_string_is_a_value_for_text_and_a_warning_for_the_rest() {
        assert_eq!(read(&TRUST_DOMAIN, Some("")), (String::new(), 0));
        assert_eq!(read(&TRUST_DOMAIN, None), ("cluster.local".into(), 0));
        assert_eq!(read(&ISTIO_DELTA_XDS, Some("")), (true, 1));
        assert_eq!(read(&ISTIO_CPU_LIMIT, Some("")), (0, 1));
    }

    #[test]
    fn a_value_of_the_wrong_type_is_a_warning_and_the_default_is_used() {
        assert_eq!(read(&ISTIO_DELTA_XDS, Some("no")), (true, 1));
        assert_eq!(read(&ISTIO_DELTA_XDS, Some("F")), (false, 0));
        assert_eq!(read(&ENVOY_STATUS_PORT, Some("70000")), (15021, 1));
        let day = Duration::from_secs(86_400);
        assert_eq!(read(&SECRET_TTL, Some("24")), (day, 1));
        assert_eq!(read(&SECRET_TTL, Some("1m")), (Duration::from_secs(60), 0));
        assert_eq!(read(&SECRET_GRACE_PERIOD_RATIO, Some("NaN")), (0.5, 1));
    }

    #[test]
    fn a_prefix_is_cut_off_and_must_leave_a_name() {
        let env: Environment = [
            ("XDS_HEADER_a", "b=c"),
            ("XDS_HEADER_", "x"),
            ("OTHER", "y"),
        ]
        .into_iter()
        .collect();
        let found: Vec<_> = env.with_prefix("XDS_HEADER_").collect();
        assert_eq!(found, [("a", "b=c")]);
    }
}
