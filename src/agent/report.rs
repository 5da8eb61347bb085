//! The page of the doctor.

use std::sync::Arc;

use serde_json::{Value, json};
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::config::Config;
use crate::doctor::{self, Running};
use crate::status::Page;

/// Makes one report at a time. Requests that wait for it get the same, so none waits for two.
pub(super) fn page(config: Config, running: Running) -> Page {
    let subject = Arc::new((Ok(config), running));
    let last = Arc::new(Mutex::new(None));
    Arc::new(move || {
        let (subject, last) = (subject.clone(), last.clone());
        let asked = Instant::now();
        Box::pin(async move {
            let mut last = last.lock().await;
            if let Some((made, report)) = &*last
                && *made >= asked
            {
                return Value::clone(report);
            }
            let (config, running) = &*subject;
            let report = json!(doctor::report(config, Some(running), Vec::new()).await);
            *last = Some((Instant::now(), report.clone()));
            report
        })
    })
}
