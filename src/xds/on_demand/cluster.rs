//! Reads what a cluster waits for before Envoy can use it: endpoints, DNS, or secrets.
//!
//! Only the fields in the structs below are decoded, because a push may have thousands of clusters. Field numbers are
//! from `envoy/config/cluster/v3/cluster.proto` and the files that it imports.

use std::net::IpAddr;

use envoy_types::pb::envoy::config::cluster::v3::cluster::DiscoveryType;
use prost::{DecodeError, Message};

/// The names under which Envoy registers its cluster implementations. A custom cluster type has one of them, too.
const EDS: &str = "envoy.cluster.eds";
const DNS: &str = "envoy.cluster.dns";
const STRICT_DNS: &str = "envoy.cluster.strict_dns";
const LOGICAL_DNS: &str = "envoy.cluster.logical_dns";

/// The end of the type URL of a client's TLS settings.
const UPSTREAM_TLS: &str = "/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext";

/// What the agent has to know of a cluster before it gives the cluster to Envoy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ClusterFacts {
    pub(super) discovery: Discovery,
    /// The names of the secrets that Envoy requests on its ADS stream, sorted. Secrets from another SDS server, like
    /// Istio's workload certificate, are not among them.
    pub(super) secrets: Vec<String>,
}

/// How Envoy finds the endpoints of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Discovery {
    /// EDS on Envoy's ADS stream, with the name of the endpoints.
    Endpoints(String),
    /// DNS, with the host names that Envoy resolves, sorted. IP addresses are not among them.
    Dns(Vec<String>),
    /// All other kinds, also EDS from a file or another server.
    Other,
}

impl ClusterFacts {
    /// Reads an encoded `envoy.config.cluster.v3.Cluster`.
    pub(super) fn read(cluster: &[u8]) -> Result<Self, DecodeError> {
        let mut cluster = Cluster::decode(cluster)?;
        Ok(Self { secrets: cluster.secrets()?, discovery: cluster.discovery() })
    }
}

impl Cluster {
    fn discovery(self) -> Discovery {
        let kind = match (&self.cluster_type, self.r#type()) {
            (Some(custom), _) => &*custom.name,
            (None, DiscoveryType::Eds) => EDS,
            (None, DiscoveryType::StrictDns) => STRICT_DNS,
            (None, DiscoveryType::LogicalDns) => LOGICAL_DNS,
            (None, DiscoveryType::Static | DiscoveryType::OriginalDst) => return Discovery::Other,
        };
        match (kind, self.eds_cluster_config) {
            (EDS, Some(EdsClusterConfig { eds_config: Some(source), service_name }))
                if source.ads.is_some() =>
            {
                let has_name = !service_name.is_empty();
                Discovery::Endpoints(if has_name { service_name } else { self.name })
            }
            (DNS | STRICT_DNS | LOGICAL_DNS, _) => {
                Discovery::Dns(self.load_assignment.map_or(Vec::new(), LoadAssignment::host_names))
            }
            _ => Discovery::Other,
        }
    }

    /// Takes the names of the secrets that come over ADS.
    fn secrets(&mut self) -> Result<Vec<String>, DecodeError> {
        let matches = self.transport_socket_matches.drain(..);
        let sockets =
            matches.filter_map(|it| it.transport_socket).chain(self.transport_socket.take());
        let mut names = Vec::new();
        for config in sockets.filter_map(|it| it.typed_config) {
            if !config.type_url.ends_with(UPSTREAM_TLS) {
                continue;
            }
            let tls = UpstreamTls::decode(&*config.value)?.common_tls_context.unwrap_or_default();
            let combined = tls.combined_validation_context.and_then(|it| it.secret);
            let secrets =
                tls.certificates.into_iter().chain(tls.validation_context).chain(combined);
            let over_ads =
                secrets.filter(|it| it.sds_config.as_ref().is_some_and(|it| it.ads.is_some()));
            names.extend(over_ads.map(|it| it.name));
        }
        Ok(sorted(names))
    }
}

impl LoadAssignment {
    fn host_names(self) -> Vec<String> {
        let endpoints = self.endpoints.into_iter().flat_map(|it| it.lb_endpoints);
        let addresses = endpoints.filter_map(|it| it.endpoint?.address?.socket_address);
        sorted(addresses.map(|it| it.address).filter(|it| it.parse::<IpAddr>().is_err()).collect())
    }
}

/// Sorts names and removes those that are empty or occur twice.
fn sorted(mut names: Vec<String>) -> Vec<String> {
    names.retain(|name| !name.is_empty());
    names.sort_unstable();
    names.dedup();
    names
}

#[derive(Clone, PartialEq, Message)]
struct Cluster {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(enumeration = "DiscoveryType", tag = "2")]
    r#type: i32,
    #[prost(message, optional, tag = "3")]
    eds_cluster_config: Option<EdsClusterConfig>,
    #[prost(message, optional, tag = "24")]
    transport_socket: Option<TransportSocket>,
    #[prost(message, optional, tag = "33")]
    load_assignment: Option<LoadAssignment>,
    #[prost(message, optional, tag = "38")]
    cluster_type: Option<CustomClusterType>,
    #[prost(message, repeated, tag = "43")]
    transport_socket_matches: Vec<TransportSocketMatch>,
}

#[derive(Clone, PartialEq, Message)]
struct CustomClusterType {
    #[prost(string, tag = "1")]
    name: String,
}

#[derive(Clone, PartialEq, Message)]
struct EdsClusterConfig {
    #[prost(message, optional, tag = "1")]
    eds_config: Option<ConfigSource>,
    #[prost(string, tag = "2")]
    service_name: String,
}

#[derive(Clone, PartialEq, Message)]
struct ConfigSource {
    #[prost(message, optional, tag = "3")]
    ads: Option<()>,
}

#[derive(Clone, PartialEq, Message)]
struct LoadAssignment {
    #[prost(message, repeated, tag = "2")]
    endpoints: Vec<LocalityEndpoints>,
}

#[derive(Clone, PartialEq, Message)]
struct LocalityEndpoints {
    #[prost(message, repeated, tag = "2")]
    lb_endpoints: Vec<LbEndpoint>,
}

#[derive(Clone, PartialEq, Message)]
struct LbEndpoint {
    #[prost(message, optional, tag = "1")]
    endpoint: Option<Endpoint>,
}

#[derive(Clone, PartialEq, Message)]
struct Endpoint {
    #[prost(message, optional, tag = "1")]
    address: Option<Address>,
}

#[derive(Clone, PartialEq, Message)]
struct Address {
    #[prost(message, optional, tag = "1")]
    socket_address: Option<SocketAddress>,
}

#[derive(Clone, PartialEq, Message)]
struct SocketAddress {
    #[prost(string, tag = "2")]
    address: String,
}

#[derive(Clone, PartialEq, Message)]
struct TransportSocketMatch {
    #[prost(message, optional, tag = "3")]
    transport_socket: Option<TransportSocket>,
}

#[derive(Clone, PartialEq, Message)]
struct TransportSocket {
    #[prost(message, optional, tag = "3")]
    typed_config: Option<Any>,
}

#[derive(Clone, PartialEq, Message)]
struct Any {
    #[prost(string, tag = "1")]
    type_url: String,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct UpstreamTls {
    #[prost(message, optional, tag = "1")]
    common_tls_context: Option<CommonTls>,
}

#[derive(Clone, PartialEq, Message)]
struct CommonTls {
    #[prost(message, repeated, tag = "6")]
    certificates: Vec<SdsSecret>,
    #[prost(message, optional, tag = "7")]
    validation_context: Option<SdsSecret>,
    #[prost(message, optional, tag = "8")]
    combined_validation_context: Option<CombinedValidation>,
}

#[derive(Clone, PartialEq, Message)]
struct CombinedValidation {
    #[prost(message, optional, tag = "2")]
    secret: Option<SdsSecret>,
}

#[derive(Clone, PartialEq, Message)]
struct SdsSecret {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(message, optional, tag = "2")]
    sds_config: Option<ConfigSource>,
}

#[cfg(test)]
mod tests {
    use envoy_types::pb::envoy::config::cluster::v3 as pb;
    use envoy_types::pb::envoy::config::core::v3::{
        self as core, address, config_source::ConfigSourceSpecifier, transport_socket,
    };
    use envoy_types::pb::envoy::config::endpoint::v3 as endpoint;
    use envoy_types::pb::envoy::extensions::transport_sockets::tls::v3 as tls;
    use envoy_types::pb::google::protobuf;
    use pb::cluster::ClusterDiscoveryType;
    use proptest::prelude::*;
    use tls::common_tls_context::{CombinedCertificateValidationContext, ValidationContextType};

    use super::*;

    fn source(specifier: ConfigSourceSpecifier) -> Option<core::ConfigSource> {
        let config_source_specifier = Some(specifier);
        Some(core::ConfigSource { config_source_specifier, ..Default::default() })
    }

    fn ads() -> Option<core::ConfigSource> {
        source(ConfigSourceSpecifier::Ads(Default::default()))
    }

    fn grpc() -> Option<core::ConfigSource> {
        source(ConfigSourceSpecifier::ApiConfigSource(Default::default()))
    }

    fn cluster(discovery: ClusterDiscoveryType) -> pb::Cluster {
        pb::Cluster {
            name: "outbound|80||a".into(),
            alt_stat_name: "skipped".into(),
            cluster_discovery_type: Some(discovery),
            ..Default::default()
        }
    }

    fn of_type(discovery: DiscoveryType) -> pb::Cluster {
        cluster(ClusterDiscoveryType::Type(discovery as i32))
    }

    fn custom(name: &str) -> pb::Cluster {
        let (name, typed_config) = (name.to_owned(), Some(Default::default()));
        let custom = pb::cluster::CustomClusterType { name, typed_config };
        cluster(ClusterDiscoveryType::ClusterType(custom))
    }

    fn eds(
        cluster: pb::Cluster,
        eds_config: Option<core::ConfigSource>,
        service_name: &str,
    ) -> pb::Cluster {
        let service_name = service_name.to_owned();
        let eds = pb::cluster::EdsClusterConfig { eds_config, service_name };
        pb::Cluster { eds_cluster_config: Some(eds), ..cluster }
    }

    fn with_hosts(cluster: pb::Cluster, hosts: &[&str]) -> pb::Cluster {
        let lb_endpoint = |address: address::Address| {
            let address = Some(core::Address { address: Some(address) });
            let endpoint = endpoint::Endpoint { address, ..Default::default() };
            let identifier = endpoint::lb_endpoint::HostIdentifier::Endpoint(endpoint);
            endpoint::LbEndpoint { host_identifier: Some(identifier), ..Default::default() }
        };
        let locality =
            |lb_endpoints| endpoint::LocalityLbEndpoints { lb_endpoints, ..Default::default() };
        let names = hosts.iter().map(|host| {
            let address = (*host).to_owned();
            let socket = core::SocketAddress { address, ..Default::default() };
            locality(vec![lb_endpoint(address::Address::SocketAddress(socket))])
        });
        let pipe = locality(vec![lb_endpoint(address::Address::Pipe(Default::default()))]);
        let assignment = endpoint::ClusterLoadAssignment {
            cluster_name: "skipped".into(),
            endpoints: names.chain([pipe, locality(vec![])]).collect(),
            ..Default::default()
        };
        pb::Cluster { load_assignment: Some(assignment), ..cluster }
    }

    fn secret(name: &str, sds_config: Option<core::ConfigSource>) -> tls::SdsSecretConfig {
        tls::SdsSecretConfig { name: name.into(), sds_config }
    }

    fn tls_socket(
        certificates: Vec<tls::SdsSecretConfig>,
        validation: Option<ValidationContextType>,
    ) -> core::TransportSocket {
        let common = tls::CommonTlsContext {
            tls_certificate_sds_secret_configs: certificates,
            validation_context_type: validation,
            alpn_protocols: vec!["skipped".into()],
            ..Default::default()
        };
        let context = tls::UpstreamTlsContext {
            common_tls_context: Some(common),
            sni: "skipped".into(),
            ..Default::default()
        };
        socket("UpstreamTlsContext", context.encode_to_vec())
    }

    fn socket(kind: &str, value: Vec<u8>) -> core::TransportSocket {
        let package = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3";
        let any = protobuf::Any { type_url: format!("{package}.{kind}"), value };
        let config_type = Some(transport_socket::ConfigType::TypedConfig(any));
        core::TransportSocket { name: "tls".into(), config_type }
    }

    fn combined(secret: tls::SdsSecretConfig) -> ValidationContextType {
        ValidationContextType::CombinedValidationContext(CombinedCertificateValidationContext {
            default_validation_context: Some(Default::default()),
            validation_context_sds_secret_config: Some(secret),
            ..Default::default()
        })
    }

    fn with_sockets(
        socket: Option<core::TransportSocket>,
        matches: Vec<core::TransportSocket>,
    ) -> pb::Cluster {
        let matches = matches.into_iter().map(|socket| pb::cluster::TransportSocketMatch {
            name: "skipped".into(),
            transport_socket: Some(socket),
            ..Default::default()
        });
        pb::Cluster {
            transport_socket: socket,
            transport_socket_matches: matches.collect(),
            ..of_type(DiscoveryType::Static)
        }
    }

    fn read(cluster: &pb::Cluster) -> ClusterFacts {
        ClusterFacts::read(&cluster.encode_to_vec()).unwrap()
    }

    #[test]
    fn reads_how_the_endpoints_are_found() {
        let endpoints = |name: &str| Discovery::Endpoints(name.to_owned());
        let dns =
            |names: &[&str]| Discovery::Dns(names.iter().map(|name| (*name).to_owned()).collect());
        let hosts = ["b.example", "10.0.0.1", "a.example", "::1", "b.example", "", "1.2.3.4.5"];
        let names = dns(&["1.2.3.4.5", "a.example", "b.example"]);
        let of_eds = || of_type(DiscoveryType::Eds);
        for (cluster, expected) in [
            (eds(of_eds(), ads(), "service"), endpoints("service")),
            (eds(of_eds(), ads(), ""), endpoints("outbound|80||a")),
            (eds(custom("envoy.cluster.eds"), ads(), ""), endpoints("outbound|80||a")),
            (eds(of_eds(), grpc(), "service"), Discovery::Other),
            (eds(of_eds(), None, "service"), Discovery::Other),
            (of_eds(), Discovery::Other),
            (eds(of_type(DiscoveryType::Static), ads(), ""), Discovery::Other),
            (with_hosts(of_type(DiscoveryType::Static), &hosts), Discovery::Other),
            (with_hosts(of_type(DiscoveryType::StrictDns), &hosts), names.clone()),
            (with_hosts(of_type(DiscoveryType::LogicalDns), &hosts[..1]), dns(&hosts[..1])),
            (with_hosts(custom("envoy.cluster.dns"), &hosts), names.clone()),
            (with_hosts(custom("envoy.cluster.strict_dns"), &hosts), names.clone()),
            (with_hosts(custom("envoy.cluster.logical_dns"), &hosts), names),
            (with_hosts(custom("envoy.clusters.redis"), &hosts), Discovery::Other),
            (of_type(DiscoveryType::StrictDns), dns(&[])),
            (of_type(DiscoveryType::OriginalDst), Discovery::Other),
            (pb::Cluster::default(), Discovery::Other),
        ] {
            assert_eq!(read(&cluster).discovery, expected, "{cluster:?}");
        }
    }

    #[test]
    fn reads_the_secrets_that_come_over_ads() {
        let validation = ValidationContextType::ValidationContextSdsSecretConfig;
        let istio = || {
            let certificates = vec![secret("default", grpc())];
            tls_socket(certificates, Some(combined(secret("ROOTCA", grpc()))))
        };
        let credential = || {
            let certificates = vec![secret("c", ads()), secret("static", None)];
            tls_socket(certificates, Some(validation(secret("c-cacert", ads()))))
        };
        let other = || tls_socket(vec![secret("a", ads())], Some(combined(secret("b", ads()))));
        let bare =
            tls_socket(vec![], Some(ValidationContextType::ValidationContext(Default::default())));
        let tls = tls::UpstreamTlsContext::default().encode_to_vec();
        for (cluster, expected) in [
            (of_type(DiscoveryType::Static), &[][..]),
            (with_sockets(Some(istio()), vec![istio()]), &[]),
            (with_sockets(Some(credential()), vec![]), &["c", "c-cacert"]),
            (with_sockets(None, vec![istio(), credential()]), &["c", "c-cacert"]),
            (
                with_sockets(Some(credential()), vec![other(), other()]),
                &["a", "b", "c", "c-cacert"],
            ),
            (with_sockets(Some(bare), vec![socket("UpstreamTlsContext", tls)]), &[]),
            (with_sockets(Some(socket("QuicUpstreamTransport", vec![0xff])), vec![]), &[]),
        ] {
            assert_eq!(read(&cluster).secrets, expected, "{cluster:?}");
        }
    }

    #[test]
    fn broken_tls_settings_are_an_error() {
        let broken = with_sockets(Some(socket("UpstreamTlsContext", vec![0xff])), vec![]);
        assert!(ClusterFacts::read(&broken.encode_to_vec()).is_err());
    }

    proptest! {
        #[test]
        fn damaged_clusters_never_panic(
            damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
            length in any::<prop::sample::Index>(),
            garbage in prop::collection::vec(any::<u8>(), 0..64),
        ) {
            let certificates = vec![secret("c", ads())];
            let socket = tls_socket(certificates, Some(combined(secret("c-cacert", ads()))));
            let cluster = with_hosts(with_sockets(Some(socket.clone()), vec![socket]), &["a"]);
            let mut bytes = eds(cluster, ads(), "service").encode_to_vec();
            for (at, byte) in damage {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            for bytes in [&bytes[..], &bytes[..length.index(bytes.len())], &garbage] {
                let _ = ClusterFacts::read(bytes);
            }
        }
    }
}
