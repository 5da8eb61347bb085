//! The `doctor` command: asks the running agent what is wrong, or checks without it. Takes the flags of
//! `proxy`, for when no agent runs.

use std::time::Duration;

use bytes::Bytes;
use clap::Args;
use http::{Request, StatusCode};

use crate::config;
use crate::config::environment::Environment;
use crate::config::flags::{LogFlags, ProxyFlags};
use crate::doctor;
use crate::doctor::report::{Check, Level, Report};
use crate::exit_code::ExitCode;
use crate::http_client::{self, Client, http_url};
use crate::lifecycle::with_causes;

/// How long an agent that serves may take for a page it has at hand.
const ALIVE_LIMIT: Duration = Duration::from_millis(400);
/// Beyond what the agent's own report takes.
const MARGIN: Duration = Duration::from_millis(200);
const LARGEST_REPORT: usize = 1 << 20;

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
        Ok((StatusCode::OK, body)) => match serde_json::from_slice(&body) {
            Ok(report) => return Ok(report),
            Err(error) => error.to_string(),
        },
        Ok((status, _)) => format!("port {port} answers {status} to /debug/doctor"),
        Err(error) => with_causes(&error),
    };
    Err(Check::warning(name, found).expected("its report, as of this version"))
}

async fn get(url: &str, limit: Duration) -> Result<(StatusCode, Bytes), http_client::Error> {
    let mut request = Request::new(Bytes::new());
    *request.uri_mut() = http_url(url)?;
    let answer = Client::default()
        .fetch(request, limit, LARGEST_REPORT)
        .await?;
    let (head, body) = answer.into_parts();
    Ok((head.status, body))
}
