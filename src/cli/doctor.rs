//! The `doctor` command: asks the running agent what is wrong, or checks without it. Takes the flags of
//! `proxy`, for when no agent runs.

use std::io::{self, IsTerminal};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use bytes::Bytes;
use clap::Args;
use http::{Response, StatusCode};
use serde_json::json;

use crate::config::environment::Environment;
use crate::config::flags::{LogFlags, ProxyFlags};
use crate::config::{self, Config, Problem};
use crate::doctor::{self, get};
use crate::exit_code::ExitCode;
use crate::http_client;
use crate::lifecycle::with_causes;
use crate::problem::codes;
use crate::report::{Check, Level, Report};
use crate::support_bundle::PATIENCE;

/// How long the agent's report may take.
const AGENT_LIMIT: Duration = doctor::LIMIT.saturating_add(Duration::from_millis(200));
/// The length of the quoted beginning of an answer that is not a report, in characters.
const MAX_QUOTE: usize = 300;
/// The width of a report on a terminal.
const WIDTH: usize = 120;
/// Where agents answer unless configured otherwise.
const USUAL_PORT: u16 = 15020;
/// Starts commands with the settings of the systemd unit.
const UNIT: &str = "/usr/libexec/istio-agent/start";
/// The variable of a command that the script has started, so that it does not start the script again.
const OF_UNIT: &str = "PILOT_AGENT_DOCTOR";

#[derive(Args, Clone, Debug)]
pub struct DoctorFlags {
    #[command(flatten)]
    pub proxy: ProxyFlags,
    /// Prints JSON.
    #[arg(long)]
    pub json: bool,
    /// Prints passed and skipped checks, too.
    #[arg(long)]
    pub verbose: bool,
}

/// Runs this command again with the settings of the machine's unit, if the machine has one.
pub fn restart_with_unit(environment: &Environment) {
    // A failed `exec` has changed the directory, so the script must exist. It does not in a pod.
    if Path::new(UNIT).exists() && environment.text(OF_UNIT).is_none() {
        let words = std::env::args_os().skip_while(|word| word != "doctor");
        let _ = Command::new(UNIT)
            .args(words)
            .env(OF_UNIT, "1")
            .current_dir("/")
            .exec();
    }
}

/// Returns the report as text or JSON, and the exit code.
pub async fn run(
    flags: &DoctorFlags,
    log: &LogFlags,
    environment: &Environment,
) -> (String, ExitCode) {
    let is_terminal = io::stdout().is_terminal();
    let width = if is_terminal { WIDTH } else { usize::MAX };
    let report = report(&flags.proxy, log, environment).await;
    let level = report.as_ref().map(|it| it.level);
    let text = match &report {
        Ok(report) if flags.json => format!("{:#}", json!(report)),
        Ok(report) => report.text(flags.verbose, width),
        Err(refusal) if flags.json => format!("{:#}", json!(refusal)),
        Err(refusal) => refusal.to_string(),
    };
    (text, level.map_or(ExitCode::DoctorRefused, exit_code))
}

/// Returns the report of the running agent, or of this process if none runs, or that the agent refuses the
/// caller. An agent that hangs leaves no time for checks from outside.
pub async fn report(
    flags: &ProxyFlags,
    log: &LogFlags,
    environment: &Environment,
) -> Result<Report, Problem> {
    let (flags, log, env) = (flags.clone(), log.clone(), environment.clone());
    let read = doctor::run_within(PATIENCE, &doctor::THREADS, move || {
        let port = config::status_port(&env, ".".as_ref());
        let config = config::load(&flags, &log, &env, ".".as_ref());
        (port, config, Vec::new())
    });
    let (port, config, mut before) = read.await.unwrap_or_else(unread);
    let Some(port) = port else {
        let report = doctor::report(&config, None, before).await;
        return Ok(report.judged("the agent has no status port", None));
    };
    let state = format!("no agent answers on port {port}");
    let problem = match of_agent(port).await {
        Ok(report) => return Ok(report),
        Err(refused) if refused.code == codes::CALLER_REFUSED => return Err(refused),
        Err(problem) => problem,
    };
    if problem.code != codes::AGENT_NOT_RUNNING {
        before.push(Check::of(&problem));
    }
    let report = if problem.code == codes::AGENT_SILENT {
        doctor::report_of_settings(&config, before)
    } else {
        doctor::report(&config, None, before).await
    };
    Ok(report.judged(&state, Some(&problem)))
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

/// Requests the agent's report.
async fn of_agent(port: u16) -> Result<Report, Problem> {
    let url = format!("http://127.0.0.1:{port}/debug/doctor");
    let answer = get(&url, AGENT_LIMIT).await.map_err(|error| {
        let code = match error {
            http_client::Error::Connect(_) => codes::AGENT_NOT_RUNNING,
            _ => codes::AGENT_SILENT,
        };
        Problem::new(code, "agent", with_causes(&error))
    })?;
    if answer.status() == StatusCode::FORBIDDEN {
        let text = String::from_utf8_lossy(answer.body());
        let text = text.rsplit_once(" [").map_or(text.trim(), |(text, _)| text);
        return Err(Problem::new(codes::CALLER_REFUSED, "doctor", text).remedy(""));
    }
    let report = serde_json::from_slice(answer.body()).map_err(|_| {
        let subject = format!("port {port}");
        Problem::new(codes::AGENT_UNKNOWN, subject, quoted(&answer))
    });
    // Older agents give no verdict.
    report.map(|report: Report| match report.verdict.as_str() {
        "" => report.judged("the agent runs", None),
        _ => report,
    })
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
        assert_eq!(report.level, Level::Skipped, "{report:?}");
        assert!(
            report
                .text(true, WIDTH)
                .contains("not finished within 1 ms"),
            "{report:?}"
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
