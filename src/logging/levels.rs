//! Scopes and their levels.
//!
//! A tracing target with the name of a scope belongs to that scope, one inside this crate to scope
//! `default`, and any other to scope `grpc`, that of libraries.

use std::collections::BTreeMap;

use tracing::level_filters::LevelFilter;

use super::Error;

/// Scope of lines that name none.
pub(super) const DEFAULT: &str = "default";
/// Scope of libraries.
pub(super) const LIBRARIES: &str = "grpc";

/// pilot-agent's scopes.
const SCOPES: &str = "ads ca cache citadelclient default dns gcecred grpc healthcheck klog mockcred \
                      monitoring probes sds security spiffe validation wasm xdsproxy";

/// The level of each scope.
#[derive(Clone, Debug)]
pub(super) struct Levels(BTreeMap<&'static str, LevelFilter>);

impl Default for Levels {
    fn default() -> Self {
        let scopes = SCOPES.split(' ').map(|scope| (scope, LevelFilter::INFO));
        let mut levels: BTreeMap<_, _> = scopes.collect();
        levels.insert(LIBRARIES, LevelFilter::OFF);
        Self(levels)
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
                    *current = level;
                }
            }
        }
        Ok(Self(levels))
    }

    pub(super) fn get(&self, scope: &str) -> LevelFilter {
        self.0.get(scope).copied().unwrap_or(LevelFilter::OFF)
    }

    pub(super) fn set(&mut self, scope: &'static str, level: LevelFilter) {
        self.0.insert(scope, level);
    }

    pub(super) fn scopes(&self) -> impl Iterator<Item = &'static str> {
        self.0.keys().copied()
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
pub(super) fn name(level: LevelFilter) -> &'static str {
    match level {
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
}
