//! Checks that configuration and certificate are stored for the next container.

use super::report::{Check, Level};
use super::{Running, Subject, run_blocking};
use crate::volume::{Content, Volume};

pub(super) async fn checks(subject: Subject<'_>) -> Vec<Check> {
    let config = subject.config;
    let certificate = config.secrets.renewal.cache.as_ref();
    let mut checks = vec![check(Content::Certificate, certificate, String::new).await];
    checks.push(if config.bootstrap.delta {
        let volume = config.kept.as_ref().map(|kept| &kept.volume);
        let facts = || subject.running.map(facts).unwrap_or_default();
        check(Content::Configuration, volume, facts).await
    } else {
        let why = "not stored with ISTIO_DELTA_XDS=false";
        Check::skipped("stored configuration", why)
    });
    checks
}

/// Checks that the content is stored. `facts` are added to a passed check.
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

/// Describes the stored configuration: its size and age, and the time since which Envoy has served it.
fn facts(running: &Running) -> String {
    let discovery = running.discovery.snapshot();
    let types = discovery.kept.unwrap_or_default();
    let megabytes = types.values().map(|it| it.bytes).sum::<u64>() as f64 / 1e6;
    let Some(current) = types.values().map(|it| &it.at).min() else {
        return ", nothing accepted yet".to_owned();
    };
    let since = discovery.served_since;
    let served = since.map(|since| format!("; Envoy has served it since {since}"));
    format!(
        ", {megabytes:.1} MB, current at {current}{}",
        served.unwrap_or_default()
    )
}
