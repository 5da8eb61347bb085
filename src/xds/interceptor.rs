//! Decides by type whether a response passes to Envoy, is withheld, or goes to an [`Interceptor`].
//!
//! The wiring registers one interceptor per type the agent consumes or rewrites (NDS, PCDS, ECDS). Other
//! types pass if Envoy knows them, and are withheld if not. An interceptor gets complete messages and decodes
//! them itself.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DiscoveryRequest};
use envoy_types::pb::google::rpc;
use futures_util::future::BoxFuture;
use prost::Message;
use tonic::Code;

use super::request::{HEAD, frame};
use super::{Protocol, WORKLOAD};

/// The prefix of Envoy's own types. [`WORKLOAD`] is the only other type that Istio's Envoy knows.
const ENVOY_TYPES: &str = "type.googleapis.com/envoy.";

/// The type of requests that report the health of a machine's workload to istiod, with an error if it is
/// unhealthy. istiod does not respond.
pub(crate) const HEALTH: &str = "type.googleapis.com/istio.v1.HealthInformation";

/// The result of an interceptor.
#[derive(Debug)]
pub enum Outcome {
    /// The agent has consumed the response: istiod gets an ACK, Envoy gets nothing.
    Accepted,
    /// Envoy gets this message instead of the response, and sends the ACK with its nonce. Another outcome may
    /// follow, unless a newer response of the type comes first.
    Forward(Bytes, Option<SecondOutcome>),
    /// The response is unusable for this reason: istiod gets a NACK, Envoy gets nothing.
    Rejected(String),
}

/// The future of an [`Outcome`].
pub type Intercepting = BoxFuture<'static, Outcome>;

/// The second outcome of a response, after a message that was forwarded.
pub struct SecondOutcome {
    pub outcome: Intercepting,
    /// The response without the resources that were forwarded.
    pub rest: Bytes,
}

impl fmt::Debug for SecondOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecondOutcome")
    }
}

/// Consumes or rewrites the responses of one type.
pub trait Interceptor: Send + Sync {
    fn type_url(&self) -> &str;

    /// Returns true if the agent subscribes to the type itself; otherwise Envoy does.
    fn subscribes(&self) -> bool {
        true
    }

    /// Handles an encoded `DiscoveryResponse` or `DeltaDiscoveryResponse`. Responses without resources come
    /// only for types that Envoy subscribes to.
    ///
    /// Responses of one type are handled one by one in the order of arrival, or merged. Responses of
    /// different types are handled concurrently.
    fn intercept(&self, protocol: Protocol, message: Bytes) -> Intercepting;

    /// Takes the names that Envoy has unsubscribed from. Only delta requests have them.
    fn note_unsubscribed(&self, _names: &[String]) {}

    /// Returns a message that replaces a response that is being handled and a newer one. None if each is
    /// handled.
    fn merge(&self, _: Protocol, _older: &Bytes, _newer: &Bytes) -> Option<Bytes> {
        None
    }
}

/// The interceptors of all types.
#[derive(Clone, Default)]
#[allow(missing_debug_implementations)]
pub struct Interceptors(Arc<[Box<dyn Interceptor>]>);

/// The treatment of a response, by its type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disposition {
    Pass,
    Withhold,
    /// The response goes to the interceptor of this index.
    Intercept(usize),
    /// Envoy gets other responses in its place ([`super::on_demand`]).
    Replace,
}

impl Interceptors {
    pub fn new(interceptors: Vec<Box<dyn Interceptor>>) -> Self {
        Self(interceptors.into())
    }

    pub(crate) fn disposition(&self, type_url: &str) -> Disposition {
        if let Some(index) = self.0.iter().position(|i| i.type_url() == type_url) {
            Disposition::Intercept(index)
        } else if type_url.starts_with(ENVOY_TYPES) || type_url == WORKLOAD {
            Disposition::Pass
        } else {
            Disposition::Withhold
        }
    }

    /// Tells the interceptor of its type the names that a delta request of Envoy unsubscribes from.
    pub(crate) fn note_request(&self, type_url: &str, frame: &Bytes) {
        if let Disposition::Intercept(index) = self.disposition(type_url)
            && let Some(message) = frame.get(HEAD..)
            && let Ok(request) = DeltaDiscoveryRequest::decode(message)
        {
            self.0[index].note_unsubscribed(&request.resource_names_unsubscribe);
        }
    }

    pub(crate) fn get(&self, index: usize) -> &dyn Interceptor {
        &*self.0[index]
    }

    /// Encodes requests for the types that the agent subscribes to itself.
    ///
    /// They have no resource names, which means all resources to istiod, and no node, which Envoy's first
    /// request has sent.
    pub(crate) fn subscriptions(&self, protocol: Protocol) -> Vec<Bytes> {
        self.0
            .iter()
            .filter(|interceptor| interceptor.subscribes())
            .map(|interceptor| encode_request(protocol, interceptor.type_url(), "", "", None))
            .collect()
    }
}

/// Encodes a request of the agent as a gRPC frame: a subscription, an ACK, or a NACK if there is a `problem`.
pub(crate) fn encode_request(
    protocol: Protocol,
    type_url: &str,
    version: &str,
    nonce: &str,
    problem: Option<&str>,
) -> Bytes {
    let type_url = type_url.to_owned();
    let response_nonce = nonce.to_owned();
    let error_detail = problem.map(|problem| rpc::Status {
        code: Code::Internal.into(),
        message: problem.to_owned(),
        details: Vec::new(),
    });
    frame(&match protocol {
        Protocol::Sotw => DiscoveryRequest {
            version_info: version.to_owned(),
            type_url,
            response_nonce,
            error_detail,
            ..Default::default()
        }
        .encode_to_vec(),
        Protocol::Delta => {
            DeltaDiscoveryRequest { type_url, response_nonce, error_detail, ..Default::default() }
                .encode_to_vec()
        }
    })
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    struct Subscription(&'static str);

    impl Interceptor for Subscription {
        fn type_url(&self) -> &str {
            self.0
        }
        fn intercept(&self, _: Protocol, _: Bytes) -> Intercepting {
            Box::pin(async { Outcome::Accepted })
        }
    }

    #[test]
    fn envoys_types_and_workloads_pass_and_all_others_are_withheld() {
        let interceptors = Interceptors::new(vec![Box::new(Subscription("nds"))]);
        for (type_url, disposition) in [
            ("type.googleapis.com/envoy.config.cluster.v3.Cluster", Disposition::Pass),
            ("type.googleapis.com/istio.workload.Workload", Disposition::Pass),
            ("type.googleapis.com/istio.workload.Address", Disposition::Withhold),
            ("istio.io/debug/syncz", Disposition::Withhold),
            ("", Disposition::Withhold),
            ("nds", Disposition::Intercept(0)),
        ] {
            assert_eq!(interceptors.disposition(type_url), disposition, "{type_url}");
        }
    }

    #[test]
    fn own_requests_carry_the_documented_fields_and_no_others() {
        let answer = |protocol, problem| encode_request(protocol, "type", "v1", "n1", problem);
        let status = rpc::Status { code: 13, message: "broken".into(), ..Default::default() };
        for (problem, error_detail) in [(None, None), (Some("broken"), Some(status))] {
            let sotw = answer(Protocol::Sotw, problem);
            assert_eq!(
                DiscoveryRequest::decode(&sotw[5..]).unwrap(),
                DiscoveryRequest {
                    version_info: "v1".into(),
                    type_url: "type".into(),
                    response_nonce: "n1".into(),
                    error_detail: error_detail.clone(),
                    ..Default::default()
                }
            );
            let delta = answer(Protocol::Delta, problem);
            assert_eq!(
                DeltaDiscoveryRequest::decode(&delta[5..]).unwrap(),
                DeltaDiscoveryRequest {
                    type_url: "type".into(),
                    response_nonce: "n1".into(),
                    error_detail,
                    ..Default::default()
                }
            );
        }
    }

    #[test]
    fn an_interceptor_is_told_which_names_envoy_unsubscribes_from() {
        struct Told(mpsc::Sender<Vec<String>>);
        impl Interceptor for Told {
            fn type_url(&self) -> &str {
                "ecds"
            }
            fn subscribes(&self) -> bool {
                false
            }
            fn intercept(&self, _: Protocol, _: Bytes) -> Intercepting {
                Box::pin(async { Outcome::Accepted })
            }
            fn note_unsubscribed(&self, names: &[String]) {
                self.0.send(names.to_vec()).unwrap();
            }
        }
        let (sender, told) = mpsc::channel();
        let interceptors = Interceptors::new(vec![Box::new(Told(sender))]);
        for type_url in ["cds", "ecds"] {
            let request = DeltaDiscoveryRequest {
                resource_names_unsubscribe: vec![type_url.to_owned()],
                ..Default::default()
            };
            interceptors.note_request(type_url, &frame(&request.encode_to_vec()));
        }
        interceptors.note_request("ecds", &frame(b"\xff"));
        assert_eq!(told.try_iter().collect::<Vec<_>>(), [["ecds"]]);
    }

    #[test]
    fn the_agents_own_subscriptions_contain_only_the_type_url() {
        let url = "type.googleapis.com/istio.networking.nds.v1.NameTable";
        let interceptors = Interceptors::new(vec![Box::new(Subscription(url))]);
        let mut expected = vec![0, 0, 0, 0, 55, 0x22, 0x35];
        expected.extend_from_slice(url.as_bytes());
        let sotw = interceptors.subscriptions(Protocol::Sotw);
        assert_eq!(sotw, [Bytes::from(expected.clone())]);
        expected[5] = 0x12;
        let delta = interceptors.subscriptions(Protocol::Delta);
        assert_eq!(delta, [Bytes::from(expected)]);
    }
}
