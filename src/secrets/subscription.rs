//! Secrets by name from both sources: files go before the certificate authority.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::certificate::Secret;
use super::files::source::FileError;
use super::files::{self, Files};
use super::name::Name;
use super::{Problem, Secrets};

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
    files: files::Subscription,
}

impl Subscription {
    /// Starts without names. `authority` is None where no authority signs.
    pub fn new(authority: Option<Secrets>, files: &Files) -> Self {
        Self {
            authority,
            files: files.subscribe(),
        }
    }

    /// Replaces the names asked for.
    pub fn want(&mut self, names: BTreeSet<Name>) {
        self.files.want(names);
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

    /// Returns when one of the names may have changed since the last return.
    pub async fn changed(&mut self) {
        let signed = async {
            match &mut self.authority {
                Some(authority) => authority.changed().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = signed => {}
            () = self.files.changed() => {}
        }
    }
}

impl<T> SecretState<T> {
    pub fn map<U>(self, change: impl FnOnce(T) -> U) -> SecretState<U> {
        match self {
            Self::Unsigned => SecretState::Unsigned,
            Self::Reading => SecretState::Reading,
            Self::Unusable(error) => SecretState::Unusable(error),
            Self::Available(secret) => SecretState::Available(change(secret)),
        }
    }
}
