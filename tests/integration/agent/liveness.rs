//! Tests streams of istiod on which something is lost while the connection lives.

use std::collections::BTreeSet;
use std::time::Duration;

use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, Resource,
};
use envoy_types::pb::google::protobuf::Any;
use istio_agent::problem::Problem;
use istio_agent::xds::Protocol;
use local_istiod::Stream;
use prost::Message;
use tokio::sync::mpsc;
use tokio::sync::mpsc::UnboundedReceiver;
use tonic::{Code, Status};

use super::relay::request;
use crate::support::bench::Bench;
use crate::support::envoy::Envoy;
use crate::support::{CLUSTER, advance_clock, framed, node, soon};

const ENDPOINTS: &str = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment";
const DEBUG: &str = "istio.io/debug";

/// What is lost between the agent and istiod. The connection lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lost {
    Nothing,
    /// All responses of a type.
    Type(&'static str),
    /// The first response of a type.
    First(&'static str),
    /// All responses after the first answer to a question of the agent.
    Responses,
    /// All requests after the first question of the agent. Responses still come.
    Requests,
    /// Questions of the agent: istiod ends the stream.
    Stream,
    /// Questions of the agent: istiod ignores them.
    Questions,
}

/// istiod, and what loses messages on the way to it. Like istiod, it ignores a name that is subscribed already, and ends
/// the stream if its debug page is acknowledged.
struct Istiod {
    stream: Stream,
    lost: Lost,
    names: BTreeSet<(String, String)>,
    /// True once the agent has asked.
    has_answered: bool,
    /// The types of the requests that have arrived.
    arrived: mpsc::UnboundedSender<String>,
}

impl Istiod {
    async fn serve(mut self) {
        let mut pushes = tokio::time::interval(Duration::from_secs(3));
        loop {
            tokio::select! {
                request = self.stream.next::<DeltaDiscoveryRequest>() => {
                    let Ok(Some(request)) = request else { return };
                    self.arrived.send(request.type_url.clone()).unwrap();
                    let is_question = request.type_url == DEBUG;
                    match self.lost {
                        Lost::Stream if is_question => {
                            let status = Status::unauthenticated("authentication required");
                            return self.stream.end(status).await;
                        }
                        Lost::Questions if is_question => {}
                        Lost::Requests if self.has_answered => {}
                        _ => self.answer(request).await,
                    }
                    self.has_answered |= is_question;
                }
                _ = pushes.tick(), if self.lost == Lost::Requests => {
                    self.respond(CLUSTER, &["pushed".to_owned()]).await;
                }
            }
        }
    }

    async fn answer(&mut self, request: DeltaDiscoveryRequest) {
        let type_url = &request.type_url;
        if type_url == DEBUG {
            assert_eq!(request.response_nonce, "", "istiod would end the stream");
            return self.respond(type_url, &request.resource_names_subscribe).await;
        }
        let is_first = !self.names.iter().any(|(of, _)| of == type_url);
        let mut names = request.resource_names_subscribe;
        if is_first && names.is_empty() {
            names.push("*".to_owned());
        }
        // The wildcard always counts as new.
        names.retain(|name| self.names.insert((type_url.clone(), name.clone())) || name == "*");
        for name in request.resource_names_unsubscribe {
            self.names.remove(&(type_url.clone(), name));
        }
        if !names.is_empty() {
            self.respond(type_url, &names).await;
        }
    }

    async fn respond(&mut self, type_url: &str, names: &[String]) {
        match self.lost {
            Lost::Type(lost) if lost == type_url => return,
            Lost::First(lost) if lost == type_url => return self.lost = Lost::Nothing,
            Lost::Responses if self.has_answered => return,
            _ => {}
        }
        let any = Any { type_url: type_url.to_owned(), value: vec![3; 10] };
        let resources = names.iter().map(|name| Resource {
            name: name.clone(),
            resource: Some(any.clone()),
            ..Default::default()
        });
        let response = DeltaDiscoveryResponse {
            resources: resources.collect(),
            type_url: type_url.to_owned(),
            nonce: "nonce".to_owned(),
            ..Default::default()
        };
        let _ = self.stream.send(&response).await; // The agent may have ended the stream.
    }
}

/// Opens a stream of Envoy, whose clusters istiod answers. Returns the types of the requests that arrive after that.
async fn connect(bench: &mut Bench, lost: Lost) -> (Envoy, UnboundedReceiver<String>) {
    let mut envoy = bench.envoy(Protocol::Delta).await;
    envoy.send(&DeltaDiscoveryRequest {
        node: node(),
        type_url: CLUSTER.to_owned(),
        ..Default::default()
    });
    let stream = bench.accepted().await;
    let (arrived, mut requests) = mpsc::unbounded_channel();
    tokio::spawn(
        Istiod { stream, lost, names: BTreeSet::new(), has_answered: false, arrived }.serve(),
    );
    assert_eq!(next(&mut envoy).await, (CLUSTER.to_owned(), vec!["*".to_owned()]));
    assert_eq!(arrivals(&mut requests, 1).await, [CLUSTER]);
    (envoy, requests)
}

fn subscribe(envoy: &Envoy, name: &str) {
    envoy.send(&DeltaDiscoveryRequest {
        type_url: ENDPOINTS.to_owned(),
        resource_names_subscribe: vec![name.to_owned()],
        ..Default::default()
    });
}

/// Returns type and names of the next response to Envoy.
async fn next(envoy: &mut Envoy) -> (String, Vec<String>) {
    let response = DeltaDiscoveryResponse::decode(envoy.next_bytes().await).unwrap();
    (response.type_url, response.resources.into_iter().map(|it| it.name).collect())
}

async fn arrivals(requests: &mut UnboundedReceiver<String>, count: usize) -> Vec<String> {
    let mut types = Vec::new();
    while types.len() < count {
        types.push(soon(requests.recv()).await.unwrap());
    }
    types
}

/// Asserts that istiod answers a subscription to a new name, and that no other requests have arrived.
async fn works(envoy: &mut Envoy, requests: &mut UnboundedReceiver<String>, name: &str) {
    subscribe(envoy, name);
    assert_eq!(next(envoy).await, (ENDPOINTS.to_owned(), vec![name.to_owned()]));
    assert_eq!(arrivals(requests, 1).await, [ENDPOINTS]);
}

async fn pass(seconds: f64) {
    advance_clock(Duration::from_secs_f64(seconds)).await;
}

fn problem(bench: &Bench) -> Option<Problem> {
    bench.observer.snapshot().stream.and_then(|it| it.problem)
}

fn alarms(bench: &Bench, code: &str, count: u32) -> bool {
    let series = format!("istio_agent_xds_alarms_total{{code=\"{code}\"}} {count}");
    bench.registry.render().lines().any(|line| line == series)
}

#[tokio::test]
async fn a_lost_response_comes_again_on_the_same_stream() {
    let mut bench = Bench::start().await;
    let (mut envoy, mut requests) = connect(&mut bench, Lost::First(ENDPOINTS)).await;
    subscribe(&envoy, "a");
    assert_eq!(arrivals(&mut requests, 1).await, [ENDPOINTS]);
    pass(31.0).await;
    assert_eq!(next(&mut envoy).await, (ENDPOINTS.to_owned(), vec!["a".to_owned()]));
    assert_eq!(arrivals(&mut requests, 3).await, [DEBUG, ENDPOINTS, ENDPOINTS]);
    assert_eq!(problem(&bench), None);
    works(&mut envoy, &mut requests, "new").await;
    drop(envoy);
    bench.finish().await;
}

#[tokio::test]
async fn a_type_without_answers_ends_the_stream_once_and_is_reported() {
    let mut bench = Bench::start().await;
    let (envoy, mut requests) = connect(&mut bench, Lost::Type(ENDPOINTS)).await;
    subscribe(&envoy, "a");
    assert_eq!(arrivals(&mut requests, 1).await, [ENDPOINTS]);
    pass(31.0).await;
    assert_eq!(arrivals(&mut requests, 3).await, [DEBUG, ENDPOINTS, ENDPOINTS]);
    pass(31.0).await;
    assert_eq!(arrivals(&mut requests, 1).await, [DEBUG]);
    assert_eq!(envoy.end().await.code(), Code::Unavailable);
    assert!(alarms(&bench, "SUBSCRIPTION_UNANSWERED", 1));

    let (envoy, mut requests) = connect(&mut bench, Lost::Type(ENDPOINTS)).await;
    subscribe(&envoy, "a");
    assert_eq!(arrivals(&mut requests, 1).await, [ENDPOINTS]);
    pass(31.0).await;
    assert_eq!(arrivals(&mut requests, 1).await, [DEBUG]);
    pass(31.0).await;
    let found = problem(&bench).unwrap().found;
    assert_eq!(found, "1 subscriptions are not answered: EDS a");
    assert!(alarms(&bench, "SUBSCRIPTION_UNANSWERED", 1));
    assert_eq!(bench.control_plane.connections().len(), 1);
    drop(envoy);
    bench.finish().await;
}

#[tokio::test]
async fn a_stream_without_answers_is_replaced_on_another_connection() {
    for (lost, waits) in [(Lost::Responses, 1), (Lost::Requests, 6)] {
        let mut bench = Bench::start().await;
        let (envoy, mut requests) = connect(&mut bench, lost).await;
        pass(91.0).await;
        assert_eq!(arrivals(&mut requests, 1).await, [DEBUG], "{lost:?}");
        // Another suspicion than silence, because responses may still come.
        pass(1.0).await;
        subscribe(&envoy, "a");
        assert_eq!(arrivals(&mut requests, 1).await, [ENDPOINTS], "{lost:?}");
        pass(31.0).await;
        assert_eq!(arrivals(&mut requests, 1).await, [DEBUG], "{lost:?}");
        for _ in 0..waits {
            assert_eq!(problem(&bench), None, "{lost:?}");
            pass(9.8).await;
        }
        assert_eq!(envoy.end().await.code(), Code::Unavailable, "{lost:?}");
        assert!(alarms(&bench, "DISCOVERY_STALLED", 1), "{lost:?}");
        let (envoy, _) = connect(&mut bench, Lost::Nothing).await;
        assert_eq!(bench.control_plane.connections().len(), 2, "{lost:?}");
        drop(envoy);
        bench.finish().await;
    }
}

#[tokio::test]
async fn a_control_plane_that_ends_the_stream_is_not_asked_again() {
    let mut bench = Bench::start().await;
    let (envoy, mut requests) = connect(&mut bench, Lost::Stream).await;
    pass(91.0).await;
    assert_eq!(arrivals(&mut requests, 1).await, [DEBUG]);
    assert_eq!(envoy.end().await.code(), Code::Unauthenticated);
    let (mut envoy, mut requests) = connect(&mut bench, Lost::Stream).await;
    for _ in 0..10 {
        pass(100.0).await;
    }
    works(&mut envoy, &mut requests, "new").await;
    drop(envoy);
    bench.finish().await;
}

#[tokio::test]
async fn a_control_plane_that_ignores_the_question_is_not_judged() {
    let mut bench = Bench::start().await;
    let (mut envoy, mut requests) = connect(&mut bench, Lost::Questions).await;
    pass(91.0).await;
    assert_eq!(arrivals(&mut requests, 1).await, [DEBUG]);
    for number in 0..10 {
        pass(100.0).await;
        works(&mut envoy, &mut requests, &number.to_string()).await;
    }
    assert_eq!(problem(&bench), None);
    drop(envoy);
    bench.finish().await;
}

#[tokio::test]
async fn a_quiet_stream_is_asked_and_stays() {
    let mut bench = Bench::start().await;
    let (mut envoy, mut requests) = connect(&mut bench, Lost::Nothing).await;
    for _ in 0..4 {
        pass(361.0).await;
        assert_eq!(arrivals(&mut requests, 1).await, [DEBUG]);
    }
    works(&mut envoy, &mut requests, "new").await;
    assert_eq!(problem(&bench), None);
    assert_eq!(bench.control_plane.connections().len(), 1);
    drop(envoy);
    bench.finish().await;
}

#[tokio::test]
async fn nothing_is_asked_on_streams_of_sotw_and_of_other_clients() {
    for (protocol, header) in
        [(Protocol::Sotw, "x-envoy-internal"), (Protocol::Delta, "x-other-client")]
    {
        let mut bench = Bench::start().await;
        bench.is_envoy.store(false, std::sync::atomic::Ordering::Relaxed);
        let path = protocol.path();
        let envoy = Envoy::open_with(&bench.socket(), path, (header, "true")).await;
        let sent = request(protocol, CLUSTER);
        envoy.send_raw(framed(&sent));
        let mut istiod = bench.accepted().await;
        for _ in 0..3 {
            assert_eq!(soon(istiod.next_bytes()).await.unwrap().unwrap(), sent);
            pass(361.0).await;
            envoy.send_raw(framed(&sent));
        }
        drop((envoy, istiod));
        bench.finish().await;
    }
}
