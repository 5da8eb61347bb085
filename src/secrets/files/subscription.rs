//! Secrets by name from both sources: files go before the certificate authority.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use tokio::sync::watch;

use super::Files;
use super::source::{FileError, Source};
use crate::secrets::name::Name;
use crate::secrets::{Problem, Secret, Secrets};

/// Whether a secret can be had now.
#[derive(Clone, Debug)]
pub enum SecretState<T = Secret> {
    /// The authority has not signed it yet.
    Unsigned,
    /// Its files are about to be read.
    Reading,
    /// Its files were never good so far.
    Unusable(Arc<FileError>),
    Available(T),
}

/// The names a client asks for, until it is dropped.
#[derive(Debug)]
pub struct Subscription {
    authority: Option<Secrets>,
    files: Files,
    names: BTreeSet<Name>,
    /// The files subscribed to: those of the names, as far as there is room.
    sources: HashSet<Source>,
    changed: watch::Receiver<()>,
    /// Whether there is room for all names.
    is_complete: bool,
}

impl Subscription {
    /// Starts without names. `authority` is None where no authority signs.
    pub fn new(authority: Option<Secrets>, files: &Files) -> Self {
        Self {
            authority,
            files: files.clone(),
            names: BTreeSet::new(),
            sources: HashSet::new(),
            changed: files.table.changes(),
            is_complete: true,
        }
    }

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

    pub fn get(&self, name: &Name) -> SecretState {
        let signed = || {
            let secret = self.authority.as_ref()?.latest().secret(name)?;
            Some(SecretState::Available(secret))
        };
        let from_files = self.files.get(name);
        from_files.or_else(signed).unwrap_or(SecretState::Unsigned)
    }

    /// Whether `name` stands for the trust anchors of the workload itself.
    pub fn are_own_roots(&self, name: &Name) -> bool {
        self.files.are_own_roots(name)
    }

    /// Why the authority's latest answer brought no certificate.
    pub fn problem(&self) -> Option<Problem> {
        self.authority.as_ref()?.latest().problem
    }

    /// Returns when a secret may have changed since the last return, be it one of the names or not.
    pub async fn changed(&mut self) {
        let signed = async {
            match &mut self.authority {
                Some(authority) => authority.changed().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = signed => {}
            // The table outlives its subscriptions.
            _ = self.changed.changed() => {
                if !self.is_complete {
                    self.subscribe();
                }
            }
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
