//! Values without parts, in the forms protobuf's JSON mapping allows and in the one it writes.

use std::fmt;
use std::time::Duration;

use serde_json::{Value, json};

use super::field::{Field, Reader, Secrets};
use super::yaml::{Node, Tree};
use crate::duration;

/// An enumeration: each value with its name and number, the zero first.
pub trait Enumeration: Copy + Default + PartialEq + 'static {
    const VALUES: &'static [(&'static str, i64, Self)];

    fn name(self) -> &'static str {
        let found = Self::VALUES.iter().find(|(.., value)| *value == self);
        found.map_or("", |(name, ..)| name)
    }
}

/// Text that logs and errors do not show.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secret(pub String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(not shown)")
    }
}

/// A wrapped 64-bit integer, which JSON writes as text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Int64(pub i64);

impl<E: Enumeration> Field for E {
    fn read(node: &Node, reader: &mut Reader<'_>) -> Option<Self> {
        let given = &node.value;
        let number = match given {
            Tree::Number(_) => integer(given),
            _ => None,
        };
        let is_given = |(name, value, _): &&(&str, i64, E)| match given {
            Tree::Text(text) => text == name,
            _ => number == Some(*value),
        };
        let found = E::VALUES.iter().find(is_given).map(|(.., value)| *value);
        found.or_else(|| {
            let names: Vec<_> = E::VALUES.iter().map(|(name, ..)| *name).collect();
            reader.refuse(node, &format!("one of {}", names.join(", ")))
        })
    }

    fn json(&self, _: Secrets) -> Value {
        self.name().into()
    }
}

/// Declares scalars, which are unset when they are zero: the expected form, how it is read, and how it
/// is written.
macro_rules! scalars {
    ($($type:ty: $expected:expr, |$tree:ident| $parse:expr, |$value:ident| $json:expr;)*) => {$(
        impl Field for $type {
            fn read(node: &Node, reader: &mut Reader<'_>) -> Option<Self> {
                let parse = |$tree: &Tree| -> Option<Self> { $parse };
                parse(&node.value).or_else(|| reader.refuse(node, $expected))
            }

            fn json(&self, _: Secrets) -> Value {
                let $value = self;
                json!($json)
            }
        }
    )*};
}

scalars! {
    String: STRING, |tree| text(tree).map(str::to_owned), |value| value;
    bool: "true or false", |tree| boolean(tree), |value| value;
    u32: "a whole number from 0 to 4294967295", |tree| integer(tree)?.try_into().ok(), |value| value;
    i32: "a whole number from -2147483648 to 2147483647", |tree| integer(tree)?.try_into().ok(), |value| value;
    Int64: "a whole number", |tree| integer(tree).map(Int64), |value| value.0.to_string();
    // Written without a fraction if it has none.
    f64: "a number", |tree| number(tree), |value| whole(*value).map_or_else(|| json!(value), Value::from);
    Duration: "a duration such as 45s or 1m30s", |tree| duration::parse(text(tree)?), |value| duration::seconds(*value);
}

const STRING: &str = "a string";

impl Field for Secret {
    fn read(node: &Node, reader: &mut Reader<'_>) -> Option<Self> {
        let text = text(&node.value).map(|text| Self(text.to_owned()));
        text.or_else(|| {
            let kind = node.value.kind();
            reader.problem(node, format!("{kind} (not shown)"), STRING);
            None
        })
    }

    fn json(&self, secrets: Secrets) -> Value {
        match secrets {
            Secrets::Shown => json!(self.0),
            Secrets::Hidden => json!("(not shown)"),
        }
    }
}

fn number(tree: &Tree) -> Option<f64> {
    let number = match tree {
        Tree::Number(number) => number.as_f64()?,
        _ => text(tree)?.parse().ok()?,
    };
    number.is_finite().then_some(number)
}

fn text(tree: &Tree) -> Option<&str> {
    match tree {
        Tree::Text(text) => Some(text),
        _ => None,
    }
}

fn boolean(tree: &Tree) -> Option<bool> {
    match tree {
        Tree::Bool(value) => Some(*value),
        _ => None,
    }
}

/// Numbers may be quoted, and may have an empty fraction if they are not.
fn integer(tree: &Tree) -> Option<i64> {
    match tree {
        Tree::Number(number) => number.as_i64().or_else(|| whole(number.as_f64()?)),
        Tree::Text(text) => text.parse().ok(),
        _ => None,
    }
}

/// The integer a float stands for. Beyond the limit, floats do not represent every integer.
fn whole(number: f64) -> Option<i64> {
    (number.fract() == 0.0 && number.abs() < 9e15).then_some(number as i64)
}
