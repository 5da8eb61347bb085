//! Writes the log, in pilot-agent's format.
//!
//! [`init`] sets up the log, [`levels`] returns the levels in force, which can be set at run time, and [`finish`]
//! waits for slow readers at the end. A tracing target is a scope; targets inside this crate belong to scope
//! `default`, and targets of libraries to scope `grpc`, which is off unless raised.
//!
//! Text lines are tab-separated: time, level, scope (not for `default`), caller (if configured), message, and
//! labels. The labels of spans around the event come before its own. Texts over 1 KiB lose their middle, unless
//! their target is [`UNABRIDGED`]. Logging never blocks on a slow reader, see [`output`]. Files are not rotated.

mod levels;
mod line;
mod output;
mod recent;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::sync::OnceLock;
use std::time::{Duration, SystemTime};

use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

use crate::files::permission::explained;
use crate::problem::{Code, Problem};
use levels::CHANGES;
pub use levels::{Levels, scope_of};
use line::{Content, Line};
pub use line::{UNABRIDGED, is_interpreted, printable};
use output::Output;
pub use recent::{Entry, code_of};
use recent::{LastLines, Recent};

/// The `--log_*` flags.
#[derive(Debug, Default)]
pub struct Options {
    pub levels: Levels,
    /// Standard output if empty.
    pub targets: Vec<String>,
    pub json: bool,
    /// Scopes whose lines have the source file and line, separated by commas.
    pub callers: String,
}

/// The longest time for which the end of the program waits for readers of the log.
const FINISH_LIMIT: Duration = Duration::from_secs(1);

/// The warnings and errors logged last.
pub(crate) static RECENT: Recent = Recent::new();
/// The lines logged last.
pub(crate) static LAST_LINES: LastLines = LastLines::new();
static LEVELS: OnceLock<Levels> = OnceLock::new();

/// The levels in force.
pub fn levels() -> &'static Levels {
    LEVELS.get_or_init(Levels::default)
}

/// Waits until queued lines are written, for 1 s at most.
pub fn finish() {
    output::finish(FINISH_LIMIT);
}

/// Sets up the log of this process. A second call changes nothing.
pub fn init(options: Options) -> Result<(), Problem> {
    let mut targets = options.targets;
    if targets.is_empty() {
        targets.push("stdout".to_owned());
    }
    let outputs = targets.iter().map(|target| {
        let file = open(target).map_err(|error| {
            let found = format!("cannot open {target}: {}", explained(target.as_ref(), error));
            Problem::new(Code::LogTargetUnusable, "--log_target", found)
        })?;
        Ok(Output::new(file, options.json))
    });
    let lines = Lines {
        outputs: outputs.collect::<Result<_, Problem>>()?,
        levels: LEVELS.get_or_init(|| options.levels),
        json: options.json,
        callers: options.callers,
        recent: &RECENT,
    };
    let _ = tracing::subscriber::set_global_default(tracing_subscriber::registry().with(lines));
    Ok(())
}

#[expect(clippy::disallowed_methods, reason = "a log target may be a pipe or a terminal")]
fn open(target: &str) -> io::Result<File> {
    match target {
        "stdout" => Ok(io::stdout().as_fd().try_clone_to_owned()?.into()),
        "stderr" => Ok(io::stderr().as_fd().try_clone_to_owned()?.into()),
        path => OpenOptions::new().create(true).append(true).open(path),
    }
}

/// Writes each event as one line.
struct Lines {
    outputs: Vec<Output>,
    levels: &'static Levels,
    json: bool,
    callers: String,
    recent: &'static Recent,
}

impl Lines {
    /// Returns file and line of the event, if its scope is configured to have them.
    fn caller(&self, metadata: &Metadata<'_>, scope: &str) -> Option<String> {
        self.callers.split(',').map(str::trim).find(|name| *name == scope || *name == "all")?;
        let file = metadata.file()?;
        // The last directory and the file are enough to find the place, and short enough for a line.
        let start = file.rmatch_indices('/').nth(1).map_or(0, |(slash, _)| slash + 1);
        Some(format!("{}:{}", &file[start..], metadata.line()?))
    }
}

impl<S: Subscriber + for<'s> LookupSpan<'s>> Layer<S> for Lines {
    fn enabled(&self, metadata: &Metadata<'_>, _: Context<'_, S>) -> bool {
        metadata.target() == CHANGES
            || *metadata.level() <= self.levels.get(scope_of(metadata.target()))
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(self.levels.max_level().max(LevelFilter::INFO))
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
        let metadata = event.metadata();
        let mut content = Content::default();
        content.is_unabridged = metadata.target() == UNABRIDGED;
        let spans = context.event_scope(event).into_iter().flatten();
        for span in spans.collect::<Vec<_>>().iter().rev() {
            if let Some(inherited) = span.extensions().get::<Content>() {
                content.inherit(inherited);
            }
        }
        event.record(&mut content);
        let scope = scope_of(metadata.target());
        let line = Line {
            time: SystemTime::now(),
            level: *metadata.level(),
            scope,
            caller: self.caller(metadata, scope),
            content,
        };
        let text = line.format(self.json);
        for output in &self.outputs {
            output.write(text.as_bytes());
        }
        self.recent.add(&line);
        LAST_LINES.add(&text);
    }
}

/// Returns the lines that `work` logs, debug lines included, without colours.
#[cfg(test)]
pub(crate) fn logged(work: impl FnOnce()) -> String {
    // With a single subscriber, `tracing` disables a log line for all threads if the thread of another test, which has
    // no subscriber, reaches the line first. A second subscriber prevents this.
    let _another = tracing::Dispatch::new(tracing_subscriber::registry());
    let log = tempfile::NamedTempFile::new().expect("a file");
    let writer = log.reopen().expect("opened");
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::DEBUG)
        .with_ansi(false)
        .with_writer(move || writer.try_clone().expect("cloned"));
    tracing::subscriber::with_default(subscriber.finish(), work);
    std::fs::read_to_string(log.path()).expect("text")
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek};

    use super::*;

    /// Returns the lines that `work` logs with `options`, without the times.
    fn logged(options: Options, work: impl FnOnce()) -> Vec<String> {
        logged_and_kept(options, Box::leak(Box::new(Recent::new())), work)
    }

    fn logged_and_kept(
        options: Options,
        recent: &'static Recent,
        work: impl FnOnce(),
    ) -> Vec<String> {
        let mut file = tempfile::tempfile().expect("a file");
        let output = Output::new(file.try_clone().expect("cloned"), options.json);
        let lines = Lines {
            levels: Box::leak(Box::new(options.levels)),
            json: options.json,
            callers: options.callers,
            outputs: vec![output],
            recent,
        };
        let subscriber = tracing_subscriber::registry().with(lines);
        tracing::subscriber::with_default(subscriber, work);
        let mut text = String::new();
        file.rewind().expect("rewound");
        file.read_to_string(&mut text).expect("text");
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
        assert_eq!(lines, ["info\txdsproxy\tsent\tid=7 envoy=a type=LDS size=3"]);
    }

    #[test]
    fn external_texts_are_truncated_and_reports_of_the_agent_are_not() {
        let long = "x".repeat(900_000);
        let lines = logged(Options::default(), || {
            tracing::error!(target: "wasm", "failed: {long}; trying again");
            tracing::info!("{}", "m".repeat(1024));
            tracing::info!("{}; trying again", "é".repeat(2000));
            {
                let _span = tracing::info_span!("stream", envoy = &*long).entered();
                tracing::warn!(error = &*long, reason = %long, "odd");
            }
            tracing::info!(target: UNABRIDGED, "Effective config: {long}");
        });
        let (begin, end) = ("x".repeat(760), "x".repeat(242));
        let cut = format!("error\twasm\tfailed: {begin}[898998 bytes left out]{end}; trying again");
        assert_eq!(lines[0], cut);
        assert_eq!(lines[1], format!("info\t{}", "m".repeat(1024)));
        // The text is not cut inside a character.
        let (begin, end) = ("é".repeat(384), "é".repeat(121));
        let cut = format!("info\t{begin}[2990 bytes left out]{end}; trying again");
        assert_eq!(lines[2], cut);
        assert_eq!(lines[3].matches("[898976 bytes left out]").count(), 3, "{}", lines[3]);
        assert!(lines[4].contains(&long));
    }

    #[test]
    fn callers_are_logged_for_the_configured_scopes() {
        for (scopes, named) in [("sds,ca", true), ("all", true), ("ca", false), ("", false)] {
            let options = Options { callers: scopes.to_owned(), ..Options::default() };
            let lines = logged(options, || {
                tracing::info!(target: "sds", "sent");
            });
            let has_caller = lines[0].starts_with("info\tsds\tlogging/mod.rs:");
            assert_eq!(has_caller, named, "{scopes}: {}", lines[0]);
            assert!(lines[0].ends_with("\tsent"));
        }
    }

    #[test]
    fn levels_set_at_run_time_apply_at_once() {
        let mut file = tempfile::tempfile().expect("a file");
        let output = Output::new(file.try_clone().expect("cloned"), false);
        let levels: &Levels = Box::leak(Box::default());
        let lines = Lines {
            json: false,
            callers: String::new(),
            outputs: vec![output],
            levels,
            recent: Box::leak(Box::new(Recent::new())),
        };
        let subscriber = tracing_subscriber::registry().with(lines);
        tracing::subscriber::with_default(subscriber, || {
            for level in ["debug", "error", "info"] {
                levels.set(Some("sds"), level, None).expect("set");
                tracing::debug!(target: "sds", "debug at {level}");
                tracing::info!(target: "sds", "info at {level}");
                tracing::debug!(target: "ca", "another scope");
            }
        });
        let mut text = String::new();
        file.rewind().expect("rewound");
        file.read_to_string(&mut text).expect("text");
        let messages: Vec<_> = text.lines().filter_map(|line| line.split('\t').nth(3)).collect();
        assert_eq!(messages, ["debug at debug", "info at debug", "info at info"]);
    }

    #[test]
    fn a_change_of_levels_is_logged_at_any_level() {
        let levels = Levels::parse("all:none").expect("levels");
        let levels: &Levels = Box::leak(Box::new(levels));
        let mut file = tempfile::tempfile().expect("a file");
        let lines = Lines {
            json: false,
            callers: String::new(),
            outputs: vec![Output::new(file.try_clone().expect("cloned"), false)],
            levels,
            recent: Box::leak(Box::new(Recent::new())),
        };
        let subscriber = tracing_subscriber::registry().with(lines);
        tracing::subscriber::with_default(subscriber, || {
            tracing::error!("not logged");
            levels.set(Some("sds"), "error", None).expect("set");
            let minute = Some(Duration::from_secs(60));
            levels.set(None, "warn", minute).expect("set");
            tracing::info!("not logged");
        });
        assert_eq!(levels.silent(), None);
        let mut text = String::new();
        file.rewind().expect("rewound");
        file.read_to_string(&mut text).expect("text");
        let messages = text.lines().filter_map(|line| line.split_once('\t'));
        let messages: Vec<_> = messages.map(|(_, rest)| rest).collect();
        let expected =
            ["info\tlog level of sds set to error", "info\tlog level of all set to warn for 1 min"];
        assert_eq!(messages, expected);
    }

    #[test]
    fn warnings_and_errors_that_are_logged_are_kept_and_nothing_else() {
        let recent: &Recent = Box::leak(Box::new(Recent::new()));
        let options = Options {
            levels: Levels::parse("default:info,ca:error").expect("levels"),
            ..Options::default()
        };
        logged_and_kept(options, recent, || {
            tracing::info!(target: "sds", "fine");
            tracing::warn!(target: "ca", "not logged");
            tracing::warn!(target: "sds", id = 7, "odd\nthing");
            tracing::error!("broken");
        });
        let entries = recent.entries();
        let shown: Vec<_> =
            entries.iter().map(|entry| (entry.level, entry.scope, &*entry.message)).collect();
        let expected = [("error", "default", "broken"), ("warn", "sds", "odd\\nthing id=7")];
        assert_eq!(shown, expected);
    }
}
