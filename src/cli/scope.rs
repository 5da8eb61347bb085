//! Implements the `scope` command: prints a `Sidecar` resource for the services that this workload uses, which
//! it requests from the running agent, or that several pods use, which it reads from their JSON outputs.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use clap::Args;
use http::Request;
use serde::Deserialize;

use super::FormatFlags;
use super::doctor::quoted;
use super::show::{MAX_INPUT, read_input};
use crate::config;
use crate::config::environment::Environment;
use crate::net::http_client::{Client, http_url};
use crate::runtime::lifecycle::BoxError;
use crate::scope::advice::{self, Keep};
use crate::scope::{LIMIT, Usage};

/// Maximum size of the agent's response, in bytes.
const MAX_RESPONSE: usize = 16 << 20;

#[derive(Args, Clone, Debug)]
pub struct ScopeFlags {
    /// The text is a Sidecar resource; JSON is the list of the services in use, for --merge.
    #[command(flatten)]
    format: FormatFlags,
    /// Merges the JSON output of several pods of one workload. Each file holds one or more outputs.
    #[arg(long, num_args = 1.., value_name = "FILE")]
    merge: Vec<PathBuf>,
    /// Also keeps these services: <namespace>/<host>, such as istio-system/*, or ./* for the workload's namespace.
    #[arg(long, value_name = "HOST")]
    keep: Vec<String>,
    /// Keeps services that had a DNS query but no connection.
    #[arg(long = "include-asked", num_args = 0..=1, require_equals = true, default_value = "true",
          default_missing_value = "true", value_parser = config::flags::parse_bool,
          action = clap::ArgAction::Set)]
    include_asked: bool,
}

/// Returns the text for standard output.
pub async fn run(flags: &ScopeFlags, environment: &Environment) -> Result<String, BoxError> {
    let usage = if flags.merge.is_empty() {
        let port = config::status_port(environment, ".".as_ref())
            .ok_or("the agent has no status port (statusPort is 0), so `scope` cannot ask it")?;
        request_usage(port)
            .await
            .map_err(|error| unusable(&format!("the response of port {port}"), &*error))?
    } else {
        merged(&flags.merge, MAX_INPUT)?
    };
    if flags.format.is_json() {
        return Ok(serde_json::to_string_pretty(&usage)?);
    }
    let keep = Keep { hosts: flags.keep.clone(), looked_up: flags.include_asked };
    advice::sidecar(&usage, &keep)
}

/// Merges the usage of the pods in these files, which have at most `budget` bytes in all.
fn merged(paths: &[PathBuf], mut budget: u64) -> Result<Usage, BoxError> {
    let mut usages = Vec::new();
    for (index, path) in paths.iter().enumerate() {
        usages.extend(read_usages(path, &mut budget).map_err(|error| {
            unusable(&format!("{:?}", &paths[index..]), format!("{}: {error}", path.display()))
        })?);
    }
    let mut usages = usages.into_iter();
    let first = usages
        .next()
        .ok_or("the files of --merge are empty, expected output of `pilot-agent scope --json`")?;
    usages.try_fold(first, advice::merge)
}

/// Reads one or more outputs in a file, and subtracts its size from the budget.
fn read_usages(path: &Path, budget: &mut u64) -> Result<Vec<Usage>, BoxError> {
    let text = read_input(path, *budget)?;
    *budget -= text.len() as u64;
    Ok(serde_json::Deserializer::from_str(&text).into_iter().collect::<Result<Vec<Usage>, _>>()?)
}

fn unusable(source: &str, error: impl Display) -> BoxError {
    format!("{source} is not output of `pilot-agent scope --json`: {error}").into()
}

/// Requests the usage that the running agent has recorded.
async fn request_usage(port: u16) -> Result<Usage, BoxError> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Body {
        Failed { error: String },
        Usage(Usage),
    }
    let mut request = Request::new(Bytes::new());
    *request.uri_mut() = http_url(&format!("http://127.0.0.1:{port}/debug/scope"))?;
    let limit = LIMIT.saturating_add(Duration::from_secs(1));
    let response = Client::default().fetch(request, limit, MAX_RESPONSE).await?;
    match serde_json::from_slice(response.body()) {
        Ok(Body::Usage(usage)) => Ok(usage),
        Ok(Body::Failed { error }) => Err(error.into()),
        Err(_) => Err(quoted(&response).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merge_refuses_a_pipe_and_files_above_the_size_limit() {
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
            (&["a", "fifo"][..], r#"["/fifo"]"#, "/fifo: not a regular file"),
            (&["a", "b", "c", "a"], r#"["/c", "/a"]"#, "/c: more than 0 bytes"),
        ] {
            let error = merge(names, limit).expect_err(unread);
            assert!(error.starts_with(&format!("{unread} is not output of ")), "{error}");
            assert!(error.ends_with(&format!(": {why}")), "{error}");
        }
    }
}
