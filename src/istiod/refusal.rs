//! Explains the errors of calls to istiod and the certificate authority.

use std::error::Error as _;
use std::sync::Arc;
use std::time::Duration;

use http::header::CONTENT_TYPE;
use http::{HeaderValue, Response, StatusCode};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use tokio::time::timeout;
use tonic::{Code, Status};

use super::Config;
use super::token::{Claims, State};
use crate::problem::{self, Problem};

/// The stored length of the text of an error, in characters.
pub const MAX_MESSAGE: usize = 1024;

/// The characters that are shown of a body without gRPC and of its content type, and the time that the body is awaited.
const MAX_BODY: usize = 100;
const MAX_BODY_WAIT: Duration = Duration::from_millis(500);

/// The audience that istiod expects unless its variable `TOKEN_AUDIENCES` sets others.
const AUDIENCE: &str = "istio-ca";

/// Explains a call that ended with this status. `token` was sent with it. `unimplemented` is the code if
/// istiod does not know the method.
pub fn explain(
    config: &Config,
    token: &State,
    unimplemented: problem::Code,
    status: &Status,
) -> Problem {
    let message = status.message();
    let mut found = format!("{}: {message:.MAX_MESSAGE$}", code_name(status.code()));
    let code = match status.code() {
        Code::Unauthenticated => problem::Code::IstiodUnauthenticated,
        Code::PermissionDenied => problem::Code::IstiodPermissionDenied,
        // istiod signs for the identity of the token only.
        Code::InvalidArgument if message.contains("SAN Identities in CSR") => {
            problem::Code::IstiodPermissionDenied
        }
        Code::Unimplemented => unimplemented,
        Code::Unavailable => problem::Code::IstiodUnavailable,
        Code::DeadlineExceeded => problem::Code::IstiodNoAnswer,
        _ => problem::Code::IstiodError,
    };
    if status.source().is_some_and(|source| source.is::<NotGrpc>()) {
        return config.problem(problem::Code::IstiodNotGrpc, message);
    }
    let is_denied = code == problem::Code::IstiodPermissionDenied;
    let is_about_caller = is_denied || code == problem::Code::IstiodUnauthenticated;
    if is_about_caller && let Some(problem) = &token.problem {
        let found = format!("{found}; the {}: {}", problem.subject, problem.found);
        return config.problem(problem.code, found);
    }
    let identity = &config.identity;
    let claims = token.claims.as_ref();
    if is_denied && let Some((namespace, account)) = claims.and_then(Claims::service_account) {
        for (setting, configured, in_token) in [
            ("POD_NAMESPACE", &identity.namespace, namespace),
            ("SERVICE_ACCOUNT", &identity.service_account, account),
        ] {
            if configured != in_token {
                let found = format!(
                    "{found}; {setting} is {configured:?}, and the token is for {in_token}"
                );
                return config.problem(code, found).remedy(format!("set {setting} to {in_token}"));
            }
        }
    }
    let audiences = claims.map(Claims::audiences).unwrap_or_default();
    if is_about_caller && !audiences.is_empty() && !audiences.contains(&AUDIENCE) {
        let found =
            format!("{found}; the token is for {}, not for {AUDIENCE}", audiences.join(", "));
        return config.problem(problem::Code::IstiodTokenAudience, found);
    }
    if is_denied {
        found += &format!("; TRUST_DOMAIN is {:?}", identity.trust_domain);
    }
    config.problem(code, found)
}

/// The error of a server that answers over HTTP/2, but not in gRPC.
#[derive(Debug, thiserror::Error)]
#[error("not a gRPC server")]
struct NotGrpc;

/// Returns a response of a gRPC server unchanged. Otherwise fails with its HTTP status and the beginning of its body,
/// because a load balancer or proxy may answer in place of istiod.
pub async fn check_is_grpc(response: Response<Incoming>) -> Result<Response<Incoming>, Status> {
    let headers = response.headers();
    let kind = headers.get(CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
    if kind.starts_with(b"application/grpc") || headers.contains_key("grpc-status") {
        return Ok(response);
    }
    let kind: String = String::from_utf8_lossy(kind).chars().take(MAX_BODY).collect();
    let http_status = response.status();
    let frame = timeout(MAX_BODY_WAIT, response.into_body().frame()).await;
    let data = frame.ok().flatten().and_then(Result::ok).and_then(|frame| frame.into_data().ok());
    let body = String::from_utf8_lossy(&data.unwrap_or_default()).into_owned();
    let begin: String = body.trim().chars().take(MAX_BODY).collect();
    let message = format!("HTTP status {http_status}, {kind:?}, no gRPC: {begin:?}");
    let mut status = Status::new(grpc_code(http_status), message);
    status.set_source(Arc::new(NotGrpc));
    Err(status)
}

/// Maps an HTTP status to a gRPC code. Source: gRPC, "HTTP to gRPC Status Code Mapping".
fn grpc_code(status: StatusCode) -> Code {
    match status.as_u16() {
        400 => Code::Internal,
        401 => Code::Unauthenticated,
        403 => Code::PermissionDenied,
        404 => Code::Unimplemented,
        429 | 502 | 503 | 504 => Code::Unavailable,
        _ => Code::Unknown,
    }
}

/// Formats a code as Go's gRPC library does, because operators search logs for it.
pub fn code_name(code: Code) -> String {
    match code {
        Code::Cancelled => "Canceled".to_owned(),
        other => format!("{other:?}"),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::istiod::fake::plaintext;
    use crate::istiod::token;

    /// Returns the state of a reader that has read a token with these claims.
    fn state(claims: &str) -> State {
        let claims = token::claims(token::tests::jwt(claims).as_bytes());
        let expired = claims.as_ref().and_then(|it| it.expiry_problem(Path::new("/token")));
        State { claims, problem: expired }
    }

    /// Uses a configuration with the identity of account cart in namespace shop and trust domain
    /// cluster.local.
    #[test]
    fn a_refused_call_names_its_cause_the_setting_and_a_cure() {
        let (denied, unknown) = (Code::PermissionDenied, Code::Unauthenticated);
        let of = |account: &str| {
            format!(r#"{{"aud":["istio-ca"],"sub":"system:serviceaccount:{account}"}}"#)
        };
        let missing = token::read(Path::new("/nonexistent/token")).map(drop);
        let missing = State { problem: missing.err(), claims: None };
        let mut unset = plaintext("istiod:15012");
        unset.identity.namespace.clear();
        let token = state(&of("shop:cart"));
        let status = Status::new(denied, "why");
        let problem = explain(&unset, &token, problem::Code::IstiodError, &status);
        assert!(problem.found.contains("POD_NAMESPACE is \"\""), "{problem}");
        assert_eq!(problem.remedy, "set POD_NAMESPACE to shop");
        for (code, token, expected, found, remedy) in [
            (
                denied,
                state(&of("other:cart")),
                problem::Code::IstiodPermissionDenied,
                "POD_NAMESPACE is \"shop\"",
                "set POD_NAMESPACE to other",
            ),
            (
                denied,
                state(&of("shop:till")),
                problem::Code::IstiodPermissionDenied,
                "SERVICE_ACCOUNT is \"cart\"",
                "set SERVICE_ACCOUNT to till",
            ),
            (
                denied,
                state(&of("shop:cart")),
                problem::Code::IstiodPermissionDenied,
                "TRUST_DOMAIN is \"cluster.local\"",
                "kubectl get configmap istio",
            ),
            (
                denied,
                State::default(),
                problem::Code::IstiodPermissionDenied,
                "TRUST_DOMAIN is \"cluster.local\"",
                "compare `TRUST_DOMAIN`",
            ),
            (
                denied,
                state(r#"{"aud":"vault"}"#),
                problem::Code::IstiodTokenAudience,
                "for vault, not for istio-ca",
                "TOKEN_AUDIENCES",
            ),
            (
                unknown,
                state(r#"{"aud":["a","b"]}"#),
                problem::Code::IstiodTokenAudience,
                "for a, b, not",
                "audience of the projected volume",
            ),
            (
                unknown,
                state(r#"{"exp":12}"#),
                problem::Code::IstiodTokenExpired,
                "expired ",
                "date -u",
            ),
            (
                unknown,
                missing,
                problem::Code::IstiodTokenMissing,
                "/nonexistent/token: No such file",
                "mount the projected volume",
            ),
            (
                unknown,
                state(&of("shop:cart")),
                problem::Code::IstiodUnauthenticated,
                "why",
                "ISTIO_META_CLUSTER_ID",
            ),
            (
                Code::InvalidArgument,
                state(&of("shop:cart")),
                problem::Code::IstiodPermissionDenied,
                "TRUST_DOMAIN is \"cluster.local\"",
                "compare `TRUST_DOMAIN`",
            ),
            (
                Code::Unimplemented,
                State::default(),
                problem::Code::IstiodWithoutDelta,
                "Unimplemented",
                "ISTIO_DELTA_XDS=false",
            ),
            (
                Code::Unavailable,
                state(r#"{"exp":12}"#),
                problem::Code::IstiodUnavailable,
                "why",
                "kubectl get pods",
            ),
            (
                Code::Internal,
                State::default(),
                problem::Code::IstiodError,
                "Internal: why",
                "kubectl logs",
            ),
        ] {
            let status = Status::new(code, "why: SAN Identities in CSR");
            let config = plaintext("istiod:15012");
            let problem = explain(&config, &token, problem::Code::IstiodWithoutDelta, &status);
            assert_eq!(problem.code, expected, "{problem}");
            assert!(problem.subject.contains("discoveryAddress"), "{problem}");
            assert!(problem.found.contains(found), "{found:?}: {problem}");
            assert!(problem.remedy.contains(remedy), "{remedy:?}: {problem}");
        }
    }
}
