//! Checks whether there is something new to start, and beside which Envoy it would start.
//!
//! What Envoy starts from is read outside the agent's thread; the new binary validates the new
//! bootstrap; the Envoy that serves is asked for its state.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Response};
use serde_json::Value;

use super::Prepare;
use crate::envoy::admin::Admin;
use crate::envoy::command::Mode;
use crate::envoy::instance::Instance;
use crate::envoy::launch::{Launch, Prepared};
use crate::envoy::process::Ended;
use crate::lifecycle::BoxError;

/// How often a successor is asked whether it serves.
const PERIOD: Duration = Duration::from_millis(25);

#[derive(Debug)]
pub(in crate::envoy) enum Checked {
    Unchanged,
    /// What was read cannot be used, for this reason.
    Refused(String),
    /// This can be started.
    Usable {
        /// Whether the Envoy that serves has answered at its admin port.
        is_live: bool,
        prepared: Arc<Prepared>,
    },
}

/// Checks what the Envoy of this epoch would start from, beside the one that serves.
pub(super) async fn check(
    prepare: Prepare,
    epoch: u32,
    serving: Option<Launch>,
    admin: Admin,
) -> Result<Checked, BoxError> {
    let prepared = tokio::task::spawn_blocking(move || prepare(epoch)).await??;
    let serving = serving.as_ref();
    if serving.is_some_and(|launch| launch.prepared.digest == prepared.digest) {
        return Ok(Checked::Unchanged);
    }
    let prepared = Arc::new(prepared);
    validate(Arc::clone(&prepared), epoch).await?;
    let answer = admin.request(Method::GET, "/server_info").await;
    let found = answer.ok().as_ref().and_then(serves);
    let is_live = found.is_some() && found == serving.map(Launch::restart_epoch);
    Ok(Checked::Usable { is_live, prepared })
}

/// Has Envoy read what it would start from.
async fn validate(prepared: Arc<Prepared>, epoch: u32) -> Result<(), BoxError> {
    let launch = Launch {
        prepared,
        base_id: None,
        mode: Mode::Validate,
    };
    let mut envoy = Instance::start(launch, epoch)?;
    let ended = envoy.process.ended().await?;
    let reason = envoy.output.reason().await;
    match ended {
        Ended::Code(0) => Ok(()),
        ended => Err(format!("Envoy rejected the bootstrap ({ended}): {reason}").into()),
    }
}

/// Returns when the Envoy of this restart epoch serves.
pub(super) async fn live_at(admin: Admin, epoch: u32) {
    let is_live = |answer: &Response<Bytes>| serves(answer) == Some(epoch);
    admin.until("/server_info", PERIOD, is_live).await;
}

/// The restart epoch of an Envoy that serves.
fn serves(info: &Response<Bytes>) -> Option<u32> {
    let info: Value = serde_json::from_slice(info.body()).ok()?;
    // One whose health check was failed on purpose serves on.
    let serves = ["LIVE", "DRAINING"].contains(&info.get("state")?.as_str()?);
    let epoch = info.pointer("/command_line_options/restart_epoch")?;
    u32::try_from(epoch.as_u64()?).ok().filter(|_| serves)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_envoy_tells_its_restart_epoch_once_it_serves() {
        let info =
            |state, epoch| format!(r#"{{"state":"{state}","command_line_options":{{{epoch}}}}}"#);
        for (info, expected) in [
            (info("LIVE", r#""restart_epoch":3"#), Some(3)),
            (info("DRAINING", r#""restart_epoch":0"#), Some(0)),
            (info("PRE_INITIALIZING", r#""restart_epoch":0"#), None),
            (info("LIVE", ""), None),
            (info("LIVE", r#""restart_epoch":-1"#), None),
            (String::new(), None),
        ] {
            let answer = Response::new(Bytes::from(info.clone()));
            assert_eq!(serves(&answer), expected, "{info}");
        }
    }
}
