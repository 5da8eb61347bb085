//! Runs the program: reads the command line, runs its command, and exits with its code.

use std::convert::Infallible;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;

use istio_agent::agent::{self, Settings};
use istio_agent::cli::{
    self, Cli, Command, ParseError, ParsedLine, completion, doctor, iptables, request, scope, show,
    support_bundle, version, wait,
};
use istio_agent::config;
use istio_agent::config::environment::Environment;
use istio_agent::config::flags::{Flag, LogFlags, ProxyFlags};
use istio_agent::runtime::exit_code::ExitCode;
use istio_agent::runtime::lifecycle::{self, BoxError, with_causes};
use istio_agent::standby::record::Record;
use istio_agent::standby::{self, Pair};
use istio_agent::{logging, preflight, proxy_config};

fn main() -> std::process::ExitCode {
    #[cfg(target_env = "gnu")]
    limit_malloc();
    let words: Vec<_> =
        std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
    let prints_data = cli::prints_data(&words);
    let result = match cli::parse(words) {
        Ok(line) => run(line),
        Err(ParseError::Help(text)) => print(&text, false).map(|()| ExitCode::Success),
        Err(ParseError::Invalid(text)) => Err(text.into()),
    };
    let code = result.unwrap_or_else(|error| fail(error.as_ref(), prints_data));
    logging::finish();
    code.into()
}

// SAFETY: both take numbers.
#[cfg(target_env = "gnu")]
#[expect(unsafe_code, reason = "the standard library does not have them")]
unsafe extern "C" {
    safe fn mallopt(parameter: i32, value: i32) -> i32;
    safe fn malloc_trim(pad: usize) -> i32;
}

/// Makes all threads allocate from one arena, and returns large blocks to the kernel when they are freed.
/// By default glibc keeps the memory of each thread that has made a page or a table (mallopt(3)). Environment
/// variables have the same effect, but Envoy would inherit them.
#[cfg(target_env = "gnu")]
fn limit_malloc() {
    const MMAP_THRESHOLD: i32 = -3;
    const ARENA_MAX: i32 = -8;
    mallopt(ARENA_MAX, 1);
    mallopt(MMAP_THRESHOLD, 128 * 1024);
}

/// Frees memory that only the start and configuration changes need. Never ends.
async fn free_memory() -> Infallible {
    loop {
        tokio::time::sleep(std::time::Duration::from_secs(30)).await;
        proxy_config::release_definitions();
        // glibc keeps free memory between blocks in use (malloc_trim(3)); other allocators do not.
        #[cfg(target_env = "gnu")]
        malloc_trim(0);
    }
}

/// The end of a command that prints no text.
const DONE: (String, ExitCode) = (String::new(), ExitCode::Success);

fn run(line: ParsedLine) -> Result<ExitCode, BoxError> {
    let Cli { log, command, .. } = line.cli;
    let environment = Environment::from_process();
    let has_colours = matches!(command, Some(Command::Doctor(_) | Command::Preflight(_)))
        && cli::has_colours(&environment);
    let (text, code) = match command {
        None => success(cli::help()),
        Some(Command::Proxy(flags)) => {
            logging::init(log.options()?)?;
            cli::announce(&line.flags, &line.unknown_flags, &flags.ignored);
            return proxy(flags, log, line.flags, environment, line.unknown_flags);
        }
        Some(Command::Config(flags)) => show::config(&flags, &log, &line.flags, &environment),
        Some(Command::Bootstrap(flags)) => {
            success(block_on(show::bootstrap(&flags, &log, &environment))??)
        }
        Some(Command::Doctor(flags)) => {
            doctor::restart_with_unit(&environment);
            block_on(doctor::run(&flags, &log, &environment))?
        }
        Some(Command::Preflight(flags)) => {
            let level = flags.level;
            let is_json = flags.format.is_json();
            let work = async {
                tokio::task::spawn_blocking(move || preflight::report(&flags.read()?)).await
            };
            let line = "reading the pods; JSON (kubectl get -o json) is faster than YAML";
            let mut report = block_on(cli::with_progress(line, work))???;
            report.retain(level);
            let text =
                if is_json { serde_json::to_string_pretty(&report)? } else { report.to_string() };
            (text, doctor::exit_code(report.level))
        }
        Some(Command::Scope(flags)) => success(block_on(scope::run(&flags, &environment))??),
        Some(Command::SupportBundle(flags)) => {
            let to = support_bundle::open(&flags)?;
            block_on(support_bundle::run(&flags, &log, &line.flags, &environment, to))??;
            DONE
        }
        Some(Command::Debug(flags)) => {
            let request = flags.request(&environment, ".".as_ref())?;
            block_on(request::run(&request, &environment, ".".as_ref(), &mut io::stdout()))??;
            DONE
        }
        Some(Command::Request(flags)) => {
            block_on(request::run(&flags, &environment, ".".as_ref(), &mut io::stdout()))??;
            DONE
        }
        Some(Command::Standby) => {
            logging::init(log.options()?)?;
            let waiting = standby::wait::run(
                &environment,
                |record| envoy_program(record, &environment),
                |record| self_check(record, &environment),
            );
            let next = block_on(async {
                tokio::select! {
                    next = waiting => next,
                    never = free_memory() => match never {},
                }
            })?;
            if let Some(record) = next? {
                return Err(standby::exec::proxy(&record, &environment).into());
            }
            DONE
        }
        Some(Command::Wait(flags)) => {
            logging::init(log.options()?)?;
            block_on(wait::run(&flags))??;
            DONE
        }
        Some(Command::Version(flags)) => success(version::text(&flags, &environment)?),
        Some(Command::Completion(flags)) => success(completion::script(&flags)),
        Some(command @ (Command::Iptables(_) | Command::CleanIptables(_))) => {
            logging::init(log.options()?)?;
            let is_cleanup = matches!(command, Command::CleanIptables(_));
            match block_on(iptables::run(&line.flags, is_cleanup, &environment))? {
                Ok(captured) => captured,
                Err(error) => {
                    fail(error.as_ref(), false);
                    (String::new(), iptables::exit_code(&error))
                }
            }
        }
    };
    print(&text, has_colours)?;
    Ok(code)
}

fn success(text: String) -> (String, ExitCode) {
    (text, ExitCode::Success)
}

fn proxy(
    flags: ProxyFlags,
    log: LogFlags,
    all: Vec<Flag>,
    environment: Environment,
    unknown: Vec<String>,
) -> Result<ExitCode, BoxError> {
    version::announce(&environment)?;
    let envoy = config::proxy_config(&flags, &environment, ".".as_ref()).binary_path;
    let pair = block_on(Pair::enter(&environment, envoy.as_ref()))??;
    let mut config =
        config::load(&flags, &log, &environment, ".".as_ref()).map_err(config::Unusable)?;
    config.announce();
    config.ignored.extend(unknown);
    let sources = Arc::new((flags, log, all, environment));
    let report_sources = sources.clone();
    let settings = Settings {
        load: Arc::new(move || {
            let (flags, log, _, environment) = &*sources;
            config::load(flags, log, environment, ".".as_ref())
        }),
        report: Arc::new(move || {
            let (flags, log, all, environment) = &*report_sources;
            config::report::report(flags, log, all, environment, ".".as_ref()).json()
        }),
    };
    block_on(async {
        tokio::select! {
            ended = agent::run(config, settings, pair) => ended,
            never = free_memory() => match never {},
        }
    })?
}

/// Returns the flags of the agent with this record. None if that agent cannot parse them, which it reports.
fn recorded_flags(record: &Record) -> Option<(ProxyFlags, LogFlags)> {
    let words = std::iter::once("pilot-agent".to_owned()).chain(record.arguments.clone());
    match cli::parse(words).ok()?.cli {
        Cli { log, command: Some(Command::Proxy(flags)), .. } => Some((flags, log)),
        _ => None,
    }
}

/// Returns the path of the Envoy that an agent with this record and the environment `own` runs.
fn envoy_program(record: &Record, own: &Environment) -> PathBuf {
    let Some((flags, _)) = recorded_flags(record) else {
        return PathBuf::new();
    };
    let environment = record.environment(own).into_iter().collect();
    config::proxy_config(&flags, &environment, ".".as_ref()).binary_path.into()
}

/// Returns the reason why an agent with this record and the environment `own` could not connect to istiod.
fn self_check(record: &Record, own: &Environment) -> Option<String> {
    let (flags, log) = recorded_flags(record)?;
    let environment = record.environment(own).into_iter().collect();
    let problem = match config::load(&flags, &log, &environment, ".".as_ref()) {
        Ok(config) => config.istiod.credentials_problem(),
        Err(problems) => problems.into_iter().next(),
    }?;
    Some(format!("{}: {}", problem.subject, problem.found))
}

/// Runs a future on this thread, because the parent-death signal ends Envoy with the thread that started it.
fn block_on<F: Future>(future: F) -> io::Result<F::Output> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        // Only this thread handles stop signals, so that it can hold them while the process becomes another program.
        .on_thread_start(|| _ = lifecycle::hold_signals())
        .build()?;
    let output = runtime.block_on(future);
    // A resolver that hangs must not delay the exit.
    runtime.shutdown_background();
    Ok(output)
}

/// Prints the lines of a text, with coloured levels if it is a report. The last one may lack its line feed.
fn print(text: &str, has_colours: bool) -> Result<(), BoxError> {
    let printed = text.lines().map(logging::printable).try_for_each(|line| {
        let line = if has_colours { cli::coloured(&line) } else { line };
        writeln!(io::stdout(), "{line}")
    });
    cli::ignore_closed_pipe(printed)?;
    Ok(())
}

/// Reports the error on standard error and, like pilot-agent, in the log, which is on standard output. A command that
/// prints data there does not log the error.
fn fail(error: &(dyn std::error::Error + 'static), prints_data: bool) -> ExitCode {
    let text = with_causes(error);
    let lines: Vec<_> = text.split('\n').map(logging::printable).collect();
    // Standard error may be closed.
    let _ = writeln!(io::stderr(), "Error: {}", lines.join("\n"));
    if !prints_data {
        // Commands that fail before they set up logging, or that never do, log with the defaults.
        let _ = logging::init(logging::Options::default());
        let words: Vec<_> = text.split_whitespace().collect();
        tracing::error!("{}", words.join(" "));
    }
    ExitCode::CommandFailed
}
