//! Caches key and certificate across restarts of the container.
//!
//! One file holds a line of JSON and the key after it. It is in a subdirectory of the configured directory,
//! which must be in memory: a private key does not belong on a disk. A cached certificate is used only if no
//! other user can have written it, identity and kind of key are as configured, and it has not expired.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use super::Config;
use super::certificate::Workload;
use crate::files::directory::Directory;
use crate::files::regular_file::if_exists;
use crate::files::volume::{Content, is_in_memory};
use crate::problem::{Code, Problem};
use crate::runtime::clock::rfc3339;
use crate::runtime::lifecycle::BoxError;
use crate::trust::identity::SpiffeId;

const DIRECTORY: &str = Content::Certificate.directory();
const FILE: &str = "workload.json";

const MISMATCH: &str = "it is for another identity or another kind of key";

/// The place of the cached certificate, and what it must match.
#[derive(Clone, Debug)]
pub(super) struct CertificateCache {
    parent: PathBuf,
    identity: SpiffeId,
    kind: String,
}

/// The line before the key.
#[derive(Deserialize, Serialize)]
struct Header {
    identity: String,
    kind: String,
    issued: u64,
    answer: Vec<String>,
}

impl CertificateCache {
    /// Returns None if no directory is configured, or if the default one cannot be used.
    pub(super) fn new(config: &Config) -> Option<Self> {
        let volume = config.cache.as_ref()?;
        volume.prepare(Content::Certificate).then(|| Self {
            parent: volume.directory.clone(),
            identity: config.identity.clone(),
            kind: format!("{:?} {:?}", config.key_type, config.encoding),
        })
    }

    /// Reads the cached certificate, if it can be used, and when it was issued.
    pub(super) async fn restore(self, now: SystemTime) -> Option<(Workload, SystemTime)> {
        let directory = self.subject();
        let loaded = tokio::task::spawn_blocking(move || self.load(now)).await;
        loaded.unwrap_or_else(|error| Err(error.into())).unwrap_or_else(|error| {
            let problem = Problem::new(Code::CertificateCacheUnusable, directory, error);
            tracing::warn!(target: "cache", "{problem}");
            None
        })
    }

    /// Replaces the cached certificate by a new one, which `response` contains. Logs and returns a failure.
    pub(super) async fn save(
        self,
        workload: Arc<Workload>,
        response: Vec<String>,
        issued: SystemTime,
    ) -> Option<Problem> {
        let directory = self.subject();
        let error = tokio::task::spawn_blocking(move || {
            self.store(workload.certificate.key_pem(), response, issued)
        })
        .await
        .unwrap_or_else(|error| Err(error.into()))
        .err()?;
        let problem = Problem::new(Code::CertificateCacheUnwritable, directory, error);
        tracing::error!(target: "cache", "{problem}");
        Some(problem)
    }

    fn subject(&self) -> String {
        format!("certificate cache {}", self.parent.join(DIRECTORY).display())
    }

    fn load(&self, now: SystemTime) -> Result<Option<(Workload, SystemTime)>, BoxError> {
        let text = Directory::private(&self.parent, DIRECTORY, false)
            .and_then(|directory| directory.read_private(FILE));
        let Some(text) = if_exists(text)? else {
            return Ok(None);
        };
        let mut parts = text.splitn(2, |byte| *byte == b'\n');
        let line = parts.next().unwrap_or_default();
        let header: Header = serde_json::from_slice(line).map_err(|error| {
            format!("{FILE} does not begin with a description of the certificate: {error}")
        })?;
        if header.identity != self.identity.to_string() || header.kind != self.kind {
            return Err(MISMATCH.into());
        }
        // A key that is not UTF-8 is rejected when it is parsed.
        let key_pem = String::from_utf8_lossy(parts.next().unwrap_or_default());
        let key_pem = Zeroizing::new(key_pem.into_owned());
        let workload = Workload::new(&header.answer, key_pem).map_err(|problem| problem.found)?;
        let end = workload.certificate.not_after();
        if end <= now {
            return Err(format!("it expired at {}", rfc3339(end)).into());
        }
        if !workload.certificate.is_issued_to(&self.identity) {
            return Err(MISMATCH.into());
        }
        let issued = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(header.issued));
        Ok(Some((workload, issued.unwrap_or(now).min(now))))
    }

    pub(super) fn store(
        &self,
        key_pem: &[u8],
        response: Vec<String>,
        issued: SystemTime,
    ) -> Result<(), BoxError> {
        let directory = Directory::private(&self.parent, DIRECTORY, true)?;
        if !is_in_memory(&directory)? {
            return Err("it is on a disk, expected a file system in memory".into());
        }
        let since_epoch = issued.duration_since(SystemTime::UNIX_EPOCH);
        let header = serde_json::to_vec(&Header {
            identity: self.identity.to_string(),
            kind: self.kind.clone(),
            issued: since_epoch.unwrap_or_default().as_secs(),
            answer: response,
        })?;
        let text = Zeroizing::new([&header, &b"\n"[..], key_pem].concat());
        Ok(directory.replace_files(&[(FILE, &text)], 0o600)?)
    }
}
