//! The `doctor` command: asks the running agent what is wrong, or checks without it. Takes the flags of
//! `proxy`, for when no agent runs.

use std::time::Duration;

use clap::Args;
use http::StatusCode;

use crate::config::environment::Environment;
use crate::config::flags::{LogFlags, ProxyFlags};
use crate::config::{self, Config, Problem};
use crate::doctor::report::{Check, Level, Report};
use crate::doctor::{self, get};
use crate::exit_code::ExitCode;
use crate::http_client;
use crate::lifecycle::with_causes;

/// How long files of the configuration may take for being read.
const FILES_LIMIT: Duration = Duration::from_millis(400);
/// How long the agent's report may take.
const AGENT_LIMIT: Duration = doctor::LIMIT.saturating_add(Duration::from_millis(200));
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

/// The report of the running agent, or of this process if none runs. An agent that hangs leaves no time
/// to check without it.
pub async fn report(flags: &DoctorFlags, log: &LogFlags, environment: &Environment) -> Report {
    let (port, config) = configuration(flags.proxy.clone(), log.clone(), environment.clone()).await;
    let Some(port) = port else {
        return doctor::report(&config, None, Vec::new()).await;
    };
    match of_agent(port).await {
        Ok(report) => report,
        Err(check) if check.level == Level::Error => {
            doctor::report_of_settings(&config, vec![check])
        }
        Err(check) => doctor::report(&config, None, vec![check]).await,
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
    let read = tokio::time::timeout(FILES_LIMIT, read).await;
    let found = match read {
        Ok(Ok(read)) => return read,
        Ok(Err(panic)) => panic.to_string(),
        Err(_) => format!("not read within {FILES_LIMIT:?}"),
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

/// The agent's report, or why there is none: an error if the agent hangs.
async fn of_agent(port: u16) -> Result<Report, Check> {
    let name = "running agent";
    let outside = "what follows is checked from outside";
    let url = format!("http://127.0.0.1:{port}/debug/doctor");
    let found = match get(&url, AGENT_LIMIT).await {
        Ok(answer) => match serde_json::from_slice(answer.body()) {
            Ok(report) if answer.status() == StatusCode::OK => return Ok(report),
            _ => {
                let text = String::from_utf8_lossy(answer.body());
                let text: String = text.trim().chars().take(MAX_QUOTE).collect();
                format!("port {port} answers {}: {text:?}", answer.status())
            }
        },
        Err(http_client::Error::Connect(error)) => {
            return Err(Check::warning(name, with_causes(&error)).remedy(format!(
                "{outside}; start the agent, or look in its log why it ended"
            )));
        }
        Err(error) => {
            return Err(Check::error(name, with_causes(&error))
                .expected("its report")
                .remedy("run it again, and restart the container if it stays so"));
        }
    };
    Err(Check::warning(name, found).expected("its report").remedy(format!(
        "{outside}; run it as root or as the agent's user; or the agent is of another version, or another \
         process has its port"
    )))
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
