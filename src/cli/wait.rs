//! Implements the `wait` command: requests the readiness URL until its status is 200, or a timeout.
//!
//! The first request is sent at once. The pause is a tenth of the time waited so far, and the period of the flags
//! is only its upper bound, so that the other containers of a pod start earlier.

use std::time::Duration;

use bytes::Bytes;
use clap::Args;
use http::{Request, StatusCode, Uri};
use tokio::time::{Instant, sleep, timeout};

use super::redirected;
use crate::net::http_client::{Client, http_url};
use crate::runtime::duration::scaled;
use crate::runtime::lifecycle::{BoxError, with_causes};

/// Bounds of the pause.
const MIN_PAUSE: Duration = Duration::from_millis(10);
const MAX_PAUSE: Duration = Duration::from_millis(100);

#[derive(Args, Clone, Debug)]
pub struct WaitFlags {
    /// Words, which pilot-agent ignores too.
    #[arg(hide = true)]
    ignored: Vec<String>,
    /// Time limit in seconds; the command fails when it has passed.
    #[arg(long = "timeoutSeconds", default_value_t = 60)]
    timeout_seconds: u32,
    /// Time limit of one request in milliseconds; 0 means no limit.
    #[arg(long = "requestTimeoutMillis", default_value_t = 500)]
    request_timeout_millis: u32,
    /// Maximum pause between two requests in milliseconds.
    #[arg(long = "periodMillis", default_value_t = 500)]
    period_millis: u32,
    /// URL of the readiness check.
    #[arg(long, default_value = "http://localhost:15021/healthz/ready")]
    url: String,
}

/// Returns when the status is 200. Fails after the time limit of the flags.
pub async fn run(flags: &WaitFlags) -> Result<(), BoxError> {
    let url = http_url(&flags.url).map_err(|error| format!("--url: {error}"))?;
    let mut last_error = "no answer yet".to_owned();
    let seconds = flags.timeout_seconds;
    tracing::info!("Waiting for Envoy proxy to be ready (timeout: {seconds} seconds)...");
    let limit = Duration::from_secs(seconds.into());
    let ready = timeout(limit, until_ready(flags, &url, &mut last_error)).await;
    ready.map_err(|_| {
        format!("timeout waiting for Envoy proxy to become ready. Last error: {last_error}")
    })?;
    tracing::info!("Envoy is ready!");
    Ok(())
}

async fn until_ready(flags: &WaitFlags, url: &Uri, last_error: &mut String) {
    let start = Instant::now();
    let client = redirected();
    while let Err(error) = check(flags, &client, url).await {
        tracing::debug!("Not ready yet: {error}");
        *last_error = error.to_string();
        sleep(pause(flags, start.elapsed())).await;
    }
}

/// Sends one request; any status but 200 is an error.
async fn check(flags: &WaitFlags, client: &Client, url: &Uri) -> Result<(), BoxError> {
    let limit = match flags.request_timeout_millis {
        0 => Duration::MAX,
        millis => Duration::from_millis(millis.into()),
    };
    let mut request = Request::new(Bytes::new());
    *request.uri_mut() = url.clone();
    let sent = timeout(limit, client.send(request)).await;
    let response = sent.map_err(|_| format!("no answer within {limit:?}"))?;
    match response.map(|response| response.status()) {
        Ok(StatusCode::OK) => Ok(()),
        Ok(status) => Err(format!("HTTP status code {}", status.as_u16()).into()),
        Err(error) => Err(with_causes(&error).into()),
    }
}

fn pause(flags: &WaitFlags, waited: Duration) -> Duration {
    let period = Duration::from_millis(flags.period_millis.into());
    scaled(waited, 0.1).min(period).clamp(MIN_PAUSE, MAX_PAUSE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::fake_server::serve;

    const BUSY: &str = "HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n";
    const READY: &str = "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";

    fn flags(url: String) -> WaitFlags {
        WaitFlags {
            ignored: Vec::new(),
            timeout_seconds: 5,
            request_timeout_millis: 500,
            period_millis: 500,
            url,
        }
    }

    #[tokio::test]
    async fn requests_are_sent_until_the_answer_is_200() {
        let moved = "HTTP/1.1 302 Found\r\nlocation: /there\r\ncontent-length: 0\r\n\r\n";
        let (url, server) = serve(vec![BUSY, BUSY, moved, READY]).await;
        let flags = flags(url);
        let (ready, seen) = tokio::join!(run(&flags), server);
        ready.expect("ready");
        assert!(seen[3].starts_with("GET /there "), "{seen:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn ends_after_the_timeout_with_the_last_error() {
        // Port 1 is reserved and refuses connections.
        let flags = flags("http://127.0.0.1:1/".into());
        let started = Instant::now();
        let error = run(&flags).await.expect_err("never ready").to_string();
        assert!(
            error.starts_with(
                "timeout waiting for Envoy proxy to become ready. Last error: cannot connect to \
             127.0.0.1:1: "
            ),
            "{error}"
        );
        assert_eq!(started.elapsed().as_secs(), 5);
    }

    #[test]
    fn pauses_grow_and_never_exceed_the_period() {
        let flags = flags(String::new());
        for (waited, expected) in [(0, 10), (500, 50), (60_000, 100)] {
            let pause = pause(&flags, Duration::from_millis(waited));
            assert_eq!(pause, Duration::from_millis(expected), "{waited}");
        }
        let hasty = WaitFlags { period_millis: 20, ..flags };
        assert_eq!(pause(&hasty, Duration::from_secs(9)).as_millis(), 20);
    }

    #[tokio::test]
    async fn an_unusable_url_is_an_error_at_once() {
        let error = run(&flags("https://localhost/".into())).await.expect_err("refused");
        assert!(error.to_string().starts_with("--url: "), "{error}");
    }
}
