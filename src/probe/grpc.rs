//! gRPC's health check: one call in plaintext on a connection of its own.

use ::http::{HeaderMap, Uri, header};
use hyper::client::conn::http2::handshake;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use crate::executor::ConnectionTasks;
use crate::proto::grpc_health_v1::HealthCheckRequest;
use crate::proto::grpc_health_v1::health_check_response::ServingStatus;
use crate::proto::grpc_health_v1::health_client::HealthClient;

/// More than the one number an answer consists of.
const MAX_ANSWER: usize = 4 << 10;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the application does not speak HTTP/2")]
    Handshake(#[source] hyper::Error),
    #[error("the health check failed")]
    Call(#[source] tonic::Status),
    #[error("the application says {0}, expected SERVING")]
    NotServing(String),
}

/// Succeeds when the service says that it serves.
pub(super) async fn check(
    stream: TcpStream,
    service: &str,
    headers: &HeaderMap,
) -> Result<(), Error> {
    let tasks = ConnectionTasks::default();
    let handshake = handshake(tasks.executor(), TokioIo::new(stream)).await;
    let (mut sender, connection) = handshake.map_err(Error::Handshake)?;
    // The call learns of an error.
    tasks.executor().spawn(async { drop(connection.await) });
    let mut request = tonic::Request::new(HealthCheckRequest {
        service: service.to_owned(),
    });
    let agent = headers
        .get(header::USER_AGENT)
        .map(|agent| agent.as_bytes());
    if let Some(agent) = agent.and_then(|agent| agent.try_into().ok()) {
        request.metadata_mut().insert("user-agent", agent);
    }
    let origin = Uri::from_static("http://localhost");
    let channel = tower::service_fn(move |request| sender.send_request(request));
    let answer = HealthClient::with_origin(channel, origin)
        .max_decoding_message_size(MAX_ANSWER)
        .check(request)
        .await
        .map_err(Error::Call)?
        .into_inner();
    match ServingStatus::try_from(answer.status) {
        Ok(ServingStatus::Serving) => Ok(()),
        Ok(other) => Err(Error::NotServing(other.as_str_name().to_owned())),
        Err(_) => Err(Error::NotServing(answer.status.to_string())),
    }
}
