//! Writes key, chain and roots to a directory, for those who do not ask over a socket: what `default`
//! and `ROOTCA` hold, from files or from the authority, once there are all three.
//!
//! The three names are links through one link, `..data`, to a directory that holds the three files
//! of one rotation. That link is replaced by a rename, so all three change in the same moment and a
//! reader who opens `..data` once cannot meet a mixture. Whoever opens `key.pem` finds what he would
//! find in a plain file. Plain files already there are taken into such a directory first.
//!
//! Does not make the directory, nor remove files when a certificate expires.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;

use super::Secrets;
use super::certificate::Workload;
use super::files::source::Content;
use super::files::{self, Files, Found, Subscription};
use super::name::Name;
use crate::backoff::Backoff;

/// The files, in the order in which they are written.
pub const NAMES: [&str; 3] = ["key.pem", "cert-chain.pem", "root-cert.pem"];

/// The link that is replaced.
const DATA: &str = "..data";

/// What directories of one rotation begin with.
const VERSION: &str = "..istio-certs-";

/// A directory of another agent that is this old and not linked is nobody's any more.
const STALE: Duration = Duration::from_secs(60);

const RETRY: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));

/// Where to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    pub directory: PathBuf,
    /// Files may be read by everybody, as containers of a pod have different users.
    pub readable_by_all: bool,
}

/// Writes what there is, for ever. A write that fails is tried again.
pub async fn run(config: Config, mut secrets: Option<Secrets>, files: Files) {
    let mut writer = Writer::new(config);
    let mut retry = RETRY;
    let mut files = files.subscribe();
    files.want(BTreeSet::from([Name::Default, Name::RootCa]));
    loop {
        let outcome;
        (writer, outcome) = write_latest(writer, Served::latest(secrets.as_ref(), &files)).await;
        let wait = match outcome {
            Ok(()) => {
                retry.reset();
                None
            }
            Err(error) => {
                let wait = retry.next_wait().max(Duration::from_millis(100));
                let path = writer.config.directory.display();
                tracing::error!(
                    target: "cache",
                    "error when output the resource: {path}: {error}; next attempt in {wait:?}"
                );
                Some(wait)
            }
        };
        let retrying = async {
            match wait {
                Some(wait) => tokio::time::sleep(wait).await,
                None => std::future::pending().await,
            }
        };
        let signed = async {
            match &mut secrets {
                Some(secrets) => secrets.changed().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = signed => {}
            () = files.changed() => {}
            () = retrying => {}
        }
    }
}

async fn write_latest(writer: Writer, served: Option<Served>) -> (Writer, io::Result<()>) {
    let Some(served) = served else {
        return (writer, Ok(()));
    };
    let config = writer.config.clone();
    match tokio::task::spawn_blocking(move || writer.written(served)).await {
        Ok(done) => done,
        Err(error) => (Writer::new(config), Err(io::Error::other(error))),
    }
}

/// What an Envoy would be served: files go before the authority.
#[derive(Debug)]
struct Served {
    pair: Pair,
    roots: Bytes,
}

#[derive(Debug)]
enum Pair {
    Signed(Arc<Workload>),
    Read(Arc<files::Secret>),
}

impl Served {
    fn latest(secrets: Option<&Secrets>, files: &Subscription) -> Option<Self> {
        let state = secrets.map(Secrets::latest).unwrap_or_default();
        let pair = match files.found(&Name::Default) {
            Found::There(secret) => Pair::Read(secret),
            Found::NoFile => Pair::Signed(state.workload?),
            Found::Pending | Found::Missing(_) => return None,
        };
        let roots = match files.found(&Name::RootCa) {
            Found::There(secret) => match &secret.content {
                Content::Roots { pem, .. } => pem.clone(),
                Content::Pair { .. } => return None,
            },
            Found::NoFile => state.roots?.pem().clone(),
            Found::Pending | Found::Missing(_) => return None,
        };
        Some(Self { pair, roots })
    }

    /// Key, chain and roots.
    fn contents(&self) -> [&[u8]; 3] {
        let (key, chain): (&[u8], &[u8]) = match &self.pair {
            Pair::Signed(workload) => {
                let certificate = &workload.certificate;
                (certificate.key_pem().as_bytes(), certificate.chain_pem())
            }
            Pair::Read(secret) => match &secret.content {
                Content::Pair { key, chain, .. } => (key, chain),
                Content::Roots { .. } => (&[], &[]),
            },
        };
        [key, chain, &self.roots]
    }
}

/// What is in the directory, as far as we put it there.
#[derive(Debug)]
struct Writer {
    config: Config,
    /// Linked now.
    current: Option<String>,
    /// Linked before: a reader may still be at it.
    previous: Option<String>,
    /// Published last.
    written: Option<Served>,
}

impl Writer {
    const fn new(config: Config) -> Self {
        Self {
            config,
            current: None,
            previous: None,
            written: None,
        }
    }

    fn written(mut self, served: Served) -> (Self, io::Result<()>) {
        let is_known = |last: &Served| last.contents() == served.contents();
        if self.written.as_ref().is_some_and(is_known) {
            return (self, Ok(()));
        }
        let outcome = self.write(served.contents());
        if outcome.is_ok() {
            self.written = Some(served);
        }
        (self, outcome)
    }

    fn write(&mut self, contents: [&[u8]; 3]) -> io::Result<()> {
        if self.current.is_none() {
            self.take_over()?;
        }
        if NAMES
            .iter()
            .zip(contents)
            .all(|(name, content)| self.holds(name, content))
        {
            return Ok(());
        }
        // Through the link as it is, so nothing has changed should the rest fail; but no name without
        // a file behind it.
        let is_first = fs::symlink_metadata(self.path(DATA)).is_err();
        if !is_first {
            self.link_names()?;
        }
        let obsolete = self.swap(contents.map(Some))?;
        if is_first {
            self.link_names()?;
        }
        let synced = self.sync();
        match obsolete {
            Some(obsolete) => fs::remove_dir_all(self.path(&obsolete)).and(synced),
            None => synced,
        }
    }

    /// Plain files become files behind the link, unchanged, so that the first rotation is one step
    /// too. Clears away what earlier agents left.
    fn take_over(&mut self) -> io::Result<()> {
        let linked = fs::read_link(self.path(DATA)).ok();
        let linked = linked.and_then(|target| target.to_str().map(str::to_owned));
        self.remove_stale(linked.as_deref())?;
        if linked.is_some() {
            self.current = linked.filter(|name| name.starts_with(VERSION));
            return Ok(());
        }
        let found = NAMES.map(|name| fs::read(self.path(name)).ok().map(zeroize::Zeroizing::new));
        if found.iter().all(Option::is_none) {
            return Ok(());
        }
        self.swap(std::array::from_fn(|at| {
            found[at].as_ref().map(|content| &content[..])
        }))?;
        for (name, _) in NAMES
            .iter()
            .zip(&found)
            .filter(|(_, found)| found.is_some())
        {
            self.link_name(name)?;
        }
        Ok(())
    }

    /// Leads the link to a new version, in one step. Returns a version nobody may be reading any
    /// more.
    fn swap(&mut self, contents: [Option<&[u8]>; 3]) -> io::Result<Option<String>> {
        let version = self.new_version(contents)?;
        if let Err(error) = self.link(DATA, &version) {
            self.discard(&version);
            return Err(error);
        }
        Ok(std::mem::replace(
            &mut self.previous,
            self.current.replace(version),
        ))
    }

    fn sync(&self) -> io::Result<()> {
        File::open(&self.config.directory)?.sync_all()
    }

    /// What is in the way of writing may be in the way of this too; it is cleared later.
    fn discard(&self, version: &str) {
        let _ = fs::remove_dir_all(self.path(version));
    }

    fn holds(&self, name: &str, content: &[u8]) -> bool {
        let path = self.path(name);
        let is_link = fs::read_link(&path).is_ok_and(|target| target == Path::new(DATA).join(name));
        is_link && fs::read(path).is_ok_and(|found| zeroize::Zeroizing::new(found)[..] == *content)
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

    /// Makes `name` a link to `target`, whatever it was.
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
            // Somebody else's must not keep us from writing ours.
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

/// Whole and on the disk before anybody sees it. Modes are as given, whatever the mask.
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
