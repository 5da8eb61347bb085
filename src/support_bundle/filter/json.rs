//! Copies the listed members of JSON, while the JSON is read.

use std::fmt;
use std::io::{BufReader, Read, Write};

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

use super::is_name;
use super::members::Shape;

/// Copies the members of an object of this message. Reads to the end even if a write fails.
pub(super) fn copy(
    message: &'static str,
    from: impl Read,
    to: &mut dyn Write,
    left_out: &mut u64,
) -> Result<(), serde_json::Error> {
    let mut json = serde_json::Deserializer::from_reader(BufReader::new(from));
    let mut to = Writer { to, left_out, depth: 0, is_first: true };
    Node { to: &mut to, name: None, shape: Shape::Message(message) }.deserialize(&mut json)?;
    json.end()
}

/// Writes JSON, indented like Envoy's. Errors are ignored, because the owner of the output checks them.
struct Writer<'a> {
    to: &'a mut dyn Write,
    left_out: &'a mut u64,
    /// The number of open objects and arrays.
    depth: usize,
    /// True until the innermost one has a member or element.
    is_first: bool,
}

impl Writer<'_> {
    /// Begins a member, or an element, which has no name.
    fn begin(&mut self, name: Option<&str>) {
        if self.depth > 0 {
            let comma = if self.is_first { "" } else { "," };
            let _ = write!(self.to, "{comma}\n{:1$}", "", self.depth);
        }
        if let Some(name) = name {
            let _ = write!(self.to, "{}: ", Value::from(name));
        }
        self.is_first = false;
    }

    fn open(&mut self, name: Option<&str>, bracket: char) {
        self.begin(name);
        let _ = write!(self.to, "{bracket}");
        self.depth += 1;
        self.is_first = true;
    }

    fn close(&mut self, bracket: char) {
        self.depth -= 1;
        if !self.is_first {
            let _ = write!(self.to, "\n{:1$}", "", self.depth);
        }
        let _ = write!(self.to, "{bracket}");
        self.is_first = false;
    }
}

/// A listed member, or an element of one.
struct Node<'n, 'w> {
    to: &'n mut Writer<'w>,
    name: Option<&'n str>,
    shape: Shape,
}

impl Node<'_, '_> {
    fn scalar(self, value: &Value) {
        if value.as_str().is_none_or(is_name) {
            self.to.begin(self.name);
            let _ = write!(self.to.to, "{value}");
        } else {
            *self.to.left_out += 1;
        }
    }
}

impl<'de> DeserializeSeed<'de> for Node<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_any(self)
    }
}

macro_rules! scalars {
    ($($visit:ident $type:ty),+) => {
        $(fn $visit<E: Error>(self, value: $type) -> Result<(), E> {
            self.scalar(&Value::from(value));
            Ok(())
        })+
    };
}

impl<'de> Visitor<'de> for Node<'_, '_> {
    type Value = ();

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("JSON")
    }

    scalars!(visit_bool bool, visit_i64 i64, visit_u64 u64, visit_f64 f64, visit_str &str);

    fn visit_unit<E: Error>(self) -> Result<(), E> {
        self.scalar(&Value::Null);
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<(), A::Error> {
        let Self { to, name, shape } = self;
        to.open(name, '[');
        while elements.next_element_seed(Node { to: &mut *to, name: None, shape })?.is_some() {}
        to.close(']');
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<(), A::Error> {
        let Self { to, name, mut shape } = self;
        if shape == Shape::Scalar {
            *to.left_out += 1;
            while members.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
            return Ok(());
        }
        to.open(name, '{');
        while let Some(name) = members.next_key::<String>()? {
            if shape == Shape::Any && to.is_first && name == "@type" {
                let value = members.next_value::<Value>()?;
                let url = value.as_str().unwrap_or_default();
                shape = Shape::of_type(url);
                Node { to: &mut *to, name: Some(&name), shape }.scalar(&Value::from(url));
            } else if let Some(shape) = shape.member(&name) {
                members.next_value_seed(Node { to: &mut *to, name: Some(&name), shape })?;
            } else {
                *to.left_out += 1;
                // A type behind other members does not open the object.
                shape = if shape == Shape::Any { Shape::Scalar } else { shape };
                members.next_value::<IgnoredAny>()?;
            }
        }
        to.close('}');
        Ok(())
    }
}
