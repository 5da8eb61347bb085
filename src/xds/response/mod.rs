//! Cuts istiod's responses through to Envoy while their bytes arrive.
//!
//! Each message's fate is decided at its start, by the type of its first resource: the field that
//! names the type is written behind all resources. Until then its bytes are held, which for nearly
//! all messages is a few hundred bytes; a message without resources is held whole and small. From
//! then on a passing message costs no memory, however large it is, and what leaves are slices of
//! what came. Version, nonce and the number of resources are read on the way, for [`Output::Ended`].
//!
//! Does not judge a message beyond that: what Envoy cannot decode, Envoy refuses.

use bytes::{Bytes, BytesMut};
use tonic::Status;

use super::Protocol;
use super::intercept::{Captured, Fate, Interceptors};
use super::request::HEAD;
use super::wire::{Fields, Malformed, Walker};

/// The most that is held of a message whose fate is open, or captured of one that is intercepted.
///
/// Large enough for any name table; a limit at all, so that istiod cannot fill the pod's memory.
const LARGEST_HELD: usize = 256 * 1024 * 1024;

/// What comes out of istiod's stream.
#[derive(Clone, Debug)]
pub enum Output {
    /// Bytes for Envoy: whole messages or parts of one, in order.
    Pass(Bytes),
    /// A message for the interceptor of this index.
    Captured(usize, Captured),
    /// A message nobody wants, by its type.
    Withheld(String),
    /// A message is complete. Comes before [`Output::Captured`] or [`Output::Withheld`] of the same,
    /// and not always behind the last of its bytes.
    Ended(Received),
}

/// What is known of a message when it is complete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    pub type_url: String,
    pub version: String,
    /// Empty if the message is malformed before it.
    pub nonce: String,
    pub resources: u32,
    /// Its length without the head.
    pub bytes: u64,
    pub taker: Taker,
}

/// Who gets a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Taker {
    Envoy,
    Agent,
    Nobody,
}

/// Splits the bytes of istiod's response stream by the fate of the messages in it.
#[derive(Debug)]
pub struct ResponseReader {
    protocol: Protocol,
    interceptors: Interceptors,
    place: Place,
}

/// Where in the stream the next byte stands.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "one per stream; a box would cost one per message"
)]
enum Place {
    /// In the head of a message, of which these bytes have come.
    Head([u8; HEAD], usize),
    /// In a message.
    Body(Body),
}

#[derive(Debug)]
struct Body {
    length: u64,
    left: u64,
    verdict: Verdict,
    walker: Walker,
    /// Whether a message that passes has turned out to be malformed, which is Envoy's business.
    is_broken: bool,
    /// The bytes so far, head included, of a message whose fate is open or that is captured.
    held: BytesMut,
}

#[derive(Debug)]
enum Verdict {
    Open,
    Pass,
    Withhold(String),
    Capture(usize),
}

/// The chunk in work, and how far it has been disposed of.
struct Chunk {
    bytes: Bytes,
    /// Where the bytes begin that go to Envoy or have no fate yet.
    kept_from: usize,
    /// Where the current message begins: 0 if that was in an earlier chunk.
    message_from: usize,
    at: usize,
}

impl ResponseReader {
    pub fn new(protocol: Protocol, interceptors: Interceptors) -> Self {
        Self {
            protocol,
            interceptors,
            place: Place::start(),
        }
    }

    /// Whether a message has been passed on in part, so that nothing may go between.
    pub fn passing(&self) -> bool {
        matches!(&self.place, Place::Body(body) if matches!(body.verdict, Verdict::Pass))
    }

    /// Whether the stream may end here.
    pub fn between_messages(&self) -> bool {
        matches!(self.place, Place::Head(_, 0))
    }

    /// Takes the next bytes of the stream.
    pub fn feed(&mut self, bytes: Bytes, mut out: impl FnMut(Output)) -> Result<(), Status> {
        let mut chunk = Chunk {
            bytes,
            kept_from: 0,
            message_from: 0,
            at: 0,
        };
        while chunk.at < chunk.bytes.len() {
            if let Place::Head(head, have) = &mut self.place {
                let carried = *have;
                if !chunk.read_head(head, have) {
                    continue;
                }
                self.place = Place::Body(Body::begin(self.protocol, *head, carried)?);
            }
            self.read_body(&mut chunk, &mut out)?;
        }
        self.dispose_of_rest(chunk, &mut out)
    }

    /// Reads as much of the current message as the chunk has.
    fn read_body(&mut self, chunk: &mut Chunk, out: &mut impl FnMut(Output)) -> Result<(), Status> {
        let Place::Body(body) = &mut self.place else {
            return Ok(());
        };
        let available = (chunk.bytes.len() - chunk.at) as u64;
        let used = body.left.min(available) as usize;
        let bytes = &chunk.bytes[chunk.at..chunk.at + used];
        chunk.at += used;
        body.left -= used as u64;
        body.walk(bytes)?;
        body.decide(&self.interceptors, chunk, out);
        if body.left == 0 {
            self.end_message(chunk, out)?;
        }
        Ok(())
    }

    fn end_message(
        &mut self,
        chunk: &mut Chunk,
        out: &mut impl FnMut(Output),
    ) -> Result<(), Status> {
        let Place::Body(mut body) = std::mem::replace(&mut self.place, Place::start()) else {
            return Ok(());
        };
        match std::mem::replace(&mut body.verdict, Verdict::Open) {
            Verdict::Open | Verdict::Pass => out(body.ended(Taker::Envoy)),
            Verdict::Withhold(type_url) => {
                out(body.ended(Taker::Nobody));
                out(Output::Withheld(type_url));
                chunk.kept_from = chunk.at;
            }
            Verdict::Capture(index) => {
                hold(&mut body.held, &chunk.bytes[chunk.message_from..chunk.at])?;
                let message = std::mem::take(&mut body.held).freeze().slice(HEAD..);
                let fields = body.walker.clone().finish().map_err(malformed)?;
                let captured = captured(self.protocol, fields, message);
                out(body.ended(Taker::Agent));
                out(Output::Captured(index, captured));
                chunk.kept_from = chunk.at;
            }
        }
        Ok(())
    }

    fn dispose_of_rest(
        &mut self,
        mut chunk: Chunk,
        out: &mut impl FnMut(Output),
    ) -> Result<(), Status> {
        match &mut self.place {
            Place::Body(body) => match body.verdict {
                Verdict::Pass => chunk.pass_until(chunk.at, out),
                Verdict::Withhold(_) => {}
                Verdict::Open | Verdict::Capture(_) => {
                    chunk.pass_until(chunk.message_from, out);
                    hold(&mut body.held, &chunk.bytes[chunk.message_from..])?;
                }
            },
            // The bytes of an unfinished head are kept with the head.
            Place::Head(_, 0) => chunk.pass_until(chunk.at, out),
            Place::Head(..) => chunk.pass_until(chunk.message_from, out),
        }
        Ok(())
    }
}

impl Place {
    const fn start() -> Self {
        Self::Head([0; HEAD], 0)
    }
}

impl Body {
    /// A message with this head, of which the first `carried` bytes came in an earlier chunk.
    fn begin(protocol: Protocol, head: [u8; HEAD], carried: usize) -> Result<Self, Status> {
        let [flag, l0, l1, l2, l3] = head;
        if flag != 0 {
            return Err(Status::internal(
                "istiod sent a compressed message, and no compression was offered",
            ));
        }
        let length = u32::from_be_bytes([l0, l1, l2, l3]).into();
        Ok(Self {
            length,
            left: length,
            verdict: Verdict::Open,
            walker: Walker::response(protocol, length),
            is_broken: false,
            held: BytesMut::from(&head[..carried]),
        })
    }

    /// Reads the next bytes. A message that is not opened for anybody may be malformed.
    fn walk(&mut self, bytes: &[u8]) -> Result<(), Status> {
        if self.is_broken {
            return Ok(());
        }
        match (self.walker.feed(bytes), &self.verdict) {
            (Ok(()), _) => Ok(()),
            (Err(_), Verdict::Pass | Verdict::Withhold(_)) => {
                self.is_broken = true;
                Ok(())
            }
            (Err(error), Verdict::Open | Verdict::Capture(_)) => Err(malformed(error)),
        }
    }

    fn ended(self, taker: Taker) -> Output {
        let fields = self.walker.into_fields();
        let of_resource = || fields.resource_type.unwrap_or_default();
        Output::Ended(Received {
            type_url: Some(fields.type_url)
                .filter(|type_url| !type_url.is_empty())
                .unwrap_or_else(of_resource),
            version: fields.version,
            nonce: fields.nonce,
            resources: fields.resources,
            bytes: self.length,
            taker,
        })
    }

    /// Decides the message's fate if its type is known by now, and must be if the message is whole.
    fn decide(
        &mut self,
        interceptors: &Interceptors,
        chunk: &mut Chunk,
        out: &mut impl FnMut(Output),
    ) {
        let Verdict::Open = self.verdict else {
            return;
        };
        let fields = self.walker.fields();
        let type_url = match &fields.resource_type {
            Some(resource_type) => resource_type,
            None if !fields.type_url.is_empty() || self.left == 0 => &fields.type_url,
            None => return,
        };
        self.verdict = match interceptors.fate(type_url) {
            Fate::Pass => {
                if !self.held.is_empty() {
                    out(Output::Pass(std::mem::take(&mut self.held).freeze()));
                }
                Verdict::Pass
            }
            Fate::Withhold => {
                chunk.pass_until(chunk.message_from, out);
                self.held = BytesMut::new();
                Verdict::Withhold(type_url.clone())
            }
            Fate::Capture(index) => {
                chunk.pass_until(chunk.message_from, out);
                Verdict::Capture(index)
            }
        };
    }
}

impl Chunk {
    /// Reads the head of a message, or what the chunk has of it; says whether it is whole.
    fn read_head(&mut self, head: &mut [u8; HEAD], have: &mut usize) -> bool {
        self.message_from = if *have == 0 { self.at } else { 0 };
        let used = (HEAD - *have).min(self.bytes.len() - self.at);
        head[*have..*have + used].copy_from_slice(&self.bytes[self.at..self.at + used]);
        *have += used;
        self.at += used;
        *have == HEAD
    }

    /// Sends what is kept and stands before `end`.
    fn pass_until(&mut self, end: usize, out: &mut impl FnMut(Output)) {
        if self.kept_from < end {
            out(Output::Pass(self.bytes.slice(self.kept_from..end)));
        }
        self.kept_from = self.kept_from.max(end);
    }
}

fn hold(held: &mut BytesMut, bytes: &[u8]) -> Result<(), Status> {
    if held.len() + bytes.len() > LARGEST_HELD {
        return Err(Status::resource_exhausted(format!(
            "istiod sent over {LARGEST_HELD} bytes in one message that the agent must hold whole"
        )));
    }
    held.extend_from_slice(bytes);
    Ok(())
}

fn malformed(error: Malformed) -> Status {
    Status::internal(format!("discovery response from istiod: {error}"))
}

fn captured(protocol: Protocol, fields: Fields, message: Bytes) -> Captured {
    Captured {
        protocol,
        type_url: fields.type_url,
        version: fields.version,
        nonce: fields.nonce,
        resources: fields.resources,
        message,
    }
}

#[cfg(test)]
mod tests;
