//! Looks up secrets by name in both sources: files take precedence over the certificate authority.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use tokio::sync::watch;

use super::Files;
use super::table::{Entry, SecretState};
use crate::secrets::name::Name;
use crate::secrets::{Failure, Secrets};

/// The names a client requests, until it is dropped.
#[derive(Debug)]
pub struct Subscription {
    authority: Option<Secrets>,
    files: Files,
    /// The files of the names, without those beyond the limit of the table.
    entries: Vec<Arc<Entry>>,
    changed: watch::Receiver<()>,
}

impl Subscription {
    /// Creates a subscription without names. `authority` is None if no authority signs certificates.
    pub fn new(authority: Option<Secrets>, files: &Files) -> Self {
        Self {
            authority,
            files: files.clone(),
            entries: Vec::new(),
            changed: files.table.changes.subscribe(),
        }
    }

    pub fn want(&mut self, names: BTreeSet<Name>) {
        let files = &self.files;
        // Two names may have one source.
        let sources: HashSet<_> = names.iter().filter_map(|name| files.source(name)).collect();
        self.entries =
            sources.into_iter().filter_map(|source| files.table.subscribe(source, false)).collect();
    }

    pub fn get(&self, name: &Name) -> SecretState {
        if let Some(state) = self.files.get(name) {
            return state;
        }
        self.authority
            .as_ref()
            .and_then(|authority| authority.latest().secret(name))
            .map_or(SecretState::Unsigned, SecretState::Available)
    }

    pub fn failure(&self) -> Option<Failure> {
        self.authority.as_ref()?.latest().failure
    }

    /// Waits until a secret may have changed since the last return, one of the names or another.
    pub async fn changed(&mut self) {
        let signed = async {
            match &mut self.authority {
                Some(authority) => authority.changed().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = signed => {}
            // This is never an error, because the subscription holds the table, which owns the sender.
            _ = self.changed.changed() => {}
        }
    }
}
