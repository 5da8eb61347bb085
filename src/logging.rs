//! Log lines as pilot-agent writes them, for people and programs that read them.
//!
//! A tracing target is a scope; targets inside this crate belong to scope `default`, and those of
//! libraries to scope `grpc`, which is off unless raised. Text lines are tab-separated: time, level,
//! scope (not for `default`), message, labels. A line that cannot be written is lost.
//!
//! Does not rotate files, and prints no stack traces or callers.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::io::{self, Write as _};
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

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

/// Message and labels of an event.
#[derive(Default)]
struct Content {
    message: String,
    labels: Vec<(&'static str, Value)>,
}

impl Content {
    fn add(&mut self, field: &Field, value: Value) {
        match (field.name(), value) {
            ("message", Value::String(message)) => self.message = message,
            ("message", value) => self.message = value.to_string(),
            (name, value) => self.labels.push((name, value)),
        }
    }
}

impl Visit for Content {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field, format!("{value:?}").into());
    }
    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, value.into());
    }
    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, value.into());
    }
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, value.into());
    }
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field, value.into());
    }
    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, value.into());
    }
}

struct Line {
    time: SystemTime,
    level: Level,
    scope: &'static str,
    content: Content,
}

impl Line {
    fn text(&self) -> String {
        let mut line = format!("{}\t{}\t", rfc3339(self.time), level_word(self.level));
        if self.scope != DEFAULT {
            line += self.scope;
            line.push('\t');
        }
        // One line per entry, whatever a message quotes.
        line += &self.content.message.replace('\n', "\\n");
        let mut separator = '\t';
        for (name, value) in &self.content.labels {
            let value = value
                .as_str()
                .map_or_else(|| value.to_string(), str::to_owned);
            let value = value.replace('\n', "\\n");
            let _ = write!(line, "{separator}{name}={value}"); // A String takes everything.
            separator = ' ';
        }
        line.push('\n');
        line
    }

    fn json(&self) -> String {
        let mut members = Map::new();
        members.insert("level".into(), level_word(self.level).into());
        members.insert("time".into(), rfc3339(self.time).into());
        if self.scope != DEFAULT {
            members.insert("scope".into(), self.scope.into());
        }
        members.insert("msg".into(), self.content.message.as_str().into());
        for (name, value) in &self.content.labels {
            members.insert((*name).into(), value.clone());
        }
        format!("{}\n", Value::Object(members))
    }
}

fn level_word(level: Level) -> &'static str {
    match level {
        Level::ERROR => "error",
        Level::WARN => "warn",
        Level::INFO => "info",
        _ => "debug",
    }
}

/// `YYYY-MM-DDThh:mm:ss.uuuuuuZ`. Times before 1970 read as 1970.
fn rfc3339(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = since.as_secs();
    let (year, month, day) = date(seconds / 86_400);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let micros = since.subsec_micros();
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}Z")
}

/// Year, month and day of a day counted from 1970-01-01.
fn date(mut day: u64) -> (u64, usize, u64) {
    let leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    let mut year = 1970;
    while day >= 365 + u64::from(leap(year)) {
        day -= 365 + u64::from(leap(year));
        year += 1;
    }
    let lengths = [
        31,
        28 + u64::from(leap(year)),
        31,
        30,
        31,
        30,
        31,
        31,
        30,
        31,
        30,
        31,
    ];
    let mut month = 0;
    while month < 11 && day >= lengths[month] {
        day -= lengths[month];
        month += 1;
    }
    (year, month + 1, day + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn line(scope: &'static str) -> Line {
        Line {
            time: UNIX_EPOCH + Duration::from_micros(1_709_210_096_000_042),
            level: Level::WARN,
            scope,
            content: Content {
                message: "connected".into(),
                labels: vec![("id", 7.into()), ("istiod.addr", "a:1".into())],
            },
        }
    }

    #[test]
    fn text_lines_have_tabs_and_no_scope_for_the_default() {
        assert_eq!(
            line("default").text(),
            "2024-02-29T12:34:56.000042Z\twarn\tconnected\tid=7 istiod.addr=a:1\n"
        );
        assert_eq!(
            line("sds").text(),
            "2024-02-29T12:34:56.000042Z\twarn\tsds\tconnected\tid=7 istiod.addr=a:1\n"
        );
    }

    #[test]
    fn json_lines_keep_the_order_of_members() {
        assert_eq!(
            line("sds").json(),
            "{\"level\":\"warn\",\"time\":\"2024-02-29T12:34:56.000042Z\",\"scope\":\"sds\",\
             \"msg\":\"connected\",\"id\":7,\"istiod.addr\":\"a:1\"}\n"
        );
    }

    #[test]
    fn dates_are_right_around_leap_days_and_years() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00.000000Z"),
            (951_782_399, "2000-02-28T23:59:59.000000Z"),
            (951_868_800, "2000-03-01T00:00:00.000000Z"),
            (1_735_689_599, "2024-12-31T23:59:59.000000Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000000Z"),
        ] {
            assert_eq!(rfc3339(UNIX_EPOCH + Duration::from_secs(seconds)), text);
        }
    }

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
