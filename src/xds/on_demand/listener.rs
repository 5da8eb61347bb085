//! Rewrites istiod's outbound listeners so that Envoy asks for clusters on demand, and collects the clusters that they
//! name for other purposes.
//!
//! HTTP connection managers get the `on_demand` HTTP filter, first and last before the router; TCP proxies get the
//! field `on_demand`. The bytes are spliced: the lengths of the messages around an insertion change, and all other
//! bytes, unknown fields among them, stay as they are. Field numbers are from Envoy's proto files.
//!
//! The filter is first because Istio's own filters read the cluster of the route, and last again because a filter
//! between can change the route.

use std::ops::Range;
use std::sync::LazyLock;

use bytes::{BufMut, Bytes, BytesMut};
use envoy_types::pb::envoy::config::core::v3::config_source::ConfigSourceSpecifier;
use envoy_types::pb::envoy::config::core::v3::{AggregatedConfigSource, ApiVersion, ConfigSource};
use envoy_types::pb::envoy::extensions::filters::http::on_demand::v3::{OnDemand, OnDemandCds};
use envoy_types::pb::envoy::extensions::filters::network::http_connection_manager::v3::{
    HttpFilter, http_filter::ConfigType,
};
use envoy_types::pb::envoy::extensions::filters::network::tcp_proxy::v3::tcp_proxy;
use envoy_types::pb::google::protobuf::{Any, Duration};
use prost::encoding::{WireType, decode_varint, encode_varint, encoded_len_varint, message};
use prost::{Message as _, Name as _};

use super::mention::{self, Mention};
use crate::xds::LISTENER;
use crate::xds::wire::{Header, Malformed, decode_header};

/// The names of the inserted HTTP filters.
const FIRST_FILTER_NAME: &str = "istio_agent.on_demand";
const LAST_FILTER_NAME: &str = "istio_agent.on_demand_before_router";

/// How long a request waits in the first filter, and a connection in a TCP proxy, in seconds. A new stream to istiod
/// after refused ones needs more than 2 s.
const TIMEOUT: i64 = 5;
/// How long a request waits in the filter before the router, in seconds. It may have waited in the first filter before.
const LAST_FILTER_TIMEOUT: i64 = 1;

const ROUTER: &str = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router";
/// The network filters that name clusters in known fields.
const NETWORK_FILTERS: &[(&str, Kind)] = &[
    (
        "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        Kind::HttpConnectionManager,
    ),
    ("type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy", Kind::TcpProxy),
    (
        "type.googleapis.com/envoy.extensions.filters.network.mongo_proxy.v3.MongoProxy",
        Kind::StatPrefix,
    ),
    (
        "type.googleapis.com/envoy.extensions.filters.network.redis_proxy.v3.RedisProxy",
        Kind::StatPrefix,
    ),
    (
        "type.googleapis.com/envoy.extensions.filters.network.mysql_proxy.v3.MySQLProxy",
        Kind::StatPrefix,
    ),
];

// Field numbers of a delta response and its `Resource`.
const RESOURCES: u32 = 2;
const RESOURCE: u32 = 2;
const RESOURCE_NAME: u32 = 3;
// Of `Any`.
pub(super) const TYPE_URL: u32 = 1;
pub(super) const VALUE: u32 = 2;
// Of a listener.
const TRAFFIC_DIRECTION: u32 = 16;
// Of network filters and HTTP filters.
const TYPED_CONFIG: u32 = 4;
const CONFIG_DISCOVERY: u32 = 5;
// Of an HTTP connection manager, its `Rds` and its `UpgradeConfig`.
const RDS: u32 = 3;
const HTTP_FILTERS: u32 = 5;
const UPGRADE_CONFIGS: u32 = 23;
const ROUTE_CONFIG_NAME: u32 = 2;
const UPGRADE_FILTERS: u32 = 2;
// Of a route table, and of `BoolValue`.
const VALIDATE_CLUSTERS: u32 = 7;
const BOOL_VALUE: u32 = 1;
// Of a TCP proxy.
const ON_DEMAND: u32 = 14;

/// The value of `traffic_direction` of outbound listeners.
const OUTBOUND: u64 = 2;

/// The fields that are inserted, tags included.
static FIRST_FILTER: LazyLock<Vec<u8>> = LazyLock::new(|| http_filter(FIRST_FILTER_NAME, TIMEOUT));
static LAST_FILTER: LazyLock<Vec<u8>> =
    LazyLock::new(|| http_filter(LAST_FILTER_NAME, LAST_FILTER_TIMEOUT));
static TCP_ON_DEMAND: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let on_demand = tcp_proxy::OnDemand {
        odcds_config: Some(ads()),
        timeout: Some(seconds(TIMEOUT)),
        ..Default::default()
    };
    encoded_field(ON_DEMAND, &on_demand)
});

/// A delta response of listeners, rewritten.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Rewritten {
    /// The response. It shares the memory of istiod's response if nothing was inserted.
    pub(super) message: Bytes,
    /// The listeners in the order of the response.
    pub(super) listeners: Vec<RewrittenListener>,
}

/// A listener of a response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RewrittenListener {
    /// The name of the resource.
    pub(super) name: String,
    /// The bytes of the field `resources` in istiod's response, tag included.
    pub(super) original: Range<usize>,
    /// Whether Envoy gets other bytes than istiod's.
    pub(super) is_rewritten: bool,
    /// The texts that may name a cluster for which Envoy does not ask. Sorted, each once.
    pub(super) mentions: Vec<Mention>,
    /// The names of the route tables whose clusters Envoy does not ask for.
    pub(super) route_tables: Vec<String>,
}

/// Rewrites the listeners of a delta response, except for those for whose names `is_plain` returns true.
///
/// Fails if the response or one of its `Resource` messages is malformed. A malformed listener in it stays as it is, and
/// all of its text counts as mentions.
pub(super) fn rewrite(
    message: &Bytes,
    is_plain: impl Fn(&str) -> bool,
) -> Result<Rewritten, Malformed> {
    let mut rewriter = Rewriter { response: message, ..Default::default() };
    let response = Message::of(message)?;
    let listeners = response
        .all(RESOURCES)
        .map(|field| rewriter.rewrite(field, &is_plain))
        .collect::<Result<_, _>>()?;
    Ok(Rewritten { message: rewriter.finish().unwrap_or_else(|| message.clone()), listeners })
}

/// What a message is. [`Kind::part`] says which of its fields matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Resource,
    /// An `Any` that holds one of these types. Others are not read.
    Any(&'static [(&'static str, Kind)]),
    Listener,
    FilterChain,
    NetworkFilter,
    HttpConnectionManager,
    TcpProxy,
    /// A network filter whose first field is `stat_prefix`.
    StatPrefix,
    RouteConfiguration,
    VirtualHost,
    Route,
    RouteAction,
    WeightedClusters,
    ClusterWeight,
}

/// What a field is.
enum Part {
    /// A text that may be a cluster's name, and that does not make Envoy use the cluster, or for which Envoy asks.
    Exempt,
    Message(Kind),
}

impl Kind {
    /// Returns what the field `number` is. All text in fields without a part counts.
    fn part(self, number: u32) -> Option<Part> {
        Some(match (self, number) {
            // Names of resources, listeners, filter chains and virtual hosts, and `stat_prefix`.
            (Self::Resource, RESOURCE_NAME)
            | (Self::Listener, 1 | 28)
            | (Self::FilterChain, 7)
            | (Self::HttpConnectionManager, 2)
            | (Self::TcpProxy | Self::StatPrefix | Self::VirtualHost, 1)
            // Clusters.
            | (Self::TcpProxy, 2)
            | (Self::RouteAction | Self::ClusterWeight, 1) => Part::Exempt,
            (Self::Resource, RESOURCE) => Part::Message(Self::Any(&[(LISTENER, Self::Listener)])),
            (Self::Listener, 3 | 25) => Part::Message(Self::FilterChain),
            (Self::FilterChain, 3) => Part::Message(Self::NetworkFilter),
            (Self::NetworkFilter, TYPED_CONFIG) => Part::Message(Self::Any(NETWORK_FILTERS)),
            (Self::HttpConnectionManager, 4) => Part::Message(Self::RouteConfiguration),
            (Self::RouteConfiguration, 2) => Part::Message(Self::VirtualHost),
            (Self::VirtualHost, 3) => Part::Message(Self::Route),
            (Self::Route, 2) => Part::Message(Self::RouteAction),
            (Self::RouteAction, 3) | (Self::TcpProxy, 10) => Part::Message(Self::WeightedClusters),
            (Self::WeightedClusters, 1) => Part::Message(Self::ClusterWeight),
            _ => return None,
        })
    }
}

/// A field, by its place in the response.
#[derive(Clone, Debug)]
struct Field {
    number: u32,
    wire_type: WireType,
    /// The beginning of the tag.
    start: usize,
    /// The number of a varint field, the length of a length-delimited field, empty for other fields.
    varint: Range<usize>,
    /// The value of a field that is not a varint.
    value: Range<usize>,
}

/// The fields of a message in their order.
pub(super) struct Message<'a> {
    response: &'a [u8],
    end: usize,
    fields: Vec<Field>,
}

impl<'a> Message<'a> {
    pub(super) fn of(bytes: &'a [u8]) -> Result<Self, Malformed> {
        Self::read(bytes, 0..bytes.len())
    }

    /// Reads the message that is at `range` of the response.
    fn read(response: &'a [u8], Range { start, end }: Range<usize>) -> Result<Self, Malformed> {
        let mut rest = &response[start..end];
        let mut fields = Vec::new();
        while !rest.is_empty() {
            let start = end - rest.len();
            let mut after_tag = rest;
            let header = decode_varint(&mut after_tag).ok().and(decode_header(&mut rest));
            let Header { number, wire_type, length } =
                header.ok_or(Malformed("a field without a valid tag and length"))?;
            let length = usize::try_from(length).ok().filter(|length| *length <= rest.len());
            let length = length.ok_or(Malformed("a field is longer than its message"))?;
            let value = end - rest.len();
            fields.push(Field {
                number,
                wire_type,
                start,
                varint: end - after_tag.len()..value,
                value: value..value + length,
            });
            rest = &rest[length..];
        }
        Ok(Self { response, end, fields })
    }

    /// Returns the length-delimited fields.
    fn delimited(&self) -> impl Iterator<Item = &Field> {
        self.fields.iter().filter(|field| field.wire_type == WireType::LengthDelimited)
    }

    /// Returns the length-delimited fields with this number.
    fn all(&self, number: u32) -> impl Iterator<Item = &Field> {
        self.delimited().filter(move |field| field.number == number)
    }

    /// Returns the length-delimited field with this number. Fails if there are several: parsers merge them.
    fn single(&self, number: u32) -> Result<Option<&Field>, Malformed> {
        let mut fields = self.all(number);
        match (fields.next(), fields.next()) {
            (field, None) => Ok(field),
            _ => Err(Malformed("a field occurs twice")),
        }
    }

    /// Returns the bytes of the string in the field with this number, or none.
    fn string(&self, number: u32) -> Result<&'a [u8], Malformed> {
        let field = self.single(number)?;
        Ok(field.map_or(&[], |field| &self.response[field.value.clone()]))
    }

    /// Returns the values of the length-delimited fields at a path of field numbers.
    pub(super) fn values(&self, path: &[u32]) -> Result<Vec<&'a [u8]>, Malformed> {
        let mut values = Vec::new();
        if let Some((number, inner)) = path.split_first() {
            for value in self.all(*number).map(|field| &self.response[field.value.clone()]) {
                match inner {
                    [] => values.push(value),
                    _ => values.append(&mut Message::of(value)?.values(inner)?),
                }
            }
        }
        Ok(values)
    }

    /// Returns the number in the last varint field with this number.
    pub(super) fn varint(&self, number: u32) -> Option<u64> {
        let mut fields = self.fields.iter().rev();
        let field = fields.find(|it| it.number == number && it.wire_type == WireType::Varint)?;
        decode_varint(&mut &self.response[field.varint.clone()]).ok()
    }
}

/// A change of the response's bytes.
#[derive(Debug)]
struct Edit {
    /// The bytes that are replaced.
    range: Range<usize>,
    new: New,
}

#[derive(Debug)]
enum New {
    Field(&'static [u8]),
    Length(u64),
}

/// Collects the changes of a response.
#[derive(Default)]
struct Rewriter<'a> {
    response: &'a [u8],
    edits: Vec<Edit>,
    /// By how many bytes the response grows.
    growth: usize,
    /// Whether the current listener is outbound, and to be rewritten.
    is_outbound: bool,
    /// Whether Envoy has rejected the current listener in its rewritten form.
    is_plain: bool,
    /// The exempt fields of the current listener, in their order.
    exempt: Vec<Range<usize>>,
    /// The route tables of the current listener.
    route_tables: Vec<String>,
}

impl Rewriter<'_> {
    /// Rewrites the listener in a field `resources`.
    fn rewrite(
        &mut self,
        field: &Field,
        is_plain: impl Fn(&str) -> bool,
    ) -> Result<RewrittenListener, Malformed> {
        let resource = Message::read(self.response, field.value.clone())?;
        let name = text(resource.string(RESOURCE_NAME)?)?;
        (self.is_outbound, self.is_plain) = (false, is_plain(&name));
        let edits = self.edits.len();
        let growth = self.enter(Kind::Resource, field).unwrap_or_else(|_| {
            self.edits.truncate(edits);
            self.is_outbound = false;
            0
        });
        self.growth += growth;
        Ok(RewrittenListener {
            name,
            original: field.start..field.value.end,
            is_rewritten: growth > 0,
            mentions: self.take_mentions(&field.value),
            route_tables: std::mem::take(&mut self.route_tables),
        })
    }

    /// Reads the message in a field. Returns by how many bytes the field grows.
    fn enter(&mut self, kind: Kind, field: &Field) -> Result<usize, Malformed> {
        let growth = self.visit(kind, &Message::read(self.response, field.value.clone())?)?;
        if growth == 0 {
            return Ok(0);
        }
        if field.varint.len() != encoded_len_varint(field.value.len() as u64) {
            return Err(Malformed("a length is not in its shortest form"));
        }
        let length = (field.value.len() + growth) as u64;
        self.edits.push(Edit { range: field.varint.clone(), new: New::Length(length) });
        Ok(growth + encoded_len_varint(length) - field.varint.len())
    }

    /// Reads a message. Returns by how many bytes it grows.
    fn visit(&mut self, kind: Kind, message: &Message) -> Result<usize, Malformed> {
        let inserted = match kind {
            Kind::Any(types) => return self.visit_any(types, message),
            Kind::NetworkFilter if typed_config(message)?.is_none() => None,
            Kind::HttpConnectionManager => self.insert_http_filters(message)?,
            Kind::TcpProxy => self.insert_on_demand(message),
            Kind::RouteConfiguration if self.validates_clusters(message)? => None,
            Kind::Resource => message.single(RESOURCE).map(|_| Some(0))?,
            Kind::Listener => {
                let direction = message.varint(TRAFFIC_DIRECTION);
                self.is_outbound = direction == Some(OUTBOUND) && !self.is_plain;
                Some(0)
            }
            _ => Some(0),
        };
        // All text of a message without its insertion counts.
        let Some(mut growth) = inserted else { return Ok(0) };
        for field in message.delimited() {
            match kind.part(field.number) {
                Some(Part::Exempt) => self.exempt.push(field.value.clone()),
                Some(Part::Message(kind)) => growth += self.enter(kind, field)?,
                None => {}
            }
        }
        Ok(growth)
    }

    /// Reads an `Any`. Returns by how many bytes it grows.
    fn visit_any(&mut self, types: &[(&str, Kind)], any: &Message) -> Result<usize, Malformed> {
        let type_url = any.string(TYPE_URL)?;
        let kind = types.iter().find(|(known, _)| known.as_bytes() == type_url);
        match (kind, any.single(VALUE)?) {
            (Some((_, kind)), Some(value)) => self.enter(*kind, value),
            _ => Ok(0),
        }
    }

    /// Inserts the two HTTP filters into an HTTP connection manager. Returns by how many bytes it grows, or None if it
    /// cannot get them; the name of its route table is collected then.
    fn insert_http_filters(&mut self, manager: &Message) -> Result<Option<usize>, Malformed> {
        let first = manager.all(HTTP_FILTERS).next();
        let last = manager.all(HTTP_FILTERS).last();
        if let (Some(first), Some(last)) = (first, last)
            && self.is_outbound
            && self.is_router(last)?
            && !self.has_upgrade_filters(manager)?
        {
            let filters = [(first.start, &*FIRST_FILTER), (last.start, &*LAST_FILTER)];
            return Ok(Some(filters.map(|(at, filter)| self.insert(at, filter)).iter().sum()));
        }
        if let Some(rds) = manager.single(RDS)? {
            let rds = Message::read(self.response, rds.value.clone())?;
            self.route_tables.push(text(rds.string(ROUTE_CONFIG_NAME)?)?);
        }
        Ok(None)
    }

    /// Returns whether an HTTP filter is Envoy's router.
    fn is_router(&self, filter: &Field) -> Result<bool, Malformed> {
        let filter = Message::read(self.response, filter.value.clone())?;
        let Some(config) = typed_config(&filter)? else { return Ok(false) };
        let any = Message::read(self.response, config.value.clone())?;
        Ok(any.string(TYPE_URL)? == ROUTER.as_bytes())
    }

    /// Returns whether some upgraded requests pass HTTP filters of their own.
    fn has_upgrade_filters(&self, manager: &Message) -> Result<bool, Malformed> {
        for upgrade in manager.all(UPGRADE_CONFIGS) {
            let upgrade = Message::read(self.response, upgrade.value.clone())?;
            if upgrade.all(UPGRADE_FILTERS).next().is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns whether Envoy rejects an inline route table with a cluster that it does not have. This is its default.
    fn validates_clusters(&self, routes: &Message) -> Result<bool, Malformed> {
        let Some(value) = routes.single(VALIDATE_CLUSTERS)? else { return Ok(true) };
        let value = Message::read(self.response, value.value.clone())?;
        Ok(value.varint(BOOL_VALUE).is_some_and(|value| value != 0))
    }

    /// Inserts the field `on_demand` into a TCP proxy. Returns by how many bytes it grows, or None if it cannot get it.
    fn insert_on_demand(&mut self, proxy: &Message) -> Option<usize> {
        let can_get = self.is_outbound && proxy.all(ON_DEMAND).next().is_none();
        can_get.then(|| self.insert(proxy.end, &TCP_ON_DEMAND))
    }

    /// Inserts a field at a position. Returns its length.
    fn insert(&mut self, position: usize, field: &'static [u8]) -> usize {
        self.edits.push(Edit { range: position..position, new: New::Field(field) });
        field.len()
    }

    /// Returns the mentions in a range with the current listener, and forgets its exempt fields.
    fn take_mentions(&mut self, range: &Range<usize>) -> Vec<Mention> {
        let mut exempt = std::mem::take(&mut self.exempt);
        if !self.is_outbound {
            exempt.clear();
        }
        exempt.push(range.end..range.end);
        let mut mentions = Vec::new();
        let mut start = range.start;
        for field in exempt {
            mention::find(&self.response[start..field.start], |text| mentions.push(text.into()));
            start = field.end;
        }
        mentions.sort_unstable();
        mentions.dedup();
        mentions
    }

    /// Returns the changed response, or None if nothing changes.
    fn finish(mut self) -> Option<Bytes> {
        if self.edits.is_empty() {
            return None;
        }
        // The sort is stable: of two insertions at one position the earlier one comes first.
        self.edits.sort_by_key(|edit| edit.range.start);
        let mut changed = BytesMut::with_capacity(self.response.len() + self.growth);
        let mut copied = 0;
        for Edit { range, new } in self.edits {
            changed.put(&self.response[copied..range.start]);
            match new {
                New::Field(field) => changed.put(field),
                New::Length(length) => encode_varint(length, &mut changed),
            }
            copied = range.end;
        }
        changed.put(&self.response[copied..]);
        Some(changed.freeze())
    }
}

/// Returns the typed configuration of a network or HTTP filter, or None if Envoy discovers it.
fn typed_config<'a>(filter: &'a Message) -> Result<Option<&'a Field>, Malformed> {
    let discovery = filter.single(CONFIG_DISCOVERY)?;
    Ok(filter.single(TYPED_CONFIG)?.filter(|_| discovery.is_none()))
}

pub(super) fn text(bytes: &[u8]) -> Result<String, Malformed> {
    str::from_utf8(bytes).map(str::to_owned).map_err(|_| Malformed("a string not UTF-8"))
}

/// Returns a field `http_filters` with the on-demand filter.
fn http_filter(name: &str, timeout: i64) -> Vec<u8> {
    let odcds =
        OnDemandCds { source: Some(ads()), timeout: Some(seconds(timeout)), ..Default::default() };
    let config = Any {
        type_url: OnDemand::type_url(),
        value: OnDemand { odcds: Some(odcds) }.encode_to_vec(),
    };
    let filter = HttpFilter {
        name: name.to_owned(),
        config_type: Some(ConfigType::TypedConfig(config)),
        ..Default::default()
    };
    encoded_field(HTTP_FILTERS, &filter)
}

/// Returns the source of clusters: the stream from which Envoy has all of its configuration.
fn ads() -> ConfigSource {
    ConfigSource {
        resource_api_version: ApiVersion::V3.into(),
        config_source_specifier: Some(ConfigSourceSpecifier::Ads(AggregatedConfigSource {})),
        ..Default::default()
    }
}

fn seconds(seconds: i64) -> Duration {
    Duration { seconds, nanos: 0 }
}

fn encoded_field(number: u32, value: &impl prost::Message) -> Vec<u8> {
    let mut field = Vec::new();
    message::encode(number, value, &mut field);
    field
}
