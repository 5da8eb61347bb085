//! Envoy's resources, which are read from files in proto JSON form and encoded for the wire.
//!
//! A file contains one resource, a list of resources, or a list under `resources`, each with its
//! `@type`. Members are checked against Envoy's own definitions; a wrong member is reported with its
//! line and path. A resource of a type without a definition here has a `name` and a base64 `value`,
//! which is passed on unchanged.

use std::sync::LazyLock;

use base64::Engine;
use envoy_types::pb::google::protobuf::Any;
use prost::Message;
use prost_reflect::{
    DescriptorPool, DeserializeOptions, DynamicMessage, FieldDescriptor, Kind, MessageDescriptor,
};

use super::located::{Located, Node};

/// A resource that is ready to be sent.
#[derive(Clone, Debug, PartialEq)]
pub struct Resource {
    pub name: String,
    /// A digest of the content. If it is empty, a delta stream neither gets the resource nor learns that
    /// it is missing.
    pub version: String,
    pub any: Any,
}

/// The reason why a text contains no resources. Lines are counted from one.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ResourceError {
    #[error("line {line}: {message}")]
    Syntax { line: u64, message: String },
    #[error("line {line}: found no list, no resources and no @type, expected one of them")]
    NoType { line: u64 },
    #[error("line {line}: type {type_url:?} is not known; expected name and base64 value of it")]
    UnknownType { line: u64, type_url: String },
    #[error("line {line}: {type_url} has no name")]
    NoName { line: u64, type_url: String },
    #[error("line {line}: {path} of {resource}: {message}")]
    Member { line: u64, resource: String, path: String, message: String },
    #[error("the definitions in this program are unreadable: {0}")]
    Definitions(String),
}

static DEFINITIONS: LazyLock<Result<DescriptorPool, String>> = LazyLock::new(|| {
    let bytes = include_bytes!(concat!(env!("OUT_DIR"), "/envoy.fds"));
    DescriptorPool::decode(bytes.as_slice()).map_err(|error| error.to_string())
});

impl Resource {
    /// Creates a resource of any type, including types that only agents know.
    pub fn new(name: impl Into<String>, type_url: impl Into<String>, value: Vec<u8>) -> Self {
        Self {
            name: name.into(),
            version: version_of([value.as_slice()]),
            any: Any { type_url: type_url.into(), value },
        }
    }

    /// Creates a resource that a delta stream neither gets nor learns to be missing.
    pub fn withheld(name: impl Into<String>, type_url: impl Into<String>) -> Self {
        Self { version: String::new(), ..Self::new(name, type_url, Vec::new()) }
    }

    pub(super) fn is_withheld(&self) -> bool {
        self.version.is_empty()
    }
}

/// Returns a short digest: equal content has equal versions, also after a restart.
pub(super) fn version_of<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> String {
    let mut context = aws_lc_rs::digest::Context::new(&aws_lc_rs::digest::SHA256);
    for part in parts {
        context.update(part);
    }
    let digest = context.finish();
    let digits = digest.as_ref().iter().take(6);
    digits.map(|byte| format!("{byte:02x}")).collect()
}

/// Parses all resources of a file.
pub(super) fn parse(text: &str) -> Result<Vec<Resource>, ResourceError> {
    let tree = Located::parse(text).map_err(|error| ResourceError::Syntax {
        line: error.location().map_or(0, |location| location.line()),
        message: strip_location(&first_line(&error.to_string())).to_owned(),
    })?;
    let definitions =
        DEFINITIONS.as_ref().map_err(|error| ResourceError::Definitions(error.clone()))?;
    let list = match tree.get("resources") {
        Some(resources) if tree.get("@type").is_none() => resources,
        _ => &tree,
    };
    match &list.node {
        Node::List(items) => items.iter().map(|item| resource(item, definitions)).collect(),
        Node::Map(_) => Ok(vec![resource(list, definitions)?]),
        // An empty file is an empty list.
        Node::Scalar(value) if value.is_null() => Ok(Vec::new()),
        Node::Scalar(_) => Err(ResourceError::NoType { line: list.line }),
    }
}

fn resource(tree: &Located, definitions: &DescriptorPool) -> Result<Resource, ResourceError> {
    let type_url = tree
        .get("@type")
        .and_then(Located::as_str)
        .ok_or(ResourceError::NoType { line: tree.line })?;
    let Some(definition) = definition(definitions, type_url) else {
        return raw(tree, type_url);
    };
    let members = tree.without("@type");
    let message = convert(&members, &definition)
        .map_err(|error| fault(&members, &definition, &error, definitions))?;
    let name = ["name", "cluster_name"]
        .iter()
        .find_map(|field| Some(message.get_field_by_name(field)?.as_str()?.to_owned()))
        .filter(|name| !name.is_empty())
        .ok_or_else(|| ResourceError::NoName { line: tree.line, type_url: type_url.to_owned() })?;
    Ok(Resource::new(name, type_url, message.encode_to_vec()))
}

fn raw(tree: &Located, type_url: &str) -> Result<Resource, ResourceError> {
    let text = |key| tree.get(key).and_then(Located::as_str);
    text("name")
        .zip(text("value"))
        .and_then(|(name, value)| {
            let value = base64::engine::general_purpose::STANDARD.decode(value).ok()?;
            Some(Resource::new(name, type_url, value))
        })
        .ok_or_else(|| ResourceError::UnknownType {
            line: tree.line,
            type_url: type_url.to_owned(),
        })
}

fn definition(definitions: &DescriptorPool, type_url: &str) -> Option<MessageDescriptor> {
    definitions.get_message_by_name(type_url.rsplit('/').next()?)
}

fn convert(
    tree: &Located,
    definition: &MessageDescriptor,
) -> Result<DynamicMessage, serde_json::Error> {
    let options = DeserializeOptions::new().deny_unknown_fields(true);
    DynamicMessage::deserialize_with_options(definition.clone(), tree.to_json(), &options)
}

fn fault(
    tree: &Located,
    definition: &MessageDescriptor,
    error: &serde_json::Error,
    definitions: &DescriptorPool,
) -> ResourceError {
    let name =
        ["name", "cluster_name", "clusterName"].iter().find_map(|key| tree.get(key)?.as_str());
    let (path, line) = locate_fault(tree, definition, String::new(), definitions);
    ResourceError::Member {
        line,
        resource: format!("{} {:?}", definition.name(), name.unwrap_or_default()),
        path: path.trim_start_matches('.').to_owned(),
        message: first_line(&error.to_string()),
    }
}

/// Finds the innermost member that does not convert, because the conversion itself reports no position.
fn locate_fault(
    tree: &Located,
    definition: &MessageDescriptor,
    path: String,
    definitions: &DescriptorPool,
) -> (String, u64) {
    let Node::Map(members) = &tree.node else {
        return (path, tree.line);
    };
    for member in members {
        let path = format!("{path}.{}", member.key);
        let Some(field) = field(definition, &member.key) else {
            return (path, member.line);
        };
        if let Some(place) = narrow_field(&member.value, &field, &path, definitions) {
            return place;
        }
        let alone = Located { line: member.line, node: Node::Map(vec![member.clone()]) };
        if convert(&alone, definition).is_err() {
            return (path, member.line);
        }
    }
    (path, tree.line)
}

fn field(definition: &MessageDescriptor, key: &str) -> Option<FieldDescriptor> {
    definition.get_field_by_name(key).or_else(|| definition.get_field_by_json_name(key))
}

/// Searches the messages in a member: the member itself, its items or its entries.
fn narrow_field(
    value: &Located,
    field: &FieldDescriptor,
    path: &str,
    definitions: &DescriptorPool,
) -> Option<(String, u64)> {
    let kind = match field.kind() {
        Kind::Message(entry) if field.is_map() => entry.map_entry_value_field().kind(),
        kind => kind,
    };
    let Kind::Message(definition) = kind else {
        return None;
    };
    let held: Vec<(String, &Located)> = match &value.node {
        Node::List(items) if field.is_list() => {
            let indexed = items.iter().enumerate();
            indexed.map(|(at, item)| (format!("{path}[{at}]"), item)).collect()
        }
        Node::Map(entries) if field.is_map() => {
            let keyed = entries.iter();
            keyed.map(|entry| (format!("{path}.{}", entry.key), &entry.value)).collect()
        }
        _ => vec![(path.to_owned(), value)],
    };
    held.into_iter().find_map(|(path, held)| narrow_message(held, &definition, path, definitions))
}

fn narrow_message(
    tree: &Located,
    definition: &MessageDescriptor,
    path: String,
    definitions: &DescriptorPool,
) -> Option<(String, u64)> {
    if convert(tree, definition).is_ok() || !matches!(tree.node, Node::Map(_)) {
        return None;
    }
    if definition.full_name() == "google.protobuf.Any" {
        let inner = tree.get("@type").and_then(Located::as_str);
        let Some(inner) = inner.and_then(|url| self::definition(definitions, url)) else {
            return Some((format!("{path}.@type"), tree.line));
        };
        return Some(locate_fault(&tree.without("@type"), &inner, path, definitions));
    }
    if definition.full_name().starts_with("google.protobuf.") {
        return None;
    }
    Some(locate_fault(tree, definition, path, definitions))
}

/// Returns the parser's message without the line and column at its beginning.
fn strip_location(message: &str) -> &str {
    let text = message.strip_prefix("error: ").unwrap_or(message);
    match text.split_once(": ") {
        Some((place, what)) if place.starts_with("line ") => what,
        _ => text,
    }
}

fn first_line(message: &str) -> String {
    message.lines().next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests;
