//! Requests to Envoy's admin port.
//!
//! Each has a connection of its own, a deadline for the whole exchange and a limit for the answer: a
//! stopped Envoy accepts connections and never answers.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use serde_json::Value;
use tokio::time::Instant;

use super::warn;
use crate::http_client;
use crate::lifecycle::with_causes;

/// Enough for every answer but a full `/config_dump`.
const MAX_ANSWER: usize = 16 << 20;
/// How often a starting Envoy is asked, and for how long that often.
const PERIOD: Duration = Duration::from_millis(25);
const OFTEN: Duration = Duration::from_secs(5);
/// The same after that, while it waits for its configuration, which may take long.
const LIVE_PERIOD: Duration = Duration::from_secs(1);

/// Where Envoy's admin port is, and how long an exchange may take.
#[derive(Clone, Copy, Debug)]
pub struct Admin {
    pub address: SocketAddr,
    pub limit: Duration,
}

/// What a drain call does with Envoy's listeners.
#[derive(Clone, Copy, Debug)]
pub(super) enum DrainCall {
    /// Clients are asked to leave until the listeners close, at the end of Envoy's drain time.
    Graceful,
    /// Clients are asked to leave; the listeners stay.
    Stay,
    /// The listeners close at once. Requests under way go on.
    Close,
}

#[derive(Debug, thiserror::Error)]
#[error("no answer from Envoy's admin port")]
pub struct Error(#[from] http_client::Error);

impl Error {
    /// Whether there was no connection, as nothing listens at the port.
    pub(super) fn is_closed(&self) -> bool {
        matches!(self.0, http_client::Error::Connect(_))
    }

    /// Whether the connection ended before the answer.
    pub(super) fn is_broken(&self) -> bool {
        matches!(self.0, http_client::Error::Broken { .. })
    }
}

impl Admin {
    pub fn new(host: IpAddr, port: u16, limit: Duration) -> Self {
        Self {
            address: (host, port).into(),
            limit,
        }
    }

    #[must_use]
    pub fn within(self, limit: Duration) -> Self {
        Self { limit, ..self }
    }

    /// Sends one request without a body.
    pub async fn request(&self, method: Method, path: &str) -> Result<Response<Bytes>, Error> {
        let uri = format!("http://{}{path}", self.address);
        let request = Request::builder().method(method).uri(&uri);
        let request = request.body(Bytes::new());
        let request = request.map_err(|_| http_client::Error::Url { found: uri })?;
        let client = http_client::Client::default();
        Ok(client.fetch(request, self.limit, MAX_ANSWER).await?)
    }

    /// Returns the text of a page, or the reason why there is none.
    pub async fn text(&self, path: &str) -> Result<String, String> {
        let answer = self.request(Method::GET, path).await;
        let answer = answer.map_err(|error| with_causes(&error))?;
        match answer.status().as_u16() {
            200 => Ok(String::from_utf8_lossy(answer.body()).into_owned()),
            other => Err(format!("unexpected status {other}")),
        }
    }

    /// Returns a page as JSON, or the reason why it cannot be read.
    pub async fn page(&self, path: &str) -> Result<Value, String> {
        let text = self.text(path).await?;
        let wrong = |error| format!("{path}: {error}, expected JSON of Envoy");
        serde_json::from_str(&text).map_err(wrong)
    }

    /// Drains Envoy's listeners, or only the inbound ones: a workload may still call out. Logs a failure.
    pub(super) async fn drain(&self, how: DrainCall, inbound_only: bool) {
        let (what, options) = match how {
            DrainCall::Graceful => ("drain", &["graceful"][..]),
            DrainCall::Stay => ("drain", &["graceful", "skip_exit"][..]),
            DrainCall::Close => ("close", &[][..]),
        };
        let scope = inbound_only.then_some("inboundonly");
        let query: Vec<_> = scope.iter().chain(options).copied().collect();
        let path = format!("/drain_listeners?{}", query.join("&"));
        match self.post(path.trim_end_matches('?')).await {
            Ok(status) if status.is_success() => {}
            Ok(status) => tracing::warn!(
                status = status.as_u16(),
                "Envoy refused to {what} its listeners; continuing anyway"
            ),
            Err(error) => warn(
                &error,
                &format!("failed to {what} listeners; continuing anyway"),
            ),
        }
    }

    /// Asks Envoy to flush its logs and exit. Returns if it cannot be asked: the supervisor waits for its exit.
    pub(super) async fn quit(&self) {
        match self.post("/quitquitquit").await {
            Ok(status) if !status.is_success() => tracing::warn!(
                status = status.as_u16(),
                "Envoy refused to quit; terminating it"
            ),
            Err(error) if !error.is_broken() => {
                warn(&error, "cannot ask Envoy to quit; terminating it");
            }
            _ => std::future::pending().await,
        }
    }

    async fn post(&self, path: &str) -> Result<StatusCode, Error> {
        Ok(self.request(Method::POST, path).await?.status())
    }

    pub(super) async fn live(&self) {
        let is_live = |answer: &Response<Bytes>| answer.status().is_success();
        self.until("/ready", LIVE_PERIOD, is_live).await;
    }

    /// Asks a starting Envoy until its answer is as wanted: often at first, then every `period`.
    pub(super) async fn until(
        &self,
        path: &str,
        period: Duration,
        is_wanted: impl Fn(&Response<Bytes>) -> bool,
    ) {
        let often_until = crate::clock::after(OFTEN);
        loop {
            let answer = self.request(Method::GET, path).await;
            if answer.is_ok_and(|answer| is_wanted(&answer)) {
                return;
            }
            let is_new = Instant::now() < often_until;
            tokio::time::sleep(if is_new { PERIOD } else { period }).await;
        }
    }
}

#[cfg(test)]
mod tests {
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
        let error = admin
            .request(Method::GET, "/ready")
            .await
            .expect_err("late");
        let text = with_causes(&error);
        assert!(text.ends_with("within 20ms"), "{text}");
    }

    #[tokio::test]
    async fn a_closed_port_is_an_error_and_not_a_crash() {
        let (listener, admin) = admin(Duration::from_secs(5)).await;
        drop(listener);
        let error = admin.request(Method::GET, "/ready").await;
        error.expect_err("closed");
    }
}
