//! Cuts istiod's responses through to Envoy while their bytes arrive.
//!
//! The disposition of a message is decided at its start, by the type of its first resource, because the
//! field that names the type follows all resources. Until then the bytes of the message are collected, a few
//! hundred for nearly all messages. After that a passing message costs no memory, however large it is: its
//! output are slices of the input. Version, nonce and the number of resources are read on the way, for
//! [`Output::Complete`]. A malformed message that passes is left to Envoy to refuse.

use std::collections::HashSet;

use bytes::{Bytes, BytesMut};
use tonic::Status;

use super::Protocol;
use super::interceptor::{Disposition, Interceptors};
use super::request::HEAD;
use super::wire::{Malformed, NameDigest, Walker};

/// The most bytes in memory of a message that has no disposition yet, or is intercepted.
///
/// Any name table fits. The limit keeps istiod from filling the pod's memory.
const MAX_PARTIAL: usize = 256 * 1024 * 1024;

/// A part of istiod's stream, for its consumer.
#[derive(Clone, Debug)]
pub enum Output {
    /// A message of this type and length begins to pass.
    Begins {
        type_url: String,
        length: u64,
    },
    /// Bytes for Envoy: a complete message or a part of one, in order.
    Pass(Bytes),
    Captured(Captured),
    /// A complete message in place of which Envoy gets others ([`super::on_demand`]).
    Replaced(Received, Bytes),
    /// A message is complete. Comes before [`Output::Captured`] of the same message.
    Complete(Received),
}

/// The description of a complete message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    pub type_url: String,
    pub version: String,
    /// Empty if the message is malformed before this field.
    pub nonce: String,
    pub resources: u32,
    /// The number of removed resources; SotW responses have none.
    pub removed: u32,
    /// The length of the message without the head of its frame.
    pub bytes: u64,
    pub consumer: Consumer,
    /// The names of resources and removed ones, if they are read.
    pub(super) names: HashSet<NameDigest>,
}

/// A complete message for an interceptor, not decoded.
#[derive(Clone, Debug)]
pub struct Captured {
    /// The index of the interceptor.
    pub interceptor: usize,
    pub received: Received,
    pub message: Bytes,
}

/// The side that gets a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Consumer {
    Envoy,
    Agent,
    /// No side: Envoy does not know the type, and the agent does not subscribe to it.
    None,
}

/// Splits the bytes of istiod's response stream by the disposition of the messages in it.
#[allow(missing_debug_implementations)]
pub struct ResponseReader {
    protocol: Protocol,
    interceptors: Interceptors,
    /// The types of responses in place of which Envoy gets others.
    replaced: &'static [&'static str],
    /// True if names are read in messages that begin. Only delta responses have names.
    pub(super) reads_names: bool,
    /// The message that has begun, with a complete head, and has not ended.
    message: Option<Message>,
    /// The bytes of an incomplete head, or of a message that does not pass yet, head included.
    partial: BytesMut,
}

struct Message {
    /// The number of bytes after the head.
    length: usize,
    /// The number of bytes to come, including the head.
    left: usize,
    head_left: usize,
    disposition: Option<Disposition>,
    walker: Walker,
    names: HashSet<NameDigest>,
    is_malformed: bool,
}

impl ResponseReader {
    pub fn new(protocol: Protocol, interceptors: Interceptors) -> Self {
        Self {
            protocol,
            interceptors,
            replaced: &[],
            reads_names: false,
            message: None,
            partial: BytesMut::new(),
        }
    }

    /// Hands out later responses of these types as [`Output::Replaced`].
    pub(super) fn replace(&mut self, types: &'static [&'static str]) {
        self.replaced = types;
    }

    /// Returns true after a part of a passing message, when no other message may be sent.
    pub fn is_passing(&self) -> bool {
        self.message.as_ref().is_some_and(|it| it.disposition == Some(Disposition::Pass))
    }

    /// Returns true if the stream may end here.
    pub fn is_between_messages(&self) -> bool {
        self.message.is_none() && self.partial.is_empty()
    }

    /// Takes the next bytes of the stream, and calls `out` for their parts. Fails for a compressed message, and for
    /// one that is too long or malformed before it passes or is withheld.
    pub fn feed(&mut self, mut bytes: Bytes, mut out: impl FnMut(Output)) -> Result<(), Status> {
        while !bytes.is_empty() {
            let current = match self.message.take() {
                None => self.begin(&bytes)?,
                current => current,
            };
            let Some(mut message) = current else {
                self.partial.extend_from_slice(&bytes);
                return Ok(());
            };
            let part = bytes.split_to(message.left.min(bytes.len()));
            message.left -= part.len();
            message.read(&part)?;
            let type_url = message.decide(&self.interceptors, self.replaced);
            match message.disposition {
                Some(Disposition::Pass) => {
                    if let Some(type_url) = type_url {
                        out(Output::Begins { type_url, length: message.length as u64 });
                    }
                    let begun = std::mem::take(&mut self.partial).freeze();
                    for part in [begun, part].into_iter().filter(|part| !part.is_empty()) {
                        out(Output::Pass(part));
                    }
                }
                Some(Disposition::Withhold) => self.partial = BytesMut::new(),
                Some(Disposition::Intercept(_) | Disposition::Replace) | None => {
                    self.buffer(&part)?;
                }
            }
            if message.left == 0 {
                self.complete(message, &mut out)?;
            } else {
                self.message = Some(message);
            }
        }
        Ok(())
    }

    /// Begins the message whose head ends in `bytes`, or returns None if the head continues.
    fn begin(&self, bytes: &[u8]) -> Result<Option<Message>, Status> {
        let mut head = [0; HEAD];
        let known = self.partial.len();
        let missing = HEAD - known;
        let Some(rest) = bytes.get(..missing) else { return Ok(None) };
        head[..known].copy_from_slice(&self.partial);
        head[known..].copy_from_slice(rest);
        let [flag, length @ ..] = head;
        if flag != 0 {
            return Err(Status::internal(
                "istiod sent a compressed message, and no compression was offered",
            ));
        }
        let length = u32::from_be_bytes(length) as usize;
        Ok(Some(Message {
            length,
            left: missing + length,
            head_left: missing,
            disposition: None,
            walker: if self.reads_names {
                Walker::finder(length as u64)
            } else {
                Walker::new(self.protocol, length as u64)
            },
            names: HashSet::new(),
            is_malformed: false,
        }))
    }

    /// Appends bytes of a message that does not pass. Fails if it is too long.
    fn buffer(&mut self, bytes: &[u8]) -> Result<(), Status> {
        if self.partial.len() + bytes.len() > MAX_PARTIAL {
            return Err(Status::resource_exhausted(format!(
                "istiod sent over {MAX_PARTIAL} bytes in one message that the agent must buffer completely"
            )));
        }
        self.partial.extend_from_slice(bytes);
        Ok(())
    }

    /// Describes a complete message, and hands it to its interceptor, if it has one.
    fn complete(&mut self, message: Message, out: &mut impl FnMut(Output)) -> Result<(), Status> {
        let (consumer, fields) = match message.disposition {
            Some(Disposition::Intercept(_)) => {
                (Consumer::Agent, message.walker.finish().map_err(malformed)?)
            }
            Some(Disposition::Withhold) => (Consumer::None, message.walker.fields),
            Some(Disposition::Replace) => {
                (Consumer::Envoy, message.walker.finish().map_err(malformed)?)
            }
            Some(Disposition::Pass) | None => (Consumer::Envoy, message.walker.fields),
        };
        let type_url = if fields.type_url.is_empty() {
            fields.resource_type.unwrap_or_default()
        } else {
            fields.type_url
        };
        let received = Received {
            type_url,
            version: fields.version,
            nonce: fields.nonce,
            resources: fields.resources,
            removed: fields.removed,
            bytes: message.length as u64,
            consumer,
            names: message.names,
        };
        out(Output::Complete(received.clone()));
        let mut buffered = || std::mem::take(&mut self.partial).freeze().slice(HEAD..);
        match message.disposition {
            Some(Disposition::Intercept(interceptor)) => {
                out(Output::Captured(Captured { interceptor, received, message: buffered() }));
            }
            Some(Disposition::Replace) => out(Output::Replaced(received, buffered())),
            _ => {}
        }
        Ok(())
    }
}

impl Message {
    /// Reads the next bytes. Fails for a malformed message, unless the agent only forwards or withholds it.
    fn read(&mut self, part: &[u8]) -> Result<(), Status> {
        let body = &part[self.head_left.min(part.len())..];
        self.head_left = 0;
        if self.is_malformed {
            return Ok(());
        }
        let read = self.walker.find(body, |field| self.names.extend([field.name]));
        match (read, self.disposition) {
            (Ok(()), _) => {}
            (Err(_), Some(Disposition::Pass | Disposition::Withhold)) => self.is_malformed = true,
            (Err(error), Some(Disposition::Intercept(_) | Disposition::Replace) | None) => {
                return Err(malformed(error));
            }
        }
        Ok(())
    }

    /// Decides the disposition once the type is known, at the latest at the end of the message. Returns the
    /// type when it decides.
    fn decide(&mut self, interceptors: &Interceptors, replaced: &[&str]) -> Option<String> {
        if self.disposition.is_some() {
            return None;
        }
        let fields = &self.walker.fields;
        let type_url = match &fields.resource_type {
            Some(resource_type) => resource_type,
            None if !fields.type_url.is_empty() || self.left == 0 => &fields.type_url,
            None => return None,
        };
        self.disposition = Some(match interceptors.disposition(type_url) {
            Disposition::Pass if replaced.contains(&type_url.as_str()) => Disposition::Replace,
            disposition => disposition,
        });
        Some(type_url.clone())
    }
}

fn malformed(error: Malformed) -> Status {
    Status::internal(format!("discovery response from istiod: {error}"))
}

#[cfg(test)]
mod tests;
