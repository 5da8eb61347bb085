//! Tests the secret discovery service on a real Unix socket, with a gRPC client in place of Envoy.

use std::time::Duration;

use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::extensions::transport_sockets::tls::v3::{Secret, secret};
use envoy_types::pb::envoy::service::secret::v3::secret_discovery_service_client::SecretDiscoveryServiceClient;
use prost::Message;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;
use tonic::transport::Channel;

use super::resource::TYPE_URL;
use super::stream::random_uuid;
use super::*;
use crate::runtime::clock::Clock;
use crate::secrets::fake_authority::{Answer, FakeAuthority, clock, config};
use crate::secrets::files;

/// The time limit of a step. No step waits for a timer, so the limit only ends a test that hangs.
const LIMIT: Duration = Duration::from_secs(20);

struct Fixture {
    clock: Clock,
    authority: FakeAuthority,
    registry: Registry,
    shutdown: CancellationToken,
    tasks: JoinSet<()>,
    client: SecretDiscoveryServiceClient<Channel>,
    _directory: tempfile::TempDir,
}

async fn start(answer: Answer) -> Fixture {
    let clock = clock();
    let authority = FakeAuthority::new(&clock);
    authority.set(answer);
    let registry = Registry::default();
    let (secrets, renewal) =
        crate::secrets::new(config(), authority.clone(), clock.clone(), &registry);
    let directory = tempfile::tempdir().expect("makes a directory");
    let path = directory.path().join("socket");
    let listener = crate::net::unix_socket::bind(&path).expect("binds");
    let shutdown = CancellationToken::new();
    let mut tasks = JoinSet::new();
    tasks.spawn(renewal);
    let (files, watcher) = files::new(files_config(), clock.clone(), &registry);
    tasks.spawn(watcher);
    let sources = Sources {
        secrets: Some(secrets),
        files,
        serves_workload: true,
        options: SecretOptions::default(),
        rejections: Rejections::default(),
    };
    tasks.spawn(serve(listener, sources, &registry, shutdown.clone()));
    let client = SecretDiscoveryServiceClient::connect(format!("unix://{}", path.display()))
        .await
        .expect("connects");
    Fixture { clock, authority, registry, shutdown, tasks, client, _directory: directory }
}

fn files_config() -> files::Config {
    files::Config {
        workload: None,
        system_roots: "/none".into(),
        debounce: Duration::from_millis(10),
    }
}

struct EnvoyStream {
    requests: mpsc::Sender<DiscoveryRequest>,
    responses: Streaming<DiscoveryResponse>,
}

impl Fixture {
    async fn subscribe(&mut self, name: &str) -> EnvoyStream {
        let (requests, rest) = mpsc::channel(4);
        let call = self.client.stream_secrets(ReceiverStream::new(rest));
        let opened = tokio::time::timeout(LIMIT, call);
        let responses = opened.await.expect("in time").expect("opens").into_inner();
        let stream = EnvoyStream { requests, responses };
        stream.send(name, "").await;
        stream
    }
}

impl EnvoyStream {
    async fn send(&self, name: &str, nonce: &str) {
        let request = DiscoveryRequest {
            node: Some(Node { id: "sidecar~1".to_owned(), ..Default::default() }),
            resource_names: vec![name.to_owned()],
            type_url: TYPE_URL.to_owned(),
            response_nonce: nonce.to_owned(),
            ..Default::default()
        };
        self.requests.send(request).await.expect("is open");
    }

    async fn next(&mut self) -> DiscoveryResponse {
        let next = tokio::time::timeout(LIMIT, self.responses.message()).await;
        next.expect("in time").expect("no error").expect("not closed")
    }

    async fn end(&mut self) -> Status {
        let next = tokio::time::timeout(LIMIT, self.responses.message()).await;
        next.expect("in time").expect_err("ends with an error")
    }
}

fn only_secret(response: &DiscoveryResponse) -> Secret {
    assert_eq!(response.resources.len(), 1);
    Secret::decode(&*response.resources[0].value).expect("is a secret")
}

#[tokio::test]
async fn streams_wait_for_the_authority_and_get_every_rotation() {
    let mut fixture = start(Answer::Waits).await;
    let mut roots = fixture.subscribe("ROOTCA").await;
    let mut leaf = fixture.subscribe("default").await;
    fixture.authority.set(Answer::Signed);

    let first = leaf.next().await;
    assert_eq!(only_secret(&first).name, "default");
    let anchors = only_secret(&roots.next().await);
    assert!(matches!(anchors.r#type, Some(secret::Type::ValidationContext(_))));
    // The certificate is valid for 24 hours and is renewed after 12 of them.
    leaf.send("default", &first.nonce).await;

    fixture.clock.jump(Duration::from_secs(13 * 3600));
    let second = leaf.next().await;
    assert_eq!(only_secret(&second).name, "default");
    assert_ne!(second.resources, first.resources);
    assert_ne!(second.nonce, first.nonce);
    assert_ne!(second.version_info, first.version_info);

    // The renewal did not change the roots, so the next response on their stream is the response to this request.
    roots.send("ROOTCA", "").await;
    assert_eq!(only_secret(&roots.next().await), anchors);
}

#[tokio::test]
async fn a_new_stream_is_answered_while_the_authority_does_not_answer() {
    let mut fixture = start(Answer::Signed).await;
    let first = fixture.subscribe("default").await.next().await;
    fixture.authority.set(Answer::Waits);
    fixture.clock.jump(Duration::from_secs(13 * 3600));
    let again = fixture.subscribe("default").await.next().await;
    assert_eq!(again.resources, first.resources);
}

#[tokio::test]
async fn an_unknown_name_ends_its_stream_only() {
    let mut fixture = start(Answer::Signed).await;
    let mut good = fixture.subscribe("default").await;
    let status = fixture.subscribe("file-cert:").await.end().await;
    assert_eq!(status.code(), Code::InvalidArgument);
    good.next().await;
}

#[tokio::test]
async fn large_requests_are_refused() {
    let mut fixture = start(Answer::Signed).await;
    let mut stream = fixture.subscribe("default").await;
    stream.next().await;
    stream.send(&"x".repeat(MAX_REQUEST), "").await;
    assert_eq!(stream.end().await.code(), Code::OutOfRange);
    let page = fixture.registry.render();
    assert!(page.contains("istio_agent_pilot_total_xds_internal_errors 1\n"));
    assert!(page.contains("istio_agent_pilot_xds_recv_max "), "{page}");
}

#[tokio::test]
async fn shutdown_ends_open_streams() {
    let mut fixture = start(Answer::Signed).await;
    let mut stream = fixture.subscribe("default").await;
    stream.next().await;
    fixture.shutdown.cancel();
    let served = tokio::time::timeout(LIMIT, fixture.tasks.join_next()).await;
    let served = served.expect("in time").expect("one ends");
    served.expect("without a panic");
}

#[test]
fn nonces_are_uuids_of_version_4() {
    let uuid = random_uuid();
    let parts: Vec<usize> = uuid.split('-').map(str::len).collect();
    assert_eq!(parts, [8, 4, 4, 4, 12]);
    assert!(uuid[14..].starts_with('4'));
    assert!("89ab".contains(&uuid[19..20]));
    assert_ne!(uuid, random_uuid());
}
