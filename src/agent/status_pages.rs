//! Builds the functions that serve the doctor's report and the debug pages of the status port.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::reload;
use crate::config::Config;
use crate::doctor::{self, Running};
use crate::report::Report;
use crate::runtime::lifecycle::with_causes;
use crate::scope;
use crate::status::{Doctor, Page};

/// Makes one doctor's report at a time. Requests that wait meanwhile get the same report, so none waits for two.
pub(super) fn doctor(config: Config, running: Running) -> Doctor {
    let subject = Arc::new((Ok(config), running));
    let last = Arc::new(Mutex::new(None));
    Arc::new(move |age: Duration| {
        let subject = subject.clone();
        let last = last.clone();
        let asked = Instant::now();
        Box::pin(async move {
            let mut last = last.lock().await;
            if let Some((made, report)) = &*last
                && asked.saturating_duration_since(*made) <= age
            {
                return Report::clone(report);
            }
            let (config, running) = &*subject;
            let report = doctor::report(config, Some(running), Vec::new()).await;
            *last = Some((Instant::now(), report.clone()));
            report
        })
    })
}

/// Shows the effective configuration. Reads it on a thread that may block.
pub(super) fn config(report: reload::EffectiveConfig) -> Page {
    Arc::new(move || {
        let report = report.clone();
        Box::pin(async move {
            let reported = tokio::task::spawn_blocking(move || report()).await;
            reported.unwrap_or_else(|panic| json!(panic.to_string()))
        })
    })
}

/// Shows the services that the workload uses. Reads them for one request at a time.
pub(super) fn scope(sources: scope::Sources) -> Page {
    let sources = Arc::new(Mutex::new(sources));
    Arc::new(move || {
        let sources = sources.clone();
        Box::pin(async move {
            match scope::observe(&*sources.lock().await).await {
                Ok(usage) => json!(usage),
                Err(error) => json!({ "error": with_causes(&*error) }),
            }
        })
    })
}
