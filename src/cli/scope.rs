//! The `scope` command: the `Sidecar` resource for what this workload uses, as the running agent sees it,
//! or for several pods whose use was printed as JSON.

use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

use bytes::Bytes;
use clap::Args;
use http::{Request, StatusCode};
use serde_json::Value;

use crate::config;
use crate::config::environment::Environment;
use crate::http_client::{self, Client, http_url};
use crate::scope::advice::{self, Keep};
use crate::scope::{LIMIT, Usage};

/// The largest answer of the agent that is read.
const MAX_ANSWER: usize = 16 << 20;

#[derive(Args, Clone, Debug)]
pub struct ScopeFlags {
    /// Prints what was used as JSON, for --merge.
    #[arg(long)]
    json: bool,
    /// Files that --json has printed for pods of one workload: all they used together.
    #[arg(long, num_args = 1.., value_name = "FILE")]
    merge: Vec<PathBuf>,
    /// Keeps these services, too: <namespace>/<host>, such as istio-system/*, or ./* for the own namespace.
    #[arg(long, value_name = "HOST")]
    keep: Vec<String>,
    /// Keeps services whose names were asked for, though they had no connection.
    #[arg(long = "include-asked", num_args = 0..=1, require_equals = true, default_value = "true",
          default_missing_value = "true", value_parser = config::flags::truth,
          action = clap::ArgAction::Set)]
    include_asked: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read {path:?}")]
    File { path: PathBuf, source: io::Error },
    #[error("{of}: expected what pilot-agent scope --json prints")]
    Json {
        of: String,
        source: serde_json::Error,
    },
    #[error("the agent has no status port, so it cannot be asked")]
    NoPort,
    #[error("the agent cannot be asked")]
    Http(#[from] http_client::Error),
    #[error("the agent answers {status}: {text}")]
    Status { status: StatusCode, text: String },
    #[error("{0}")]
    Agent(String),
    #[error(transparent)]
    Advice(#[from] advice::Error),
}

/// What the command prints.
pub async fn run(flags: &ScopeFlags, environment: &Environment) -> Result<String, Error> {
    let usage = match flags.merge.as_slice() {
        [] => of_agent(environment).await?,
        files => {
            let all: Result<Vec<_>, _> = files.iter().map(|path| of_file(path)).collect();
            advice::merge(all?)?
        }
    };
    let keep = Keep {
        hosts: flags.keep.clone(),
        asked: flags.include_asked,
    };
    match flags.json {
        true => serde_json::to_string_pretty(&usage).map_err(|source| Error::Json {
            of: "the answer".to_owned(),
            source,
        }),
        false => Ok(advice::sidecar(&usage, &keep)?),
    }
}

fn of_file(path: &Path) -> Result<Usage, Error> {
    let text = fs::read(path).map_err(|source| Error::File {
        path: path.to_owned(),
        source,
    })?;
    serde_json::from_slice(&text).map_err(|source| Error::Json {
        of: format!("{path:?}"),
        source,
    })
}

async fn of_agent(environment: &Environment) -> Result<Usage, Error> {
    let port = config::status_port(environment, ".".as_ref()).ok_or(Error::NoPort)?;
    let mut request = Request::new(Bytes::new());
    *request.uri_mut() = http_url(&format!("http://127.0.0.1:{port}/debug/scope"))?;
    let limit = LIMIT.saturating_add(Duration::from_secs(1));
    let answer = Client::default().fetch(request, limit, MAX_ANSWER).await?;
    if answer.status() != StatusCode::OK {
        let text = String::from_utf8_lossy(answer.body()).trim().to_owned();
        let status = answer.status();
        return Err(Error::Status { status, text });
    }
    let wrong = |source| Error::Json {
        of: format!("the answer of port {port}"),
        source,
    };
    let answer: Value = serde_json::from_slice(answer.body()).map_err(wrong)?;
    match answer["error"].as_str() {
        Some(error) => Err(Error::Agent(error.to_owned())),
        None => serde_json::from_value(answer).map_err(wrong),
    }
}
