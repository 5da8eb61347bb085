//! What a ProxyConfig may say: its members, by name and type.
//!
//! The tables in [`tables`] are data; [`convert`] reads a document by them and gives the form istiod
//! reads back: names in camel case, enumerations by name, durations in seconds, wrapped values bare.
//!
//! Does not know defaults, nor which values make sense.

pub(super) mod convert;
mod tables;

pub(super) use tables::PROXY_CONFIG;

/// The type of a member.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    Text,
    /// Text that is never shown.
    Secret,
    Bool,
    Uint32,
    Int32,
    Double,
    Duration,
    Enum(&'static [Variant]),
    /// A scalar that can be told from its absence.
    Wrapped(&'static Kind),
    /// As [`Kind::Wrapped`]; written as text.
    Int64Value,
    Message(&'static [Member]),
    List(&'static Kind),
    Map(&'static Kind),
}

/// A name of an enumeration and its number.
pub(super) type Variant = (&'static str, i64);

#[derive(Debug)]
pub(super) struct Member {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    /// The group of which only one may be set.
    pub(super) group: Option<&'static str>,
}

/// The members of a message that setting `member` unsets.
pub(super) fn rivals(
    table: &'static [Member],
    member: &Member,
) -> impl Iterator<Item = &'static str> {
    let (name, group) = (member.name, member.group);
    let others = table.iter().filter(move |other| other.name != name);
    others
        .filter(move |other| group.is_some() && other.group == group)
        .map(|other| other.name)
}

impl Member {
    /// Whether a set member is written even when it says zero.
    pub(super) fn has_presence(&self) -> bool {
        let present = matches!(
            self.kind,
            Kind::Wrapped(_) | Kind::Int64Value | Kind::Duration | Kind::Message(_)
        );
        present || self.group.is_some()
    }
}
