use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryResponse, DiscoveryResponse, Resource,
};
use envoy_types::pb::google::protobuf::Any;
use proptest::prelude::*;
use prost::Message;
use tonic::Code;

use super::*;
use crate::xds::interceptor::{Intercepting, Interceptor, Outcome};
use crate::xds::request::frame;

const CLUSTER: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";
const NAMES: &str = "type.googleapis.com/istio.networking.nds.v1.NameTable";
const ADDRESS: &str = "type.googleapis.com/istio.workload.Address";

struct NameTables;

impl Interceptor for NameTables {
    fn type_url(&self) -> &str {
        NAMES
    }
    fn subscribes(&self) -> bool {
        true
    }
    fn intercept(&self, _: Protocol, _: Bytes) -> Intercepting {
        Box::pin(async { Outcome::Accepted })
    }
}

/// Encodes a response of this type, with an unknown field at its end.
fn message(protocol: Protocol, type_url: &str, resources: usize, size: usize) -> Vec<u8> {
    let any = Any { type_url: type_url.into(), value: vec![b'x'; size] };
    let mut bytes = match protocol {
        Protocol::Sotw => DiscoveryResponse {
            version_info: "v7".into(),
            resources: vec![any; resources],
            type_url: type_url.into(),
            nonce: "n7".into(),
            ..Default::default()
        }
        .encode_to_vec(),
        Protocol::Delta => DeltaDiscoveryResponse {
            system_version_info: "v7".into(),
            resources: vec![
                Resource {
                    name: "some name".into(),
                    version: "some version".into(),
                    resource: Some(any),
                    ..Default::default()
                };
                resources
            ],
            type_url: type_url.into(),
            nonce: "n7".into(),
            ..Default::default()
        }
        .encode_to_vec(),
    };
    prost::encoding::string::encode(1999, &"unknown".to_owned(), &mut bytes);
    bytes
}

fn read(protocol: Protocol, stream: &[u8], chunk: usize) -> Result<Vec<Output>, Status> {
    let interceptors = Interceptors::new(vec![Box::new(NameTables)]);
    let mut reader = ResponseReader::new(protocol, interceptors);
    let mut out = Vec::new();
    for part in stream.chunks(chunk.max(1)) {
        reader.feed(Bytes::copy_from_slice(part), |output| out.push(output))?;
    }
    assert!(reader.is_between_messages(), "the whole stream was read");
    Ok(out)
}

fn passed(outputs: &[Output]) -> Vec<u8> {
    let bytes = outputs.iter().filter_map(|output| match output {
        Output::Pass(bytes) => Some(&bytes[..]),
        _ => None,
    });
    bytes.flatten().copied().collect()
}

#[test]
fn name_tables_of_any_size_between_envoys_types_are_captured_whole() {
    for protocol in [Protocol::Sotw, Protocol::Delta] {
        for size in [10, 40_000, 700_000] {
            let cluster = frame(&message(protocol, CLUSTER, 3, 5000));
            let names = message(protocol, NAMES, 1, size);
            let stream = [&cluster[..], &frame(&names), &cluster].concat();
            for chunk in [17, 16_384, stream.len()] {
                let out = read(protocol, &stream, chunk).unwrap();
                assert_eq!(passed(&out), [&cluster[..], &cluster].concat());
                let captured: Vec<_> = out
                    .iter()
                    .filter_map(|output| match output {
                        Output::Captured(captured) => Some(captured),
                        _ => None,
                    })
                    .collect();
                assert_eq!(captured.len(), 1);
                assert_eq!(captured[0].message, names);
                assert_eq!(captured[0].interceptor, 0);
                let received = &captured[0].received;
                assert_eq!(received.type_url, NAMES);
                assert_eq!((&*received.version, &*received.nonce), ("v7", "n7"));
            }
        }
    }
}

#[test]
fn types_envoy_must_not_see_are_withheld_by_name() {
    for protocol in [Protocol::Sotw, Protocol::Delta] {
        let cluster = frame(&message(protocol, CLUSTER, 0, 0));
        let stream = [
            &frame(&message(protocol, ADDRESS, 2, 30_000))[..],
            &cluster,
            &frame(&message(protocol, ADDRESS, 0, 0)),
            &frame(&[]),
        ]
        .concat();
        for chunk in [1, 100, stream.len()] {
            let out = read(protocol, &stream, chunk).unwrap();
            assert_eq!(passed(&out), cluster);
            let withheld: Vec<_> = out
                .iter()
                .filter_map(|output| match output {
                    Output::Complete(received) => Some(received),
                    _ => None,
                })
                .filter(|received| received.consumer == Consumer::None)
                .map(|received| received.type_url.as_str())
                .collect();
            assert_eq!(withheld, [ADDRESS, ADDRESS, ""]);
        }
    }
}

#[test]
fn a_large_message_flows_from_its_first_resource_and_is_not_held() {
    let stream = frame(&message(Protocol::Delta, CLUSTER, 1000, 10_000));
    let mut reader = ResponseReader::new(Protocol::Delta, Interceptors::default());
    let (mut seen, mut flowed) = (0, 0);
    for part in stream.chunks(16_384) {
        seen += part.len();
        let part = Bytes::copy_from_slice(part);
        reader
            .feed(part, |output| match output {
                Output::Pass(bytes) => flowed += bytes.len(),
                Output::Begins { .. } | Output::Complete(_) => {}
                other => panic!("{other:?}"),
            })
            .unwrap();
        assert_eq!(flowed, seen);
    }
    assert!(reader.is_between_messages());
}

/// Reads a stream in chunks of this size. Returns the reports of its complete messages.
fn ended(protocol: Protocol, stream: &[u8], chunk: usize) -> Vec<Received> {
    let out = read(protocol, stream, chunk).unwrap().into_iter();
    let ended = out.filter_map(|output| match output {
        Output::Complete(received) => Some(received),
        _ => None,
    });
    ended.collect()
}

#[test]
fn each_message_is_reported_once_with_its_version_nonce_and_size() {
    for protocol in [Protocol::Sotw, Protocol::Delta] {
        let sent = [
            (CLUSTER, 40, 1000, Consumer::Envoy),
            (NAMES, 1, 10, Consumer::Agent),
            (ADDRESS, 2, 10, Consumer::None),
            (CLUSTER, 0, 0, Consumer::Envoy),
        ];
        let mut stream = Vec::new();
        let mut expected = Vec::new();
        for (type_url, resources, size, consumer) in sent {
            let message = message(protocol, type_url, resources, size);
            stream.extend_from_slice(&frame(&message));
            expected.push(Received {
                type_url: type_url.into(),
                version: "v7".into(),
                nonce: "n7".into(),
                resources: resources as u32,
                removed: 0,
                bytes: message.len() as u64,
                consumer,
                names: Default::default(),
            });
        }
        for chunk in [1, 700, stream.len()] {
            assert_eq!(ended(protocol, &stream, chunk), expected);
        }
    }
}

#[test]
fn a_malformed_message_for_envoy_passes() {
    let protocol = Protocol::Sotw;
    let whole = message(protocol, CLUSTER, 1, 10);
    let broken = [&whole[..], &[0x22, 100, 0xff]].concat();
    let stream = [frame(&broken), frame(&whole)].concat();
    let reports = ended(protocol, &stream, 20);
    let types: Vec<_> = reports.iter().map(|one| (&*one.type_url, one.bytes)).collect();
    let expected = [(CLUSTER, broken.len() as u64), (CLUSTER, whole.len() as u64)];
    assert_eq!(types, expected);
    let out = read(protocol, &stream, 20).unwrap();
    assert_eq!(passed(&out), stream);
}

#[test]
fn bad_messages_of_istiod_end_the_stream_with_the_reason() {
    let cases: [(&[u8], Code, &str); 3] = [
        (&[1, 0, 0, 0, 1, 0], Code::Internal, "compressed"),
        (&[0, 0, 0, 0, 3, 0x22, 9, b'x'], Code::Internal, "longer than its message"),
        (b"HTTP/1.1 400 Bad Request", Code::Internal, "compressed"),
    ];
    for (stream, code, text) in cases {
        let status = read(Protocol::Sotw, stream, 100).unwrap_err();
        assert_eq!(status.code(), code);
        assert!(status.message().contains(text), "{}", status.message());
    }
}

#[test]
fn a_false_length_reserves_no_memory() {
    let mut reader = ResponseReader::new(Protocol::Delta, Interceptors::default());
    let head = Bytes::from_static(&[0, 0xff, 0xff, 0xff, 0xff, 0x0a, 1, b'v']);
    reader.feed(head, |output| panic!("{output:?}")).unwrap();
    assert!(!reader.is_between_messages());
    assert!(reader.partial.capacity() < 1024);
}

proptest! {
    /// Messages for Envoy pass unchanged, with unknown fields, in chunks of any size, and between messages of other
    /// types.
    #[test]
    fn responses_are_forwarded_byte_for_byte(
        kinds in prop::collection::vec((0usize..3, 0usize..4, 0usize..300), 0..12),
        chunk in 1usize..400,
        delta in any::<bool>(),
    ) {
        let protocol = if delta { Protocol::Delta } else { Protocol::Sotw };
        let (mut stream, mut expected) = (Vec::new(), Vec::new());
        for (kind, resources, size) in kinds {
            let framed = frame(&message(protocol, [CLUSTER, NAMES, ADDRESS][kind], resources, size));
            stream.extend_from_slice(&framed);
            if kind == 0 {
                expected.extend_from_slice(&framed);
            }
        }
        prop_assert_eq!(passed(&read(protocol, &stream, chunk).unwrap()), expected);
    }
}
