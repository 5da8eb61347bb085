//! `OUTPUT_CERTS`: writes key, chain and roots to a directory, for clients that do not use SDS.
//!
//! What is written is what `default` and `ROOTCA` serve, once there are both. The three names are links
//! through one link, `..data`, to a directory that holds the three files of one rotation. A rename
//! replaces that link, so all three change in the same moment: a client that opens `..data` once and
//! reads beside it meets no mixture, and one that opens `key.pem` finds what a plain file would hold.
//! The first write replaces plain files one by one. The output directory must exist, and the files stay
//! when a certificate expires.
//!
//! An application may share the directory and change it at any moment: it can prevent the output, but
//! nothing outside the directory is read or removed.

mod writer;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::certificate::Certificate;
use super::files::Files;
use super::name::Name;
use super::{Roots, Secret, SecretState, Secrets, Subscription};
use crate::backoff::Backoff;
use crate::permission::explained;
use writer::Writer;

/// The files, in the order in which they are written.
pub const NAMES: [&str; 3] = ["key.pem", "cert-chain.pem", "root-cert.pem"];

const RETRY: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));

/// Where to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    pub directory: PathBuf,
    /// Whether all users may read the files, as containers of a pod have different users.
    pub readable_by_all: bool,
}

/// Writes each rotation until it is dropped. A write that fails is tried again.
pub async fn run(config: Config, secrets: Option<Secrets>, files: Files) {
    let path = config.directory.clone();
    let writer = Arc::new(Mutex::new(Writer::new(config)));
    let mut retry = RETRY;
    let mut secrets = Subscription::new(secrets, &files);
    secrets.want(BTreeSet::from([Name::Default, Name::RootCa]));
    loop {
        let (writer, latest) = (writer.clone(), latest(&secrets));
        let write = move || match latest {
            Some((certificate, roots)) => {
                let contents = [certificate.key_pem(), certificate.chain_pem(), roots.pem()];
                writer.lock().write(contents)
            }
            None => Ok(()),
        };
        let written = tokio::task::spawn_blocking(write).await;
        let Err(error) = written.unwrap_or_else(|error| Err(error.into())) else {
            retry.reset();
            secrets.changed().await;
            continue;
        };
        let wait = retry.next_wait().max(Duration::from_millis(100));
        let error = explained(&path, error);
        let path = path.display();
        tracing::error!(
            target: "cache",
            "error when output the resource: {path}: {error}; next attempt in {wait:?}"
        );
        tokio::select! {
            () = secrets.changed() => {}
            () = tokio::time::sleep(wait) => {}
        }
    }
}

/// What an Envoy is served at one moment.
fn latest(secrets: &Subscription) -> Option<(Arc<Certificate>, Roots)> {
    match (secrets.get(&Name::Default), secrets.get(&Name::RootCa)) {
        (
            SecretState::Available(Secret::Certificate(certificate)),
            SecretState::Available(Secret::Roots(roots)),
        ) => Some((certificate, roots)),
        _ => None,
    }
}

#[cfg(test)]
mod hostile_tests;
#[cfg(test)]
pub(super) mod tests;
