//! One request to a metadata service.
//!
//! Does not tell failures apart: a cloud that does not answer is another cloud.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, Request, header};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpStream, ToSocketAddrs};

use crate::lifecycle::BoxError;

const LARGEST_ANSWER: usize = 1 << 20;

pub(super) struct Answer {
    pub(super) good: bool,
    pub(super) headers: HeaderMap,
    pub(super) text: String,
}

/// Asks `host` for `path` with one header.
pub(super) async fn ask(
    host: impl ToSocketAddrs,
    method: Method,
    path: &str,
    (name, value): (&str, &str),
    limit: Duration,
) -> Option<Answer> {
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(header::HOST, "metadata")
        .header(header::CONNECTION, "close")
        .header(name, value)
        .body(Empty::<Bytes>::new());
    let exchange = async { exchange(host, request?).await };
    match tokio::time::timeout(limit, exchange).await {
        Ok(Ok(answer)) => Some(answer),
        Ok(Err(error)) => {
            tracing::debug!(error, path, "a metadata service did not answer");
            None
        }
        Err(_) => None,
    }
}

async fn exchange(
    host: impl ToSocketAddrs,
    request: Request<Empty<Bytes>>,
) -> Result<Answer, BoxError> {
    let stream = TcpStream::connect(host).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let answer = async {
        let (head, body) = sender.send_request(request).await?.into_parts();
        let body = Limited::new(body, LARGEST_ANSWER).collect().await?;
        Ok::<_, BoxError>(Answer {
            good: head.status.is_success(),
            headers: head.headers,
            text: String::from_utf8_lossy(&body.to_bytes()).into_owned(),
        })
    };
    tokio::pin!(answer);
    tokio::select! {
        answer = &mut answer => answer,
        ended = connection => {
            ended?;
            answer.await
        }
    }
}
