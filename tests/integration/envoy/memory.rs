//! Tests that large responses pass through the agent in pieces and take little memory.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse, Resource,
};
use envoy_types::pb::google::protobuf::Any;
use http_body::{Body, Frame};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use istio_agent::xds::Protocol;
use prost::Message;
use tokio::net::UnixStream;
use tokio::task::JoinSet;

use crate::support::control_plane::ControlPlane;
use crate::support::pod::{Pod, Settings};
use crate::support::{CLUSTER, eventually, soon};

/// The size of one resource in bytes.
const RESOURCE: usize = 100_000;
/// The limit of the agent's peak memory in KiB, without its code. A build for tests has three times as much code as the
/// release, whose 8 MB of code bring the total to 20 MB.
const PEAK: u64 = 12 * 1024;

#[tokio::test]
async fn a_response_of_100_mb_passes_in_20_mb() {
    for protocol in [Protocol::Sotw, Protocol::Delta] {
        let peak = pass(protocol, 100_000_000, None).await;
        assert!(peak < PEAK, "{protocol:?}: {peak} KiB beside the code");
    }
}

#[tokio::test]
async fn a_response_waits_in_istiod_while_envoy_reads_slowly() {
    for protocol in [Protocol::Sotw, Protocol::Delta] {
        let peak = pass(protocol, 40_000_000, Some(12.0 * 1e6)).await;
        assert!(peak < PEAK, "{protocol:?}: {peak} KiB beside the code");
    }
}

/// Sends a response of `size` bytes through an agent to a client that reads at most `rate` bytes per second. Returns
/// the agent's peak memory without its code, in KiB.
async fn pass(protocol: Protocol, size: usize, rate: Option<f64>) -> u64 {
    let mut control_plane = ControlPlane::scripted(Duration::from_secs(3600)).await;
    let pod = Pod::start(Settings::default(), &control_plane);
    let path = pod.path("etc/istio/proxy/XDS");
    let socket =
        eventually("the socket of the agent", async || UnixStream::connect(&path).await.ok());
    let (mut body, _connection) = open(socket.await, protocol).await;
    let accepted = control_plane.istiod.streams.recv();
    let istiod = soon(accepted).await.unwrap();
    let message = response(protocol, size);
    let length = message.len() + 5;
    pod.agent.reset_peak();
    let sending = async {
        istiod.send_bytes(message).await.unwrap();
        istiod
    };
    let reading = soon(read(&mut body, length, rate));
    let (_istiod, ()) = tokio::join!(sending, reading);
    let code = pod.agent.memory("RssFile");
    pod.agent.memory("VmHWM") - code
}

async fn read(body: &mut Incoming, mut left: usize, rate: Option<f64>) {
    while left > 0 {
        let frame = body.frame().await.unwrap().unwrap();
        let data = frame.into_data().unwrap();
        left -= data.len();
        if let Some(rate) = rate {
            tokio::time::sleep(Duration::from_secs_f64(data.len() as f64 / rate)).await;
        }
    }
}

/// Opens a discovery stream on the agent's socket as Envoy does, and requests clusters.
pub async fn open(socket: UnixStream, protocol: Protocol) -> (Incoming, JoinSet<()>) {
    let (mut send, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(socket))
            .await
            .unwrap();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let _ = connection.await; // Its end shows as the end of the stream.
    });
    let request = http::Request::post(format!("http://xds-grpc{}", protocol.path()))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(Requests(Some(framed(&request(protocol)))))
        .unwrap();
    let response = soon(send.send_request(request)).await.unwrap();
    (response.into_body(), tasks)
}

/// A request body that has one message and never ends.
struct Requests(Option<Bytes>);

impl Body for Requests {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match self.0.take() {
            Some(bytes) => Poll::Ready(Some(Ok(Frame::data(bytes)))),
            None => Poll::Pending,
        }
    }
}

fn request(protocol: Protocol) -> Vec<u8> {
    let node = Some(Node {
        id: "sidecar~127.0.0.1~cart-1.shop~shop.svc.cluster.local".to_owned(),
        ..Default::default()
    });
    let type_url = CLUSTER.to_owned();
    match protocol {
        Protocol::Sotw => DiscoveryRequest { node, type_url, ..Default::default() }.encode_to_vec(),
        Protocol::Delta => {
            DeltaDiscoveryRequest { node, type_url, ..Default::default() }.encode_to_vec()
        }
    }
}

/// Returns a response of about `size` bytes, with many resources like other large responses.
fn response(protocol: Protocol, size: usize) -> Bytes {
    let (type_url, nonce) = (CLUSTER.to_owned(), "nonce".to_owned());
    let any = Any { type_url: CLUSTER.to_owned(), value: vec![b'c'; RESOURCE] };
    let message = match protocol {
        Protocol::Sotw => DiscoveryResponse {
            resources: vec![any; size / RESOURCE],
            type_url,
            nonce,
            ..Default::default()
        }
        .encode_to_vec(),
        Protocol::Delta => {
            let resource =
                Resource { name: "carts".to_owned(), resource: Some(any), ..Default::default() };
            DeltaDiscoveryResponse {
                resources: vec![resource; size / RESOURCE],
                type_url,
                nonce,
                ..Default::default()
            }
            .encode_to_vec()
        }
    };
    message.into()
}

fn framed(message: &[u8]) -> Bytes {
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    Bytes::from([&[0], &length[..], message].concat())
}
