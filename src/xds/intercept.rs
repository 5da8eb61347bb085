//! What becomes of a response: passed on, kept from Envoy, or handed to somebody in the agent.
//!
//! The agent plugs in one [`Interceptor`] per type it takes or rewrites. All other types pass if
//! Envoy can know them and are withheld if not.
//!
//! Does not open messages; an interceptor gets its message whole and decodes it itself.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};

use super::Protocol;

/// What Envoy's own types begin with.
const ENVOY_TYPES: &str = "type.googleapis.com/envoy.";
/// The one type outside Envoy's name space that Istio's Envoy takes.
const WORKLOAD: &str = "type.googleapis.com/istio.workload.Workload";
/// The code of a refusal the agent makes itself: `google.rpc.Code.INTERNAL`, as pilot-agent sends.
const INTERNAL: u8 = 13;

/// A response of a type somebody intercepts, whole and unopened.
#[derive(Clone, Debug)]
pub struct Captured {
    pub protocol: Protocol,
    pub type_url: String,
    pub version: String,
    pub nonce: String,
    /// How many resources it holds.
    pub resources: u32,
    /// The encoded `DiscoveryResponse` or `DeltaDiscoveryResponse`.
    pub message: Bytes,
}

/// What an interceptor made of a response.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// Taken by the agent: acknowledged to istiod, not shown to Envoy.
    Taken,
    /// This message goes to Envoy in its place. Envoy acknowledges it, by the nonce it carries.
    Forward(Bytes),
    /// Not usable, for the reason given: refused to istiod, not shown to Envoy.
    Refused(String),
}

/// The future of an [`Outcome`].
pub type Intercepting = Pin<Box<dyn Future<Output = Outcome> + Send>>;

/// Takes or rewrites the responses of one type.
pub trait Interceptor: Send + Sync {
    fn type_url(&self) -> &str;

    /// Whether the agent itself asks istiod for the type, or Envoy does.
    fn subscribes(&self) -> bool;

    /// Takes a response that holds at least one resource.
    ///
    /// Responses of one type come one after the other, in the order in which they arrived; those of
    /// other types go on meanwhile.
    fn intercept(&self, response: Captured) -> Intercepting;
}

/// The interceptors of all types.
#[derive(Clone, Default)]
pub struct Interceptors(Arc<[Box<dyn Interceptor>]>);

/// What becomes of a response, by its type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Pass,
    Withhold,
    /// For the interceptor of this index.
    Capture(usize),
}

impl Interceptors {
    pub fn new(interceptors: Vec<Box<dyn Interceptor>>) -> Self {
        Self(interceptors.into())
    }

    pub(crate) fn fate(&self, type_url: &str) -> Fate {
        if let Some(index) = self.0.iter().position(|i| i.type_url() == type_url) {
            Fate::Capture(index)
        } else if type_url.starts_with(ENVOY_TYPES) || type_url == WORKLOAD {
            Fate::Pass
        } else {
            Fate::Withhold
        }
    }

    pub(crate) fn subscribes(&self, index: usize) -> bool {
        self.0[index].subscribes()
    }

    pub(crate) fn intercept(&self, index: usize, response: Captured) -> Intercepting {
        self.0[index].intercept(response)
    }

    /// Requests for the types the agent asks for itself.
    ///
    /// Without resource names, which istiod takes as "all", and without a node: they follow Envoy's
    /// first request, which carries it.
    pub(crate) fn subscriptions(&self, protocol: Protocol) -> Vec<Bytes> {
        self.0
            .iter()
            .filter(|interceptor| interceptor.subscribes())
            .map(|interceptor| answer(protocol, interceptor.type_url(), "", "", None))
            .collect()
    }
}

impl fmt::Debug for Interceptors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list()
            .entries(self.0.iter().map(|interceptor| interceptor.type_url()))
            .finish()
    }
}

/// An acknowledgement of `response`, or a refusal if there is a `problem`.
pub(crate) fn acknowledge(response: &Captured, problem: Option<&str>) -> Bytes {
    let Captured {
        protocol,
        type_url,
        version,
        nonce,
        ..
    } = response;
    answer(*protocol, type_url, version, nonce, problem)
}

/// A request as the agent itself sends it, framed for gRPC.
fn answer(
    protocol: Protocol,
    type_url: &str,
    version: &str,
    nonce: &str,
    problem: Option<&str>,
) -> Bytes {
    // Field numbers of DiscoveryRequest and DeltaDiscoveryRequest in discovery.proto.
    let mut message = BytesMut::new();
    match protocol {
        Protocol::StateOfTheWorld => {
            put(&mut message, 1, version.as_bytes());
            put(&mut message, 4, type_url.as_bytes());
            put(&mut message, 5, nonce.as_bytes());
        }
        Protocol::Delta => {
            put(&mut message, 2, type_url.as_bytes());
            put(&mut message, 6, nonce.as_bytes());
        }
    }
    if let Some(problem) = problem {
        // google.rpc.Status: code 1, message 2.
        let mut status = BytesMut::from(&[0x08, INTERNAL][..]);
        put(&mut status, 2, problem.as_bytes());
        let field = match protocol {
            Protocol::StateOfTheWorld => 6,
            Protocol::Delta => 7,
        };
        put(&mut message, field, &status);
    }
    frame(&message)
}

/// A gRPC frame around a message. Source: gRPC over HTTP/2, Length-Prefixed-Message.
pub(crate) fn frame(message: &[u8]) -> Bytes {
    let mut framed = BytesMut::with_capacity(5 + message.len());
    framed.put_u8(0);
    framed.put_u32(message.len() as u32);
    framed.extend_from_slice(message);
    framed.freeze()
}

/// Writes a length-delimited field, unless it is empty.
fn put(message: &mut BytesMut, field: u8, value: &[u8]) {
    if !value.is_empty() {
        message.put_u8(field << 3 | 2);
        prost::encoding::encode_varint(value.len() as u64, message);
        message.extend_from_slice(value);
    }
}

#[cfg(test)]
mod tests {
    use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DiscoveryRequest};
    use envoy_types::pb::google::rpc::Status;
    use prost::Message;

    use super::*;

    struct Subscription(&'static str);

    impl Interceptor for Subscription {
        fn type_url(&self) -> &str {
            self.0
        }
        fn subscribes(&self) -> bool {
            true
        }
        fn intercept(&self, _: Captured) -> Intercepting {
            Box::pin(async { Outcome::Taken })
        }
    }

    #[test]
    fn envoys_types_and_workloads_pass_and_all_others_are_withheld() {
        let interceptors = Interceptors::new(vec![Box::new(Subscription("nds"))]);
        for (type_url, fate) in [
            (
                "type.googleapis.com/envoy.config.cluster.v3.Cluster",
                Fate::Pass,
            ),
            ("type.googleapis.com/istio.workload.Workload", Fate::Pass),
            ("type.googleapis.com/istio.workload.Address", Fate::Withhold),
            ("istio.io/debug/syncz", Fate::Withhold),
            ("", Fate::Withhold),
            ("nds", Fate::Capture(0)),
        ] {
            assert_eq!(interceptors.fate(type_url), fate, "{type_url}");
        }
    }

    #[test]
    fn own_requests_carry_the_documented_fields_and_no_others() {
        let response = |protocol| Captured {
            protocol,
            type_url: "type".into(),
            version: "v1".into(),
            nonce: "n1".into(),
            resources: 1,
            message: Bytes::new(),
        };
        let status = Status {
            code: 13,
            message: "broken".into(),
            ..Default::default()
        };
        for (problem, error_detail) in [(None, None), (Some("broken"), Some(status))] {
            let sotw = acknowledge(&response(Protocol::StateOfTheWorld), problem);
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
            let delta = acknowledge(&response(Protocol::Delta), problem);
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
    fn subscriptions_name_only_their_type() {
        let url = "type.googleapis.com/istio.networking.nds.v1.NameTable";
        let interceptors = Interceptors::new(vec![Box::new(Subscription(url))]);
        let mut expected = vec![0, 0, 0, 0, 55, 0x22, 0x35];
        expected.extend_from_slice(url.as_bytes());
        let sotw = interceptors.subscriptions(Protocol::StateOfTheWorld);
        assert_eq!(sotw, [Bytes::from(expected.clone())]);
        expected[5] = 0x12;
        let delta = interceptors.subscriptions(Protocol::Delta);
        assert_eq!(delta, [Bytes::from(expected)]);
    }
}
