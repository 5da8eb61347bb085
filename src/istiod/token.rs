//! Reads the bearer token from its file for each call, and makes the `authorization` header.
//!
//! Without a usable token a call does not have this header: istiod may accept the client certificate alone.
//! An expired token is not sent if the connection was opened with the client certificate. Otherwise it is
//! sent, because istiod compares it with its own clock. The token is not verified; only its expiry, audience
//! and service account are logged.

use std::future::pending;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use http::HeaderValue;
use parking_lot::Mutex;
use serde_json::{Map, Value};
use zeroize::Zeroizing;

use crate::files::file_watch::FileWatch;
use crate::files::regular_file;
use crate::problem::{Code, Problem};
use crate::runtime::clock::rfc3339;
use crate::runtime::duration::rounded;

/// The largest token, in bytes. A larger file is another file, and the path is wrong.
const MAX_TOKEN: u64 = 64 * 1024;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    None,
    File(PathBuf),
    /// The one token of `CREDENTIAL_FETCHER_TYPE=Mock`.
    Mock,
}

pub(crate) const MOCK: &str = "Bearer test_token";

/// Reads the token, and logs each new problem with it once.
#[derive(Debug)]
pub(super) struct Reader {
    source: Source,
    last: Mutex<State>,
}

/// The token that was read last.
#[derive(Clone, Debug, Default)]
pub struct State {
    pub claims: Option<Claims>,
    pub problem: Option<Problem>,
}

/// A header, and the claims of the token in it.
pub(crate) struct Token {
    pub(crate) header: HeaderValue,
    pub(crate) claims: Option<Claims>,
}

impl Reader {
    pub(super) fn new(source: Source) -> Self {
        Self { source, last: Mutex::default() }
    }

    pub(super) fn last(&self) -> State {
        self.last.lock().clone()
    }

    /// Waits until the file may have changed; forever if there is no file or it cannot be watched.
    pub(super) async fn changed(&self) {
        if let Source::File(path) = &self.source
            && let Ok(watch) = FileWatch::new()
            && watch.watch(path).is_ok()
            && watch.changed().await.is_ok()
        {
            return;
        }
        pending().await
    }

    /// Reads the token and makes its `authorization` header; None if there is no token to send. Logs a new problem
    /// with it, and keeps its claims and the problem for [`Reader::last`].
    pub(super) fn authorization(&self, has_certificate: bool) -> Option<HeaderValue> {
        let path = match &self.source {
            Source::None => return None,
            Source::Mock => return Some(HeaderValue::from_static(MOCK)),
            Source::File(path) => path,
        };
        let (header, claims, problem) = match read(path) {
            Ok(Token { header, claims }) => {
                let expired = claims.as_ref().and_then(|claims| claims.expiry_problem(path));
                let is_sent = expired.is_none() || !has_certificate;
                let follows = if is_sent {
                    "it is sent anyway, because there is no client certificate"
                } else {
                    "the client certificate is used instead"
                };
                let problem = expired.map(|problem| problem.consequence(follows));
                (is_sent.then_some(header), claims, problem)
            }
            Err(problem) => (None, None, Some(problem)),
        };
        let mut last = self.last.lock();
        let code = last.problem.as_ref().map(|problem| problem.code);
        match &problem {
            Some(problem) if code == Some(problem.code) => {}
            Some(problem) if claims.is_some() => tracing::warn!("{problem}"),
            Some(problem) => tracing::warn!("failed to fetch token from file: {problem}"),
            None => {}
        }
        *last = State { claims, problem };
        header
    }
}

/// Reads the token. Blocks.
pub(crate) fn read(path: &Path) -> Result<Token, Problem> {
    let file = regular_file::read(path, MAX_TOKEN)
        .map_err(|error| problem(Code::IstiodTokenMissing, path, error))?;
    let token = file.trim_ascii();
    if token.is_empty() {
        return Err(problem(Code::IstiodTokenInvalid, path, "the file is empty"));
    }
    if let Some((position, byte)) =
        token.iter().enumerate().find(|(_, byte)| !byte.is_ascii_graphic())
    {
        let found = format!("byte {byte:#04x} at position {position} is not allowed in a header");
        return Err(problem(Code::IstiodTokenInvalid, path, found));
    }
    let mut header = HeaderValue::from_bytes(&Zeroizing::new([b"Bearer ", token].concat()))
        .map_err(|error| problem(Code::IstiodTokenInvalid, path, error))?;
    header.set_sensitive(true);
    Ok(Token { header, claims: claims(token) })
}

pub(crate) fn problem(code: Code, path: &Path, found: impl ToString) -> Problem {
    Problem::new(code, format!("token {}", path.display()), found)
}

/// The claims of a JSON web token, which is not verified.
#[derive(Clone, Debug)]
pub struct Claims(Map<String, Value>);

impl Claims {
    pub(crate) fn expiry(&self) -> Option<SystemTime> {
        let since_epoch = Duration::try_from_secs_f64(self.0.get("exp")?.as_f64()?).ok()?;
        SystemTime::UNIX_EPOCH.checked_add(since_epoch)
    }

    /// Returns the problem of a token that has expired by this clock.
    pub(crate) fn expiry_problem(&self, path: &Path) -> Option<Problem> {
        let end = self.expiry()?;
        let now = SystemTime::now();
        let ago = rounded(now.duration_since(end).ok()?);
        let [end, now] = [end, now].map(rfc3339);
        let found = format!("expired {ago} ago, at {end}; it is {now} here");
        Some(problem(Code::IstiodTokenExpired, path, found))
    }

    /// Returns namespace and name of a service account of Kubernetes.
    pub(crate) fn service_account(&self) -> Option<(&str, &str)> {
        self.0.get("sub")?.as_str()?.strip_prefix("system:serviceaccount:")?.split_once(':')
    }

    /// Returns the audiences; none if the token does not contain any.
    pub(crate) fn audiences(&self) -> Vec<&str> {
        match self.0.get("aud") {
            Some(Value::Array(several)) => several.iter().filter_map(Value::as_str).collect(),
            one => one.and_then(Value::as_str).into_iter().collect(),
        }
    }
}

/// Parses the claims of a JSON web token. Returns None for another kind of token.
pub(crate) fn claims(token: &[u8]) -> Option<Claims> {
    let mut parts = token.split(|byte| *byte == b'.');
    let claims = parts.nth(1)?;
    let _signature = parts.next()?;
    let claims = claims.split(|byte| *byte == b'=').next()?;
    let claims = Zeroizing::new(BASE64_URL_SAFE_NO_PAD.decode(claims).ok()?);
    serde_json::from_slice(&claims).ok().map(Claims)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    fn answer(content: &[u8]) -> Result<String, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("istio-token");
        std::fs::write(&path, content).unwrap();
        match read(&path) {
            Ok(token) => Ok(token.header.to_str().unwrap().to_owned()),
            Err(problem) => Err(problem.found),
        }
    }

    #[test]
    fn trims_a_token_and_refuses_what_no_header_may_hold() {
        let not_allowed = "byte 0x0a at position 1 is not allowed in a header";
        let table: [(&[u8], Result<&str, &str>); 6] = [
            (b"abc", Ok("Bearer abc")),
            (b" \n abc.def-_=\r\n", Ok("Bearer abc.def-_=")),
            (b"", Err("the file is empty")),
            (b" \n\t", Err("the file is empty")),
            (b"a\nb", Err(not_allowed)),
            (&[b'x'; 65_537], Err("more than 65536 bytes")),
        ];
        for (content, expected) in table {
            let expected = expected.map(str::to_owned).map_err(str::to_owned);
            assert_eq!(answer(content), expected, "{}", content.escape_ascii());
        }
    }

    #[test]
    fn a_missing_file_and_a_directory_give_no_header_and_are_named() {
        let dir = tempfile::tempdir().unwrap();
        for (name, expected) in [("none", "No such file"), ("", "not a regular file")] {
            let path = dir.path().join(name);
            let problem = read(&path).map(drop).unwrap_err();
            assert_eq!(problem.code, Code::IstiodTokenMissing);
            assert!(problem.found.contains(expected), "{problem}");
            assert!(problem.subject.contains(path.to_str().unwrap()), "{problem}");
        }
    }

    #[test]
    fn the_token_file_is_read_each_time_and_its_value_is_hidden() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("istio-token");
        let reader = Reader::new(Source::File(path.clone()));
        assert_eq!(reader.authorization(false), None);
        for token in ["first", "second"] {
            std::fs::write(&path, token).unwrap();
            let value = reader.authorization(false).unwrap();
            assert_eq!(value, format!("Bearer {token}"));
            assert!(!format!("{value:?}").contains(token));
        }
        assert_eq!(Reader::new(Source::None).authorization(false), None);
    }

    #[tokio::test]
    async fn a_changed_token_is_noticed_through_a_link() {
        let dir = tempfile::tempdir().unwrap();
        let (path, data) = (dir.path().join("istio-token"), dir.path().join("..data"));
        for name in ["old", "new"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
            std::fs::write(dir.path().join(name).join("istio-token"), name).unwrap();
        }
        std::os::unix::fs::symlink("old", &data).unwrap();
        std::os::unix::fs::symlink("..data/istio-token", &path).unwrap();
        let reader = Reader::new(Source::File(path));
        let mut changed = std::pin::pin!(reader.changed());
        assert!(futures_util::poll!(&mut changed).is_pending());
        std::os::unix::fs::symlink("new", dir.path().join("..next")).unwrap();
        std::fs::rename(dir.path().join("..next"), data).unwrap();
        changed.await;
    }

    pub(in crate::istiod) fn jwt(claims: &str) -> String {
        let claims = BASE64_URL_SAFE_NO_PAD.encode(claims);
        format!("e30.{claims}.sig")
    }

    #[test]
    fn finds_the_expiry_of_a_jwt() {
        let at = |seconds| Some(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
        let padded = jwt(r#"{"exp":12}"#).replace(".sig", "==.sig");
        for (token, expected) in [
            (jwt(r#"{"exp":12,"aud":["a"]}"#), at(12)),
            (padded, at(12)),
            (jwt(r#"{"exp":-1}"#), None),
            (jwt(r#"{"exp":1e300}"#), None),
            (jwt(r#"{"exp":"12"}"#), None),
            (jwt("{}"), None),
            (jwt("no JSON"), None),
            ("a.!.c".to_owned(), None),
            ("opaque".to_owned(), None),
        ] {
            assert_eq!(claims(token.as_bytes()).and_then(|it| it.expiry()), expected, "{token}");
        }
    }

    #[test]
    fn an_expired_token_is_not_sent_with_a_client_certificate() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("istio-token");
        let reader = Reader::new(Source::File(path.clone()));
        for (claims, alone, with_certificate) in [
            (r#"{"exp":12}"#, true, false),
            (r#"{"exp":32503680000}"#, true, true),
            ("{}", true, true),
        ] {
            std::fs::write(&path, jwt(claims)).unwrap();
            assert_eq!(reader.authorization(false).is_some(), alone, "{claims}");
            assert_eq!(reader.authorization(true).is_some(), with_certificate, "{claims}");
        }
        assert_eq!(reader.last().claims.and_then(|claims| claims.expiry()), None);
        assert_eq!(Reader::new(Source::Mock).authorization(false).unwrap(), MOCK);
    }

    #[test]
    fn claims_name_one_audience_or_several() {
        for (text, expected) in [
            (r#"{"aud":"a","sub":"x"}"#, "a"),
            (r#"{"aud":["a","b",1]}"#, "a b"),
            (r#"{"aud":{}}"#, ""),
        ] {
            let claims = claims(jwt(text).as_bytes()).unwrap();
            assert_eq!(claims.audiences().join(" "), expected, "{text}");
        }
    }
}
