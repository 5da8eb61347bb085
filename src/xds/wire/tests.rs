use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryResponse, DiscoveryResponse, Resource,
};
use envoy_types::pb::google::protobuf::Any;
use proptest::prelude::*;
use prost::Message;

use super::*;

fn resource(type_url: &str, size: usize) -> Any {
    Any { type_url: type_url.to_owned(), value: vec![7; size] }
}

fn walk(mut walker: Walker, bytes: &[u8], chunk: usize) -> Result<Fields, Malformed> {
    for part in bytes.chunks(chunk.max(1)) {
        walker.feed(part)?;
    }
    walker.finish()
}

#[test]
fn reads_the_fields_of_both_responses() {
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
    for (protocol, bytes, resources) in
        [(Protocol::Sotw, response.encode_to_vec(), 2), (Protocol::Delta, delta.encode_to_vec(), 1)]
    {
        for chunk in [1, 2, 7, bytes.len()] {
            let walker = Walker::new(protocol, bytes.len() as u64);
            let expected = Fields {
                type_url: "t".into(),
                nonce: "n".into(),
                version: "v".into(),
                resource_type: Some("a.A".into()),
                resources,
                removed: 0,
            };
            assert_eq!(walk(walker, &bytes, chunk), Ok(expected));
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
    let mut walker = Walker::new(Protocol::Sotw, bytes.len() as u64);
    walker.feed(&bytes[..64]).unwrap();
    assert_eq!(walker.fields.resource_type.as_deref(), Some("type.googleapis.com/envoy.X"));
}

#[test]
fn malformed_messages_are_refused() {
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
        let walker = Walker::new(Protocol::Sotw, bytes.len() as u64);
        let [bytewise, whole] = [1, bytes.len()].map(|chunk| walk(walker.clone(), bytes, chunk));
        assert!(bytewise.is_err(), "{what}");
        assert_eq!(bytewise, whole, "{what}");
    }
}

proptest! {
    #[test]
    fn arbitrary_bytes_parse_alike_in_any_chunks(
        bytes in prop::collection::vec(any::<u8>(), 0..200),
        chunk in 1usize..50,
        delta in any::<bool>(),
    ) {
        let protocol = if delta { Protocol::Delta } else { Protocol::Sotw };
        let whole = walk(Walker::new(protocol, bytes.len() as u64), &bytes, usize::MAX);
        let parts = walk(Walker::new(protocol, bytes.len() as u64), &bytes, chunk);
        prop_assert_eq!(whole, parts);
    }
}

#[test]
fn finds_resources_by_their_names_and_the_names_removed() {
    let delta = DeltaDiscoveryResponse {
        resources: ["a", "", "ccc"]
            .map(|name| Resource {
                name: name.into(),
                resource: Some(Any { type_url: "a.A".into(), value: vec![0x0a, 1, b'o'] }),
                ..Default::default()
            })
            .into(),
        removed_resources: vec!["dd".into()],
        ..Default::default()
    };
    let bytes = delta.encode_to_vec();
    for chunk in [1, 2, 7, bytes.len()] {
        let mut walker = Walker::finder(bytes.len() as u64);
        let mut found = Vec::new();
        for part in bytes.chunks(chunk) {
            walker.find(part, |it| found.push(it)).unwrap();
        }
        walker.finish().unwrap();
        let names: Vec<_> = found.iter().map(|it| (it.name, it.is_removed)).collect();
        let expected = [("a", false), ("", false), ("ccc", false), ("dd", true)];
        assert_eq!(
            names,
            expected.map(|(name, is_removed)| (NameDigest::of(name.as_bytes()), is_removed))
        );
        // The bytes of each range are a message that has only this field.
        for it in found {
            let field = &bytes[it.range.start as usize..it.range.end as usize];
            let fields =
                walk(Walker::new(Protocol::Delta, field.len() as u64), field, 100).unwrap();
            assert_eq!(fields.resources, u32::from(!it.is_removed));
        }
    }
}
