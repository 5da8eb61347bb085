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

impl Scalar for String {
    fn expected() -> String {
        "a string".to_owned()
    }

    fn parse(tree: &Tree) -> Option<Self> {
        match tree {
            Tree::Text(text) => Some(text.clone()),
            _ => None,
        }
    }

    fn json(&self, _: Secrets) -> Value {
        json!(self)
    }
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

impl Scalar for bool {
    fn expected() -> String {
        "true or false".to_owned()
    }

    fn parse(tree: &Tree) -> Option<Self> {
        match tree {
            Tree::Bool(value) => Some(*value),
            _ => None,
        }
    }

    fn json(&self, _: Secrets) -> Value {
        json!(self)
    }
}

macro_rules! integers {
    ($($integer:ty),*) => {$(
        impl Scalar for $integer {
            fn expected() -> String {
                format!("a whole number from {} to {}", Self::MIN, Self::MAX)
            }

            fn parse(tree: &Tree) -> Option<Self> {
                integer(tree)?.try_into().ok()
            }

            fn json(&self, _: Secrets) -> Value {
                json!(self)
            }
        }
    )*};
}

integers!(u32, i32);

impl Scalar for Int64 {
    fn expected() -> String {
        "a whole number".to_owned()
    }

    fn parse(tree: &Tree) -> Option<Self> {
        integer(tree).map(Self)
    }

    fn json(&self, _: Secrets) -> Value {
        json!(self.0.to_string())
    }
}

impl Scalar for f64 {
    fn expected() -> String {
        "a number".to_owned()
    }

    fn parse(tree: &Tree) -> Option<Self> {
        let number: Self = match tree {
            Tree::Number(number) => number.as_f64()?,
            Tree::Text(text) => text.parse().ok()?,
            _ => return None,
        };
        number.is_finite().then_some(number)
    }

    /// Without a fraction if it has none.
    fn json(&self, _: Secrets) -> Value {
        match whole(*self) {
            Some(integer) => json!(integer),
            None => json!(self),
        }
    }
}

/// In Go's syntax; written in seconds.
impl Scalar for Duration {
    fn expected() -> String {
        "a duration such as 45s or 1m30s".to_owned()
    }

    fn parse(tree: &Tree) -> Option<Self> {
        match tree {
            Tree::Text(text) => duration::parse(text),
            _ => None,
        }
    }

    fn json(&self, _: Secrets) -> Value {
        json!(duration::seconds(*self))
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
