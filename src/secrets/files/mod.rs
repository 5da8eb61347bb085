//! Secrets from files: mounted certificates, and files named in the secret's name.
//!
//! A [`Subscription`] holds the names asked for; the [`watcher`] reads their files, watches them, and
//! notifies subscribers of changes. What was good once stays until something good replaces it. Files
//! without a subscriber are forgotten within two minutes. The mesh's trust bundle
//! ([`Files::set_mesh_bundle`]) joins the workload's own roots.

mod metrics;
mod reads;
pub mod source;
mod table;
#[cfg(test)]
mod tests;
mod watcher;

use std::collections::{BTreeSet, HashSet};
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;

use super::name::Name;
use super::trust::{BundleError, MeshBundle};
use super::{Roots, Secret, SecretState};
use crate::clock::Clock;
use crate::file_watch::FileWatch;
use crate::metrics::Registry;
use metrics::Metrics;
use reads::Reads;
use source::{FileError, Source};
use table::Table;
use watcher::Watcher;

/// The files of the names that carry no path, and how files are read.
#[derive(Clone, Debug)]
pub struct Config {
    /// The files of `default` and of `ROOTCA`.
    pub workload: Option<WorkloadFiles>,
    /// The operating system's trust anchors.
    pub system_roots: PathBuf,
    /// The pause between a change and the read.
    pub debounce: Duration,
}

/// The files of the workload's certificate and roots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkloadFiles {
    pub chain: PathBuf,
    pub key: PathBuf,
    pub roots: PathBuf,
    /// Whether they are the only source of `default` and `ROOTCA`; else they replace the authority once
    /// they exist.
    pub is_only_source: bool,
}

/// Handle to the secrets from files. Clones share them.
#[derive(Clone, Debug)]
pub struct Files {
    config: Arc<Config>,
    table: Arc<Table>,
    mesh: MeshBundle,
    merged: Arc<Mutex<Option<Merged>>>,
    /// Whether files of the pair and of the roots existed at the start, good or not.
    existed: [bool; 2],
}

/// What `ROOTCA` holds, cached as it takes a while to merge.
#[derive(Debug)]
struct Merged {
    own: Roots,
    mesh: Roots,
    merged: Roots,
}

/// The names a client asks for, until it is dropped.
#[derive(Debug)]
pub struct Subscription {
    files: Files,
    names: BTreeSet<Name>,
    /// The sources subscribed to: those of the names, as far as there is room.
    sources: HashSet<Source>,
    changed: watch::Receiver<()>,
    /// Whether there is room for all names.
    is_complete: bool,
}

/// Returns the handle and the task that reads and watches. The workload's own files are read before
/// this returns, so that it is known from the start which source its names have.
pub fn new(
    config: Config,
    clock: Clock,
    registry: &Registry,
) -> (Files, impl Future<Output = ()> + Send + use<>) {
    let table = Arc::new(Table::default());
    let watcher = Watcher {
        table: table.clone(),
        clock,
        debounce: config.debounce,
        metrics: Metrics::new(registry),
        open: FileWatch::new,
        watch: Mutex::default(),
        reads: Reads::new(),
    };
    let existed = config.workload.as_ref().map(|workload| {
        workload.sources().map(|source| {
            watcher.pin(source.clone(), !workload.is_only_source);
            exists(&table.state(&source))
        })
    });
    let files = Files {
        config: Arc::new(config),
        table,
        mesh: MeshBundle::default(),
        merged: Arc::default(),
        existed: existed.unwrap_or_default(),
    };
    (files, watcher.run())
}

/// Whether there are files, good or not. Files the agent may not read count as absent.
fn exists(state: &SecretState) -> bool {
    match state {
        SecretState::Unsigned | SecretState::Reading => false,
        SecretState::Unusable(error) => {
            !matches!(**error, FileError::Unreadable { .. }) && !error.is_absence()
        }
        SecretState::Available(_) => true,
    }
}

impl WorkloadFiles {
    /// What the files hold now: the certificate with its key, and the roots. Blocks.
    pub fn read(&self) -> [Result<Secret, FileError>; 2] {
        let read = |source: Source| source.read().map(|(secret, _)| secret);
        self.sources().map(read)
    }

    fn sources(&self) -> [Source; 2] {
        [self.pair(), self.roots()]
    }

    fn pair(&self) -> Source {
        Source::Pair {
            chain: self.chain.clone(),
            key: self.key.clone(),
        }
    }

    fn roots(&self) -> Source {
        Source::Roots(self.roots.clone())
    }
}

impl Files {
    pub fn subscribe(&self) -> Subscription {
        Subscription {
            files: self.clone(),
            names: BTreeSet::new(),
            sources: HashSet::new(),
            changed: self.table.changes(),
            is_complete: true,
        }
    }

    /// Whether a name's files were read already.
    pub fn have(&self, name: &Name) -> bool {
        matches!(self.get(name), Some(SecretState::Available(_)))
    }

    /// Replaces the mesh's trust bundle, PEM; an empty one is none. It joins `ROOTCA`, no other name.
    /// Returns whether it differs.
    pub fn set_mesh_bundle(&self, bundle: &str) -> Result<bool, BundleError> {
        let is_new = self.mesh.replace(bundle)?;
        if is_new {
            self.table.notify();
        }
        Ok(is_new)
    }

    /// Whether the workload's files are in this directory, also through links. Blocks.
    pub fn are_in(&self, directory: &Path) -> bool {
        let files = self.config.workload.iter();
        let mut files = files.flat_map(|files| [&files.chain, &files.key, &files.roots]);
        files.any(|file| {
            let canonical = |path: &Path| std::fs::canonicalize(path).ok();
            file.parent().is_some_and(|parent| {
                let found = canonical(parent);
                same_file(parent, directory) || found.is_some() && found == canonical(directory)
            })
        })
    }

    /// Whether the trust anchors of a name are the workload's own.
    pub fn are_own_roots(&self, name: &Name) -> bool {
        match name {
            Name::RootCa => true,
            Name::FileRoot(path) => {
                let own = self.config.workload.as_ref();
                own.is_some_and(|own| same_file(&own.roots, path.as_ref()))
            }
            Name::SystemRoots | Name::Default | Name::FileCert { .. } => false,
        }
    }

    fn source(&self, name: &Name) -> Option<Source> {
        let workload = self.config.workload.as_ref();
        match name {
            Name::RootCa => workload.map(WorkloadFiles::roots),
            Name::Default => workload.map(WorkloadFiles::pair),
            Name::SystemRoots => Some(Source::Roots(self.config.system_roots.clone())),
            Name::FileRoot(path) => Some(Source::Roots(path.into())),
            Name::FileCert { chain, key } => Some(Source::Pair {
                chain: chain.into(),
                key: key.into(),
            }),
        }
    }

    /// None if the name has no files, or none that were ever good and another source.
    fn get(&self, name: &Name) -> Option<SecretState> {
        let state = self.table.state(&self.source(name)?);
        let [pair, roots] = self.existed;
        let existed = match name {
            Name::Default => pair,
            Name::RootCa => roots,
            Name::SystemRoots | Name::FileRoot(_) | Name::FileCert { .. } => return Some(state),
        };
        match state {
            SecretState::Available(Secret::Roots(own)) => {
                Some(SecretState::Available(Secret::Roots(self.merged(own))))
            }
            SecretState::Available(_) => Some(state),
            // Until the files are good, the authority serves another identity. Once it does, files that
            // come and are no good do not end that.
            _ if existed && exists(&state) => Some(state),
            _ => self.is_only_source().then_some(state),
        }
    }

    fn is_only_source(&self) -> bool {
        let workload = self.config.workload.as_ref();
        workload.is_some_and(|workload| workload.is_only_source)
    }

    /// The workload's roots with those of the mesh.
    fn merged(&self, own: Roots) -> Roots {
        let Some(mesh) = self.mesh.latest() else {
            return own;
        };
        let mut last = self.merged.lock();
        if let Some(last) = &*last
            && last.own == own
            && last.mesh == mesh
        {
            return last.merged.clone();
        }
        let merged = own.with(&mesh);
        *last = Some(Merged {
            own,
            mesh,
            merged: merged.clone(),
        });
        merged
    }
}

impl Subscription {
    /// Replaces the names asked for.
    pub fn want(&mut self, names: BTreeSet<Name>) {
        self.names = names;
        self.subscribe();
    }

    fn subscribe(&mut self) {
        let (files, names) = (&self.files, self.names.iter());
        // Two names may have one source.
        let wanted: HashSet<_> = names.filter_map(|name| files.source(name)).collect();
        for gone in self.sources.difference(&wanted) {
            files.table.unsubscribe(gone);
        }
        let count = wanted.len();
        let (has, table) = (&self.sources, &files.table);
        let subscribed = wanted
            .into_iter()
            .filter(|source| has.contains(source) || table.subscribe(source, false));
        self.sources = subscribed.collect();
        self.is_complete = self.sources.len() == count;
    }

    /// None if the name has no files, or none that were ever good and another source.
    pub fn get(&self, name: &Name) -> Option<SecretState> {
        self.files.get(name)
    }

    pub fn are_own_roots(&self, name: &Name) -> bool {
        self.files.are_own_roots(name)
    }

    /// Returns when a secret from files has changed since the last return, be it one of the names or not.
    pub async fn changed(&mut self) {
        // The table outlives its subscriptions.
        let _ = self.changed.changed().await;
        if !self.is_complete {
            self.subscribe();
        }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        for source in &self.sources {
            self.files.table.unsubscribe(source);
        }
    }
}

/// Whether two paths are spelled the same, once both are absolute.
fn same_file(one: &Path, other: &Path) -> bool {
    let absolute = |path: &Path| std::path::absolute(path).ok();
    absolute(one).is_some_and(|one| Some(one) == absolute(other))
}
