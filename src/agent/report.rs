//! The pages of the doctor and of what is used.

use std::sync::Arc;

use serde_json::{Value, json};
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::config::Config;
use crate::doctor::{self, Running};
use crate::lifecycle::with_causes;
use crate::scope;
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

/// Reads what the workload uses, once at a time.
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
