//! Implements the stream state machine of the relay. It takes bytes of both sides, returns bytes, and never
//! waits.
//!
//! [`super::relay`] feeds a [`StreamState`] with the bytes it receives and sends those that are ready.

use std::collections::VecDeque;

use bytes::Bytes;
use tokio::time::Instant;
use tonic::{Code, Status};

use super::end::End;
use super::interceptor::{HEALTH, Interceptors, Outcome, SecondOutcome, encode_request};
use super::ledger::rejected::NONCE;
use super::ledger::{EnvoyCache, Recorder};
use super::liveness::{DEBUG, Liveness};
use super::observe::{Observer, Services, Source};
use super::on_demand::{self, OnDemand};
use super::relay::Verdict;
use super::request::{Request, RequestReader, frame, without_nonce};
use super::response::{Captured, Consumer, Output, Received, ResponseReader};
use super::{LISTENER, Protocol};
use crate::problem::{self, Problem};

/// The most responses that wait for interceptors while more are read from istiod.
const MAX_INTERCEPTED: usize = 8;

/// The state of one ADS stream of Envoy, or of another client, and the stream to istiod it is tied to.
pub(super) struct StreamState {
    id: u32,
    protocol: Protocol,
    pub(super) interceptors: Interceptors,
    observer: Observer,
    pub(super) requests: RequestReader,
    responses: ResponseReader,
    /// True once the agent's own subscriptions have been sent on this stream. Then istiod knows the node, and
    /// other requests of the agent may follow.
    pub(super) has_sent_own_subscriptions: bool,
    /// True once istiod, or the stored configuration, has sent a response, or a part of one.
    pub(super) has_responded: bool,
    /// Requests that are ready to be sent, each a frame.
    pub(super) to_istiod: Vec<Bytes>,
    /// Bytes of responses that are ready to be sent, in order.
    pub(super) to_client: VecDeque<Bytes>,
    /// Rewritten messages that wait for the end of a passing one.
    rewritten_waiting: VecDeque<Bytes>,
    /// Responses that wait for their interceptor.
    pub(super) captured: VecDeque<Captured>,
    /// The origin of responses.
    pub(super) source: Source,
    pub(super) recorder: Recorder,
    /// None for clients other than Envoy.
    pub(super) services: Option<Services>,
    /// None without a stream of istiod, and if istiod must not be asked.
    pub(super) liveness: Option<Liveness>,
    /// None unless Envoy gets clusters on demand, and the responses are istiod's.
    pub(super) on_demand: Option<OnDemand>,
}

impl StreamState {
    pub(super) fn new(
        id: u32,
        protocol: Protocol,
        interceptors: Interceptors,
        observer: Observer,
        max_request_bytes: usize,
        store: Option<EnvoyCache>,
    ) -> Self {
        let cache = store.clone().filter(EnvoyCache::is_on_demand);
        let on_demand = cache.map(|cache| OnDemand::new(cache, id, observer.clone()));
        Self {
            id,
            protocol,
            requests: RequestReader::new(protocol, max_request_bytes),
            responses: ResponseReader::new(protocol, interceptors.clone()),
            interceptors,
            observer,
            has_sent_own_subscriptions: false,
            has_responded: false,
            to_istiod: Vec::new(),
            to_client: VecDeque::new(),
            rewritten_waiting: VecDeque::new(),
            captured: VecDeque::new(),
            source: Source::Istiod,
            recorder: Recorder::new(store, id),
            services: None,
            liveness: None,
            on_demand,
        }
    }

    /// Takes bytes of requests from the client. Records the requests that they complete, and queues those for
    /// istiod in `to_istiod`. Fails if the bytes are not requests.
    pub(super) fn read_requests(&mut self, bytes: Bytes) -> Result<(), End> {
        let read = self.requests.feed(bytes, |mut request| {
            // istiod does not know the nonce of stored versions, and gets only the names in the request.
            if request.nonce == NONCE && self.protocol == Protocol::Delta {
                self.recorder.record_stored_ack_or_nack(&request);
                let Some(frame) = without_nonce(&request.frame) else { return };
                request.frame = frame;
                request.nonce.clear();
                request.rejection = None;
            }
            log_request(self.id, self.protocol, &request.frame);
            if let Some(services) = &mut self.services
                && let Some(count) = services.apply_request(&request, self.protocol)
            {
                self.observer.metrics.services.set(count as f64);
            }
            self.observer.record_request(&request);
            self.recorder.record_request(&request);
            self.on_demand.take_if(|it| it.is_unsupported(&request));
            if let Some(on_demand) = &mut self.on_demand {
                let is_forwarded = on_demand.read_request(&mut request);
                on_demand.publish();
                self.to_istiod.append(&mut on_demand.to_istiod);
                if !is_forwarded {
                    return;
                }
            }
            if self.protocol == Protocol::Delta {
                self.interceptors.note_request(&request.type_url, &request.frame);
            }
            self.to_istiod.push(request.frame);
            // Envoy asks for listeners once its clusters are warm, so the agent's own subscriptions do not delay it.
            if request.type_url == LISTENER
                && !std::mem::replace(&mut self.has_sent_own_subscriptions, true)
            {
                for frame in self.interceptors.subscriptions(self.protocol) {
                    log_request(self.id, self.protocol, &frame);
                    self.to_istiod.push(frame);
                }
            }
        });
        read.map_err(|status| End::bad_request(&status))?;
        self.send_waiting();
        Ok(())
    }

    /// Encodes a health report of the workload.
    pub(super) fn health_report(&self, health: &Verdict) -> Bytes {
        let problem = health.as_ref().err().map(String::as_str);
        let report = encode_request(self.protocol, HEALTH, "", "", problem);
        log_request(self.id, self.protocol, &report);
        report
    }

    /// Prepares for another stream of istiod, because the last one had no response.
    pub(super) fn restart(&mut self) {
        self.responses = ResponseReader::new(self.protocol, self.interceptors.clone());
        self.liveness = None;
    }

    /// Takes bytes of responses. Queues those for the client in `to_client`, and complete responses for interceptors
    /// in `captured`. Fails if the bytes are not responses.
    pub(super) fn read_responses(&mut self, bytes: Bytes) -> Result<(), End> {
        self.note_replaced();
        self.responses.reads_names = self.liveness.as_mut().is_some_and(Liveness::note_bytes);
        let mut malformed = None;
        let read = self.responses.feed(bytes, |output| match output {
            Output::Begins { type_url, length } => {
                self.has_responded = true;
                self.recorder.begin_response(&type_url, length);
                if let Some(on_demand) = &mut self.on_demand {
                    on_demand.begin_response(&type_url, length);
                }
            }
            Output::Pass(bytes) => {
                self.recorder.record_bytes(&bytes);
                if let Some(on_demand) = &mut self.on_demand {
                    on_demand.read_bytes(&bytes);
                }
                self.to_client.push_back(bytes);
            }
            Output::Complete(it)
                if it.type_url == DEBUG
                    && let Some(liveness) = &mut self.liveness =>
            {
                liveness.note_answer(&mut self.observer.history.lock());
            }
            Output::Complete(received) => {
                self.has_responded = true;
                if let Some(liveness) = &mut self.liveness {
                    liveness.note_response(&received, &mut self.observer.history.lock());
                }
                if self.source == Source::Istiod {
                    tracing::debug!(
                        target: "xdsproxy",
                        id = self.id,
                        r#type = short_type(&received.type_url),
                        nonce = received.nonce,
                        resources = received.resources,
                        removes = received.removed,
                        "upstream response"
                    );
                }
                if received.consumer == Consumer::None {
                    let type_url = &received.type_url;
                    tracing::error!(target: "xdsproxy", "Skipping forwarding type url {type_url} to Envoy as is not a valid Envoy type");
                }
                self.recorder.complete_response(&received, self.on_demand.as_mut());
                if let Some(on_demand) = &mut self.on_demand {
                    on_demand.end_response();
                    on_demand.publish();
                }
                self.observer.record_response(received, self.source);
            }
            // A response without resources is not consumed, and istiod gets no ACK, as from pilot-agent. If
            // Envoy subscribes to the type, it may be a removal, which the interceptor has to see.
            Output::Captured(response)
                if response.received.resources == 0
                    && self.interceptors.get(response.interceptor).subscribes() => {}
            Output::Captured(response) => self.captured.push_back(response),
            Output::Replaced(received, message) => {
                let Some(on_demand) = &mut self.on_demand else { return };
                let read = on_demand.read_response(&received, &message);
                on_demand.publish();
                // No other message passes, and later ones may need these clusters.
                self.to_client.extend(on_demand.to_envoy.drain(..));
                match read {
                    Ok(None) => {}
                    Ok(Some(message)) => {
                        self.recorder.record_message(&received, &message, false);
                        self.to_client.push_back(frame(&message));
                    }
                    Err(status) => malformed = Some(status),
                }
            }
        });
        if let Some(status) = malformed {
            return Err(End::bad_response(&status));
        }
        read.map_err(|status| End::bad_response(&status))?;
        if self.on_demand.as_ref().is_some_and(OnDemand::has_lost_clusters) {
            let status = Status::internal("the ledger has been dropped; istiod is asked again");
            return Err(End::bad_response(&status));
        }
        self.send_waiting();
        Ok(())
    }

    /// Applies the outcome of an interceptor: sends istiod an ACK or NACK, or the client the rewritten message.
    /// Returns the outcome that may follow.
    pub(super) fn apply_outcome(
        &mut self,
        captured: &Captured,
        outcome: Outcome,
    ) -> Option<SecondOutcome> {
        let response = &captured.received;
        match outcome {
            Outcome::Accepted => {
                self.recorder.record_message(response, &captured.message, true);
                self.send_ack_or_nack(response, None);
            }
            Outcome::Rejected(problem) => {
                self.send_ack_or_nack(response, Some(&problem));
                let found = format!("{} {} is refused", response.type_url, response.nonce);
                let problem = Problem::new(problem::Code::ResponseRefused, problem, found);
                tracing::error!(target: "xdsproxy", id = self.id, "{problem}");
            }
            Outcome::Forward(message, second) => {
                let Received { type_url, nonce, .. } = response;
                tracing::debug!(target: "xdsproxy", id = self.id, nonce, "forward {}", short_type(type_url));
                self.recorder.record_message(response, &message, false);
                if let Some(on_demand) = &mut self.on_demand {
                    on_demand.read_extensions(&message);
                }
                self.rewritten_waiting.push_back(frame(&message));
                self.send_waiting();
                return second;
            }
        }
        None
    }

    /// Sends the ACK or NACK of a response the agent consumed.
    fn send_ack_or_nack(&mut self, response: &Received, problem: Option<&str>) {
        let type_url = &response.type_url;
        let nonce = &response.nonce;
        self.observer.record_ack_or_nack(type_url, nonce, problem);
        let request = encode_request(self.protocol, type_url, &response.version, nonce, problem);
        log_request(self.id, self.protocol, &request);
        self.to_istiod.push(request);
    }

    /// Sends rewritten messages, responses of the agent and stored versions, unless another message is passing.
    pub(super) fn send_waiting(&mut self) {
        if let Some(on_demand) = &mut self.on_demand {
            self.to_istiod.append(&mut on_demand.to_istiod);
        }
        if self.responses.is_passing() {
            return;
        }
        if let Some(on_demand) = &mut self.on_demand {
            self.to_client.extend(on_demand.to_envoy.drain(..));
            while let Some((received, message)) = on_demand.take_listeners() {
                self.recorder.record_message(&received, &message, false);
                self.to_client.push_back(frame(&message));
            }
        }
        self.to_client.append(&mut self.rewritten_waiting);
        while let Some(frame) = self.recorder.take_stored() {
            self.to_client.push_back(frame);
        }
    }

    /// Tells the reader which responses the agent replaces.
    fn note_replaced(&mut self) {
        self.responses.replace(self.on_demand.as_ref().map_or(&[], OnDemand::replaced_types));
    }

    /// Returns when [`StreamState::check_liveness`] is due. `reads` is true if responses are read.
    pub(super) fn liveness_due(&mut self, reads: bool) -> Option<Instant> {
        self.liveness.as_mut()?.due(reads)
    }

    /// Asks istiod whether its stream works, or notes that it has not answered.
    pub(super) fn check_liveness(&mut self) {
        if let Some(liveness) = &mut self.liveness {
            liveness.check();
        }
    }

    /// Handles what is due for clusters on demand.
    pub(super) fn handle_on_demand(&mut self, event: on_demand::Event) {
        if let Some(on_demand) = &mut self.on_demand {
            on_demand.handle(event);
            on_demand.publish();
        }
        self.send_waiting();
    }

    /// Returns true if there is room for more of istiod's responses.
    pub(super) fn wants_responses(&self) -> bool {
        // Stored clusters are sent after a passing message, which therefore has to end.
        let awaits_clusters = self.recorder.clusters_due.is_some() && !self.responses.is_passing();
        self.to_client.is_empty() && self.captured.len() < MAX_INTERCEPTED && !awaits_clusters
    }

    /// Returns the end of the streams after the client has closed its half, an error if inside a message.
    pub(super) fn client_end(&self) -> End {
        match self.requests.finish() {
            Ok(()) => End::envoy_done(),
            Err(status) => End::bad_request(&status),
        }
    }

    /// Returns the end of the streams after the end of istiod's. An incomplete message is an error, even if
    /// istiod reports success.
    pub(super) fn istiod_end(&self, end: End) -> End {
        if end.istiod_code() == Some(Code::Ok) && !self.responses.is_between_messages() {
            let status = Status::internal("istiod ended the stream inside a message");
            return End::bad_response(&status);
        }
        end
    }
}

/// Logs a request to istiod, a frame, as pilot-agent does and with its nonce.
fn log_request(id: u32, protocol: Protocol, frame: &Bytes) {
    if !tracing::enabled!(target: "xdsproxy", tracing::Level::DEBUG) {
        return;
    }
    let Ok(request) = Request::decode(protocol, frame.clone()) else { return };
    let subscription = request.subscription().unwrap_or_default();
    let Request { type_url, nonce, .. } = request;
    match protocol {
        Protocol::Sotw => {
            tracing::debug!(target: "xdsproxy", id, nonce, "request for type url {type_url}");
        }
        Protocol::Delta => tracing::debug!(
            target: "xdsproxy",
            id,
            r#type = short_type(&type_url),
            sub = subscription.names.len(),
            unsub = subscription.unsubscribed.len(),
            nonce,
            initial = subscription.initial_resource_versions.len(),
            "delta request"
        ),
    }
}

/// Returns the abbreviation by which Istio's logs name a type, or the type.
pub(super) fn short_type(type_url: &str) -> &str {
    match type_url.strip_prefix("type.googleapis.com/") {
        Some("envoy.config.cluster.v3.Cluster") => "CDS",
        Some("envoy.config.listener.v3.Listener") => "LDS",
        Some("envoy.config.route.v3.RouteConfiguration") => "RDS",
        Some("envoy.config.endpoint.v3.ClusterLoadAssignment") => "EDS",
        Some("envoy.extensions.transport_sockets.tls.v3.Secret") => "SDS",
        Some("envoy.config.core.v3.TypedExtensionConfig") => "ECDS",
        Some("istio.networking.nds.v1.NameTable") => "NDS",
        Some("istio.mesh.v1alpha1.ProxyConfig") => "PCDS",
        Some("istio.workload.Address" | "istio.workload.Workload") => "WDS",
        Some("istio.security.Authorization") => "WADS",
        _ => type_url,
    }
}

#[cfg(test)]
mod tests {
    use envoy_types::pb::envoy::service::discovery::v3::{
        DeltaDiscoveryRequest, DiscoveryRequest, DiscoveryResponse,
    };
    use envoy_types::pb::google::protobuf::Any;
    use prost::Message;

    use super::*;
    use crate::logging::logged;
    use crate::metrics::Registry;
    use crate::xds::interceptor::{Intercepting, Interceptor};

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
        fn intercept(&self, _: Protocol, _: Bytes) -> Intercepting {
            Box::pin(async { Outcome::Accepted })
        }
    }

    fn state() -> StreamState {
        let protocol = Protocol::Sotw;
        let interceptors = Interceptors::new(vec![
            Box::new(Scripted { type_url: NAMES, subscribes: true }),
            Box::new(Scripted { type_url: EXTENSION, subscribes: false }),
        ]);
        let observer = Observer::new(&Registry::default(), None);
        StreamState::new(1, protocol, interceptors, observer, 1000, None)
    }

    fn request(type_url: &str) -> Bytes {
        let request = DiscoveryRequest { type_url: type_url.into(), ..Default::default() };
        frame(&request.encode_to_vec())
    }

    fn response(type_url: &str) -> Bytes {
        let response = DiscoveryResponse {
            resources: vec![Any { type_url: type_url.into(), value: vec![1; 40] }],
            type_url: type_url.into(),
            nonce: "n".into(),
            ..Default::default()
        };
        frame(&response.encode_to_vec())
    }

    fn types_to_istiod(state: &mut StreamState) -> Vec<String> {
        let requests = state.to_istiod.drain(..);
        requests.map(|r| DiscoveryRequest::decode(&r[5..]).unwrap().type_url).collect()
    }

    #[test]
    fn debug_lines_have_type_nonce_and_numbers_as_pilot_agents_have() {
        let delta = DeltaDiscoveryRequest {
            type_url: LISTENER.into(),
            response_nonce: "n7".into(),
            resource_names_subscribe: vec!["a".into(), "b".into()],
            resource_names_unsubscribe: vec!["c".into()],
            initial_resource_versions: [("d".into(), "1".into())].into(),
            ..Default::default()
        };
        let log = logged(|| {
            let mut sotw = state();
            sotw.read_requests(request(CLUSTER)).unwrap();
            sotw.read_responses(response(CLUSTER)).unwrap();
            sotw.read_responses(response(EXTENSION)).unwrap();
            let captured = sotw.captured.pop_front().unwrap();
            let forwarded = Outcome::Forward(captured.message.clone(), None);
            sotw.apply_outcome(&captured, forwarded);
            sotw.read_responses(response(NAMES)).unwrap();
            let captured = sotw.captured.pop_front().unwrap();
            sotw.apply_outcome(&captured, Outcome::Accepted);
            let (protocol, interceptors) = (Protocol::Delta, Interceptors::default());
            let observer = Observer::new(&Registry::default(), None);
            let mut state = StreamState::new(9, protocol, interceptors, observer, 1000, None);
            state.read_requests(frame(&delta.encode_to_vec())).unwrap();
        });
        for line in [
            format!("xdsproxy: request for type url {CLUSTER} id=1 nonce=\"\""),
            "xdsproxy: upstream response id=1 type=\"CDS\" nonce=\"n\" resources=1 removes=0"
                .into(),
            format!("xdsproxy: request for type url {NAMES} id=1 nonce=\"n\""),
            "xdsproxy: forward ECDS id=1 nonce=\"n\"".into(),
            "xdsproxy: delta request id=9 type=\"LDS\" sub=2 unsub=1 nonce=\"n7\" initial=1".into(),
        ] {
            assert!(log.contains(&line), "{line} in {log}");
        }
    }

    #[test]
    fn own_subscriptions_follow_the_first_listener_request_once() {
        let mut state = state();
        for _ in 0..2 {
            state.read_requests(request(CLUSTER)).unwrap();
            state.read_requests(request(LISTENER)).unwrap();
        }
        let types = types_to_istiod(&mut state);
        assert_eq!(types, [CLUSTER, LISTENER, NAMES, CLUSTER, LISTENER]);
    }

    #[test]
    fn a_rewritten_response_waits_until_a_passing_response_is_complete() {
        let mut state = state();
        let (passing, own) = (response(CLUSTER), response(EXTENSION));
        state.read_responses(own.clone()).unwrap();
        let captured = state.captured.pop_front().unwrap();
        assert_eq!(captured.message, own[5..]);
        state.read_responses(passing.slice(..80)).unwrap();
        let rewritten = Bytes::from_static(b"rewritten");
        let outcome = Outcome::Forward(rewritten.clone(), None);
        state.apply_outcome(&captured, outcome);
        assert_eq!(state.to_client, [passing.slice(..80)]);
        state.read_responses(passing.slice(80..)).unwrap();
        let expected = [passing.slice(..80), passing.slice(80..), frame(&rewritten)];
        assert_eq!(state.to_client, expected);
    }

    #[test]
    fn a_response_consumed_by_the_agent_is_acked_or_nacked_with_reason() {
        let mut state = state();
        state.read_responses(response(NAMES)).unwrap();
        let captured = state.captured.pop_front().unwrap();
        for outcome in [Outcome::Accepted, Outcome::Rejected("no table".into())] {
            state.apply_outcome(&captured, outcome);
        }
        let answers: Vec<_> = state
            .to_istiod
            .iter()
            .map(|r| DiscoveryRequest::decode(&r[5..]).unwrap())
            .map(|r| (r.response_nonce, r.error_detail.map(|status| status.message)))
            .collect();
        assert_eq!(answers, [("n".into(), None), ("n".into(), Some("no table".into()))]);
        assert!(state.to_client.is_empty());
        let seen = &state.observer.snapshot().types[NAMES];
        assert_eq!((seen.responses, seen.acks, seen.nacks), (1, 1, 1));
    }

    #[test]
    fn empty_responses_are_unacked_for_the_agents_types_and_intercepted_for_envoys() {
        let empty = |type_url: &str| {
            let response = DiscoveryResponse { type_url: type_url.into(), ..Default::default() };
            frame(&response.encode_to_vec())
        };
        let mut state = state();
        state.read_responses(empty(NAMES)).unwrap();
        assert!(state.captured.is_empty() && state.to_istiod.is_empty());
        state.read_responses(empty(EXTENSION)).unwrap();
        assert_eq!(state.captured[0].message, empty(EXTENSION)[5..]);
        assert!(state.to_client.is_empty());
    }

    #[test]
    fn istiod_waits_while_the_queue_of_envoy_or_interceptors_is_full() {
        let mut state = state();
        assert!(state.wants_responses());
        state.read_responses(response(CLUSTER)).unwrap();
        assert!(!state.wants_responses());
        state.to_client.clear();
        for _ in 0..MAX_INTERCEPTED {
            state.read_responses(response(NAMES)).unwrap();
        }
        assert!(!state.wants_responses());
    }
}
