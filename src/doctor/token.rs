//! The token for istiod, and the roots istiod is verified with.

use std::path::Path;

use futures_util::future::join_all;
use http::HeaderValue;

use super::report::{Check, Level};
use super::{Subject, run_blocking};
use crate::clock::{Clock, rfc3339};
use crate::config::Config;
use crate::duration::approximate;
use crate::istiod::Security;
use crate::istiod::token::{self, Claims, Source};
use crate::trust_anchors::{self, Roots};

/// What istiod expects unless its variable `TOKEN_AUDIENCES` says otherwise.
pub(super) const AUDIENCE: &str = "istio-ca";

const PROJECTED: &str = "mount the projected volume istio-token at /var/run/secrets/tokens, as \
                         sidecar injection does, or copy a new token to the machine";
const RENEWED: &str = "kubelet renews the file of a pod: look into its events; on a machine run \
                       istioctl x workload entry configure again";
const MOUNTED: &str = "mount the config map istio-ca-root-cert of the pod's namespace, which istiod \
                       writes: kubectl get configmap istio-ca-root-cert";

/// What the group found.
#[derive(Default)]
pub(super) struct Found {
    pub(super) checks: Vec<Check>,
    /// As calls send it.
    pub(super) authorization: Option<HeaderValue>,
    /// Those of a token.
    pub(super) audiences: Vec<String>,
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

impl Found {
    /// Whether istiod would refuse what the agent shows.
    pub(super) fn has_errors(&self) -> bool {
        self.checks.iter().any(|check| check.level == Level::Error)
    }
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
    let (file, shown) = (path.clone(), path.display());
    let read = run_blocking(move || token::read(&file)).await;
    let mut check = match read.unwrap_or_else(|late| Err(format!("{shown}: {late}"))) {
        Err(problem) => Check::error("token", problem)
            .expected("a token")
            .remedy(PROJECTED),
        Ok(token) => {
            found.authorization = Some(token.header);
            match token.claims {
                Some(claims) => {
                    found.audiences = claims.audiences().into_iter().map(str::to_owned).collect();
                    life(&path, &claims)
                }
                None => Check::warning("token", format!("{shown} holds no JSON web token"))
                    .expected("one signed by Kubernetes")
                    .remedy(PROJECTED),
            }
        }
    };
    if check.level == Level::Error && tls.client.is_some() {
        check.level = Level::Skipped;
        check.found += "; the client certificate is used";
    }
    found.checks.push(check);
    found
}

fn life(path: &Path, claims: &Claims) -> Check {
    let (path, now) = (path.display(), Clock::system().now());
    let Some(expiry) = claims.expiry() else {
        return Check::ok("token", format!("{path}, without expiry"));
    };
    let at = rfc3339(expiry);
    match expiry.duration_since(now) {
        Ok(left) => {
            let left = approximate(left.as_secs_f64());
            Check::ok("token", format!("{path} expires in {left}, at {at}"))
        }
        Err(late) => {
            let (ago, now) = (approximate(late.duration().as_secs_f64()), rfc3339(now));
            let found = format!("{path} expired {ago} ago, at {at}; it is {now} here");
            Check::error("token", found)
                .expected("a token that is valid")
                .remedy(RENEWED)
        }
    }
}

async fn check_roots(roots: Roots) -> Check {
    let name = "roots for istiod";
    let text = match &roots {
        Roots::File(path) => path.display().to_string(),
        Roots::System(_) => "the system".to_owned(),
    };
    let read = run_blocking(move || trust_anchors::read(&roots)).await;
    match read.unwrap_or_else(Err) {
        Ok(anchors) => {
            let usable = anchors.store.len();
            Check::ok(name, format!("{text}, usable certificates: {usable}"))
        }
        Err(problem) => Check::error(name, problem).expected("PEM").remedy(MOUNTED),
    }
}
