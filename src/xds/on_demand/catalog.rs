//! What the agent knows of clusters beyond their bytes: which of them Envoy needs from the start.

use std::collections::{BTreeSet, HashSet};

use indexmap::IndexMap;

use super::mention::{self, Mention};
use super::status::OnDemandSnapshot;
use crate::xds::wire::NameDigest;

/// The most clusters that a new Envoy gets because a former one has used them.
const MAX_USED: usize = 500;

/// The most texts and route tables. Further ones are not followed: their clusters are found on demand, or not at all.
const MAX_MENTIONS: usize = 16 * 1024;

/// The beginning of the names of clusters that Envoy can discover on demand.
pub(super) const OUTBOUND: &str = "outbound|";

#[derive(Debug, Default)]
pub(in crate::xds) struct Catalog {
    /// Texts in the configuration that may name clusters, which Envoy does not discover there.
    mentions: BTreeSet<Mention>,
    /// Route tables of connection managers without the filter. Envoy gets all their clusters.
    whole_tables: HashSet<String>,
    /// Listeners that Envoy gets as istiod has sent them, because it has rejected the rewritten ones.
    plain_listeners: HashSet<NameDigest>,
    /// Clusters whose stored version no Envoy has accepted.
    pub(in crate::xds) unaccepted: HashSet<NameDigest>,
    /// The names of clusters that an Envoy has asked for, or that were pinned by name. The newest ones are the last.
    used: IndexMap<NameDigest, String>,
    /// Envoy's last reason to reject rewritten listeners.
    pub(super) rejected_listeners: Option<String>,
    /// The newest Envoy's clusters, for the debug page.
    pub(in crate::xds) snapshot: Option<OnDemandSnapshot>,
}

impl Catalog {
    /// Adds all texts in these bytes that may name clusters.
    pub(in crate::xds) fn add_mentions_in(&mut self, bytes: &[u8]) {
        mention::find(bytes, |text| self.add_mention(text));
    }

    /// Adds a text that may name a cluster.
    pub(super) fn add_mention(&mut self, text: impl Into<Mention>) {
        if self.mentions.len() < MAX_MENTIONS {
            self.mentions.insert(text.into());
        }
    }

    /// Returns the clusters that other resources name.
    pub(super) fn named(&self, is_known: impl Fn(&str) -> bool) -> BTreeSet<&str> {
        self.mentions.iter().filter_map(|it| it.cluster(&is_known)).collect()
    }

    pub(super) fn add_whole_tables(&mut self, names: impl IntoIterator<Item = String>) {
        for name in names {
            if self.whole_tables.len() < MAX_MENTIONS {
                self.whole_tables.insert(name);
            }
        }
    }

    pub(super) fn is_whole_table(&self, name: &str) -> bool {
        self.whole_tables.contains(name)
    }

    /// Returns true if another resource names this cluster.
    pub(super) fn is_mentioned(&self, cluster: &str, is_known: impl Fn(&str) -> bool) -> bool {
        // Texts that begin with the name follow it in the order of the set.
        self.mentions
            .range(Mention::from(cluster)..)
            .take_while(|it| it.text().starts_with(cluster))
            .any(|it| it.cluster(|name| name == cluster || is_known(name)) == Some(cluster))
    }

    pub(super) fn add_plain(&mut self, listener: NameDigest) {
        self.plain_listeners.insert(listener);
    }

    pub(super) fn is_plain(&self, listener: &str) -> bool {
        self.plain_listeners.contains(&NameDigest::of(listener.as_bytes()))
    }

    /// Notes that an Envoy has asked for a cluster.
    pub(super) fn note_used(&mut self, name: &str) {
        let digest = NameDigest::of(name.as_bytes());
        self.used.shift_remove(&digest);
        if self.used.len() >= MAX_USED {
            self.used.shift_remove_index(0);
        }
        self.used.insert(digest, name.to_owned());
    }

    /// Notes that another resource names a cluster, so that a new Envoy has it before that resource comes. It does not take
    /// the place of one that was asked for.
    pub(super) fn note_named(&mut self, name: &str) {
        if self.used.len() < MAX_USED {
            self.used.entry(NameDigest::of(name.as_bytes())).or_insert_with(|| name.to_owned());
        }
    }

    pub(in crate::xds) fn is_used(&self, name: NameDigest) -> bool {
        self.used.contains_key(&name)
    }

    /// Returns the names of the used clusters, for the file.
    pub(in crate::xds) fn used(&self) -> Vec<String> {
        self.used.values().cloned().collect()
    }

    /// Takes the names in the file.
    pub(in crate::xds) fn restore_used(&mut self, names: &[String]) {
        names.iter().for_each(|name| self.note_used(name));
    }
}
