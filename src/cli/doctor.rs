//! Implements the `doctor` command: prints the report of the running agent, or makes the checks itself if no
//! agent runs, for which it takes the flags of `proxy`.

use std::io::{self, IsTerminal};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use bytes::Bytes;
use clap::Args;
use http::{Response, StatusCode};
use serde_json::json;

use super::FormatFlags;
use crate::config::environment::Environment;
use crate::config::flags::{LogFlags, ProxyFlags};
use crate::config::{self, Config};
use crate::doctor::{self, get, used_up_ports};
use crate::net::http_client;
use crate::problem::{Code, Level, Problem};
use crate::report::{Check, PodState, Report};
use crate::runtime::blocking::{THREADS, run_within};
use crate::runtime::exit_code::ExitCode;
use crate::runtime::lifecycle::with_causes;
use crate::support_bundle::STEP_LIMIT;

/// Time limit of the agent's report.
const AGENT_LIMIT: Duration = doctor::LIMIT.saturating_add(Duration::from_millis(200));
/// Maximum length of the quote of a response that is not a report, in characters.
const MAX_QUOTE: usize = 300;
/// The width of a report on a terminal.
const WIDTH: usize = 120;
/// Status port of agents without other configuration.
const DEFAULT_PORT: u16 = 15020;
/// Script that starts commands with the settings of the systemd unit.
const UNIT_SCRIPT: &str = "/usr/libexec/istio-agent/start";
/// Variable that the script's command has, so that it does not start the script again.
const STARTED_BY_SCRIPT: &str = "PILOT_AGENT_DOCTOR";

#[derive(Args, Clone, Debug)]
pub struct DoctorFlags {
    #[command(flatten)]
    pub proxy: ProxyFlags,
    #[command(flatten)]
    pub format: FormatFlags,
    /// Prints passed and skipped checks, too.
    #[arg(long)]
    pub verbose: bool,
}

/// Runs this command again with the settings of the machine's unit, if the machine has one.
pub fn restart_with_unit(environment: &Environment) {
    // `exec` changes the directory even if it fails, so the script must exist. It does not exist in a pod.
    if Path::new(UNIT_SCRIPT).exists() && environment.text(STARTED_BY_SCRIPT).is_none() {
        let words = std::env::args_os().skip_while(|word| word != "doctor");
        let mut command = Command::new(UNIT_SCRIPT);
        command.args(words).env(STARTED_BY_SCRIPT, "1");
        let _ = command.current_dir("/").exec();
    }
}

/// Returns the report as text or JSON, and the exit code.
pub async fn run(
    flags: &DoctorFlags,
    log: &LogFlags,
    environment: &Environment,
) -> (String, ExitCode) {
    let width = if io::stdout().is_terminal() { WIDTH } else { usize::MAX };
    match report(&flags.proxy, log, environment).await {
        Ok(report) if flags.format.is_json() => {
            (format!("{:#}", json!(report)), exit_code(report.level))
        }
        Ok(report) => (report.text(flags.verbose, width), exit_code(report.level)),
        Err(refusal) if flags.format.is_json() => {
            (format!("{:#}", json!(refusal)), ExitCode::DoctorRefused)
        }
        Err(refusal) => (refusal.to_string(), ExitCode::DoctorRefused),
    }
}

/// Returns the report of the running agent, or of this process if no agent runs. Fails if the agent refuses the
/// caller. If the agent hangs, only its settings are checked, because there is no time for other checks.
pub async fn report(
    flags: &ProxyFlags,
    log: &LogFlags,
    environment: &Environment,
) -> Result<Report, Problem> {
    let flags = flags.clone();
    let log = log.clone();
    let env = environment.clone();
    let read = run_within(STEP_LIMIT, &THREADS, move || {
        let root = Path::new(".");
        (config::status_port(&env, root), config::load(&flags, &log, &env, root), Vec::new())
    });
    let (port, config, mut checks) = read.await.unwrap_or_else(unread);
    let Some(port) = port else {
        let report = doctor::report(&config, None, checks).await;
        return Ok(
            report.judged(&PodState::Unknown("the agent has no status port".to_owned()), None)
        );
    };
    let state = PodState::Unknown(format!("no agent answers on port {port}"));
    let problem = match request_report(port).await {
        Ok(report) => return Ok(report),
        Err(refused) if refused.code == Code::CallerRefused => return Err(refused),
        Err(problem) => problem,
    };
    if problem.code != Code::AgentNotRunning {
        checks.push(Check::from(&problem));
    }
    let report = if problem.code == Code::AgentSilent {
        doctor::check_settings(&config, checks)
    } else {
        doctor::report(&config, None, checks).await
    };
    Ok(report.judged(&state, Some(&problem)))
}

/// Replaces a configuration whose files were not read in time by a skipped check, which is not a finding.
fn unread(why: String) -> (Option<u16>, Result<Config, Vec<Problem>>, Vec<Check>) {
    let late = Problem::new(Code::ChecksLate, "configuration files", why);
    (Some(DEFAULT_PORT), Err(Vec::new()), vec![Check::with_level(Level::Skipped, &late)])
}

/// Returns the exit code of a report: 0, or 1 with warnings, or 2 with errors.
pub fn exit_code(level: Level) -> ExitCode {
    match level {
        Level::Ok | Level::Skipped => ExitCode::Success,
        Level::Warning => ExitCode::DoctorWarnings,
        Level::Error => ExitCode::DoctorErrors,
    }
}

/// Requests the agent's report.
async fn request_report(port: u16) -> Result<Report, Problem> {
    let url = format!("http://127.0.0.1:{port}/debug/doctor");
    let response = get(&url, AGENT_LIMIT).await.map_err(|error| {
        let code = match error {
            http_client::Error::Connect(_) => Code::AgentNotRunning,
            _ => Code::AgentSilent,
        };
        used_up_ports(&error).unwrap_or_else(|| Problem::new(code, "agent", with_causes(&error)))
    })?;
    if response.status() == StatusCode::FORBIDDEN {
        let body = String::from_utf8_lossy(response.body());
        let text = body.rsplit_once(" [").map_or(body.trim(), |(text, _)| text);
        return Err(Problem::new(Code::CallerRefused, "doctor", text).remedy(""));
    }
    serde_json::from_slice(response.body())
        .map_err(|_| Problem::new(Code::AgentUnknown, format!("port {port}"), quoted(&response)))
}

/// Returns the status and the beginning of an unknown response.
pub(super) fn quoted(response: &Response<Bytes>) -> String {
    let body = String::from_utf8_lossy(response.body());
    let start: String = body.trim().chars().take(MAX_QUOTE).collect();
    format!("{}: {start:?}", response.status())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_doctor_reports_files_not_read_in_time_as_not_checked() {
        static ONE: tokio::sync::Semaphore = tokio::sync::Semaphore::const_new(1);
        let (release, released) = std::sync::mpsc::channel::<()>();
        let read = move || {
            let _ = released.recv();
            (None, Err(vec![Problem::new(Code::FileMissing, "a", "b")]), Vec::new())
        };
        let read = run_within(Duration::from_millis(1), &ONE, read).await;
        let (port, config, before) = read.unwrap_or_else(unread);
        assert_eq!(port, Some(DEFAULT_PORT));
        let report = doctor::report(&config, None, before).await;
        assert_eq!(report.level, Level::Skipped, "{report:?}");
        assert!(report.text(true, WIDTH).contains("not finished within 1 ms"), "{report:?}");
        assert_eq!(STEP_LIMIT, Duration::from_secs(5));
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
