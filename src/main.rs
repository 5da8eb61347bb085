//! The door: reads the command line, starts logging, checks the configuration, runs the agent and
//! leaves with its exit code.
//!
//! Does not hold logic, and opens nothing before the configuration is known to be good.

use std::io::Write;

use istio_agent::cli::{
    self, Cli, Command, ExitCode, LogFlags, ProxyFlags, Refused, Typed, config::ConfigFlags,
    version,
};
use istio_agent::config::{self, environment::Environment};
use istio_agent::lifecycle::BoxError;
use istio_agent::{agent, logging};

fn main() -> std::process::ExitCode {
    let code = match cli::parse(std::env::args_os().map(|word| word.to_string_lossy().into_owned()))
    {
        Ok(typed) => run(typed).unwrap_or_else(|error| fail(error.as_ref())),
        Err(Refused::Help(text)) => print(&text),
        Err(Refused::Error(text)) => fail(BoxError::from(text).as_ref()),
    };
    code.into()
}

fn run(typed: Typed) -> Result<ExitCode, BoxError> {
    let Cli { log, command } = typed.cli;
    match command {
        None => Ok(print(&cli::help())),
        Some(Command::Version(flags)) => Ok(print(&version::text(&flags))),
        Some(Command::Config(flags)) => Ok(show_config(&flags, &log)),
        Some(Command::Proxy(flags)) => proxy(&flags, &log, &typed.unknown_flags),
    }
}

fn proxy(flags: &ProxyFlags, log: &LogFlags, unknown: &[String]) -> Result<ExitCode, BoxError> {
    logging::init(log.options()?)?;
    cli::announce(flags, log, unknown);
    let environment = Environment::of_process();
    let config = config::load(flags, log, &environment, ".".as_ref()).map_err(config::Unusable)?;
    config.announce();
    // The kernel ends Envoy with the thread that started it, so there is one thread.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let result = runtime.block_on(agent::run(config));
    // A name still being resolved must not hold up the end.
    runtime.shutdown_background();
    result
}

fn show_config(flags: &ConfigFlags, log: &LogFlags) -> ExitCode {
    let environment = Environment::of_process();
    let report = config::report::report(&flags.proxy, log, &environment, ".".as_ref());
    match flags.output.as_str() {
        "json" => println!("{:#}", report.json()),
        _ => print!("{}", report.yaml()),
    }
    if report.is_usable() {
        ExitCode::Success
    } else {
        ExitCode::CommandFailed
    }
}

fn print(text: &str) -> ExitCode {
    let _ = writeln!(std::io::stdout(), "{text}"); // Nobody reads, so nobody misses it.
    ExitCode::Success
}

fn fail(error: &(dyn std::error::Error + 'static)) -> ExitCode {
    let causes = std::iter::successors(Some(error), |error| error.source());
    let text = causes
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(": ");
    let _ = writeln!(std::io::stderr(), "Error: {text}"); // The log line below may get through.
    tracing::error!("{text}");
    ExitCode::CommandFailed
}
