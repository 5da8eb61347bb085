//! Serves secrets from files: mounted certificates, and files named in the secret's name.
//!
//! A [`Subscription`] holds the requested names; the [`watcher`] reads their files, watches them, and
//! notifies subscribers of changes. The last good content stays in use until good content replaces it. Files
//! without a subscriber are forgotten within two minutes. The mesh's trust bundle
//! ([`Files::set_mesh_bundle`]) is merged with the workload's own roots.

pub mod source;
mod subscription;
mod table;
#[cfg(test)]
mod tests;
mod watcher;

use std::collections::BTreeMap;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::name::Name;
use super::trust::MeshBundle;
use super::{Roots, Secret};
use crate::metrics::Registry;
use crate::problem::{Code, Problem};
use crate::runtime::clock::Clock;
use source::Source;
pub use subscription::Subscription;
pub use table::SecretState;
use table::{Entry, Table};
use watcher::Watcher;

/// The files of the names that do not contain a path, and how files are read.
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
    /// True if they are the only source of `default` and `ROOTCA`; otherwise they replace the authority once
    /// they exist.
    pub is_only_source: bool,
}

/// A handle to the secrets from files. Clones share the secrets.
#[derive(Clone, Debug)]
pub struct Files {
    config: Arc<Config>,
    table: Arc<Table>,
    mesh: MeshBundle,
    merged: Arc<Mutex<Option<Merged>>>,
    /// True if files of the pair, and of the roots, existed at the start, usable or not.
    existed: [bool; 2],
    /// The workload's own files, which are never forgotten.
    own: Vec<Arc<Entry>>,
}

/// The workload's roots and the mesh's, and the result of merging them, which takes a while.
type Merged = ([Roots; 2], Roots);

/// Returns the handle and the task that reads and watches. The workload's own files are read before
/// this returns, so that it is known from the start which source its names have.
pub fn new(
    config: Config,
    clock: Clock,
    registry: &Registry,
) -> (Files, impl Future<Output = ()> + Send + use<>) {
    let table = Arc::new(Table::default());
    let watcher = Watcher::new(table.clone(), clock, config.debounce, registry);
    let mut own = Vec::new();
    let mut existed = [false; 2];
    if let Some(workload) = &config.workload {
        for (source, existed) in workload.sources().into_iter().zip(&mut existed) {
            own.extend(watcher.pin(source.clone(), !workload.is_only_source));
            *existed = exists(&table.state(&source));
        }
    }
    let files = Files {
        config: Arc::new(config),
        table,
        mesh: MeshBundle::default(),
        merged: Arc::default(),
        existed,
        own,
    };
    (files, watcher.run())
}

/// Returns true if there are files, usable or not. Files the agent may not read count as absent.
fn exists(state: &SecretState) -> bool {
    const ABSENT: [Code; 2] = [Code::SecretFileMissing, Code::SecretFileUnreadable];
    match state {
        SecretState::Unsigned | SecretState::Reading => false,
        SecretState::Unusable(problem) => !ABSENT.contains(&problem.code),
        SecretState::Available(_) => true,
    }
}

impl WorkloadFiles {
    /// Reads the files: the certificate with its key, and the roots. Blocks.
    pub fn read(&self) -> [Result<Secret, Problem>; 2] {
        self.sources().map(|source| source.read().map(|checked| checked.secret))
    }

    fn sources(&self) -> [Source; 2] {
        [self.pair(), self.roots()]
    }

    fn pair(&self) -> Source {
        Source::Pair { chain: self.chain.clone(), key: self.key.clone() }
    }

    fn roots(&self) -> Source {
        Source::Roots(self.roots.clone())
    }
}

impl Files {
    /// Returns true if a name's files have been read and are usable.
    pub fn have(&self, name: &Name) -> bool {
        matches!(self.get(name), Some(SecretState::Available(_)))
    }

    /// Returns the secrets in use other than the workload's own, by the names Envoy requests.
    pub fn others(&self) -> BTreeMap<String, SecretState> {
        self.table
            .entries()
            .into_iter()
            .filter(|entry| !self.own.iter().any(|own| Arc::ptr_eq(own, entry)))
            .map(|entry| (entry.source.to_string(), entry.state()))
            .collect()
    }

    /// Replaces the mesh's trust bundle, PEM; an empty text removes it. It is merged into `ROOTCA`, no other
    /// name. Returns true if it differs.
    pub fn set_mesh_bundle(&self, bundle: &str) -> Result<bool, Problem> {
        let is_new = self.mesh.replace(bundle)?;
        if is_new {
            self.table.changes.send_replace(());
        }
        Ok(is_new)
    }

    /// Returns true if the trust anchors of a name are the workload's own.
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
            Name::FileCert { chain, key } => {
                Some(Source::Pair { chain: chain.into(), key: key.into() })
            }
        }
    }

    /// Returns None if the name does not have files, or if its files were never usable and the authority
    /// is the other source.
    fn get(&self, name: &Name) -> Option<SecretState> {
        let state = self.table.state(&self.source(name)?);
        let [pair, roots] = self.existed;
        let existed = match name {
            Name::Default => pair,
            Name::RootCa => roots,
            Name::SystemRoots | Name::FileRoot(_) | Name::FileCert { .. } => return Some(state),
        };
        let workload = self.config.workload.as_ref()?;
        match state {
            SecretState::Available(Secret::Roots(own)) => {
                Some(SecretState::Available(Secret::Roots(self.merge_with_mesh(own))))
            }
            SecretState::Available(_) => Some(state),
            // Files from the start are waited for, because the authority would sign another identity. Unusable
            // files that appear later do not replace the authority.
            _ if existed && exists(&state) => Some(state),
            _ => workload.is_only_source.then_some(state),
        }
    }

    /// Merges the workload's roots and the mesh's. Remembers the last result.
    fn merge_with_mesh(&self, own: Roots) -> Roots {
        let Some(mesh) = self.mesh.latest() else {
            return own;
        };
        let mut last = self.merged.lock();
        match &*last {
            Some((sources, merged)) if [&sources[0], &sources[1]] == [&own, &mesh] => {
                merged.clone()
            }
            _ => {
                let merged = own.union(&mesh);
                *last = Some(([own, mesh], merged.clone()));
                merged
            }
        }
    }
}

/// Returns true if two paths have the same spelling, once both are absolute.
fn same_file(one: &Path, other: &Path) -> bool {
    let [one, other] = [one, other].map(|path| std::path::absolute(path).ok());
    one.is_some() && one == other
}
