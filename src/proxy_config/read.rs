//! Reads ProxyConfig by protobuf's JSON mapping and its descriptor, as pilot-agent does.
//!
//! Members may be named in camel case or snake case, numbers may be quoted, enumerations are given by
//! name or number, durations in Go's syntax. If members are equal, the last one counts. Unknown members are
//! ignored with a warning. Each value of the wrong type is a problem with its path, line, value and
//! expectation; the other members are read anyway.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::error::Error;

use indexmap::IndexMap;
use prost_reflect::{
    DynamicMessage, FieldDescriptor, Kind, MapKey, MessageDescriptor, ReflectMessage, Value,
};

use super::yaml::{Node, Tree, line};
use super::{as_integer, dynamic};
use crate::problem::{Code, Diagnostics, Problem};
use crate::runtime::duration;
use crate::spelling;

const DURATION: &str = "google.protobuf.Duration";
/// Members whose values are hidden in errors.
const SECRETS: [&str; 3] = [
    "istio.mesh.v1alpha1.ProxyConfig.proxy_metadata",
    "istio.mesh.v1alpha1.Lightstep.access_token",
    "istio.mesh.v1alpha1.HttpHeader.value",
];

/// Reads the members that `node` sets into a message of the type `name`; the others stay. Returns the lines
/// of those members by path. Fails if this program does not have the definition of the type.
pub(super) fn read<M: prost::Message + Default>(
    message: &mut M,
    name: &str,
    origin: &str,
    node: &Node,
    notes: &mut Diagnostics,
) -> Result<BTreeMap<String, u64>, Box<dyn Error>> {
    let mut dynamic = dynamic(message, name)?;
    let mut reader = Reader { origin, notes, path: String::new(), lines: BTreeMap::new() };
    // If the value is not an object, the problem was reported.
    let _ = reader.message(&mut dynamic, node);
    let lines = reader.lines;
    *message = dynamic.transcode_to()?;
    Ok(lines)
}

/// Reads one document and collects its problems.
struct Reader<'a> {
    origin: &'a str,
    notes: &'a mut Diagnostics,
    /// The path of the member that is read.
    path: String,
    lines: BTreeMap<String, u64>,
}

// The functions that return an Option return None after a problem was reported.
impl Reader<'_> {
    fn message(&mut self, message: &mut DynamicMessage, node: &Node) -> Option<()> {
        for (field, node) in self.set_fields(&message.descriptor(), node)? {
            self.descend(field.json_name(), |reader| {
                if let Some(value) = reader.field(&field, node) {
                    reader.lines.insert(reader.path.clone(), line(node));
                    message.set_field(&field, value);
                }
            });
        }
        Some(())
    }

    /// Returns the fields that an object sets. Camel case wins over snake case, and the last member of a
    /// oneof over the others. Warns of members that are ignored.
    fn set_fields<'n>(
        &mut self,
        message: &MessageDescriptor,
        node: &'n Node,
    ) -> Option<Vec<(FieldDescriptor, &'n Node)>> {
        let entries = self.entries(node)?;
        let mut set: Vec<(FieldDescriptor, &Node)> = Vec::new();
        for field in message.fields() {
            let named = [field.json_name(), field.name()].map(|name| entries.get(name).copied());
            // A known member that is null counts as absent.
            if let Some(node) = named.into_iter().flatten().find(|node| !is_null(node)) {
                let oneof = field.containing_oneof();
                set.retain(|(other, _)| oneof.is_none() || other.containing_oneof() != oneof);
                set.push((field, node));
            }
        }
        for (key, node) in entries {
            let is_used = set.iter().any(|(_, used)| std::ptr::eq(*used, node));
            let is_known = message.fields().any(|it| [it.name(), it.json_name()].contains(&key));
            if is_used || is_known && is_null(node) {
                continue;
            }
            let path = self.child_path(key);
            let (code, text) = if is_known {
                (Code::MemberRepeated, format!("member {path} gives way to another"))
            } else {
                let hint =
                    spelling::hint(key, "", message.fields().map(|it| it.json_name().to_owned()));
                (Code::MemberUnknown, format!("unknown member {path}{hint}"))
            };
            self.warn(code, node, text);
        }
        Some(set)
    }

    /// Returns the entries of an object by key. If keys are equal, the last entry counts.
    fn entries<'n>(&mut self, node: &'n Node) -> Option<IndexMap<&'n str, &'n Node>> {
        let Tree::Map(entries) = &node.value else {
            return self.problem(node, node.value.describe(), "an object".into());
        };
        let mut last = IndexMap::new();
        for (key, node) in entries {
            if last.insert(key.as_str(), node).is_some() {
                self.warn(Code::MemberRepeated, node, format!("another member {key}"));
            }
        }
        Some(last)
    }

    fn field(&mut self, field: &FieldDescriptor, node: &Node) -> Option<Value> {
        let kind = field.kind();
        let is_secret = SECRETS.contains(&field.full_name());
        if field.is_map()
            && let Kind::Message(entry) = &kind
        {
            let kind = entry.map_entry_value_field().kind();
            let mut values = HashMap::new();
            for (key, node) in self.entries(node)? {
                let value = self.descend(key, |reader| reader.value(&kind, node, is_secret));
                values.extend(value.map(|value| (MapKey::String(key.to_owned()), value)));
            }
            return Some(Value::Map(values));
        }
        if !field.is_list() {
            return self.value(&kind, node, is_secret);
        }
        let Tree::List(items) = &node.value else {
            return self.problem(node, node.value.describe(), "a list".into());
        };
        // Every item is read before the first problem ends the list, so that each problem is found.
        let mut values = Vec::new();
        for (index, item) in items.iter().enumerate() {
            let value =
                self.descend(&format!("[{index}]"), |reader| reader.value(&kind, item, is_secret));
            values.push(value);
        }
        Some(Value::List(values.into_iter().collect::<Option<_>>()?))
    }

    fn value(&mut self, kind: &Kind, node: &Node, is_secret: bool) -> Option<Value> {
        let tree = &node.value;
        let value = match kind {
            // Null in a list or a map is the default.
            _ if matches!(tree, Tree::Null) => Some(Value::default_value(kind)),
            Kind::Message(message) if message.full_name() != DURATION => {
                let mut value = DynamicMessage::new(message.clone());
                match message.get_field(1) {
                    // The other types of that package wrap a value.
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
            // ProxyConfig's other type is double.
            _ => number(tree).map(Value::F64),
        };
        value.or_else(|| {
            let found =
                if is_secret { format!("{} (not shown)", tree.kind()) } else { tree.describe() };
            self.problem(node, found, expected(kind, tree))
        })
    }

    /// Reads the member or item `name`. The path has its name meanwhile.
    fn descend<T>(&mut self, name: &str, read: impl FnOnce(&mut Self) -> T) -> T {
        let length = self.path.len();
        self.path = self.child_path(name);
        let value = read(self);
        self.path.truncate(length);
        value
    }

    fn child_path(&self, name: &str) -> String {
        let path = &self.path;
        if path.is_empty() || name.starts_with('[') {
            format!("{path}{name}")
        } else {
            format!("{path}.{name}")
        }
    }

    fn warn(&mut self, code: Code, node: &Node, text: String) {
        let subject = format!("{} line {}", self.origin, line(node));
        self.notes.warnings.push(Problem::new(code, subject, text));
    }

    fn problem<T>(&mut self, node: &Node, found: String, expected: Cow<'static, str>) -> Option<T> {
        let of = if self.path.is_empty() { "" } else { " of " };
        let subject = format!("{}{of}{} line {}", self.path, self.origin, line(node));
        self.notes.add(Problem::new(Code::SettingInvalid, subject, found).expected(expected));
        None
    }
}

/// Returns the expected form of a value, except for objects.
fn expected(kind: &Kind, found: &Tree) -> Cow<'static, str> {
    Cow::Borrowed(match kind {
        Kind::Message(_) => "a duration such as 45s or 1m30s",
        Kind::Enum(known) => {
            let names: Vec<_> = known.values().map(|it| it.name().to_owned()).collect();
            return format!("one of {}", names.join(", ")).into();
        }
        Kind::String if matches!(found, Tree::Bool(_) | Tree::Number(_)) => {
            "a string: put the value in quotes"
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

fn is_null(node: &Node) -> bool {
    matches!(node.value, Tree::Null)
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
    if number.is_finite() { Some(number) } else { None }
}

/// Reads an integer. It may be quoted; if it is not, it may have an empty fraction.
fn integer<T: TryFrom<i64>>(tree: &Tree) -> Option<T> {
    let number = match tree {
        Tree::Number(number) => number.as_i64().or_else(|| as_integer(number.as_f64()?)),
        _ => text(tree)?.parse().ok(),
    };
    number?.try_into().ok()
}
