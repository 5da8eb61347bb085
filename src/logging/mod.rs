//! Log lines as pilot-agent writes them, for people and programs that read them.
//!
//! A tracing target is a scope; targets inside this crate belong to scope `default`, and those of
//! libraries to scope `grpc`, which is off unless raised. Text lines are tab-separated: time, level,
//! scope (not for `default`), message, labels. A line that cannot be written is lost.
//!
//! Does not rotate files, and prints no stack traces or callers.

mod line;

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::sync::Mutex;
use std::time::SystemTime;

use tracing::level_filters::LevelFilter;
use tracing::{Event, Metadata, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

use line::{Content, Line};

/// Scope of lines that name none.
const DEFAULT: &str = "default";
/// Scope of libraries.
const LIBRARIES: &str = "grpc";

const SCOPES: &[&str] = &[
    "ads",
    "ca",
    "cache",
    "citadelclient",
    "default",
    "dns",
    "gcecred",
    "grpc",
    "healthcheck",
    "klog",
    "mockcred",
    "monitoring",
    "probes",
    "sds",
    "security",
    "spiffe",
    "validation",
    "wasm",
    "xdsproxy",
];

/// What to log, how, and where to.
#[derive(Clone, Debug)]
pub struct Options {
    levels: Levels,
    targets: Vec<String>,
    json: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "invalid log level {found:?}, expected scope:level with a level of debug, info, warn, error, fatal or none"
    )]
    Level { found: String },
    #[error("cannot open log target {target}")]
    Target {
        target: String,
        #[source]
        source: io::Error,
    },
    #[error("logging was set up before")]
    Twice,
}

impl Options {
    /// Reads `--log_output_level`, `--log_target` and `--log_as_json`.
    pub fn parse(levels: &str, targets: &[String], json: bool) -> Result<Self, Error> {
        let targets = match targets {
            [] => vec!["stdout".to_owned()],
            named => named.to_vec(),
        };
        Ok(Self {
            levels: Levels::parse(levels)?,
            targets,
            json,
        })
    }
}

/// Logs from here on as `options` say.
pub fn init(options: Options) -> Result<(), Error> {
    let sinks = options.targets.iter().map(|target| open(target));
    let layer = Lines {
        levels: options.levels,
        json: options.json,
        sinks: Mutex::new(sinks.collect::<Result<_, _>>()?),
    };
    tracing::subscriber::set_global_default(tracing_subscriber::registry().with(layer))
        .map_err(|_| Error::Twice)
}

type Sink = Box<dyn io::Write + Send>;

fn open(target: &str) -> Result<Sink, Error> {
    Ok(match target {
        "stdout" => Box::new(io::stdout()),
        "stderr" => Box::new(io::stderr()),
        path => {
            let file = std::fs::OpenOptions::new()
                .create(true)
                .append(true)
                .open(path);
            Box::new(file.map_err(|source| Error::Target {
                target: path.to_owned(),
                source,
            })?)
        }
    })
}

/// The level of each scope.
#[derive(Clone, Debug)]
struct Levels(BTreeMap<&'static str, LevelFilter>);

impl Levels {
    /// Later entries win, and those of the flag come after the defaults. Unknown scopes are ignored.
    fn parse(flag: &str) -> Result<Self, Error> {
        let mut levels: BTreeMap<_, _> = SCOPES.iter().map(|s| (*s, LevelFilter::INFO)).collect();
        levels.insert(LIBRARIES, LevelFilter::OFF);
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

    fn of(&self, scope: &str) -> LevelFilter {
        self.0.get(scope).copied().unwrap_or(LevelFilter::OFF)
    }

    fn most_verbose(&self) -> LevelFilter {
        self.0.values().max().copied().unwrap_or(LevelFilter::OFF)
    }
}

fn level(word: &str) -> Option<LevelFilter> {
    Some(match word {
        "debug" => LevelFilter::DEBUG,
        "info" => LevelFilter::INFO,
        "warn" => LevelFilter::WARN,
        "error" => LevelFilter::ERROR,
        // No line has this level here: what is fatal is an error and the end of the program.
        "fatal" | "none" => LevelFilter::OFF,
        _ => return None,
    })
}

fn scope_of(target: &str) -> &'static str {
    let ours = ["istio_agent", "pilot_agent"];
    if ours.contains(&target.split("::").next().unwrap_or(target)) {
        return DEFAULT;
    }
    SCOPES
        .iter()
        .find(|scope| **scope == target)
        .copied()
        .unwrap_or(LIBRARIES)
}

/// Writes each event as one line.
struct Lines {
    levels: Levels,
    json: bool,
    /// Held for one write, so that lines of several threads do not mix.
    sinks: Mutex<Vec<Sink>>,
}

impl<S: Subscriber> Layer<S> for Lines {
    fn enabled(&self, metadata: &Metadata<'_>, _: Context<'_, S>) -> bool {
        *metadata.level() <= self.levels.of(scope_of(metadata.target()))
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(self.levels.most_verbose())
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut content = Content::default();
        event.record(&mut content);
        let metadata = event.metadata();
        let line = Line {
            time: SystemTime::now(),
            level: *metadata.level(),
            scope: scope_of(metadata.target()),
            content,
        };
        let text = if self.json { line.json() } else { line.text() };
        let Ok(mut sinks) = self.sinks.lock() else {
            return; // A writer panicked; there is nowhere left to say so.
        };
        for sink in sinks.iter_mut() {
            // Logging must not stop the agent, and a failure to log cannot be logged.
            let _ = sink.write_all(text.as_bytes()).and_then(|()| sink.flush());
        }
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
            assert_eq!(levels.of(scope), expected, "{flag} {scope}");
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
