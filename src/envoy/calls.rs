//! What Envoy is asked for over its admin port on its way up and down.
//!
//! Each call ends in an event for the machine, whatever Envoy answers and whether it does; each
//! exchange has a deadline. A failure is logged here, with what follows from it.
//!
//! Does not wait for what the calls bring about.

use std::time::Duration;

use http::Method;
use tokio::time::Instant;

use super::admin::{Admin, Answer, Error};
use super::machine::Event;

/// How often a starting Envoy is asked whether it serves, and for how long that often. An Envoy that
/// waits for its configuration does so for long.
const LOOK: Duration = Duration::from_millis(25);
const LOOK_FOR: Duration = Duration::from_secs(5);
const LOOK_LATER: Duration = Duration::from_secs(1);

/// Asks a starting Envoy until it serves.
pub(super) async fn live(admin: Admin) -> Event {
    let often_until = Instant::now() + LOOK_FOR;
    loop {
        let answer = admin.request(Method::GET, "/ready").await;
        if answer.is_ok_and(|answer| answer.status.is_success()) {
            return Event::Live;
        }
        let is_new = Instant::now() < often_until;
        tokio::time::sleep(if is_new { LOOK } else { LOOK_LATER }).await;
    }
}

/// Tells Envoy to drain. A failure is no reason to keep Envoy: what follows does either way.
pub(super) async fn drain(admin: Admin, inbound_only: bool, stays: bool) {
    note(admin.drain_listeners(inbound_only, stays).await, "drain");
}

/// Has Envoy let in nothing new. A failure is no reason to keep Envoy either.
pub(super) async fn close(admin: Admin, inbound_only: bool) {
    note(admin.close_listeners(inbound_only).await, "close");
}

fn note(answer: Result<Answer, Error>, what: &str) {
    match answer {
        Ok(answer) if answer.status.is_success() => {}
        Ok(answer) => tracing::warn!(
            status = answer.status.as_u16(),
            "Envoy refused to {what} its listeners; going on all the same"
        ),
        Err(error) => warn(
            &error,
            &format!("failed to {what} listeners; going on all the same"),
        ),
    }
}

/// Asks Envoy to write what it has to and end. Its end is heard of elsewhere, and may overtake the
/// answer.
pub(super) async fn quit(admin: Admin) -> Event {
    match admin.request(Method::POST, "/quitquitquit").await {
        Ok(answer) if answer.status.is_success() => Event::Answered,
        Err(Error::Exchange { .. }) => Event::Answered,
        Ok(answer) => {
            let status = answer.status.as_u16();
            tracing::warn!(status, "Envoy refused to quit; terminating it");
            Event::QuitRefused
        }
        Err(error) => {
            warn(&error, "cannot ask Envoy to quit; terminating it");
            Event::QuitRefused
        }
    }
}

pub(super) fn warn(error: &dyn std::error::Error, decision: &str) {
    let cause = error.source().map(ToString::to_string);
    tracing::warn!(%error, cause, "{decision}");
}
