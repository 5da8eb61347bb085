//! Splits the bytes of Envoy's stream into requests, each with its unchanged gRPC frame.
//!
//! Requests are collected completely, so that requests of the agent can be put between them. All are small,
//! except the first of a delta stream. A frame costs only the bytes that came, whatever length it announces.

use std::collections::HashSet;

use bytes::{BufMut, Bytes, BytesMut};
use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryRequest;
use prost::{DecodeError, Message};
use tonic::Status;

use super::Protocol;
use super::wire::NameDigest;

/// The length of a gRPC frame's head: a flag byte and a 32-bit length.
pub(crate) const HEAD: usize = 5;

/// The most bytes of a NACK reason that are used. A reason may list every resource of a response.
const MAX_REASON: usize = 1024;

/// The beginning and the end of a resource dump in Envoy's reason.
const DUMP: &str = "goo.gle/debug";
const DUMP_END: &str = "\n: ";

/// A discovery request from Envoy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// The unchanged frame, message included.
    pub frame: Bytes,
    pub type_url: String,
    /// The nonce of the response that the request acknowledges or rejects; empty for other requests.
    pub nonce: String,
    /// Envoy's complete reason, if the request is a NACK.
    pub rejection: Option<String>,
}

/// Collects the bytes of Envoy's requests.
#[derive(Debug)]
pub struct RequestReader {
    protocol: Protocol,
    max_bytes: usize,
    /// The bytes of an incomplete request.
    pub(super) partial: BytesMut,
}

impl RequestReader {
    pub fn new(protocol: Protocol, max_bytes: usize) -> Self {
        Self { protocol, max_bytes, partial: BytesMut::new() }
    }

    /// Takes the next bytes and calls `each` for the requests that they complete. Fails for a request that is too
    /// long, compressed or not a message.
    pub fn feed(&mut self, chunk: Bytes, mut each: impl FnMut(Request)) -> Result<(), Status> {
        self.partial.extend_from_slice(&chunk);
        while let Some(length) = self.frame_length()?
            && length <= self.partial.len()
        {
            let frame = self.partial.split_to(length).freeze();
            let request = Request::decode(self.protocol, frame).map_err(|error| {
                let problem = format!("not a protobuf message: {error}");
                Status::internal(format!("discovery request from Envoy: {problem}"))
            })?;
            each(request);
        }
        if self.partial.is_empty() {
            // The memory is freed while the stream is idle.
            self.partial = BytesMut::new();
        }
        Ok(())
    }

    /// Fails if the stream ends inside a message.
    pub fn finish(&self) -> Result<(), Status> {
        match self.partial.len() {
            0 => Ok(()),
            length => Err(Status::internal(format!(
                "the request stream from Envoy ended {length} bytes into a message"
            ))),
        }
    }

    /// Returns the length of the first frame, head included, once the head is complete.
    fn frame_length(&self) -> Result<Option<usize>, Status> {
        let Some((&[flag, length @ ..], _)) = self.partial.split_first_chunk::<HEAD>() else {
            return Ok(None);
        };
        if flag != 0 {
            return Err(Status::unimplemented(
                "Envoy sent a compressed message, and no compression was offered",
            ));
        }
        let length = u32::from_be_bytes(length) as usize;
        if length > self.max_bytes {
            return Err(Status::resource_exhausted(format!(
                "grpc: received message larger than max ({length} vs. {})",
                self.max_bytes
            )));
        }
        Ok(Some(HEAD + length))
    }
}

impl Request {
    /// Decodes a frame. Names are left to [`Request::subscription`].
    pub(super) fn decode(protocol: Protocol, frame: Bytes) -> Result<Self, DecodeError> {
        let message = frame.slice(HEAD..);
        let (type_url, nonce, error) = match protocol {
            Protocol::Sotw => SotwFields::decode(message)
                .map(|it| (it.type_url, it.response_nonce, it.error_detail))?,
            Protocol::Delta => DeltaFields::decode(message)
                .map(|it| (it.type_url, it.response_nonce, it.error_detail))?,
        };
        let rejection = error.map(|it| String::from_utf8_lossy(&it.message).into_owned());
        Ok(Self { frame, type_url, nonce, rejection })
    }

    /// Decodes the subscription.
    pub(super) fn subscription(&self) -> Result<Subscription, DecodeError> {
        Subscription::decode(self.frame.slice(HEAD..))
    }
}

/// The subscription in a request of either protocol. Nothing is copied.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Subscription {
    /// The encoded node of a delta request.
    #[prost(bytes = "bytes", optional, tag = "1")]
    pub(super) node: Option<Bytes>,
    /// The names that a delta request adds, or all names of a SotW request.
    #[prost(bytes = "bytes", repeated, tag = "3")]
    pub(super) names: Vec<Bytes>,
    /// The names that a delta request removes. A SotW request has its type here.
    #[prost(bytes = "bytes", repeated, tag = "4")]
    pub(super) unsubscribed: Vec<Bytes>,
    /// The encoded names and versions of resources that Envoy has when a delta stream begins.
    #[prost(bytes = "bytes", repeated, tag = "5")]
    pub(super) initial_resource_versions: Vec<Bytes>,
}

/// An entry of `initial_resource_versions`.
#[derive(Clone, PartialEq, prost::Message)]
struct InitialResource {
    #[prost(bytes = "bytes", tag = "1")]
    name: Bytes,
}

impl Subscription {
    /// Returns the names of the resources that Envoy has when a delta stream begins.
    pub(super) fn initial_names(&self) -> HashSet<NameDigest> {
        let entries = self.initial_resource_versions.iter().cloned();
        entries.flat_map(InitialResource::decode).map(|it| NameDigest::of(&it.name)).collect()
    }
}

/// The fields of a `DiscoveryRequest` that the agent reads. Decoding skips all others.
#[derive(Clone, PartialEq, prost::Message)]
struct SotwFields {
    #[prost(string, tag = "4")]
    type_url: String,
    #[prost(string, tag = "5")]
    response_nonce: String,
    #[prost(message, optional, tag = "6")]
    error_detail: Option<ErrorDetail>,
}

/// The same fields of a `DeltaDiscoveryRequest`.
#[derive(Clone, PartialEq, prost::Message)]
struct DeltaFields {
    #[prost(string, tag = "2")]
    type_url: String,
    #[prost(string, tag = "6")]
    response_nonce: String,
    #[prost(message, optional, tag = "7")]
    error_detail: Option<ErrorDetail>,
}

/// The reason in a `google.rpc.Status`.
#[derive(Clone, PartialEq, prost::Message)]
struct ErrorDetail {
    #[prost(bytes = "bytes", tag = "2")]
    message: Bytes,
}

/// Returns the beginning of a NACK reason, without resource dumps, which are long and may hold credentials.
pub(super) fn shortened(reason: &str) -> String {
    let mut text = String::new();
    let mut rest = reason;
    while let Some((before, dump)) = rest.split_once(DUMP) {
        text.push_str(before);
        rest = dump.split_once(DUMP_END).map_or("", |(_, after)| after);
    }
    text.push_str(rest);
    let length = text.len().min(MAX_REASON);
    String::from_utf8_lossy(&text.as_bytes()[..length]).into_owned()
}

/// Removes nonce and error from the frame of a delta request. Returns None if the request does not subscribe
/// to or unsubscribe from names.
pub(super) fn without_nonce(request: &Bytes) -> Option<Bytes> {
    let mut request = DeltaDiscoveryRequest::decode(request.get(HEAD..)?).ok()?;
    let names = [&request.resource_names_subscribe, &request.resource_names_unsubscribe];
    if names.iter().all(|names| names.is_empty()) {
        return None;
    }
    request.response_nonce.clear();
    request.error_detail = None;
    Some(frame(&request.encode_to_vec()))
}

/// Encodes a delta request of the agent that subscribes to names of a type, or ends the subscription.
pub(super) fn encode_subscription(type_url: &str, names: Vec<String>, ends: bool) -> Bytes {
    let (resource_names_subscribe, resource_names_unsubscribe) =
        if ends { (Vec::new(), names) } else { (names, Vec::new()) };
    let request = DeltaDiscoveryRequest {
        type_url: type_url.to_owned(),
        resource_names_subscribe,
        resource_names_unsubscribe,
        ..Default::default()
    };
    frame(&request.encode_to_vec())
}

/// Encodes a message as a gRPC frame. Source: gRPC over HTTP/2, Length-Prefixed-Message.
pub(crate) fn frame(message: &[u8]) -> Bytes {
    let mut framed = BytesMut::with_capacity(HEAD + message.len());
    framed.put_u8(0);
    framed.put_u32(message.len() as u32);
    framed.extend_from_slice(message);
    framed.freeze()
}

#[cfg(test)]
mod tests {
    use envoy_types::pb::envoy::service::discovery::v3::DiscoveryRequest;
    use proptest::prelude::*;

    use super::*;

    fn read(max_bytes: usize, bytes: &[u8], chunk: usize) -> Result<Vec<Request>, Status> {
        let mut reader = RequestReader::new(Protocol::Sotw, max_bytes);
        let mut requests = Vec::new();
        for part in bytes.chunks(chunk.max(1)) {
            reader.feed(Bytes::copy_from_slice(part), |request| requests.push(request))?;
        }
        reader.finish()?;
        Ok(requests)
    }

    fn request(type_url: &str, names: usize) -> Bytes {
        let message = DiscoveryRequest {
            type_url: type_url.into(),
            resource_names: vec!["x".repeat(100); names],
            ..Default::default()
        };
        frame(&message.encode_to_vec())
    }

    #[test]
    fn one_byte_at_a_time_gives_the_same_messages() {
        let (first, second) = (request("a", 3), request("b", 0));
        let bytes = [first.clone(), frame(&[]), second.clone()].concat();
        for chunk in [1, 4, 5, 6, bytes.len()] {
            let requests = read(1000, &bytes, chunk).unwrap();
            let frames: Vec<_> = requests.iter().map(|r| (&r.frame, &*r.type_url)).collect();
            assert_eq!(frames, [(&first, "a"), (&frame(&[]), ""), (&second, "b")]);
        }
    }

    #[test]
    fn ten_thousand_tiny_frames_come_out_in_order() {
        let bytes: Vec<u8> = (0..10_000).flat_map(|i| request(&i.to_string(), 0)).collect();
        let requests = read(1000, &bytes, 777).unwrap();
        assert_eq!(requests.len(), 10_000);
        assert!(requests.iter().enumerate().all(|(i, r)| r.type_url == i.to_string()));
    }

    #[test]
    fn keeps_the_beginning_of_the_reason_of_a_nack_without_dumps() {
        let long = "é".repeat(20_000);
        for (reason, kept) in [
            ("", ""),
            ("no port", "no port"),
            (&*long, &long[..1024]),
            (
                "a: goo.gle/debugstr   \nname: \"a\"\nkey: \"\\n: \"\n: no port, b: too short",
                "a: no port, b: too short",
            ),
            ("a: goo.gle/debugstr   \nkey: \"secret", "a: "),
        ] {
            let error_detail = Some(envoy_types::pb::google::rpc::Status {
                code: 13,
                message: reason.to_owned(),
                details: vec![Default::default()],
            });
            let (type_url, response_nonce) = ("t".to_owned(), "n".to_owned());
            let sotw = DiscoveryRequest {
                type_url: type_url.clone(),
                response_nonce: response_nonce.clone(),
                error_detail: error_detail.clone(),
                ..Default::default()
            };
            let delta = DeltaDiscoveryRequest {
                type_url,
                response_nonce,
                error_detail,
                initial_resource_versions: [("a".to_owned(), "b".to_owned())].into(),
                ..Default::default()
            };
            for (protocol, message) in
                [(Protocol::Sotw, sotw.encode_to_vec()), (Protocol::Delta, delta.encode_to_vec())]
            {
                let mut requests = Vec::new();
                let mut reader = RequestReader::new(protocol, 1 << 20);
                reader.feed(frame(&message), |request| requests.push(request)).unwrap();
                let [request] = &requests[..] else {
                    panic!("one request: {requests:?}");
                };
                assert_eq!((&*request.type_url, &*request.nonce), ("t", "n"));
                assert_eq!(request.rejection.as_deref().map(shortened).as_deref(), Some(kept));
            }
        }
    }

    #[test]
    fn only_a_request_with_names_is_repeated_without_nonce_and_error() {
        let answer = DeltaDiscoveryRequest {
            type_url: "t".into(),
            response_nonce: "n".into(),
            error_detail: Some(Default::default()),
            ..Default::default()
        };
        let names = vec!["a".to_owned()];
        for (subscribed, unsubscribed) in [(&names, &vec![]), (&vec![], &names), (&names, &names)] {
            let changed = DeltaDiscoveryRequest {
                resource_names_subscribe: subscribed.clone(),
                resource_names_unsubscribe: unsubscribed.clone(),
                ..answer.clone()
            };
            let expected = DeltaDiscoveryRequest {
                response_nonce: String::new(),
                error_detail: None,
                ..changed.clone()
            };
            let [sent, expected] = [changed, expected].map(|it| it.encode_to_vec());
            assert_eq!(without_nonce(&frame(&sent)), Some(frame(&expected)));
        }
        assert_eq!(without_nonce(&frame(&answer.encode_to_vec())), None);
    }

    #[test]
    fn a_false_length_reserves_no_memory() {
        let mut reader = RequestReader::new(Protocol::Delta, 1 << 30);
        let head = Bytes::from_static(&[0, 0x20, 0, 0, 0, 1, 2, 3]);
        reader.feed(head, |_| {}).unwrap();
        assert!(reader.partial.capacity() < 1024);
    }

    proptest! {
        #[test]
        fn requests_are_forwarded_byte_for_byte(
            message in prop::collection::vec(any::<u8>(), 0..64),
            type_url in ".{0,20}",
            chunk in 1usize..90,
        ) {
            // The request has an unknown field at its end.
            let mut body = DeltaDiscoveryRequest { type_url: type_url.clone(), ..Default::default() }
                .encode_to_vec();
            prost::encoding::bytes::encode(3000, &message, &mut body);
            let sent = frame(&body);
            let mut reader = RequestReader::new(Protocol::Delta, 1000);
            let mut got = Vec::new();
            for part in sent.chunks(chunk) {
                reader.feed(Bytes::copy_from_slice(part), |request| got.push(request)).unwrap();
            }
            let (nonce, rejection) = (String::new(), None);
            prop_assert_eq!(got, vec![Request { frame: sent, type_url, nonce, rejection }]);
        }
    }
}
