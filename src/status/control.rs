//! The end of Envoy and of the agent, on request.
//!
//! Whoever asks the agent to quit has the answer before the agent acts on it.
//!
//! Does not carry anything out: `stop` and Envoy's handle do.

use std::time::Duration;

use ::http::{Response, StatusCode};
use http_body_util::BodyExt;
use serde_json::json;
use tokio::sync::watch;

use super::held::Held;
use super::{Body, Sources, reply};
use crate::envoy::handle::Envoy;
use crate::lifecycle::{Stop, StopRequest, Urgency};

/// Longer than Envoy's admin port may take to answer.
const LIMIT: Duration = Duration::from_secs(10);

pub(super) struct Control {
    stop: Stop,
    asked: watch::Receiver<StopRequest>,
    envoy: Option<Envoy>,
}

impl Control {
    pub(super) fn new(sources: &Sources) -> Self {
        Self {
            stop: sources.stop.clone(),
            asked: sources.stop.requested(),
            envoy: sources.envoy.clone(),
        }
    }

    pub(super) fn quit(&self) -> Response<Body> {
        let asking = Asking(self.stop.clone());
        reply::plain(StatusCode::OK, "OK").map(|body| Held::new(body, asking).boxed_unsync())
    }

    /// Has Envoy send its clients away. Without Envoy there is nothing to do.
    pub(super) async fn drain(&self) -> Response<Body> {
        if let Some(envoy) = &self.envoy
            && tokio::time::timeout(LIMIT, envoy.drain()).await.is_err()
        {
            tracing::warn!(
                "/drain: Envoy has not been told within {LIMIT:?}; answering all the same"
            );
        }
        reply::plain(StatusCode::OK, "OK")
    }

    pub(super) fn progress(&self) -> Response<Body> {
        let asked = self.asked.borrow().clone();
        let envoy = self.envoy.as_ref();
        let report = envoy.map(|envoy| envoy.report().borrow().clone());
        reply::json(
            StatusCode::OK,
            &json!({
                "asked": format!("{:?}", asked.urgency).to_lowercase(),
                "cause": asked.cause,
                "envoy": report,
            }),
        )
    }
}

/// Asks the agent to end when it is dropped.
struct Asking(Stop);

impl Drop for Asking {
    fn drop(&mut self) {
        self.0.request(Urgency::Terminate, "/quitquitquit called");
    }
}
