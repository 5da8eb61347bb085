//! Values without parts, in the forms protobuf's JSON mapping allows and in the one it writes.

use std::fmt;
use std::time::Duration;

use serde_json::{Value, json};

use super::field::Secrets;
use super::yaml::Tree;
use crate::duration;

/// A value without parts, which is unset when it is zero.
pub trait Scalar: Default + PartialEq {
    const IS_SECRET: bool = false;
    fn expected() -> String;
    fn parse(tree: &Tree) -> Option<Self>;
    fn json(&self, secrets: Secrets) -> Value;
}

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

impl<E: Enumeration> Scalar for E {
    fn expected() -> String {
        let names: Vec<_> = E::VALUES.iter().map(|(name, ..)| *name).collect();
        format!("one of {}", names.join(", "))
    }

    fn parse(tree: &Tree) -> Option<Self> {
        let number = match tree {
            Tree::Number(_) => integer(tree),
            _ => None,
        };
        let is_given = |(name, value, _): &&(&str, i64, E)| match tree {
            Tree::Text(text) => text == name,
            _ => number == Some(*value),
        };
        E::VALUES.iter().find(is_given).map(|(.., value)| *value)
    }

    fn json(&self, _: Secrets) -> Value {
        self.name().into()
    }
}

/// Declares scalars: the expected form, how it is read, and how it is written.
macro_rules! scalars {
    ($($type:ty: $expected:expr, |$tree:ident| $parse:expr, |$value:ident| $json:expr;)*) => {$(
        impl Scalar for $type {
            fn expected() -> String {
                $expected.to_owned()
            }

            fn parse($tree: &Tree) -> Option<Self> {
                $parse
            }

            fn json(&self, _: Secrets) -> Value {
                let $value = self;
                json!($json)
            }
        }
    )*};
}

scalars! {
    String: "a string", |tree| text(tree).map(str::to_owned), |value| value;
    bool: "true or false", |tree| boolean(tree), |value| value;
    u32: "a whole number from 0 to 4294967295", |tree| integer(tree)?.try_into().ok(), |value| value;
    i32: "a whole number from -2147483648 to 2147483647", |tree| integer(tree)?.try_into().ok(), |value| value;
    Int64: "a whole number", |tree| integer(tree).map(Int64), |value| value.0.to_string();
    Duration: "a duration such as 45s or 1m30s", |tree| duration::parse(text(tree)?), |value| duration::seconds(*value);
}

impl Scalar for Secret {
    const IS_SECRET: bool = true;

    fn expected() -> String {
        String::expected()
    }

    fn parse(tree: &Tree) -> Option<Self> {
        Scalar::parse(tree).map(Self)
    }

    fn json(&self, secrets: Secrets) -> Value {
        match secrets {
            Secrets::Shown => json!(self.0),
            Secrets::Hidden => json!("(not shown)"),
        }
    }
}

impl Scalar for f64 {
    fn expected() -> String {
        "a number".to_owned()
    }

    fn parse(tree: &Tree) -> Option<Self> {
        let number: Self = match tree {
            Tree::Number(number) => number.as_f64()?,
            _ => text(tree)?.parse().ok()?,
        };
        number.is_finite().then_some(number)
    }

    /// Without a fraction if it has none.
    fn json(&self, _: Secrets) -> Value {
        whole(*self).map_or_else(|| json!(self), Value::from)
    }
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
