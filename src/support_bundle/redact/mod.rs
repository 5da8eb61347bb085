//! Removes secrets from texts and JSON while they are copied.
//!
//! A line of a text, or a string of JSON, is examined as a whole, and left out as a whole if it is longer than
//! [`MAX_TEXT`]. JSON is read and written member by member, also JSON in a string of JSON. If a page is not JSON
//! although JSON is expected, copying fails, so that nothing is copied unexamined.

mod names;
mod text;

use std::borrow::Cow;
use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};

use memchr::memmem::find;
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use serde_json::ser::{Formatter, PrettyFormatter};

use names::Member;
pub(super) use names::is_secret;
use text::REDACTED;
pub use text::Secrets;

const MAX_TEXT: usize = 256 << 10;
/// The number of nested strings in which JSON is read as JSON.
const MAX_NESTING: usize = 4;
const LEFT_OUT: &[u8] = b"[left out: more than 256 KiB]";

/// The form of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Lines,
    Json,
    /// JSON that this agent has made, in which no member is a secret, whatever its name is.
    OwnJson,
}

/// Copies a page without its secrets.
pub(super) fn copy(
    secrets: &Secrets,
    form: Form,
    from: &mut dyn Read,
    to: &mut dyn Write,
) -> io::Result<()> {
    if form == Form::Lines {
        return copy_lines(secrets, from, to);
    }
    Ok(copy_json(secrets, form == Form::Json, from, to, 0)?)
}

/// Copies JSON that is in `nesting` strings within each other. `checks_names` removes members with the name of a
/// secret. Reads to the end even if a write fails.
fn copy_json(
    secrets: &Secrets,
    checks_names: bool,
    from: &mut dyn Read,
    to: &mut dyn Write,
    nesting: usize,
) -> Result<(), serde_json::Error> {
    let mut json = serde_json::Deserializer::from_reader(BufReader::new(from));
    let node = Node {
        to: &mut Writer {
            secrets,
            checks_names,
            nesting,
            form: PrettyFormatter::with_indent(b" "),
            to,
        },
        member: Member::Other,
        around: Scope::default(),
        is_first: None,
    };
    node.deserialize(&mut json)?;
    json.end()
}

fn copy_lines(secrets: &Secrets, from: &mut dyn Read, to: &mut dyn Write) -> io::Result<()> {
    let (mut from, mut line) = (BufReader::new(from), Vec::new());
    loop {
        let mut limited = (&mut from).take(MAX_TEXT as u64 + 1);
        let (mut begin, mut is_in_key) = (0, true);
        // The lines of a private key are redacted as one text.
        while is_in_key && limited.read_until(b'\n', &mut line)? > 0 {
            is_in_key = text::is_in_key(&line[begin..], is_in_key && begin > 0);
            begin = line.len();
        }
        if line.is_empty() {
            return Ok(());
        }
        let end: &[u8] = line.pop_if(|last| *last == b'\n').map_or(b"", |_| b"\n");
        if line.len() > MAX_TEXT {
            from.skip_until(b'\n')?;
            to.write_all(LEFT_OUT)?;
            to.write_all(b"\n")?;
        } else {
            to.write_all(&secrets.redact(&line, 0))?;
            to.write_all(end)?;
        }
        line.clear();
    }
}

impl Secrets {
    /// Removes the secrets of a text, which is read as JSON if it is JSON.
    fn redact<'t>(&self, text: &'t [u8], nesting: usize) -> Cow<'t, [u8]> {
        if nesting < MAX_NESTING && matches!(text.trim_ascii_start().first(), Some(b'{' | b'[')) {
            let mut json = Vec::new();
            if copy_json(self, true, &mut &*text, &mut json, nesting + 1).is_ok() {
                return match find(&json, REDACTED) {
                    Some(_) => json.into(),
                    None => text.into(),
                };
            }
        }
        self.hide(text)
    }
}

/// Writes JSON, indented like Envoy's.
struct Writer<'a> {
    secrets: &'a Secrets,
    checks_names: bool,
    nesting: usize,
    form: PrettyFormatter<'static>,
    to: &'a mut dyn Write,
}

impl Writer<'_> {
    /// Writes a part. An error is ignored, because the owner of the output checks it.
    fn put(
        &mut self,
        part: impl FnOnce(&mut PrettyFormatter<'static>, &mut dyn Write) -> io::Result<()>,
    ) {
        let _ = part(&mut self.form, self.to);
    }

    fn text(&mut self, text: &str) {
        self.put(|_, to| to.write_all(text.as_bytes()));
    }

    fn string(&mut self, text: &str) {
        let redacted = if text.len() > MAX_TEXT {
            LEFT_OUT.into()
        } else {
            self.secrets.redact(text.as_bytes(), self.nesting)
        };
        self.text(&Value::from(String::from_utf8_lossy(&redacted)).to_string());
    }
}

/// The secrecy of an object or array.
#[derive(Clone, Copy, Default)]
struct Scope {
    /// The object or array is part of a secret.
    is_secret: bool,
    /// A name in it, or in an object around it, marks its values as secret.
    hides_values: bool,
}

/// A value to be copied.
struct Node<'n, 'w> {
    to: &'n mut Writer<'w>,
    /// The kind of member, by its name.
    member: Member,
    around: Scope,
    /// True for the first element of an array; None outside of arrays.
    is_first: Option<bool>,
}

impl Node<'_, '_> {
    /// Writes a scalar. Returns a name or flag, which describes the next value.
    fn scalar(self, value: &Value) -> Option<String> {
        let is_secret = match self.member {
            Member::Secret | Member::SecretText => true,
            Member::Public | Member::Name => false,
            Member::Value => self.around.is_secret || self.around.hides_values,
            Member::Other | Member::Key | Member::Headers => self.around.is_secret,
        };
        match value {
            Value::String(text) if text.is_empty() || !is_secret => self.to.string(text),
            Value::String(_) | Value::Number(_) if is_secret => self.to.text(r#""[redacted]""#),
            other => self.to.text(&other.to_string()),
        }
        let is_header = self.member == Member::Headers && self.is_first.is_none();
        let is_name = is_header || matches!(self.member, Member::Name | Member::Key);
        let is_flag = |text: &str| self.is_first.is_some() && text.starts_with('-');
        let name = value.as_str().filter(|text| is_name || is_flag(text));
        name.map(str::to_owned)
    }

    /// Returns the secrecy of the members or elements of this value.
    fn scope(&self) -> Scope {
        let (member, around) = (self.member, self.around);
        Scope {
            is_secret: member == Member::Secret || member != Member::Public && around.is_secret,
            ..around
        }
    }
}

impl<'de> DeserializeSeed<'de> for Node<'_, '_> {
    type Value = Option<String>;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Option<String>, D::Error> {
        if let Some(is_first) = self.is_first {
            self.to.put(|form, to| form.begin_array_value(to, is_first));
        }
        from.deserialize_any(self)
    }
}

macro_rules! scalars {
    ($($visit:ident $number:ty),+) => {
        $(fn $visit<E: Error>(self, value: $number) -> Result<Option<String>, E> {
            Ok(self.scalar(&Value::from(value)))
        })+
    };
}

impl<'de> Visitor<'de> for Node<'_, '_> {
    type Value = Option<String>;

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("JSON")
    }

    scalars!(visit_bool bool, visit_i64 i64, visit_u64 u64, visit_f64 f64, visit_str &str);

    fn visit_unit<E: Error>(self) -> Result<Option<String>, E> {
        Ok(self.scalar(&Value::Null))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Option<String>, A::Error> {
        let scope = self.scope();
        let member = match self.member {
            Member::Headers | Member::SecretText => self.member,
            _ => Member::Other,
        };
        let to = self.to;
        to.put(|form, to| form.begin_array(to));
        let (mut around, mut is_first) = (scope, true);
        while let Some(name) =
            elements.next_element_seed(Node { to, member, around, is_first: Some(is_first) })?
        {
            to.put(|form, to| form.end_array_value(to));
            is_first = false;
            let is_flag = |text: String| !text.contains('=') && is_secret(text.as_bytes());
            around.is_secret = scope.is_secret || to.checks_names && name.is_some_and(is_flag);
        }
        to.put(|form, to| form.end_array(to));
        Ok(None)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Option<String>, A::Error> {
        let (mut around, is_header) = (self.scope(), self.member == Member::Headers);
        // The value is hidden if it comes before the header's name.
        around.hides_values |= is_header;
        let to = self.to;
        to.put(|form, to| form.begin_object(to));
        let mut is_first = true;
        while let Some(name) = members.next_key::<String>()? {
            to.put(|form, to| form.begin_object_key(to, is_first));
            to.string(&name);
            to.put(|form, to| form.begin_object_value(to));
            is_first = false;
            let known = to.checks_names.then(|| Member::of(name.as_bytes()));
            let member = known.unwrap_or(Member::Other);
            let value = Node { to, member, around, is_first: None };
            let described = members.next_value_seed(value)?;
            to.put(|form, to| form.end_object_value(to));
            if let Some(name) = described.as_ref().map(String::as_bytes) {
                around.hides_values &= !is_header;
                around.hides_values |= is_secret_header(name);
                let is_header_name = is_header || member == Member::Key;
                around.hides_values |= is_header_name && !names::is_standard_header(name);
            }
        }
        to.put(|form, to| form.end_object(to));
        Ok(None)
    }
}

/// Returns true for a name, such as that of a header, whose value is secret. A text with other characters is not a
/// name.
fn is_secret_header(name: &[u8]) -> bool {
    let is_allowed = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_".contains(byte);
    name.iter().all(is_allowed) && is_secret(name)
}

#[cfg(test)]
mod tests;
