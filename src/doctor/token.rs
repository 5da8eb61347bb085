//! The token for istiod, and the roots istiod is verified with.

use std::path::Path;
use std::time::SystemTime;

use futures_util::future::join_all;
use http::HeaderValue;

use super::report::{Check, Level};
use super::{Subject, run_blocking};
use crate::clock::rfc3339;
use crate::config::Config;
use crate::duration::rounded;
use crate::istiod::Security;
use crate::istiod::token::{self, Claims, Source, State};
use crate::problem::codes::{ISTIOD_TOKEN_INVALID, ISTIOD_TOKEN_MISSING};
use crate::trust_anchors::{self, Roots};

/// What the group found.
#[derive(Default)]
pub(super) struct Found {
    pub(super) checks: Vec<Check>,
    /// As calls send it.
    pub(super) authorization: Option<HeaderValue>,
    /// What is known of the token.
    pub(super) token: State,
    /// Whether istiod cannot be verified.
    pub(super) has_no_roots: bool,
}

/// Reads token and roots.
pub(super) async fn read(subject: Subject<'_>) -> Found {
    let config = subject.config;
    let authorities = [Some(&config.istiod), config.ca_istiod.as_ref()];
    let roots = authorities.into_iter().flatten();
    let roots = roots.filter_map(|config| match &config.security {
        Security::Plaintext => None,
        Security::Tls(tls) => Some(tls.roots.clone()),
    });
    let mut roots: Vec<_> = roots.collect();
    roots.dedup();
    let checks_of_roots = join_all(roots.into_iter().map(check_roots));
    let (mut found, roots) = tokio::join!(read_token(config), checks_of_roots);
    found.has_no_roots = roots.iter().any(|check| check.level == Level::Error);
    found.checks.extend(roots);
    found
}

async fn read_token(config: &Config) -> Found {
    let mut found = Found::default();
    let Security::Tls(tls) = &config.istiod.security else {
        let why = "not sent: istiod does not authenticate plaintext connections";
        found.checks.push(Check::skipped("token", why));
        return found;
    };
    let path = match &config.istiod.token {
        Source::None => return found,
        Source::Mock => {
            found.authorization = Some(HeaderValue::from_static(token::MOCK));
            let mock = "the one of CREDENTIAL_FETCHER_TYPE=Mock";
            found.checks.push(Check::ok("token", mock));
            return found;
        }
        Source::File(path) => path.clone(),
    };
    let file = path.clone();
    let read = run_blocking(move || token::read(&file)).await;
    let read = read.unwrap_or_else(|late| Err(token::problem(ISTIOD_TOKEN_MISSING, &path, late)));
    let (claims, problem) = match read {
        Ok(token) => {
            found.authorization = Some(token.header);
            let claims = token.claims;
            let expired = claims.as_ref().and_then(|claims| claims.expired(&path));
            (claims, expired)
        }
        Err(problem) => (None, Some(problem)),
    };
    let mut check = match (&problem, &claims) {
        (Some(problem), _) => Check::of(problem),
        (None, Some(claims)) => life(&path, claims),
        (None, None) => {
            let problem = token::problem(ISTIOD_TOKEN_INVALID, &path, "is not a JSON web token");
            Check::problem(Level::Warning, &problem.consequence("istiod may refuse it"))
        }
    };
    found.token = State { claims, problem };
    if check.level == Level::Error && tls.client.is_some() {
        check.level = Level::Skipped;
        check.found += "; the client certificate is used";
    }
    found.checks.push(check);
    found
}

fn life(path: &Path, claims: &Claims) -> Check {
    let path = path.display();
    let Some(expiry) = claims.expiry() else {
        return Check::ok("token", format!("{path}, without expiry"));
    };
    let left = expiry.duration_since(SystemTime::now()).unwrap_or_default();
    let (left, at) = (rounded(left), rfc3339(expiry));
    Check::ok("token", format!("{path} expires in {left}, at {at}"))
}

async fn check_roots(roots: Roots) -> Check {
    let blocking = roots.clone();
    let read = run_blocking(move || trust_anchors::read(&blocking)).await;
    match read.unwrap_or_else(|late| Err(trust_anchors::unusable(&roots, late))) {
        Ok(anchors) => {
            let found = format!("{roots}, usable certificates: {}", anchors.store.len());
            Check::ok("roots for istiod", found)
        }
        Err(problem) => Check::of(&problem),
    }
}
