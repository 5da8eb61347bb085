//! Tests the rules of SotW streams one by one, without a socket.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use envoy_types::pb::envoy::config::core::v3::{DataSource, Node, data_source::Specifier};
use envoy_types::pb::envoy::extensions::transport_sockets::tls::v3::{Secret, secret};
use envoy_types::pb::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use envoy_types::pb::google::rpc;
use proptest::prelude::*;
use prost::Message;
use tonic::{Code, Status};

use super::metrics::Metrics;
use super::resource::{Resource, TYPE_URL};
use super::sotw::{Lookup, StateOfTheWorld};
use super::{Rejections, SecretOptions};
use crate::ca::{Ca, csr};
use crate::logging::logged;
use crate::metrics::Registry;
use crate::problem::{self, Problem};
use crate::secrets::certificate::Workload;
use crate::secrets::fake_authority::{FakeAuthority, clock, config};
use crate::secrets::name::Name;
use crate::secrets::{Roots, Secret as Served, State};

/// Returns a state with a new certificate that `authority` has signed.
async fn signed_by(authority: &FakeAuthority) -> State {
    let config = config();
    let request =
        csr::generate(config.key_type, Default::default(), &config.identity).expect("generates");
    let answer = authority.sign(&request.csr_pem, Duration::from_secs(3600));
    let answer = answer.await.expect("signs");
    let workload = Workload::new(&answer, request.key_pem).expect("is good");
    State {
        roots: Some(workload.roots.clone()),
        workload: Some(Arc::new(workload)),
        dates: None,
        failure: None,
        uncached: None,
    }
}

async fn signed() -> State {
    signed_by(&FakeAuthority::new(&clock())).await
}

fn request(names: &[&str], nonce: &str) -> DiscoveryRequest {
    DiscoveryRequest {
        node: Some(Node {
            id: "sidecar~10.0.0.1~cart.shop~shop.svc.cluster.local".to_owned(),
            ..Default::default()
        }),
        resource_names: names.iter().map(|&name| name.to_owned()).collect(),
        type_url: TYPE_URL.to_owned(),
        response_nonce: nonce.to_owned(),
        ..Default::default()
    }
}

fn rejection(names: &[&str], nonce: &str) -> DiscoveryRequest {
    DiscoveryRequest {
        error_detail: Some(rpc::Status {
            code: 13,
            message: "key does not match".to_owned(),
            details: Vec::new(),
        }),
        ..request(names, nonce)
    }
}

/// A SotW stream without a socket.
struct Stream(StateOfTheWorld);

impl Stream {
    fn new(registry: &Registry) -> Self {
        let metrics = Metrics::new(registry, &Rejections::default());
        Self(StateOfTheWorld::new(1, metrics, true))
    }

    fn apply(&mut self, request: &DiscoveryRequest) -> Result<(), Status> {
        self.0.apply(request)
    }

    fn next_response(&mut self, state: &State, nonce: &str) -> Option<DiscoveryResponse> {
        let lookup = |name: &Name| state.secret(name).map(available);
        self.look_up(&lookup, nonce)
    }

    fn look_up(&mut self, lookup: &Lookup<'_>, nonce: &str) -> Option<DiscoveryResponse> {
        let empty = || DiscoveryResponse {
            version_info: "now/1".to_owned(),
            nonce: nonce.to_owned(),
            ..Default::default()
        };
        self.0.next_response(lookup, empty)
    }
}

static OPTIONS: SecretOptions = SecretOptions { key_provider: None, crl: None };

const fn available(secret: Served) -> Resource<'static> {
    Resource { secret, options: &OPTIONS, crl: None }
}

/// Makes the next response, with `nonce`, and returns the names of its secrets. Returns no names if no response is due.
fn next_names(stream: &mut Stream, state: &State, nonce: &str) -> Vec<String> {
    let response = stream.next_response(state, nonce);
    response.as_ref().map(names).unwrap_or_default()
}

fn is_due(stream: &mut Stream, state: &State) -> bool {
    stream.next_response(state, "due").is_some()
}

fn names(response: &DiscoveryResponse) -> Vec<String> {
    let secrets = response.resources.iter();
    secrets.map(|any| Secret::decode(&*any.value).expect("is a secret").name).collect()
}

fn fresh() -> Stream {
    Stream::new(&Registry::default())
}

/// Returns a stream that has requested `first` and has got a response with nonce "1".
fn subscribed(first: &[&str], state: &State) -> Stream {
    let mut stream = fresh();
    stream.apply(&request(first, "")).expect("is fine");
    next_names(&mut stream, state, "1");
    stream
}

fn end_status(result: Result<(), Status>) -> (Code, String) {
    let status = result.expect_err("ends the stream");
    (status.code(), status.message().to_owned())
}

#[tokio::test]
async fn debug_lines_name_what_envoy_requests_and_acknowledges() {
    let (first, second) = (signed().await, signed().await);
    let log = logged(|| {
        let mut stream = Stream::new(&Registry::default());
        stream.apply(&request(&["default"], "")).expect("applied");
        stream.next_response(&first, "n1").expect("a response");
        stream.apply(&request(&["default"], "n1")).expect("applied");
        stream.next_response(&second, "n2").expect("a response");
        stream.apply(&request(&["default"], "n1")).expect("applied");
        let twice = request(&["ROOTCA", "ROOTCA"], "n2");
        stream.apply(&twice).expect("applied");
        stream.apply(&request(&[], "n2")).expect("applied");
    });
    let lines = [
        "ads: ADS:SDS: INIT/RECONNECT 1  \n",
        "ads: ADS:SDS: ACK 1  n1\n",
        "sds: Trigger on secret update, resource name: default\n",
        "ads: ADS:SDS: REQ 1 Expired nonce received n1, sent n2\n",
        "ads: ADS:SDS: RESOURCE CHANGE added [\"ROOTCA\"] removed [\"default\"] 1  n2\n",
        "ads: ADS:SDS: UNSUBSCRIBE 1  n2\n",
    ];
    let found: Vec<_> = lines.iter().map(|line| log.find(line)).collect();
    assert!(found.is_sorted() && found[0].is_some(), "{log}");
}

#[tokio::test]
async fn later_requests_are_answered_by_the_rules_of_sotw_xds() {
    const NOTHING: &[&str] = &[];
    let state = signed().await;
    for (rule, first, then, expected) in [
        ("a rejection", vec!["default"], rejection(&["default", "ROOTCA"], "1"), NOTHING),
        ("an unsubscription", vec!["default"], request(&[], "1"), NOTHING),
        ("no nonce, same", vec!["default"], request(&["default"], ""), &["default"]),
        (
            "no nonce, more",
            vec!["default"],
            request(&["default", "ROOTCA"], ""),
            &["ROOTCA", "default"],
        ),
        ("an old nonce", vec!["default"], request(&["default", "ROOTCA"], "0"), NOTHING),
        ("an acknowledgement", vec!["default"], request(&["default"], "1"), NOTHING),
        ("fewer names", vec!["default", "ROOTCA"], request(&["ROOTCA"], "1"), NOTHING),
        ("more names", vec!["default"], request(&["default", "ROOTCA"], "1"), &["ROOTCA"]),
        ("other names", vec!["default"], request(&["ROOTCA"], "1"), &["ROOTCA"]),
    ] {
        let mut stream = subscribed(&first, &state);
        stream.apply(&then).expect(rule);
        assert_eq!(next_names(&mut stream, &state, "2"), expected, "{rule}");
        assert_eq!(next_names(&mut stream, &state, "3"), NOTHING, "{rule}: once");
    }
}

#[tokio::test]
async fn a_first_request_is_answered_whatever_its_nonce() {
    let state = signed().await;
    let mut stream = fresh();
    stream.apply(&request(&["default"], "of an old stream")).expect("is fine");
    stream.apply(&request(&["default", "ROOTCA"], "of an old stream")).expect("is fine");
    assert_eq!(next_names(&mut stream, &state, "1"), ["ROOTCA", "default"]);
}

#[tokio::test]
async fn a_first_request_names_its_node_or_is_a_health_report() {
    let mut stream = fresh();
    let health = DiscoveryRequest {
        type_url: "type.googleapis.com/istio.v1.HealthInformation".to_owned(),
        ..Default::default()
    };
    stream.apply(&health).expect("is skipped");
    let nameless = DiscoveryRequest { node: None, ..request(&["default"], "") };
    let expected = (Code::InvalidArgument, "missing node information".to_owned());
    assert_eq!(end_status(stream.apply(&nameless)), expected);
    let mut stream = fresh();
    stream.apply(&request(&["default"], "")).expect("is fine");
    stream.apply(&nameless).expect("needs no node any more");
}

#[tokio::test]
async fn a_nack_as_the_first_request_subscribes_to_nothing() {
    let state = signed().await;
    let mut stream = fresh();
    stream.apply(&rejection(&["default"], "")).expect("is survived");
    assert!(!is_due(&mut stream, &state));
    stream.apply(&request(&["default"], "x")).expect("is fine");
    assert_eq!(next_names(&mut stream, &state, "1"), ["default"]);
}

#[tokio::test]
async fn a_request_waits_until_there_is_a_secret() {
    let nothing = State::default();
    let mut stream = fresh();
    stream.apply(&request(&["default", "ROOTCA"], "")).expect("is fine");
    assert!(!is_due(&mut stream, &nothing));
    assert_eq!(stream.0.unsent().count(), 2);
    let state = signed().await;
    assert_eq!(next_names(&mut stream, &state, "1"), ["ROOTCA", "default"]);
    assert_eq!(stream.0.unsent().count(), 0);
    assert!(!is_due(&mut stream, &nothing), "a withdrawal is not a push");
}

#[tokio::test]
async fn only_changed_and_subscribed_secrets_are_pushed_and_roots_come_first() {
    let authority = FakeAuthority::new(&clock());
    let old = signed_by(&authority).await;
    let mut both = subscribed(&["default", "ROOTCA"], &old);
    let mut roots_only = subscribed(&["ROOTCA"], &old);
    let renewed = signed_by(&authority).await;
    assert_eq!(next_names(&mut both, &renewed, "2"), ["default"]);
    assert!(!is_due(&mut roots_only, &renewed));
    assert!(!is_due(&mut both, &renewed), "the same is not sent again");
    authority.rotate_root();
    let moved = signed_by(&authority).await;
    assert_eq!(next_names(&mut both, &moved, "3"), ["ROOTCA"]);
    assert_eq!(next_names(&mut both, &moved, "4"), ["default"]);
    assert_eq!(next_names(&mut roots_only, &moved, "2"), ["ROOTCA"]);
}

#[tokio::test]
async fn a_rejected_push_is_not_repeated_but_the_next_one_comes() {
    let state = signed().await;
    let mut stream = subscribed(&["default"], &state);
    stream.apply(&rejection(&["default"], "1")).expect("is fine");
    assert!(!is_due(&mut stream, &state));
    assert_eq!(next_names(&mut stream, &signed().await, "2"), ["default"]);
}

#[tokio::test]
async fn rejections_and_answers_to_older_responses_are_counted() {
    let registry = Registry::default();
    let state = signed().await;
    let mut stream = Stream::new(&registry);
    let first = request(&["default"], "");
    stream.apply(&first).expect("is fine");
    next_names(&mut stream, &state, "1");
    assert!(!registry.render().contains("_pilot_"), "nothing is counted");
    let (rejected, late) = (rejection(&["default"], "1"), request(&["default"], "0"));
    for answer in [&rejected, &late, &late] {
        stream.apply(answer).expect("is fine");
    }
    let page = registry.render();
    assert!(page.contains("istio_agent_pilot_total_xds_rejects{type=\"sds\"} 1\n"));
    assert!(page.contains("istio_agent_pilot_xds_expired_nonce{type=\"sds\"} 2\n"));
}

/// Returns the problems of the secrets whose last version Envoy has rejected.
fn rejections(stream: &Stream) -> Vec<Problem> {
    stream.0.metrics.rejections.lock().values().cloned().collect()
}

#[tokio::test]
async fn a_rejected_secret_without_accepted_version_is_named_until_acceptance() {
    let authority = FakeAuthority::new(&clock());
    let registry = Registry::default();
    let mut stream = Stream::new(&registry);
    stream.apply(&request(&["default"], "")).expect("is fine");
    next_names(&mut stream, &signed_by(&authority).await, "1");
    let mut rejected = rejection(&["default"], "1");
    rejected.error_detail.as_mut().expect("is set").message =
        format!("no\n\x1b[0m{}", "x".repeat(9_000));
    stream.apply(&rejected).expect("is fine");
    let [problem] = &rejections(&stream)[..] else {
        panic!("one rejection");
    };
    assert_eq!(problem.code, problem::Code::SecretRefused);
    assert_eq!(problem.subject, "secret default");
    let found = &problem.found;
    assert!(found.contains("no\\n\\u{1b}[0mxxx"), "{found}");
    assert!(found.len() < 1_200, "{}", found.len());
    assert!(registry.render().contains("\nistio_agent_sds_refused_secrets 1\n"));
    // A request for the same secret with an older nonce is not an ACK.
    stream.apply(&request(&["default"], "0")).expect("is fine");
    assert_eq!(rejections(&stream).len(), 1);
    next_names(&mut stream, &signed_by(&authority).await, "2");
    stream.apply(&request(&["default"], "2")).expect("is fine");
    assert_eq!(rejections(&stream), []);
    assert!(registry.render().contains("\nistio_agent_sds_refused_secrets 0\n"));
    // If Envoy refuses a newer version, it still has the version that it accepted before.
    next_names(&mut stream, &signed_by(&authority).await, "3");
    stream.apply(&rejection(&["default"], "3")).expect("is fine");
    let rejected = Vec::from_iter(rejections(&stream).iter().map(|problem| problem.code));
    assert_eq!(rejected, [problem::Code::SecretUpdateRefused]);
    let page = registry.render();
    assert!(page.contains("\nistio_agent_sds_refused_secrets 0\n"));
}

#[tokio::test]
async fn a_version_of_an_earlier_stream_counts_and_ended_streams_are_ignored() {
    let state = signed().await;
    let mut stream = fresh();
    let mut again = request(&["default"], "");
    again.version_info = "before/1".to_owned();
    stream.apply(&again).expect("is fine");
    next_names(&mut stream, &state, "1");
    stream.apply(&rejection(&["default"], "1")).expect("is fine");
    let rejected = Vec::from_iter(rejections(&stream).iter().map(|problem| problem.code));
    assert_eq!(rejected, [problem::Code::SecretUpdateRefused]);

    let rejected = async |end: fn(Stream) -> Option<Stream>| {
        let mut stream = subscribed(&["file-root:a", "default"], &signed().await);
        stream.apply(&rejection(&["default"], "1")).expect("is fine");
        let all = stream.0.metrics.rejections.clone();
        assert_eq!(all.lock().len(), 1);
        let _stream = end(stream);
        all.lock().len()
    };
    assert_eq!(rejected(|_| None).await, 0, "the stream ended");
    let unsubscribed = |mut stream: Stream| {
        stream.apply(&request(&[], "1")).expect("is fine");
        Some(stream)
    };
    assert_eq!(rejected(unsubscribed).await, 0, "nothing is asked for");
}

#[tokio::test]
async fn secrets_have_the_shape_envoy_expects() {
    let state = signed().await;
    let mut stream = fresh();
    stream.apply(&request(&["default", "ROOTCA"], "")).expect("is fine");
    let response = stream.next_response(&state, "n").expect("is due");
    assert_eq!(response.type_url, TYPE_URL);
    assert_eq!((&*response.version_info, &*response.nonce), ("now/1", "n"));
    let inline = |source: Option<DataSource>| match source.and_then(|s| s.specifier) {
        Some(Specifier::InlineBytes(bytes)) => bytes,
        other => panic!("not inline: {other:?}"),
    };
    let workload = state.workload.expect("is there");
    for any in response.resources {
        assert_eq!(any.type_url, TYPE_URL);
        match Secret::decode(&*any.value).expect("is a secret").r#type {
            Some(secret::Type::TlsCertificate(pair)) => {
                let certificate = &workload.certificate;
                assert_eq!(inline(pair.certificate_chain), *certificate.chain_pem());
                assert_eq!(inline(pair.private_key), certificate.key_pem());
            }
            Some(secret::Type::ValidationContext(context)) => {
                assert_eq!(inline(context.trusted_ca), *workload.roots.pem());
            }
            other => panic!("unexpected secret {other:?}"),
        }
    }
}

fn name() -> impl Strategy<Value = String> {
    prop_oneof!["default|ROOTCA|file-root:[ab]|file-cert:[ab]~[ab]|file-root:system", ".{0,12}",]
}

fn states() -> impl Strategy<Value = Vec<u8>> {
    proptest::collection::vec(0..4_u8, 8)
}

/// Makes responses until none is due. `states` has the state of each secret: 3 if it is available, less if it is not.
/// Fails if the responses do not end.
fn drain_responses(stream: &mut Stream, states: &[u8]) -> Result<(), TestCaseError> {
    let names = ["default", "ROOTCA", "file-root:a", "file-root:b", "file-cert:a~b"];
    let names = names.iter().map(|name| name.parse().expect("is a name"));
    let table: BTreeMap<Name, u8> = names.zip(states.iter().copied()).collect();
    let lookup = |name: &Name| match table.get(name) {
        None | Some(0..3) => None,
        Some(_) => Some(available(Served::Roots(Roots::unchecked("1")))),
    };
    for _ in 0..20 {
        if stream.look_up(&lookup, "n").is_none() {
            return Ok(());
        }
    }
    Err(TestCaseError::fail("it has no end"))
}

proptest! {
    /// Arbitrary requests in any order, for secrets in any state, cause no panic and no endless responses.
    #[test]
    fn arbitrary_requests_do_no_harm(
        requests in proptest::collection::vec(
            (proptest::collection::vec(name(), 0..4), "n?", any::<bool>(), states()),
            0..8,
        ),
    ) {
        let mut stream = fresh();
        for (names, nonce, is_nack, states) in requests {
            let asked: Vec<&str> = names.iter().map(String::as_str).collect();
            let mut request = request(&asked, &nonce);
            request.error_detail = is_nack.then(Default::default);
            if stream.apply(&request).is_ok() {
                drain_responses(&mut stream, &states)?;
            }
        }
    }

    /// Arbitrary bytes that decode as a request cause no panic and no endless responses.
    #[test]
    fn arbitrary_frames_do_no_harm(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        if let Ok(request) = DiscoveryRequest::decode(&*bytes) {
            let mut stream = fresh();
            drop(stream.apply(&request));
            drain_responses(&mut stream, &[3; 8])?;
        }
    }
}
