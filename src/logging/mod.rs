//! Log lines as pilot-agent writes them, for people and programs that read them.
//!
//! A tracing target is a scope; targets inside this crate belong to scope `default`, and those of
//! libraries to scope `grpc`, which is off unless raised. Text lines are tab-separated: time, level,
//! scope (not for `default`), caller (where asked for), message, labels, those of spans around the
//! event first. A line that cannot be written is lost; one for which there is no room waits, without
//! whoever logs it.
//!
//! Does not rotate files, and prints no stack traces.

mod levels;
mod line;
mod outlet;
mod recent;

use std::io::{self, Write as _};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, SystemTime};

use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

use levels::{Levels, scope_of};
use line::{Content, Line};
use outlet::Outlet;
pub(crate) use outlet::{PIECE, has_room};
pub use recent::Entry;
use recent::Recent;

/// What to log, how, and where to.
#[derive(Clone, Debug)]
pub struct Options {
    levels: Levels,
    targets: Vec<String>,
    json: bool,
    callers: Vec<String>,
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
    /// Reads `--log_output_level` and `--log_target`.
    pub fn parse(levels: &str, targets: &[String]) -> Result<Self, Error> {
        let mut options = Self {
            levels: Levels::parse(levels)?,
            ..Self::default()
        };
        if !targets.is_empty() {
            options.targets = targets.to_vec();
        }
        Ok(options)
    }

    /// `--log_as_json`.
    #[must_use]
    pub fn with_json(self, json: bool) -> Self {
        Self { json, ..self }
    }

    /// `--log_caller`: scopes whose lines name the place in the source.
    #[must_use]
    pub fn with_callers_of(self, scopes: &str) -> Self {
        let callers = scopes.split(',').map(|scope| scope.trim().to_owned());
        Self {
            callers: callers.collect(),
            ..self
        }
    }
}

impl Default for Options {
    /// As without any flag.
    fn default() -> Self {
        Self {
            levels: Levels::default(),
            targets: vec!["stdout".to_owned()],
            json: false,
            callers: Vec::new(),
        }
    }
}

/// Whether `flag` has the form of `--log_output_level`; that of other flags is the same.
pub fn check_levels(flag: &str) -> Result<(), Error> {
    Levels::parse(flag).map(drop)
}

/// How long the end may wait for readers of the log.
const FINISH_LIMIT: Duration = Duration::from_secs(1);

/// What the one log of this process has seen last.
static RECENT: OnceLock<Recent> = OnceLock::new();

/// The warnings and errors logged last, the newest first.
pub fn recent() -> Vec<Entry> {
    RECENT.get().map(Recent::entries).unwrap_or_default()
}

/// Has what is logged so far reach its readers, if they do not take too long.
pub fn finish() {
    outlet::finish(FINISH_LIMIT);
}

/// Logs from here on as `options` say.
pub fn init(options: Options) -> Result<(), Error> {
    let sinks = options.targets.iter();
    let sinks = sinks.map(|target| open(target, options.json));
    let layer = Lines {
        levels: options.levels,
        json: options.json,
        callers: options.callers,
        sinks: Mutex::new(sinks.collect::<Result<_, _>>()?),
        recent: RECENT.get_or_init(Recent::default).clone(),
    };
    tracing::subscriber::set_global_default(tracing_subscriber::registry().with(layer))
        .map_err(|_| Error::Twice)
}

type Sink = Box<dyn io::Write + Send>;

fn open(target: &str, json: bool) -> Result<Sink, Error> {
    Ok(match target {
        "stdout" => Box::new(Outlet::new(io::stdout(), json)),
        "stderr" => Box::new(Outlet::new(io::stderr(), json)),
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

/// Writes each event as one line.
struct Lines {
    levels: Levels,
    json: bool,
    callers: Vec<String>,
    /// Held for one write, so that lines of several threads do not mix.
    sinks: Mutex<Vec<Sink>>,
    recent: Recent,
}

impl Lines {
    /// File and line of the event, when its scope is to say so.
    fn caller(&self, metadata: &Metadata<'_>, scope: &str) -> Option<String> {
        if !self
            .callers
            .iter()
            .any(|name| name == scope || name == "all")
        {
            return None;
        }
        let file = metadata.file()?;
        // The last folder and the file: enough to find it, short enough for a line.
        let start = file
            .rmatch_indices('/')
            .nth(1)
            .map_or(0, |(slash, _)| slash + 1);
        Some(format!("{}:{}", &file[start..], metadata.line()?))
    }

    fn write(&self, line: &Line) {
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

impl<S: Subscriber + for<'s> LookupSpan<'s>> Layer<S> for Lines {
    fn enabled(&self, metadata: &Metadata<'_>, _: Context<'_, S>) -> bool {
        *metadata.level() <= self.levels.of(scope_of(metadata.target()))
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(self.levels.most_verbose())
    }

    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut content = Content::default();
        attributes.record(&mut content);
        if let Some(span) = context.span(id) {
            span.extensions_mut().insert(content);
        }
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        if let Some(span) = context.span(id)
            && let Some(content) = span.extensions_mut().get_mut::<Content>()
        {
            values.record(content);
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut content = Content::default();
        let spans = context.event_scope(event).into_iter().flatten();
        for span in spans.collect::<Vec<_>>().iter().rev() {
            if let Some(of_span) = span.extensions().get::<Content>() {
                content.inherit(of_span);
            }
        }
        event.record(&mut content);
        let metadata = event.metadata();
        let scope = scope_of(metadata.target());
        let line = Line {
            time: SystemTime::now(),
            level: *metadata.level(),
            scope,
            caller: self.caller(metadata, scope),
            content,
        };
        self.write(&line);
        line.note(&self.recent);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// Memory to log to.
    #[derive(Clone, Default)]
    struct Page(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Page {
        fn write(&mut self, text: &[u8]) -> io::Result<usize> {
            self.0.lock().expect("no panic").write(text)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// What is logged by `options` while `work` runs, without the times.
    fn logged(options: Options, work: impl FnOnce()) -> Vec<String> {
        logged_and_kept(options, &Recent::default(), work)
    }

    fn logged_and_kept(options: Options, recent: &Recent, work: impl FnOnce()) -> Vec<String> {
        let page = Page::default();
        let lines = Lines {
            levels: options.levels,
            json: options.json,
            callers: options.callers,
            sinks: Mutex::new(vec![Box::new(page.clone())]),
            recent: recent.clone(),
        };
        let subscriber = tracing_subscriber::registry().with(lines);
        tracing::subscriber::with_default(subscriber, work);
        let text = String::from_utf8(page.0.lock().expect("no panic").clone()).expect("text");
        let without_time = |line: &str| line.split_once('\t').map(|(_, rest)| rest.to_owned());
        text.lines().filter_map(without_time).collect()
    }

    #[test]
    fn labels_of_spans_come_before_those_of_the_event() {
        let lines = logged(Options::default(), || {
            let outer = tracing::info_span!("stream", id = 7, envoy = tracing::field::Empty);
            let _outer = outer.enter();
            outer.record("envoy", "a");
            let _inner = tracing::info_span!("push", r#type = "LDS").entered();
            tracing::info!(target: "xdsproxy", size = 3, "sent");
        });
        assert_eq!(
            lines,
            ["info\txdsproxy\tsent\tid=7 envoy=a type=LDS size=3"]
        );
    }

    #[test]
    fn callers_are_named_for_the_scopes_asked_for() {
        for (scopes, named) in [("sds,ca", true), ("all", true), ("ca", false), ("", false)] {
            let lines = logged(Options::default().with_callers_of(scopes), || {
                tracing::info!(target: "sds", "sent");
            });
            let has_caller = lines[0].starts_with("info\tsds\tlogging/mod.rs:");
            assert_eq!(has_caller, named, "{scopes}: {}", lines[0]);
            assert!(lines[0].ends_with("\tsent"));
        }
    }

    #[test]
    fn warnings_and_errors_that_are_logged_are_kept_and_nothing_else() {
        let recent = Recent::default();
        let options = Options::parse("default:info,ca:error", &[]).expect("levels");
        logged_and_kept(options, &recent, || {
            tracing::info!(target: "sds", "fine");
            tracing::warn!(target: "ca", "not logged");
            tracing::warn!(target: "sds", id = 7, "odd\nthing");
            tracing::error!("broken");
        });
        let entries = recent.entries();
        let shown: Vec<_> = entries
            .iter()
            .map(|entry| (entry.level, entry.scope, &*entry.message))
            .collect();
        let expected = [
            ("error", "default", "broken"),
            ("warn", "sds", "odd\\nthing id=7"),
        ];
        assert_eq!(shown, expected);
    }
}
