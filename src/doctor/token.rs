//! Checks the token for istiod, and the roots with which istiod is verified.

use std::path::Path;
use std::time::SystemTime;

use futures_util::future::join_all;
use http::HeaderValue;

use super::{Subject, checked, run_blocking};
use crate::config::Config;
use crate::istiod::Security;
use crate::istiod::token::{self, Claims, Source, State};
use crate::problem::{Code, Level};
use crate::report::Check;
use crate::runtime::clock::rfc3339;
use crate::runtime::duration::rounded;
use crate::trust::trust_anchors::{self, Roots};

#[derive(Default)]
pub(super) struct Credentials {
    pub(super) checks: Vec<Check>,
    /// The header of requests.
    pub(super) authorization: Option<HeaderValue>,
    pub(super) token: State,
    /// True if istiod cannot be verified.
    pub(super) lacks_roots: bool,
}

pub(super) async fn read(subject: Subject<'_>) -> Credentials {
    let config = subject.config;
    let servers = std::iter::once(&config.istiod).chain(&config.ca_istiod);
    let roots = servers.filter_map(|server| match &server.security {
        Security::Plaintext => None,
        Security::Tls(tls) => Some(tls.roots.clone()),
    });
    let mut roots = Vec::from_iter(roots);
    roots.dedup();
    let (mut credentials, checks) =
        tokio::join!(read_token(config), join_all(roots.into_iter().map(check_roots)));
    credentials.lacks_roots = checks.iter().any(|check| check.level == Level::Error);
    credentials.checks.extend(checks);
    credentials
}

async fn read_token(config: &Config) -> Credentials {
    let mut credentials = Credentials::default();
    let Security::Tls(tls) = &config.istiod.security else {
        let why = "not sent: istiod does not authenticate plaintext connections";
        credentials.checks.push(Check::skipped("token", why));
        return credentials;
    };
    let path = match &config.istiod.token {
        Source::None => return credentials,
        Source::Mock => {
            credentials.authorization = Some(HeaderValue::from_static(token::MOCK));
            credentials.checks.push(Check::ok("token", "the one of CREDENTIAL_FETCHER_TYPE=Mock"));
            return credentials;
        }
        Source::File(path) => path.clone(),
    };
    let file = path.clone();
    let read = run_blocking(move || token::read(&file))
        .await
        .unwrap_or_else(|late| Err(token::problem(Code::IstiodTokenMissing, &path, late)));
    let (claims, problem) = match read {
        Ok(token) => {
            credentials.authorization = Some(token.header);
            let expired = token.claims.as_ref().and_then(|it| it.expiry_problem(&path));
            (token.claims, expired)
        }
        Err(problem) => (None, Some(problem)),
    };
    let mut check = match (&problem, &claims) {
        (Some(problem), _) => Check::from(problem),
        (None, Some(claims)) => valid(&path, claims),
        (None, None) => {
            let problem =
                token::problem(Code::IstiodTokenInvalid, &path, "is not a JSON web token");
            Check::with_level(Level::Warning, &problem.consequence("istiod may refuse it"))
        }
    };
    credentials.token = State { claims, problem };
    if check.level == Level::Error && tls.client.is_some() {
        check.level = Level::Skipped;
        check.found += "; the client certificate is used";
    }
    credentials.checks.push(check);
    credentials
}

fn valid(path: &Path, claims: &Claims) -> Check {
    let path = path.display();
    let Some(expiry) = claims.expiry() else {
        return Check::ok("token", format!("{path}, without expiry"));
    };
    let validity = expiry.duration_since(SystemTime::now()).unwrap_or_default();
    Check::ok("token", format!("{path} expires in {}, at {}", rounded(validity), rfc3339(expiry)))
}

async fn check_roots(roots: Roots) -> Check {
    let blocking = roots.clone();
    let read = run_blocking(move || trust_anchors::read(&blocking))
        .await
        .unwrap_or_else(|late| Err(trust_anchors::unusable(&roots, late)));
    let found = read.map(|it| format!("{roots}, usable certificates: {}", it.store.len()));

    checked("roots for istiod", found)
}
