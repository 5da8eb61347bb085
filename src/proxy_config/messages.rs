//! ProxyConfig and the messages it contains.
//!
//! Source of names, types and numbers: mesh/v1alpha1/proxy.proto of Istio's API. The order is that of
//! the written form. The type of a member tells how protobuf declares it: an `Option` is a message, a
//! wrapper, a duration or a member of a oneof, all others are left out when they are zero.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Map, Value};

use super::field::{Field, Message, Reader, Secrets, write};
use super::scalar::{Enumeration, Int64, Secret};
use super::yaml::Node;

/// Declares messages: `Name [members of a oneof] { member: type, }`.
macro_rules! messages {
    ($($name:ident [$($one:ident)*] { $($member:ident: $type:ty,)* })*) => {$(
        #[derive(Clone, Debug, Default, PartialEq)]
        pub struct $name {
            $(pub $member: $type,)*
        }

        impl Message for $name {
            const MEMBERS: &'static [&'static str] = &[$(stringify!($member)),*];

            #[allow(unused_variables, reason = "a message may have no members")]
            fn read_members(&mut self, node: &Node, reader: &mut Reader<'_>) -> Option<()> {
                let given = reader.given(node, Self::MEMBERS, &[$(stringify!($one)),*])?;
                $(reader.member(&given, stringify!($member), &mut self.$member);)*
                Some(())
            }

            #[allow(unused, reason = "a message may have no members")]
            fn members(&self, secrets: Secrets) -> Map<String, Value> {
                let mut members = Map::new();
                $(write(&mut members, stringify!($member), &self.$member, secrets);)*
                members
            }
        }

        impl Field for $name {
            fn read(node: &Node, reader: &mut Reader<'_>) -> Option<Self> {
                let mut message = Self::default();
                message.read_members(node, reader).map(|()| message)
            }

            fn json(&self, secrets: Secrets) -> Value {
                self.members(secrets).into()
            }
        }
    )*};
}

/// Declares enumerations by the names in JSON, in the order of their numbers, which begin with 0.
macro_rules! enumerations {
    ($($enum:ident: $zero:ident $($name:ident $(= $number:literal)?)*;)*) => {$(
        #[allow(non_camel_case_types, clippy::upper_case_acronyms, reason = "names of JSON")]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub enum $enum {
            #[default]
            $zero,
            $($name $(= $number)?,)*
        }

        impl Enumeration for $enum {
            const VALUES: &'static [(&'static str, i64, Self)] = &[
                (stringify!($zero), 0, Self::$zero),
                $((stringify!($name), Self::$name as i64, Self::$name)),*
            ];
        }
    )*};
}

messages! {
    ProxyConfig [service_cluster tracing_service_name] {
        config_path: String,
        binary_path: String,
        service_cluster: Option<String>,
        tracing_service_name: Option<TracingServiceName>,
        drain_duration: Option<Duration>,
        termination_drain_duration: Option<Duration>,
        discovery_address: String,
        proxy_admin_port: i32,
        control_plane_auth_policy: AuthenticationPolicy,
        stat_name_length: i32,
        status_port: i32,
        proxy_metadata: BTreeMap<String, Secret>,
        concurrency: Option<i32>,
        custom_config_file: String,
        proxy_bootstrap_template_path: String,
        statsd_udp_address: String,
        file_flush_interval: Option<Duration>,
        file_flush_min_size_kb: u32,
        interception_mode: InterceptionMode,
        tracing: Option<Tracing>,
        envoy_access_log_service: Option<RemoteService>,
        envoy_metrics_service: Option<RemoteService>,
        envoy_metrics_service_address: String,
        runtime_values: BTreeMap<String, String>,
        extra_stat_tags: Vec<String>,
        proxy_stats_matcher: Option<StatsMatcher>,
        stats_compression: Option<bool>,
        readiness_probe: Option<ReadinessProbe>,
        private_key_provider: Option<PrivateKeyProvider>,
        connection_settings: Option<ConnectionSettings>,
        gateway_topology: Option<GatewayTopology>,
        mesh_id: String,
        availability_zone: String,
        zipkin_address: String,
        discovery_refresh_delay: Option<Duration>,
        sds: Option<Sds>,
        hold_application_until_proxy_starts: Option<bool>,
        ca_certificates_pem: Vec<String>,
        image: Option<Image>,
        proxy_headers: Option<ProxyHeaders>,
    }

    Tracing [zipkin lightstep datadog stackdriver open_census_agent] {
        zipkin: Option<Collector>,
        lightstep: Option<Lightstep>,
        datadog: Option<Collector>,
        stackdriver: Option<Stackdriver>,
        open_census_agent: Option<OpenCensusAgent>,
        custom_tags: BTreeMap<String, CustomTag>,
        max_path_tag_length: u32,
        sampling: f64,
        tls_settings: Option<TlsSettings>,
        enable_istio_tags: Option<bool>,
    }

    Collector [] { address: String, }
    Lightstep [] { address: String, access_token: Secret, }

    Stackdriver [] {
        debug: bool,
        max_number_of_attributes: Option<Int64>,
        max_number_of_annotations: Option<Int64>,
        max_number_of_message_events: Option<Int64>,
    }

    OpenCensusAgent [] { address: String, context: Vec<TraceContext>, }

    CustomTag [literal environment header] {
        literal: Option<Literal>,
        environment: Option<NameAndDefault>,
        header: Option<NameAndDefault>,
    }

    Literal [] { value: String, }
    NameAndDefault [] { name: String, default_value: String, }

    TlsSettings [] {
        mode: TlsMode,
        client_certificate: String,
        private_key: String,
        ca_certificates: String,
        ca_crl: String,
        credential_name: String,
        sni: String,
        subject_alt_names: Vec<String>,
        insecure_skip_verify: Option<bool>,
    }

    RemoteService [] {
        address: String,
        tls_settings: Option<TlsSettings>,
        tcp_keepalive: Option<TcpKeepalive>,
    }

    TcpKeepalive [] { probes: u32, time: Option<Duration>, interval: Option<Duration>, }

    StatsMatcher [] {
        inclusion_prefixes: Vec<String>,
        inclusion_suffixes: Vec<String>,
        inclusion_regexps: Vec<String>,
    }

    ReadinessProbe [http_get tcp_socket exec grpc] {
        initial_delay_seconds: i32,
        timeout_seconds: i32,
        period_seconds: i32,
        success_threshold: i32,
        failure_threshold: i32,
        http_get: Option<HttpGet>,
        tcp_socket: Option<TcpSocket>,
        exec: Option<Exec>,
        grpc: Option<Grpc>,
    }

    HttpGet [] {
        path: String,
        port: u32,
        host: String,
        scheme: String,
        http_headers: Vec<HttpHeader>,
    }

    HttpHeader [] { name: String, value: Secret, }
    TcpSocket [] { host: String, port: u32, }
    Exec [] { command: Vec<String>, }
    Grpc [] { port: u32, service: String, }
    PrivateKeyProvider [cryptomb qat] { cryptomb: Option<KeyOffload>, qat: Option<KeyOffload>, }
    KeyOffload [] { poll_delay: Option<Duration>, fallback: Option<bool>, }

    ConnectionSettings [] {
        profile: Profile,
        listener_per_connection_buffer_limit_bytes: Option<i32>,
        cluster_per_connection_buffer_limit_bytes: Option<i32>,
        http_max_concurrent_streams: Option<i32>,
        http2_initial_stream_window_size: Option<i32>,
        http2_initial_connection_window_size: Option<i32>,
        listener_connection_limit: Option<i32>,
        global_downstream_connection_limit: Option<i32>,
        http_idle_timeout: Option<Duration>,
        http_max_connection_duration: Option<Duration>,
        http_drain_timeout: Option<Duration>,
        http_request_timeout: Option<Duration>,
        http_request_headers_timeout: Option<Duration>,
        http_stream_idle_timeout: Option<Duration>,
        http_max_stream_duration: Option<Duration>,
        http_headers_with_underscores_action: UnderscoresAction,
        http_path_with_escaped_slashes_action: EscapedSlashesAction,
        http_merge_slashes: Option<bool>,
    }

    GatewayTopology [] {
        num_trusted_proxies: u32,
        forward_client_cert_details: ForwardClientCertDetails,
        proxy_protocol: Option<ProxyProtocol>,
    }

    ProxyProtocol [] {}
    Sds [] { enabled: bool, k8s_sa_jwt_path: String, }
    Image [] { image_type: String, }

    ProxyHeaders [] {
        forwarded_client_cert: ForwardClientCertDetails,
        set_current_client_cert_details: Option<CurrentClientCertDetails>,
        request_id: Option<Disabled>,
        server: Option<ServerHeader>,
        attempt_count: Option<Disabled>,
        envoy_debug_headers: Option<Disabled>,
        metadata_exchange_headers: Option<ExchangeHeaders>,
        preserve_http1_header_case: Option<bool>,
        x_forwarded_host: Option<Enabled>,
        x_forwarded_port: Option<Enabled>,
    }

    CurrentClientCertDetails [] {
        subject: Option<bool>,
        cert: Option<bool>,
        chain: Option<bool>,
        dns: Option<bool>,
        uri: Option<bool>,
    }

    Disabled [] { disabled: Option<bool>, }
    Enabled [] { enabled: Option<bool>, }
    ServerHeader [] { disabled: Option<bool>, value: String, }
    ExchangeHeaders [] { mode: ExchangeMode, }
}

enumerations! {
    TracingServiceName: APP_LABEL_AND_NAMESPACE CANONICAL_NAME_ONLY CANONICAL_NAME_AND_NAMESPACE;
    AuthenticationPolicy: NONE MUTUAL_TLS INHERIT = 1000;
    InterceptionMode: REDIRECT TPROXY NONE;
    TraceContext: UNSPECIFIED W3C_TRACE_CONTEXT GRPC_BIN CLOUD_TRACE_CONTEXT B3;
    TlsMode: DISABLE SIMPLE MUTUAL ISTIO_MUTUAL;
    Profile: SIDECAR EDGE;
    UnderscoresAction:
        HEADERS_WITH_UNDERSCORES_UNSPECIFIED HEADERS_WITH_UNDERSCORES_ALLOW
        HEADERS_WITH_UNDERSCORES_REJECT_REQUEST HEADERS_WITH_UNDERSCORES_DROP_HEADER;
    EscapedSlashesAction:
        PATH_WITH_ESCAPED_SLASHES_UNSPECIFIED KEEP_UNCHANGED REJECT_REQUEST
        UNESCAPE_AND_REDIRECT UNESCAPE_AND_FORWARD;
    ForwardClientCertDetails:
        UNDEFINED SANITIZE FORWARD_ONLY APPEND_FORWARD SANITIZE_SET ALWAYS_FORWARD_ONLY;
    ExchangeMode: UNDEFINED IN_MESH;
}
