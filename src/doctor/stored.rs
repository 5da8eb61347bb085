//! What the next container starts with: configuration and certificate.

use super::report::{Check, Level};
use super::{Running, Subject, run_blocking};
use crate::volume::{Content, Volume};

pub(super) async fn checks(subject: Subject<'_>) -> Vec<Check> {
    let config = subject.config;
    let certificate = config.secrets.renewal.cache.as_ref();
    let mut checks = vec![check(Content::Certificate, certificate, String::new).await];
    if !config.bootstrap.delta {
        let why = "not stored with ISTIO_DELTA_XDS=false";
        checks.push(Check::skipped("stored configuration", why));
    } else {
        let volume = config.kept.as_ref().map(|kept| &kept.volume);
        let facts = || subject.running.map(facts).unwrap_or_default();
        checks.push(check(Content::Configuration, volume, facts).await);
    }
    checks
}

/// Whether the content is stored; `facts` follow the directory.
async fn check(content: Content, volume: Option<&Volume>, facts: impl FnOnce() -> String) -> Check {
    let name = format!("stored {}", content.name());
    let Some(volume) = volume.cloned() else {
        return Check::skipped(name, format!("{} is empty", content.variable()));
    };
    let (directory, is_default) = (volume.directory.clone(), volume.is_default);
    match run_blocking(move || volume.check(content)).await {
        Err(why) => Check::skipped(name, why),
        Ok(Err(problem)) if is_default => {
            Check::skipped(name, format!("{}: {}", problem.subject, problem.found))
        }
        Ok(Err(problem)) => Check::problem(Level::Error, &problem),
        Ok(Ok(())) => Check::ok(name, format!("in {}{}", directory.display(), facts())),
    }
}

/// Size and age of stored configuration, and since when Envoy has served it.
fn facts(running: &Running) -> String {
    let discovery = running.discovery.snapshot();
    let types = discovery.kept.unwrap_or_default();
    let megabytes = types.values().map(|it| it.bytes).sum::<u64>() as f64 / 1e6;
    let Some(current) = types.values().map(|it| &it.at).min() else {
        return ", nothing accepted yet".to_owned();
    };
    let served = discovery.served_since;
    let served = served.map(|since| format!("; Envoy has served it since {since}"));
    format!(
        ", {megabytes:.1} MB, current at {current}{}",
        served.unwrap_or_default()
    )
}
