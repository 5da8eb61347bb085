//! The door: reads the command line, starts logging, checks the configuration, runs the agent and
//! leaves with its exit code.
//!
//! Does not hold logic, and opens nothing before the configuration is known to be good.

use istio_agent::cli::{
    self, BootstrapFlags, Cli, Command, ExitCode, LogFlags, ProxyFlags, Refused, Typed, version,
};
use istio_agent::config::{self, environment::Environment};
use istio_agent::lifecycle::BoxError;
use istio_agent::{agent, bootstrap, logging};

fn main() -> std::process::ExitCode {
    let code = match cli::parse(std::env::args()) {
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
        Some(Command::Bootstrap(flags)) => show_bootstrap(&flags, &log),
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
    runtime.block_on(agent::run(config))
}

fn show_bootstrap(flags: &BootstrapFlags, log: &LogFlags) -> Result<ExitCode, BoxError> {
    let environment = Environment::of_process();
    let mut config =
        config::load(&flags.proxy, log, &environment, ".".as_ref()).map_err(config::Unusable)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let platform = bootstrap::platform::discover(&config.platform);
    config.bootstrap.node.platform = runtime.block_on(platform);
    let text = bootstrap::show::show(&config.bootstrap, flags.output.as_deref())?;
    if flags.validate {
        let envoy = config
            .envoy
            .ok_or("without Envoy nobody can validate the bootstrap")?;
        let over = envoy.command.override_json.as_deref();
        bootstrap::show::validate(&config.bootstrap, &envoy.command.binary, over)?;
    }
    Ok(text.map_or(ExitCode::Success, |text| print(&text)))
}

fn print(text: &str) -> ExitCode {
    println!("{text}");
    ExitCode::Success
}

fn fail(error: &(dyn std::error::Error + 'static)) -> ExitCode {
    let causes = std::iter::successors(Some(error), |error| error.source());
    let text = causes
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(": ");
    eprintln!("Error: {text}");
    tracing::error!("{text}");
    ExitCode::CommandFailed
}
