//! The allow list of the JSON in a bundle: the members that are kept, by the message that they are in.
//!
//! A member is the name of a thing, an address, a number, a time, or one of a few words. Listed nowhere are headers,
//! paths, conditions of routes, texts, templates, source code, configurations of extensions, metadata, labels of other
//! owners, and secrets.

use std::collections::HashMap;
use std::sync::LazyLock;

use super::is_name;
use crate::config::environment;

/// What is kept of an object in the place of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    /// Nothing: the member is a scalar, or a list of scalars.
    Scalar,
    /// The members of this message.
    Message(&'static str),
    /// The members of the message that the object's first member, `@type`, names.
    Any,
}

type Members = HashMap<&'static str, Shape>;

/// The messages that an `@type` may name. Of all others only the type is kept.
const TYPES: &str = "
envoy.admin.v3.ClustersConfigDump envoy.admin.v3.EcdsConfigDump envoy.admin.v3.ListenersConfigDump
envoy.admin.v3.RoutesConfigDump envoy.admin.v3.SecretsConfigDump envoy.config.cluster.v3.Cluster
envoy.config.core.v3.TypedExtensionConfig envoy.config.listener.v3.Listener
envoy.config.route.v3.RouteConfiguration
envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy
envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext
envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext";

/// Each message with its members. `member:Message` has members of that message, `*` is a member of any name. The first
/// part is of pages of Envoy, then follow its configuration, pages of the agent, and rules of nftables.
const MESSAGES: &str = "
ConfigDump{configs:Any} ClustersConfigDump{dynamic_active_clusters:Resource
dynamic_warming_clusters:Resource static_clusters:Resource version_info}
EcdsConfigDump{ecds_filters:Resource} ListenersConfigDump{dynamic_listeners:Resource
static_listeners:Resource version_info} RoutesConfigDump{dynamic_route_configs:Resource
static_route_configs:Resource} SecretsConfigDump{dynamic_active_secrets:Resource
dynamic_warming_secrets:Resource static_secrets:Resource} Resource{active_state:Resource
client_status cluster:Any draining_state:Resource ecds_filter:Any error_state:Refusal last_updated
listener:Any name route_config:Any version_info warming_state:Resource}
Refusal{failed_configuration:Any last_update_attempt version_info}
ServerInfo{command_line_options:CommandLine hot_restart_version node:Node state uptime_all_epochs
uptime_current_epoch version} CommandLine{base_id concurrency config_path drain_time log_level mode
parent_shutdown_time restart_epoch service_cluster service_node service_zone}
Listeners{listener_statuses:ListenerStatus} ListenerStatus{additional_local_addresses:Address
local_address:Address name} Clusters{cluster_statuses:ClusterStatus} ClusterStatus{added_via_api
circuit_breakers:CircuitBreakers eds_service_name host_statuses:Host name observability_name}
Host{address:Address health_status:Health hostname locality:Locality priority stats:Statistic
weight} Statistic{name type value} Health{eds_health_status failed_active_health_check
failed_outlier_check} Certificates{certificates:CertificateStatus}
CertificateStatus{ca_cert:CertificateDetails cert_chain:CertificateDetails}
CertificateDetails{days_until_expiration expiration_time path serial_number
subject_alt_names:AlternativeName valid_from} AlternativeName{dns ip_address uri} Memory{allocated
heap_size total_physical_bytes}
Bootstrap{admin:Admin dynamic_resources:Dynamic node:Node static_resources:Static
stats_flush_interval} Admin{address:Address} Dynamic{ads_config:ApiConfig cds_config:ConfigSource
lds_config:ConfigSource} ApiConfig{api_type transport_api_version} Static{clusters:Cluster
listeners:Listener} Node{cluster id locality:Locality metadata:NodeMetadata user_agent_name}
NodeMetadata{CLUSTER_ID DNS_AUTO_ALLOCATE DNS_CAPTURE ENVOY_PROMETHEUS_PORT ENVOY_STATUS_PORT
INSTANCE_IPS INTERCEPTION_MODE ISTIO_VERSION MESH_ID NAME NAMESPACE NETWORK NODE_NAME OWNER
PILOT_SAN SERVICE_ACCOUNT UNPRIVILEGED_POD WORKLOAD_NAME} Locality{region sub_zone zone}
Address{envoy_internal_address:Internal pipe:Pipe socket_address:SocketAddress}
SocketAddress{address ipv4_compat port_value protocol} Pipe{path} Internal{endpoint_id
server_listener_name} Cluster{alt_stat_name circuit_breakers:CircuitBreakers cluster_type:Extension
connect_timeout dns_lookup_family eds_cluster_config:EdsConfig lb_policy load_assignment:Endpoints
metadata:Metadata name outlier_detection:OutlierDetection transport_socket:Extension
transport_socket_matches:SocketMatch type} EdsConfig{eds_config:ConfigSource service_name}
ConfigSource{ads:Empty initial_fetch_timeout resource_api_version} Empty{} Endpoints{cluster_name
endpoints:LocalityEndpoints} LocalityEndpoints{lb_endpoints:LbEndpoint load_balancing_weight
locality:Locality priority} LbEndpoint{endpoint:Endpoint health_status load_balancing_weight}
Endpoint{address:Address hostname} CircuitBreakers{thresholds:Threshold} Threshold{max_connections
max_pending_requests max_requests max_retries priority track_remaining}
OutlierDetection{base_ejection_time consecutive_5xx consecutive_gateway_failure interval
max_ejection_percent max_ejection_time} SocketMatch{match:SocketLabels name
transport_socket:Extension} SocketLabels{tlsMode} Extension{config_discovery:ConfigDiscovery
disabled is_optional name typed_config:Any} ConfigDiscovery{config_source:ConfigSource type_urls}
TypedExtensionConfig{name typed_config:Any} HttpOptions{idle_timeout max_connection_duration
max_requests_per_connection max_stream_duration} UpstreamTlsContext{common_tls_context:Tls sni}
DownstreamTlsContext{common_tls_context:Tls require_client_certificate require_sni}
Tls{alpn_protocols combined_validation_context:Validation
tls_certificate_sds_secret_configs:SecretName tls_params:TlsParameters
validation_context_sds_secret_config:SecretName} TlsParameters{cipher_suites ecdh_curves
tls_maximum_protocol_version tls_minimum_protocol_version} SecretName{name sds_config:ConfigSource}
Validation{default_validation_context:Validation match_typed_subject_alt_names:Names
validation_context_sds_secret_config:SecretName} Names{matcher:NameMatcher san_type}
NameMatcher{exact} Listener{additional_addresses:Admin address:Address bind_to_port
default_filter_chain:FilterChain enable_reuse_port filter_chains:FilterChain internal_listener:Empty
listener_filters:Extension metadata:Metadata name stat_prefix traffic_direction use_original_dst}
FilterChain{filter_chain_match:ChainMatch filters:Extension metadata:Metadata name
transport_socket:Extension transport_socket_connect_timeout} ChainMatch{application_protocols
destination_port direct_source_prefix_ranges:Range prefix_ranges:Range server_names source_ports
source_prefix_ranges:Range source_type transport_protocol} Range{address_prefix prefix_len}
HttpConnectionManager{access_log:Extension codec_type common_http_protocol_options:HttpOptions
drain_timeout forward_client_cert_details generate_request_id http_filters:Extension merge_slashes
normalize_path rds:Rds request_timeout route_config:RouteConfiguration stat_prefix
stream_idle_timeout use_remote_address xff_num_trusted_hops} Rds{config_source:ConfigSource
route_config_name} TcpProxy{access_log:Extension cluster idle_timeout max_connect_attempts
stat_prefix weighted_clusters:Weighted} RouteConfiguration{name validate_clusters
virtual_hosts:VirtualHost} VirtualHost{domains name require_tls retry_policy:Retry routes:Route}
Route{direct_response:DirectResponse metadata:Metadata name non_forwarding_action:Empty
redirect:Redirect route:RouteAction} RouteAction{auto_host_rewrite cluster
cluster_not_found_response_code host_rewrite_literal idle_timeout priority retry_policy:Retry
timeout weighted_clusters:Weighted} Weighted{clusters:WeightedCluster total_weight}
WeightedCluster{name weight} Retry{num_retries per_try_timeout retriable_status_codes retry_on}
Redirect{host_redirect https_redirect port_redirect response_code} DirectResponse{status}
Metadata{filter_metadata:FilterMetadata} FilterMetadata{istio:IstioMetadata} IstioMetadata{config
services:Service} Service{host name namespace}
Configuration{flags:Flags proxyConfig:ProxyConfig variables:Variables} Flags{*:Setting}
Setting{origin value} Origin{origin} Overview{agent:Agent certificates:WorkloadSecrets
discovery:Discovery dns:Dns envoy:EnvoyState health:Workload istiod:Istiod now ready
start_up:Milestone warnings:Warning wasm:Wasm} Agent{node uptime_seconds version}
EnvoyState{ending:Ending epoch epochs:Epoch is_drained last_crash:Crash last_restart:Restart pid
plan:Step restart rss_bytes started state} Step{at_most_seconds waits_for} Ending{cause connections
plan:Step since until waits_for} Epoch{config epoch pid restart_epoch started state} Restart{method
outcome reason when} Crash{code epoch out_of_memory pid signal uptime_seconds when} Istiod{address
connected:Connection dials last_error:Problem token_expires} Connection{peer since tls:Session}
Session{cipher client_certificate key_exchange version} Problem{at code subject}
WorkloadSecrets{problem:Problem secrets:WorkloadSecret}
WorkloadSecret{certificates:WorkloadCertificate name next_renewal renewed_at served}
WorkloadCertificate{not_after not_before remaining_seconds serial spiffe_ids}
Discovery{accepted:Numbers after_nack:Stored kept:StoredTypes last_end:End on_demand:OnDemand
rejected:Numbers served_since stream:Stream streams types:Types} Numbers{*} Stored{*:StoredResource}
StoredResource{current name since} StoredTypes{*:StoredType} StoredType{at bytes version} End{at id}
Stream{connected id problem:Problem protocol since source} Types{*:TypeState} TypeState{acks bytes
consumer last_ack:Answer last_nack:Answer last_response:Answer nacks requests responses}
Answer{after_seconds age_seconds answered at bytes nonce resources source version} OnDemand{asked
held:Numbers known pinned:Numbers sent used} Dns{ready} Workload{check healthy}
Wasm{resources:WasmModule} WasmModule{name retry_seconds sha256 size_bytes} Milestone{after_ms
milestone} Warning{code first last level scope times} NameTable{table:Hosts} Hosts{*:HostAddresses}
HostAddresses{altHosts ips namespace registry shortname}
Ruleset{nftables:RulesetPart} RulesetPart{chain:Chain rule:Rule table:Chain} Chain{family handle
hook name policy prio table type} Rule{chain expr:Statement family handle table} Statement{accept
counter:Counter dnat:Target drop goto:Target jump:Target mangle:Expression masquerade
match:Expression redirect:Target reject:Chain return snat:Target tproxy:Target} Counter{bytes
packets} Target{addr family port target} Expression{key:Operand left:Operand op right:Operand
value:Operand} Operand{ct:Field meta:Field payload:Field prefix:Prefix range set:Operand} Field{dir
field key protocol} Prefix{addr len}";

/// The members of ProxyConfig that are shown: numbers, times, words, addresses and files.
const PROXY_CONFIG: &str = "
availabilityZone binaryPath concurrency configPath controlPlaneAuthPolicy customConfigFile
discoveryAddress drainDuration holdApplicationUntilProxyStarts interceptionMode meshId
proxyAdminPort serviceCluster statNameLength statsdUdpAddress statusPort terminationDrainDuration
zipkinAddress";

/// Variables of type string that hold names, addresses, users or files.
const VARIABLES: &str = "
POD_NAME POD_NAMESPACE INSTANCE_IP SERVICE_ACCOUNT TRUST_DOMAIN ISTIO_META_CLUSTER_ID
ISTIO_META_ISTIO_VERSION ISTIO_META_CERT_SIGNER XDS_ROOT_CA CA_ROOT_CA DISCOVERY_ADDRESS CA_ADDR
ISTIOD_SAN PILOT_CERT_PROVIDER JWT_POLICY PROV_CERT CA_PROVIDER ISTIO_AGENT_EXTERNAL_SDS
ISTIO_AGENT_SDS_USERS ECC_SIGNATURE_ALGORITHM ECC_CURVE WORKLOAD_IDENTITY_SOCKET_FILE NO_PROXY
SSL_CERT_FILE SSL_CERT_DIR ISTIO_BOOTSTRAP ISTIO_BOOTSTRAP_OVERRIDE ISTIO_ENVOY_ADMIN_TRANSPORT
ISTIO_AGENT_ENVOY_RESTARTS ISTIO_AGENT_STANDBY GRPC_XDS_BOOTSTRAP OUTPUT_CERTS COMPLIANCE_POLICY
CREDENTIAL_FETCHER_TYPE KUBERNETES_SERVICE_HOST ISTIO_AGENT_KEEP_CONFIG ISTIO_AGENT_KEEP_CERTS
DNS_PROXY_ADDR ISTIO_AGENT_RESOLV_CONF HOST_IP CLOUD_PLATFORM GCP_METADATA GCP_QUOTA_PROJECT
GCP_ZONE ISTIO_AGENT_DEBUG_USERS ISTIO_AGENT_CONTROL_USERS WASM_INSECURE_REGISTRIES
BLOCKED_CIDRS_IN_WASM_FETCH DOCKER_CONFIG HOME REGISTRY_AUTH_FILE XDG_RUNTIME_DIR WATCHDOG_USEC
WATCHDOG_PID GCE_METADATA_HOST";

static LISTED: LazyLock<HashMap<&str, Members>> = LazyLock::new(|| {
    let messages = MESSAGES.split('}').filter_map(|text| text.trim_start().split_once('{'));
    let messages = messages.map(|(message, members)| {
        let members = members.split_whitespace().map(|member| match member.split_once(':') {
            None => (member, Shape::Scalar),
            Some((name, "Any")) => (name, Shape::Any),
            Some((name, message)) => (name, Shape::Message(message)),
        });
        (message, members.collect())
    });
    let setting = |name| (name, Shape::Message("Setting"));
    // The value of a text is not shown, so its origin says whether the variable is set.
    let rows = environment::rows()
        .filter(|row| matches!(row.kind, "bool" | "duration" | "float" | "int" | "port"));
    let variables = VARIABLES.split_whitespace().chain(rows.map(|row| row.name)).map(setting);
    let others = [("*", Shape::Message("Origin"))];
    let own: [(_, Members); 2] = [
        ("ProxyConfig", PROXY_CONFIG.split_whitespace().map(setting).collect()),
        ("Variables", variables.chain(others).collect()),
    ];
    messages.chain(own).collect()
});

impl Shape {
    /// Returns the kept part of a member of an object in the place of this member; None if the member is left out.
    pub(super) fn member(self, name: &str) -> Option<Self> {
        let Self::Message(message) = self else { return None };
        let members = LISTED.get(message)?;
        let any = || members.get("*").filter(|_| is_name(name));
        members.get(name).or_else(any).copied()
    }

    /// Returns the message that an `@type` names, or a message without members.
    pub(super) fn of_type(url: &str) -> Self {
        let mut types = TYPES.split_whitespace();
        let listed = types.find(|it| url.strip_prefix("type.googleapis.com/") == Some(it));
        Self::Message(listed.and_then(|it| it.rsplit('.').next()).unwrap_or("Empty"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_message_that_is_named_is_listed_and_each_variable_exists() {
        for shape in LISTED.values().flat_map(HashMap::values) {
            assert!(
                !matches!(shape, Shape::Message(name) if !LISTED.contains_key(name)),
                "{shape:?}"
            );
        }
        for name in TYPES.split_whitespace() {
            let shape = Shape::of_type(&format!("type.googleapis.com/{name}"));
            assert!(matches!(shape, Shape::Message(name) if LISTED.contains_key(name)), "{name}");
        }
        for name in VARIABLES.split_whitespace() {
            assert!(environment::rows().any(|row| row.name == name), "{name}");
        }
    }
}
