//! Reads ProxyConfig by protobuf's JSON mapping and its descriptor, as pilot-agent does.
//!
//! Members may be named in camel case or snake case, numbers may be quoted, enumerations are given by
//! name or number, durations in Go's syntax. Of equal members the last counts. Unknown members are left
//! out with a warning; each value of the wrong type is a problem with its path, line, value and
//! expectation, and reading goes on.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use indexmap::IndexMap;
use prost_reflect::{
    DynamicMessage, FieldDescriptor, Kind, MapKey, MessageDescriptor, ReflectMessage, Value,
};

use super::yaml::{Node, Tree, line};
use crate::problem::{Code, Diagnostics, Problem, codes};
use crate::{duration, spelling};

const DURATION: &str = "google.protobuf.Duration";
/// Members whose values no error shows.
const SECRETS: [&str; 3] = [
    "istio.mesh.v1alpha1.ProxyConfig.proxy_metadata",
    "istio.mesh.v1alpha1.Lightstep.access_token",
    "istio.mesh.v1alpha1.HttpHeader.value",
];

/// Reads the members `node` sets into `message`; the others stay. Returns the lines of those members, by
/// their paths.
pub(super) fn read_into(
    message: &mut DynamicMessage,
    origin: &str,
    node: &Node,
    notes: &mut Diagnostics,
) -> BTreeMap<String, u64> {
    let mut reader = Reader {
        origin,
        notes,
        path: String::new(),
        lines: BTreeMap::new(),
    };
    // A value that is no object was reported.
    let _ = reader.message(message, node);
    reader.lines
}

/// Reads one document and collects what is wrong with it.
struct Reader<'a> {
    origin: &'a str,
    notes: &'a mut Diagnostics,
    /// The path of the member that is read.
    path: String,
    lines: BTreeMap<String, u64>,
}

// Each function returns None after a problem was reported.
impl Reader<'_> {
    fn message(&mut self, message: &mut DynamicMessage, node: &Node) -> Option<()> {
        for (field, node) in self.given(&message.descriptor(), node)? {
            let value = self.within(field.json_name(), |reader| {
                let value = reader.field(&field, node)?;
                reader.lines.insert(reader.path.clone(), line(node));
                Some(value)
            });
            if let Some(value) = value {
                message.set_field(&field, value);
            }
        }
        Some(())
    }

    /// The members of an object that count: in camel case before snake case, the last of a oneof. Warns
    /// of the others.
    fn given<'n>(
        &mut self,
        message: &MessageDescriptor,
        node: &'n Node,
    ) -> Option<Vec<(FieldDescriptor, &'n Node)>> {
        // A known member that is null is one that is not set.
        let is_null = |node: &Node| matches!(node.value, Tree::Null);
        let entries = self.entries(node)?;
        let find = |name: &str| entries.get(name).copied().filter(|node| !is_null(node));
        let mut given: Vec<(FieldDescriptor, &Node)> = Vec::new();
        for field in message.fields() {
            if let Some(node) = find(field.json_name()).or_else(|| find(field.name())) {
                let oneof = field.containing_oneof();
                given.retain(|(other, _)| oneof.is_none() || other.containing_oneof() != oneof);
                given.push((field, node));
            }
        }
        for (key, node) in entries {
            let is_used = given.iter().any(|(_, used)| std::ptr::eq(*used, node));
            let is_known = message
                .fields()
                .any(|field| [field.name(), field.json_name()].contains(&key));
            if is_used || is_known && is_null(node) {
                continue;
            }
            let path = self.joined(key);
            if is_known {
                let text = format!("member {path} gives way to another");
                self.warn(codes::MEMBER_REPEATED, node, text);
            } else {
                let names = message.fields().map(|field| field.json_name().to_owned());
                let hint = spelling::hint(key, "", names);
                let text = format!("unknown member {path}{hint}");
                self.warn(codes::MEMBER_UNKNOWN, node, text);
            }
        }
        Some(given)
    }

    /// The entries of an object by their keys, of equal ones the last.
    fn entries<'n>(&mut self, node: &'n Node) -> Option<IndexMap<&'n str, &'n Node>> {
        let Tree::Map(entries) = &node.value else {
            return self.refuse(node, "an object");
        };
        let (mut last, mut repeated) = (IndexMap::new(), BTreeSet::new());
        for (key, node) in entries {
            if last.insert(key.as_str(), node).is_some() {
                repeated.insert(key.as_str());
            }
        }
        for key in repeated {
            let text = format!("another member {key}");
            self.warn(codes::MEMBER_REPEATED, last[key], text);
        }
        Some(last)
    }

    fn field(&mut self, field: &FieldDescriptor, node: &Node) -> Option<Value> {
        let kind = field.kind();
        let is_secret = SECRETS.contains(&field.full_name());
        if let (true, Kind::Message(entry)) = (field.is_map(), &kind) {
            let kind = entry.map_entry_value_field().kind();
            let mut values = HashMap::new();
            for (key, node) in self.entries(node)? {
                let value = self.within(key, |reader| reader.value(&kind, node, is_secret));
                values.extend(value.map(|value| (MapKey::String(key.to_owned()), value)));
            }
            return Some(Value::Map(values));
        }
        if !field.is_list() {
            return self.value(&kind, node, is_secret);
        }
        let Tree::List(items) = &node.value else {
            return self.refuse(node, "a list");
        };
        let items = items.iter().enumerate().map(|(at, item)| {
            self.within(&format!("[{at}]"), |reader| {
                reader.value(&kind, item, is_secret)
            })
        });
        // Every item is read, so that each problem is found.
        let items: Vec<_> = items.collect();
        Some(Value::List(items.into_iter().collect::<Option<_>>()?))
    }

    fn value(&mut self, kind: &Kind, node: &Node, is_secret: bool) -> Option<Value> {
        let tree = &node.value;
        let value = match kind {
            // An element of a list or a map.
            _ if matches!(tree, Tree::Null) => Some(Value::default_value(kind)),
            Kind::Message(message) if message.full_name() != DURATION => {
                let mut value = DynamicMessage::new(message.clone());
                match message.get_field(1) {
                    // The others of that package wrap a value.
                    Some(wrapped) if message.package_name() == "google.protobuf" => {
                        value.set_field(&wrapped, self.value(&wrapped.kind(), node, is_secret)?);
                    }
                    _ => self.message(&mut value, node)?,
                }
                return Some(Value::Message(value));
            }
            Kind::Message(message) => text(tree).and_then(|text| time(message, text)),
            Kind::Enum(known) => {
                let value = match tree {
                    Tree::Text(name) => known.get_value_by_name(name),
                    _ => integer(tree).and_then(|number| known.get_value(number)),
                };
                value.map(|value| Value::EnumNumber(value.number()))
            }
            Kind::String => text(tree).map(|text| Value::String(text.to_owned())),
            Kind::Bool => match tree {
                Tree::Bool(value) => Some(Value::Bool(*value)),
                _ => None,
            },
            Kind::Uint32 => integer(tree).map(Value::U32),
            Kind::Int32 => integer(tree).map(Value::I32),
            Kind::Int64 => integer(tree).map(Value::I64),
            // ProxyConfig has no other type.
            _ => number(tree).map(Value::F64),
        };
        value.or_else(|| {
            let found = match is_secret {
                true => format!("{} (not shown)", tree.kind()),
                false => tree.shown(),
            };
            self.problem(node, found, expected(kind))
        })
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

    fn warn(&mut self, code: &'static Code, node: &Node, text: String) {
        let subject = format!("{} line {}", self.origin, line(node));
        self.notes.warnings.push(Problem::new(code, subject, text));
    }

    fn refuse<T>(&mut self, node: &Node, expected: &'static str) -> Option<T> {
        self.problem(node, node.value.shown(), expected.into())
    }

    fn problem<T>(&mut self, node: &Node, found: String, expected: Cow<'static, str>) -> Option<T> {
        let of = if self.path.is_empty() { "" } else { " of " };
        let subject = format!("{}{of}{} line {}", self.path, self.origin, line(node));
        let problem = Problem::new(codes::SETTING_INVALID, subject, found);
        self.notes.add(problem.expected(expected));
        None
    }
}

/// The form of a value that is no object.
fn expected(kind: &Kind) -> Cow<'static, str> {
    Cow::Borrowed(match kind {
        Kind::Message(_) => "a duration such as 45s or 1m30s",
        Kind::Enum(known) => {
            let names: Vec<_> = known.values().map(|one| one.name().to_owned()).collect();
            return format!("one of {}", names.join(", ")).into();
        }
        Kind::String => "a string",
        Kind::Bool => "true or false",
        Kind::Uint32 => "a whole number from 0 to 4294967295",
        Kind::Int32 => "a whole number from -2147483648 to 2147483647",
        Kind::Int64 => "a whole number",
        _ => "a number",
    })
}

fn time(message: &MessageDescriptor, text: &str) -> Option<Value> {
    let time = prost_types::Duration::try_from(duration::parse(text)?).ok()?;
    let mut value = DynamicMessage::new(message.clone());
    value.transcode_from(&time).ok()?;
    Some(Value::Message(value))
}

fn text(tree: &Tree) -> Option<&str> {
    match tree {
        Tree::Text(text) => Some(text),
        _ => None,
    }
}

fn number(tree: &Tree) -> Option<f64> {
    let number = match tree {
        Tree::Number(number) => number.as_f64()?,
        _ => text(tree)?.parse().ok()?,
    };
    number.is_finite().then_some(number)
}

/// Numbers may be quoted, and may have an empty fraction if they are not.
fn integer<T: TryFrom<i64>>(tree: &Tree) -> Option<T> {
    let number = match tree {
        Tree::Number(number) => number.as_i64().or_else(|| super::whole(number.as_f64()?)),
        _ => text(tree)?.parse().ok(),
    };
    number?.try_into().ok()
}
