use std::time::Duration;

use bytes::Bytes;
use envoy_types::pb::envoy::config::cluster::v3::Cluster;
use envoy_types::pb::envoy::config::cluster::v3::cluster::{
    ClusterDiscoveryType, DiscoveryType, EdsClusterConfig,
};
use envoy_types::pb::envoy::config::core::v3::config_source::ConfigSourceSpecifier;
use envoy_types::pb::envoy::config::core::v3::node::UserAgentVersionType;
use envoy_types::pb::envoy::config::core::v3::{
    AggregatedConfigSource, BuildVersion, ConfigSource, Metadata, Node, TrafficDirection,
};
use envoy_types::pb::envoy::config::endpoint::v3::ClusterLoadAssignment;
use envoy_types::pb::envoy::config::listener::v3::filter::ConfigType;
use envoy_types::pb::envoy::config::listener::v3::{Filter, FilterChain, Listener};
use envoy_types::pb::envoy::extensions::filters::network::tcp_proxy::v3::TcpProxy;
use envoy_types::pb::envoy::extensions::filters::network::tcp_proxy::v3::tcp_proxy::ClusterSpecifier;
use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, Resource,
};
use envoy_types::pb::envoy::r#type::v3::SemanticVersion;
use envoy_types::pb::google::protobuf::{Any, Struct};
use envoy_types::pb::google::rpc;
use prost::{Message, Name};
use tempfile::TempDir;
use tokio::time::advance;
use tokio_util::sync::CancellationToken;

use super::Event;
use crate::files::volume::Volume;
use crate::metrics::Registry;
use crate::xds::interceptor::Interceptors;
use crate::xds::ledger::{Config, Ledger};
use crate::xds::observe::Observer;
use crate::xds::request::{HEAD, frame};
use crate::xds::stream::StreamState;
use crate::xds::{CLUSTER, ENDPOINTS, LISTENER, Protocol};

const A: &str = "outbound|80||a.shop";
const B: &str = "outbound|80||b.shop";

/// A stream of Envoy whose messages the test writes and reads.
struct Stream {
    state: StreamState,
    ledger: Ledger,
    ids: u32,
    _directory: TempDir,
}

fn new_state(ledger: &Ledger, id: u32) -> StreamState {
    let observer = Observer::new(&Registry::default(), None);
    let cache = ledger.envoy_cache(1, Protocol::Delta);
    StreamState::new(id, Protocol::Delta, Interceptors::default(), observer, 1 << 20, cache)
}

impl Stream {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let config = Config {
            volume: Some(Volume::named(directory.path())),
            former: None,
            own: None,
            max_bytes: 1 << 30,
            max_age: Duration::from_secs(3600),
            after: Duration::from_secs(5),
            on_nack: true,
            on_demand: true,
        };
        let (ledger, _) = Ledger::new(config, None, &Registry::default(), CancellationToken::new());
        let state = new_state(&ledger, 1);
        Self { state, ledger, ids: 1, _directory: directory }
    }

    /// Begins a stream on which Envoy is ready, and has these clusters of istiod at its disposal.
    fn ready(clusters: &[Cluster]) -> Self {
        let mut stream = Self::new();
        stream.subscribe_all(clusters);
        stream
    }

    fn reconnect(&mut self) {
        self.ids += 1;
        self.state = new_state(&self.ledger, self.ids);
    }

    fn subscribe_all(&mut self, clusters: &[Cluster]) {
        self.envoy(CLUSTER, |_| ());
        self.istiod(CLUSTER, "c1", &clusters.iter().map(of_cluster).collect::<Vec<_>>(), &[]);
        self.ack_all(CLUSTER);
        self.envoy(LISTENER, |_| ());
        self.istiod(LISTENER, "l1", &[], &[]);
        self.ack_all(LISTENER);
        self.take_for_istiod();
    }

    fn envoy(&mut self, type_url: &str, change: impl FnOnce(&mut DeltaDiscoveryRequest)) {
        let version = SemanticVersion { major_number: 1, minor_number: 40, patch: 0 };
        let build = BuildVersion { version: Some(version), ..Default::default() };
        let node = Some(Node {
            id: "node".to_owned(),
            user_agent_version_type: Some(UserAgentVersionType::UserAgentBuildVersion(build)),
            ..Node::default()
        });
        let mut request =
            DeltaDiscoveryRequest { type_url: type_url.to_owned(), node, ..Default::default() };
        change(&mut request);
        self.state.read_requests(frame(&request.encode_to_vec())).unwrap();
    }

    fn ask(&mut self, type_url: &str, names: &[&str]) {
        let names = names.iter().map(|it| (*it).to_owned()).collect();
        self.envoy(type_url, |it| it.resource_names_subscribe = names);
    }

    fn answer(&mut self, type_url: &str, nonce: &str, reason: Option<&str>) {
        let error_detail = reason.map(|reason| rpc::Status {
            code: 13,
            message: reason.to_owned(),
            ..Default::default()
        });
        self.envoy(type_url, |it| {
            it.response_nonce = nonce.to_owned();
            it.error_detail = error_detail;
        });
    }

    fn istiod(
        &mut self,
        type_url: &str,
        nonce: &str,
        resources: &[(String, Vec<u8>)],
        gone: &[&str],
    ) {
        let resource = |(name, value): &(String, Vec<u8>)| Resource {
            name: name.clone(),
            resource: Some(Any { type_url: type_url.to_owned(), value: value.clone() }),
            version: "1".to_owned(),
            ..Default::default()
        };
        let response = DeltaDiscoveryResponse {
            system_version_info: "version".to_owned(),
            resources: resources.iter().map(resource).collect(),
            removed_resources: gone.iter().map(|it| (*it).to_owned()).collect(),
            type_url: type_url.to_owned(),
            nonce: nonce.to_owned(),
            ..Default::default()
        };
        self.state.read_responses(frame(&response.encode_to_vec())).unwrap();
    }

    /// Returns what Envoy has got.
    fn take_for_envoy(&mut self) -> Vec<DeltaDiscoveryResponse> {
        let bytes = self.state.to_client.drain(..).collect::<Vec<_>>().concat();
        messages(bytes.into())
    }

    /// Returns the only response that Envoy has got.
    fn one(&mut self) -> DeltaDiscoveryResponse {
        let mut responses = self.take_for_envoy();
        assert_eq!(responses.len(), 1, "{responses:?}");
        responses.remove(0)
    }

    /// Returns the only response with clusters that Envoy has got.
    fn clusters(&mut self) -> DeltaDiscoveryResponse {
        let mut responses = self.take_for_envoy();
        responses.retain(|it| it.type_url == CLUSTER);
        assert_eq!(responses.len(), 1, "{responses:?}");
        responses.remove(0)
    }

    /// Returns what istiod has got.
    fn take_for_istiod(&mut self) -> Vec<DeltaDiscoveryRequest> {
        messages(self.state.to_istiod.drain(..).collect::<Vec<_>>().concat().into())
    }

    /// Acknowledges all responses of a type.
    fn ack_all(&mut self, type_url: &str) {
        for response in self.take_for_envoy().iter().filter(|it| it.type_url == type_url) {
            self.answer(type_url, &response.nonce, None);
        }
    }

    fn due(&mut self) {
        self.state.handle_on_demand(Event::Time);
    }

    /// Loads a cluster as Envoy does, with endpoints of istiod. Returns the response with the cluster.
    fn load(&mut self, name: &str) -> DeltaDiscoveryResponse {
        self.ask(CLUSTER, &[name]);
        self.istiod(ENDPOINTS, &format!("e-{name}"), &[no_endpoints(name)], &[]);
        let response = self.clusters();
        self.answer(CLUSTER, &response.nonce, None);
        self.ask(ENDPOINTS, &[name]);
        self.ack_all(ENDPOINTS);
        response
    }
}

fn messages<M: Message + Default>(mut bytes: Bytes) -> Vec<M> {
    let mut messages = Vec::new();
    while !bytes.is_empty() {
        let length = u32::from_be_bytes(bytes[1..HEAD].try_into().unwrap()) as usize;
        messages.push(M::decode(&bytes[HEAD..HEAD + length]).unwrap());
        bytes = bytes.split_off(HEAD + length);
    }
    messages
}

fn eds(name: &str) -> Cluster {
    let ads = ConfigSourceSpecifier::Ads(AggregatedConfigSource::default());
    let source = ConfigSource { config_source_specifier: Some(ads), ..Default::default() };
    Cluster {
        name: name.to_owned(),
        cluster_discovery_type: Some(ClusterDiscoveryType::Type(DiscoveryType::Eds.into())),
        eds_cluster_config: Some(EdsClusterConfig {
            eds_config: Some(source),
            ..Default::default()
        }),
        ..Default::default()
    }
}

fn of_cluster(cluster: &Cluster) -> (String, Vec<u8>) {
    (cluster.name.clone(), cluster.encode_to_vec())
}

fn no_endpoints(name: &str) -> (String, Vec<u8>) {
    let assignment = ClusterLoadAssignment { cluster_name: name.to_owned(), ..Default::default() };
    (name.to_owned(), assignment.encode_to_vec())
}

fn names(response: &DeltaDiscoveryResponse) -> Vec<&str> {
    response.resources.iter().map(|it| it.name.as_str()).collect()
}

fn tcp_listener(name: &str, cluster: &str) -> (String, Vec<u8>) {
    let proxy = TcpProxy {
        stat_prefix: cluster.to_owned(),
        cluster_specifier: Some(ClusterSpecifier::Cluster(cluster.to_owned())),
        ..Default::default()
    };
    let filter = Filter {
        name: "envoy.filters.network.tcp_proxy".to_owned(),
        config_type: Some(ConfigType::TypedConfig(Any {
            type_url: TcpProxy::type_url(),
            value: proxy.encode_to_vec(),
        })),
    };
    let listener = Listener {
        name: name.to_owned(),
        traffic_direction: TrafficDirection::Outbound.into(),
        filter_chains: vec![FilterChain { filters: vec![filter], ..Default::default() }],
        ..Default::default()
    };
    (name.to_owned(), listener.encode_to_vec())
}

#[tokio::test(start_paused = true)]
async fn a_cluster_is_sent_with_its_endpoints_and_istiod_gets_no_name() {
    let mut stream = Stream::ready(&[eds(A), eds(B)]);
    stream.ask(CLUSTER, &[A]);
    let [request] = &stream.take_for_istiod()[..] else { panic!("one request") };
    assert_eq!(
        (&*request.type_url, &request.resource_names_subscribe[..]),
        (ENDPOINTS, &[A.to_owned()][..])
    );
    assert!(stream.take_for_envoy().is_empty());
    stream.istiod(ENDPOINTS, "e1", &[no_endpoints(A)], &[]);
    let clusters = stream.one();
    assert_eq!(names(&clusters), [A]);
    let [ack] = &stream.take_for_istiod()[..] else { panic!("one ACK") };
    assert_eq!((&*ack.type_url, &*ack.response_nonce), (ENDPOINTS, "e1"));
    // istiod does not answer for a name that the agent has subscribed to.
    stream.ask(ENDPOINTS, &[A]);
    let endpoints = stream.one();
    assert_eq!((&*endpoints.type_url, names(&endpoints)), (ENDPOINTS, vec![A]));
    stream.take_for_istiod();
    stream.answer(CLUSTER, &clusters.nonce, None);
    stream.answer(ENDPOINTS, &endpoints.nonce, None);
    assert_eq!(stream.take_for_istiod(), []);
}

#[tokio::test(start_paused = true)]
async fn a_response_is_acknowledged_when_envoy_has_answered_its_part() {
    let mut stream = Stream::ready(&[eds(A), eds(B)]);
    stream.load(A);
    stream.take_for_istiod();
    // Envoy does not have this one.
    stream.istiod(CLUSTER, "c2", &[of_cluster(&eds(B))], &[]);
    let [ack] = &stream.take_for_istiod()[..] else { panic!("one ACK") };
    assert_eq!((&*ack.response_nonce, &ack.error_detail), ("c2", &None));
    assert!(stream.take_for_envoy().is_empty());
    // A changed cluster and its endpoints are one write.
    stream.istiod(CLUSTER, "c3", &[of_cluster(&eds(A)), of_cluster(&eds(B))], &[]);
    let [clusters, endpoints] = &stream.take_for_envoy()[..] else { panic!("two responses") };
    assert_eq!((names(clusters), names(endpoints)), (vec![A], vec![A]));
    assert_eq!(stream.take_for_istiod(), []);
    let reason = format!("Error adding/updating cluster(s) {A}: no");
    stream.answer(CLUSTER, &clusters.nonce, Some(&reason));
    let [nack] = &stream.take_for_istiod()[..] else { panic!("one NACK") };
    assert_eq!(
        (&*nack.response_nonce, &*nack.error_detail.as_ref().unwrap().message),
        ("c3", &*reason)
    );
}

#[tokio::test(start_paused = true)]
async fn a_rejection_at_first_use_is_a_nack_of_istiods_newest_response() {
    let mut stream = Stream::ready(&[eds(A)]);
    stream.ask(CLUSTER, &[A]);
    stream.istiod(ENDPOINTS, "e1", &[no_endpoints(A)], &[]);
    let clusters = stream.one();
    stream.take_for_istiod();
    stream.answer(CLUSTER, &clusters.nonce, Some("no"));
    let [nack] = &stream.take_for_istiod()[..] else { panic!("one NACK") };
    assert_eq!((&*nack.response_nonce, nack.error_detail.is_some()), ("c1", true));
    // The request does not wait for the timeout.
    assert_eq!(stream.one().removed_resources, [A]);
    // A later version is offered again.
    stream.istiod(CLUSTER, "c2", &[of_cluster(&eds(A))], &[]);
    assert_eq!(names(&stream.one()), [A]);
}

#[tokio::test(start_paused = true)]
async fn a_request_for_endpoints_is_not_left_open() {
    let mut stream = Stream::ready(&[eds(A)]);
    stream.load(A);
    stream.ask(ENDPOINTS, &[B]);
    stream.take_for_istiod();
    assert!(stream.take_for_envoy().is_empty());
    advance(Duration::from_millis(1001)).await;
    stream.due();
    let empty = stream.one();
    assert_eq!(names(&empty), [B]);
    stream.answer(ENDPOINTS, &empty.nonce, None);
    assert_eq!(stream.take_for_istiod(), []);
    stream.istiod(ENDPOINTS, "e2", &[no_endpoints(B)], &[]);
    assert_eq!(stream.one().nonce, "e2");
}

#[tokio::test(start_paused = true)]
async fn a_new_cluster_that_warms_is_withdrawn_and_offered_again() {
    let mut stream = Stream::ready(&[eds(A), eds(B)]);
    stream.ask(CLUSTER, &[A]);
    stream.istiod(ENDPOINTS, "e1", &[no_endpoints(A)], &[]);
    let clusters = stream.one();
    stream.ask(ENDPOINTS, &[A]);
    stream.ack_all(ENDPOINTS);
    advance(Duration::from_millis(1001)).await;
    stream.due();
    // An Envoy with little CPU time answers the clusters before the endpoints.
    let endpoints = stream.one();
    assert_eq!((&*endpoints.type_url, names(&endpoints)), (ENDPOINTS, vec![A]));
    stream.answer(ENDPOINTS, &endpoints.nonce, None);
    let removal = stream.one();
    assert_eq!(removal.removed_resources, [A]);
    stream.answer(CLUSTER, &clusters.nonce, None);
    stream.answer(CLUSTER, &removal.nonce, None);
    advance(Duration::from_secs(31)).await;
    stream.due();
    assert_eq!(names(&stream.one()), [A]);
}

#[tokio::test(start_paused = true)]
async fn a_name_that_does_not_exist_is_denied_until_it_does() {
    let mut stream = Stream::ready(&[eds(A)]);
    stream.ask(CLUSTER, &[B]);
    let denied = stream.one();
    assert_eq!(denied.removed_resources, [B]);
    advance(Duration::from_millis(201)).await;
    stream.due();
    assert!(stream.take_for_envoy().is_empty(), "the last one is not answered");
    stream.answer(CLUSTER, &denied.nonce, None);
    advance(Duration::from_millis(201)).await;
    stream.due();
    let denied = stream.one();
    stream.answer(CLUSTER, &denied.nonce, None);
    stream.take_for_istiod();
    stream.istiod(CLUSTER, "c2", &[of_cluster(&eds(B))], &[]);
    stream.istiod(ENDPOINTS, "e1", &[no_endpoints(B)], &[]);
    assert_eq!(names(&stream.one()), [B]);
    advance(Duration::from_millis(201)).await;
    stream.due();
    assert!(stream.take_for_envoy().iter().all(|it| it.removed_resources.is_empty()));
}

#[tokio::test(start_paused = true)]
async fn nothing_is_denied_before_istiod_has_named_its_clusters() {
    let mut stream = Stream::ready(&[eds(A)]);
    stream.load(A);
    stream.reconnect();
    let known = [(A.to_owned(), "1".to_owned())].into();
    stream.envoy(CLUSTER, |it| {
        it.resource_names_subscribe = ["*", A, B].map(ToOwned::to_owned).into();
        it.initial_resource_versions = known;
    });
    let [first] = &stream.take_for_istiod()[..] else { panic!("one request") };
    assert_eq!(first.resource_names_subscribe, ["*"]);
    assert_eq!(first.initial_resource_versions.len(), 1);
    assert!(stream.take_for_envoy().is_empty());
    stream.istiod(CLUSTER, "c2", &[], &[]);
    let responses = stream.take_for_envoy();
    assert_eq!(responses.last().unwrap().removed_resources, [B]);
}

#[tokio::test(start_paused = true)]
async fn clusters_come_from_the_ledger_during_an_outage_if_their_endpoints_do() {
    let mut stream = Stream::ready(&[eds(A), eds(B)]);
    stream.load(A);
    stream.reconnect();
    // A new Envoy on the stream of the same process stands for one that has lost the cluster.
    stream.ask(CLUSTER, &["*", A, B]);
    assert_eq!(names(&stream.one()), [A]);
    stream.ask(ENDPOINTS, &[A]);
    assert_eq!(names(&stream.one()), [A]);
}

#[tokio::test(start_paused = true)]
async fn a_rejected_listener_is_replaced_by_istiods_and_its_clusters_are_sent() {
    for accepts in [true, false] {
        let mut stream = Stream::ready(&[eds(A)]);
        let original = tcp_listener("tcp", A);
        stream.istiod(LISTENER, "l2", std::slice::from_ref(&original), &[]);
        let rewritten = stream.one();
        assert_ne!(rewritten.resources[0].resource.as_ref().unwrap().value, original.1);
        stream.answer(
            LISTENER,
            &rewritten.nonce,
            Some("Error adding/updating listener(s) tcp: no"),
        );
        stream.istiod(ENDPOINTS, "e1", &[no_endpoints(A)], &[]);
        let [listeners, clusters] = &stream.take_for_envoy()[..] else { panic!("two responses") };
        assert_eq!(names(clusters), [A]);
        assert_eq!(listeners.resources[0].resource.as_ref().unwrap().value, original.1);
        let of_listeners = |it: &DeltaDiscoveryRequest| it.type_url == LISTENER;
        assert!(!stream.take_for_istiod().iter().any(of_listeners));
        stream.answer(LISTENER, &listeners.nonce, (!accepts).then_some("no"));
        let answers = stream.take_for_istiod();
        let answer = answers.iter().find(|it| of_listeners(it)).unwrap();
        assert_eq!((&*answer.response_nonce, answer.error_detail.is_none()), ("l2", accepts));
        // The listener stays as istiod sends it.
        stream.istiod(LISTENER, "l3", std::slice::from_ref(&original), &[]);
        let responses = stream.take_for_envoy();
        assert_eq!(
            responses.last().unwrap().resources[0].resource.as_ref().unwrap().value,
            original.1
        );
    }
}

#[tokio::test(start_paused = true)]
async fn the_first_listeners_follow_the_endpoints_of_clusters_that_they_name() {
    for answers in [true, false] {
        let mut stream = Stream::new();
        stream.envoy(CLUSTER, |_| ());
        stream.istiod(CLUSTER, "c1", &[of_cluster(&eds(A)), of_cluster(&eds(B))], &[]);
        stream.ack_all(CLUSTER);
        stream.envoy(LISTENER, |_| ());
        let (listener, mut inbound) = tcp_listener("inbound", A);
        let direction = Listener {
            traffic_direction: TrafficDirection::Inbound.into(),
            metadata: Some(Metadata {
                filter_metadata: [(A.to_owned(), Struct::default())].into(),
                ..Default::default()
            }),
            ..Default::default()
        };
        inbound.extend(direction.encode_to_vec());
        stream.istiod(LISTENER, "l1", &[(listener, inbound)], &[]);
        stream.istiod(LISTENER, "l2", &[tcp_listener("later", B)], &[]);
        assert!(stream.take_for_envoy().is_empty());
        if answers {
            stream.istiod(ENDPOINTS, "e1", &[no_endpoints(A)], &[]);
            let responses = stream.take_for_envoy();
            assert_eq!(
                responses.iter().flat_map(names).collect::<Vec<_>>(),
                [A, A, "inbound", "later"]
            );
        } else {
            advance(Duration::from_millis(1001)).await;
            stream.due();
            let responses = stream.take_for_envoy();
            assert_eq!(responses.iter().flat_map(names).collect::<Vec<_>>(), ["inbound", "later"]);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn clusters_created_again_come_at_once_and_stay_while_others_follow() {
    let (a, b) = (eds(A), eds(B));
    let mut stream = Stream::ready(&[a.clone(), b.clone()]);
    stream.load(A);
    stream.load(B);
    // Envoy does not answer the removal of endpoints before they come again.
    stream.istiod(CLUSTER, "c2", &[], &[A, B]);
    stream.ack_all(CLUSTER);
    stream.envoy(ENDPOINTS, |it| {
        it.resource_names_unsubscribe = [A, B].map(ToOwned::to_owned).into();
    });
    stream.istiod(ENDPOINTS, "e2", &[], &[A, B]);
    stream.take_for_envoy();
    stream.take_for_istiod();
    stream.istiod(CLUSTER, "c3", &[of_cluster(&a), of_cluster(&b)], &[]);
    let requests = stream.take_for_istiod();
    let asked = requests.iter().find(|it| it.type_url == ENDPOINTS).unwrap();
    assert_eq!(asked.resource_names_subscribe, [A, B]);
    stream.istiod(ENDPOINTS, "e3", &[no_endpoints(A), no_endpoints(B)], &[]);
    assert_eq!(stream.clusters().resources.len(), 2);
    // Envoy answers these later: other clusters follow, and it loads one after the other.
    let other = "outbound|80||c.shop";
    advance(Duration::from_millis(900)).await;
    stream.istiod(CLUSTER, "c4", &[of_cluster(&eds(other))], &[]);
    stream.ask(CLUSTER, &[other]);
    stream.istiod(ENDPOINTS, "e4", &[no_endpoints(other)], &[]);
    assert_eq!(names(&stream.clusters()), [other]);
    advance(Duration::from_millis(900)).await;
    stream.due();
    assert!(stream.take_for_envoy().is_empty());
    // If no more follow, all are checked.
    advance(Duration::from_millis(101)).await;
    stream.due();
    let endpoints = stream.one();
    assert_eq!((&*endpoints.type_url, endpoints.resources.len()), (ENDPOINTS, 3));
}

#[tokio::test(start_paused = true)]
async fn endpoints_stay_while_envoy_has_asked_for_others_only() {
    let mut stream = Stream::ready(&[eds(A), eds(B)]);
    stream.ask(CLUSTER, &[A, B]);
    stream.istiod(ENDPOINTS, "e1", &[no_endpoints(A), no_endpoints(B)], &[]);
    assert_eq!(stream.one().resources.len(), 2);
    for name in [A, B] {
        stream.ask(ENDPOINTS, &[name]);
        let endpoints = stream.one();
        assert_eq!((&*endpoints.type_url, names(&endpoints)), (ENDPOINTS, vec![name]));
        stream.answer(ENDPOINTS, &endpoints.nonce, None);
    }
}

#[tokio::test(start_paused = true)]
async fn clusters_whose_endpoints_envoy_asks_for_are_not_late() {
    let mut stream = Stream::ready(&[eds(A)]);
    stream.ask(CLUSTER, &[A]);
    stream.istiod(ENDPOINTS, "e1", &[no_endpoints(A)], &[]);
    stream.one();
    advance(Duration::from_millis(500)).await;
    stream.ask(ENDPOINTS, &[B]);
    stream.take_for_envoy();
    advance(Duration::from_millis(501)).await;
    stream.due();
    assert!(stream.take_for_envoy().is_empty());
    advance(Duration::from_millis(500)).await;
    stream.due();
    assert_eq!(names(&stream.one()), [B]);
    advance(Duration::from_millis(1001)).await;
    stream.due();
    assert_eq!(names(&stream.one()), [A]);
}

#[tokio::test(start_paused = true)]
async fn an_envoy_slow_with_changed_clusters_gets_endpoints_of_one_again() {
    let mut stream = Stream::ready(&[eds(A), eds(B)]);
    stream.load(A);
    stream.load(B);
    stream.istiod(CLUSTER, "c2", &[of_cluster(&eds(A)), of_cluster(&eds(B))], &[]);
    let [clusters, endpoints] = &stream.take_for_envoy()[..] else { panic!("two responses") };
    assert_eq!((clusters.resources.len(), endpoints.resources.len()), (2, 2));
    advance(Duration::from_millis(1001)).await;
    stream.due();
    assert_eq!(names(&stream.one()), [A]);
}
