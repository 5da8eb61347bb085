//! The levels in force: as configured, until they are set at run time, lastingly or for a while.

use std::collections::BTreeMap;
use std::time::Duration;

use parking_lot::RwLock;
use serde::Serialize;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};
use tracing::level_filters::LevelFilter;
use tracing_core::callsite::rebuild_interest_cache;

use super::levels::{LIBRARIES, Levels, name};

/// The target of lines on changes of levels, which are logged at any level.
pub(super) const CHANGES: &str = "istio_agent::logging::changes";

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

#[derive(Debug, Default)]
pub(super) struct InForce {
    state: RwLock<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    lasting: Levels,
    temporary: BTreeMap<&'static str, (LevelFilter, Instant)>,
}

impl State {
    fn get(&self, scope: &str) -> LevelFilter {
        let temporary = self.temporary.get(scope).map(|(level, _)| *level);
        temporary.unwrap_or_else(|| self.lasting.get(scope))
    }
}

impl InForce {
    pub(super) fn new(lasting: Levels) -> Self {
        let state = State {
            lasting,
            temporary: BTreeMap::new(),
        };
        Self {
            state: RwLock::new(state),
            changed: Notify::new(),
        }
    }

    pub(super) fn get(&self, scope: &str) -> LevelFilter {
        self.state.read().get(scope)
    }

    pub(super) fn most_verbose(&self) -> LevelFilter {
        let state = self.state.read();
        let levels = state.lasting.scopes().map(|scope| state.get(scope));
        levels.max().unwrap_or(LevelFilter::OFF)
    }

    pub(super) fn scopes(&self) -> Vec<Scope> {
        let state = self.state.read();
        let temporary = |scope: &str| {
            let (_, end) = state.temporary.get(scope)?;
            let left = end.saturating_duration_since(Instant::now());
            Some(Temporary {
                seconds_left: left.as_secs_f64().round(),
                lasting_level: name(state.lasting.get(scope)),
            })
        };
        let scopes = state.lasting.scopes().map(|scope| Scope {
            scope,
            level: name(state.get(scope)),
            temporary: temporary(scope),
        });
        scopes.collect()
    }

    pub(super) fn silent(&self) -> Vec<&'static str> {
        let state = self.state.read();
        let scopes = state.lasting.scopes();
        let is_silent = |scope: &&str| state.get(scope) == LevelFilter::OFF && *scope != LIBRARIES;
        scopes.filter(is_silent).collect()
    }

    /// Logs the change, then sets the level of a scope, or of all; with a `period`, until it is over.
    /// False if there is no such scope.
    pub(super) fn set(
        &self,
        scope: Option<&str>,
        level: LevelFilter,
        period: Option<Duration>,
    ) -> bool {
        let is_meant = |name: &&str| scope.is_none_or(|scope| scope == *name);
        let names: Vec<_> = self
            .state
            .read()
            .lasting
            .scopes()
            .filter(is_meant)
            .collect();
        if names.is_empty() {
            return false;
        }
        let (scope, word) = (scope.unwrap_or("all"), name(level));
        match period {
            Some(period) => {
                tracing::info!(target: CHANGES, "the log level of {scope} becomes {word} for {period:?}");
            }
            None => tracing::info!(target: CHANGES, "the log level of {scope} becomes {word}"),
        }
        let mut state = self.state.write();
        for name in names {
            match period {
                Some(period) => {
                    let end = crate::clock::after(period);
                    state.temporary.insert(name, (level, end));
                }
                None => {
                    state.temporary.remove(name);
                    state.lasting.set(name, level);
                }
            }
        }
        drop(state);
        self.changed.notify_one();
        rebuild_interest_cache();
        true
    }

    /// Ends temporary levels when their time is over.
    pub(super) async fn expire(&self) {
        loop {
            let next = self
                .state
                .read()
                .temporary
                .values()
                .map(|(_, end)| *end)
                .min();
            let Some(next) = next else {
                self.changed.notified().await;
                continue;
            };
            tokio::select! {
                () = self.changed.notified() => continue,
                () = sleep_until(next) => {}
            }
            tracing::info!(target: CHANGES, "log levels set for a while go back to what they were");
            self.state
                .write()
                .temporary
                .retain(|_, (_, end)| *end > next);
            rebuild_interest_cache();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            assert_eq!(levels.most_verbose(), LevelFilter::DEBUG);
            // It replaces the temporary one.
            assert!(levels.set(Some("ca"), LevelFilter::WARN, None));
            assert_eq!(shown(&levels, "ca"), ("warn", None));
            tokio::time::sleep(Duration::from_secs(301)).await;
            assert_eq!(shown(&levels, "sds"), ("info", None));
            assert_eq!(shown(&levels, "dns"), ("debug", Some((299.0, "info"))));
            tokio::time::sleep(Duration::from_secs(300)).await;
            assert_eq!(shown(&levels, "dns"), ("info", None));
            assert_eq!(shown(&levels, "ca"), ("warn", None));
            assert_eq!(levels.most_verbose(), LevelFilter::INFO);
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
