//! Writes pages in protobuf: delimited messages `io.prometheus.client.MetricFamily`
//! (`io/prometheus/client/metrics.proto` of `prometheus/client_model`).
//!
//! [`Families`] makes families of the samples of a page in text. [`Copier`] copies the families of a page that is in
//! protobuf already. Neither holds a page: a family is written as several messages of at most about [`MAX_MESSAGE`]
//! bytes, which Prometheus reads as one.

mod copier;
mod families;

pub(super) use copier::{Copier, Malformed};
pub(super) use families::Families;

use prost::encoding::encode_varint;

/// The size at which a message is written, in bytes.
const MAX_MESSAGE: usize = 64 << 10;
/// The number of the field `metric` of a family.
const METRIC: u32 = 4;

/// A family that is being written.
#[derive(Default)]
struct Message {
    /// All fields but the metrics.
    head: Vec<u8>,
    metrics: Vec<u8>,
}

impl Message {
    /// Appends the message to the page if it has metrics, and begins the next one of the same family.
    fn write(&mut self, page: &mut Vec<u8>) {
        if !self.metrics.is_empty() {
            encode_varint((self.head.len() + self.metrics.len()) as u64, page);
            page.extend_from_slice(&self.head);
            page.append(&mut self.metrics);
        }
    }
}

#[cfg(test)]
mod tests;
