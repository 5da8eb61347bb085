//! Reads and writes messages by protobuf's JSON mapping, as pilot-agent does.
//!
//! Members may be named in camel case or snake case, numbers may be quoted, enumerations are given by
//! name or number, durations in Go's syntax. Unknown members are left out with a warning; each value
//! of the wrong type is a problem with its path, line, value and expectation, and reading goes on.
//! The written form has camel-case names, names of enumerations, and no members that are unset.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::yaml::{Node, Tree, line};
use crate::problem::Diagnostics;
use crate::spelling;

/// Whether secret values are written or replaced by `(not shown)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Secrets {
    Shown,
    Hidden,
}

/// The type of a message's member.
pub trait Field: Default + PartialEq {
    /// The value, or None after a problem was reported.
    fn read(node: &Node, reader: &mut Reader<'_>) -> Option<Self>;
    fn json(&self, secrets: Secrets) -> Value;
}

/// A message: an object with known members.
pub trait Message: Field {
    /// Names as in the `.proto` file.
    const MEMBERS: &'static [&'static str];
    /// Reads the members the object sets; the others stay. None when the value is no object.
    fn read_members(&mut self, node: &Node, reader: &mut Reader<'_>) -> Option<()>;
    fn members(&self, secrets: Secrets) -> Map<String, Value>;
}

/// The members given by a document, with their values.
pub type Given<'n> = Vec<(&'static str, &'n Node)>;

/// Reads one document and collects what is wrong with it.
#[derive(Debug)]
pub struct Reader<'a> {
    origin: &'a str,
    notes: &'a mut Diagnostics,
    path: String,
    /// The line of every member read, by its path.
    lines: BTreeMap<String, u64>,
}

/// Reads the members `node` sets into `message`; the others stay. Returns the lines of those members.
pub fn read_into<M: Message>(
    message: &mut M,
    origin: &str,
    node: &Node,
    diagnostics: &mut Diagnostics,
) -> BTreeMap<String, u64> {
    let mut reader = Reader {
        origin,
        notes: diagnostics,
        path: String::new(),
        lines: BTreeMap::new(),
    };
    // A value that is no object was reported.
    let _ = message.read_members(node, &mut reader);
    reader.lines
}

impl Reader<'_> {
    pub fn member<T: Field>(&mut self, given: &Given<'_>, name: &str, member: &mut T) {
        let Some((_, node)) = given.iter().find(|(given, _)| *given == name) else {
            return;
        };
        let value = self.within(&camel_case(name), |reader| {
            let value = T::read(node, reader)?;
            reader.lines.insert(reader.path.clone(), line(node));
            Some(value)
        });
        if let Some(value) = value {
            *member = value;
        }
    }

    /// The members of an object that count: in camel case before snake case, the last of a oneof. Warns
    /// of the others.
    pub fn given<'n>(
        &mut self,
        node: &'n Node,
        members: &[&'static str],
        oneof: &[&str],
    ) -> Option<Given<'n>> {
        let entries = self.entries(node)?;
        let is_null = |node: &Node| matches!(node.value, Tree::Null);
        let find = |name: &str| {
            let entry = entries
                .iter()
                .find(|(key, node)| key == name && !is_null(node));
            entry.map(|(_, node)| node)
        };
        let mut given: Given<'n> = Vec::new();
        for member in members {
            if let Some(node) = find(&camel_case(member)).or_else(|| find(member)) {
                given.retain(|(other, _)| !(oneof.contains(member) && oneof.contains(other)));
                given.push((member, node));
            }
        }
        for (key, node) in entries {
            let is_used = given.iter().any(|(_, used)| std::ptr::eq(*used, node));
            let is_known = members
                .iter()
                .any(|name| name == key || camel_case(name) == *key);
            // A known member that is null is one that is not set.
            if !(is_used || is_known && is_null(node)) {
                let path = self.joined(key);
                let text = match is_known {
                    true => format!("member {path} gives way to another; ignored"),
                    false => {
                        let names = members.iter().map(|name| camel_case(name));
                        let hint = spelling::hint(&camel_case(key), "", names);
                        format!("unknown member {path}{hint}; ignored")
                    }
                };
                let subject = format!("{} line {}", self.origin, line(node));
                self.notes.warn(subject, text, "");
            }
        }
        Some(given)
    }

    fn entries<'n>(&mut self, node: &'n Node) -> Option<&'n [(String, Node)]> {
        match &node.value {
            Tree::Map(entries) => Some(entries),
            _ => self.refuse(node, "an object"),
        }
    }

    fn within<T>(&mut self, name: &str, read: impl FnOnce(&mut Self) -> T) -> T {
        let length = self.path.len();
        self.path = self.joined(name);
        let value = read(self);
        self.path.truncate(length);
        value
    }

    fn joined(&self, name: &str) -> String {
        let dot = if self.path.is_empty() || name.starts_with('[') {
            ""
        } else {
            "."
        };
        format!("{}{dot}{name}", self.path)
    }

    pub fn refuse<T>(&mut self, node: &Node, expected: &str) -> Option<T> {
        self.problem(node, node.value.shown(), expected);
        None
    }

    pub fn problem(&mut self, node: &Node, found: String, expected: &str) {
        let of = if self.path.is_empty() { "" } else { " of " };
        let subject = format!("{}{of}{} line {}", self.path, self.origin, line(node));
        self.notes.problem(subject, found, expected);
    }
}

pub fn write<T: Field>(members: &mut Map<String, Value>, name: &str, member: &T, secrets: Secrets) {
    if *member != T::default() {
        members.insert(camel_case(name), member.json(secrets));
    }
}

pub fn camel_case(name: &str) -> String {
    let mut words = name.split('_');
    let mut camel = words.next().unwrap_or_default().to_owned();
    for word in words {
        let mut letters = word.chars();
        camel.extend(letters.next().map(|first| first.to_ascii_uppercase()));
        camel += letters.as_str();
    }
    camel
}

/// A message, a wrapper, a duration or a member of a oneof: zero can be told from unset.
impl<T: Field> Field for Option<T> {
    fn read(node: &Node, reader: &mut Reader<'_>) -> Option<Self> {
        T::read(node, reader).map(Some)
    }

    fn json(&self, secrets: Secrets) -> Value {
        self.as_ref()
            .map_or(Value::Null, |value| value.json(secrets))
    }
}

impl<T: Field> Field for Vec<T> {
    fn read(node: &Node, reader: &mut Reader<'_>) -> Option<Self> {
        let Tree::List(items) = &node.value else {
            return reader.refuse(node, "a list");
        };
        // Every item is read, so that each problem is found.
        let items: Vec<_> = items
            .iter()
            .enumerate()
            .map(|(at, item)| reader.within(&format!("[{at}]"), |reader| T::read(item, reader)))
            .collect();
        items.into_iter().collect()
    }

    fn json(&self, secrets: Secrets) -> Value {
        self.iter().map(|item| item.json(secrets)).collect()
    }
}

/// `null` is the zero value.
impl<T: Field> Field for BTreeMap<String, T> {
    fn read(node: &Node, reader: &mut Reader<'_>) -> Option<Self> {
        let mut values = Self::new();
        for (key, node) in reader.entries(node)? {
            let value = match node.value {
                Tree::Null => Some(T::default()),
                _ => reader.within(key, |reader| T::read(node, reader)),
            };
            values.extend(value.map(|value| (key.clone(), value)));
        }
        Some(values)
    }

    fn json(&self, secrets: Secrets) -> Value {
        let members = self
            .iter()
            .map(|(key, value)| (key.clone(), value.json(secrets)));
        Value::Object(members.collect())
    }
}
