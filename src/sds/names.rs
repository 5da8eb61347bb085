//! The names a stream asks for, each with what was sent of it since.

use std::collections::BTreeMap;

use super::resource::{Lookup, Resource, Version};
use crate::secrets::SecretState;
use crate::secrets::name::Name;

#[derive(Debug, Default)]
pub(super) struct Names(BTreeMap<Name, Sent>);

/// What was sent of a name since it was asked for.
#[derive(Debug, Default)]
enum Sent {
    #[default]
    Nothing,
    /// The client holds this version from an earlier stream.
    Held(String),
    Removed,
    Version(Version),
}

impl Sent {
    fn is(&self, resource: &Resource<'_>) -> bool {
        match self {
            Self::Version(sent) => *sent == resource.version(),
            Self::Held(held) => *held == resource.version().text(),
            Self::Nothing | Self::Removed => false,
        }
    }
}

/// What a response says of one name: its resource, or why there is none.
pub(super) type Change<'a> = (Name, Result<Resource<'a>, String>);

impl Names {
    /// Asks for a name (again), of which the client may hold a version.
    pub(super) fn insert(&mut self, name: Name, version: Option<String>) {
        let sent = version.map_or(Sent::Nothing, Sent::Held);
        self.0.insert(name, sent);
    }

    pub(super) fn remove(&mut self, name: &Name) {
        self.0.remove(name);
    }

    /// Asks for these names and no others. Names asked for before count as answered if `is_continued`.
    pub(super) fn replace(&mut self, names: impl IntoIterator<Item = Name>, is_continued: bool) {
        let mut before = std::mem::take(&mut self.0);
        if !is_continued {
            before.clear();
        }
        self.0.extend(names.into_iter().map(|name| {
            let sent = before.remove(&name).unwrap_or_default();
            (name, sent)
        }));
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Name> {
        self.0.keys()
    }

    /// The names of which the client has nothing yet.
    pub(super) fn unanswered(&self) -> impl Iterator<Item = &Name> {
        let names = self.0.iter();
        names.filter_map(|(name, sent)| matches!(sent, Sent::Nothing).then_some(name))
    }

    /// What is due of names just asked for, and what has changed of the others, roots first. The former
    /// wait for each other's files while batching. The workload's own secrets are waited for, others
    /// that cannot be had are due with the reason.
    pub(super) fn due<'a>(&self, lookup: &Lookup<'a>, is_batching: bool) -> [Vec<Change<'a>>; 2] {
        let (mut asked, mut changed) = (Vec::new(), Vec::new());
        let mut is_complete = true;
        for (name, sent) in &self.0 {
            let is_new = matches!(sent, Sent::Nothing | Sent::Held(_));
            let is_own = matches!(name, Name::Default | Name::RootCa);
            let change = match lookup(name) {
                SecretState::Available(now) if sent.is(&now) => continue,
                SecretState::Available(now) => Ok(now),
                SecretState::Unusable(error) if is_new && !is_own => Err(error.to_string()),
                SecretState::Reading => {
                    is_complete &= !is_new;
                    continue;
                }
                SecretState::Unusable(_) | SecretState::Unsigned => continue,
            };
            let due = if is_new { &mut asked } else { &mut changed };
            due.push((name.clone(), change));
        }
        if is_batching && !is_complete {
            asked.clear();
        }
        [asked, changed]
    }

    pub(super) fn sent(&mut self, (name, change): Change<'_>) {
        let sent = change.map_or(Sent::Removed, |resource| Sent::Version(resource.version()));
        self.0.insert(name, sent);
    }
}
