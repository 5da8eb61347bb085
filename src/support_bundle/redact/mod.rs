//! Takes secrets out of texts and JSON while they pass, in any chunks.
//!
//! A line of a text, or a string of JSON, is looked at whole and left out whole if it is longer than
//! [`LONGEST`]. What is not JSON where JSON is expected is an error, so that nothing passes unseen.

mod names;
mod text;

pub(super) use names::is_secret;
use names::{Member, Members};
use text::REDACTED;
pub use text::Secrets;

const LONGEST: usize = 256 << 10;
const DEEPEST: usize = 200;

/// What passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Lines,
    Json,
    /// JSON that this agent has made, in which no member is a secret whatever its name.
    OwnJson,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it is no JSON, or deeper than {DEEPEST} levels")]
pub(super) struct NotJson;

pub(super) struct Redactor<'a> {
    secrets: &'a Secrets,
    form: Form,
    /// What passed, to be taken by the caller.
    pub(super) out: Vec<u8>,
    /// The line, string or literal under way.
    token: Vec<u8>,
    /// The length of a token that is too long.
    left_out: usize,
    /// Whether the last line is within a private key.
    is_in_key: bool,
    lexeme: Lexeme,
    /// Of the innermost last.
    scopes: Vec<Scope>,
    /// Whether the next string is the name of a member.
    awaits_name: bool,
    /// The last name.
    member: Member,
    members: Members,
}

/// Where in JSON the next byte is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lexeme {
    Between,
    /// A number, true, false or null.
    Literal,
    String {
        is_escaped: bool,
    },
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

impl<'a> Redactor<'a> {
    pub(super) fn new(secrets: &'a Secrets, form: Form) -> Self {
        Self {
            secrets,
            form,
            out: Vec::new(),
            token: Vec::new(),
            left_out: 0,
            is_in_key: false,
            lexeme: Lexeme::Between,
            scopes: Vec::new(),
            awaits_name: false,
            member: Member::Other,
            members: Members::default(),
        }
    }

    pub(super) fn push(&mut self, bytes: &[u8]) -> Result<(), NotJson> {
        if self.form != Form::Lines {
            return self.push_json(bytes);
        }
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            let line = part.strip_suffix(b"\n");
            self.keep(line.unwrap_or(part));
            if line.is_some() {
                self.end_line();
                self.out.push(b'\n');
            }
        }
        Ok(())
    }

    /// Ends the text. A string that has no end is left out.
    pub(super) fn finish(&mut self) -> Result<(), NotJson> {
        match self.form {
            Form::Lines => self.end_line(),
            _ => self.end_literal()?,
        }
        Ok(())
    }

    fn keep(&mut self, bytes: &[u8]) {
        if self.left_out + self.token.len() + bytes.len() > LONGEST {
            self.left_out += self.token.len() + bytes.len();
            self.token.clear();
        } else {
            self.token.extend_from_slice(bytes);
        }
    }

    fn end_line(&mut self) {
        let ends_in_key = text::ends_in_key(&self.token);
        if self.is_in_key {
            self.is_in_key = ends_in_key || !text::ends_key(&self.token);
            self.token.clear();
        } else {
            self.is_in_key = ends_in_key;
        }
        self.write_token();
    }

    /// Writes the token without its secrets.
    fn write_token(&mut self) {
        if self.left_out > 0 {
            let note = format!("[{} bytes left out]", self.left_out);
            self.out.extend_from_slice(note.as_bytes());
        } else {
            self.secrets.redact(&self.token, &mut self.out);
        }
        self.token.clear();
        self.left_out = 0;
    }

    fn push_json(&mut self, mut bytes: &[u8]) -> Result<(), NotJson> {
        loop {
            // Most of it is in strings, and blanks between them.
            match self.lexeme {
                Lexeme::String { is_escaped: false } => {
                    let end = memchr::memchr2(b'"', b'\\', bytes).unwrap_or(bytes.len());
                    self.keep(&bytes[..end]);
                    bytes = &bytes[end..];
                }
                Lexeme::Between => {
                    let blanks = text::run(bytes, |byte| byte == b' ');
                    self.out.extend_from_slice(&bytes[..blanks]);
                    bytes = &bytes[blanks..];
                }
                _ => {}
            }
            let Some((byte, rest)) = bytes.split_first() else {
                return Ok(());
            };
            self.push_byte(*byte)?;
            bytes = rest;
        }
    }

    fn push_byte(&mut self, byte: u8) -> Result<(), NotJson> {
        match (self.lexeme, byte) {
            (Lexeme::String { is_escaped: false }, b'"') => {
                self.end_string();
                self.lexeme = Lexeme::Between;
            }
            (Lexeme::String { is_escaped }, _) => {
                let is_escaped = byte == b'\\' && !is_escaped;
                self.lexeme = Lexeme::String { is_escaped };
                self.keep(&[byte]);
            }
            (_, b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' | b'+' | b'-' | b'.') => {
                self.lexeme = Lexeme::Literal;
                self.keep(&[byte]);
            }
            _ => {
                self.end_literal()?;
                self.punctuation(byte)?;
            }
        }
        Ok(())
    }

    fn punctuation(&mut self, byte: u8) -> Result<(), NotJson> {
        match byte {
            b'"' => {
                self.lexeme = Lexeme::String { is_escaped: false };
                return Ok(());
            }
            b'{' | b'[' => self.open(byte == b'{')?,
            b'}' | b']' => {
                self.scopes.pop();
                self.awaits_name = false;
            }
            b',' => self.awaits_name = self.scope().is_object,
            b':' => self.awaits_name = false,
            b' ' | b'\n' | b'\r' | b'\t' => {}
            _ => return Err(NotJson),
        }
        self.out.push(byte);
        Ok(())
    }

    fn scope(&self) -> Scope {
        self.scopes.last().copied().unwrap_or_default()
    }

    fn open(&mut self, is_object: bool) -> Result<(), NotJson> {
        if self.scopes.len() == DEEPEST {
            return Err(NotJson);
        }
        let around = self.scope();
        let member = match around.is_object {
            true => self.member,
            false => Member::Other,
        };
        self.scopes.push(Scope {
            is_object,
            is_secret: match member {
                Member::Public => false,
                Member::Secret { is_whole } => is_whole || around.is_secret,
                _ => around.is_secret,
            },
            is_header: member == Member::Headers || !around.is_object && around.is_header,
            is_named_secret: around.is_named_secret,
        });
        self.awaits_name = is_object;
        Ok(())
    }

    fn end_string(&mut self) {
        if self.awaits_name {
            let is_judged = self.form == Form::Json;
            self.member = match is_judged {
                true => self.members.judge(&self.token),
                false => Member::Other,
            };
        } else {
            if let Some(scope) = self.scopes.last_mut().filter(|scope| scope.is_object) {
                let is_named = matches!(self.member, Member::Name | Member::Key);
                scope.is_header |= self.member == Member::Key;
                scope.is_named_secret |= is_named && names::is_secret_header(&self.token);
            }
            if self.is_hidden() && !self.token.is_empty() {
                self.token = REDACTED.to_vec();
            }
        }
        self.out.push(b'"');
        self.write_token();
        self.out.push(b'"');
    }

    fn end_literal(&mut self) -> Result<(), NotJson> {
        if self.lexeme != Lexeme::Literal {
            return Ok(());
        }
        self.lexeme = Lexeme::Between;
        let is_constant = [&b"true"[..], b"false", b"null"].contains(&self.token.as_slice());
        let is_of_number = |byte: &u8| byte.is_ascii_digit() || b"+-.eE".contains(byte);
        if !is_constant && !self.token.iter().all(is_of_number) {
            return Err(NotJson);
        }
        if self.is_hidden() && !is_constant {
            self.token = [b"\"", REDACTED, b"\""].concat();
        }
        self.write_token();
        Ok(())
    }

    /// Whether the scalar under way is a secret.
    fn is_hidden(&self) -> bool {
        let scope = self.scope();
        if !scope.is_object {
            return scope.is_secret;
        }
        match self.member {
            Member::Secret { .. } => true,
            Member::Public | Member::Harmless | Member::Name => false,
            Member::Value => scope.is_secret || scope.is_header || scope.is_named_secret,
            Member::Matcher => scope.is_secret || scope.is_named_secret,
            Member::Other | Member::Key | Member::Headers => scope.is_secret,
        }
    }
}

#[cfg(test)]
mod tests;
