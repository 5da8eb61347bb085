//! gRPC's health check: one call in plaintext on a connection of its own.

use std::task::{Context, Poll};

use ::http::{HeaderMap, Request, Response, Uri, header};
use hyper::body::Incoming;
use hyper::client::conn::http2::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tonic::body::Body;
use tonic::codegen::BoxFuture;

use crate::executor::ConnectionTasks;
use crate::proto::grpc_health_v1::HealthCheckRequest;
use crate::proto::grpc_health_v1::health_check_response::ServingStatus;
use crate::proto::grpc_health_v1::health_client::HealthClient;

/// More than the one number an answer consists of.
const LARGEST_ANSWER: usize = 4 << 10;

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
    let (sender, connection) = handshake.map_err(Error::Handshake)?;
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
    let answer = HealthClient::with_origin(Channel(sender), origin)
        .max_decoding_message_size(LARGEST_ANSWER)
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

/// A connection as the generated client takes it.
struct Channel(SendRequest<Body>);

impl tower_service::Service<Request<Body>> for Channel {
    type Response = Response<Incoming>;
    type Error = hyper::Error;
    type Future = BoxFuture<Self::Response, hyper::Error>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<hyper::Result<()>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        Box::pin(self.0.send_request(request))
    }
}
