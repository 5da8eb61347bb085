//! Finds the clusters in the route tables of a delta response that Envoy cannot discover on demand, while the bytes of
//! the response pass.
//!
//! Envoy drops a mirrored request if it does not have the mirror's cluster. In a table that the caller calls whole, the
//! clusters of routes count, too. Clusters that only a request decides (`cluster_header`) or a plugin
//! (`cluster_specifier_plugin`, `route_specifiers`) cannot be known here. Routes in a `matcher` tree of a virtual host
//! are not read; istiod sends none. Field numbers are from `envoy/config/route/v3/route.proto` and
//! `route_components.proto`.

use prost::encoding::WireType;
use smallvec::SmallVec;

use crate::xds::wire::{Header, Malformed, available, read_header};

/// The longest name that is read, in bytes. Longer ones are ignored.
const MAX_NAME: u64 = 512;

/// The fields of a message that are read, by number. All others are skipped.
type Fields = &'static [(u32, Field)];

#[derive(Clone, Copy, Debug)]
enum Field {
    Message(Fields),
    /// The name of a route table.
    Table,
    /// The cluster of a route.
    Cluster,
    /// The cluster of a mirror.
    Mirror,
}

const RESPONSE: Fields = &[(2, Field::Message(RESOURCE))];
const RESOURCE: Fields = &[(2, Field::Message(ANY))];
const ANY: Fields = &[(2, Field::Message(TABLE))];
const TABLE: Fields =
    &[(1, Field::Table), (2, Field::Message(VIRTUAL_HOST)), (13, Field::Message(MIRROR))];
const VIRTUAL_HOST: Fields = &[(3, Field::Message(ROUTE)), (22, Field::Message(MIRROR))];
const ROUTE: Fields = &[(2, Field::Message(ROUTE_ACTION))];
const ROUTE_ACTION: Fields =
    &[(1, Field::Cluster), (3, Field::Message(WEIGHTED_CLUSTERS)), (30, Field::Message(MIRROR))];
const WEIGHTED_CLUSTERS: Fields = &[(1, Field::Message(CLUSTER_WEIGHT))];
const CLUSTER_WEIGHT: Fields = &[(1, Field::Cluster)];
const MIRROR: Fields = &[(1, Field::Mirror)];

/// Walks the route tables of one delta response. It holds two names at most.
#[derive(Debug)]
pub(super) struct RouteWalker {
    /// The length of the response.
    end: u64,
    /// The ends and fields of the nested messages that are being read, outermost first.
    nested: SmallVec<[(u64, Fields); 8]>,
    /// The number of bytes that have been read.
    position: u64,
    step: Step,
    /// The part of a header or of a name from earlier chunks.
    partial: Vec<u8>,
    /// The name of the table that is being read; empty until it is known.
    table: String,
    /// Whether the clusters of this table's routes count.
    is_whole: bool,
}

/// The part of a field that the next byte belongs to.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// A [`Header`].
    Header,
    /// A value that is skipped up to this position.
    Skip(u64),
    /// A name that ends at this position.
    Name(u64, Field),
}

impl RouteWalker {
    /// Creates a walker of a delta response of `length` bytes.
    pub(super) fn new(length: u64) -> Self {
        Self {
            end: length,
            nested: SmallVec::new(),
            position: 0,
            step: Step::Header,
            partial: Vec::new(),
            table: String::new(),
            is_whole: false,
        }
    }

    /// Reads the next bytes of the response, and calls `each` with the names of table and cluster for each cluster
    /// whose name ends in them. The same cluster may be reported more than once.
    ///
    /// `is_whole` is called with the name of each table, and returns whether the clusters of its routes count. Routes
    /// before the name, and routes of a table whose name is empty or too long, do not count.
    pub(super) fn read(
        &mut self,
        mut bytes: &[u8],
        is_whole: impl Fn(&str) -> bool,
        mut each: impl FnMut(&str, &str),
    ) -> Result<(), Malformed> {
        while !bytes.is_empty() {
            let read = match self.step {
                Step::Header => self.read_header(bytes)?,
                Step::Skip(end) => available(end - self.position, bytes),
                Step::Name(end, _) => {
                    let length = available(end - self.position, bytes);
                    self.partial.extend_from_slice(&bytes[..length]);
                    length
                }
            };
            self.position += read as u64;
            bytes = &bytes[read..];
            self.end_fields(&is_whole, &mut each)?;
        }
        Ok(())
    }

    /// Returns the end and the fields of the innermost message.
    fn innermost(&self) -> (u64, Fields) {
        self.nested.last().copied().unwrap_or((self.end, RESPONSE))
    }

    /// Reads the header of a field, or the part of it in `bytes`. Returns the number of bytes it has read.
    fn read_header(&mut self, bytes: &[u8]) -> Result<usize, Malformed> {
        let (end, fields) = self.innermost();
        let (read, header) = read_header(&mut self.partial, bytes, end - self.position)?;
        if let Some(Header { number, wire_type, length }) = header {
            let known = fields.iter().find(|(known, _)| *known == number);
            let field = known.filter(|_| wire_type == WireType::LengthDelimited);
            let end = self.position + read as u64 + length;
            self.step = self.begin_value(field.map(|(_, field)| *field), length, end);
        }
        Ok(read)
    }

    /// Returns the step that reads the value of a field.
    fn begin_value(&mut self, field: Option<Field>, length: u64, end: u64) -> Step {
        match field {
            Some(Field::Message(fields)) => {
                if self.nested.is_empty() {
                    self.table.clear();
                    self.is_whole = false;
                }
                self.nested.push((end, fields));
                Step::Header
            }
            Some(Field::Cluster) if !self.is_whole => Step::Skip(end),
            Some(field) if length <= MAX_NAME => Step::Name(end, field),
            _ => Step::Skip(end),
        }
    }

    /// Ends the values and nested messages that are complete.
    fn end_fields(
        &mut self,
        is_whole: &impl Fn(&str) -> bool,
        each: &mut impl FnMut(&str, &str),
    ) -> Result<(), Malformed> {
        match self.step {
            Step::Skip(end) if end == self.position => self.step = Step::Header,
            Step::Name(end, field) if end == self.position => {
                self.step = Step::Header;
                let name = String::from_utf8(std::mem::take(&mut self.partial))
                    .map_err(|_| Malformed("a string not UTF-8"))?;
                match field {
                    _ if name.is_empty() => {}
                    Field::Table => {
                        self.is_whole = is_whole(&name);
                        self.table = name;
                    }
                    _ => each(&self.table, &name),
                }
            }
            _ => {}
        }
        while self.nested.last().is_some_and(|(end, _)| *end == self.position) {
            self.nested.pop();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use envoy_types::pb::envoy::config::route::v3::route::Action;
    use envoy_types::pb::envoy::config::route::v3::route_action::{
        ClusterSpecifier, RequestMirrorPolicy,
    };
    use envoy_types::pb::envoy::config::route::v3::weighted_cluster::ClusterWeight;
    use envoy_types::pb::envoy::config::route::v3::{
        Route, RouteAction, RouteConfiguration, RouteMatch, VirtualHost, WeightedCluster,
    };
    use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryResponse, Resource};
    use envoy_types::pb::google::protobuf::Any;
    use proptest::prelude::*;
    use prost::Message;
    use prost::encoding::encode_varint;

    use super::*;

    type Found = Vec<(String, String)>;

    /// Tables whose name has an `a` are whole.
    fn is_whole(table: &str) -> bool {
        table.contains('a')
    }

    fn is_read(name: &str) -> bool {
        (1..=512).contains(&name.len())
    }

    /// Walks a response in chunks of these sizes. Returns what the walker found, and the tables it asked about.
    fn walk(bytes: &[u8], chunks: &[usize]) -> Result<(Found, Vec<String>), Malformed> {
        let (mut walker, mut rest) = (RouteWalker::new(bytes.len() as u64), bytes);
        let (mut found, tables) = (Vec::new(), RefCell::new(Vec::new()));
        for size in chunks.iter().cycle() {
            let (chunk, after) = rest.split_at((*size).min(rest.len()));
            let asked = |table: &str| {
                tables.borrow_mut().push(table.to_owned());
                is_whole(table)
            };
            walker
                .read(chunk, asked, |table, cluster| found.push((table.into(), cluster.into())))?;
            assert!(walker.partial.capacity() <= 1024, "{}", walker.partial.capacity());
            rest = after;
            if rest.is_empty() {
                break;
            }
        }
        found.sort();
        Ok((found, tables.into_inner()))
    }

    /// Returns what the walker must find, from the decoded response.
    fn expected(response: &DeltaDiscoveryResponse) -> (Found, Vec<String>) {
        let (mut found, mut tables) = (Vec::new(), Vec::new());
        for resource in &response.resources {
            let table = &resource.resource.as_ref().unwrap().value[..];
            let RouteConfiguration { name, virtual_hosts, request_mirror_policies, .. } =
                RouteConfiguration::decode(table).unwrap();
            let mut mirrors = request_mirror_policies;
            let mut clusters = Vec::new();
            for host in virtual_hosts {
                mirrors.extend(host.request_mirror_policies);
                for route in host.routes {
                    let Some(Action::Route(action)) = route.action else { continue };
                    mirrors.extend(action.request_mirror_policies);
                    match action.cluster_specifier {
                        Some(ClusterSpecifier::Cluster(cluster)) => clusters.push(cluster),
                        Some(ClusterSpecifier::WeightedClusters(weighted)) => {
                            clusters.extend(weighted.clusters.into_iter().map(|it| it.name));
                        }
                        _ => {}
                    }
                }
            }
            let name = if is_read(&name) { name } else { String::new() };
            if !is_whole(&name) {
                clusters.clear();
            }
            clusters.extend(mirrors.into_iter().map(|it| it.cluster));
            clusters.retain(|cluster| is_read(cluster));
            found.extend(clusters.into_iter().map(|cluster| (name.clone(), cluster)));
            tables.extend((!name.is_empty()).then_some(name));
        }
        found.sort();
        (found, tables)
    }

    /// Puts unknown fields of all wire types between the fields of a message and of those nested in it.
    fn with_unknown(
        mut bytes: &[u8],
        fields: Fields,
        noise: &mut impl Iterator<Item = u8>,
    ) -> Vec<u8> {
        let mut message = Vec::new();
        loop {
            match noise.next().unwrap() % 12 {
                0 => message.extend([0xf8, 0x7f, 0xff, 0x01]),
                1 => prost::encoding::bytes::encode(3000, &vec![7; 300], &mut message),
                2 => prost::encoding::fixed32::encode(2047, &7, &mut message),
                3 => prost::encoding::double::encode(2047, &7.0, &mut message),
                _ => {}
            }
            if bytes.is_empty() {
                return message;
            }
            let (read, header) = read_header(&mut Vec::new(), bytes, bytes.len() as u64).unwrap();
            let Header { number, wire_type, length } = header.unwrap();
            let (field, rest) = bytes.split_at(read + length as usize);
            bytes = rest;
            let known = fields.iter().find(|(known, _)| *known == number);
            match known.filter(|_| wire_type == WireType::LengthDelimited) {
                Some((_, Field::Message(fields))) => {
                    let nested = with_unknown(&field[read..], fields, noise);
                    prost::encoding::encode_key(number, wire_type, &mut message);
                    encode_varint(nested.len() as u64, &mut message);
                    message.extend(nested);
                }
                _ => message.extend(field),
            }
        }
    }

    fn name() -> impl Strategy<Value = String> {
        prop_oneof![8 => "[a-d|é]{1,9}", 1 => "a{505,520}", 1 => Just(String::new())]
    }

    fn mirrors() -> impl Strategy<Value = Vec<RequestMirrorPolicy>> {
        let mirror = name().prop_map(|cluster| RequestMirrorPolicy {
            cluster,
            cluster_header: "not-a-name".into(),
            runtime_fraction: Some(Default::default()),
            ..Default::default()
        });
        prop::collection::vec(mirror, 0..3)
    }

    fn route() -> impl Strategy<Value = Route> {
        let weight = name().prop_map(|name| ClusterWeight { name, ..Default::default() });
        let specifier = prop_oneof![
            name().prop_map(ClusterSpecifier::Cluster),
            name().prop_map(ClusterSpecifier::ClusterHeader),
            name().prop_map(ClusterSpecifier::ClusterSpecifierPlugin),
            prop::collection::vec(weight, 0..4).prop_map(|clusters| {
                let weighted = WeightedCluster { clusters, ..Default::default() };
                ClusterSpecifier::WeightedClusters(weighted)
            }),
        ];
        let forwarded = (prop::option::of(specifier), mirrors());
        let action = prop_oneof![
            8 => forwarded.prop_map(|(cluster_specifier, request_mirror_policies)| {
                Action::Route(RouteAction {
                    cluster_specifier,
                    request_mirror_policies,
                    ..Default::default()
                })
            }),
            1 => Just(Action::DirectResponse(Default::default())),
        ];
        (prop::option::of(action), "[a-z]{0,9}").prop_map(|(action, name)| Route {
            action,
            name,
            r#match: Some(RouteMatch::default()),
            ..Default::default()
        })
    }

    fn table() -> impl Strategy<Value = RouteConfiguration> {
        let host = (prop::collection::vec(route(), 0..4), mirrors()).prop_map(
            |(routes, request_mirror_policies)| VirtualHost {
                name: "not-a-table".into(),
                domains: vec!["not-a-cluster".into()],
                routes,
                request_mirror_policies,
                ..Default::default()
            },
        );
        (name(), prop::collection::vec(host, 0..4), mirrors()).prop_map(
            |(name, virtual_hosts, request_mirror_policies)| RouteConfiguration {
                name,
                virtual_hosts,
                request_mirror_policies,
                ..Default::default()
            },
        )
    }

    fn response() -> impl Strategy<Value = DeltaDiscoveryResponse> {
        prop::collection::vec(table(), 0..4).prop_map(|tables| {
            let resource = |table: RouteConfiguration| Resource {
                name: table.name.clone(),
                version: "v".into(),
                resource: Some(Any {
                    type_url: "type.googleapis.com/envoy.config.route.v3.RouteConfiguration".into(),
                    value: table.encode_to_vec(),
                }),
                ..Default::default()
            };
            DeltaDiscoveryResponse {
                system_version_info: "v".into(),
                resources: tables.into_iter().map(resource).collect(),
                removed_resources: vec!["removed".into()],
                nonce: "n".into(),
                ..Default::default()
            }
        })
    }

    fn chunks() -> impl Strategy<Value = Vec<usize>> {
        prop::collection::vec(prop_oneof![1usize..4, 1usize..600], 1..20)
    }

    #[test]
    fn table_without_name_is_not_whole_after_a_whole_one() {
        let cluster = ClusterSpecifier::Cluster("c".into());
        let action = RouteAction { cluster_specifier: Some(cluster), ..Default::default() };
        let route = Route { action: Some(Action::Route(action)), ..Default::default() };
        let host = VirtualHost { routes: vec![route], ..Default::default() };
        let resources = ["a", ""].map(|name| {
            let (name, virtual_hosts) = (name.to_owned(), vec![host.clone()]);
            let table = RouteConfiguration { name, virtual_hosts, ..Default::default() };
            let any = Any { type_url: String::new(), value: table.encode_to_vec() };
            Resource { resource: Some(any), ..Default::default() }
        });
        let response = DeltaDiscoveryResponse { resources: resources.into(), ..Default::default() };
        let found = vec![("a".to_owned(), "c".to_owned())];
        assert_eq!(walk(&response.encode_to_vec(), &[7]), Ok((found, vec!["a".to_owned()])));
    }

    #[test]
    fn name_that_is_not_utf8_is_malformed() {
        let bytes = [0x12, 6, 0x12, 4, 0x12, 2, 0x0a, 0];
        assert_eq!(walk(&bytes, &[3]), Ok((vec![], vec![])));
        let bytes = [0x12, 7, 0x12, 5, 0x12, 3, 0x0a, 1, 0xff];
        assert_eq!(walk(&bytes, &[3]), Err(Malformed("a string not UTF-8")));
    }

    proptest! {
        #[test]
        fn finds_what_the_decoded_response_has(
            response in response(),
            noise in prop::collection::vec(any::<u8>(), 1..200),
            chunks in chunks(),
        ) {
            let known = response.encode_to_vec();
            let bytes = with_unknown(&known, RESPONSE, &mut noise.into_iter().cycle());
            let decoded = DeltaDiscoveryResponse::decode(&bytes[..]).unwrap();
            prop_assert_eq!(expected(&decoded), expected(&response));
            prop_assert_eq!(walk(&bytes, &chunks), Ok(expected(&decoded)));
        }

        #[test]
        fn damaged_responses_never_panic(
            response in response(),
            damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
            length in any::<prop::sample::Index>(),
            garbage in prop::collection::vec(any::<u8>(), 0..64),
            chunks in chunks(),
        ) {
            let mut bytes = response.encode_to_vec();
            for (at, byte) in damage {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            let mut walker = RouteWalker::new(length.index(2 * bytes.len()) as u64);
            for (part, size) in [&bytes[..], &garbage].into_iter().zip(chunks.iter().cycle()) {
                // An error does not end the test: the next bytes must not panic either.
                for chunk in part.chunks(*size) {
                    let _ = walker.read(chunk, |_| true, |_, _| ());
                }
            }
            let _ = walk(&garbage, &chunks);
            let _ = walk(&bytes[..length.index(bytes.len())], &chunks);
        }
    }
}
