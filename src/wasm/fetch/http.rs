//! Downloads a module over HTTP.

use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode, header};
use tokio::time::{sleep, timeout};

use super::download::{self, Download, Plan};
use super::unpack::Packing;
use super::{Config, Error, Url};
use crate::backoff::Backoff;
use crate::http_client::{Body, Client, Redirects};
use crate::lifecycle::with_causes;

/// Server errors that another attempt does not mend: 501, 505 and 511.
const FINAL: [StatusCode; 3] = [
    StatusCode::NOT_IMPLEMENTED,
    StatusCode::HTTP_VERSION_NOT_SUPPORTED,
    StatusCode::NETWORK_AUTHENTICATION_REQUIRED,
];

/// Why an attempt failed.
enum Failed {
    /// Another one may succeed.
    Now(String),
    Finally(Error),
}

impl Config {
    /// Downloads and unpacks the module into `directory`.
    pub(crate) async fn download(&self, url: &Url, directory: &Path) -> Result<Download, Error> {
        let client = self.client(url.authority(), Redirects::Follow).await;
        let client = client.map_err(Error::Download)?;
        let mut backoff = Backoff::new(Duration::from_millis(750), Duration::from_secs(60));
        let (mut last, attempts) = (String::new(), self.attempts);
        for attempt in 1..=attempts {
            if attempt > 1 {
                sleep(backoff.next_wait()).await;
            }
            let trying = self.attempt(&client, url, directory);
            last = match timeout(self.request_limit, trying).await {
                Ok(Ok(download)) => return Ok(download),
                Ok(Err(Failed::Finally(error))) => return Err(error),
                Ok(Err(Failed::Now(problem))) => problem,
                Err(_) => format!("no answer within {:?}", self.request_limit),
            };
            let url = url.redacted();
            tracing::debug!(target: "wasm", "attempt {attempt} to download {url} failed: {last}");
        }
        let problem = "wasm module download failed after";
        Err(Error::Download(format!(
            "{problem} {attempts} attempts, last error: {last}"
        )))
    }

    async fn attempt(
        &self,
        client: &Client,
        url: &Url,
        directory: &Path,
    ) -> Result<Download, Failed> {
        let broken = |error: http::Error| Failed::Finally(Error::Download(error.to_string()));
        let mut request = Request::get(url.uri.clone())
            .body(Bytes::new())
            .map_err(broken)?;
        if let Some(authorization) = &url.authorization {
            let headers = request.headers_mut();
            headers.insert(header::AUTHORIZATION, authorization.clone());
        }
        let sent = client.send(request).await;
        let response = sent.map_err(|error| Failed::Now(with_causes(&error)))?;
        let mut body = successful(response)?;
        let plan = Plan {
            packing: Packing::Detect,
            limit: self.max_bytes,
            directory: directory.to_owned(),
            expected: None,
        };
        let carried_out = plan.carry_out(&mut body).await;
        carried_out.map_err(|error| Failed::Finally(unusable(error, url)))
    }
}

fn successful(response: Response<Body>) -> Result<Body, Failed> {
    let status = response.status();
    if status == StatusCode::OK {
        return Ok(response.into_body());
    }
    let code = status.as_u16();
    let problem = format!("wasm module download request failed: status code {code}");
    Err(match status.is_server_error() && !FINAL.contains(&status) {
        true => Failed::Now(problem),
        false => Failed::Finally(Error::Download(problem)),
    })
}

/// The error of a download that cannot be used.
pub(super) fn unusable(error: download::Error, url: &Url) -> Error {
    let (is_invalid, problem, url) = (error.is_invalid(), String::from(error), url.redacted());
    match is_invalid {
        true => Error::Invalid { url, problem },
        false => Error::Download(format!("could not fetch Wasm binary from {url}: {problem}")),
    }
}
