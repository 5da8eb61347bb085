//! Tests control planes that refuse, stall, send garbage or end: the status that Envoy gets, the log, and the use
//! of a good control plane on the same address without a restart.

use std::net::SocketAddr;
use std::time::Duration;

use envoy_types::pb::envoy::service::discovery::v3::DiscoveryResponse;
use envoy_types::pb::google::protobuf::Any;
use istio_agent::xds::Protocol;
use local_istiod::{LocalIstiod, Options, Security, Stream};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::{AbortHandle, JoinSet};
use tonic::{Code, Status};

use crate::support::envoy::Envoy;
use crate::support::place::{Place, TOKEN, token};
use crate::support::{
    CLUSTER, accepted, answered, ask_for_clusters, local_istiod, options, relays, request,
    restarted, soon,
};

/// A server on istiod's address that is not an istiod. It stops when it is dropped.
struct OtherServer(AbortHandle);

impl OtherServer {
    /// Starts a server that sends `answer` whenever bytes arrive, or nothing if it is None. Connections stay open.
    async fn listen(address: SocketAddr, answer: Option<&'static [u8]>) -> Self {
        let (listener, _) = local_istiod::listen(address).await.unwrap();
        let serving = tokio::task::spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                connections.spawn(talk(stream, answer));
            }
        });
        Self(serving.abort_handle())
    }
}

impl Drop for OtherServer {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn talk(mut stream: TcpStream, answer: Option<&'static [u8]>) {
    let mut heard = [0; 1024];
    while let Ok(1..) = stream.read(&mut heard).await {
        if let Some(answer) = answer
            && stream.write_all(answer).await.is_err()
        {
            return;
        }
    }
}

const HTTP_1: &[u8] = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n";
const RANDOM: &[u8] = &[0xa7, 0x13, 0xfe, 0x00, 0x91, 0x42, 0x5b, 0xc8, 0x66, 0x0d, 0xe1, 0x3f];

/// Runs an agent with [`OtherServer`] on the address of its istiod, waits for `sentence` in the log, and starts a good
/// istiod on this address.
async fn recovers_from(security: Security, answer: Option<&'static [u8]>, sentence: &str) {
    let mut options = local_istiod().await.kill().await;
    options.security = security;
    let idle = LocalIstiod::start(options).await.unwrap();
    let mut place = Place::of(&idle);
    if security == Security::Plaintext {
        place = place.proxy("controlPlaneAuthPolicy", json!("NONE"));
    }
    let options: Options = idle.kill().await;
    let nonsense = OtherServer::listen(options.listen, answer).await;
    let agent = place.start().await;
    let mut envoy = ask_for_clusters(&place).await;
    agent.logs(sentence).await;
    drop(nonsense);
    let mut istiod = LocalIstiod::start(options).await.unwrap();
    answered(&mut envoy, &mut istiod).await;
}

#[tokio::test]
async fn a_silent_istiod_times_out() {
    tokio::join!(
        recovers_from(Security::Tls, None, "timed out after 10 s in the TLS handshake"),
        recovers_from(Security::Plaintext, None, "waiting for HTTP/2"),
    );
}

#[tokio::test]
async fn a_peer_that_is_not_istiod_is_logged_as_such() {
    tokio::join!(
        recovers_from(Security::Tls, Some(RANDOM), "TLS handshake with 127.1."),
        recovers_from(Security::Tls, Some(HTTP_1), "TLS handshake with 127.1."),
        recovers_from(Security::Plaintext, Some(RANDOM), "does not speak HTTP/2: "),
        recovers_from(Security::Plaintext, Some(HTTP_1), "does not speak HTTP/2: "),
    );
}

#[tokio::test]
async fn a_refused_connection_is_logged_and_envoys_stream_held_until_istiod_returns() {
    let istiod = local_istiod().await;
    let place = Place::of(&istiod);
    let options = istiod.kill().await;
    let agent = place.start().await;
    let mut envoy = ask_for_clusters(&place).await;
    agent.logs(&format!("cannot connect to {}: Connection refused", options.listen)).await;
    let mut istiod = LocalIstiod::start(options).await.unwrap();
    answered(&mut envoy, &mut istiod).await;
}

#[tokio::test]
async fn a_certificate_for_another_name_is_refused_until_one_fits() {
    let mut options = options();
    let names = std::mem::take(&mut options.extra_names);
    let istiod = LocalIstiod::start(options).await.unwrap();
    let place = Place::of(&istiod);
    let agent = place.start().await;
    let mut envoy = ask_for_clusters(&place).await;
    let name = format!("its certificate is not for {:?}, but for ", names[0]);
    agent.logs(&name).await;
    agent.logs("[ISTIOD_CERTIFICATE_NAME]").await;
    let mut istiod = restarted(istiod, |options| options.extra_names = names).await;
    answered(&mut envoy, &mut istiod).await;
}

/// Returns the next stream of istiod, on which it has sent a response that Envoy has read.
async fn next_answered_stream(envoy: &mut Envoy, istiod: &mut LocalIstiod) -> Stream {
    let stream = accepted(istiod).await;
    let answer = DiscoveryResponse { type_url: CLUSTER.into(), ..Default::default() };
    stream.send(&answer).await.unwrap();
    envoy.next_bytes().await;
    stream
}

#[tokio::test]
async fn each_status_of_istiod_reaches_envoy_with_its_message() {
    let mut istiod = local_istiod().await;
    let place = Place::of(&istiod);
    let _agent = place.start().await;
    for code in 1..=16 {
        let mut envoy = ask_for_clusters(&place).await;
        let status = Status::new(Code::from(code), format!("reason {code}: 100 %, é"));
        let stream = next_answered_stream(&mut envoy, &mut istiod).await;
        stream.end(status).await;
        let got = envoy.end().await;
        assert_eq!(got.code(), Code::from(code));
        assert_eq!(got.message(), format!("reason {code}: 100 %, é"));
    }
    relays(&place, &mut istiod).await;
}

#[tokio::test]
async fn a_status_too_long_for_a_header_still_ends_the_stream() {
    let mut istiod = local_istiod().await;
    let place = Place::of(&istiod);
    let _agent = place.start().await;
    for length in [10_000, 100_000, 1_000_000] {
        let mut envoy = ask_for_clusters(&place).await;
        let status = Status::internal("x".repeat(length));
        let stream = next_answered_stream(&mut envoy, &mut istiod).await;
        stream.end(status).await;
        let got = envoy.end().await;
        match length {
            10_000 => assert_eq!(got.message().len(), length),
            _ => assert_ne!(got.code(), Code::Ok, "{length}"),
        }
    }
    relays(&place, &mut istiod).await;
}

#[tokio::test]
async fn malformed_messages_and_resets_end_only_their_stream() {
    let mut istiod = local_istiod().await;
    let place = Place::of(&istiod);
    let _agent = place.start().await;
    for garbage in [vec![0xff; 100], vec![0x0a, 200, 1], vec![0; 3]] {
        let mut envoy = ask_for_clusters(&place).await;
        let stream = next_answered_stream(&mut envoy, &mut istiod).await;
        stream.send_bytes(garbage.into()).await.unwrap();
        let status = envoy.end().await;
        assert_eq!(status.code(), Code::Internal, "{}", status.message());
    }
    let mut envoy = ask_for_clusters(&place).await;
    let stream = accepted(&mut istiod).await;
    let cluster = Any { type_url: CLUSTER.into(), value: vec![1; 20 << 20] };
    let large = DiscoveryResponse {
        type_url: CLUSTER.into(),
        resources: vec![cluster],
        ..Default::default()
    };
    stream.send(&large).await.unwrap();
    assert!(soon(envoy.first_bytes()).await > 0);
    let mut istiod = restarted(istiod, |_| {}).await;
    assert_eq!(envoy.end().await.code(), Code::Unavailable);
    relays(&place, &mut istiod).await;
}

#[tokio::test]
async fn a_newer_stream_replaces_the_older_and_each_reads_the_token_again() {
    let mut istiod = local_istiod().await;
    let place = Place::of(&istiod);
    let agent = place.start().await;
    let mut older: Option<Envoy> = None;
    for (account, protocol) in
        [("first", Protocol::Delta), ("second", Protocol::Sotw), ("third", Protocol::Delta)]
    {
        let ttl = Duration::from_secs(600);
        place.write(TOKEN, istiod.mint_token("default", account, ttl).unwrap());
        let mut envoy = Envoy::open(&place.xds_socket(), protocol).await;
        envoy.send(&request(CLUSTER, &[]));
        let stream = next_answered_stream(&mut envoy, &mut istiod).await;
        assert_eq!(stream.caller.as_ref().unwrap().service_account, account);
        assert_eq!(stream.headers["clusterid"], "Kubernetes");
        if let Some(older) = older.replace(envoy) {
            assert_eq!(older.end().await.code(), Code::Ok);
        }
        drop(stream);
    }
    assert!(!agent.log().contains(&token(&istiod)[..20]));
}
