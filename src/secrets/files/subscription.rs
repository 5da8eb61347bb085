//! Secrets by name from both sources: files go before the certificate authority.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use tokio::sync::watch;

use super::Files;
use super::table::Entry;
use crate::problem::Problem;
use crate::secrets::name::Name;
use crate::secrets::{Failure, Secret, Secrets};

/// Whether a secret can be had now.
#[derive(Clone, Debug)]
pub enum SecretState {
    /// The authority has not signed it yet.
    Unsigned,
    /// Its files are about to be read.
    Reading,
    /// Its files were never good so far.
    Unusable(Arc<Problem>),
    Available(Secret),
}

impl SecretState {
    pub fn available(self) -> Option<Secret> {
        match self {
            Self::Available(secret) => Some(secret),
            Self::Unsigned | Self::Reading | Self::Unusable(_) => None,
        }
    }
}

/// The names a client asks for, until it is dropped.
#[derive(Debug)]
pub struct Subscription {
    authority: Option<Secrets>,
    files: Files,
    /// The files of the names, as far as there is room.
    entries: Vec<Arc<Entry>>,
    changed: watch::Receiver<()>,
}

impl Subscription {
    /// Starts without names. `authority` is None where no authority signs.
    pub fn new(authority: Option<Secrets>, files: &Files) -> Self {
        Self {
            authority,
            files: files.clone(),
            entries: Vec::new(),
            changed: files.table.changes.subscribe(),
        }
    }

    /// Replaces the names asked for.
    pub fn want(&mut self, names: BTreeSet<Name>) {
        let files = &self.files;
        // Two names may have one source.
        let sources: HashSet<_> = names.iter().filter_map(|name| files.source(name)).collect();
        let sources = sources.into_iter();
        let entries = sources.filter_map(|source| files.table.subscribe(source, false));
        self.entries = entries.collect();
    }

    pub fn get(&self, name: &Name) -> SecretState {
        let signed = || {
            let secret = self.authority.as_ref()?.latest().secret(name)?;
            Some(SecretState::Available(secret))
        };
        let from_files = self.files.get(name);
        from_files.or_else(signed).unwrap_or(SecretState::Unsigned)
    }

    /// Why the authority's latest answer brought no certificate.
    pub fn failure(&self) -> Option<Failure> {
        self.authority.as_ref()?.latest().failure
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
            _ = self.changed.changed() => {}
        }
    }
}
