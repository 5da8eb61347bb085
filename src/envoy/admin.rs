//! A client for Envoy's admin port.
//!
//! One HTTP/1 request on a connection of its own, with a deadline for the whole exchange and a limit
//! on the answer: a stopped Envoy takes connections and never answers.
//!
//! Does not interpret answers.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, StatusCode, header};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use crate::lifecycle::BoxError;

/// Enough for every answer but a full `/config_dump`.
const LARGEST_ANSWER: usize = 16 << 20;

/// Where Envoy's admin port is, and how long an exchange may take.
#[derive(Clone, Copy, Debug)]
pub struct Admin {
    pub address: SocketAddr,
    pub limit: Duration,
}

#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub body: Bytes,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no answer from Envoy's admin port {address} within {limit:?}")]
    Late {
        address: SocketAddr,
        limit: Duration,
    },
    #[error("cannot connect to Envoy's admin port {address}")]
    Connect {
        address: SocketAddr,
        #[source]
        source: std::io::Error,
    },
    #[error("{path:?} is no path for Envoy's admin port")]
    Path {
        path: String,
        #[source]
        source: http::Error,
    },
    #[error("the exchange with Envoy's admin port {address} broke off")]
    Exchange {
        address: SocketAddr,
        #[source]
        source: BoxError,
    },
}

impl Admin {
    pub fn new(host: IpAddr, port: u16, limit: Duration) -> Self {
        Self {
            address: (host, port).into(),
            limit,
        }
    }

    /// Tells Envoy to say goodbye to its clients. Of a sidecar only the inbound listeners do: the
    /// workload itself may still want to call out. Unless Envoy `stays`, it closes these listeners at
    /// the end of its drain time.
    pub async fn drain_listeners(&self, inbound_only: bool, stays: bool) -> Result<Answer, Error> {
        let inbound_only = if inbound_only { "inboundonly&" } else { "" };
        let stays = if stays { "&skip_exit" } else { "" };
        let path = format!("/drain_listeners?{inbound_only}graceful{stays}");
        self.request(Method::POST, &path).await
    }

    /// Has Envoy close its listeners, of a sidecar the inbound ones: nothing new comes in, and what
    /// is under way goes on.
    pub async fn close_listeners(&self, inbound_only: bool) -> Result<Answer, Error> {
        let inbound_only = if inbound_only { "?inboundonly" } else { "" };
        let path = format!("/drain_listeners{inbound_only}");
        self.request(Method::POST, &path).await
    }

    /// The same port, with another limit.
    #[must_use]
    pub fn within(self, limit: Duration) -> Self {
        Self { limit, ..self }
    }

    /// Sends one request without a body.
    pub async fn request(&self, method: Method, path: &str) -> Result<Answer, Error> {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, self.address.to_string())
            .header(header::CONNECTION, "close")
            .body(Empty::<Bytes>::new())
            .map_err(|source| Error::Path {
                path: path.to_owned(),
                source,
            })?;
        tokio::time::timeout(self.limit, self.exchange(request))
            .await
            .map_err(|_| Error::Late {
                address: self.address,
                limit: self.limit,
            })?
    }

    async fn exchange(&self, request: Request<Empty<Bytes>>) -> Result<Answer, Error> {
        let stream = TcpStream::connect(self.address)
            .await
            .map_err(|source| Error::Connect {
                address: self.address,
                source,
            })?;
        let broke_off = |source: BoxError| Error::Exchange {
            address: self.address,
            source,
        };
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| broke_off(error.into()))?;
        let answer = async {
            let (head, body) = sender.send_request(request).await?.into_parts();
            let body = Limited::new(body, LARGEST_ANSWER)
                .collect()
                .await?
                .to_bytes();
            Ok::<_, BoxError>(Answer {
                status: head.status,
                body,
            })
        };
        // The answer needs the connection polled, and may still be read when that has ended.
        let (answer, _) = tokio::join!(answer, connection);
        answer.map_err(broke_off)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    async fn admin(limit: Duration) -> (TcpListener, Admin) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        (listener, Admin::new(address.ip(), address.port(), limit))
    }

    #[tokio::test]
    async fn asks_a_sidecar_to_drain_inbound_listeners_only_and_to_stay() {
        let (listener, admin) = admin(Duration::from_secs(5)).await;
        let envoy = async {
            let (mut stream, _) = listener.accept().await.expect("a connection");
            let mut request = [0; 1024];
            let length = stream.read(&mut request).await.expect("a request");
            let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nOK\n";
            stream.write_all(answer).await.expect("answered");
            String::from_utf8_lossy(&request[..length]).into_owned()
        };
        let (answer, request) = tokio::join!(admin.drain_listeners(true, true), envoy);
        let answer = answer.expect("an answer");
        assert_eq!(
            (answer.status, answer.body.as_ref()),
            (StatusCode::OK, &b"OK\n"[..])
        );
        assert!(
            request
                .starts_with("POST /drain_listeners?inboundonly&graceful&skip_exit HTTP/1.1\r\n")
        );
    }

    #[tokio::test]
    async fn gives_up_on_an_envoy_that_does_not_answer() {
        let (_listener, admin) = admin(Duration::from_millis(20)).await;
        let answer = admin.request(Method::GET, "/ready").await;
        assert!(matches!(answer, Err(Error::Late { .. })), "{answer:?}");
    }

    #[tokio::test]
    async fn a_closed_port_is_an_error_and_not_a_crash() {
        let (listener, admin) = admin(Duration::from_secs(5)).await;
        drop(listener);
        let answer = admin.drain_listeners(false, false).await;
        assert!(matches!(answer, Err(Error::Connect { .. })), "{answer:?}");
    }
}
