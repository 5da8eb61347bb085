//! One stream of Envoy tied to one stream of istiod.
//!
//! [`Exchange`] is the relay without its sockets: events in, bytes out, no waiting. [`run`] feeds it
//! and carries its bytes, in one loop that never waits for one direction while the other has work.
//! When either stream ends, the other does; Envoy dials again and states its subscriptions anew.
//!
//! While istiod cannot be reached, Envoy's stream is held open instead of being failed: a failed one
//! sends Envoy into a backoff of up to 30 s, in which a returning istiod would go unnoticed.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::{Pin, pin};
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use http_body::Frame;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::Protocol;
use super::intercept::{Captured, Interceptors, Outcome, acknowledge, frame};
use super::request::RequestReader;
use super::response::{Output, ResponseReader};
use super::status::{self, End};
use super::stream_body::RequestQueue;
use crate::istiod::{Closed, Connection, Istiod};

/// The type whose first request the agent's own subscriptions follow.
///
/// Envoy asks for listeners once its clusters are warm, so they never delay its start.
const LISTENER: &str = "type.googleapis.com/envoy.config.listener.v3.Listener";

/// How many responses may wait for interceptors before istiod is made to wait too.
const MAX_INTERCEPTED: usize = 8;

/// How many bytes of requests are kept for an istiod that is not there yet. A first round of
/// requests is far smaller; what goes on sending all the same is made to wait.
const MAX_HELD: usize = 4 << 20;

/// A response that Envoy took longer than this to accept is worth a warning.
const SLOW_SEND: Duration = Duration::from_secs(10);

/// What a relay needs beside its two streams.
#[derive(Debug)]
pub(crate) struct Relay {
    pub id: u32,
    pub protocol: Protocol,
    pub istiod: Istiod,
    pub interceptors: Interceptors,
    pub max_request_bytes: usize,
    /// Fired when a newer stream takes this one's place, or the agent goes down.
    pub stop: CancellationToken,
}

/// Everything that moves an [`Exchange`].
#[derive(Debug)]
enum Event {
    FromEnvoy(Bytes),
    FromIstiod(Bytes),
    Intercepted(usize, Captured, Outcome),
}

/// The relay without its sockets.
#[derive(Debug)]
struct Exchange {
    id: u32,
    protocol: Protocol,
    interceptors: Interceptors,
    requests: RequestReader,
    responses: ResponseReader,
    /// Whether the agent's own subscriptions have been sent on this stream.
    subscribed: bool,
    to_istiod: Vec<Bytes>,
    to_envoy: VecDeque<Bytes>,
    /// Rewritten messages that arrived in the midst of a passing one.
    between: VecDeque<Bytes>,
    captured: VecDeque<(usize, Captured)>,
}

impl Exchange {
    fn new(relay: &Relay) -> Self {
        Self {
            id: relay.id,
            protocol: relay.protocol,
            interceptors: relay.interceptors.clone(),
            requests: RequestReader::new(relay.protocol, relay.max_request_bytes),
            responses: ResponseReader::new(relay.protocol, relay.interceptors.clone()),
            subscribed: false,
            to_istiod: Vec::new(),
            to_envoy: VecDeque::new(),
            between: VecDeque::new(),
            captured: VecDeque::new(),
        }
    }

    fn apply(&mut self, event: Event) -> Result<(), End> {
        match event {
            Event::FromEnvoy(bytes) => self.requests(bytes).map_err(End::BadRequest),
            Event::FromIstiod(bytes) => self.responses(bytes).map_err(End::BadResponse),
            Event::Intercepted(_, response, outcome) => {
                self.intercepted(&response, outcome);
                Ok(())
            }
        }
    }

    fn requests(&mut self, bytes: Bytes) -> Result<(), Status> {
        self.requests.feed(bytes, |request| {
            let type_url = &request.type_url;
            tracing::debug!(target: "xdsproxy", id = self.id, "request for type url {type_url}");
            let first_listener = type_url == LISTENER && !self.subscribed;
            self.to_istiod.push(request.frame);
            if first_listener {
                self.subscribed = true;
                let subscriptions = self.interceptors.subscriptions(self.protocol);
                self.to_istiod.extend(subscriptions);
            }
        })
    }

    fn responses(&mut self, bytes: Bytes) -> Result<(), Status> {
        self.responses.feed(bytes, |output| match output {
            Output::Pass(bytes) => self.to_envoy.push_back(bytes),
            // Without resources there is nothing to take, and istiod gets no answer, as from
            // pilot-agent; and nothing to rewrite.
            Output::Captured(index, response) if response.resources == 0 => {
                if !self.interceptors.subscribes(index) {
                    self.between.push_back(frame(&response.message));
                }
            }
            Output::Captured(index, response) => self.captured.push_back((index, response)),
            Output::Withheld(type_url) => tracing::error!(
                target: "xdsproxy",
                "Skipping forwarding type url {type_url} to Envoy as is not a valid Envoy type"
            ),
        })?;
        self.fill_gap();
        Ok(())
    }

    fn intercepted(&mut self, response: &Captured, outcome: Outcome) {
        match outcome {
            Outcome::Taken => self.to_istiod.push(acknowledge(response, None)),
            Outcome::Refused(problem) => {
                tracing::warn!(
                    target: "xdsproxy",
                    id = self.id,
                    "refusing {} {}: {problem}",
                    response.type_url,
                    response.nonce
                );
                self.to_istiod.push(acknowledge(response, Some(&problem)));
            }
            Outcome::Forward(message) => {
                self.between.push_back(frame(&message));
                self.fill_gap();
            }
        }
    }

    /// Lets rewritten messages go, unless one is just passing.
    fn fill_gap(&mut self) {
        if !self.responses.passing() {
            self.to_envoy.append(&mut self.between);
        }
    }

    fn wants_responses(&self) -> bool {
        self.to_envoy.is_empty() && self.captured.len() < MAX_INTERCEPTED
    }
}

/// Istiod's side of the relay, from dialing to the stream's end.
enum IstiodSide {
    Connecting(Pin<Box<dyn Future<Output = Result<Connection, Closed>> + Send>>),
    Opening(Pin<Box<dyn Future<Output = Result<http::Response<Incoming>, hyper::Error>> + Send>>),
    Open(Incoming),
}

enum FromIstiod {
    Connected(Connection),
    Opened(http::Response<Incoming>),
    Data(Bytes),
    Ended(End),
}

impl IstiodSide {
    /// What happens next. Safe to drop and call again.
    async fn next(&mut self) -> FromIstiod {
        match self {
            Self::Connecting(connection) => match connection.await {
                Ok(connection) => FromIstiod::Connected(connection),
                Err(closed) => {
                    FromIstiod::Ended(End::Lost(Status::unavailable(closed.to_string())))
                }
            },
            Self::Opening(response) => match response.await {
                Ok(response) => FromIstiod::Opened(response),
                Err(error) => FromIstiod::Ended(status::lost(error)),
            },
            Self::Open(body) => match body.frame().await {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(bytes) => FromIstiod::Data(bytes),
                    Err(frame) => {
                        let trailers = frame.into_trailers().unwrap_or_default();
                        FromIstiod::Ended(status::of_trailers(trailers))
                    }
                },
                Some(Err(error)) => FromIstiod::Ended(status::lost(error)),
                None => FromIstiod::Ended(status::of_trailers(HeaderMap::new())),
            },
        }
    }
}

/// Runs the relay until either stream has ended, and ends the other.
pub(crate) async fn run(relay: Relay, envoy: Incoming, to_envoy: mpsc::Sender<Frame<Bytes>>) {
    let end = carry(&relay, envoy, &to_envoy).await;
    end.log(relay.id);
    if let Some(trailers) = end.trailers() {
        // An Envoy that takes nothing any more does not hold the relay up.
        let sent = to_envoy.send_timeout(Frame::trailers(trailers), Duration::from_secs(1));
        if sent.await.is_err() {
            tracing::debug!(target: "xdsproxy", id = relay.id, "Envoy left without its status");
        }
    }
    tracing::debug!(
        target: "xdsproxy",
        id = relay.id,
        "disconnected from {}XDS server: {}",
        relay.protocol.log_prefix(),
        relay.istiod.address()
    );
}

async fn carry(relay: &Relay, mut envoy: Incoming, to_envoy: &mpsc::Sender<Frame<Bytes>>) -> End {
    let mut exchange = Exchange::new(relay);
    // Requests and responses form a loop: istiod may not read requests while it waits for a large
    // response to be taken, and Envoy may not take it before its requests are through. One of the
    // hops must not wait, or all do. Requests are small and few, so theirs is the queue without a
    // bound.
    let (requests, queue) = mpsc::unbounded_channel();
    let mut queue = Some(RequestQueue::new(queue));
    let connecting = relay.istiod.clone();
    let mut istiod = IstiodSide::Connecting(Box::pin(async move { connecting.connection().await }));
    let mut intercepting: JoinSet<(usize, Captured, Outcome)> = JoinSet::new();
    let mut busy = vec![];
    let mut waiting_since = None;
    let mut held = 0;
    let mut stopped = pin!(relay.stop.cancelled());
    let mut envoy_gone = pin!(to_envoy.closed());
    loop {
        let event = tokio::select! {
            () = &mut stopped => return End::Stopped,
            () = &mut envoy_gone => return End::EnvoyGone,
            frame = envoy.frame(), if held < MAX_HELD => match frame {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(bytes) => Event::FromEnvoy(bytes),
                    Err(_trailers) => continue,
                },
                Some(Err(error)) => return End::EnvoyFailed(error),
                None => return match exchange.requests.finish() {
                    Ok(()) => End::EnvoyDone,
                    Err(status) => End::BadRequest(status),
                },
            },
            permit = to_envoy.reserve(), if !exchange.to_envoy.is_empty() => {
                let (Ok(permit), Some(bytes)) = (permit, exchange.to_envoy.pop_front()) else {
                    return End::EnvoyGone;
                };
                permit.send(Frame::data(bytes));
                warn_if_slow(waiting_since.take(), relay.id);
                if !exchange.to_envoy.is_empty() {
                    waiting_since = Some(Instant::now());
                }
                continue;
            }
            Some(done) = intercepting.join_next() => match done {
                Ok((index, response, outcome)) => Event::Intercepted(index, response, outcome),
                Err(panic) => return End::BadResponse(Status::internal(panic.to_string())),
            },
            from = istiod.next(), if exchange.wants_responses() => match from {
                FromIstiod::Data(bytes) => Event::FromIstiod(bytes),
                FromIstiod::Ended(end) => return end,
                FromIstiod::Connected(connection) => {
                    let Some(queue) = queue.take() else { continue };
                    held = 0;
                    istiod = open(relay, connection, queue);
                    continue;
                }
                FromIstiod::Opened(response) => match status::opened(response) {
                    Ok(body) => {
                        istiod = IstiodSide::Open(body);
                        continue;
                    }
                    Err(end) => return end,
                },
            },
        };
        if let Event::Intercepted(index, ..) = &event {
            busy.retain(|other| other != index);
        }
        if let Err(end) = exchange.apply(event) {
            return end;
        }
        for request in exchange.to_istiod.drain(..) {
            if queue.is_some() {
                held += request.len();
            }
            // The queue is gone only when istiod's stream has ended, which the loop is about to see.
            let _ = requests.send(request);
        }
        start_interceptions(&mut exchange, &mut intercepting, &mut busy);
        if !exchange.to_envoy.is_empty() {
            waiting_since.get_or_insert_with(Instant::now);
        }
    }
}

/// Opens the stream to istiod. Its head may come only with the first response, so nothing waits for
/// it.
fn open(relay: &Relay, mut connection: Connection, queue: RequestQueue) -> IstiodSide {
    let body = crate::istiod::Body::new(queue);
    let request = relay.istiod.request(relay.protocol.path(), body);
    tracing::info!(
        target: "xdsproxy",
        id = relay.id,
        "connected to {}upstream XDS server: {}",
        relay.protocol.log_prefix(),
        relay.istiod.address()
    );
    IstiodSide::Opening(Box::pin(async move { connection.send(request).await }))
}

/// Starts what waits for interceptors that are idle: one response of a type at a time.
fn start_interceptions(
    exchange: &mut Exchange,
    running: &mut JoinSet<(usize, Captured, Outcome)>,
    busy: &mut Vec<usize>,
) {
    for (index, response) in std::mem::take(&mut exchange.captured) {
        if busy.contains(&index) {
            exchange.captured.push_back((index, response));
            continue;
        }
        busy.push(index);
        let intercepting = exchange.interceptors.intercept(index, response.clone());
        running.spawn(async move { (index, response, intercepting.await) });
    }
}

/// Warns of an Envoy that was slow to take what waited for it since then.
fn warn_if_slow(since: Option<Instant>, id: u32) {
    let waited = since.map(|since| since.elapsed()).unwrap_or_default();
    if waited > SLOW_SEND {
        tracing::warn!(target: "xdsproxy", id, "sendDownstream took {waited:?}");
    }
}

#[cfg(test)]
mod tests {
    use envoy_types::pb::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
    use envoy_types::pb::google::protobuf::Any;
    use prost::Message;

    use super::*;
    use crate::xds::intercept::{Intercepting, Interceptor};

    const CLUSTER: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";
    const EXTENSION: &str = "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig";
    const NAMES: &str = "type.googleapis.com/istio.networking.nds.v1.NameTable";

    struct Scripted {
        type_url: &'static str,
        subscribes: bool,
    }

    impl Interceptor for Scripted {
        fn type_url(&self) -> &str {
            self.type_url
        }
        fn subscribes(&self) -> bool {
            self.subscribes
        }
        fn intercept(&self, _: Captured) -> Intercepting {
            Box::pin(async { Outcome::Taken })
        }
    }

    fn exchange() -> Exchange {
        let protocol = Protocol::StateOfTheWorld;
        let interceptors = Interceptors::new(vec![
            Box::new(Scripted {
                type_url: NAMES,
                subscribes: true,
            }),
            Box::new(Scripted {
                type_url: EXTENSION,
                subscribes: false,
            }),
        ]);
        Exchange {
            id: 1,
            protocol,
            requests: RequestReader::new(protocol, 1000),
            responses: ResponseReader::new(protocol, interceptors.clone()),
            interceptors,
            subscribed: false,
            to_istiod: Vec::new(),
            to_envoy: VecDeque::new(),
            between: VecDeque::new(),
            captured: VecDeque::new(),
        }
    }

    fn request(type_url: &str) -> Bytes {
        let request = DiscoveryRequest {
            type_url: type_url.into(),
            ..Default::default()
        };
        frame(&request.encode_to_vec())
    }

    fn response(type_url: &str) -> Bytes {
        let response = DiscoveryResponse {
            resources: vec![Any {
                type_url: type_url.into(),
                value: vec![1; 40],
            }],
            type_url: type_url.into(),
            nonce: "n".into(),
            ..Default::default()
        };
        frame(&response.encode_to_vec())
    }

    fn types_to_istiod(exchange: &mut Exchange) -> Vec<String> {
        let requests = exchange.to_istiod.drain(..);
        requests
            .map(|r| DiscoveryRequest::decode(&r[5..]).unwrap().type_url)
            .collect()
    }

    #[test]
    fn own_subscriptions_follow_the_first_listener_request_once() {
        let mut exchange = exchange();
        for _ in 0..2 {
            exchange.apply(Event::FromEnvoy(request(CLUSTER))).unwrap();
            exchange.apply(Event::FromEnvoy(request(LISTENER))).unwrap();
        }
        let types = types_to_istiod(&mut exchange);
        assert_eq!(types, [CLUSTER, LISTENER, NAMES, CLUSTER, LISTENER]);
    }

    #[test]
    fn a_rewritten_message_waits_for_the_gap_behind_a_passing_one() {
        let mut exchange = exchange();
        let (passing, own) = (response(CLUSTER), response(EXTENSION));
        exchange.apply(Event::FromIstiod(own.clone())).unwrap();
        let (index, captured) = exchange.captured.pop_front().unwrap();
        assert_eq!(captured.message, own[5..]);
        exchange
            .apply(Event::FromIstiod(passing.slice(..80)))
            .unwrap();
        let rewritten = Bytes::from_static(b"rewritten");
        let outcome = Outcome::Forward(rewritten.clone());
        exchange
            .apply(Event::Intercepted(index, captured, outcome))
            .unwrap();
        assert_eq!(exchange.to_envoy, [passing.slice(..80)]);
        exchange
            .apply(Event::FromIstiod(passing.slice(80..)))
            .unwrap();
        let expected = [passing.slice(..80), passing.slice(80..), frame(&rewritten)];
        assert_eq!(exchange.to_envoy, expected);
    }

    #[test]
    fn a_taken_response_is_acknowledged_and_a_refused_one_says_why() {
        let mut exchange = exchange();
        exchange.apply(Event::FromIstiod(response(NAMES))).unwrap();
        let (index, captured) = exchange.captured.pop_front().unwrap();
        for outcome in [Outcome::Taken, Outcome::Refused("no table".into())] {
            exchange
                .apply(Event::Intercepted(index, captured.clone(), outcome))
                .unwrap();
        }
        let answers: Vec<_> = exchange
            .to_istiod
            .iter()
            .map(|r| DiscoveryRequest::decode(&r[5..]).unwrap())
            .map(|r| {
                (
                    r.response_nonce,
                    r.error_detail.map(|status| status.message),
                )
            })
            .collect();
        assert_eq!(
            answers,
            [("n".into(), None), ("n".into(), Some("no table".into()))]
        );
        assert!(exchange.to_envoy.is_empty());
    }

    #[test]
    fn without_resources_an_own_type_gets_no_answer_and_a_rewritten_one_passes() {
        let empty = |type_url: &str| {
            let response = DiscoveryResponse {
                type_url: type_url.into(),
                ..Default::default()
            };
            frame(&response.encode_to_vec())
        };
        let mut exchange = exchange();
        exchange.apply(Event::FromIstiod(empty(NAMES))).unwrap();
        exchange.apply(Event::FromIstiod(empty(EXTENSION))).unwrap();
        assert!(exchange.captured.is_empty() && exchange.to_istiod.is_empty());
        assert_eq!(exchange.to_envoy, [empty(EXTENSION)]);
    }

    #[test]
    fn istiod_waits_while_envoy_or_the_interceptors_have_enough() {
        let mut exchange = exchange();
        assert!(exchange.wants_responses());
        exchange
            .apply(Event::FromIstiod(response(CLUSTER)))
            .unwrap();
        assert!(!exchange.wants_responses());
        exchange.to_envoy.clear();
        for _ in 0..MAX_INTERCEPTED {
            exchange.apply(Event::FromIstiod(response(NAMES))).unwrap();
        }
        assert!(!exchange.wants_responses());
    }
}
