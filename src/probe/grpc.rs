//! gRPC's health check: one call on a connection of its own.
//!
//! Does not speak TLS.

use std::pin::Pin;
use std::task::{Context, Poll};

use ::http::{HeaderMap, HeaderValue, Request, Response, Uri, header};
use hyper::body::Incoming;
use hyper::client::conn::http2::SendRequest;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tonic::body::Body;

use super::http::Driver;
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
    let driver = Driver::default();
    let handshake = hyper::client::conn::http2::handshake(driver.executor(), TokioIo::new(stream));
    let (sender, connection) = handshake.await.map_err(Error::Handshake)?;
    driver.drive(connection);
    let call = Call {
        sender,
        agent: headers.get(header::USER_AGENT).cloned(),
    };
    let request = HealthCheckRequest {
        service: service.to_owned(),
    };
    let answer = HealthClient::with_origin(call, Uri::from_static("http://localhost"))
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

/// A connection as the generated client wants it.
struct Call {
    sender: SendRequest<Body>,
    /// Of whoever asks for the probe.
    agent: Option<HeaderValue>,
}

impl tower_service::Service<Request<Body>> for Call {
    type Response = Response<Incoming>;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, hyper::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<hyper::Result<()>> {
        self.sender.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        if let Some(agent) = self.agent.clone() {
            request.headers_mut().insert(header::USER_AGENT, agent);
        }
        Box::pin(self.sender.send_request(request))
    }
}
