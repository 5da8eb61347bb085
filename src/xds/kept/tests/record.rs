//! What a stream hands to the writer.

use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryRequest;

use super::*;
use crate::xds::request::RequestReader;
use crate::xds::response::Captured;

#[test]
fn a_message_that_the_agent_consumes_while_another_passes_is_kept_beside_it() {
    const TABLE: &str = "type.googleapis.com/istio.networking.nds.v1.NameTable";
    let parent = tempfile::tempdir().unwrap();
    let config = Config {
        directory: parent.path().to_owned(),
        max_age: Duration::MAX,
        after: Duration::MAX,
    };
    let (kept_handle, writing) = Kept::new(config, &Registry::default());
    let thread = std::thread::spawn(writing);
    let mut recorder = Recorder::new(Some(kept_handle.of_envoy(1)), 1, Protocol::Delta);
    let clusters = resources(&[("a", "1"), ("b", "2")]);
    let bytes = response(Protocol::Delta, "1", &clusters, &[]);
    let received = |type_url: &str| Received {
        type_url: type_url.into(),
        version: "v".into(),
        nonce: "1".into(),
        resources: 2,
        bytes: bytes.len() as u64 - 5,
        consumer: Consumer::Envoy,
    };
    let mut requests = RequestReader::new(Protocol::Delta, 1000);
    let request = |nonce: &str| {
        frame(
            &DeltaDiscoveryRequest {
                node: Some(Node::default()),
                type_url: CLUSTER.into(),
                response_nonce: nonce.into(),
                ..Default::default()
            }
            .encode_to_vec(),
        )
    };
    requests
        .feed(request(""), |request| recorder.requested(&request))
        .unwrap();
    recorder.begins(CLUSTER);
    recorder.passes(&bytes.slice(..20));
    recorder.consumed(&Captured {
        interceptor: 0,
        received: received(TABLE),
        message: bytes.slice(5..),
    });
    recorder.passes(&bytes.slice(20..));
    recorder.passed(&received(CLUSTER));
    requests
        .feed(request("1"), |request| recorder.requested(&request))
        .unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build();
    runtime.unwrap().block_on(recorder.flush());
    drop((recorder, kept_handle));
    thread.join().unwrap();
    assert_eq!(
        kept(parent.path(), Protocol::Delta).unwrap(),
        Some(clusters)
    );
    let manifest = Manifest::read(parent.path()).unwrap().unwrap();
    assert_eq!(manifest.types[TABLE].file.length, bytes.len() as u64);
}
