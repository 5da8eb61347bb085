//! The `scope` command: the `Sidecar` resource for what this workload uses, as the running agent sees it,
//! or for several pods whose use was printed as JSON.

use std::fmt::Display;
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use clap::Args;
use http::Request;
use serde::Deserialize;

use super::doctor::quoted;
use super::show::{MAX_INPUT, read_input};
use crate::config;
use crate::config::environment::Environment;
use crate::http_client::{Client, http_url};
use crate::lifecycle::BoxError;
use crate::scope::advice::{self, Keep};
use crate::scope::{LIMIT, Usage};

/// The largest answer of the agent that is read.
const MAX_ANSWER: usize = 16 << 20;

#[derive(Args, Clone, Debug)]
pub struct ScopeFlags {
    /// Prints the services in use as JSON, for --merge.
    #[arg(long)]
    json: bool,
    /// Merges the JSON output of several pods of one workload. Each file holds one or more outputs.
    #[arg(long, num_args = 1.., value_name = "FILE")]
    merge: Vec<PathBuf>,
    /// Also keeps these services: <namespace>/<host>, such as istio-system/*, or ./* for the workload's namespace.
    #[arg(long, value_name = "HOST")]
    keep: Vec<String>,
    /// Keeps services that had a DNS query but no connection.
    #[arg(long = "include-asked", num_args = 0..=1, require_equals = true, default_value = "true",
          default_missing_value = "true", value_parser = config::flags::truth,
          action = clap::ArgAction::Set)]
    include_asked: bool,
}

/// What the command prints.
pub async fn run(flags: &ScopeFlags, environment: &Environment) -> Result<String, BoxError> {
    let usage = if flags.merge.is_empty() {
        let port = config::status_port(environment, ".".as_ref())
            .ok_or("the agent has no status port (statusPort is 0), so `scope` cannot ask it")?;
        let usage = of_agent(port).await;
        usage.map_err(|error| unusable(&format!("the answer of port {port}"), &*error))?
    } else {
        merged(&flags.merge, MAX_INPUT)?
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

/// What the pods of these files used together. The files have at most so many bytes in all.
fn merged(paths: &[PathBuf], mut left: u64) -> Result<Usage, BoxError> {
    let mut merged = None;
    for (at, path) in paths.iter().enumerate() {
        let mut read = || {
            let text = read_input(path, left)?;
            left -= text.len() as u64;
            let all = serde_json::Deserializer::from_str(&text).into_iter();
            Ok(all.collect::<Result<Vec<Usage>, _>>()?)
        };
        for usage in read().map_err(|error: BoxError| {
            let error = format!("{}: {error}", path.display());
            unusable(&format!("{:?}", &paths[at..]), &error)
        })? {
            merged = Some(match merged {
                Some(merged) => advice::merge(merged, usage)?,
                None => usage,
            });
        }
    }
    merged.ok_or_else(|| {
        "the files of --merge are empty, expected output of `pilot-agent scope --json`".into()
    })
}

fn unusable(source: &str, error: impl Display) -> BoxError {
    format!("{source} is not output of `pilot-agent scope --json`: {error}").into()
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
        Err(_) => Err(quoted(&answer).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipe_is_named_and_not_waited_for_and_what_is_too_much_is_said() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = |name: &str| directory.path().join(name);
        let fifo = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, path("fifo"), fifo, 0o600.into(), 0).expect("a FIFO");
        let usage = serde_json::to_string(&Usage::default()).expect("JSON");
        for name in ["a", "b", "c"] {
            std::fs::write(path(name), &usage).expect("written");
        }
        let merge = |names: &[&str], limit: usize| {
            let paths: Vec<_> = names.iter().map(|name| path(name)).collect();
            let found = merged(&paths, limit as u64);
            let directory = directory.path().to_str().expect("text");
            found.map_err(|error| error.to_string().replace(directory, ""))
        };
        let limit = 2 * usage.len();
        assert_eq!(merge(&["a", "b"], limit), Ok(Usage::default()));
        for (names, unread, why) in [
            (
                &["a", "fifo"][..],
                r#"["/fifo"]"#,
                "/fifo: not a regular file",
            ),
            (
                &["a", "b", "c", "a"],
                r#"["/c", "/a"]"#,
                "/c: more than 0 bytes",
            ),
        ] {
            let error = merge(names, limit).expect_err(unread);
            assert!(
                error.starts_with(&format!("{unread} is not output of ")),
                "{error}"
            );
            assert!(error.ends_with(&format!(": {why}")), "{error}");
        }
    }
}
