//! Tests Envoys that flood the agent or break the protocol: a good Envoy is served next to them and after them, and
//! the agent keeps none of their bytes.

use std::path::Path;

use bytes::Bytes;
use envoy_types::pb::envoy::service::discovery::v3::DiscoveryRequest;
use http_body_util::Empty;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use istio_agent::xds::Protocol;
use istio_agent::xds::server::MAX_OTHER_CLIENT_STREAMS;
use local_istiod::{LocalIstiod, Stream};
use prost::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tonic::Code;

use crate::support::envoy::Envoy;
use crate::support::place::Place;
use crate::support::{
    CLUSTER, STREAM_SECRETS, accepted, ask_for_clusters, ask_for_secrets, framed, local_istiod,
    next_response, relays, request, soon, until,
};

/// The most that the agent may grow because of all floods together, in KiB.
const GROWTH: u64 = 8 << 10;

/// Asserts that a good Envoy is served on both sockets.
async fn assert_serves(place: &Place, istiod: &mut LocalIstiod) {
    while istiod.streams.try_recv().is_ok() {}
    relays(place, istiod).await;
    let mut secrets = ask_for_secrets(place, &["default", "ROOTCA"]).await;
    assert_eq!(next_response(&mut secrets).await.resources.len(), 2);
}

#[tokio::test]
async fn a_good_envoy_is_served_after_floods_and_memory_has_not_grown() {
    let mut istiod = local_istiod().await;
    let place = Place::with_envoy(&istiod);
    let agent = place.start().await;
    for _ in 0..20 {
        assert_serves(&place, &mut istiod).await;
    }
    let before = agent.memory("VmRSS");
    let sockets = [place.xds_socket(), place.sds_socket()];
    for socket in &sockets {
        no_http2(socket).await;
        assert_serves(&place, &mut istiod).await;
    }
    broken_frames(&place).await;
    single_bytes(&place, &mut istiod).await;
    for _ in 0..5 {
        tiny_frames(&place, &mut istiod).await;
    }
    large_secret_requests(&place).await;
    streams_in_a_row(&place, &mut istiod).await;
    let ads = Protocol::Sotw.path();
    for (socket, path) in sockets.iter().zip([ads, STREAM_SECRETS]) {
        soon(reset_streams(socket, path)).await;
        assert_serves(&place, &mut istiod).await;
    }
    for socket in &sockets {
        let silent = silent_connections(socket).await;
        assert_serves(&place, &mut istiod).await;
        drop(silent);
    }
    assert_serves(&place, &mut istiod).await;
    let mut after = 0;
    until("memory within the limit", || {
        after = agent.memory("VmRSS");
        after < before + GROWTH
    })
    .await;
    println!("grew by {} KiB", after.saturating_sub(before));
    assert!(!agent.log().contains("panicked"));
}

#[tokio::test]
async fn requests_while_istiod_is_unreachable_are_buffered_up_to_a_limit() {
    let istiod = local_istiod().await;
    let place = Place::of(&istiod);
    let options = istiod.kill().await;
    let agent = place.start().await;
    agent.logs("Connection refused").await;
    let before = agent.memory("VmRSS");
    let envoy = Envoy::open(&place.xds_socket(), Protocol::Sotw).await;
    let large = request(CLUSTER, &[&"x".repeat(1 << 20)]);
    for _ in 0..60 {
        envoy.send(&large);
    }
    wait_until_read(&place).await;
    let grown = agent.memory("VmRSS").saturating_sub(before);
    assert!(grown < 32 << 10, "grew by {grown} KiB");
    let mut istiod = LocalIstiod::start(options).await.unwrap();
    let (mut stream, first) = first_request(&mut istiod).await;
    assert_eq!(first, large);
    for _ in 1..60 {
        let got: DiscoveryRequest = soon(stream.next()).await.unwrap().unwrap();
        assert!(got == large, "a request was lost or changed");
    }
}

#[tokio::test]
async fn a_flood_that_istiod_does_not_read_is_bounded_and_released() {
    let mut istiod = local_istiod().await;
    let place = Place::of(&istiod);
    let agent = place.start().await;
    let ads = Protocol::Sotw.path();
    let large = framed(&request(CLUSTER, &[&"x".repeat(200_000)]).encode_to_vec());
    let tiny = Bytes::from(framed(&[]).repeat(40_000));
    // A client with Envoy's header gets no more memory than another client.
    for name in ["x-envoy-internal", "x-other"] {
        let before = agent.memory("VmRSS");
        agent.reset_peak();
        let mut flooding = Vec::new();
        for flood in [&large, &tiny, &large, &tiny] {
            let client = Envoy::open_with(&place.xds_socket(), ads, (name, "true")).await;
            (0..500).for_each(|_| client.send_raw(flood.clone()));
            flooding.push((client, accepted(&mut istiod).await));
        }
        wait_until_read(&place).await;
        let grown = agent.memory("VmHWM").saturating_sub(before);
        assert!(grown < 48 << 10, "grew by {grown} KiB");
        // istiod's streams stay open, and istiod still does not read them.
        let streams: Vec<_> = flooding.into_iter().map(|(_, stream)| stream).collect();
        until("memory within the limit", || agent.memory("VmRSS") < before + GROWTH).await;
        drop(streams);
    }
}

#[tokio::test]
async fn an_agent_out_of_descriptors_logs_it_and_recovers() {
    let mut istiod = local_istiod().await;
    let place = Place::with_envoy(&istiod);
    let agent = place.start().await;
    assert_serves(&place, &mut istiod).await;
    // Until it logs this, the agent opens files that it needs for its start.
    agent.logs("Envoy command").await;
    agent.limit_open_files(60);
    for socket in [place.xds_socket(), place.sds_socket()] {
        let mut silent = Vec::new();
        for _ in 0..100 {
            silent.push(soon(UnixStream::connect(&socket)).await.unwrap());
        }
        agent.logs("failed to accept downstream gRPC connection").await;
        drop(silent);
        assert_serves(&place, &mut istiod).await;
    }
}

/// Waits until the agent has read as much of earlier streams as it accepts: later streams have been answered then.
async fn wait_until_read(place: &Place) {
    for _ in 0..50 {
        let other = Envoy::open_path(&place.xds_socket(), "/").await;
        assert_eq!(other.end().await.code(), Code::Unimplemented);
    }
}

/// Opens a thousand streams one after the other, then more at once than the agent permits.
async fn streams_in_a_row(place: &Place, istiod: &mut LocalIstiod) {
    for _ in 0..1_000 {
        drop(ask_for_clusters(place).await);
        while istiod.streams.try_recv().is_ok() {}
    }
    let mut streams = Vec::new();
    for _ in 0..2 * MAX_OTHER_CLIENT_STREAMS {
        streams.push(Envoy::open(&place.xds_socket(), Protocol::Sotw).await);
    }
    let refused = streams.pop().unwrap().end().await;
    assert_eq!(refused.code(), Code::ResourceExhausted);
}

/// Opens connections that do not use HTTP/2, or break it later, and expects that the agent closes them.
async fn no_http2(socket: &Path) {
    let preface: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    let noise: Vec<u8> =
        (0..65_536u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let settings = [0, 0, 0, 4, 0, 0, 0, 0, 0];
    // This is a HEADERS frame on stream 0, which the protocol forbids.
    let forbidden = [0, 0, 1, 1, 4, 0, 0, 0, 0, 0x82];
    let cases: [&[u8]; 5] = [
        b"GET / HTTP/1.1\r\nHost: agent\r\n\r\n",
        &noise,
        &[preface, &noise].concat(),
        &[preface, &settings, &forbidden].concat(),
        b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n",
    ];
    for bytes in cases {
        let mut stream = UnixStream::connect(socket).await.unwrap();
        let _ = stream.write_all(bytes).await; // The agent may hang up before it has read all.
        let mut rest = Vec::new();
        let _ = soon(stream.read_to_end(&mut rest)).await; // A reset is an end, too.
    }
}

/// Sends truncated frames and wrong lengths, and expects that they end the stream with a status.
async fn broken_frames(place: &Place) {
    let half = &framed(&request(CLUSTER, &[]).encode_to_vec())[..20];
    let cases: [(&[u8], Code); 4] = [
        (&[0, 0, 0], Code::Internal),
        (half, Code::Internal),
        (&[0, 0xff, 0xff, 0xff, 0xff, 1], Code::ResourceExhausted),
        (&[0, 0, 0, 0, 4, 0xff, 0xff, 0xff, 0xff], Code::Internal),
    ];
    for (bytes, code) in cases {
        for protocol in [Protocol::Sotw, Protocol::Delta] {
            let mut envoy = Envoy::open(&place.xds_socket(), protocol).await;
            envoy.send_raw(Bytes::copy_from_slice(bytes));
            envoy.half_close();
            let status = envoy.end().await;
            assert_eq!(status.code(), code, "{bytes:?}: {}", status.message());
        }
        let mut envoy = Envoy::open_path(&place.sds_socket(), STREAM_SECRETS).await;
        envoy.send_raw(Bytes::copy_from_slice(bytes));
        envoy.half_close();
        assert_ne!(envoy.end().await.code(), Code::Ok, "{bytes:?}");
    }
}

/// Returns the next stream with a request, and the request. The streams of broken requests have none.
async fn first_request(istiod: &mut LocalIstiod) -> (Stream, DiscoveryRequest) {
    loop {
        let mut stream = accepted(istiod).await;
        if let Ok(Some(request)) = soon(stream.next()).await {
            return (stream, request);
        }
    }
}

async fn single_bytes(place: &Place, istiod: &mut LocalIstiod) {
    let envoy = Envoy::open(&place.xds_socket(), Protocol::Sotw).await;
    for byte in framed(&request(CLUSTER, &[]).encode_to_vec()).iter() {
        envoy.send_raw(Bytes::copy_from_slice(&[*byte]));
        tokio::task::yield_now().await;
    }
    let (_stream, got) = first_request(istiod).await;
    assert_eq!(got.type_url, CLUSTER);
}

async fn tiny_frames(place: &Place, istiod: &mut LocalIstiod) {
    let envoy = Envoy::open(&place.xds_socket(), Protocol::Sotw).await;
    let tiny = request(CLUSTER, &[]);
    for _ in 0..10_000 {
        envoy.send(&tiny);
    }
    let (mut stream, first) = first_request(istiod).await;
    assert_eq!(first, tiny);
    for _ in 1..10_000 {
        let got: DiscoveryRequest = soon(stream.next()).await.unwrap().unwrap();
        assert_eq!(got, tiny);
    }
}

async fn large_secret_requests(place: &Place) {
    let long = "x".repeat(3 << 20);
    for _ in 0..10 {
        let status = ask_for_secrets(place, &[&long]).await.end().await;
        assert_eq!(status.code(), Code::InvalidArgument);
    }
}

/// Opens 5,000 streams and resets each at once, or fewer if the agent closes the connection.
async fn reset_streams(socket: &Path, path: &str) {
    let stream = TokioIo::new(UnixStream::connect(socket).await.unwrap());
    let (mut client, connection) = http2::handshake(TokioExecutor::new(), stream).await.unwrap();
    let opening = async {
        for _ in 0..5_000 {
            let request = http::Request::post(format!("http://agent{path}"));
            let request = request.body(Empty::<Bytes>::new()).unwrap();
            if client.ready().await.is_err() {
                return;
            }
            drop(client.send_request(request));
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        _ = connection => {}
        () = opening => {}
    }
}

/// Opens connections that send nothing. They stay open until they are dropped.
async fn silent_connections(socket: &Path) -> Vec<UnixStream> {
    let mut connections = Vec::new();
    for _ in 0..1_000 {
        connections.push(soon(UnixStream::connect(socket)).await.unwrap());
    }
    connections
}
