//! Scopes and their levels: as configured, until they are set at run time, lastingly or for a while.
//!
//! A tracing target with the name of a scope belongs to that scope, one inside this crate to scope
//! `default`, and any other to scope `grpc`, that of libraries.

use std::collections::BTreeMap;
use std::time::Duration;

use parking_lot::RwLock;
use serde::Serialize;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};
use tracing::level_filters::LevelFilter;
use tracing_core::callsite::rebuild_interest_cache;

use super::Error;

/// The target of lines on changes of levels, which are logged at any level.
pub(super) const CHANGES: &str = "istio_agent::logging::changes";

/// Scope of lines that name none.
pub(super) const DEFAULT: &str = "default";
/// Scope of libraries.
pub(super) const LIBRARIES: &str = "grpc";

/// pilot-agent's scopes.
const SCOPES: &str = "ads ca cache citadelclient default dns gcecred grpc healthcheck klog mockcred \
                      monitoring probes sds security spiffe validation wasm xdsproxy";

/// A scope and its level.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Scope {
    pub scope: &'static str,
    pub level: &'static str,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub temporary: Option<Temporary>,
}

/// How a level ends that was set for a while.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Temporary {
    pub seconds_left: f64,
    /// The level after that.
    pub lasting_level: &'static str,
}

/// The level of each scope.
#[derive(Clone, Debug)]
pub(super) struct Levels(BTreeMap<&'static str, Level>);

#[derive(Clone, Copy, Debug)]
struct Level {
    lasting: LevelFilter,
    /// With its end.
    temporary: Option<(LevelFilter, Instant)>,
}

/// Levels that can be set at run time.
#[derive(Debug, Default)]
pub(super) struct InForce {
    levels: RwLock<Levels>,
    changed: Notify,
}

impl Level {
    fn lasting(lasting: LevelFilter) -> Self {
        let temporary = None;
        Self { lasting, temporary }
    }

    fn current(&self) -> LevelFilter {
        self.temporary.map_or(self.lasting, |(level, _)| level)
    }
}

impl Default for Levels {
    fn default() -> Self {
        let scopes = SCOPES.split(' ').map(|scope| {
            let level = match scope {
                LIBRARIES => LevelFilter::OFF,
                _ => LevelFilter::INFO,
            };
            (scope, Level::lasting(level))
        });
        Self(scopes.collect())
    }
}

impl Levels {
    /// Reads `--log_output_level`. Later entries win. Unknown scopes are ignored.
    pub(super) fn parse(flag: &str) -> Result<Self, Error> {
        let Self(mut levels) = Self::default();
        for entry in flag
            .split(',')
            .map(str::trim)
            .filter(|entry| !entry.is_empty())
        {
            let (scope, word) = entry.split_once(':').unwrap_or((DEFAULT, entry));
            let level = level(word).ok_or_else(|| Error::Level {
                found: entry.to_owned(),
            })?;
            for (name, current) in &mut levels {
                if *name == scope || scope == "all" {
                    current.lasting = level;
                }
            }
        }
        Ok(Self(levels))
    }

    fn get(&self, scope: &str) -> LevelFilter {
        self.0.get(scope).map_or(LevelFilter::OFF, Level::current)
    }
}

impl InForce {
    pub(super) fn new(levels: Levels) -> Self {
        Self {
            levels: RwLock::new(levels),
            changed: Notify::new(),
        }
    }

    pub(super) fn get(&self, scope: &str) -> LevelFilter {
        self.levels.read().get(scope)
    }

    pub(super) fn max_level(&self) -> LevelFilter {
        let levels = self.levels.read();
        let all = levels.0.values().map(Level::current);
        all.max().unwrap_or(LevelFilter::OFF)
    }

    pub(super) fn scopes(&self) -> Vec<Scope> {
        let now = Instant::now();
        let levels = self.levels.read();
        let scopes = levels.0.iter().map(|(scope, level)| Scope {
            scope,
            level: name(level.current()),
            temporary: level.temporary.map(|(_, end)| Temporary {
                seconds_left: end.saturating_duration_since(now).as_secs_f64().round(),
                lasting_level: name(level.lasting),
            }),
        });
        scopes.collect()
    }

    pub(super) fn silent(&self) -> Vec<&'static str> {
        let levels = self.levels.read();
        let is_silent = |scope: &&str| levels.get(scope) == LevelFilter::OFF && *scope != LIBRARIES;
        levels.0.keys().copied().filter(is_silent).collect()
    }

    /// Logs the change, then sets the level of a scope, or of all; with a `period`, until it is over.
    /// False if there is no such scope.
    pub(super) fn set(
        &self,
        scope: Option<&str>,
        level: LevelFilter,
        period: Option<Duration>,
    ) -> bool {
        let is_meant = |name: &str| scope.is_none_or(|scope| scope == name);
        if !self.levels.read().0.keys().any(|name| is_meant(name)) {
            return false;
        }
        let (named, word) = (scope.unwrap_or("all"), name(level));
        let until = period.map_or_else(String::new, |period| format!(" for {period:?}"));
        tracing::info!(target: CHANGES, "the log level of {named} becomes {word}{until}");
        for (name, current) in &mut self.levels.write().0 {
            match period {
                _ if !is_meant(name) => {}
                Some(period) => current.temporary = Some((level, crate::clock::after(period))),
                None => *current = Level::lasting(level),
            }
        }
        self.changed.notify_one();
        rebuild_interest_cache();
        true
    }

    /// Ends temporary levels when their time is over.
    pub(super) async fn expire(&self) {
        loop {
            let end = |level: &Level| level.temporary.map(|(_, end)| end);
            let next = self.levels.read().0.values().filter_map(end).min();
            let Some(next) = next else {
                self.changed.notified().await;
                continue;
            };
            tokio::select! {
                () = self.changed.notified() => continue,
                () = sleep_until(next) => {}
            }
            tracing::info!(target: CHANGES, "log levels set for a while go back to what they were");
            for level in self.levels.write().0.values_mut() {
                level.temporary.take_if(|(_, end)| *end <= next);
            }
            rebuild_interest_cache();
        }
    }
}

pub(super) fn level(word: &str) -> Option<LevelFilter> {
    Some(match word {
        "debug" => LevelFilter::DEBUG,
        "info" => LevelFilter::INFO,
        "warn" => LevelFilter::WARN,
        "error" => LevelFilter::ERROR,
        // No line has level `fatal`: the program logs an error and ends.
        "fatal" | "none" => LevelFilter::OFF,
        _ => return None,
    })
}

/// The word for a level; the inverse of [`level`].
pub(super) fn name(level: impl Into<LevelFilter>) -> &'static str {
    match level.into() {
        LevelFilter::OFF => "none",
        LevelFilter::ERROR => "error",
        LevelFilter::WARN => "warn",
        LevelFilter::INFO => "info",
        _ => "debug",
    }
}

pub(super) fn scope_of(target: &str) -> &'static str {
    let ours = ["istio_agent", "pilot_agent"];
    if ours.contains(&target.split("::").next().unwrap_or(target)) {
        return DEFAULT;
    }
    let mut scopes = SCOPES.split(' ');
    scopes.find(|scope| *scope == target).unwrap_or(LIBRARIES)
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

    /// Scope and level, and for one set for a while the seconds left and the level after that.
    fn shown(levels: &InForce, scope: &str) -> (&'static str, Option<(f64, &'static str)>) {
        let found = levels.scopes().into_iter().find(|one| one.scope == scope);
        let found = found.expect("the scope");
        let temporary = found.temporary;
        (
            found.level,
            temporary.map(|temporary| (temporary.seconds_left, temporary.lasting_level)),
        )
    }

    #[tokio::test(start_paused = true)]
    async fn a_level_set_for_a_while_goes_back_to_the_lasting_one() {
        let levels = InForce::default();
        let minutes = |count: u64| Some(Duration::from_secs(60 * count));
        let clock = async {
            assert!(levels.set(None, LevelFilter::DEBUG, minutes(10)));
            assert!(levels.set(Some("sds"), LevelFilter::ERROR, minutes(5)));
            assert_eq!(shown(&levels, "sds"), ("error", Some((300.0, "info"))));
            assert_eq!(shown(&levels, "grpc"), ("debug", Some((600.0, "none"))));
            assert_eq!(levels.max_level(), LevelFilter::DEBUG);
            // It replaces the temporary one.
            assert!(levels.set(Some("ca"), LevelFilter::WARN, None));
            assert_eq!(shown(&levels, "ca"), ("warn", None));
            tokio::time::sleep(Duration::from_secs(301)).await;
            assert_eq!(shown(&levels, "sds"), ("info", None));
            assert_eq!(shown(&levels, "dns"), ("debug", Some((299.0, "info"))));
            tokio::time::sleep(Duration::from_secs(300)).await;
            assert_eq!(shown(&levels, "dns"), ("info", None));
            assert_eq!(shown(&levels, "ca"), ("warn", None));
            assert_eq!(levels.max_level(), LevelFilter::INFO);
        };
        tokio::select! {
            () = clock => {}
            () = levels.expire() => unreachable!("it does not end"),
        }
    }

    #[test]
    fn scopes_that_log_nothing_are_silent_but_for_that_of_libraries() {
        for (flag, expected) in [
            ("", &[][..]),
            ("sds:fatal,ca:none,dns:error", &["ca", "sds"]),
        ] {
            let levels = Levels::parse(flag).expect("levels");
            assert_eq!(InForce::new(levels).silent(), expected, "{flag}");
        }
    }

    #[test]
    fn an_unknown_scope_is_not_set() {
        let levels = InForce::default();
        let before = levels.scopes();
        assert!(!levels.set(Some("unheard"), LevelFilter::DEBUG, None));
        assert_eq!(levels.scopes(), before);
    }
}
