//! Lists the levels of the log, and sets them: `?level=debug`, for one scope (`&scope=sds`) or all,
//! permanently or for a period (`&for=10m`).

use std::collections::BTreeMap;
use std::time::Duration;

use ::http::request::Parts;
use ::http::{Method, Response, StatusCode};

use super::{Body, reply};
use crate::logging;
use crate::problem::{Code, Problem};
use crate::runtime::duration;

const MAX_PERIOD: Duration = Duration::from_secs(24 * 60 * 60);

pub(super) fn answer(head: &Parts) -> Response<Body> {
    let result = match head.method {
        Method::GET | Method::HEAD => Ok(()),
        Method::POST | Method::PUT => set(head.uri.query().unwrap_or_default()),
        _ => return reply::method_not_allowed(),
    };
    if let Err(error) = result {
        return reply::refusal(StatusCode::BAD_REQUEST, format!("{error}\n"));
    }
    reply::json(Some(logging::levels().scopes()))
}

fn set(query: &str) -> Result<(), Problem> {
    const QUERY: &str = "level, scope and for, each with a value and once";
    let invalid = Code::ArgumentInvalid;
    let mut members = BTreeMap::from([("level", None), ("scope", None), ("for", None)]);
    for member in query.split('&').filter(|member| !member.is_empty()) {
        let (name, value) = member.split_once('=').unwrap_or_default();
        match members.get_mut(name) {
            Some(unset @ None) => *unset = Some(value),
            _ => return Err(Problem::value(invalid, "the query", member, QUERY)),
        }
    }
    let level = members["level"]
        .ok_or_else(|| Problem::new(invalid, "the query", "does not have a level"))?;
    let scope = members["scope"].filter(|scope| *scope != "all");
    let period = members["for"].map(read_period).transpose()?;
    logging::levels().set(scope, level, period)
}

fn read_period(text: &str) -> Result<Duration, Problem> {
    match duration::parse(text) {
        Some(period) if !period.is_zero() && period <= MAX_PERIOD => Ok(period),
        _ => {
            let expected = "a duration such as 10m, more than 0 and at most 24h";
            Err(Problem::value(Code::ArgumentInvalid, "for", text, expected))
        }
    }
}
