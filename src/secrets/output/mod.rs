//! `OUTPUT_CERTS`: writes key, chain and roots to a directory, for clients that do not use SDS.
//!
//! What is written is what `default` and `ROOTCA` serve, once there are both. The three names are links
//! through one link, `..data`, to a directory that holds the three files of one rotation. A rename
//! replaces that link, so all three change in the same moment: a client that opens `..data` once and
//! reads beside it meets no mixture, and one that opens `key.pem` finds what a plain file would hold.
//! Plain files already there are moved into such a directory first. The output directory must exist, and
//! the files stay when a certificate expires.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use zeroize::Zeroizing;

use super::certificate::Certificate;
use super::files::Files;
use super::name::Name;
use super::{Roots, Secret, SecretState, Secrets, Subscription};
use crate::backoff::Backoff;

/// The files, in the order in which they are written.
pub const NAMES: [&str; 3] = ["key.pem", "cert-chain.pem", "root-cert.pem"];

/// The link that is replaced.
const DATA: &str = "..data";

/// The prefix of directories that hold one rotation.
const VERSION: &str = "..istio-certs-";

/// A directory that is this old and not linked was left by an earlier agent.
const STALE: Duration = Duration::from_secs(60);

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
        let (writer, contents) = (writer.clone(), Contents::latest(&secrets));
        let write = move || match contents {
            Some(contents) => writer.lock().write(contents.files()),
            None => Ok(()),
        };
        let written = tokio::task::spawn_blocking(write).await;
        let Err(error) = written.unwrap_or_else(|error| Err(error.into())) else {
            retry.reset();
            secrets.changed().await;
            continue;
        };
        let wait = retry.next_wait().max(Duration::from_millis(100));
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
struct Contents {
    certificate: Arc<Certificate>,
    roots: Roots,
}

impl Contents {
    fn latest(secrets: &Subscription) -> Option<Self> {
        match (secrets.get(&Name::Default), secrets.get(&Name::RootCa)) {
            (
                SecretState::Available(Secret::Certificate(certificate)),
                SecretState::Available(Secret::Roots(roots)),
            ) => Some(Self { certificate, roots }),
            _ => None,
        }
    }

    /// In the order of [`NAMES`].
    fn files(&self) -> [&[u8]; 3] {
        let Self { certificate, roots } = self;
        [certificate.key_pem(), certificate.chain_pem(), roots.pem()]
    }
}

/// What this agent has put in the directory.
#[derive(Debug)]
struct Writer {
    config: Config,
    /// The version linked now.
    current: Option<String>,
    /// The version linked before: a client may still read it.
    previous: Option<String>,
}

impl Writer {
    const fn new(config: Config) -> Self {
        Self {
            config,
            current: None,
            previous: None,
        }
    }

    fn write(&mut self, contents: [&[u8]; 3]) -> io::Result<()> {
        if self.current.is_none() {
            self.take_over()?;
        }
        let mut files = NAMES.iter().zip(contents);
        if files.all(|(name, content)| self.holds(name, content)) {
            return Ok(());
        }
        // The names go through the present link first, so nothing changes should the rest fail. On the
        // first write they follow the link, as no name may lead nowhere.
        let is_first = fs::symlink_metadata(self.path(DATA)).is_err();
        if !is_first {
            self.link_names()?;
        }
        let obsolete = self.swap(contents.map(Some))?;
        if is_first {
            self.link_names()?;
        }
        let directory = File::open(&self.config.directory);
        let synced = directory.and_then(|directory| directory.sync_all());
        match obsolete {
            Some(obsolete) => fs::remove_dir_all(self.path(&obsolete)).and(synced),
            None => synced,
        }
    }

    /// Moves plain files behind the link, so that the first rotation is one step too, and removes what
    /// earlier agents left.
    fn take_over(&mut self) -> io::Result<()> {
        let linked = fs::read_link(self.path(DATA)).ok();
        let linked = linked.and_then(|target| target.to_str().map(str::to_owned));
        self.remove_stale(linked.as_deref())?;
        if linked.is_some() {
            self.current = linked.filter(|name| name.starts_with(VERSION));
            return Ok(());
        }
        let found = NAMES.map(|name| fs::read(self.path(name)).ok().map(Zeroizing::new));
        if found.iter().all(Option::is_none) {
            return Ok(());
        }
        self.swap(
            found
                .each_ref()
                .map(|found| found.as_ref().map(|content| &content[..])),
        )?;
        let mut names = NAMES
            .iter()
            .zip(&found)
            .filter(|(_, found)| found.is_some());
        names.try_for_each(|(name, _)| self.link_name(name))
    }

    /// Points the link to a new version, in one step. Returns the version before the previous one, which
    /// no client reads any more.
    fn swap(&mut self, contents: [Option<&[u8]>; 3]) -> io::Result<Option<String>> {
        let version = self.new_version(contents)?;
        if let Err(error) = self.link(DATA, &version) {
            self.discard(&version);
            return Err(error);
        }
        let before = self.current.replace(version);
        Ok(std::mem::replace(&mut self.previous, before))
    }

    /// Best effort: a later start removes what is left.
    fn discard(&self, version: &str) {
        let _ = fs::remove_dir_all(self.path(version));
    }

    fn holds(&self, name: &str, content: &[u8]) -> bool {
        let path = self.path(name);
        let is_link = fs::read_link(&path).is_ok_and(|target| target == Path::new(DATA).join(name));
        is_link && fs::read(path).is_ok_and(|found| Zeroizing::new(found)[..] == *content)
    }

    fn new_version(&self, contents: [Option<&[u8]>; 3]) -> io::Result<String> {
        let (directory_mode, file_mode) = match self.config.readable_by_all {
            true => (0o755, 0o644),
            false => (0o700, 0o600),
        };
        let name = format!("{VERSION}{:016x}", fastrand::u64(..));
        let directory = self.path(&name);
        DirBuilder::new().mode(directory_mode).create(&directory)?;
        let filled = fill(&directory, directory_mode, file_mode, contents);
        if let Err(error) = filled {
            self.discard(&name);
            return Err(error);
        }
        Ok(name)
    }

    fn link_names(&self) -> io::Result<()> {
        NAMES.iter().try_for_each(|name| self.link_name(name))
    }

    fn link_name(&self, name: &str) -> io::Result<()> {
        let target = Path::new(DATA).join(name);
        match fs::read_link(self.path(name)) {
            Ok(found) if found == target => Ok(()),
            _ => self.link(name, target),
        }
    }

    /// Replaces `name` by a link to `target`.
    fn link(&self, name: &str, target: impl AsRef<Path>) -> io::Result<()> {
        let temporary = self.path(&format!("{VERSION}{:016x}.link", fastrand::u64(..)));
        symlink(target, &temporary)?;
        fs::rename(&temporary, self.path(name)).inspect_err(|_| {
            // The error that matters is the first.
            let _ = fs::remove_file(&temporary);
        })
    }

    fn remove_stale(&self, linked: Option<&str>) -> io::Result<()> {
        for entry in fs::read_dir(&self.config.directory)? {
            let entry = entry?;
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if !name.starts_with(VERSION) || Some(&*name) == linked {
                continue;
            }
            // Files of another user must not prevent writing.
            if let Err(error) = remove_if_stale(&entry) {
                let path = entry.path();
                tracing::warn!("{} of an earlier agent stays: {error}", path.display());
            }
        }
        Ok(())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.config.directory.join(name)
    }
}

fn remove_if_stale(entry: &fs::DirEntry) -> io::Result<()> {
    let metadata = entry.metadata()?;
    let age = SystemTime::now().duration_since(metadata.modified()?);
    match age.is_ok_and(|age| age > STALE) {
        true if metadata.is_dir() => fs::remove_dir_all(entry.path()),
        true => fs::remove_file(entry.path()),
        false => Ok(()),
    }
}

/// Writes and syncs the files of a version that is not linked yet. Modes are as given, whatever the
/// umask.
fn fill(
    directory: &Path,
    mode: u32,
    file_mode: u32,
    contents: [Option<&[u8]>; 3],
) -> io::Result<()> {
    for (name, content) in NAMES.iter().zip(contents) {
        let Some(content) = content else {
            continue;
        };
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(directory.join(name))?;
        file.write_all(content)?;
        file.set_permissions(Permissions::from_mode(file_mode))?;
        file.sync_all()?;
    }
    let directory = File::open(directory)?;
    directory.set_permissions(Permissions::from_mode(mode))?;
    directory.sync_all()
}

#[cfg(test)]
pub(super) mod tests;
