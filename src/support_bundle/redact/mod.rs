//! Takes secrets out of texts and JSON while they pass.
//!
//! A line of a text, or a string of JSON, is looked at whole and left out whole if it is longer than
//! [`MAX_TEXT`]. JSON is read and written member by member, also where it is a text within JSON. What is
//! not JSON where JSON is expected is an error, so that nothing passes unseen.

mod names;
mod text;

use std::borrow::Cow;
use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

use names::Member;
pub(super) use names::is_secret;
use text::REDACTED;
pub use text::Secrets;

const MAX_TEXT: usize = 256 << 10;
const MAX_DEPTH: usize = 120;
const LEFT_OUT: &[u8] = b"[left out: more than 256 KiB]";

/// What passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Lines,
    Json,
    /// JSON that this agent has made, in which no member is a secret whatever its name.
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
    let is_judged = form == Form::Json;
    let copied = copy_json(secrets, (is_judged, false), from, to, 0);
    copied.map(drop).map_err(io::Error::other)
}

/// Tells whether the copy is another than the original. It is in JSON at this depth.
fn copy_json(
    secrets: &Secrets,
    (is_judged, is_compact): (bool, bool),
    from: &mut dyn Read,
    to: &mut dyn Write,
    depth: usize,
) -> Result<bool, serde_json::Error> {
    let mut json = serde_json::Deserializer::from_reader(BufReader::new(from));
    let mut writer = Writer {
        secrets,
        is_judged,
        is_compact,
        has_hidden: false,
        to,
    };
    let node = writer.node(Member::Other, Scope::default(), depth, None);
    node.deserialize(&mut json)?;
    json.end()?;
    Ok(writer.has_hidden)
}

fn copy_lines(secrets: &Secrets, from: &mut dyn Read, to: &mut dyn Write) -> io::Result<()> {
    let (mut from, mut line) = (BufReader::new(from), Vec::new());
    loop {
        let mut limited = (&mut from).take(MAX_TEXT as u64 + 1);
        // The lines of a private key are one text.
        while limited.read_until(b'\n', &mut line)? > 0 && text::ends_in_key(&line) {}
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
    /// The text without its secrets; one that is JSON is read as such. It is in JSON at this depth.
    fn redact<'t>(&self, text: &'t [u8], depth: usize) -> Cow<'t, [u8]> {
        let text = self.hide_known(text);
        if matches!(text.trim_ascii_start().first(), Some(b'{' | b'[')) {
            let mut json = Vec::new();
            match copy_json(self, (true, true), &mut &*text, &mut json, depth) {
                Ok(true) => return json.into(),
                Ok(false) => return text,
                Err(_) => {}
            }
        }
        self.hide_patterns(text)
    }
}

/// Writes JSON, indented like Envoy's or compact.
struct Writer<'a> {
    secrets: &'a Secrets,
    is_judged: bool,
    is_compact: bool,
    has_hidden: bool,
    to: &'a mut dyn Write,
}

impl<'w> Writer<'w> {
    fn node(
        &mut self,
        member: Member,
        around: Scope,
        depth: usize,
        is_first: Option<bool>,
    ) -> Node<'_, 'w> {
        Node {
            to: self,
            member,
            around,
            depth,
            is_first,
        }
    }

    fn separate(&mut self, is_first: bool, depth: usize) -> io::Result<()> {
        if !is_first {
            self.to.write_all(b",")?;
        }
        match self.is_compact {
            true => Ok(()),
            false => write!(self.to, "\n{:depth$}", ""),
        }
    }

    fn close(&mut self, end: &[u8], is_empty: bool, depth: usize) -> io::Result<Told> {
        if !is_empty {
            self.separate(true, depth)?;
        }
        self.to.write_all(end)?;
        Ok(None)
    }

    fn redacted(&mut self) -> io::Result<()> {
        self.has_hidden = true;
        self.to.write_all(&[b"\"", REDACTED, b"\""].concat())
    }

    fn string(&mut self, text: &str, depth: usize) -> io::Result<()> {
        let redacted = match text.len() > MAX_TEXT {
            true => LEFT_OUT.into(),
            false => self.secrets.redact(text.as_bytes(), depth),
        };
        self.has_hidden |= *redacted != *text.as_bytes();
        serde_json::to_writer(&mut *self.to, &String::from_utf8_lossy(&redacted))?;
        Ok(())
    }
}

/// What is known of an object or array.
#[derive(Clone, Copy, Default)]
struct Scope {
    is_object: bool,
    /// It is part of a secret.
    is_secret: bool,
    /// It is a header, or a list of them.
    is_header: bool,
    /// A name in it, or around it, says that its values are secret.
    is_named_secret: bool,
}

/// A name or flag, which says what comes behind it is.
type Told = Option<String>;

/// A value to be copied.
struct Node<'n, 'w> {
    to: &'n mut Writer<'w>,
    /// What its name says.
    member: Member,
    around: Scope,
    depth: usize,
    /// An element of an array, the first or another.
    is_first: Option<bool>,
}

impl Node<'_, '_> {
    /// Whether the scalar is a secret.
    fn is_hidden(&self) -> bool {
        let around = self.around;
        match self.member {
            Member::Secret { .. } => true,
            Member::Public | Member::Harmless | Member::Name => false,
            Member::Value => around.is_secret || around.is_header || around.is_named_secret,
            Member::Matcher => around.is_secret || around.is_named_secret,
            Member::Other | Member::Key | Member::Headers => around.is_secret,
        }
    }

    fn scalar<E: Error>(self, value: &Value) -> Result<Told, E> {
        let written = match value.is_number() && self.is_hidden() {
            true => self.to.redacted(),
            false => write!(self.to.to, "{value}"),
        };
        written.map(|()| None).map_err(E::custom)
    }

    fn text(self, text: &str) -> io::Result<Told> {
        match self.is_hidden() && !text.is_empty() {
            true => self.to.redacted()?,
            false => self.to.string(text, self.depth)?,
        }
        let is_name = matches!(self.member, Member::Name | Member::Key);
        let is_flag = self.is_first.is_some() && text.starts_with('-');
        Ok((is_name || is_flag).then(|| text.to_owned()))
    }

    /// What is known of the object or array that the value is.
    fn open<E: Error>(&self, is_object: bool) -> Result<Scope, E> {
        if self.depth == MAX_DEPTH {
            return Err(E::custom(format_args!("more than {MAX_DEPTH} levels")));
        }
        let around = self.around;
        let is_header = self.member == Member::Headers || !around.is_object && around.is_header;
        Ok(Scope {
            is_object,
            is_secret: match self.member {
                Member::Public => false,
                Member::Secret { is_whole } => is_whole || around.is_secret,
                _ => around.is_secret,
            },
            is_header,
            // Until its name is known.
            is_named_secret: around.is_named_secret || is_header && is_object,
        })
    }
}

impl<'de> DeserializeSeed<'de> for Node<'_, '_> {
    type Value = Told;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Told, D::Error> {
        if let Some(is_first) = self.is_first {
            self.to
                .separate(is_first, self.depth)
                .map_err(D::Error::custom)?;
        }
        from.deserialize_any(self)
    }
}

macro_rules! scalars {
    ($($visit:ident $number:ty),+) => {
        $(fn $visit<E: Error>(self, value: $number) -> Result<Told, E> {
            self.scalar(&value.into())
        })+
    };
}

impl<'de> Visitor<'de> for Node<'_, '_> {
    type Value = Told;

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("JSON")
    }

    scalars!(visit_bool bool, visit_i64 i64, visit_u64 u64, visit_f64 f64);

    fn visit_unit<E: Error>(self) -> Result<Told, E> {
        self.scalar(&Value::Null)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Told, E> {
        self.text(text).map_err(E::custom)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Told, A::Error> {
        let scope = self.open(false)?;
        let (to, depth) = (self.to, self.depth + 1);
        to.to.write_all(b"[").map_err(Error::custom)?;
        let (mut around, mut is_first) = (scope, true);
        while let Some(told) =
            elements.next_element_seed(to.node(Member::Other, around, depth, Some(is_first)))?
        {
            is_first = false;
            let is_flag = |text: String| !text.contains('=') && is_secret(text.as_bytes());
            around.is_secret = scope.is_secret || to.is_judged && told.is_some_and(is_flag);
        }
        to.close(b"]", is_first, depth - 1).map_err(Error::custom)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Told, A::Error> {
        let mut around = self.open(true)?;
        let (to, depth) = (self.to, self.depth + 1);
        to.to.write_all(b"{").map_err(Error::custom)?;
        let mut is_first = true;
        while let Some(name) = members.next_key::<String>()? {
            to.separate(is_first, depth).map_err(Error::custom)?;
            to.string(&name, depth).map_err(Error::custom)?;
            let separator = if to.is_compact { ":" } else { ": " };
            to.to
                .write_all(separator.as_bytes())
                .map_err(Error::custom)?;
            is_first = false;
            let member = match to.is_judged {
                true => Member::of(name.as_bytes()),
                false => Member::Other,
            };
            let told = members.next_value_seed(to.node(member, around, depth, None))?;
            if let Some(name) = told.as_ref().map(String::as_bytes) {
                let is_header = member == Member::Name && around.is_header;
                around.is_named_secret &= !is_header;
                around.is_named_secret |= is_secret_header(name);
                around.is_named_secret |= is_header && !names::is_standard_header(name);
            }
            around.is_header |= member == Member::Key;
        }
        to.close(b"}", is_first, depth - 1).map_err(Error::custom)
    }
}

/// Whether this is the name of a header, say, whose value is secret. Other names have other letters.
fn is_secret_header(name: &[u8]) -> bool {
    let is_letter = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_".contains(byte);
    name.iter().all(is_letter) && is_secret(name)
}

#[cfg(test)]
mod tests;
