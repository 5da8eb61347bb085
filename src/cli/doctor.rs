//! The `doctor` command: asks the running agent what is wrong, or checks without it. Takes the flags of
//! `proxy`, for when no agent runs.

use std::time::Duration;

use bytes::Bytes;
use clap::Args;
use http::{Response, StatusCode};

use crate::config::environment::Environment;
use crate::config::flags::{LogFlags, ProxyFlags};
use crate::config::{self, Config, Problem};
use crate::doctor::report::{Check, Level, Report};
use crate::doctor::{self, get};
use crate::exit_code::ExitCode;
use crate::http_client;
use crate::lifecycle::with_causes;
use crate::problem::codes;
use crate::support_bundle::PATIENCE;

/// How long the agent's report may take.
const AGENT_LIMIT: Duration = doctor::LIMIT.saturating_add(Duration::from_millis(200));
/// The length of the quoted beginning of an answer that is not a report, in characters.
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
pub async fn report(flags: &ProxyFlags, log: &LogFlags, environment: &Environment) -> Report {
    let (flags, log, env) = (flags.clone(), log.clone(), environment.clone());
    let read = doctor::run_within(PATIENCE, &doctor::THREADS, move || {
        let port = config::status_port(&env, ".".as_ref());
        let config = config::load(&flags, &log, &env, ".".as_ref());
        (port, config, Vec::new())
    });
    let (port, config, mut before) = read.await.unwrap_or_else(unread);
    if let Some(port) = port {
        match of_agent(port).await {
            Ok(report) => return report,
            Err(check) => before.push(check),
        }
    }
    if before.iter().any(|check| check.level == Level::Error) {
        doctor::report_of_settings(&config, before)
    } else {
        doctor::report(&config, None, before).await
    }
}

/// Stands for a configuration whose files were not read in time, which is not a finding.
fn unread(why: String) -> (Option<u16>, Result<Config, Vec<Problem>>, Vec<Check>) {
    let late = Problem::new(codes::CHECKS_LATE, "configuration files", why);
    let check = Check::problem(Level::Skipped, &late);
    (Some(USUAL_PORT), Err(Vec::new()), vec![check])
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
    let name = format!("agent on port {port}");
    let url = format!("http://127.0.0.1:{port}/debug/doctor");
    let found = match get(&url, AGENT_LIMIT).await {
        Ok(answer) => match serde_json::from_slice(answer.body()) {
            Ok(report) if answer.status() == StatusCode::OK => return Ok(report),
            _ => Problem::new(codes::AGENT_UNKNOWN, name, quoted(&answer)),
        },
        Err(http_client::Error::Connect(error)) => {
            Problem::new(codes::AGENT_NOT_RUNNING, name, with_causes(&error))
        }
        Err(error) => {
            let silent = Problem::new(codes::AGENT_SILENT, name, with_causes(&error));
            return Err(Check::problem(Level::Error, &silent));
        }
    };
    Err(Check::problem(Level::Warning, &found))
}

/// Returns the status and the beginning of an unknown answer.
pub(super) fn quoted(answer: &Response<Bytes>) -> String {
    let text = String::from_utf8_lossy(answer.body());
    let text: String = text.trim().chars().take(MAX_QUOTE).collect();
    format!("{}: {text:?}", answer.status())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn files_that_are_not_read_in_time_are_not_checked_and_no_finding() {
        static ONE: tokio::sync::Semaphore = tokio::sync::Semaphore::const_new(1);
        let (release, released) = std::sync::mpsc::channel::<()>();
        let read = move || {
            let _ = released.recv();
            (
                None,
                Err(vec![Problem::new(codes::FILE_MISSING, "a", "b")]),
                Vec::new(),
            )
        };
        let read = doctor::run_within(Duration::from_millis(1), &ONE, read).await;
        let (port, config, before) = read.unwrap_or_else(unread);
        assert_eq!(port, Some(USUAL_PORT));
        let report = doctor::report(&config, None, before).await;
        assert_eq!(report.level, Level::Skipped, "{report}");
        assert!(
            report.to_string().contains("not finished within 1 ms"),
            "{report}"
        );
        assert_eq!(PATIENCE, Duration::from_secs(5));
        drop(release);
    }

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
