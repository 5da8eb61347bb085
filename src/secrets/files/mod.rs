//! Secrets from files: mounted certificates, and those a name says the files of.
//!
//! A [`Subscription`] says which names somebody wants; one task, the [`keeper`], reads their files,
//! watches them, and tells subscribers of what changed. What was good once stays until something
//! good takes its place. Files nobody has wanted for a while are forgotten. Roots of the mesh
//! ([`Files::trust`]) join the workload's own.
//!
//! Does not ask an authority, and does not know Envoy.

mod keeper;
mod metrics;
mod slots;
pub mod source;
mod table;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::future::Future;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::Roots;
use super::name::Name;
use super::trust::{BundleError, Mesh};
use crate::clock::Clock;
use crate::metrics::Registry;
use keeper::Keeper;
use metrics::Metrics;
use source::{Content, FileError, Source};
use table::Shared;

/// Which files stand for the names that do not say so, and how they are read.
#[derive(Clone, Debug)]
pub struct Config {
    /// The files of `default` and of `ROOTCA`.
    pub workload: Option<WorkloadFiles>,
    /// The operating system's trust anchors.
    pub system_roots: PathBuf,
    /// The rest between a change and the look at it.
    pub debounce: Duration,
}

/// A workload's certificate as files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkloadFiles {
    pub chain: PathBuf,
    pub key: PathBuf,
    pub roots: PathBuf,
    /// Whether they are the only source of these names, or go before an authority once they exist.
    pub is_only_source: bool,
}

/// The way to secrets from files. Clones share them.
#[derive(Clone, Debug)]
pub struct Files {
    config: Arc<Config>,
    shared: Arc<Shared>,
    mesh: Mesh,
    merged: Arc<Mutex<Option<Merged>>>,
    /// Whether there were files of the pair and of the roots at the start, good or not.
    claimed: [bool; 2],
}

/// What `ROOTCA` holds, kept as it takes a while to make.
#[derive(Debug)]
struct Merged {
    own: Arc<Secret>,
    mesh: Roots,
    secret: Arc<Secret>,
}

/// What somebody wants to know of, until it is dropped.
#[derive(Debug)]
pub struct Subscription {
    files: Files,
    id: u64,
    names: BTreeSet<Name>,
    changed: Arc<Notify>,
}

/// A secret that was read.
#[derive(Debug)]
pub struct Secret {
    pub content: Content,
}

/// What there is under a name.
#[derive(Clone, Debug)]
pub enum Found {
    /// The name has no files, or none that were ever good and another source.
    NoFile,
    /// Its files are about to be read.
    Pending,
    /// Its files were never good so far.
    Missing(Arc<FileError>),
    There(Arc<Secret>),
}

/// The handle and the task that reads and watches. The workload's own files are read here and now,
/// so that it is known from the start which source its names have.
pub fn new(
    config: Config,
    clock: Clock,
    registry: &Registry,
) -> (Files, impl Future<Output = ()> + Send + use<>) {
    let shared = Arc::new(Shared::default());
    let debounce = config.debounce;
    let workload = config.workload.clone();
    let mut keeper = Keeper::new(shared.clone(), clock, debounce, Metrics::new(registry));
    for source in workload.iter().flat_map(WorkloadFiles::sources) {
        keeper.pin(source, !workload.as_ref().is_some_and(|w| w.is_only_source));
    }
    let claimed = workload.map(|workload| {
        let sources = workload.sources();
        sources.map(|source| is_claimed(&shared.found(&source)))
    });
    let files = Files {
        config: Arc::new(config),
        shared,
        mesh: Mesh::default(),
        merged: Arc::default(),
        claimed: claimed.unwrap_or_default(),
    };
    (files, keeper.run())
}

/// Whether there are files, good or not. What may not be read is not meant for us.
fn is_claimed(found: &Found) -> bool {
    match found {
        Found::NoFile | Found::Pending => false,
        Found::Missing(error) => {
            !matches!(**error, FileError::Unreadable { .. }) && !keeper::is_absent(error)
        }
        Found::There(_) => true,
    }
}

impl WorkloadFiles {
    fn sources(&self) -> [Source; 2] {
        [self.pair(), self.anchors()]
    }

    fn pair(&self) -> Source {
        Source::Pair {
            chain: self.chain.clone(),
            key: self.key.clone(),
        }
    }

    fn anchors(&self) -> Source {
        Source::Roots(self.roots.clone())
    }
}

impl Files {
    pub fn subscribe(&self) -> Subscription {
        let (id, changed) = self.shared.subscriber();
        Subscription {
            files: self.clone(),
            id,
            names: BTreeSet::new(),
            changed,
        }
    }

    /// Whether files stand for a name already.
    pub fn have(&self, name: &Name) -> bool {
        matches!(self.found(name), Found::There(_))
    }

    /// Takes the trust bundle of the mesh, PEM, in place of the last; an empty one is none. It joins
    /// `ROOTCA`, no other name. Returns whether it is another.
    pub fn trust(&self, bundle: &str) -> Result<bool, BundleError> {
        let is_new = self.mesh.take(bundle)?;
        if let (true, Some(anchors)) = (is_new, self.source_of(&Name::RootCa)) {
            self.shared.tell(&anchors);
        }
        Ok(is_new)
    }

    /// Whether a file of the workload is in this directory, by whatever name. It may wait for a disk.
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

    fn source_of(&self, name: &Name) -> Option<Source> {
        let workload = self.config.workload.as_ref();
        match name {
            Name::RootCa => workload.map(WorkloadFiles::anchors),
            Name::Default => workload.map(WorkloadFiles::pair),
            Name::SystemRoots => Some(Source::Roots(self.config.system_roots.clone())),
            Name::FileRoot(path) => Some(Source::Roots(path.into())),
            Name::FileCert { chain, key } => Some(Source::Pair {
                chain: chain.into(),
                key: key.into(),
            }),
        }
    }

    fn found(&self, name: &Name) -> Found {
        let Some(source) = self.source_of(name) else {
            return Found::NoFile;
        };
        let found = self.shared.found(&source);
        let workload = self.config.workload.as_ref();
        let [pair, roots] = self.claimed;
        let was_claimed = match name {
            Name::Default => Some(pair),
            Name::RootCa => Some(roots),
            Name::SystemRoots | Name::FileRoot(_) | Name::FileCert { .. } => None,
        };
        // What the authority gives meanwhile would be another identity, which changes when the files
        // become good. But where it has been served, files that come and are no good do not end it.
        let has_other_source = was_claimed.is_some_and(|was| !(was && is_claimed(&found)))
            && workload.is_some_and(|workload| !workload.is_only_source);
        match found {
            Found::There(own) if *name == Name::RootCa => Found::There(self.merged(own)),
            Found::There(_) => found,
            _ if has_other_source => Found::NoFile,
            _ => found,
        }
    }

    /// The workload's roots with those of the mesh.
    fn merged(&self, own: Arc<Secret>) -> Arc<Secret> {
        let (Content::Roots { pem, broken }, Some(mesh)) = (&own.content, self.mesh.latest())
        else {
            return own;
        };
        let mut kept = self.merged.lock();
        if let Some(kept) = &*kept
            && Arc::ptr_eq(&kept.own, &own)
            && kept.mesh == mesh
        {
            return kept.secret.clone();
        }
        let Some(roots) = Roots::new(&String::from_utf8_lossy(pem)) else {
            return own;
        };
        let (pem, broken) = (roots.with(&mesh).pem().clone(), *broken);
        let content = Content::Roots { pem, broken };
        let secret = Arc::new(Secret { content });
        *kept = Some(Merged {
            own,
            mesh,
            secret: secret.clone(),
        });
        secret
    }
}

impl Subscription {
    /// Wants these names, and no others any more.
    pub fn want(&mut self, names: BTreeSet<Name>) {
        let source = |name: &Name| self.files.source_of(name);
        let more: Vec<_> = names.difference(&self.names).filter_map(source).collect();
        let less: Vec<_> = self.names.difference(&names).filter_map(source).collect();
        self.files.shared.want(self.id, &self.changed, more);
        // Two names may have one source.
        let kept: Vec<_> = names.iter().filter_map(source).collect();
        let less = less.into_iter().filter(|source| !kept.contains(source));
        self.files.shared.leave(self.id, less);
        self.names = names;
    }

    pub fn found(&self, name: &Name) -> Found {
        self.files.found(name)
    }

    pub fn are_own_roots(&self, name: &Name) -> bool {
        self.files.are_own_roots(name)
    }

    /// Returns when something about the names has changed since it returned last.
    pub async fn changed(&self) {
        self.changed.notified().await;
        if self.files.shared.is_admissible(self.id) {
            let sources = self.sources().collect();
            self.files.shared.want(self.id, &self.changed, sources);
        }
    }

    fn sources(&self) -> impl Iterator<Item = Source> {
        let names = self.names.iter();
        names.filter_map(|name| self.files.source_of(name))
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let shared = &self.files.shared;
        shared.leave_for_good(self.id, self.sources());
    }
}

/// Whether two ways to write a path are one. Relative ones are looked for where the agent runs.
fn same_file(one: &Path, other: &Path) -> bool {
    let absolute = |path: &Path| std::path::absolute(path).ok();
    absolute(one).is_some_and(|one| Some(one) == absolute(other))
}
