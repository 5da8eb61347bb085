//! Stores the level of each scope: as configured, or set at run time, permanently or for a period.
//!
//! A tracing target with the name of a scope belongs to that scope. Other targets of this crate belong to scope
//! `default`, and all targets of libraries to scope `grpc`.

use std::collections::BTreeMap;
use std::time::Duration;

use parking_lot::RwLock;
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};
use tracing::level_filters::LevelFilter;
use tracing_core::callsite::rebuild_interest_cache;

use crate::problem::{Code, Problem};
use crate::runtime::duration::rounded;

/// The target of lines about changes of levels, which are logged at any level.
pub(super) const CHANGES: &str = "istio_agent::logging::changes";

/// The scope of lines that do not name one.
pub(super) const DEFAULT: &str = "default";
/// The scope of libraries.
pub(super) const LIBRARIES: &str = "grpc";

/// pilot-agent's scopes.
const SCOPES: &str = "ads ca cache citadelclient default dns gcecred grpc healthcheck klog mockcred \
                      monitoring probes sds security spiffe validation wasm xdsproxy";

/// The levels of the scopes.
#[derive(Debug)]
pub struct Levels {
    scopes: RwLock<BTreeMap<&'static str, Level>>,
    changed: Notify,
}

#[derive(Clone, Copy, Debug)]
struct Level {
    lasting: LevelFilter,
    /// A level set for a period, and the end of the period.
    temporary: Option<(LevelFilter, Instant)>,
}

impl Level {
    fn current(&self) -> LevelFilter {
        self.temporary.map_or(self.lasting, |(level, _)| level)
    }
}

impl Levels {
    /// Reads `--log_output_level`. Later entries win. Unknown scopes are ignored.
    pub fn parse(flag: &str) -> Result<Self, Problem> {
        let mut levels = Self::default();
        for entry in flag.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
            let (scope, word) = entry.split_once(':').unwrap_or((DEFAULT, entry));
            let level = level(word).ok_or_else(|| {
                let expected =
                    "scope:level with a level of debug, info, warn, error, fatal or none";
                Problem::value(Code::ArgumentInvalid, "log level", entry, expected)
            })?;
            for (name, current) in levels.scopes.get_mut() {
                if *name == scope || scope == "all" {
                    current.lasting = level;
                }
            }
        }
        Ok(levels)
    }

    pub(super) fn get(&self, scope: &str) -> LevelFilter {
        self.scopes.read().get(scope).map_or(LevelFilter::OFF, Level::current)
    }

    pub(super) fn max_level(&self) -> LevelFilter {
        self.scopes.read().values().map(Level::current).max().unwrap_or(LevelFilter::OFF)
    }

    /// Lists the scopes with their levels; a temporary level also with the time left, and the level after it.
    pub fn scopes(&self) -> Vec<Value> {
        let mut shown = Vec::new();
        for (scope, level) in &*self.scopes.read() {
            let mut members = json!({ "scope": scope, "level": name(level.current()) });
            if let Some((_, end)) = level.temporary {
                let left = end.saturating_duration_since(Instant::now());
                members["seconds_left"] = left.as_secs_f64().round().into();
                members["lasting_level"] = name(level.lasting).into();
            }
            shown.push(members);
        }
        shown
    }

    /// Names the scopes whose errors are not logged, except [`LIBRARIES`], which is off unless it is raised.
    pub fn silent(&self) -> Option<Problem> {
        let mut names = Vec::new();
        for (scope, level) in &*self.scopes.read() {
            if level.current() == LevelFilter::OFF && *scope != LIBRARIES {
                names.push(*scope);
            }
        }
        if names.is_empty() {
            return None;
        }
        let found = format!("none for {}", names.join(", "));
        Some(Problem::new(Code::LogSilent, "log level", found))
    }

    /// Logs the change, then sets the level of a scope, or of all. With a `period`, [`Self::expire`] ends it.
    /// Levels at which errors are not logged are refused.
    pub fn set(
        &self,
        scope: Option<&str>,
        word: &str,
        period: Option<Duration>,
    ) -> Result<(), Problem> {
        const CODE: Code = Code::ArgumentInvalid;
        let level = level(word)
            .filter(|level| *level != LevelFilter::OFF)
            .ok_or_else(|| Problem::value(CODE, "the level", word, "debug, info, warn or error"))?;
        let named = scope.unwrap_or("all");
        if scope.is_some_and(|scope| !self.scopes.read().contains_key(scope)) {
            return Err(Problem::value(CODE, "the scope", named, "one of the list"));
        }
        let until = period.map_or_else(String::new, |it| format!(" for {}", rounded(it)));
        tracing::info!(target: CHANGES, "log level of {named} set to {word}{until}");
        for (name, current) in &mut *self.scopes.write() {
            if scope.is_some_and(|scope| scope != *name) {
                continue;
            }
            current.temporary = period.map(|it| (level, crate::runtime::clock::after(it)));
            if period.is_none() {
                current.lasting = level;
            }
        }
        self.changed.notify_one();
        rebuild_interest_cache();
        Ok(())
    }

    /// Ends temporary levels when their period is over. Never returns.
    pub async fn expire(&self) {
        loop {
            let next =
                self.scopes.read().values().filter_map(|level| Some(level.temporary?.1)).min();
            let Some(end) = next else {
                self.changed.notified().await;
                continue;
            };
            tokio::select! {
                () = self.changed.notified() => continue,
                () = sleep_until(end) => {}
            }
            tracing::info!(target: CHANGES, "temporary log levels expired");
            for level in self.scopes.write().values_mut() {
                level.temporary.take_if(|(_, level_end)| *level_end <= end);
            }
            rebuild_interest_cache();
        }
    }
}

impl Default for Levels {
    fn default() -> Self {
        let scopes = SCOPES.split(' ').map(|scope| {
            let lasting = if scope == LIBRARIES { LevelFilter::OFF } else { LevelFilter::INFO };
            (scope, Level { lasting, temporary: None })
        });
        Self { scopes: RwLock::new(scopes.collect()), changed: Notify::new() }
    }
}

fn level(word: &str) -> Option<LevelFilter> {
    match word {
        "debug" | "info" | "warn" | "error" => word.parse().ok(),
        // No line has level `fatal`: the program logs an error and exits.
        "fatal" | "none" => Some(LevelFilter::OFF),
        _ => None,
    }
}

/// Returns the word for a level; the inverse of [`level`].
pub(super) fn name(level: impl Into<LevelFilter>) -> &'static str {
    match level.into() {
        LevelFilter::OFF => "none",
        LevelFilter::ERROR => "error",
        LevelFilter::WARN => "warn",
        LevelFilter::INFO => "info",
        _ => "debug",
    }
}

/// Returns the scope of a target; the scope of libraries if the target is not a scope.
pub fn scope_of(target: &str) -> &'static str {
    match target.split("::").next() {
        Some("istio_agent" | "pilot_agent") => DEFAULT,
        _ => SCOPES.split(' ').find(|scope| *scope == target).unwrap_or(LIBRARIES),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_per_scope_and_later_ones_win() {
        for (flag, scope, expected) in [
            ("", "default", LevelFilter::INFO),
            ("", "grpc", LevelFilter::OFF),
            ("debug", "default", LevelFilter::DEBUG),
            ("debug", "sds", LevelFilter::INFO),
            ("debug", "grpc", LevelFilter::OFF),
            ("sds:debug,all:warn", "sds", LevelFilter::WARN),
            ("default:warn,sds:debug", "sds", LevelFilter::DEBUG),
            ("all:error", "grpc", LevelFilter::ERROR),
            ("unheard:debug", "default", LevelFilter::INFO),
        ] {
            let levels = Levels::parse(flag).expect("the flag is good");
            assert_eq!(levels.get(scope), expected, "{flag} {scope}");
        }
        for flag in ["loud", "sds:loud", "a:b:info"] {
            assert!(Levels::parse(flag).is_err(), "{flag}");
        }
    }

    #[test]
    fn libraries_share_the_scope_grpc() {
        for (target, scope) in [
            ("istio_agent::envoy", "default"),
            ("pilot_agent", "default"),
            ("xdsproxy", "xdsproxy"),
            ("h2::codec", "grpc"),
            ("rustls", "grpc"),
        ] {
            assert_eq!(scope_of(target), scope);
        }
    }

    /// Returns the level of a scope; for a temporary level also the seconds left and the level after it.
    fn shown(levels: &Levels, scope: &str) -> (String, Option<(f64, String)>) {
        let scopes = levels.scopes();
        let found = scopes.iter().find(|one| one["scope"] == scope);
        let found = found.expect("the scope");
        let text = |name: &str| Some(found[name].as_str()?.to_owned());
        let temporary = found["seconds_left"].as_f64().zip(text("lasting_level"));
        (text("level").expect("a level"), temporary)
    }

    fn lasting(level: &str) -> (String, Option<(f64, String)>) {
        (level.to_owned(), None)
    }

    fn temporary(level: &str, left: f64, after: &str) -> (String, Option<(f64, String)>) {
        (level.to_owned(), Some((left, after.to_owned())))
    }

    #[tokio::test(start_paused = true)]
    async fn a_level_set_for_a_while_goes_back_to_the_lasting_one() {
        let levels = Levels::default();
        let minutes = |count: u64| Some(Duration::from_secs(60 * count));
        let clock = async {
            levels.set(None, "debug", minutes(10)).expect("set");
            levels.set(Some("sds"), "error", minutes(5)).expect("set");
            assert_eq!(shown(&levels, "sds"), temporary("error", 300.0, "info"));
            assert_eq!(shown(&levels, "grpc"), temporary("debug", 600.0, "none"));
            assert_eq!(levels.max_level(), LevelFilter::DEBUG);
            // A permanent level replaces a temporary one.
            levels.set(Some("ca"), "warn", None).expect("set");
            assert_eq!(shown(&levels, "ca"), lasting("warn"));
            tokio::time::sleep(Duration::from_secs(301)).await;
            assert_eq!(shown(&levels, "sds"), lasting("info"));
            assert_eq!(shown(&levels, "dns"), temporary("debug", 299.0, "info"));
            tokio::time::sleep(Duration::from_secs(300)).await;
            assert_eq!(shown(&levels, "dns"), lasting("info"));
            assert_eq!(shown(&levels, "ca"), lasting("warn"));
            assert_eq!(levels.max_level(), LevelFilter::INFO);
        };
        tokio::select! {
            () = clock => {}
            () = levels.expire() => unreachable!("it does not end"),
        }
    }

    #[test]
    fn scopes_that_log_no_errors_are_named_except_the_scope_of_libraries() {
        for (flag, expected) in
            [("", None), ("sds:fatal,ca:none,dns:error", Some("none for ca, sds"))]
        {
            let levels = Levels::parse(flag).expect("levels");
            let found = levels.silent().map(|problem| problem.found);
            assert_eq!(found.as_deref(), expected, "{flag}");
        }
    }

    #[test]
    fn an_unknown_scope_is_not_set() {
        let levels = Levels::default();
        let before = levels.scopes();
        levels.set(Some("unheard"), "debug", None).expect_err("unknown");
        assert_eq!(levels.scopes(), before);
    }
}
