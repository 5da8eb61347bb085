//! Tests clients of the discovery service other than Envoy.

use std::sync::atomic::Ordering;

use istio_agent::xds::Protocol;
use istio_agent::xds::server::MAX_OTHER_CLIENT_STREAMS;
use tonic::Code;

use crate::agent::relay::{PROTOCOLS, request, response};
use crate::support::bench::Bench;
use crate::support::{CLUSTER, framed, soon};

#[tokio::test]
async fn a_limited_number_of_clients_have_streams_next_to_envoys() {
    let mut bench = Bench::start().await;
    let mut streams = Vec::new();
    // The last stream is Envoy's. It does not count against the limit, and ends none of the others.
    for number in 0..=MAX_OTHER_CLIENT_STREAMS {
        let is_envoy = number == MAX_OTHER_CLIENT_STREAMS;
        bench.is_envoy.store(is_envoy, Ordering::Relaxed);
        let client = bench.envoy(PROTOCOLS[number % 2].0).await;
        client.send_raw(framed(&request(PROTOCOLS[number % 2].0, CLUSTER)));
        streams.push((client, bench.accepted().await));
    }
    bench.is_envoy.store(false, Ordering::Relaxed);
    let refused = bench.envoy(Protocol::Delta).await.end().await;
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    for (number, (client, istiod)) in streams.iter_mut().enumerate() {
        let message = response(PROTOCOLS[number % 2].0, CLUSTER, number);
        istiod.send_bytes(message.clone()).await.unwrap();
        assert!(client.next_bytes().await == message, "client {number}");
    }
    let (client, mut istiod) = streams.swap_remove(0);
    drop(client);
    while soon(istiod.next_bytes()).await.is_ok_and(|next| next.is_some()) {}
    let client = bench.envoy(Protocol::Delta).await;
    client.send_raw(framed(&request(Protocol::Delta, CLUSTER)));
    drop((bench.accepted().await, client, streams));
    bench.finish().await;
}
