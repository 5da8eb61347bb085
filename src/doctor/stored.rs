//! Checks that configuration and certificate are stored for the next container.

use super::{Subject, run_blocking};
use crate::files::volume::{Content, Volume};
use crate::problem::{Code, Level, Problem};
use crate::report::Check;
use crate::secrets::Secrets;

/// What a running agent knows of the content: true if it is stored, or why it cannot be.
type Known = Result<bool, Problem>;

pub(super) async fn checks(subject: Subject<'_>) -> Vec<Check> {
    let Subject { config, running } = subject;
    let certificate = config.secrets.renewal.cache.as_ref();
    let known = running.map(|running| {
        // Certificates of other processes and of files are not stored.
        let state = running.secrets.as_ref().map(Secrets::latest).unwrap_or_default();
        state.uncached.map_or(Ok(state.workload.is_some()), Err)
    });
    let mut checks = vec![check(Content::Certificate, certificate, known).await];
    checks.push(if config.bootstrap.delta {
        let volume = config.last_known_good.as_ref().and_then(|it| it.volume.as_ref());
        let known = running.map(|running| {
            let seen = running.discovery.snapshot();
            let code = Code::KeptConfigUnwritable;
            let failed =
                seen.write_failure.map(|why| Problem::new(code, "stored configuration", why));
            failed.map_or(Ok(seen.kept.is_some_and(|kept| !kept.is_empty())), Err)
        });
        let stored = check(Content::Configuration, volume, known).await;
        if config.envoy.is_none() && stored.level == Level::Ok {
            Check::skipped(stored.name, "not stored with DISABLE_ENVOY=true")
        } else {
            stored
        }
    } else {
        Check::skipped("stored configuration", "not stored with ISTIO_DELTA_XDS=false")
    });
    checks
}

/// Checks that the content is stored or, if no agent runs, that it can be.
async fn check(content: Content, volume: Option<&Volume>, known: Option<Known>) -> Check {
    let name = format!("stored {}", content.name());
    let Some(volume) = volume.cloned() else {
        return Check::skipped(name, format!("{} is empty", content.variable()));
    };
    let directory = volume.directory.display().to_string();
    let is_default = volume.is_default;
    match (run_blocking(move || volume.check(content)).await, known) {
        (Err(why), _) => Check::skipped(name, why),
        (Ok(Err(problem)), _) if is_default => {
            Check::skipped(name, format!("{}: {}", problem.subject, problem.found))
        }
        (Ok(Ok(())), Some(Err(problem))) if is_default => {
            Check::with_level(Level::Warning, &problem)
        }
        (Ok(Err(problem)), _) | (Ok(Ok(())), Some(Err(problem))) => {
            Check::with_level(Level::Error, &problem)
        }
        (Ok(Ok(())), Some(Ok(true))) => Check::ok(name, format!("in {directory}")),
        (Ok(Ok(())), Some(Ok(false))) => {
            Check::skipped(name, format!("nothing yet in {directory}"))
        }
        (Ok(Ok(())), None) => Check::ok(name, format!("{directory} can be written")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_stored_content_is_reported_as_stored() {
        let memory = tempfile::tempdir_in("/dev/shm").expect("a directory");
        let named = Volume::named(memory.path());
        let default = Volume { is_default: true, ..named.clone() };
        let missing = Volume::named(memory.path().join("missing"));
        let problem = Problem::new(Code::KeptConfigUnwritable, "it", "no space left");
        let failed = || Some(Err(problem.clone()));
        for (content, volume, known, level, words) in [
            (Content::Configuration, Some(&named), Some(Ok(true)), Level::Ok, "in /dev/shm"),
            (Content::Configuration, Some(&named), None, Level::Ok, "can be written"),
            (Content::Configuration, Some(&named), Some(Ok(false)), Level::Skipped, "nothing yet"),
            (Content::Configuration, Some(&named), failed(), Level::Error, "no space left"),
            (Content::Certificate, Some(&default), failed(), Level::Warning, "no space left"),
            (Content::Certificate, Some(&missing), Some(Ok(true)), Level::Error, "No such file"),
            (Content::Configuration, Some(&default), Some(Ok(true)), Level::Skipped, "in memory"),
            (Content::Certificate, None, Some(Ok(true)), Level::Skipped, "KEEP_CERTS is empty"),
        ] {
            let check = check(content, volume, known).await;
            assert_eq!(check.level, level, "{check:?}");
            assert!(check.found.contains(words), "{check:?}");
        }
    }
}
