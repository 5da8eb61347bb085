//! Reads what a cluster waits for before Envoy can use it: endpoints, DNS, or secrets.
//!
//! Only these fields are read, because a push may have thousands of clusters. Field numbers are from
//! `envoy/config/cluster/v3/cluster.proto` and the files that it imports.

use std::collections::BTreeSet;
use std::net::IpAddr;

use super::listener::{Message, TYPE_URL, VALUE, text};
use crate::xds::wire::Malformed;

/// The names under which Envoy registers its cluster implementations. A custom cluster type has one of them, too.
const EDS: &[u8] = b"envoy.cluster.eds";
const DNS: &[u8] = b"envoy.cluster.dns";
const STRICT_DNS: &[u8] = b"envoy.cluster.strict_dns";
const LOGICAL_DNS: &[u8] = b"envoy.cluster.logical_dns";

/// The end of the type URL of a client's TLS settings.
const UPSTREAM_TLS: &[u8] = b"/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext";

// Field numbers of a cluster.
const NAME: u32 = 1;
const TYPE: u32 = 2;
const EDS_CLUSTER_CONFIG: u32 = 3;
const TRANSPORT_SOCKET: u32 = 24;
const LOAD_ASSIGNMENT: u32 = 33;
const CLUSTER_TYPE: u32 = 38;
const TRANSPORT_SOCKET_MATCHES: u32 = 43;
// Of a transport socket.
const TYPED_CONFIG: u32 = 3;
// Of a `ConfigSource`.
const ADS: u32 = 3;

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
    pub(super) fn read(cluster: &[u8]) -> Result<Self, Malformed> {
        let cluster = Message::of(cluster)?;
        Ok(Self { discovery: discovery(&cluster)?, secrets: secrets(&cluster)? })
    }
}

fn discovery(cluster: &Message) -> Result<Discovery, Malformed> {
    let kind = match (cluster.values(&[CLUSTER_TYPE, 1])?.last(), cluster.varint(TYPE)) {
        (Some(custom), _) => custom,
        (None, Some(3)) => EDS,
        (None, Some(1 | 2)) => DNS,
        (None, _) => return Ok(Discovery::Other),
    };
    match kind {
        EDS if !cluster.values(&[EDS_CLUSTER_CONFIG, 1, ADS])?.is_empty() => {
            // service_name
            let name = match cluster.values(&[EDS_CLUSTER_CONFIG, 2])?.pop() {
                Some(name) if !name.is_empty() => name,
                _ => cluster.values(&[NAME])?.pop().unwrap_or_default(),
            };
            Ok(Discovery::Endpoints(text(name)?))
        }
        DNS | STRICT_DNS | LOGICAL_DNS => {
            // endpoints.lb_endpoints.endpoint.address.socket_address.address
            let mut hosts = sorted(cluster.values(&[LOAD_ASSIGNMENT, 2, 2, 1, 1, 1, 2])?)?;
            hosts.retain(|it| it.parse::<IpAddr>().is_err());
            Ok(Discovery::Dns(hosts))
        }
        _ => Ok(Discovery::Other),
    }
}

/// Returns the names of the secrets that come over ADS.
fn secrets(cluster: &Message) -> Result<Vec<String>, Malformed> {
    let mut configs = cluster.values(&[TRANSPORT_SOCKET, TYPED_CONFIG])?;
    configs.append(&mut cluster.values(&[TRANSPORT_SOCKET_MATCHES, 3, TYPED_CONFIG])?);
    let mut names = Vec::new();
    for config in configs {
        let config = Message::of(config)?;
        if !config.values(&[TYPE_URL])?.last().is_some_and(|it| it.ends_with(UPSTREAM_TLS)) {
            continue;
        }
        // The fields of `CommonTlsContext` that name secrets: `tls_certificate_sds_secret_configs`,
        // `validation_context_sds_secret_config`, and the latter in `combined_validation_context`.
        for path in [&[6][..], &[7], &[8, 2]] {
            for secret in config.values(&[&[VALUE, 1], path].concat())? {
                let secret = Message::of(secret)?;
                if !secret.values(&[2, ADS])?.is_empty() {
                    names.append(&mut secret.values(&[1])?);
                }
            }
        }
    }
    sorted(names)
}

/// Sorts names, and removes those that are empty or occur twice.
fn sorted(names: Vec<&[u8]>) -> Result<Vec<String>, Malformed> {
    let names = names.into_iter().filter(|it| !it.is_empty()).map(text);
    Ok(names.collect::<Result<BTreeSet<_>, _>>()?.into_iter().collect())
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
    use pb::cluster::{ClusterDiscoveryType, DiscoveryType};
    use proptest::prelude::*;
    use prost::Message as _;
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
