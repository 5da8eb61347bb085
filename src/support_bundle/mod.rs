//! Collects what a report of a problem needs into one `.tar.gz`: the doctor's answer, configuration,
//! bootstrap, pages of Envoy and of the agent, the rules of capture, versions.
//!
//! It works with a running agent and Envoy or without. What cannot be read is named in `errors.txt`, with
//! the reason; what is too large or takes too long is cut off. Everything passes [`redact`], compressed
//! at once, so that memory does not grow with what Envoy has: 16 MiB of a file are kept at most. It takes
//! 20 s at most, until it is written, and up to 10 s before if files hang.

mod archive;
mod collector;
mod redact;

use std::cell::RefCell;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;

use percent_encoding::percent_decode_str;
use serde_json::Value;
use tokio::time::timeout;

use crate::config::environment::{self, Environment};
use crate::proxy_config::ProxyConfig;
use crate::regular_file;
use archive::File;
pub(crate) use collector::PATIENCE;
use collector::{Collector, LIMIT, OF_ENVOY};
use redact::Form::{Lines, OwnJson};
pub use redact::Secrets;

/// No header of HTTP takes more.
const MAX_TOKEN: u64 = 64 << 10;

#[derive(Debug)]
pub struct Sources {
    /// The agent's version.
    pub version: String,
    /// Says where the ports, the bootstraps and Envoy's program are.
    pub proxy_config: ProxyConfig,
    /// The effective configuration, for when there is no agent to ask.
    pub config: Value,
}

/// What was collected.
#[allow(missing_debug_implementations)]
pub struct Bundle {
    files: Vec<File>,
    /// What is missing or cut off, and why.
    pub problems: Vec<String>,
}

/// Values of the environment that are secret: headers for istiod, passwords in URLs of proxies, and what is
/// named so. With the content of the token's file.
pub async fn known_secrets(
    env: &Environment,
    token: Option<PathBuf>,
) -> Result<Secrets, regex::Error> {
    let mut known = Vec::new();
    for (name, value) in env.with_prefix("") {
        let is_setting = environment::rows().any(|row| row.name == name);
        if !is_setting && redact::is_secret(name.as_bytes()) {
            known.push(value.to_owned());
        }
        if let Some((user, _)) = value.rsplit_once('@')
            && let Some((_, password)) = user.rsplit_once(':')
        {
            known.push(password.to_owned());
            known.push(percent_decode_str(password).decode_utf8_lossy().into());
        }
    }
    if let Some(path) = token
        && let Ok(Ok(token)) = timeout(PATIENCE, regular_file::read_blocking(path, MAX_TOKEN)).await
    {
        known.push(String::from_utf8_lossy(&token).into_owned());
    }
    Secrets::new(known)
}

/// Collects everything. `doctor` gives its answer, in a time of its own, as text and as JSON.
pub async fn collect(
    sources: &Sources,
    secrets: Secrets,
    doctor: impl Future<Output = (String, Value)>,
) -> Bundle {
    let collector = Collector {
        secrets: Arc::new(secrets),
        until: crate::clock::after(LIMIT),
        files: RefCell::default(),
        problems: RefCell::default(),
    };
    // Before the large pages, which Envoy makes one after the other.
    let (text, json) = doctor.await;
    collector.text("doctor.txt", Lines, &text);
    collector.text("doctor.json", OwnJson, &format!("{json:#}"));
    tokio::join!(
        collector.agent(sources),
        collector.pages(sources.proxy_config.admin_port(), &OF_ENVOY),
        collector.machine(sources),
    );
    let problems = collector.problems.take();
    if !problems.is_empty() {
        collector.text("errors.txt", Lines, &problems.join("\n"));
    }
    let mut files = collector.files.take();
    files.sort_by(|one, other| one.name.cmp(&other.name));
    Bundle { files, problems }
}

impl Bundle {
    pub fn write(self, out: &mut impl Write) -> io::Result<()> {
        archive::write(self.files, out)
    }
}

#[cfg(test)]
mod tests;
