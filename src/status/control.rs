//! Drain and shutdown on request.

use std::time::Duration;

use ::http::{Response, StatusCode};
use serde_json::json;

use super::{Body, Sources, reply};
use crate::envoy::handle::Envoy;
use crate::lifecycle::{Stop, Urgency};

/// Longer than Envoy's admin port may take to answer.
const LIMIT: Duration = Duration::from_secs(10);

/// Ends the agent once the answer has been sent.
pub(super) fn quit(stop: &Stop) -> Response<Body> {
    let asking = AskOnDrop(stop.clone());
    reply::plain(StatusCode::OK, "OK").map(|body| reply::holding(body, asking))
}

/// Has Envoy drain its listeners, if there is an Envoy.
pub(super) async fn drain(sources: &Sources) -> Response<Body> {
    if let Some(envoy) = &sources.envoy
        && tokio::time::timeout(LIMIT, envoy.drain()).await.is_err()
    {
        tracing::warn!("/drain: Envoy has not been told within {LIMIT:?}; answering all the same");
    }
    reply::plain(StatusCode::OK, "OK")
}

pub(super) fn progress(sources: &Sources) -> Response<Body> {
    let asked = sources.stop.requested().borrow().clone();
    let report = sources.envoy.as_ref().map(Envoy::snapshot);
    reply::json(Some(json!({
        "asked": format!("{:?}", asked.urgency).to_lowercase(),
        "cause": asked.cause,
        "envoy": report,
    })))
}

/// Asks the agent to end when it is dropped.
struct AskOnDrop(Stop);

impl Drop for AskOnDrop {
    fn drop(&mut self) {
        self.0.request(Urgency::Terminate, "/quitquitquit called");
    }
}
