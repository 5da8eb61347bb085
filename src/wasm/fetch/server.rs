//! Sends requests to a server, again after failures that may pass, and downloads modules over HTTP.

use std::num::IntErrorKind;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode, Uri, header};
use tokio::time::{Instant, sleep};

use super::download::Download;
use super::{Config, Error, Source};
use crate::backoff::Backoff;
use crate::http_client::{self, Body, Client, Redirects};
use crate::lifecycle::with_causes;

/// Waits between attempts are drawn from zero to 750 ms, 1.5 s, 3 s, …
const FIRST_WAIT: Duration = Duration::from_millis(750);
const MAX_WAIT: Duration = Duration::from_secs(60);

/// A client for the requests of one fetch.
#[derive(Debug)]
pub(super) struct Server {
    pub(super) client: Client,
    /// Of a request, until the head of its answer.
    pub(super) request_limit: Duration,
    pub(super) attempts: u32,
    /// Of the fetch.
    pub(super) deadline: Instant,
}

impl Server {
    /// The last answer, or the last error, of which one that `is_final` ends the attempts.
    pub(super) async fn send(
        &self,
        request: &Request<Bytes>,
        is_final: impl Fn(&http_client::Error) -> bool,
    ) -> Result<Response<Body>, http_client::Error> {
        let mut backoff = Backoff::new(FIRST_WAIT, MAX_WAIT);
        let mut attempt = 1;
        loop {
            let sent = self.client.send_within(request.clone(), self.request_limit);
            let sent = sent.await;
            let (problem, least_wait) = match &sent {
                Ok(response) if !is_temporary(response.status()) => return sent,
                Err(error) if is_final(error) => return sent,
                Ok(response) => (response.status().to_string(), retry_after(response)),
                Err(error) => (with_causes(error), Duration::ZERO),
            };
            let wait = backoff.next_wait().max(least_wait);
            let left = self.deadline.saturating_duration_since(Instant::now());
            if attempt >= self.attempts || wait >= left {
                return sent;
            }
            let host = request.uri().host().unwrap_or_default();
            tracing::debug!(target: "wasm", "attempt {attempt} to fetch from {host} failed: {problem}");
            sleep(wait).await;
            attempt += 1;
        }
    }
}

impl Config {
    /// Downloads and unpacks the module into `directory`. Attempts end by `deadline`.
    pub(crate) async fn download(
        &self,
        source: &Source,
        directory: &Path,
        deadline: Instant,
    ) -> Result<Download, Error> {
        let url = source.redacted();
        let failed = |problem| {
            let problem = format!("wasm module download from {url} failed: {problem}");
            Error::Download(problem)
        };
        let request = get(source.uri.clone(), source.authorization.as_ref());
        let mut has_tls = source.uri.scheme_str() == Some("https");
        let response = loop {
            let server = self.server(source.authority(), has_tls, Redirects::Follow, deadline);
            let server = server.await.map_err(failed)?;
            let is_url =
                |error: &http_client::Error| matches!(error, http_client::Error::Url { .. });
            match server.send(&request, is_url).await {
                // It redirects to https.
                Err(http_client::Error::Url { .. }) if !has_tls => has_tls = true,
                response => break response,
            }
        };
        let response = response.map_err(|error| failed(with_causes(&error)))?;
        match response.status() {
            StatusCode::OK => {
                let plan = self.plan(source, directory);
                plan.carry_out(response.into_body()).await
            }
            status => Err(failed(format!("status code {}", status.as_u16()))),
        }
    }
}

pub(super) fn get(uri: Uri, authorization: Option<&HeaderValue>) -> Request<Bytes> {
    let mut request = Request::new(Bytes::new());
    *request.uri_mut() = uri;
    let header = authorization.map(|value| (header::AUTHORIZATION, value.clone()));
    request.headers_mut().extend(header);
    request
}

/// Whether another attempt may mend what the server could not do now.
fn is_temporary(status: StatusCode) -> bool {
    let status = status.as_u16();
    matches!(status, 408 | 429 | 500..=599) && !matches!(status, 501 | 505 | 511)
}

/// How long a server wants to be left alone, in seconds; none for a date.
fn retry_after(response: &Response<Body>) -> Duration {
    let header = response.headers().get(header::RETRY_AFTER);
    let text = header.and_then(|value| value.to_str().ok());
    match text.unwrap_or_default().trim().parse() {
        Ok(seconds) => Duration::from_secs(seconds),
        Err(error) if *error.kind() == IntErrorKind::PosOverflow => Duration::MAX,
        Err(_) => Duration::ZERO,
    }
}
