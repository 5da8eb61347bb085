//! A scripted Envoy of one agent, with streams for discovery and secrets, ACKs, and Envoy's backoff.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::service::discovery::v3::aggregated_discovery_service_client::AggregatedDiscoveryServiceClient;
use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse,
};
use envoy_types::pb::envoy::service::secret::v3::secret_discovery_service_client::SecretDiscoveryServiceClient;
use istio_agent::runtime::backoff::Backoff;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Status, Streaming};

use super::support;

pub(super) const CLUSTER: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";
pub(super) const LISTENER: &str = "type.googleapis.com/envoy.config.listener.v3.Listener";
const SECRET: &str = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret";

/// Runs in the agent's directory until the agent ends the process.
pub(super) async fn run(name: &str, admin_port: u16) {
    let admin = TcpListener::bind(("127.0.0.1", admin_port)).await;
    let admin = admin.expect("a free port");
    let namespace = std::env::var("POD_NAMESPACE").expect("the agent has a namespace");
    let envoy = Envoy {
        node: Node {
            id: format!("sidecar~127.0.0.1~{name}.{namespace}~{namespace}.svc.cluster.local"),
            ..Node::default()
        },
        secrets: support::channel(Path::new("var/run/secrets/workload-spiffe-uds/socket")).await,
        discovery: support::channel(Path::new("etc/istio/proxy/XDS")).await,
        is_delta: name.ends_with(['1', '3', '5', '7', '9']),
    };
    tokio::join!(
        support::act_as_admin(admin, Arc::new(AtomicBool::new(true))),
        retry(async |backoff| envoy.fetch_secrets(backoff).await),
        retry(async |backoff| if !envoy.is_delta {
            envoy.discover(backoff).await
        } else {
            envoy.discover_delta(backoff).await
        }),
    );
}

/// Opens a stream again whenever it ends. Like in Envoy, the wait is random, up to a limit of 500 ms,
/// which doubles up to 30 s and is reset by a message.
async fn retry(mut stream: impl AsyncFnMut(&mut Backoff) -> Result<(), Status>) {
    let mut backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(30));
    loop {
        let _ = stream(&mut backoff).await; // An outage ends the stream with an error.
        tokio::time::sleep(backoff.next_wait()).await;
    }
}

struct Envoy {
    node: Node,
    secrets: Channel,
    discovery: Channel,
    is_delta: bool,
}

impl Envoy {
    async fn fetch_secrets(&self, backoff: &mut Backoff) -> Result<(), Status> {
        let (requests, receiver) = with_first(self.request(SECRET, &["default"]));
        let mut client = SecretDiscoveryServiceClient::new(self.secrets.clone());
        let answers = client.stream_secrets(receiver).await?.into_inner();
        let reply = |answer| vec![ack(self.request(SECRET, &["default"]), answer)];
        converse(answers, requests, backoff, reply).await
    }

    /// Subscribes to clusters, then to listeners.
    async fn discover(&self, backoff: &mut Backoff) -> Result<(), Status> {
        let (requests, receiver) = with_first(self.request(CLUSTER, &[]));
        let mut client = AggregatedDiscoveryServiceClient::new(self.discovery.clone());
        let answers = client.stream_aggregated_resources(receiver).await?;
        let reply = |answer: DiscoveryResponse| {
            let more = (answer.type_url == CLUSTER).then(|| self.request(LISTENER, &[]));
            let ack = ack(self.request(&answer.type_url, &[]), answer);
            std::iter::once(ack).chain(more).collect()
        };
        converse(answers.into_inner(), requests, backoff, reply).await
    }

    async fn discover_delta(&self, backoff: &mut Backoff) -> Result<(), Status> {
        let request = |type_url: &str, nonce| DeltaDiscoveryRequest {
            node: Some(self.node.clone()),
            type_url: type_url.into(),
            response_nonce: nonce,
            ..DeltaDiscoveryRequest::default()
        };
        let (requests, receiver) = with_first(request(CLUSTER, String::new()));
        let mut client = AggregatedDiscoveryServiceClient::new(self.discovery.clone());
        let answers = client.delta_aggregated_resources(receiver).await?;
        let reply = |answer: DeltaDiscoveryResponse| {
            let more = (answer.type_url == CLUSTER).then(|| request(LISTENER, String::new()));
            let ack = request(&answer.type_url, answer.nonce);
            std::iter::once(ack).chain(more).collect()
        };
        converse(answers.into_inner(), requests, backoff, reply).await
    }

    fn request(&self, type_url: &str, names: &[&str]) -> DiscoveryRequest {
        DiscoveryRequest {
            node: Some(self.node.clone()),
            type_url: type_url.into(),
            resource_names: names.iter().map(ToString::to_string).collect(),
            ..DiscoveryRequest::default()
        }
    }
}

fn ack(request: DiscoveryRequest, answer: DiscoveryResponse) -> DiscoveryRequest {
    DiscoveryRequest { version_info: answer.version_info, response_nonce: answer.nonce, ..request }
}

/// Returns the channel for the requests of a stream, with the first request in it.
fn with_first<R>(first: R) -> (mpsc::Sender<R>, ReceiverStream<R>) {
    let (requests, receiver) = mpsc::channel(4);
    let _ = requests.try_send(first); // The channel is empty.
    (requests, ReceiverStream::new(receiver))
}

async fn converse<Answer, Request>(
    mut answers: Streaming<Answer>,
    requests: mpsc::Sender<Request>,
    backoff: &mut Backoff,
    reply: impl Fn(Answer) -> Vec<Request>,
) -> Result<(), Status> {
    while let Some(answer) = answers.message().await? {
        backoff.reset();
        for request in reply(answer) {
            let _ = requests.send(request).await; // The next read reports a closed stream.
        }
    }
    Ok(())
}
