//! What the supervisor asks of Envoy's admin port.
//!
//! A failure is logged with what follows from it, and ends a step like an answer does.

use std::time::Duration;

use bytes::Bytes;
use http::{Method, Response};

use super::admin::{Admin, Error};
use super::machine::Event;
use super::shutdown::Step;
use super::warn;

/// Between two questions to an Envoy that waits for its configuration, which may take long.
const PERIOD: Duration = Duration::from_secs(1);

/// Asks a starting Envoy until it serves.
pub(super) async fn live(admin: Admin) -> Event {
    let is_live = |answer: &Response<Bytes>| answer.status().is_success();
    admin.until("/ready", PERIOD, is_live).await;
    Event::Live
}

pub(super) async fn drain(admin: Admin, inbound_only: bool, stays: bool) {
    note(admin.drain_listeners(inbound_only, stays).await, "drain");
}

pub(super) async fn close(admin: Admin, inbound_only: bool) {
    note(admin.close_listeners(inbound_only).await, "close");
}

fn note(answer: Result<Response<Bytes>, Error>, what: &str) {
    match answer {
        Ok(answer) if answer.status().is_success() => {}
        Ok(answer) => tracing::warn!(
            status = answer.status().as_u16(),
            "Envoy refused to {what} its listeners; going on all the same"
        ),
        Err(error) => warn(
            &error,
            &format!("failed to {what} listeners; going on all the same"),
        ),
    }
}

/// Asks Envoy to flush its logs and end. Returns if Envoy cannot be asked: its end is waited for
/// elsewhere, and may come before the answer.
pub(super) async fn quit(admin: Admin) -> Event {
    match admin.request(Method::POST, "/quitquitquit").await {
        Ok(answer) if !answer.status().is_success() => {
            let status = answer.status().as_u16();
            tracing::warn!(status, "Envoy refused to quit; terminating it");
        }
        Err(error) if !error.is_broken() => {
            warn(&error, "cannot ask Envoy to quit; terminating it");
        }
        _ => std::future::pending().await,
    }
    Event::Done(Step::Quit)
}
