use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse, Resource,
};
use envoy_types::pb::google::protobuf::Any;
use proptest::prelude::*;
use prost::Message;

use super::*;

fn resource(type_url: &str, size: usize) -> Any {
    Any {
        type_url: type_url.to_owned(),
        value: vec![7; size],
    }
}

fn walk(mut walker: Walker, bytes: &[u8], chunk: usize) -> Result<Fields, Malformed> {
    for part in bytes.chunks(chunk.max(1)) {
        walker.feed(part)?;
    }
    walker.finish()
}

#[test]
fn reads_the_fields_of_all_four_messages() {
    let response = DiscoveryResponse {
        version_info: "v".into(),
        resources: vec![resource("a.A", 300), resource("a.A", 3)],
        type_url: "t".into(),
        nonce: "n".into(),
        ..Default::default()
    };
    let delta = DeltaDiscoveryResponse {
        system_version_info: "v".into(),
        resources: vec![Resource {
            name: "a name, not a type".into(),
            version: "a version, not a type".into(),
            resource: Some(resource("a.A", 9)),
            ..Default::default()
        }],
        type_url: "t".into(),
        nonce: "n".into(),
        ..Default::default()
    };
    let request = DiscoveryRequest {
        version_info: "v".into(),
        resource_names: vec!["x".into()],
        type_url: "t".into(),
        response_nonce: "n".into(),
        ..Default::default()
    };
    let delta_request = DeltaDiscoveryRequest {
        type_url: "t".into(),
        initial_resource_versions: [("a".to_owned(), "b".to_owned())].into(),
        response_nonce: "n".into(),
        ..Default::default()
    };
    let (sotw, inc) = (Protocol::Sotw, Protocol::Delta);
    type Make = fn(Protocol, u64) -> Walker;
    let (answer, ask): (Make, Make) = (Walker::response, Walker::request);
    let cases = [
        (answer, sotw, response.encode_to_vec(), "v", Some("a.A"), 2),
        (answer, inc, delta.encode_to_vec(), "v", Some("a.A"), 1),
        (ask, sotw, request.encode_to_vec(), "v", None, 0),
        (ask, inc, delta_request.encode_to_vec(), "", None, 0),
    ];
    for (walker, protocol, bytes, version, resource_type, resources) in cases {
        for chunk in [1, 2, 7, bytes.len()] {
            let walker = walker(protocol, bytes.len() as u64);
            let fields = walk(walker, &bytes, chunk).unwrap();
            assert_eq!(
                (fields.type_url.as_str(), fields.nonce.as_str()),
                ("t", "n")
            );
            assert_eq!(fields.version, version);
            assert_eq!(fields.resource_type.as_deref(), resource_type);
            assert_eq!(fields.resources, resources);
        }
    }
}

#[test]
fn knows_the_type_once_the_first_resource_has_begun() {
    let response = DiscoveryResponse {
        version_info: "2026-11-21T00:00:00Z/1".into(),
        resources: vec![resource("type.googleapis.com/envoy.X", 1_000_000)],
        ..Default::default()
    };
    let bytes = response.encode_to_vec();
    let mut walker = Walker::response(Protocol::Sotw, bytes.len() as u64);
    walker.feed(&bytes[..64]).unwrap();
    assert_eq!(
        walker.fields().resource_type.as_deref(),
        Some("type.googleapis.com/envoy.X")
    );
}

#[test]
fn keeps_the_beginning_of_the_reason_of_a_nack() {
    let refused = |message: &str| {
        let error_detail = Some(envoy_types::pb::google::rpc::Status {
            code: 13,
            message: message.to_owned(),
            details: vec![resource("a.A", 10)],
        });
        let (type_url, response_nonce) = ("t".to_owned(), "n".to_owned());
        DeltaDiscoveryRequest {
            type_url,
            response_nonce,
            error_detail,
            ..Default::default()
        }
    };
    let long = "é".repeat(20_000);
    for (message, kept) in [("", ""), ("no port", "no port"), (&long, &long[..1024])] {
        let bytes = refused(message).encode_to_vec();
        let walker = Walker::request(Protocol::Delta, bytes.len() as u64);
        let fields = walk(walker, &bytes, 100).unwrap();
        assert_eq!(fields.nack.as_deref(), Some(kept));
        assert_eq!((&*fields.nonce, fields.resources), ("n", 0));
    }
    let bytes = DiscoveryRequest {
        error_detail: refused("why").error_detail,
        ..Default::default()
    }
    .encode_to_vec();
    let walker = Walker::request(Protocol::Sotw, bytes.len() as u64);
    let fields = walk(walker, &bytes, 1).unwrap();
    assert_eq!(fields.nack.as_deref(), Some("why"));
}

#[test]
fn refuses_what_is_no_message() {
    let cases: [(&str, &[u8]); 10] = [
        ("field longer than the message", &[0x22, 5, b'a']),
        ("resource longer than the message", &[0x12, 0x7f, 0x0a]),
        ("type longer than its resource", &[0x12, 2, 0x0a, 9, 0, 0]),
        ("field number 0", &[0x02, 0]),
        ("wire type 7", &[0x0f, 0]),
        ("endless tag", &[0xff; 12]),
        ("group that does not begin", &[0x0c]),
        ("group that does not end", &[0x0b, 0x08, 1]),
        ("type not UTF-8", &[0x22, 1, 0xff]),
        ("number longer than its resource", &[0x12, 3, 0x11, 0, 0, 0]),
    ];
    for (what, bytes) in cases {
        let walker = Walker::response(Protocol::Sotw, bytes.len() as u64);
        let [bytewise, whole] = [1, bytes.len()].map(|chunk| walk(walker.clone(), bytes, chunk));
        assert!(bytewise.is_err(), "{what}");
        assert_eq!(bytewise, whole, "{what}");
    }
}

#[test]
fn steps_over_groups() {
    // Field 9 as a group that holds a field 4, then the real field 4.
    let bytes = [0x4b, 0x22, 1, b'x', 0x4c, 0x22, 1, b't'];
    let walker = Walker::response(Protocol::Sotw, bytes.len() as u64);
    assert_eq!(walk(walker, &bytes, 3).unwrap().type_url, "t");
}

proptest! {
    #[test]
    fn any_bytes_in_any_chunking_end_in_an_answer(
        bytes in prop::collection::vec(any::<u8>(), 0..200),
        chunk in 1usize..50,
        delta in any::<bool>(),
    ) {
        let protocol = if delta { Protocol::Delta } else { Protocol::Sotw };
        let whole = walk(Walker::response(protocol, bytes.len() as u64), &bytes, usize::MAX);
        let parts = walk(Walker::response(protocol, bytes.len() as u64), &bytes, chunk);
        prop_assert_eq!(whole, parts);
    }
}
