//! Checks that configuration and certificate are stored for the next container.

use super::run_blocking;
use crate::config::Config;
use crate::files::volume::{Content, Volume};
use crate::report::{Check, Level};

pub(super) async fn checks(config: &Config) -> Vec<Check> {
    let certificate = config.secrets.renewal.cache.as_ref();
    let mut checks = vec![check(Content::Certificate, certificate).await];
    checks.push(if config.bootstrap.delta {
        let volume = config.last_known_good.as_ref().and_then(|it| it.volume.as_ref());
        let stored = check(Content::Configuration, volume).await;
        if config.envoy.is_none() && stored.level == Level::Ok {
            Check::skipped(stored.name, "not stored with DISABLE_ENVOY=true")
        } else {
            stored
        }
    } else {
        let why = "not stored with ISTIO_DELTA_XDS=false";
        Check::skipped("stored configuration", why)
    });
    checks
}

/// Checks that the content is stored.
async fn check(content: Content, volume: Option<&Volume>) -> Check {
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
        Ok(Err(problem)) => Check::with_level(Level::Error, &problem),
        Ok(Ok(())) => Check::ok(name, format!("in {}", directory.display())),
    }
}
