//! Sends requests to Envoy's admin interface, which listens on a port of the pod or on a Unix socket.
//!
//! Each request has its own connection, a deadline for the complete exchange and a maximum size of the response,
//! because a stopped Envoy accepts connections and never responds.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use http::{Method, Request, Response};
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::time::error::Elapsed;
use tokio::time::{Instant, timeout};

use super::warn;
use crate::net::{http_client, unix_socket};
use crate::runtime::clock::after;
use crate::runtime::lifecycle::with_causes;

/// The maximum size of a response, in bytes: enough for every page except a full `/config_dump`.
const MAX_ANSWER: usize = 16 << 20;
/// The longest line of a page that is read by lines, in bytes.
const MAX_LINE: usize = 1 << 16;
/// The period of requests to a starting Envoy, and the time for which it is used.
const FAST_PERIOD: Duration = Duration::from_millis(25);
const FAST_TIME: Duration = Duration::from_secs(5);
/// The period after [`FAST_TIME`], because an Envoy that waits for its configuration may need minutes.
const SLOW_PERIOD: Duration = Duration::from_secs(1);

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    Port(SocketAddr),
    /// A Unix socket, which only Envoy's user and root can open.
    Socket(Arc<Path>),
}

#[derive(Clone, Debug)]
pub struct Admin {
    pub address: Address,
    pub limit: Duration,
}

/// The effect of a drain call on Envoy's listeners.
#[derive(Clone, Copy, Debug)]
pub(super) enum DrainCall {
    /// Clients are asked to leave until the listeners close, at the end of Envoy's drain time.
    Graceful,
    /// Clients are asked to leave; the listeners stay.
    Stay,
    /// The listeners close at once. Running requests continue.
    Close,
}
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no answer from Envoy's admin port: {}", with_causes(.0))]
    NoAnswer(http_client::Error),
    #[error("unexpected status {0}")]
    Status(u16),
    #[error(transparent)]
    Late(#[from] Elapsed),
    #[error("{path}: {why}, expected JSON of Envoy")]
    NotJson { path: String, why: serde_json::Error },
    #[error("{0} is not in a configuration dump")]
    NotInDump(String),
}

impl From<http_client::Error> for Error {
    fn from(error: http_client::Error) -> Self {
        Self::NoAnswer(error)
    }
}

impl Error {
    /// Returns true if there was no connection, because nothing listens at the address.
    pub(super) fn is_closed(&self) -> bool {
        use http_client::Error::{Connect, Socket};
        matches!(self, Self::NoAnswer(Connect(_) | Socket { .. }))
    }
}

impl Address {
    /// Returns the port, unless it is a socket.
    pub fn port(&self) -> Option<u16> {
        match self {
            Self::Port(address) => Some(address.port()),
            Self::Socket(_) => None,
        }
    }

    pub async fn is_taken(&self) -> bool {
        match self {
            Self::Port(address) => TcpStream::connect(address).await.is_ok(),
            Self::Socket(path) => unix_socket::find_listener(path).is_ok(),
        }
    }

    /// Returns a client that connects to this address, if it requests URLs of [`Self::url`].
    pub fn client(&self) -> http_client::Client {
        match self {
            Self::Port(_) => http_client::Client::default(),
            Self::Socket(path) => http_client::Client::of_socket(path),
        }
    }

    fn request(&self, method: Method, path: &str) -> Result<Request<Bytes>, http_client::Error> {
        let uri = self.url(path);
        let builder = Request::builder().method(method).uri(&uri);
        builder.body(Bytes::new()).map_err(|_| http_client::Error::Url { found: uri })
    }

    /// Returns the URL of a path with a leading slash.
    pub fn url(&self, path: &str) -> String {
        match self {
            Self::Port(address) => format!("http://{address}{path}"),
            Self::Socket(_) => format!("http://localhost{path}"),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Port(address) => address.fmt(f),
            Self::Socket(path) => path.display().fmt(f),
        }
    }
}

impl Admin {
    pub fn new(host: IpAddr, port: u16, limit: Duration) -> Self {
        Self { address: Address::Port((host, port).into()), limit }
    }

    #[must_use]
    pub fn within(&self, limit: Duration) -> Self {
        Self { limit, ..self.clone() }
    }

    pub async fn request(&self, method: Method, path: &str) -> Result<Response<Bytes>, Error> {
        let request = self.address.request(method, path)?;
        Ok(self.address.client().fetch(request, self.limit, MAX_ANSWER).await?)
    }

    /// Sends one request without a body, and returns the response as text. Fails unless its status is a success.
    pub(super) async fn call(&self, method: Method, path: &str) -> Result<String, Error> {
        let answer = self.request(method, path).await?;
        match answer.status() {
            status if !status.is_success() => Err(Error::Status(status.as_u16())),
            _ => Ok(String::from_utf8_lossy(answer.body()).into_owned()),
        }
    }

    pub async fn text(&self, path: &str) -> Result<String, Error> {
        self.call(Method::GET, path).await
    }

    /// Reads the lines of a page as they arrive.
    pub async fn read_lines(&self, path: &str, read: impl FnMut(&str)) -> Result<(), Error> {
        timeout(self.limit, self.pass_lines(path, read)).await?
    }

    async fn pass_lines(&self, path: &str, mut read: impl FnMut(&str)) -> Result<(), Error> {
        let request = self.address.request(Method::GET, path)?;
        let (head, mut body) = self.address.client().send(request).await?.into_parts();
        if !head.status.is_success() {
            return Err(Error::Status(head.status.as_u16()));
        }
        let mut rest = BytesMut::new();
        while let Some(chunk) = body.chunk().await {
            rest.extend_from_slice(&chunk?);
            while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
                read(&String::from_utf8_lossy(&rest.split_to(end)));
                rest.advance(1);
            }
            if rest.len() > MAX_LINE {
                return Err(http_client::Error::TooLarge {
                    authority: self.address.to_string(),
                    limit: MAX_LINE,
                }
                .into());
            }
        }
        Ok(())
    }

    pub async fn page(&self, path: &str) -> Result<Value, Error> {
        serde_json::from_str(&self.text(path).await?)
            .map_err(|why| Error::NotJson { path: path.to_owned(), why })
    }

    /// Drains Envoy's listeners, or only the inbound ones, because the workload may still send requests. Logs a
    /// failure.
    pub(super) async fn drain(self, call: DrainCall, inbound_only: bool) {
        let (action, options) = match call {
            DrainCall::Graceful => ("drain", "graceful"),
            DrainCall::Stay => ("drain", "graceful&skip_exit"),
            DrainCall::Close => ("close", ""),
        };
        let scope = if inbound_only { "inboundonly&" } else { "" };
        let path = format!("/drain_listeners?{scope}{options}");
        if let Err(error) = self.call(Method::POST, path.trim_end_matches(['?', '&'])).await {
            warn(&error, &format!("failed to {action} listeners; continuing anyway"));
        }
    }

    /// Asks Envoy to flush its logs and exit. Returns only after a failure; the supervisor waits for Envoy's exit.
    pub(super) async fn quit(self) {
        match self.call(Method::POST, "/quitquitquit").await {
            // An Envoy that exits may close the connection before its response.
            Ok(_) | Err(Error::NoAnswer(http_client::Error::Broken { .. })) => {
                std::future::pending().await
            }
            Err(error) => warn(&error, "Envoy does not quit; terminating it"),
        }
    }

    /// Waits until the Envoy of this restart epoch is live.
    pub(super) async fn wait_until_live(self, restart_epoch: u32) {
        let has_parent = restart_epoch > 0;
        let fast_until = after(FAST_TIME);
        loop {
            let is_live = if has_parent {
                // The parent responds until its successor has taken the admin port over.
                self.workers(restart_epoch).await.is_some()
            } else {
                self.call(Method::GET, "/ready").await.is_ok()
            };
            if is_live {
                return;
            }
            // The time of a parent begins when its successor is live, so this must be noticed at once.
            let is_fast = has_parent || Instant::now() < fast_until;
            tokio::time::sleep(if is_fast { FAST_PERIOD } else { SLOW_PERIOD }).await;
        }
    }

    /// Returns the number of workers of the Envoy of this restart epoch. None if it is not live, or does not have the
    /// port.
    pub async fn workers(&self, restart_epoch: u32) -> Option<u32> {
        workers(&self.page("/server_info").await.ok()?, restart_epoch)
    }
}

/// Reads the number of workers from the `/server_info` of a live Envoy, if it has this restart epoch.
fn workers(info: &Value, restart_epoch: u32) -> Option<u32> {
    // DRAINING is the state after `/healthcheck/fail`; that Envoy still serves.
    let is_live = ["LIVE", "DRAINING"].contains(&info["state"].as_str()?);
    let options = &info["command_line_options"];
    let is_it = options["restart_epoch"].as_u64()? == u64::from(restart_epoch);
    if !is_live || !is_it {
        return None;
    }
    options["concurrency"].as_u64()?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

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
        let ((), request) = tokio::join!(admin.drain(DrainCall::Stay, true), envoy);
        assert!(
            request
                .starts_with("POST /drain_listeners?inboundonly&graceful&skip_exit HTTP/1.1\r\n")
        );
    }

    #[tokio::test]
    async fn gives_up_on_an_envoy_that_does_not_answer() {
        let (_listener, admin) = admin(Duration::from_millis(20)).await;
        let error = admin.request(Method::GET, "/ready").await.expect_err("late");
        let text = with_causes(&error);
        assert!(text.ends_with("within 20ms"), "{text}");
    }

    #[test]
    fn an_envoy_reports_its_workers_once_it_serves() {
        let info = |state: &str, epoch: Value| {
            let options = json!({ "restart_epoch": epoch, "concurrency": 2 });
            json!({ "state": state, "command_line_options": options })
        };
        for (info, expected) in [
            (info("LIVE", json!(3)), Some(2)),
            (info("DRAINING", json!(3)), Some(2)),
            (info("LIVE", json!(2)), None),
            (info("PRE_INITIALIZING", json!(3)), None),
            (info("LIVE", Value::Null), None),
            (info("LIVE", json!(-1)), None),
            (json!({ "state": "LIVE" }), None),
            (json!([]), None),
        ] {
            assert_eq!(workers(&info, 3), expected, "{info}");
        }
    }
}
