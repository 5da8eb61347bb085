//! Explains a call that istiod or the certificate authority has not answered as it should.

use tonic::{Code, Status};

use super::Config;
use super::token::{Claims, State};
use crate::problem::{self, Problem, codes};

/// How much is kept of the text of an error, in characters.
pub const MAX_MESSAGE: usize = 1024;

/// What istiod expects unless its variable `TOKEN_AUDIENCES` says otherwise.
const AUDIENCE: &str = "istio-ca";

/// The problem with a call that ended with this status. `token` was sent with it. `unimplemented` is the
/// problem if istiod does not know the method.
pub fn explain(
    config: &Config,
    token: &State,
    unimplemented: &'static problem::Code,
    status: &Status,
) -> Problem {
    let found = format!(
        "{}: {:.MAX_MESSAGE$}",
        code_name(status.code()),
        status.message()
    );
    let code = match status.code() {
        Code::Unauthenticated => codes::ISTIOD_UNAUTHENTICATED,
        Code::PermissionDenied => codes::ISTIOD_PERMISSION_DENIED,
        Code::Unimplemented => unimplemented,
        Code::Unavailable => codes::ISTIOD_UNAVAILABLE,
        Code::DeadlineExceeded => codes::ISTIOD_NO_ANSWER,
        _ => codes::ISTIOD_ERROR,
    };
    let is_unknown = code == codes::ISTIOD_UNAUTHENTICATED;
    if let Some(problem) = token.problem.as_ref().filter(|_| is_unknown) {
        let found = format!("{found}; the {}: {}", problem.subject, problem.found);
        return config.problem(problem.code, found);
    }
    let audiences = token
        .claims
        .as_ref()
        .map(Claims::audiences)
        .unwrap_or_default();
    match audiences.is_empty() || audiences.contains(&AUDIENCE) {
        false if is_unknown => {
            let audiences = audiences.join(", ");
            let found = format!("{found}; the token is for {audiences}, not for {AUDIENCE}");
            config.problem(codes::ISTIOD_TOKEN_AUDIENCE, found)
        }
        _ => config.problem(code, found),
    }
}

/// The code as Go's gRPC library spells it: operators search logs for it.
pub fn code_name(code: Code) -> String {
    match code {
        Code::Cancelled => "Canceled".to_owned(),
        other => format!("{other:?}"),
    }
}
