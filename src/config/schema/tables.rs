//! The members of ProxyConfig and of what it contains.
//!
//! Source of the names, types and numbers: mesh/v1alpha1/proxy.proto of Istio's API. The order is
//! that of the printed document.
//!
//! Does not hold rules beyond types.

use super::Kind::{
    Bool, Double, Duration, Enum, Int32, Int64Value, List, Map, Message, Secret, Text, Uint32,
    Wrapped,
};
use super::{Kind, Member, Variant};

const BOOL_VALUE: Kind = Wrapped(&Bool);
const INT32_VALUE: Kind = Wrapped(&Int32);

const fn of(name: &'static str, kind: Kind) -> Member {
    let group = None;
    Member { name, kind, group }
}

const fn one(group: &'static str, name: &'static str, kind: Kind) -> Member {
    let group = Some(group);
    Member { name, kind, group }
}

pub(in crate::config) const PROXY_CONFIG: &[Member] = &[
    of("configPath", Text),
    of("binaryPath", Text),
    one("clusterName", "serviceCluster", Text),
    one(
        "clusterName",
        "tracingServiceName",
        Enum(TRACING_SERVICE_NAMES),
    ),
    of("drainDuration", Duration),
    of("terminationDrainDuration", Duration),
    of("discoveryAddress", Text),
    of("proxyAdminPort", Int32),
    of("controlPlaneAuthPolicy", Enum(AUTHENTICATION_POLICIES)),
    of("statNameLength", Int32),
    of("statusPort", Int32),
    of("proxyMetadata", Map(&Secret)),
    of("concurrency", INT32_VALUE),
    of("customConfigFile", Text),
    of("proxyBootstrapTemplatePath", Text),
    of("statsdUdpAddress", Text),
    of("fileFlushInterval", Duration),
    of("fileFlushMinSizeKb", Uint32),
    of("interceptionMode", Enum(INTERCEPTION_MODES)),
    of("tracing", Message(TRACING)),
    of("envoyAccessLogService", Message(REMOTE_SERVICE)),
    of("envoyMetricsService", Message(REMOTE_SERVICE)),
    of("envoyMetricsServiceAddress", Text),
    of("runtimeValues", Map(&Text)),
    of("extraStatTags", List(&Text)),
    of("proxyStatsMatcher", Message(STATS_MATCHER)),
    of("statsCompression", BOOL_VALUE),
    of("readinessProbe", Message(READINESS_PROBE)),
    of("privateKeyProvider", Message(PRIVATE_KEY_PROVIDER)),
    of("connectionSettings", Message(CONNECTION_SETTINGS)),
    of("gatewayTopology", Message(GATEWAY_TOPOLOGY)),
    of("meshId", Text),
    of("availabilityZone", Text),
    of("zipkinAddress", Text),
    of("discoveryRefreshDelay", Duration),
    of(
        "sds",
        Message(&[of("enabled", Bool), of("k8sSaJwtPath", Text)]),
    ),
    of("holdApplicationUntilProxyStarts", BOOL_VALUE),
    of("caCertificatesPem", List(&Text)),
    of("image", Message(&[of("imageType", Text)])),
    of("proxyHeaders", Message(PROXY_HEADERS)),
];

const TRACING_SERVICE_NAMES: &[Variant] = &[
    ("APP_LABEL_AND_NAMESPACE", 0),
    ("CANONICAL_NAME_ONLY", 1),
    ("CANONICAL_NAME_AND_NAMESPACE", 2),
];

/// `INHERIT` has a meaning elsewhere in Istio; here it is refused by its rule.
const AUTHENTICATION_POLICIES: &[Variant] = &[("NONE", 0), ("MUTUAL_TLS", 1), ("INHERIT", 1000)];

const INTERCEPTION_MODES: &[Variant] = &[("REDIRECT", 0), ("TPROXY", 1), ("NONE", 2)];

const TRACING: &[Member] = &[
    one("tracer", "zipkin", Message(&[of("address", Text)])),
    one(
        "tracer",
        "lightstep",
        Message(&[of("address", Text), of("accessToken", Secret)]),
    ),
    one("tracer", "datadog", Message(&[of("address", Text)])),
    one("tracer", "stackdriver", Message(STACKDRIVER)),
    one("tracer", "openCensusAgent", Message(OPEN_CENSUS_AGENT)),
    of("customTags", Map(&Message(CUSTOM_TAG))),
    of("maxPathTagLength", Uint32),
    of("sampling", Double),
    of("tlsSettings", Message(TLS_SETTINGS)),
    of("enableIstioTags", BOOL_VALUE),
];

const STACKDRIVER: &[Member] = &[
    of("debug", Bool),
    of("maxNumberOfAttributes", Int64Value),
    of("maxNumberOfAnnotations", Int64Value),
    of("maxNumberOfMessageEvents", Int64Value),
];

const OPEN_CENSUS_AGENT: &[Member] = &[
    of("address", Text),
    of("context", List(&Enum(TRACE_CONTEXTS))),
];

const TRACE_CONTEXTS: &[Variant] = &[
    ("UNSPECIFIED", 0),
    ("W3C_TRACE_CONTEXT", 1),
    ("GRPC_BIN", 2),
    ("CLOUD_TRACE_CONTEXT", 3),
    ("B3", 4),
];

const CUSTOM_TAG: &[Member] = &[
    one("type", "literal", Message(&[of("value", Text)])),
    one("type", "environment", Message(NAME_AND_DEFAULT)),
    one("type", "header", Message(NAME_AND_DEFAULT)),
];

const NAME_AND_DEFAULT: &[Member] = &[of("name", Text), of("defaultValue", Text)];

const TLS_SETTINGS: &[Member] = &[
    of("mode", Enum(TLS_MODES)),
    of("clientCertificate", Text),
    of("privateKey", Text),
    of("caCertificates", Text),
    of("caCrl", Text),
    of("credentialName", Text),
    of("sni", Text),
    of("subjectAltNames", List(&Text)),
    of("insecureSkipVerify", BOOL_VALUE),
];

const TLS_MODES: &[Variant] = &[
    ("DISABLE", 0),
    ("SIMPLE", 1),
    ("MUTUAL", 2),
    ("ISTIO_MUTUAL", 3),
];

const REMOTE_SERVICE: &[Member] = &[
    of("address", Text),
    of("tlsSettings", Message(TLS_SETTINGS)),
    of("tcpKeepalive", Message(TCP_KEEPALIVE)),
];

const TCP_KEEPALIVE: &[Member] = &[
    of("probes", Uint32),
    of("time", Duration),
    of("interval", Duration),
];

const STATS_MATCHER: &[Member] = &[
    of("inclusionPrefixes", List(&Text)),
    of("inclusionSuffixes", List(&Text)),
    of("inclusionRegexps", List(&Text)),
];

const READINESS_PROBE: &[Member] = &[
    of("initialDelaySeconds", Int32),
    of("timeoutSeconds", Int32),
    of("periodSeconds", Int32),
    of("successThreshold", Int32),
    of("failureThreshold", Int32),
    one("healthCheckMethod", "httpGet", Message(HTTP_GET)),
    one(
        "healthCheckMethod",
        "tcpSocket",
        Message(&[of("host", Text), of("port", Uint32)]),
    ),
    one(
        "healthCheckMethod",
        "exec",
        Message(&[of("command", List(&Text))]),
    ),
    one(
        "healthCheckMethod",
        "grpc",
        Message(&[of("port", Uint32), of("service", Text)]),
    ),
];

const HTTP_GET: &[Member] = &[
    of("path", Text),
    of("port", Uint32),
    of("host", Text),
    of("scheme", Text),
    of(
        "httpHeaders",
        List(&Message(&[of("name", Text), of("value", Secret)])),
    ),
];

const PRIVATE_KEY_PROVIDER: &[Member] = &[
    one("provider", "cryptomb", Message(KEY_OFFLOAD)),
    one("provider", "qat", Message(KEY_OFFLOAD)),
];

const KEY_OFFLOAD: &[Member] = &[of("pollDelay", Duration), of("fallback", BOOL_VALUE)];

const CONNECTION_SETTINGS: &[Member] = &[
    of("profile", Enum(&[("SIDECAR", 0), ("EDGE", 1)])),
    of("listenerPerConnectionBufferLimitBytes", INT32_VALUE),
    of("clusterPerConnectionBufferLimitBytes", INT32_VALUE),
    of("httpMaxConcurrentStreams", INT32_VALUE),
    of("http2InitialStreamWindowSize", INT32_VALUE),
    of("http2InitialConnectionWindowSize", INT32_VALUE),
    of("listenerConnectionLimit", INT32_VALUE),
    of("globalDownstreamConnectionLimit", INT32_VALUE),
    of("httpIdleTimeout", Duration),
    of("httpMaxConnectionDuration", Duration),
    of("httpDrainTimeout", Duration),
    of("httpRequestTimeout", Duration),
    of("httpRequestHeadersTimeout", Duration),
    of("httpStreamIdleTimeout", Duration),
    of("httpMaxStreamDuration", Duration),
    of("httpHeadersWithUnderscoresAction", Enum(UNDERSCORE_ACTIONS)),
    of(
        "httpPathWithEscapedSlashesAction",
        Enum(ESCAPED_SLASH_ACTIONS),
    ),
    of("httpMergeSlashes", BOOL_VALUE),
];

const UNDERSCORE_ACTIONS: &[Variant] = &[
    ("HEADERS_WITH_UNDERSCORES_UNSPECIFIED", 0),
    ("HEADERS_WITH_UNDERSCORES_ALLOW", 1),
    ("HEADERS_WITH_UNDERSCORES_REJECT_REQUEST", 2),
    ("HEADERS_WITH_UNDERSCORES_DROP_HEADER", 3),
];

const ESCAPED_SLASH_ACTIONS: &[Variant] = &[
    ("PATH_WITH_ESCAPED_SLASHES_UNSPECIFIED", 0),
    ("KEEP_UNCHANGED", 1),
    ("REJECT_REQUEST", 2),
    ("UNESCAPE_AND_REDIRECT", 3),
    ("UNESCAPE_AND_FORWARD", 4),
];

const GATEWAY_TOPOLOGY: &[Member] = &[
    of("numTrustedProxies", Uint32),
    of("forwardClientCertDetails", Enum(CLIENT_CERT_DETAILS)),
    of("proxyProtocol", Message(&[])),
];

const CLIENT_CERT_DETAILS: &[Variant] = &[
    ("UNDEFINED", 0),
    ("SANITIZE", 1),
    ("FORWARD_ONLY", 2),
    ("APPEND_FORWARD", 3),
    ("SANITIZE_SET", 4),
    ("ALWAYS_FORWARD_ONLY", 5),
];

const PROXY_HEADERS: &[Member] = &[
    of("forwardedClientCert", Enum(CLIENT_CERT_DETAILS)),
    of("setCurrentClientCertDetails", Message(CURRENT_CERT_DETAILS)),
    of("requestId", Message(&[of("disabled", BOOL_VALUE)])),
    of(
        "server",
        Message(&[of("disabled", BOOL_VALUE), of("value", Text)]),
    ),
    of("attemptCount", Message(&[of("disabled", BOOL_VALUE)])),
    of("envoyDebugHeaders", Message(&[of("disabled", BOOL_VALUE)])),
    of("metadataExchangeHeaders", Message(EXCHANGE_HEADERS)),
    of("preserveHttp1HeaderCase", BOOL_VALUE),
    of("xForwardedHost", Message(&[of("enabled", BOOL_VALUE)])),
    of("xForwardedPort", Message(&[of("enabled", BOOL_VALUE)])),
];

const CURRENT_CERT_DETAILS: &[Member] = &[
    of("subject", BOOL_VALUE),
    of("cert", BOOL_VALUE),
    of("chain", BOOL_VALUE),
    of("dns", BOOL_VALUE),
    of("uri", BOOL_VALUE),
];

const EXCHANGE_HEADERS: &[Member] = &[of("mode", Enum(&[("UNDEFINED", 0), ("IN_MESH", 1)]))];
