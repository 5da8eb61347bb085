//! The `doctor` command: asks the running agent what is wrong, or checks without it. Takes the flags of
//! `proxy`, for when no agent runs.

use std::time::Duration;

use clap::Args;
use http::StatusCode;
use tokio::time::Instant;

use crate::config::environment::Environment;
use crate::config::flags::{LogFlags, ProxyFlags};
use crate::config::{self, Config, Problem};
use crate::doctor::report::{Check, Level, Report};
use crate::doctor::{self, get};
use crate::exit_code::ExitCode;
use crate::http_client;
use crate::lifecycle::with_causes;

/// How long an agent that serves may take for a page it has at hand, and files for being read.
const ALIVE_LIMIT: Duration = Duration::from_millis(400);
/// How long the agent's report may take, with all that is asked before.
const AGENT_LIMIT: Duration = doctor::LIMIT.saturating_add(Duration::from_millis(600));
/// What is quoted of an answer that is no report, in characters.
const MAX_QUOTE: usize = 300;
/// Where agents answer unless configured otherwise.
const USUAL_PORT: u16 = 15020;

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
    let until = crate::clock::after(AGENT_LIMIT);
    let (port, config) = configuration(flags.proxy.clone(), log.clone(), environment.clone()).await;
    let mut before = Vec::new();
    let mut is_late = false;
    if let Some(port) = port {
        match of_agent(port, until).await {
            Ok(report) => return report,
            Err(failed) => {
                is_late = failed.is_late;
                before.push(failed.check);
            }
        }
    }
    match is_late {
        true => doctor::report_of_settings(&config, before),
        false => doctor::report(&config, None, before).await,
    }
}

/// The agent's status port, if it has one, and its configuration.
async fn configuration(
    flags: ProxyFlags,
    log: LogFlags,
    environment: Environment,
) -> (Option<u16>, Result<Config, Vec<Problem>>) {
    let read = tokio::task::spawn_blocking(move || {
        let port = config::status_port(&environment, ".".as_ref());
        (port, config::load(&flags, &log, &environment, ".".as_ref()))
    });
    let read = tokio::time::timeout(ALIVE_LIMIT, read).await;
    let found = match read {
        Ok(Ok(read)) => return read,
        Ok(Err(panic)) => panic.to_string(),
        Err(_) => format!("not read within {ALIVE_LIMIT:?}"),
    };
    let problem = Problem::new("files of the configuration", found, "a disk that answers");
    (Some(USUAL_PORT), Err(vec![problem]))
}

/// 0 if all is well, 1 with warnings, 2 with errors.
pub fn exit_code(level: Level) -> ExitCode {
    match level {
        Level::Ok | Level::Skipped => ExitCode::Success,
        Level::Warning => ExitCode::DoctorWarnings,
        Level::Error => ExitCode::DoctorErrors,
    }
}

/// Why the agent has given no report.
struct Failed {
    check: Check,
    /// Whether no time is left to check without it.
    is_late: bool,
}

async fn of_agent(port: u16, until: Instant) -> Result<Report, Failed> {
    let name = "running agent";
    let of = |page: &str| format!("http://127.0.0.1:{port}/debug/{page}");
    let outside = "what follows is checked from outside";
    match get(&of("logging"), ALIVE_LIMIT).await {
        Ok(_) => {}
        Err(http_client::Error::Connect(error)) => {
            let start = format!("{outside}; start the agent, or look in its log why it ended");
            let check = Check::warning(name, with_causes(&error)).remedy(start);
            return Err(Failed {
                check,
                is_late: false,
            });
        }
        Err(error) => {
            let found = format!("port {port}: {}", with_causes(&error));
            let hangs = format!("{outside}; restart the container if it stays so");
            let check = Check::error(name, found)
                .expected("an answer")
                .remedy(hangs);
            return Err(Failed {
                check,
                is_late: false,
            });
        }
    }
    let left = until.saturating_duration_since(Instant::now());
    let (found, is_late) = match get(&of("doctor"), left).await {
        Ok(answer) if answer.status() == StatusCode::OK => {
            match serde_json::from_slice(answer.body()) {
                Ok(report) => return Ok(report),
                Err(error) => {
                    let found = format!("port {port} answers no report to /debug/doctor: {error}");
                    (found, false)
                }
            }
        }
        Ok(answer) => {
            let (status, text) = (answer.status(), String::from_utf8_lossy(answer.body()));
            let text: String = text.trim().chars().take(MAX_QUOTE).collect();
            let found = format!("port {port} answers {status} to /debug/doctor: {text:?}");
            (found, false)
        }
        Err(error) => (with_causes(&error), true),
    };
    let check = match is_late {
        true => Check::error(name, found).remedy("run it again"),
        false => Check::warning(name, found)
            .remedy("run it as root or as the agent's user; or the agent is of another version, or another process has its port"),
    };
    let check = check.expected("its report");
    Err(Failed { check, is_late })
}
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exit_code_is_the_level_of_the_report() {
        for (level, code) in [
            (Level::Ok, ExitCode::Success),
            (Level::Skipped, ExitCode::Success),
            (Level::Warning, ExitCode::DoctorWarnings),
            (Level::Error, ExitCode::DoctorErrors),
        ] {
            assert_eq!(exit_code(level), code);
        }
    }
}
