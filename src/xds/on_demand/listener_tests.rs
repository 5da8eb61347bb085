use std::collections::BTreeSet;

use bytes::Bytes;
use envoy_types::pb::envoy::config::core::v3::{ExtensionConfigSource, TrafficDirection};
use envoy_types::pb::envoy::config::listener::v3::filter::ConfigType as NetworkConfig;
use envoy_types::pb::envoy::config::listener::v3::{Filter, FilterChain, Listener};
use envoy_types::pb::envoy::config::route::v3::route::Action;
use envoy_types::pb::envoy::config::route::v3::route_action::{
    ClusterSpecifier, RequestMirrorPolicy,
};
use envoy_types::pb::envoy::config::route::v3::{
    Route, RouteAction, RouteConfiguration, VirtualHost, WeightedCluster, weighted_cluster,
};
use envoy_types::pb::envoy::extensions::filters::network::http_connection_manager::v3::{
    HttpConnectionManager, HttpFilter, Rds, http_connection_manager, http_filter::ConfigType,
};
use envoy_types::pb::envoy::extensions::filters::network::mongo_proxy::v3::MongoProxy;
use envoy_types::pb::envoy::extensions::filters::network::tcp_proxy::v3::{TcpProxy, tcp_proxy};
use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryResponse, Resource};
use envoy_types::pb::google::protobuf::{Any, BoolValue, Duration};
use http_connection_manager::RouteSpecifier;
use proptest::prelude::*;
use prost::encoding::{decode_varint, encode_varint};
use prost::{Message, Name};

use super::listener::{Rewritten, RewrittenListener, rewrite};
use super::mention::Mention;

const FIRST: &str = "istio_agent.on_demand";
const LAST: &str = "istio_agent.on_demand_before_router";
const ROUTER: &str = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router";
const OTHER: &str = "type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua";
/// ADS, V3, and 5 s.
const TCP_ON_DEMAND: &[u8] = &[0x0a, 4, 0x1a, 0, 0x30, 2, 0x1a, 2, 8, 5];

fn field(number: u32, content: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    prost::encoding::bytes::encode(number, &content.to_vec(), &mut bytes);
    bytes
}

fn packed<T: Name>(message: &T) -> Any {
    Any { type_url: T::type_url(), value: message.encode_to_vec() }
}

fn http_filter(name: &str, type_url: &str, value: &[u8]) -> HttpFilter {
    let config = Any { type_url: type_url.into(), value: value.to_vec() };
    let config_type = Some(ConfigType::TypedConfig(config));
    HttpFilter { name: name.into(), config_type, ..Default::default() }
}

fn outbound(config: Any) -> Listener {
    let config_type = Some(NetworkConfig::TypedConfig(config));
    let filter = Filter { name: "filter".into(), config_type };
    Listener {
        name: "listener".into(),
        filter_chains: vec![FilterChain { filters: vec![filter], ..Default::default() }],
        traffic_direction: TrafficDirection::Outbound.into(),
        ..Default::default()
    }
}

fn response(listeners: &[Vec<u8>]) -> Bytes {
    let mut bytes = field(1, b"version");
    for (number, value) in listeners.iter().enumerate() {
        let listener = Any { type_url: Listener::type_url(), value: value.clone() };
        let resource =
            Resource { name: number.to_string(), resource: Some(listener), ..Default::default() };
        bytes.extend(field(2, &resource.encode_to_vec()));
    }
    bytes.extend(field(4, Listener::type_url().as_bytes()));
    bytes.into()
}

fn rewrite_one(listener: &Listener) -> (Bytes, RewrittenListener) {
    let Rewritten { message, mut listeners } =
        rewrite(&response(&[listener.encode_to_vec()]), |_| false).unwrap();
    assert_eq!(listeners.len(), 1);
    (message, listeners.remove(0))
}

/// A network filter for the property tests.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Sample {
    /// With so many HTTP filters before the router.
    Routed(usize),
    Inline,
    /// With so many HTTP filters, without a router.
    Unrouted(usize),
    DiscoveredRouter,
    UpgradeFilters,
    Tcp,
    TcpOnDemand,
    Mongo,
    Discovered,
}

impl Sample {
    /// Returns how many fields are inserted into an outbound listener for it.
    fn insertions(self) -> usize {
        match self {
            Self::Routed(_) | Self::Inline => 2,
            Self::Tcp => 1,
            _ => 0,
        }
    }

    fn config(self, padding: &str) -> Any {
        let stat_prefix = padding.to_owned();
        match self {
            Self::Tcp => packed(&TcpProxy { stat_prefix, ..Default::default() }),
            Self::TcpOnDemand => {
                let timeout = Some(Duration { seconds: 9, nanos: 0 });
                let on_demand = Some(tcp_proxy::OnDemand { timeout, ..Default::default() });
                packed(&TcpProxy { stat_prefix, on_demand, ..Default::default() })
            }
            Self::Mongo => packed(&MongoProxy { stat_prefix, ..Default::default() }),
            _ => packed(&HttpConnectionManager { stat_prefix, ..self.manager(padding) }),
        }
    }

    fn manager(self, padding: &str) -> HttpConnectionManager {
        let mut manager = HttpConnectionManager::default();
        let others = |count| vec![http_filter("other", OTHER, padding.as_bytes()); count];
        let router = http_filter("router", ROUTER, b"");
        manager.http_filters = match self {
            Self::Unrouted(count) => others(count),
            Self::Routed(count) => others(count),
            _ => others(1),
        };
        match self {
            Self::Unrouted(_) => {}
            Self::DiscoveredRouter => manager.http_filters.push(HttpFilter {
                name: "router".into(),
                config_type: Some(ConfigType::ConfigDiscovery(ExtensionConfigSource {
                    type_urls: vec![ROUTER.into()],
                    ..Default::default()
                })),
                ..Default::default()
            }),
            _ => manager.http_filters.push(router.clone()),
        }
        if self == Self::UpgradeFilters {
            let filters = vec![router];
            manager
                .upgrade_configs
                .push(http_connection_manager::UpgradeConfig { filters, ..Default::default() });
        }
        manager.route_specifier = Some(if self == Self::Inline {
            let name = padding.to_owned();
            RouteSpecifier::RouteConfig(RouteConfiguration { name, ..Default::default() })
        } else {
            let route_config_name = format!("table {padding}");
            RouteSpecifier::Rds(Rds { route_config_name, ..Default::default() })
        });
        manager
    }
}

fn samples() -> impl Strategy<Value = Sample> {
    prop_oneof![
        3 => (0usize..4).prop_map(Sample::Routed),
        1 => Just(Sample::Inline),
        1 => (0usize..3).prop_map(Sample::Unrouted),
        1 => Just(Sample::DiscoveredRouter),
        1 => Just(Sample::UpgradeFilters),
        3 => Just(Sample::Tcp),
        1 => Just(Sample::TcpOnDemand),
        1 => Just(Sample::Mongo),
        1 => Just(Sample::Discovered),
    ]
}

/// Returns nothing or an unknown field. Its length lets the lengths around it need one byte more after an insertion.
fn unknown() -> impl Strategy<Value = Vec<u8>> {
    let contents = prop_oneof![0usize..300, 16_000usize..16_400];
    prop_oneof![
        Just(Vec::new()),
        contents.prop_map(|length| field(3000, &vec![b'u'; length])),
        any_varint_field(),
    ]
}

fn any_varint_field() -> impl Strategy<Value = Vec<u8>> {
    any::<u64>().prop_map(|value| {
        let mut bytes = Vec::new();
        prost::encoding::uint64::encode(3001, &value, &mut bytes);
        bytes
    })
}

type SampleFilter = (Sample, usize, [Vec<u8>; 3]);

fn filter_field((sample, padding, unknown): &SampleFilter) -> Vec<u8> {
    let mut config = sample.config(&"p".repeat(*padding));
    config.value.extend(&unknown[0]);
    let config = [config.encode_to_vec(), unknown[1].clone()].concat();
    let config = if *sample == Sample::Discovered {
        field(5, &field(4, HttpConnectionManager::type_url().as_bytes()))
    } else {
        field(4, &config)
    };
    field(3, &[field(1, b"filter"), unknown[2].clone(), config].concat())
}

/// A listener: its direction, its chains of which the last may be the default one, and unknown fields.
type SampleListener = (i32, Vec<(Vec<SampleFilter>, Vec<u8>)>, bool, Vec<u8>);

fn listener_bytes((direction, chains, has_default, unknown): &SampleListener) -> Vec<u8> {
    let base = Listener { traffic_direction: *direction, ..Default::default() };
    let mut bytes = [base.encode_to_vec(), unknown.clone()].concat();
    for (index, (filters, unknown)) in chains.iter().enumerate() {
        let number = if *has_default && index == chains.len() - 1 { 25 } else { 3 };
        let filters = filters.iter().map(filter_field).collect::<Vec<_>>().concat();
        bytes.extend(field(number, &[filters, unknown.clone(), field(7, b"chain")].concat()));
    }
    bytes
}

fn sample_listeners() -> impl Strategy<Value = Vec<SampleListener>> {
    // Without any field a configuration has no value.
    let padding = prop_oneof![1usize..140, 16_300usize..16_400];
    let filter = (samples(), padding, [unknown(), unknown(), unknown()]);
    let chain = (prop::collection::vec(filter, 0..3), unknown());
    let direction = prop_oneof![3 => Just(2), 1 => 0..3];
    let chains = prop::collection::vec(chain, 0..4);
    prop::collection::vec((direction, chains, any::<bool>(), unknown()), 0..4)
}

/// Splits a field off a message. Returns its tag as bytes, its number, its content if it is length-delimited, and
/// all of its bytes.
fn split<'a>(rest: &mut &'a [u8]) -> (&'a [u8], u64, Option<&'a [u8]>, &'a [u8]) {
    let start = *rest;
    let key = decode_varint(rest).unwrap();
    let tag = &start[..start.len() - rest.len()];
    let content = match key & 7 {
        0 => decode_varint(rest).map(|_| None).unwrap(),
        2 => {
            let length = decode_varint(rest).unwrap() as usize;
            Some(rest.split_off(..length).unwrap())
        }
        wire_type => panic!("no test has wire type {wire_type}"),
    };
    (tag, key >> 3, content, &start[..start.len() - rest.len()])
}

/// Removes the inserted fields of a rewritten message by decoding and encoding the messages around them.
fn without_insertions(message: &[u8], path: &[&[u64]], removed: &mut usize) -> Vec<u8> {
    let (mut rest, mut out) = (message, Vec::new());
    while !rest.is_empty() {
        match (split(&mut rest), path) {
            ((_, 5, Some(filter), _), []) if filter[2..].starts_with(FIRST.as_bytes()) => {
                *removed += 1;
            }
            ((_, 14, Some(TCP_ON_DEMAND), _), []) => *removed += 1,
            ((tag, number, Some(content), _), [numbers, path @ ..])
                if numbers.contains(&number) =>
            {
                let content = without_insertions(content, path, removed);
                out.extend_from_slice(tag);
                encode_varint(content.len() as u64, &mut out);
                out.extend(content);
            }
            ((_, _, _, field), _) => out.extend_from_slice(field),
        }
    }
    out
}

/// The field numbers from a response to a network filter's configuration.
const PATH: &[&[u64]] = &[&[2], &[2], &[2], &[3, 25], &[3], &[4], &[2]];

#[derive(Debug, PartialEq)]
enum Decoded {
    Manager(Box<HttpConnectionManager>),
    Tcp(Box<TcpProxy>),
    Other(Box<Filter>),
}

/// Decodes a response, and the network filters in it.
fn decoded(message: &[u8]) -> (DeltaDiscoveryResponse, Vec<(Listener, Vec<Decoded>)>) {
    let mut response = DeltaDiscoveryResponse::decode(message).unwrap();
    let listeners = response.resources.iter_mut().map(|resource| {
        let any = resource.resource.take().unwrap();
        let mut listener = Listener::decode(&any.value[..]).unwrap();
        let mut chains: Vec<_> = listener.filter_chains.iter_mut().collect();
        chains.extend(&mut listener.default_filter_chain);
        let filters = chains.into_iter().flat_map(|chain| std::mem::take(&mut chain.filters));
        let filters = filters.map(|filter| match &filter.config_type {
            Some(NetworkConfig::TypedConfig(any)) => {
                let (url, value) = (&any.type_url, &any.value[..]);
                if *url == HttpConnectionManager::type_url() {
                    Decoded::Manager(Box::new(HttpConnectionManager::decode(value).unwrap()))
                } else if *url == TcpProxy::type_url() {
                    Decoded::Tcp(Box::new(TcpProxy::decode(value).unwrap()))
                } else {
                    Decoded::Other(Box::new(filter))
                }
            }
            _ => Decoded::Other(Box::new(filter)),
        });
        let filters = filters.collect();
        (listener, filters)
    });
    let listeners = listeners.collect();
    (response, listeners)
}

/// Removes what was inserted, and asserts that it is in the right place.
fn remove_decoded(filter: &mut Decoded) {
    match filter {
        Decoded::Manager(manager) => {
            let filters = &mut manager.http_filters;
            if filters.iter().any(|filter| filter.name == FIRST) {
                assert_eq!(filters.remove(0).name, FIRST);
                assert_eq!(filters.remove(filters.len() - 2).name, LAST);
                assert_eq!(filters.last().unwrap().name, "router");
            }
        }
        Decoded::Tcp(proxy) => {
            let inserted = tcp_proxy::OnDemand::decode(TCP_ON_DEMAND).unwrap();
            proxy.on_demand.take_if(|on_demand| *on_demand == inserted);
        }
        Decoded::Other(_) => {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn without_insertions_a_response_is_istiods(samples in sample_listeners()) {
        let message = response(&samples.iter().map(listener_bytes).collect::<Vec<_>>());
        let rewritten = rewrite(&message, |_| false).unwrap();
        let expected = samples.iter().map(|(direction, chains, ..)| {
            let filters = chains.iter().flat_map(|(filters, _)| filters);
            let count = filters.map(|(sample, ..)| sample.insertions()).sum::<usize>();
            if *direction == 2 { count } else { 0 }
        }).collect::<Vec<_>>();

        let mut removed = 0;
        let restored = without_insertions(&rewritten.message, PATH, &mut removed);
        prop_assert_eq!(Bytes::from(restored), message.clone());
        prop_assert_eq!(removed, expected.iter().sum::<usize>());
        if removed == 0 {
            prop_assert_eq!(rewritten.message.as_ptr(), message.as_ptr());
        }

        let (mut changed, original) = (decoded(&rewritten.message), decoded(&message));
        changed.1.iter_mut().flat_map(|(_, filters)| filters).for_each(remove_decoded);
        prop_assert_eq!(changed, original);

        for (index, (listener, expected)) in rewritten.listeners.iter().zip(expected).enumerate() {
            prop_assert_eq!(&listener.name, &index.to_string());
            prop_assert_eq!(listener.is_rewritten, expected > 0);
            let mut field = &message[listener.original.clone()];
            let (_, number, resource, _) = split(&mut field);
            prop_assert_eq!((number, field.len()), (2, 0));
            let resource = Resource::decode(resource.unwrap()).unwrap();
            prop_assert_eq!(&resource.name, &listener.name);
        }
        prop_assert_eq!(rewritten.listeners.len(), samples.len());
    }

    #[test]
    fn damaged_responses_do_not_panic(
        samples in sample_listeners(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        end in any::<prop::sample::Index>(),
    ) {
        let mut message = response(&samples.iter().map(listener_bytes).collect::<Vec<_>>()).to_vec();
        for (index, byte) in damage {
            let index = index.index(message.len());
            message[index] = byte;
        }
        message.truncate(end.index(message.len() * 2).max(1));
        let message = Bytes::from(message);
        if let Ok(rewritten) = rewrite(&message, |_| false) {
            for listener in rewritten.listeners {
                prop_assert!(listener.original.end <= message.len());
            }
        }
    }

    #[test]
    fn garbage_does_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let nested = [2u32, 2, 3, 3, 4].iter().rev().fold(bytes.clone(), |content, number| {
            field(*number, &content)
        });
        for bytes in [bytes.clone(), nested, response(&[bytes]).to_vec()] {
            drop(rewrite(&bytes.into(), |_| false));
        }
    }
}

fn cluster(name: &str) -> String {
    format!("outbound|80||{name}")
}

fn hosts(mentions: &[Mention]) -> String {
    let known = |name: &str| name.len() == cluster("x").len();
    let clusters = mentions.iter().filter_map(|mention| mention.cluster(known));
    // Two mentions of a cluster may differ in the bytes after the name.
    clusters
        .filter_map(|name| name.rsplit('|').next())
        .collect::<BTreeSet<_>>()
        .into_iter()
        .collect()
}

fn mirror(name: &str) -> RequestMirrorPolicy {
    RequestMirrorPolicy { cluster: cluster(name), ..Default::default() }
}

fn inline_routes(validate_clusters: Option<bool>) -> RouteSpecifier {
    let route = |specifier, mirrors| Route {
        action: Some(Action::Route(RouteAction {
            cluster_specifier: Some(specifier),
            request_mirror_policies: mirrors,
            ..Default::default()
        })),
        ..Default::default()
    };
    let member =
        weighted_cluster::ClusterWeight { name: cluster("w"), weight: None, ..Default::default() };
    let weighted = WeightedCluster { clusters: vec![member], ..Default::default() };
    RouteSpecifier::RouteConfig(RouteConfiguration {
        virtual_hosts: vec![VirtualHost {
            name: cluster("n"),
            routes: vec![
                route(ClusterSpecifier::Cluster(cluster("c")), vec![mirror("1")]),
                route(ClusterSpecifier::WeightedClusters(weighted), vec![]),
            ],
            request_mirror_policies: vec![mirror("2")],
            ..Default::default()
        }],
        request_mirror_policies: vec![mirror("3")],
        validate_clusters: validate_clusters.map(|value| BoolValue { value }),
        ..Default::default()
    })
}

fn manager(routes: RouteSpecifier, filters: &[&str]) -> Any {
    let filters = filters.iter().map(|url| http_filter("f", url, cluster("f").as_bytes()));
    packed(&HttpConnectionManager {
        stat_prefix: cluster("s"),
        route_specifier: Some(routes),
        http_filters: filters.collect(),
        ..Default::default()
    })
}

fn tcp(on_demand: Option<tcp_proxy::OnDemand>) -> Any {
    let member =
        tcp_proxy::weighted_cluster::ClusterWeight { name: cluster("w"), ..Default::default() };
    let clusters = vec![member];
    let weighted = tcp_proxy::WeightedCluster { clusters };
    packed(&TcpProxy {
        stat_prefix: cluster("s"),
        cluster_specifier: Some(tcp_proxy::ClusterSpecifier::WeightedClusters(weighted)),
        tunneling_config: Some(tcp_proxy::TunnelingConfig {
            hostname: cluster("h"),
            ..Default::default()
        }),
        on_demand,
        ..Default::default()
    })
}

fn rds() -> RouteSpecifier {
    RouteSpecifier::Rds(Rds { route_config_name: "8080".into(), ..Default::default() })
}

#[test]
fn fields_for_which_envoy_asks_are_no_mentions() {
    let tcp_cluster = packed(&TcpProxy {
        stat_prefix: format!("{};", cluster("s")),
        cluster_specifier: Some(tcp_proxy::ClusterSpecifier::Cluster(cluster("c"))),
        ..Default::default()
    });
    let mongo = packed(&MongoProxy {
        stat_prefix: cluster("s"),
        access_log: cluster("a"),
        ..Default::default()
    });
    let mysql = Any {
        type_url: "type.googleapis.com/envoy.extensions.filters.network.mysql_proxy.v3.MySQLProxy"
            .into(),
        value: mongo.value.clone(),
    };
    let unknown = Any { type_url: "type.googleapis.com/x.Y".into(), value: mongo.value.clone() };
    let has_own = Some(tcp_proxy::OnDemand::default());
    let trusted = Some(false);
    // The filter, and whether it is rewritten, the mentions and the route tables of an outbound listener with it; the
    // mentions of the same listener without a direction.
    let cases: [(Any, bool, &str, &[&str], &str); 15] = [
        (tcp_cluster, true, "", &[], "cs"),
        (tcp(None), true, "h", &[], "hsw"),
        (tcp(has_own), false, "hsw", &[], "hsw"),
        (mongo, false, "a", &[], "as"),
        (mysql, false, "a", &[], "as"),
        (unknown, false, "as", &[], "as"),
        (manager(rds(), &[ROUTER]), true, "f", &[], "fs"),
        (manager(rds(), &[OTHER, ROUTER]), true, "f", &[], "fs"),
        (manager(rds(), &[]), false, "s", &["8080"], "s"),
        (manager(rds(), &[OTHER]), false, "fs", &["8080"], "fs"),
        (manager(rds(), &[ROUTER, OTHER]), false, "fs", &["8080"], "fs"),
        (manager(inline_routes(trusted), &[ROUTER]), true, "123f", &[], "123cfnsw"),
        (manager(inline_routes(None), &[ROUTER]), true, "123cfnw", &[], "123cfnsw"),
        (manager(inline_routes(Some(true)), &[ROUTER]), true, "123cfnw", &[], "123cfnsw"),
        (manager(inline_routes(trusted), &[OTHER]), false, "123cfnsw", &[], "123cfnsw"),
    ];
    for (config, is_rewritten, mentions, tables, without_direction) in cases {
        let mut listener = outbound(config);
        listener.stat_prefix = cluster("l");
        listener.filter_chains[0].name = cluster("k");
        let (_, found) = rewrite_one(&listener);
        assert_eq!(found.is_rewritten, is_rewritten, "{listener:?}");
        assert_eq!(hosts(&found.mentions), mentions, "{listener:?}");
        assert_eq!(found.route_tables, tables, "{listener:?}");

        listener.traffic_direction = TrafficDirection::Inbound.into();
        let (_, found) = rewrite_one(&listener);
        let mut expected: Vec<_> = without_direction.chars().chain("kl".chars()).collect();
        expected.sort_unstable();
        assert_eq!(hosts(&found.mentions), String::from_iter(expected), "{listener:?}");
        assert!(!found.is_rewritten);
        let names_table = String::from_utf8_lossy(&listener.encode_to_vec()).contains("8080");
        assert_eq!(found.route_tables, if names_table { vec!["8080"] } else { vec![] });
    }
}

#[test]
fn a_malformed_listener_costs_only_its_own_rewriting() {
    let good = outbound(tcp(None)).encode_to_vec();
    let mut long_length = field(4, &tcp(None).encode_to_vec());
    // The length of the configuration is one byte longer than it must be.
    let end = 1 + long_length[1..].iter().position(|byte| byte & 0x80 == 0).unwrap();
    long_length[end] |= 0x80;
    long_length.insert(end + 1, 0);
    let direction = Listener { traffic_direction: 2, ..Default::default() }.encode_to_vec();
    let not_shortest = field(3, &field(3, &long_length));
    let twice = field(3, &field(3, &[&field(4, &tcp(None).encode_to_vec())[..]; 2].concat()));
    let damaged = [
        [good.clone(), vec![0xff]].concat(),
        [good.clone(), vec![0x1a, 0x7f]].concat(),
        [good.clone(), field(3, &[0x1a, 5, 0])].concat(),
        [good.clone(), vec![0x1b, 0x1c]].concat(),
        [direction.clone(), not_shortest].concat(),
        [direction, twice].concat(),
    ];
    for bad in damaged {
        let message = response(&[good.clone(), bad.clone(), good.clone()]);
        let rewritten = rewrite(&message, |_| false).unwrap();
        let is_rewritten = rewritten.listeners.iter().map(|listener| listener.is_rewritten);
        assert!(is_rewritten.eq([true, false, true]), "{bad:?}");
        let mentions = rewritten.listeners.iter().map(|listener| hosts(&listener.mentions));
        assert!(mentions.eq(["h", "hsw", "h"]), "{bad:?}");
        let original = &message[rewritten.listeners[1].original.clone()];
        assert!(rewritten.message.windows(original.len()).any(|part| part == original));
    }
}

#[test]
fn a_malformed_response_is_an_error() {
    let good = response(&[outbound(tcp(None)).encode_to_vec()]);
    let cases = [
        good[..good.len() - 1].to_vec(),
        [&good[..], &field(2, &[0x1a, 5])].concat(),
        [&good[..], &field(2, &field(3, b"\xff"))].concat(),
        [&good[..], &[0]].concat(),
    ];
    for case in cases {
        assert!(rewrite(&case.into(), |_| false).is_err());
    }
}

#[test]
fn resources_without_a_listener_stay() {
    let other = Resource { resource: Some(tcp(None)), ..Default::default() };
    let empty = Resource { name: "ttl".into(), ..Default::default() };
    let resources = [other, empty].map(|resource| field(2, &resource.encode_to_vec()));
    let message = Bytes::from(resources.concat());
    let rewritten = rewrite(&message, |_| false).unwrap();
    assert_eq!(rewritten.message, message);
    let mentions = rewritten.listeners.iter().map(|listener| hosts(&listener.mentions));
    assert!(mentions.eq(["hsw", ""]));
}

#[test]
fn envoy_gets_the_timeouts_and_the_source() {
    use envoy_types::pb::envoy::config::core::v3::config_source::ConfigSourceSpecifier;
    use envoy_types::pb::envoy::extensions::filters::http::on_demand::v3::OnDemand;

    let (message, _) = rewrite_one(&outbound(manager(rds(), &[OTHER, ROUTER])));
    let (_, listeners) = decoded(&message);
    let Decoded::Manager(manager) = &listeners[0].1[0] else { panic!("{listeners:?}") };
    for (index, name, seconds) in [(0, FIRST, 5), (2, LAST, 1)] {
        let filter = &manager.http_filters[index];
        assert_eq!(filter.name, name);
        let Some(ConfigType::TypedConfig(config)) = &filter.config_type else { panic!() };
        assert_eq!(config.type_url, OnDemand::type_url());
        let odcds = OnDemand::decode(&config.value[..]).unwrap().odcds.unwrap();
        assert_eq!(odcds.timeout, Some(Duration { seconds, nanos: 0 }));
        let source = odcds.source.unwrap();
        assert_eq!(source.resource_api_version, 2);
        let specifier = source.config_source_specifier;
        assert!(matches!(specifier, Some(ConfigSourceSpecifier::Ads(_))));
    }
}
