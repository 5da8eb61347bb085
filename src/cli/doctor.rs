//! The `doctor` command: asks the running agent what is wrong, or checks without it. Takes the flags of
//! `proxy`, for when no agent runs.

use std::time::Duration;

use clap::Args;
use http::StatusCode;

use crate::config;
use crate::config::environment::Environment;
use crate::config::flags::{LogFlags, ProxyFlags};
use crate::doctor::report::{Check, Level, Report};
use crate::doctor::{self, get};
use crate::exit_code::ExitCode;
use crate::http_client;
use crate::lifecycle::with_causes;

/// How long an agent that serves may take for a page it has at hand.
const ALIVE_LIMIT: Duration = Duration::from_millis(400);
/// Beyond what the agent's own report takes.
const MARGIN: Duration = Duration::from_millis(200);

#[derive(Args, Clone, Debug)]
pub struct DoctorFlags {
    #[command(flatten)]
    pub proxy: ProxyFlags,
    /// Prints JSON.
    #[arg(long)]
    pub json: bool,
}

/// The report of the running agent, or of this process if there is none that answers.
pub async fn report(flags: &DoctorFlags, log: &LogFlags, environment: &Environment) -> Report {
    let mut before = Vec::new();
    if let Some(port) = config::status_port(environment, ".".as_ref()) {
        match of_agent(port).await {
            Ok(report) => return report,
            Err(check) => before.push(check),
        }
    }
    let config = config::load(&flags.proxy, log, environment, ".".as_ref());
    doctor::report(&config, None, before).await
}

/// 0 if all is well, 1 with warnings, 2 with errors.
pub fn exit_code(report: &Report) -> ExitCode {
    match report.level {
        Level::Ok | Level::Skipped => ExitCode::Success,
        Level::Warning => ExitCode::DoctorWarnings,
        Level::Error => ExitCode::DoctorErrors,
    }
}

async fn of_agent(port: u16) -> Result<Report, Check> {
    let name = "running agent";
    let of = |page: &str| format!("http://127.0.0.1:{port}/debug/{page}");
    let start = "its checks are made from outside; start it, or look why it ended";
    match get(&of("logging"), ALIVE_LIMIT).await {
        Ok(_) => {}
        Err(http_client::Error::Connect(error)) => {
            return Err(Check::warning(name, with_causes(&error)).remedy(start));
        }
        Err(error) => {
            let found = format!("port {port}: {}", with_causes(&error));
            let hangs = "its checks are made from outside; restart the container if it stays so";
            return Err(Check::error(name, found)
                .expected("an answer")
                .remedy(hangs));
        }
    }
    let found = match get(&of("doctor"), doctor::LIMIT + MARGIN).await {
        Ok(answer) if answer.status() == StatusCode::OK => {
            match serde_json::from_slice(answer.body()) {
                Ok(report) => return Ok(report),
                Err(error) => error.to_string(),
            }
        }
        Ok(answer) => format!("port {port} answers {} to /debug/doctor", answer.status()),
        Err(error) => with_causes(&error),
    };
    Err(Check::warning(name, found).expected("its report, as of this version"))
}
