//! Writes key, chain and roots to a directory (`OUTPUT_CERTS`), for clients that do not use SDS.
//!
//! The secrets `default` and `ROOTCA` are written once both exist, and on every rotation. The files are
//! renamed into place one right after the other, once all three are on the disk. The output directory must
//! exist, and the files stay when a certificate expires.
//!
//! An application may share the directory and change it at any moment: it can prevent the output, but
//! nothing outside the directory is read, written or removed.

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::certificate::Certificate;
use super::files::Files;
use super::name::Name;
use super::{Roots, Secret, Secrets, Subscription};
use crate::files::directory::Directory;
use crate::files::permission::explained;
use crate::problem::{Code, Problem};
use crate::runtime::backoff::Backoff;
use crate::runtime::duration::rounded;

/// The files, in the order in which they are written.
pub const NAMES: [&str; 3] = ["key.pem", "cert-chain.pem", "root-cert.pem"];

const RETRY: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    pub directory: PathBuf,
    /// Lets all users read the files, because the containers of a pod have different users.
    pub readable_by_all: bool,
}

/// Writes each rotation until it is dropped. A write that fails is tried again.
pub async fn run(config: Config, secrets: Option<Secrets>, files: Files) {
    let mut retry = RETRY;
    let mut secrets = Subscription::new(secrets, &files);
    secrets.want(BTreeSet::from([Name::Default, Name::RootCa]));
    let mut written = None;
    loop {
        let unwritten = latest(&secrets).filter(|latest| written.as_ref() != Some(latest));
        let Some((certificate, roots)) = unwritten.clone() else {
            secrets.changed().await;
            continue;
        };
        let task_config = config.clone();
        let writing = tokio::task::spawn_blocking(move || {
            write_all(&task_config, [certificate.key_pem(), certificate.chain_pem(), roots.pem()])
        });
        let Err(error) = writing.await.unwrap_or_else(|error| Err(error.into())) else {
            retry.reset();
            written = unwritten;
            continue;
        };
        let wait = retry.next_wait().max(Duration::from_millis(100));
        let problem = problem(&config, error);
        let next = rounded(wait);
        tracing::error!(
            target: "cache",
            "error when output the resource: {problem}; next attempt in {next}"
        );
        tokio::select! {
            () = secrets.changed() => {}
            () = tokio::time::sleep(wait) => {}
        }
    }
}

pub fn problem(config: &Config, error: io::Error) -> Problem {
    let found = explained(&config.directory, error);
    let subject = format!("OUTPUT_CERTS={}", config.directory.display());
    Problem::new(Code::OutputCertsUnwritable, subject, found)
}

/// Writes `contents`, in the order of [`NAMES`].
fn write_all(config: &Config, contents: [&[u8]; 3]) -> io::Result<()> {
    let mode = if config.readable_by_all { 0o644 } else { 0o600 };
    let files: Vec<_> = NAMES.into_iter().zip(contents).collect();
    Directory::open(&config.directory)?.replace_files(&files, mode)
}

/// Returns the workload's certificate and roots, once there are both.
fn latest(secrets: &Subscription) -> Option<(Arc<Certificate>, Roots)> {
    let [certificate, roots] = [Name::Default, Name::RootCa].map(|name| secrets.get(&name));
    match (certificate.available()?, roots.available()?) {
        (Secret::Certificate(certificate), Secret::Roots(roots)) => Some((certificate, roots)),
        _ => None, // Neither name has a secret of the other kind.
    }
}

#[cfg(test)]
mod hostile_tests;
#[cfg(test)]
pub(super) mod tests;
