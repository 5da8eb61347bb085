//! The `scope` command: the `Sidecar` resource for what this workload uses, as the running agent sees it,
//! or for several pods whose use was printed as JSON.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use clap::Args;
use http::Request;
use serde::Deserialize;

use crate::config;
use crate::config::environment::Environment;
use crate::http_client::{Client, http_url};
use crate::lifecycle::BoxError;
use crate::scope::advice::{self, Keep};
use crate::scope::{LIMIT, Usage};

/// The largest answer of the agent that is read.
const MAX_ANSWER: usize = 16 << 20;
/// What is quoted of an answer that is not known, in characters.
const MAX_QUOTE: usize = 300;

#[derive(Args, Clone, Debug)]
pub struct ScopeFlags {
    /// Prints what was used as JSON, for --merge.
    #[arg(long)]
    json: bool,
    /// Files that --json has printed for pods of one workload, each with one or more: all they used together.
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
    #[error("cannot read from {from} what pilot-agent scope --json prints")]
    Usage { from: String, source: BoxError },
    #[error("the files to merge are empty, expected what pilot-agent scope --json prints")]
    Nothing,
    #[error("the agent has no status port, so it cannot be asked")]
    NoPort,
    #[error(transparent)]
    Advice(#[from] advice::Error),
    #[error("cannot write JSON")]
    Json(#[from] serde_json::Error),
}

/// What the command prints.
pub async fn run(flags: &ScopeFlags, environment: &Environment) -> Result<String, Error> {
    let mut merged = None;
    for path in &flags.merge {
        let read = || {
            let text = fs::read(path)?;
            let all = serde_json::Deserializer::from_slice(&text).into_iter();
            Ok(all.collect::<Result<Vec<Usage>, _>>()?)
        };
        let from = path.display().to_string();
        for usage in read().map_err(|source| Error::Usage { from, source })? {
            merged = Some(match merged {
                Some(merged) => advice::merge(merged, usage)?,
                None => usage,
            });
        }
    }
    let usage = match merged {
        Some(merged) => merged,
        None if !flags.merge.is_empty() => return Err(Error::Nothing),
        None => {
            let port = config::status_port(environment, ".".as_ref()).ok_or(Error::NoPort)?;
            let from = format!("the answer of port {port}");
            let usage = of_agent(port).await;
            usage.map_err(|source| Error::Usage { from, source })?
        }
    };
    let keep = Keep {
        hosts: flags.keep.clone(),
        asked: flags.include_asked,
    };
    match flags.json {
        true => Ok(serde_json::to_string_pretty(&usage)?),
        false => Ok(advice::sidecar(&usage, &keep)?),
    }
}

async fn of_agent(port: u16) -> Result<Usage, BoxError> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Answer {
        Failed { error: String },
        Usage(Usage),
    }
    let mut request = Request::new(Bytes::new());
    *request.uri_mut() = http_url(&format!("http://127.0.0.1:{port}/debug/scope"))?;
    let limit = LIMIT.saturating_add(Duration::from_secs(1));
    let answer = Client::default().fetch(request, limit, MAX_ANSWER).await?;
    match serde_json::from_slice(answer.body()) {
        Ok(Answer::Usage(usage)) => Ok(usage),
        Ok(Answer::Failed { error }) => Err(error.into()),
        Err(_) => {
            let text = String::from_utf8_lossy(answer.body());
            let text: String = text.trim().chars().take(MAX_QUOTE).collect();
            Err(format!("{}: {text:?}", answer.status()).into())
        }
    }
}
