//! A document, read by the tables.
//!
//! Every value of the wrong type is a problem with its path, its line, what was found and what was
//! expected; reading goes on. Members of no table are left out and named in one warning, so that a
//! document of another version still starts. Where a member is given in camel and in snake case, or
//! two members of a group are, the stronger one counts and the other is named in that warning too.
//!
//! Does not refuse values that are of the right type.

use std::collections::BTreeMap;

use serde_json::{Map, Number, Value, json};

use super::{Kind, Member, Variant, rivals};
use crate::config::yaml::{Node, Tree};
use crate::config::{Notes, Problem, duration};

/// A member that is set, in its canonical form.
#[derive(Debug)]
pub(in crate::config) struct Set {
    pub(in crate::config) member: &'static Member,
    pub(in crate::config) value: Value,
}

/// The line of every member, by its path.
pub(in crate::config) type Lines = BTreeMap<String, u64>;

struct Conversion<'a> {
    origin: &'a str,
    problems: &'a mut Vec<Problem>,
    lines: Lines,
    /// What is left out, with its line.
    ignored: Vec<String>,
}

/// The members `node` sets, in the order of the table, and their lines. Zero is a setting, `null` is none.
pub(in crate::config) fn members(
    origin: &str,
    node: &Node,
    table: &'static [Member],
    notes: &mut Notes,
) -> (Vec<Set>, Lines) {
    let mut conversion = Conversion {
        origin,
        problems: &mut notes.problems,
        lines: Lines::new(),
        ignored: Vec::new(),
    };
    let sets = conversion.members("", node, table);
    let lines = std::mem::take(&mut conversion.lines);
    if !conversion.ignored.is_empty() {
        notes.warnings.push(Problem {
            subject: format!("the part of {origin} that is not known"),
            found: conversion.ignored.join(", "),
            expected: "nothing, leaving it out".to_owned(),
        });
    }
    (sets, lines)
}

impl Conversion<'_> {
    fn members(&mut self, path: &str, node: &Node, table: &'static [Member]) -> Vec<Set> {
        let Tree::Map(entries) = &node.tree else {
            self.problem(path, node, node.tree.shown(), "an object");
            return Vec::new();
        };
        let chosen = self.chosen(path, entries, table);
        let mut sets = Vec::new();
        for (member, node) in chosen {
            let path = join(path, member.name);
            let value = self.value(&path, node, member.kind);
            self.lines.insert(path, node.line);
            sets.extend(value.map(|value| Set { member, value }));
        }
        sets
    }

    /// The entries that count; the names of the others are noted.
    fn chosen<'n>(
        &mut self,
        path: &str,
        entries: &'n [(String, Node)],
        table: &'static [Member],
    ) -> Vec<(&'static Member, &'n Node)> {
        let set = |entry: &&(String, Node)| !matches!(entry.1.tree, Tree::Null);
        let find = |name: &str| entries.iter().filter(set).find(|entry| entry.0 == name);
        let mut chosen: Vec<(&Member, &(String, Node))> = Vec::new();
        for member in table {
            let Some(entry) = find(member.name).or_else(|| find(&snake_case(member.name))) else {
                continue;
            };
            chosen.retain(|(other, _)| !rivals(table, member).any(|rival| rival == other.name));
            chosen.push((member, entry));
        }
        for entry in entries {
            let used = chosen.iter().any(|(_, one)| std::ptr::eq(*one, entry));
            let is_it = |name: &str| name == entry.0 || snake_case(name) == entry.0;
            let known = table.iter().any(|member| is_it(member.name));
            // `null` for a known member is a way not to set it.
            if !(used || known && matches!(entry.1.tree, Tree::Null)) {
                let path = join(path, &entry.0);
                self.ignored.push(format!("{path} line {}", entry.1.line));
            }
        }
        chosen.into_iter().map(|(m, entry)| (m, &entry.1)).collect()
    }

    fn value(&mut self, path: &str, node: &Node, kind: Kind) -> Option<Value> {
        match kind {
            Kind::Message(table) => Some(self.message(path, node, table)),
            Kind::List(item) => self.list(path, node, *item),
            Kind::Map(value) => self.map(path, node, *value),
            scalar => {
                let value = self::scalar(&node.tree, scalar);
                if value.is_none() {
                    let found = match scalar {
                        Kind::Secret => format!("{} (not shown)", node.tree.kind()),
                        _ => node.tree.shown(),
                    };
                    self.problem(path, node, found, &expected(scalar));
                }
                value
            }
        }
    }

    /// A message without what it says by saying nothing.
    fn message(&mut self, path: &str, node: &Node, table: &'static [Member]) -> Value {
        let sets = self.members(path, node, table);
        let kept = sets.into_iter().filter(|set| set.is_written());
        let members = kept.map(|set| (set.member.name.to_owned(), set.value));
        Value::Object(members.collect())
    }

    fn list(&mut self, path: &str, node: &Node, kind: Kind) -> Option<Value> {
        let Tree::List(items) = &node.tree else {
            self.problem(path, node, node.tree.shown(), "a list");
            return None;
        };
        let items = items.iter().enumerate();
        let items = items.map(|(at, item)| self.value(&format!("{path}[{at}]"), item, kind));
        // All of them are read before one that failed ends the list.
        let items: Vec<_> = items.collect();
        items.into_iter().collect()
    }

    /// The keys are sorted. `null` is the zero of text.
    fn map(&mut self, path: &str, node: &Node, kind: Kind) -> Option<Value> {
        let Tree::Map(entries) = &node.tree else {
            self.problem(path, node, node.tree.shown(), "an object");
            return None;
        };
        let mut values = Vec::new();
        for (key, node) in entries {
            let value = match (&node.tree, kind) {
                (Tree::Null, Kind::Text | Kind::Secret) => Some(json!("")),
                _ => self.value(&join(path, key), node, kind),
            };
            values.extend(value.map(|value| (key.clone(), value)));
        }
        values.sort_by(|one, other| one.0.cmp(&other.0));
        Some(Value::Object(Map::from_iter(values)))
    }

    fn problem(&mut self, path: &str, node: &Node, found: String, expected: &str) {
        let (origin, line) = (self.origin, node.line);
        let of = if path.is_empty() { "" } else { " of " };
        self.problems.push(Problem {
            subject: format!("{path}{of}{origin} line {line}"),
            found,
            expected: expected.to_owned(),
        });
    }
}

impl Set {
    pub(in crate::config) fn is_written(&self) -> bool {
        self.member.has_presence() || !is_zero(&self.value, self.member.kind)
    }
}

/// Whether the value is what an unset member has.
pub(in crate::config) fn is_zero(value: &Value, kind: Kind) -> bool {
    match (value, kind) {
        (Value::String(name), Kind::Enum(variants)) => {
            variants.iter().any(|(n, number)| n == name && *number == 0)
        }
        (Value::Bool(value), _) => !value,
        (Value::Number(number), _) => number.as_f64() == Some(0.0),
        (Value::String(text), _) => text.is_empty(),
        (Value::Array(items), _) => items.is_empty(),
        (Value::Object(members), _) => members.is_empty(),
        (Value::Null, _) => true,
    }
}

/// The canonical form of a scalar, if it is of this kind.
fn scalar(tree: &Tree, kind: Kind) -> Option<Value> {
    match kind {
        Kind::Wrapped(inner) => scalar(tree, *inner),
        Kind::Text | Kind::Secret => match tree {
            Tree::Text(text) => Some(json!(text)),
            _ => None,
        },
        Kind::Bool => match tree {
            Tree::Bool(value) => Some(json!(value)),
            _ => None,
        },
        Kind::Uint32 => Some(json!(u32::try_from(whole(tree)?).ok()?)),
        Kind::Int32 => Some(json!(i32::try_from(whole(tree)?).ok()?)),
        Kind::Int64Value => Some(json!(whole(tree)?.to_string())),
        Kind::Double => double(tree),
        Kind::Duration => match tree {
            Tree::Text(text) => Some(json!(duration::seconds(duration::parse(text)?))),
            _ => None,
        },
        Kind::Enum(variants) => name_of(tree, variants).map(|name| json!(name)),
        Kind::Message(_) | Kind::List(_) | Kind::Map(_) => None,
    }
}

/// Numbers may be quoted, and may have an empty fraction if they are not.
fn whole(tree: &Tree) -> Option<i64> {
    match tree {
        Tree::Number(number) => number.as_i64().or_else(|| {
            let number = number.as_f64().filter(|n| n.fract() == 0.0)?;
            // Beyond this, a float no longer knows its units.
            (number.abs() < 9e15).then_some(number as i64)
        }),
        Tree::Text(text) => text.parse().ok(),
        _ => None,
    }
}

fn double(tree: &Tree) -> Option<Value> {
    if let Some(whole) = whole(tree) {
        return Some(json!(whole));
    }
    let number = match tree {
        Tree::Number(number) => number.as_f64()?,
        Tree::Text(text) => text.parse().ok()?,
        _ => return None,
    };
    Number::from_f64(number).map(Value::Number)
}

fn name_of(tree: &Tree, variants: &[Variant]) -> Option<&'static str> {
    let number = match tree {
        Tree::Number(_) => whole(tree),
        _ => None,
    };
    let is_it = |(name, value): &&Variant| match tree {
        Tree::Text(text) => text == name,
        _ => number == Some(*value),
    };
    variants.iter().find(is_it).map(|(name, _)| *name)
}

fn expected(kind: Kind) -> String {
    match kind {
        Kind::Wrapped(inner) => expected(*inner),
        Kind::Text | Kind::Secret => "a string".to_owned(),
        Kind::Bool => "true or false".to_owned(),
        Kind::Uint32 => "a whole number from 0 to 4294967295".to_owned(),
        Kind::Int32 => "a whole number from -2147483648 to 2147483647".to_owned(),
        Kind::Int64Value => "a whole number".to_owned(),
        Kind::Double => "a number".to_owned(),
        Kind::Duration => "a duration such as 45s or 1m30s".to_owned(),
        Kind::Enum(variants) => {
            let names: Vec<_> = variants.iter().map(|(name, _)| *name).collect();
            format!("one of {}", names.join(", "))
        }
        Kind::Message(_) | Kind::Map(_) => "an object".to_owned(),
        Kind::List(_) => "a list".to_owned(),
    }
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() {
        return name.to_owned();
    }
    format!("{path}.{name}")
}

fn snake_case(camel: &str) -> String {
    let mut snake = String::with_capacity(camel.len() + 4);
    for letter in camel.chars() {
        if letter.is_ascii_uppercase() {
            snake.push('_');
        }
        snake.push(letter.to_ascii_lowercase());
    }
    snake
}

#[cfg(test)]
pub(in crate::config) mod tests;
