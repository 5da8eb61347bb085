//! What a new Envoy gets of what is kept.

use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DiscoveryRequest};

use super::super::replay::answer;
use super::*;

const NODE: &str = "node of these tests";

fn request(protocol: Protocol, type_url: &str, names: &[&str], nonce: &str) -> Bytes {
    let node = Some(Node {
        id: NODE.into(),
        ..Default::default()
    });
    let (type_url, response_nonce) = (type_url.to_owned(), nonce.to_owned());
    let names = names.iter().map(ToString::to_string).collect();
    frame(&match protocol {
        Protocol::Sotw => DiscoveryRequest {
            node,
            type_url,
            response_nonce,
            resource_names: names,
            ..Default::default()
        }
        .encode_to_vec(),
        Protocol::Delta => DeltaDiscoveryRequest {
            node,
            type_url,
            response_nonce,
            resource_names_subscribe: names,
            ..Default::default()
        }
        .encode_to_vec(),
    })
}

/// Keeps clusters `a` and `b`, their endpoints and no listener for the node of these tests.
fn store(parent: &Path, protocol: Protocol) {
    let first = request(protocol, CLUSTER, &[], "");
    let identity = subscription::Subscription::read(protocol, &first).unwrap();
    let identity = identity.identity(protocol).unwrap();
    let mut writer = writer(parent, protocol);
    begin(&mut writer, 1, 1, &identity, protocol);
    let both = resources(&[("a", "1"), ("b", "2")]);
    for (type_url, resources) in [
        (CLUSTER, &both),
        (ENDPOINTS, &both),
        (LISTENER, &Resources::new()),
    ] {
        let bytes = response(protocol, "1", resources, &[]);
        let ops = passed("1", &bytes, Coverage::All).into_iter();
        let ops = ops.chain(answered("1", true));
        writer.take((1, ops.map(|op| (type_url, op)).collect()));
    }
}

/// The type, version and resources.
type Answer = (String, String, Resources);

/// The answers to these requests.
fn replayed(
    parent: &Path,
    max_age: Duration,
    protocol: Protocol,
    requests: Vec<Bytes>,
) -> io::Result<Vec<Answer>> {
    let config = Config {
        directory: parent.to_owned(),
        max_age,
        after: Duration::ZERO,
    };
    let (kept, _) = LastKnownGood::new(config, &Registry::default());
    let (sender, queue) = mpsc::unbounded_channel();
    requests
        .into_iter()
        .for_each(|request| sender.send(request).unwrap());
    drop(sender);
    let (out, mut answers) = mpsc::channel(1000);
    answer(&kept, protocol, queue, &out)?;
    drop(out);
    let mut bytes = Vec::new();
    while let Some(block) = answers.blocking_recv() {
        bytes.extend_from_slice(&block?);
    }
    parsed(protocol, &bytes)
}

fn parsed(protocol: Protocol, bytes: &[u8]) -> io::Result<Vec<Answer>> {
    let mut found = Vec::new();
    let mut rest = bytes;
    while let Some((head, behind)) = rest.split_first_chunk::<5>() {
        let length = u32::from_be_bytes(head[1..].try_into().unwrap()) as usize;
        let (message, behind) = behind.split_at(length);
        rest = behind;
        let (type_url, version, anys) = match protocol {
            Protocol::Sotw => {
                let message = DiscoveryResponse::decode(message)?;
                (message.type_url, message.version_info, message.resources)
            }
            Protocol::Delta => {
                let message = DeltaDiscoveryResponse::decode(message)?;
                let anys = message.resources.into_iter().map(|it| it.resource.unwrap());
                (
                    message.type_url,
                    message.system_version_info,
                    anys.collect(),
                )
            }
        };
        let named = anys
            .iter()
            .map(|any| Named::decode(&any.value[..]).unwrap());
        found.push((
            type_url,
            version,
            named.map(|it| (it.name, it.content)).collect(),
        ));
    }
    Ok(found)
}

#[test]
fn a_subscription_gets_what_is_kept_of_its_names_once() {
    for protocol in [Protocol::Sotw, Protocol::Delta] {
        let parent = tempfile::tempdir().unwrap();
        store(parent.path(), protocol);
        let more: &[&str] = match protocol {
            Protocol::Sotw => &["a", "none"],
            Protocol::Delta => &["none"],
        };
        let requests = vec![
            request(protocol, CLUSTER, &[], ""),
            request(protocol, CLUSTER, &[], "kept-1"),
            request(protocol, ENDPOINTS, &["a"], ""),
            request(
                protocol,
                ENDPOINTS,
                if protocol == Protocol::Sotw {
                    &["a"]
                } else {
                    &[]
                },
                "kept-1",
            ),
            request(protocol, ENDPOINTS, more, ""),
            request(protocol, "type.googleapis.com/other", &[], ""),
            request(protocol, LISTENER, &[], ""),
        ];
        let day = Duration::from_secs(86400);
        let found = replayed(parent.path(), day, protocol, requests).unwrap();
        let answer = |type_url: &str, pairs: &[(&str, &str)]| {
            (
                type_url.to_owned(),
                "version of 1".to_owned(),
                resources(pairs),
            )
        };
        let last: &[_] = match protocol {
            Protocol::Sotw => &[("a", "1"), ("none", "")],
            Protocol::Delta => &[("none", "")],
        };
        let expected = [
            answer(CLUSTER, &[("a", "1"), ("b", "2")]),
            answer(ENDPOINTS, &[("a", "1")]),
            answer(ENDPOINTS, last),
            answer(LISTENER, &[]),
        ];
        assert_eq!(found, expected);
    }
}

#[test]
fn what_is_too_old_or_of_another_node_or_protocol_is_not_served() {
    let parent = tempfile::tempdir().unwrap();
    let day = Duration::from_secs(86400);
    let refused = |max_age, protocol, request| {
        replayed(parent.path(), max_age, protocol, vec![request])
            .unwrap_err()
            .to_string()
    };
    let first = request(Protocol::Delta, CLUSTER, &[], "");
    assert_eq!(
        refused(day, Protocol::Delta, first.clone()),
        "No such file or directory (os error 2)"
    );
    store(parent.path(), Protocol::Delta);
    for entry in fs::read_dir(parent.path().join(DIRECTORY)).unwrap() {
        let path = entry.unwrap().path();
        let mut content = fs::read(&path).unwrap();
        let mut header: serde_json::Value = serde_json::from_slice(&content[4..4096]).unwrap();
        header["accepted"] = (header["accepted"].as_u64().unwrap() - 100).into();
        let text = format!("{:4092}", header.to_string());
        let sum = crc32fast::hash(text.as_bytes()).to_be_bytes();
        content[..4096].copy_from_slice(&[&sum, text.as_bytes()].concat());
        fs::write(&path, content).unwrap();
    }
    replayed(parent.path(), day, Protocol::Delta, vec![first.clone()]).unwrap();
    let old = refused(Duration::from_secs(99), Protocol::Delta, first);
    assert!(old.ends_with("old, expected at most 99s"), "{old}");
    let other = "it is of another node, another Envoy or the other protocol";
    let sotw = request(Protocol::Sotw, CLUSTER, &[], "");
    assert_eq!(refused(day, Protocol::Sotw, sotw), other);
    let stranger = frame(&DeltaDiscoveryRequest::default().encode_to_vec());
    assert_eq!(refused(day, Protocol::Delta, stranger), other);
}

#[test]
fn files_that_are_exchanged_while_they_are_read_change_nothing() {
    let parent = tempfile::tempdir().unwrap();
    store(parent.path(), Protocol::Delta);
    let config = Config {
        directory: parent.path().to_owned(),
        max_age: Duration::MAX,
        after: Duration::ZERO,
    };
    let (kept, _) = LastKnownGood::new(config, &Registry::default());
    let (requests, queue) = mpsc::unbounded_channel();
    let (out, mut answers) = mpsc::channel(1000);
    let thread = std::thread::spawn(move || answer(&kept, Protocol::Delta, queue, &out));
    let ask = |type_url| requests.send(request(Protocol::Delta, type_url, &["*"], ""));
    ask(CLUSTER).unwrap();
    let mut bytes = answers.blocking_recv().unwrap().unwrap().to_vec();
    let directory = parent.path().join(DIRECTORY);
    for entry in fs::read_dir(&directory).unwrap() {
        let other = parent.path().join("other");
        fs::write(&other, "another").unwrap();
        fs::rename(other, entry.unwrap().path()).unwrap();
    }
    ask(ENDPOINTS).unwrap();
    drop(requests);
    while let Some(block) = answers.blocking_recv() {
        bytes.extend_from_slice(&block.unwrap());
    }
    thread.join().unwrap().unwrap();
    let both = resources(&[("a", "1"), ("b", "2")]);
    let found = parsed(Protocol::Delta, &bytes).unwrap();
    let found: Vec<_> = found
        .into_iter()
        .map(|(_, _, resources)| resources)
        .collect();
    assert_eq!(found, [both.clone(), both]);
}
