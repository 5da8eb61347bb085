//! Makes families in protobuf of the samples of a page in text or OpenMetrics.
//!
//! Prometheus has the same series of them as of the text. Only the metrics of a histogram or summary are held, until
//! their family ends, up to [`MAX_HELD`] bytes. A metric of them that protobuf cannot hold, for example a
//! histogram without `_sum`, passes as untyped series with the names and labels of the text.

use std::collections::BTreeMap;
use std::mem;

use envoy_types::pb::google::protobuf::Timestamp;
use envoy_types::pb::io::prometheus::client::{
    Bucket, Counter, Exemplar, Gauge, Histogram, LabelPair, Metric, MetricFamily, MetricType,
    Quantile, Summary, Untyped,
};
use prost::Message as _;

use super::{MAX_MESSAGE, METRIC, Message};
use crate::scrape::format::Format;
use crate::scrape::sample::{Names, Sample};

/// The size of the held metrics in text from which they are written before another metric begins. One metric that is
/// larger is written in parts.
const MAX_HELD: usize = 64 << 10;
/// The bits of Prometheus' NaN, which a sample has; other bits have a meaning there.
const NAN: u64 = 0x7ff8_0000_0000_0001;
/// 2^53. Up to it, all whole numbers are exact.
const MAX_WHOLE: f64 = 9_007_199_254_740_992.0;

type Labels = Vec<(String, String)>;

#[derive(Default)]
pub(in crate::scrape) struct Families {
    /// The family of the last HELP line, and its text.
    help: (String, String),
    /// The family of the last TYPE line, and its type.
    declared: (String, Kind),
    /// The family that is being written.
    current: (String, Kind),
    message: Message,
    /// The samples of histograms and summaries, by their labels.
    held: BTreeMap<Labels, Vec<Part>>,
    held_size: usize,
    /// The messages that are complete.
    pub page: Vec<u8>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Kind {
    Counter,
    Gauge,
    Histogram,
    Summary,
    #[default]
    Untyped,
}

/// A sample of a histogram or summary.
struct Part {
    role: Role,
    figures: Figures,
}

enum Role {
    Count,
    Sum,
    /// A bucket or quantile, with the value of its label.
    Step(String),
}

/// What a sample says of its series.
struct Figures {
    value: f64,
    time: Option<i64>,
    exemplar: Option<Exemplar>,
}

impl Families {
    /// Takes the text of a HELP or TYPE line of a family.
    pub(in crate::scrape) fn declare(&mut self, keyword: &str, name: &str, text: &str) {
        match keyword {
            "HELP" => self.help = (name.to_owned(), unescaped(text)),
            _ => {
                let kind = match text {
                    "counter" => Kind::Counter,
                    "gauge" => Kind::Gauge,
                    "histogram" => Kind::Histogram,
                    "summary" => Kind::Summary,
                    _ => Kind::Untyped,
                };
                self.declared = (name.to_owned(), kind);
            }
        }
    }

    /// Takes a sample of a page in `format`.
    pub(in crate::scrape) fn add(&mut self, sample: &Sample<'_>, format: Format) {
        let (kind, role) = self.place(sample);
        let name = if role.is_some() { &self.declared.0 } else { sample.name };
        if self.current.1 != kind || self.current.0 != name {
            let current = (name.to_owned(), kind);
            self.end_family();
            self.begin_family(current);
        }
        let figures = figures(sample.rest, format);
        let is_step = matches!(role, Some(Role::Step(_)));
        let mut labels: Labels = sample
            .labels
            .iter()
            .filter(|(name, _)| !is_step || *name != step_label(kind))
            .map(|(name, value)| ((*name).to_owned(), unescaped(value)))
            .collect();
        let Some(role) = role else {
            return self.write_metric(&single(kind, labels, figures));
        };
        labels.sort_unstable();
        // A metric whose samples still arrive stays together.
        let limit = if self.held.contains_key(&labels) { 2 * MAX_HELD } else { MAX_HELD };
        if self.held_size > limit {
            self.write_held();
        }
        self.held_size += sample.series.len() + sample.rest.len();
        self.held.entry(labels).or_default().push(Part { role, figures });
    }

    /// Writes what is held. Call it at the end of the page.
    pub(in crate::scrape) fn end_family(&mut self) {
        self.write_held();
        self.message.write(&mut self.page);
    }

    /// Returns the type that a sample's family has, and the sample's role if it is a part of a metric.
    fn place(&self, sample: &Sample<'_>) -> (Kind, Option<Role>) {
        let (name, kind) = &self.declared;
        let role = match (kind, sample.name.strip_prefix(name.as_str())) {
            (Kind::Histogram | Kind::Summary, Some("_count")) => Some(Role::Count),
            (Kind::Histogram | Kind::Summary, Some("_sum")) => Some(Role::Sum),
            (Kind::Histogram, Some("_bucket")) | (Kind::Summary, Some("")) => sample
                .labels
                .iter()
                .find(|(name, _)| *name == step_label(*kind))
                .map(|(_, value)| Role::Step(unescaped(value))),
            (Kind::Counter | Kind::Gauge, Some("")) => return (*kind, None),
            _ => None,
        };
        (if role.is_some() { *kind } else { Kind::Untyped }, role)
    }

    fn begin_family(&mut self, current: (String, Kind)) {
        let (name, kind) = &current;
        let family = MetricFamily {
            help: match &self.help {
                // In OpenMetrics, the HELP line of a counter lacks the end of the name.
                (family, help)
                    if name == family || name.strip_suffix("_total") == Some(family.as_str()) =>
                {
                    Some(help.clone())
                }
                _ => None,
            },
            name: Some(name.clone()),
            r#type: Some(i32::from(match kind {
                Kind::Counter => MetricType::Counter,
                Kind::Gauge => MetricType::Gauge,
                Kind::Histogram => MetricType::Histogram,
                Kind::Summary => MetricType::Summary,
                Kind::Untyped => MetricType::Untyped,
            })),
            ..MetricFamily::default()
        };
        self.message.head = family.encode_to_vec();
        self.current = current;
    }

    fn write_metric(&mut self, metric: &Metric) {
        prost::encoding::message::encode(METRIC, metric, &mut self.message.metrics);
        if self.message.metrics.len() >= MAX_MESSAGE {
            self.message.write(&mut self.page);
        }
    }

    fn write_held(&mut self) {
        self.held_size = 0;
        let kind = self.current.1;
        let mut loose = Vec::new();
        for (labels, parts) in mem::take(&mut self.held) {
            match assemble(kind, &parts) {
                Some(metric) => self.write_metric(&Metric { label: pairs(labels), ..metric }),
                None => loose.push((labels, parts)),
            }
        }
        self.message.write(&mut self.page);
        for (labels, parts) in loose {
            for part in parts {
                self.write_series(labels.clone(), part);
            }
        }
    }

    /// Writes a part of a metric as a family of its own.
    fn write_series(&mut self, mut labels: Labels, part: Part) {
        let (name, kind) = &self.current;
        let suffix = match part.role {
            Role::Count => "_count",
            Role::Sum => "_sum",
            Role::Step(value) => {
                labels.push((step_label(*kind).to_owned(), value));
                if *kind == Kind::Histogram { "_bucket" } else { "" }
            }
        };
        let family = MetricFamily {
            name: Some(format!("{name}{suffix}")),
            r#type: Some(MetricType::Untyped.into()),
            metric: vec![single(Kind::Untyped, labels, part.figures)],
            ..MetricFamily::default()
        };
        self.page.extend(family.encode_length_delimited_to_vec());
    }
}

/// Returns the label that tells the buckets of a histogram, or the quantiles of a summary, apart.
fn step_label(kind: Kind) -> &'static str {
    if kind == Kind::Histogram { "le" } else { "quantile" }
}

/// Makes a metric that has one sample.
fn single(kind: Kind, labels: Labels, figures: Figures) -> Metric {
    let value = Some(figures.value);
    let mut metric =
        Metric { label: pairs(labels), timestamp_ms: figures.time, ..Metric::default() };
    match kind {
        Kind::Counter => {
            let exemplar = figures.exemplar;
            metric.counter = Some(Counter { value, exemplar, created_timestamp: None });
        }
        Kind::Gauge => metric.gauge = Some(Gauge { value }),
        _ => metric.untyped = Some(Untyped { value }),
    }
    metric
}

/// Makes a metric of a histogram or summary, without its labels. Returns None if Prometheus would have other series of
/// it than of these parts.
fn assemble(kind: Kind, parts: &[Part]) -> Option<Metric> {
    let time = parts.first()?.figures.time;
    let mut count = None;
    let mut sum = None;
    let mut steps = Vec::new();
    for Part { role, figures } in parts {
        let earlier = match role {
            Role::Count => count.replace(figures.value),
            Role::Sum => sum.replace(figures.value),
            Role::Step(bound) => {
                steps.push((bound.parse::<f64>().ok()?, figures));
                None
            }
        };
        if earlier.is_some() || figures.time != time {
            return None;
        }
    }
    steps.sort_by(|one, other| one.0.total_cmp(&other.0));
    if steps.windows(2).any(|pair| pair[0].0 == pair[1].0) {
        return None;
    }
    let sample_count = Some(whole(count?)?);
    let sample_sum = Some(sum?);
    let mut metric = Metric { timestamp_ms: time, ..Metric::default() };
    if kind == Kind::Summary {
        let quantile = steps
            .iter()
            .map(|(quantile, figures)| Quantile {
                quantile: Some(*quantile),
                value: Some(figures.value),
            })
            .collect();
        metric.summary = Some(Summary { sample_count, sample_sum, quantile, ..Summary::default() });
        return Some(metric);
    }
    // Prometheus adds this bucket if it is missing.
    if steps.last()?.0 != f64::INFINITY {
        return None;
    }
    let buckets = steps.into_iter().map(|(bound, figures)| {
        Some(Bucket {
            cumulative_count: Some(whole(figures.value)?),
            upper_bound: Some(bound),
            exemplar: figures.exemplar.clone(),
            ..Bucket::default()
        })
    });
    let bucket = buckets.collect::<Option<_>>()?;
    metric.histogram = Some(Histogram { sample_count, sample_sum, bucket, ..Histogram::default() });
    Some(metric)
}

fn whole(value: f64) -> Option<u64> {
    if value.fract() != 0.0 || !(0.0..MAX_WHOLE).contains(&value) {
        return None;
    }
    // The conversion is exact.
    Some(value as u64)
}

fn pairs(labels: Labels) -> Vec<LabelPair> {
    labels
        .into_iter()
        .map(|(name, value)| LabelPair { name: Some(name), value: Some(value) })
        .collect()
}

/// Reads value, time and exemplar, which [`Sample`] has checked.
fn figures(rest: &str, format: Format) -> Figures {
    let (figures, exemplar) = match rest.split_once(" #") {
        Some((figures, exemplar)) => (figures, read_exemplar(exemplar)),
        None => (rest, None),
    };
    let (value, time) = value_and_time(figures, format);
    Figures { value, time, exemplar }
}

fn read_exemplar(text: &str) -> Option<Exemplar> {
    let line = format!("exemplar{}", text.trim_start());
    let sample = Sample::parse(&line, Format::OpenMetrics, &mut Names::default())?;
    let (value, time) = value_and_time(sample.rest, Format::OpenMetrics);
    let labels = sample.labels.iter().map(|(name, value)| ((*name).to_owned(), unescaped(value)));
    let timestamp = time.map(|milliseconds| Timestamp {
        seconds: milliseconds.div_euclid(1000),
        // It is less than a second.
        nanos: (milliseconds.rem_euclid(1000) * 1_000_000) as i32,
    });
    Some(Exemplar { label: pairs(labels.collect()), value: Some(value), timestamp })
}

/// Reads a value and a time, in milliseconds.
fn value_and_time(text: &str, format: Format) -> (f64, Option<i64>) {
    let mut words = text.split_whitespace();
    let value = words.next().and_then(|value| value.parse().ok()).unwrap_or(f64::NAN);
    let time = words.next().and_then(|time| match format {
        // Prometheus cuts off fractions of a millisecond, too.
        Format::OpenMetrics => time.parse().map(|seconds: f64| (seconds * 1000.0) as i64).ok(),
        _ => time.parse().ok(),
    });
    (if value.is_nan() { f64::from_bits(NAN) } else { value }, time)
}

/// Removes the escapes of a label's value or of a help text.
fn unescaped(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        plain.push_str(&rest[..at]);
        let escape = rest[at + 1..].chars().next();
        plain.push(match escape {
            Some('n') => '\n',
            Some(escaped @ ('"' | '\\')) => escaped,
            // Others stay as they are.
            _ => '\\',
        });
        let length = if matches!(escape, Some('n' | '"' | '\\')) { 2 } else { 1 };
        rest = &rest[at + length..];
    }
    plain + rest
}
