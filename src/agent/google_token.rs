//! Fetches an identity token from Google's metadata service, and writes a new one to the token file before it expires.

use std::convert::Infallible;
use std::time::Duration;

use crate::bootstrap::platform;
use crate::config::GoogleToken;
use crate::files::replace_file::replace_file;
use crate::istiod::token;
use crate::problem::{Code, Problem};
use crate::runtime::backoff::Backoff;
use crate::runtime::clock::Clock;

/// The time before its expiry at which a token is replaced.
const RENEWAL_MARGIN: Duration = Duration::from_secs(25 * 60);

/// The shortest time until a token is replaced. A token without an expiry is replaced after this time.
const MIN_USE: Duration = Duration::from_secs(5 * 60);

const RETRY: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));

/// Replaces the token whenever that is due, and repeats failed attempts after a pause. Never ends.
pub(super) async fn keep_fresh(
    config: GoogleToken,
    platform: platform::Config,
    clock: Clock,
) -> Infallible {
    let mut retry = RETRY;
    loop {
        let wait = match refresh(&config, &platform, &clock).await {
            Ok(wait) => {
                retry.reset();
                wait
            }
            Err(problem) => {
                tracing::error!(target: "gcecred", "credential refresh failed: {problem}");
                retry.next_wait().max(Duration::from_millis(100))
            }
        };
        clock.sleep_until_due(clock.after(wait)).await;
    }
}

/// Replaces the token. Returns the time until the next replacement.
async fn refresh(
    config: &GoogleToken,
    platform: &platform::Config,
    clock: &Clock,
) -> Result<Duration, Problem> {
    let code = Code::GoogleTokenMissing;
    let Some(token) = platform::google_identity(platform, &config.audience).await else {
        let subject = "Failed to get vm identity token from metadata server";
        let found = format!("no token for audience {:?}", config.audience);
        return Err(Problem::new(code, subject, found));
    };
    replace_file(&config.path, token.as_bytes(), 0o640).map_err(|error| {
        Problem::new(code, "Encountered error when writing vm identity token", error)
    })?;
    let expiry = token::claims(token.as_bytes()).and_then(|claims| claims.expiry());
    let wait = expiry.and_then(|end| end.duration_since(clock.after(RENEWAL_MARGIN)).ok());
    Ok(wait.unwrap_or_default().max(MIN_USE))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use base64::Engine;
    use base64::prelude::BASE64_URL_SAFE_NO_PAD;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn the_token_is_requested_by_audience_and_replaced_before_it_expires() {
        let clock = Clock::system();
        let end = clock.now() + Duration::from_secs(3600);
        let end = end.duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
        let claims = BASE64_URL_SAFE_NO_PAD.encode(format!("{{\"exp\":{end}}}"));
        let token = format!("e30.{claims}.sig");
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let platform = platform::Config {
            choice: "none".to_owned(),
            gcp: None,
            gcp_host: Some(listener.local_addr().unwrap().to_string()),
            root: "/".into(),
            v6: false,
        };
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("istio-token");
        let config = GoogleToken { audience: "td.example".to_owned(), path: path.clone() };
        let serve = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = [0; 1024];
            let read = stream.read(&mut request).await.unwrap();
            let length = token.len();
            let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{token}");
            stream.write_all(answer.as_bytes()).await.unwrap();
            String::from_utf8_lossy(&request[..read]).into_owned()
        };
        let (wait, request) = tokio::join!(refresh(&config, &platform, &clock), serve);
        assert!(request.contains("identity?audience=td.example&format=full"), "{request}");
        assert_eq!(fs::read_to_string(&path).unwrap(), token);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
        let minutes = wait.unwrap().as_secs() / 60;
        assert!((34..=35).contains(&minutes), "{minutes}");
        drop(listener);
        let error = refresh(&config, &platform, &clock).await.unwrap_err();
        assert_eq!(error.code, Code::GoogleTokenMissing);
        assert!(error.subject.starts_with("Failed to get vm identity token"));
        assert_eq!(fs::read_to_string(&path).unwrap(), token);
    }
}
