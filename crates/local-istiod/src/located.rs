//! YAML or JSON as a tree that contains the line of each value.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use serde_saphyr::Spanned;

/// A value and the line on which it begins.
#[derive(Clone, Debug)]
pub(super) struct Located {
    pub(super) line: u64,
    pub(super) node: Node,
}

#[derive(Clone, Debug)]
pub(super) enum Node {
    Scalar(Value),
    List(Vec<Located>),
    Map(Vec<Member>),
}

#[derive(Clone, Debug)]
pub(super) struct Member {
    pub(super) line: u64,
    pub(super) key: String,
    pub(super) value: Located,
}

impl Located {
    pub(super) fn parse(text: &str) -> Result<Self, serde_saphyr::Error> {
        serde_saphyr::from_str(text)
    }

    pub(super) fn to_json(&self) -> Value {
        match &self.node {
            Node::Scalar(value) => value.clone(),
            Node::List(items) => items.iter().map(Self::to_json).collect(),
            Node::Map(members) => {
                members.iter().map(|member| (member.key.clone(), member.value.to_json())).collect()
            }
        }
    }

    pub(super) fn get(&self, key: &str) -> Option<&Self> {
        let Node::Map(members) = &self.node else {
            return None;
        };
        let member = members.iter().find(|member| member.key == key)?;
        Some(&member.value)
    }

    pub(super) fn as_str(&self) -> Option<&str> {
        match &self.node {
            Node::Scalar(value) => value.as_str(),
            _ => None,
        }
    }

    /// Returns a copy of a map without one of its members.
    pub(super) fn without(&self, key: &str) -> Self {
        let mut copy = self.clone();
        if let Node::Map(members) = &mut copy.node {
            members.retain(|member| member.key != key);
        }
        copy
    }
}

impl<'de> Deserialize<'de> for Located {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let spanned = Spanned::<Node>::deserialize(deserializer)?;
        Ok(Self { line: spanned.referenced.line(), node: spanned.value })
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NodeVisitor)
    }
}

struct NodeVisitor;

impl<'de> Visitor<'de> for NodeVisitor {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a YAML value")
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Node, E> {
        Ok(Node::Scalar(value.into()))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Node, E> {
        Ok(Node::Scalar(value.into()))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Node, E> {
        Ok(Node::Scalar(value.into()))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Node, E> {
        Ok(Node::Scalar(value.into()))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Node, E> {
        Ok(Node::Scalar(value.into()))
    }

    fn visit_unit<E: Error>(self) -> Result<Node, E> {
        Ok(Node::Scalar(Value::Null))
    }

    fn visit_none<E: Error>(self) -> Result<Node, E> {
        Ok(Node::Scalar(Value::Null))
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Node, D::Error> {
        Node::deserialize(deserializer)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Node, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            list.push(item);
        }
        Ok(Node::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Node, A::Error> {
        let mut members = Vec::new();
        while let Some((key, value)) = entries.next_entry::<Spanned<String>, Located>()? {
            members.push(Member { line: key.referenced.line(), key: key.value, value });
        }
        Ok(Node::Map(members))
    }
}
