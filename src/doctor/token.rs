//! The token for istiod, and the roots istiod is verified with.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use http::HeaderValue;

use super::certificates::{Facts, latest};
use super::report::{Check, Level};
use super::{Subject, aside};
use crate::clock::{Clock, rfc3339};
use crate::config::Config;
use crate::duration::approximate;
use crate::istiod::Security;
use crate::istiod::token::{self, Claims, Source};
use crate::regular_file;
use crate::trust_anchors::{self, LARGEST, Roots};

/// What istiod expects unless its variable `TOKEN_AUDIENCES` says otherwise.
const AUDIENCE: &str = "istio-ca";

const PROJECTED: &str = "mount the projected volume istio-token at /var/run/secrets/tokens, as \
                         sidecar injection does, or copy a new token to the machine";
const RENEWED: &str = "kubelet renews the file of a pod: look into its events; on a machine run \
                       istioctl x workload entry configure again";
const MOUNTED: &str = "mount the config map istio-ca-root-cert of the pod's namespace, which istiod \
                       writes: kubectl get configmap istio-ca-root-cert";

/// What the group found.
pub(super) struct Found {
    pub(super) checks: Vec<Check>,
    /// As calls send it.
    pub(super) authorization: Option<HeaderValue>,
    has_no_roots: bool,
    /// Of a token that names none that istiod is known to expect.
    foreign_audiences: Option<Vec<String>>,
}

/// Reads token and roots.
pub(super) async fn read(subject: Subject<'_>) -> Found {
    let config = subject.config;
    let authorities = [Some(&config.istiod), config.ca_istiod.as_ref()];
    let mut roots: Vec<_> = authorities
        .into_iter()
        .flatten()
        .filter_map(roots_of)
        .collect();
    roots.dedup();
    let (mut found, roots) = tokio::join!(
        read_token(config),
        futures_util::future::join_all(roots.into_iter().map(check_roots))
    );
    let roots: Vec<_> = roots.into_iter().flatten().collect();
    found.has_no_roots = roots.iter().any(|check| check.level == Level::Error);
    found.checks.extend(roots);
    found
}

impl Found {
    /// Whether istiod would refuse what the agent shows.
    pub(super) fn has_errors(&self) -> bool {
        self.checks.iter().any(|check| check.level == Level::Error)
    }

    /// Whether istiod cannot be verified.
    pub(super) fn has_no_roots(&self) -> bool {
        self.has_no_roots
    }

    /// The checks, now that it is known whether istiod accepts the token.
    pub(super) fn into_checks(mut self, accepted: Option<bool>) -> Vec<Check> {
        if let Some(audiences) = self.foreign_audiences.filter(|_| accepted != Some(true)) {
            let found = format!("{audiences:?}");
            let check = match accepted {
                Some(_) => Check::error("audience of the token", found + ", refused by istiod"),
                None => Check::warning("audience of the token", found),
            };
            let remedy = "set the audience of the projected volume istio-token, or TOKEN_AUDIENCES \
                          of istiod";
            self.checks
                .insert(1, check.expected(AUDIENCE).remedy(remedy));
        }
        self.checks
    }
}

fn roots_of(config: &crate::istiod::Config) -> Option<Roots> {
    match &config.security {
        Security::Plaintext => None,
        Security::Tls(tls) => Some(tls.roots.clone()),
    }
}

async fn read_token(config: &Config) -> Found {
    let mut found = Found {
        checks: Vec::new(),
        authorization: None,
        has_no_roots: false,
        foreign_audiences: None,
    };
    let path = match (&config.istiod.security, &config.istiod.token) {
        (Security::Plaintext, _) => {
            let why = "not sent: istiod does not authenticate plaintext connections";
            found.checks.push(Check::skipped("token", why));
            return found;
        }
        (_, Source::None) => return found,
        (_, Source::Mock) => {
            found.authorization = Some(HeaderValue::from_static(token::MOCK));
            let mock = "the one of CREDENTIAL_FETCHER_TYPE=Mock";
            found.checks.push(Check::ok("token", mock));
            return found;
        }
        (_, Source::File(path)) => path.clone(),
    };
    let (file, client) = (path.clone(), client_certificate(config));
    let read = aside(move || {
        let client = client.and_then(|chain| regular_file::read(&chain, LARGEST).ok());
        let leaf = client.and_then(|pem| Facts::of_pem(&pem).into_iter().next());
        // The agent sends the token in place of one that has expired.
        let has_client = leaf.is_some_and(|leaf| leaf.not_after > SystemTime::now());
        (token::read(&file), has_client)
    });
    let (token, has_client) = match read.await {
        Ok(read) => read,
        Err(late) => (Err(format!("{}: {late}", path.display())), false),
    };
    let token = match token {
        Ok(token) => token,
        Err(problem) if has_client => {
            let instead = format!("{problem}; the client certificate is used");
            found.checks.push(Check::skipped("token", instead));
            return found;
        }
        Err(problem) => {
            let check = Check::error("token", problem);
            found
                .checks
                .push(check.expected("a token").remedy(PROJECTED));
            return found;
        }
    };
    found.authorization = Some(token.header);
    let Some(claims) = token.claims else {
        let problem = format!("{} holds no JSON web token", path.display());
        let check = Check::warning("token", problem).expected("one signed by Kubernetes");
        found.checks.push(check.remedy(PROJECTED));
        return found;
    };
    found.checks.push(life(&path, &claims, has_client));
    found.checks.extend(issued(&claims));
    found.checks.extend(account(&claims, config));
    let audience = config
        .google_token
        .as_ref()
        .map(|token| token.audience.as_str());
    let audiences = claims.audiences();
    if !audiences.contains(&audience.unwrap_or(AUDIENCE)) {
        let audiences = audiences.into_iter().map(str::to_owned).collect();
        found.foreign_audiences = Some(audiences);
    }
    found
}

/// The file of the client certificate, which authenticates the agent as well.
fn client_certificate(config: &Config) -> Option<PathBuf> {
    match &config.istiod.security {
        Security::Plaintext => None,
        Security::Tls(tls) => tls.client.as_ref().map(|client| client.chain.clone()),
    }
}

fn life(path: &Path, claims: &Claims, has_client: bool) -> Check {
    let now = Clock::system().now();
    let Some(expiry) = claims.expiry() else {
        return Check::ok("token", format!("{}, without expiry", path.display()));
    };
    let (path, at) = (path.display(), rfc3339(expiry));
    match expiry.duration_since(now) {
        Ok(left) => Check::ok(
            "token",
            format!(
                "{path} expires in {}, at {at}",
                approximate(left.as_secs_f64())
            ),
        ),
        Err(late) => {
            let ago = approximate(late.duration().as_secs_f64());
            let found = format!(
                "{path} expired {ago} ago, at {at}; it is {} here",
                rfc3339(now)
            );
            let check = match has_client {
                true => Check::skipped("token", found + "; the client certificate is used"),
                false => Check::error("token", found),
            };
            check.expected("a token that is valid").remedy(RENEWED)
        }
    }
}

/// The clock against the time the token was issued at, with a minute for a clock that is set often.
fn issued(claims: &Claims) -> Option<Check> {
    let now = Clock::system().now();
    let issued = claims.issued()?;
    let ahead = issued
        .duration_since(now)
        .ok()
        .filter(|ahead| ahead.as_secs() > 60)?;
    let found = format!(
        "the token was issued at {}, {} from now",
        rfc3339(issued),
        approximate(ahead.as_secs_f64())
    );
    let remedy = "set the clock of this machine, as certificates are refused as not valid yet";
    Some(
        Check::warning("clock", found)
            .expected("a time in the past")
            .remedy(remedy),
    )
}

/// The account of the token against the one that is configured.
fn account(claims: &Claims, config: &Config) -> Option<Check> {
    let identity = &config.secrets.renewal.identity;
    let subject = claims.subject()?.strip_prefix("system:serviceaccount:")?;
    let expected = format!("{}:{}", identity.namespace, identity.service_account);
    let is_foreign = subject != expected && !identity.service_account.is_empty();
    is_foreign.then(|| {
        let remedy = "set POD_NAMESPACE and SERVICE_ACCOUNT to the account of the token";
        let check = Check::warning("account of the token", subject);
        check.expected(expected).remedy(remedy)
    })
}

async fn check_roots(roots: Roots) -> Vec<Check> {
    let name = "roots for istiod";
    let text = match &roots {
        Roots::File(path) => path.display().to_string(),
        Roots::System(_) => "the system".to_owned(),
    };
    let read = aside(move || {
        let store = trust_anchors::read(&roots)?;
        let pem = match &roots {
            Roots::File(path) => regular_file::read(path, LARGEST).ok(),
            Roots::System(_) => None,
        };
        Ok((
            store.len(),
            pem.map(|pem| Facts::of_pem(&pem)).unwrap_or_default(),
        ))
    });
    let (count, facts) = match read.await.unwrap_or_else(Err) {
        Ok(found) => found,
        Err(problem) => {
            return vec![Check::error(name, problem).expected("PEM").remedy(MOUNTED)];
        }
    };
    let now = SystemTime::now();
    let usable = Check::ok(name, format!("{text}, usable certificates: {count}"));
    let life = latest(&facts, now).map(|facts| facts.life("root certificate", MOUNTED, now));
    std::iter::once(usable).chain(life).collect()
}
