//! Lists the levels of the log, and sets them: `?level=debug`, for one scope (`&scope=sds`) or all, until
//! it is changed or for a while (`&for=10m`).

use std::time::Duration;

use ::http::request::Parts;
use ::http::{Method, Response, StatusCode};
use serde_json::json;

use super::{Body, reply};
use crate::problem::Problem;
use crate::{duration, logging};

const MAX_PERIOD: Duration = Duration::from_secs(24 * 60 * 60);

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Set(#[from] Problem),
    #[error("the query has {0:?}, expected level, scope and for, each with a value and once")]
    Member(String),
    #[error("the query has no level")]
    NoLevel,
    #[error(
        "for is {0:?}, expected a duration such as 10m, more than 0 and at most {MAX_PERIOD:?}"
    )]
    Period(String),
}

pub(super) fn answer(head: &Parts) -> Response<Body> {
    let is_to_set = match head.method {
        Method::GET | Method::HEAD => false,
        Method::POST | Method::PUT => true,
        _ => return reply::method_not_allowed(),
    };
    if is_to_set && let Err(error) = set(head.uri.query().unwrap_or_default()) {
        return reply::refusal(StatusCode::BAD_REQUEST, format!("{error}\n"));
    }
    reply::json(Some(json!(logging::levels().scopes())))
}

fn set(query: &str) -> Result<(), Error> {
    let (mut level, mut scope, mut period) = (None, None, None);
    for member in query.split('&').filter(|member| !member.is_empty()) {
        let place = match member.split_once('=') {
            Some(("level", value)) => (&mut level, value),
            Some(("scope", value)) => (&mut scope, value),
            Some(("for", value)) => (&mut period, value),
            _ => return Err(Error::Member(member.to_owned())),
        };
        if place.0.replace(place.1).is_some() {
            return Err(Error::Member(member.to_owned()));
        }
    }
    let level = level.ok_or(Error::NoLevel)?;
    let scope = scope.filter(|scope| *scope != "all");
    let period = period.map(read_period).transpose()?;
    Ok(logging::levels().set(scope, level, period)?)
}

fn read_period(text: &str) -> Result<Duration, Error> {
    let period = duration::parse(text);
    period
        .filter(|period| !period.is_zero() && *period <= MAX_PERIOD)
        .ok_or_else(|| Error::Period(text.to_owned()))
}
