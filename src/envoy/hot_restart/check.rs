//! Whether there is something new to start, whether Envoy takes it, and beside what it would start.
//!
//! The inputs are read outside the agent's thread; the new binary is asked for its opinion on the
//! new bootstrap; the Envoy that serves is asked who it is. All of it under one limit.
//!
//! Does not start an Envoy that serves.

use std::sync::Arc;
use std::time::Duration;

use http::Method;
use serde_json::Value;

use super::machine::{Serving, Verdict};
use super::{Inputs, Launch, Prepared};
use crate::envoy::admin::{Admin, Error as AdminError};
use crate::envoy::child::Child;
use crate::envoy::command::{Command, Mode};
use crate::envoy::process::Ended;
use crate::envoy::reaper::Children;
use crate::lifecycle::{BoxError, with_causes};

/// How often a next Envoy is asked whether it serves.
const LOOK: Duration = Duration::from_millis(25);

pub(super) struct Check {
    pub(super) inputs: Arc<dyn Inputs>,
    pub(super) serving: Option<Launch>,
    pub(super) number: u32,
    pub(super) admin: Admin,
    pub(super) limit: Duration,
    pub(super) own: Children,
}

#[derive(Debug)]
pub(super) struct Checked {
    pub(super) verdict: Verdict,
    /// What can be started.
    pub(super) prepared: Option<Prepared>,
    /// Why nothing can.
    pub(super) reason: Option<String>,
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("Envoy refuses it with {ended}, its last words being {last:?}")]
    Invalid { ended: Ended, last: String },
    #[error("it took longer than {0:?} to read and check")]
    Late(Duration),
}

impl Check {
    pub(super) async fn run(self) -> Checked {
        let limit = self.limit;
        let checked = tokio::time::timeout(limit, self.prepare()).await;
        match checked.unwrap_or_else(|_| Err(Error::Late(limit).into())) {
            Ok((verdict, prepared)) => Checked {
                verdict,
                prepared,
                reason: None,
            },
            Err(error) => Checked {
                verdict: Verdict::Refused,
                prepared: None,
                reason: Some(with_causes(error.as_ref())),
            },
        }
    }

    async fn prepare(self) -> Result<(Verdict, Option<Prepared>), BoxError> {
        let (inputs, number) = (self.inputs, self.number);
        let prepared = tokio::task::spawn_blocking(move || inputs.read(number)).await??;
        let serving = self.serving.as_ref();
        if serving.is_some_and(|run| run.prepared.digest == prepared.digest) {
            return Ok((Verdict::Unchanged, None));
        }
        validate(&prepared.command, self.number, &self.own).await?;
        let place = serving.map(|run| run.place);
        let serving_state = serving_state(self.admin, place).await;
        Ok((Verdict::Usable(serving_state), Some(prepared)))
    }
}

/// Has Envoy read what it would start from.
async fn validate(command: &Command, number: u32, own: &Children) -> Result<(), BoxError> {
    let command = Command {
        mode: Mode::Validate,
        ..command.clone()
    };
    let mut child = Child::start(&command, number, own)?;
    let ended = child.process.ended().await?;
    let last = child.finish().await.pop().unwrap_or_default();
    match ended {
        Ended::Code(0) => Ok(()),
        ended => Err(Error::Invalid { ended, last }.into()),
    }
}

/// Who has the admin port, beside the Envoy that serves at this place.
async fn serving_state(admin: Admin, place: Option<u32>) -> Serving {
    match admin.request(Method::GET, "/server_info").await {
        Err(AdminError::Connect { .. }) => Serving::WithoutAdminPort,
        Ok(answer) => match (state_and_place(&answer.body), place) {
            (Some((State::Serving, found)), Some(place)) if found == place => Serving::Live,
            _ => Serving::Unexpected,
        },
        Err(_) => Serving::Unexpected,
    }
}

/// Returns when the Envoy at this place of its line serves.
pub(super) async fn live_at(admin: Admin, place: u32) {
    loop {
        if let Ok(answer) = admin.request(Method::GET, "/server_info").await
            && state_and_place(&answer.body) == Some((State::Serving, place))
        {
            return;
        }
        tokio::time::sleep(LOOK).await;
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Serving,
    Starting,
}

fn state_and_place(info: &[u8]) -> Option<(State, u32)> {
    let info: Value = serde_json::from_slice(info).ok()?;
    let state = match info.get("state")?.as_str()? {
        // One whose health check was failed on purpose serves on.
        "LIVE" | "DRAINING" => State::Serving,
        _ => State::Starting,
    };
    let place = info.pointer("/command_line_options/restart_epoch")?;
    Some((state, u32::try_from(place.as_u64()?).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_envoy_tells_its_state_and_its_place() {
        for (info, expected) in [
            (
                r#"{"state":"LIVE","command_line_options":{"restart_epoch":3}}"#,
                Some((State::Serving, 3)),
            ),
            (
                r#"{"state":"PRE_INITIALIZING","command_line_options":{"restart_epoch":0}}"#,
                Some((State::Starting, 0)),
            ),
            (r#"{"state":"LIVE","command_line_options":{}}"#, None),
            (
                r#"{"state":"LIVE","command_line_options":{"restart_epoch":-1}}"#,
                None,
            ),
            ("", None),
        ] {
            assert_eq!(state_and_place(info.as_bytes()), expected, "{info}");
        }
    }
}
