//! Copies families from one page in protobuf to another.
//!
//! Metrics pass byte by byte, in messages with the other fields of their family. A metric that cannot be decoded is
//! left out and counted, and so is a series of an earlier source. A page whose messages cannot be told apart is cut.

use std::borrow::Cow;
use std::mem;

use envoy_types::pb::io::prometheus::client::{Metric, MetricFamily, MetricType};
use prost::Message as _;
use prost::encoding::{WireType, decode_key, decode_varint};

use super::{MAX_MESSAGE, METRIC, Message};
use crate::scrape::lines::Hidden;
use crate::scrape::output::Output;
use crate::scrape::sample::Sample;
use crate::scrape::seen::Seen;

/// The longest metric, and the most bytes of the other fields of a family. A decoded metric takes some thirty times
/// its length, if it has many empty labels.
const MAX_FIELD: usize = 64 << 10;
/// The most bytes of a varint.
const MAX_VARINT: usize = 10;

/// The reason why the rest of a page cannot be read.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(in crate::scrape) enum Malformed {
    #[error("not delimited protobuf: {0}")]
    NotProtobuf(&'static str),
    #[error("a metric, or the head of a family, of {0} bytes, expected at most 65536")]
    TooLong(usize),
}

use Malformed::{NotProtobuf, TooLong};

#[derive(Default)]
pub(in crate::scrape) struct Copier {
    /// The families that are left out.
    hidden: Vec<Hidden>,
    /// The beginning of a field that has not arrived completely.
    partial: Vec<u8>,
    /// The number of bytes of the family that are still to come. None between two families.
    left: Option<u64>,
    message: Message,
    /// The fields of the family so far, but its metrics.
    family: MetricFamily,
    is_hidden: bool,
    /// True after the first metric of the family.
    has_metrics: bool,
    /// The messages that are complete.
    page: Vec<u8>,
    pub duplicates: u64,
    pub malformed: u64,
}

impl Copier {
    pub(in crate::scrape) fn new(hidden: Vec<Hidden>) -> Self {
        Self { hidden, ..Self::default() }
    }

    /// Takes a chunk of the source, and writes the messages that it completes to the page.
    pub(in crate::scrape) fn push(
        &mut self,
        chunk: &[u8],
        seen: &mut Seen,
        output: &mut Output,
    ) -> Result<(), Malformed> {
        let mut arrived = mem::take(&mut self.partial);
        arrived.extend_from_slice(chunk);
        let mut read = 0;
        while let Some(length) = self.read_field(&arrived[read..], seen)? {
            read += length;
        }
        arrived.drain(..read);
        self.partial = arrived;
        output.write(&mem::take(&mut self.page));
        Ok(())
    }

    /// Ends the source. The metrics of an incomplete family stay.
    pub(in crate::scrape) fn finish(&mut self, output: &mut Output) -> Result<(), Malformed> {
        self.message.write(&mut self.page);
        output.write(&self.page);
        if self.left.is_some() || !self.partial.is_empty() {
            return Err(NotProtobuf("the page ends inside a message"));
        }
        Ok(())
    }

    /// Reads the length of a family, or a field of it, and returns how many bytes it has. Returns None if they have
    /// not all arrived.
    fn read_field(&mut self, bytes: &[u8], seen: &mut Seen) -> Result<Option<usize>, Malformed> {
        let mut rest = bytes;
        let Some(left) = self.left else {
            if bytes.is_empty() {
                return Ok(None);
            }
            let Ok(length) = decode_varint(&mut rest) else {
                return incomplete(bytes.len() < MAX_VARINT, "a message without a valid length");
            };
            self.left = Some(length);
            self.message = Message::default();
            self.family = MetricFamily::default();
            self.has_metrics = false;
            return Ok(Some(bytes.len() - rest.len()));
        };
        if left == 0 {
            self.left = None;
            self.message.write(&mut self.page);
            return Ok(Some(0));
        }
        let Some((number, length)) = decode_header(&mut rest) else {
            let may_come = bytes.len() < 2 * MAX_VARINT && (bytes.len() as u64) < left;
            return incomplete(may_come, "a field without a valid tag and length");
        };
        let header = bytes.len() - rest.len();
        let end = length.saturating_add(header as u64);
        if end > left {
            return Err(NotProtobuf("a field is longer than its message"));
        }
        if length > MAX_FIELD as u64 {
            return Err(TooLong(usize::try_from(length).unwrap_or(usize::MAX)));
        }
        // It is less than `MAX_FIELD`.
        let end = end as usize;
        let Some(field) = bytes.get(..end) else {
            return Ok(None);
        };
        self.left = Some(left - end as u64);
        if number == METRIC {
            self.copy_metric(field, &field[header..], seen)?;
        } else {
            self.read_head(number, field)?;
        }
        Ok(Some(end))
    }

    /// Takes over a field of the family that is not a metric.
    fn read_head(&mut self, number: u32, field: &[u8]) -> Result<(), Malformed> {
        let length = self.message.head.len() + field.len();
        if length > MAX_FIELD {
            return Err(TooLong(length));
        }
        // The metrics may have been written by then.
        if self.has_metrics && number < METRIC {
            return Err(NotProtobuf("a family whose name or type follows its metrics"));
        }
        self.family.merge(field).map_err(|_| NotProtobuf("a family with invalid fields"))?;
        self.message.head.extend_from_slice(field);
        let name = self.family.name();
        self.is_hidden = self.hidden.iter().any(|hidden| hidden.hides(name));
        Ok(())
    }

    fn copy_metric(
        &mut self,
        field: &[u8],
        content: &[u8],
        seen: &mut Seen,
    ) -> Result<(), Malformed> {
        self.has_metrics = true;
        match Metric::decode(content).ok().and_then(|metric| self.is_known(&metric, seen)) {
            _ if self.is_hidden => {}
            None => self.malformed += 1,
            Some(true) => self.duplicates += 1,
            Some(false) => self.message.metrics.extend_from_slice(field),
        }
        if self.message.metrics.len() >= MAX_MESSAGE {
            self.message.write(&mut self.page);
        }
        Ok(())
    }

    /// Records the series of a metric, and returns true if an earlier source has it. Returns None for a metric without a
    /// name, or whose labels are not unique or have none: Prometheus would refuse the page.
    fn is_known(&self, metric: &Metric, seen: &mut Seen) -> Option<bool> {
        let name = match self.family.r#type() {
            MetricType::Counter | MetricType::Gauge | MetricType::Untyped => {
                Cow::Borrowed(self.family.name())
            }
            // One of the series of a metric stands for all.
            _ => format!("{}_count", self.family.name()).into(),
        };
        let values: Vec<_> = metric.label.iter().map(|label| escaped(label.value())).collect();
        let labels = metric.label.iter().map(|label| label.name());
        let mut sample = Sample {
            name: &name,
            labels: labels.zip(values.iter().map(AsRef::as_ref)).collect(),
            ..Sample::default()
        };
        sample.labels.sort_unstable();
        if self.family.name().is_empty()
            || sample.labels.iter().any(|(name, _)| ["", "__name__"].contains(name))
            || sample.labels.windows(2).any(|pair| pair[0].0 == pair[1].0)
        {
            return None;
        }
        let is_known_name = seen.record_sample_name(&name);
        Some((is_known_name || seen.remembers()) && seen.record_series(&mut sample))
    }
}

/// Splits the header of a field off `bytes`, and returns its number and the length of its value.
fn decode_header(bytes: &mut &[u8]) -> Option<(u32, u64)> {
    let (number, wire_type) = decode_key(bytes).ok()?;
    let length = match wire_type {
        WireType::LengthDelimited => decode_varint(bytes).ok()?,
        WireType::Varint if number != METRIC => decode_varint(bytes).map(|_| 0).ok()?,
        // A family has no such fields.
        _ => return None,
    };
    Some((number, length))
}

/// Returns None if the rest of a number may come, else the error.
fn incomplete(may_come: bool, why: &'static str) -> Result<Option<usize>, Malformed> {
    if may_come { Ok(None) } else { Err(NotProtobuf(why)) }
}

/// Writes the value of a label as in text, because series are compared by this.
fn escaped(value: &str) -> Cow<'_, str> {
    if !value.contains(['\\', '"', '\n']) {
        return value.into();
    }
    value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n").into()
}
