//! Envoy's side of a discovery stream. The test decides about each byte that is sent.

use std::convert::Infallible;
use std::path::Path;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Buf, Bytes, BytesMut};
use http::HeaderMap;
use http_body::{Body, Frame};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use istio_agent::net::executor::ConnectionTasks;
use istio_agent::xds::Protocol;
use prost::Message;
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tonic::{Code, Status};

use super::{framed, soon};

/// One stream on a separate connection. Dropping it closes the connection, like the end of Envoy.
pub struct Envoy {
    requests: Option<mpsc::UnboundedSender<Bytes>>,
    responses: Incoming,
    buffer: BytesMut,
    trailers: Option<HeaderMap>,
    _connection: ConnectionTasks,
}

struct Requests(mpsc::UnboundedReceiver<Bytes>);

impl Body for Requests {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(context).map(|bytes| bytes.map(|bytes| Ok(Frame::data(bytes))))
    }
}

impl Envoy {
    pub async fn open(socket: &Path, protocol: Protocol) -> Self {
        Self::open_path(socket, protocol.path()).await
    }

    pub async fn open_path(socket: &Path, path: &str) -> Self {
        Self::open_with(socket, path, ("x-envoy-internal", "true")).await
    }

    /// Opens a stream with an additional header.
    pub async fn open_with(socket: &Path, path: &str, header: (&str, &str)) -> Self {
        let stream = UnixStream::connect(socket).await.unwrap();
        let tasks = ConnectionTasks::default();
        let executor = tasks.executor();
        let (mut send, connection) =
            hyper::client::conn::http2::handshake(executor.clone(), TokioIo::new(stream))
                .await
                .unwrap();
        executor.spawn(async move {
            let _ = connection.await; // The stream also ends with an error if the connection fails.
        });
        let (requests, receiver) = mpsc::unbounded_channel();
        let request = http::Request::post(format!("http://xds-grpc{path}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .header(header.0, header.1)
            .body(Requests(receiver))
            .unwrap();
        let response = soon(send.send_request(request)).await.unwrap();
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "application/grpc");
        let (head, responses) = response.into_parts();
        Self {
            requests: Some(requests),
            responses,
            buffer: BytesMut::new(),
            trailers: head.headers.contains_key("grpc-status").then_some(head.headers),
            _connection: tasks,
        }
    }

    /// Sends a message.
    pub fn send(&self, message: &impl Message) {
        self.send_raw(framed(&message.encode_to_vec()));
    }

    /// Sends bytes unchanged. They need not be a gRPC frame.
    pub fn send_raw(&self, bytes: Bytes) {
        let requests = self.requests.as_ref().expect("not half-closed");
        requests.send(bytes).expect("the stream is open");
    }

    /// Closes the sending half.
    pub fn half_close(&mut self) {
        self.requests = None;
    }

    /// Returns the bytes of the next message, without its gRPC frame.
    pub async fn next_bytes(&mut self) -> Bytes {
        loop {
            if self.buffer.len() >= 5 {
                assert_eq!(self.buffer[0], 0, "not compressed");
                let length = u32::from_be_bytes(self.buffer[1..5].try_into().unwrap()) as usize;
                if self.buffer.len() >= 5 + length {
                    self.buffer.advance(5);
                    return self.buffer.split_to(length).freeze();
                }
            }
            let frame = soon(self.responses.frame()).await.expect("no end").expect("no reset");
            match frame.into_data() {
                Ok(data) => self.buffer.extend_from_slice(&data),
                Err(frame) => panic!("a message, not the end: {:?}", frame.into_trailers()),
            }
        }
    }

    /// Reads one HTTP/2 data frame, which may contain only a part of a message, and returns its length.
    pub async fn first_bytes(&mut self) -> usize {
        let frame = self.responses.frame().await.expect("no end").expect("no reset");
        frame.into_data().expect("data").len()
    }

    /// Waits for the end of the stream and returns its status. Responses that were not read are discarded.
    pub async fn end(mut self) -> Status {
        loop {
            if let Some(trailers) = &self.trailers {
                return Status::from_header_map(trailers).expect("a status");
            }
            match soon(self.responses.frame()).await {
                Some(Ok(frame)) => self.trailers = frame.into_trailers().ok(),
                Some(Err(error)) => return Status::new(Code::Unknown, error.to_string()),
                None => return Status::new(Code::Unknown, "no trailers"),
            }
        }
    }
}
