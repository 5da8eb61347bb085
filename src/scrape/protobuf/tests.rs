use envoy_types::pb::io::prometheus::client::{
    Bucket, Counter, Gauge, Histogram, LabelPair, Metric, MetricFamily, MetricType, Summary,
};
use proptest::prelude::*;
use prost::Message as _;
use prost::encoding::encode_varint;

use super::*;
use crate::scrape::format::Format;
use crate::scrape::lines::{Hidden, Lines};
use crate::scrape::output::Output;
use crate::scrape::seen::Seen;

/// Decodes a page.
fn families(mut page: &[u8]) -> Vec<MetricFamily> {
    let mut families = Vec::new();
    while !page.is_empty() {
        families.push(MetricFamily::decode_length_delimited(&mut page).expect("a family"));
    }
    families
}

/// Returns the series that Prometheus has of a page, with value and time, in its notation.
fn series(page: &[u8]) -> Vec<String> {
    let mut series = Vec::new();
    for family in families(page) {
        let kind = family.r#type();
        for metric in &family.metric {
            let mut add = |suffix: &str, step: Option<(&str, f64)>, value: f64| {
                let mut labels: Vec<_> = metric
                    .label
                    .iter()
                    .map(|label| format!("{}={:?}", label.name(), label.value()))
                    .chain(step.map(|(name, bound)| format!("{name}={:?}", bound.to_string())))
                    .collect();
                labels.sort();
                let time = metric.timestamp_ms.map_or(String::new(), |time| format!(" {time}"));
                let (name, labels) = (family.name(), labels.join(","));
                series.push(format!("{name}{suffix}{{{labels}}} {value}{time}"));
            };
            match kind {
                MetricType::Counter => add("", None, metric.counter.as_ref().unwrap().value()),
                MetricType::Gauge => add("", None, metric.gauge.as_ref().unwrap().value()),
                MetricType::Untyped => add("", None, metric.untyped.as_ref().unwrap().value()),
                MetricType::Summary => {
                    let summary = metric.summary.as_ref().unwrap();
                    add("_count", None, summary.sample_count() as f64);
                    add("_sum", None, summary.sample_sum());
                    for step in &summary.quantile {
                        add("", Some(("quantile", step.quantile())), step.value());
                    }
                }
                MetricType::Histogram | MetricType::GaugeHistogram => {
                    let histogram = metric.histogram.as_ref().unwrap();
                    add("_count", None, histogram.sample_count() as f64);
                    add("_sum", None, histogram.sample_sum());
                    for step in &histogram.bucket {
                        let le = ("le", step.upper_bound());
                        add("_bucket", Some(le), step.cumulative_count() as f64);
                    }
                }
            }
        }
    }
    series
}

/// Converts a page in chunks of this size.
fn convert(text: &[u8], format: Format, chunk: usize) -> Vec<u8> {
    let (mut seen, mut output) = (Seen::default(), Output::new(false));
    let mut lines = Lines::new(format, Format::Protobuf, Vec::new());
    for chunk in text.chunks(chunk) {
        lines.push(chunk, &mut seen, &mut output);
    }
    lines.finish(true, &mut seen, &mut output);
    output.finish().expect("a page").to_vec()
}

#[test]
fn families_have_the_series_of_the_text() {
    use Format::{OpenMetrics, Text};
    let regular =
        "# TYPE h histogram\nh_bucket{le=\"1\"} 1\nh_bucket{le=\"+Inf\"} 2\nh_sum 3.5\nh_count 2\n";
    let is_regular =
        "histogram h_count{} 2,h_sum{} 3.5,h_bucket{le=\"1\"} 1,h_bucket{le=\"inf\"} 2";
    for (format, text, expected) in [
        (Text, "", vec![]),
        (Text, "a 1\n", vec!["untyped a{} 1"]),
        (
            Text,
            "# TYPE a counter\na{x=\"1\"} 1 77\na{x=\"2\"} 2\n",
            vec!["counter a{x=\"1\"} 1 77,a{x=\"2\"} 2"],
        ),
        (Text, "# TYPE a gauge\nb 1\na NaN\n", vec!["untyped b{} 1", "gauge a{} NaN"]),
        (Text, "a{x=\"q\\\"\\\\\\n\\w\"} -Inf\n", vec!["untyped a{x=\"q\\\"\\\\\\n\\\\w\"} -inf"]),
        (Text, "# TYPE a counter\nnot a sample {\na 1\n", vec!["counter a{} 1"]),
        (Text, regular, vec![is_regular]),
        (OpenMetrics, regular, vec![is_regular]),
        // Some libraries write all sums before all buckets.
        (
            Text,
            "# TYPE s summary\ns_sum{x=\"1\"} 1\ns_sum{x=\"2\"} 2\ns_count{x=\"1\"} 3\ns{x=\"1\",quantile=\"0.5\"} 7\ns_count{x=\"2\"} 4\n",
            vec![
                "summary s_count{x=\"1\"} 3,s_sum{x=\"1\"} 1,s{quantile=\"0.5\",x=\"1\"} 7,s_count{x=\"2\"} 4,s_sum{x=\"2\"} 2",
            ],
        ),
        // Protobuf cannot hold these.
        (
            Text,
            "# TYPE h histogram\nh_bucket{le=\"+Inf\"} 2\nh_count 2\n",
            vec!["untyped h_bucket{le=\"+Inf\"} 2", "untyped h_count{} 2"],
        ),
        (
            Text,
            "# TYPE h histogram\nh_bucket{le=\"1\"} 2\nh_count 2\nh_sum 2\n",
            vec!["untyped h_bucket{le=\"1\"} 2", "untyped h_count{} 2", "untyped h_sum{} 2"],
        ),
        (
            Text,
            "# TYPE s summary\ns_count 1.5\ns_sum 2\n",
            vec!["untyped s_count{} 1.5", "untyped s_sum{} 2"],
        ),
        (
            Text,
            "# TYPE s summary\ns_count 1 5\ns_sum 2 6\n",
            vec!["untyped s_count{} 1 5", "untyped s_sum{} 2 6"],
        ),
        (
            Text,
            "# TYPE s summary\ns_count 1\ns_count 1\ns_sum 2\n",
            vec!["untyped s_count{} 1", "untyped s_count{} 1", "untyped s_sum{} 2"],
        ),
        (
            Text,
            "# TYPE h histogram\nh 1\nh_bucket 1\nh_max 1\n",
            vec!["untyped h{} 1", "untyped h_bucket{} 1", "untyped h_max{} 1"],
        ),
        // A family that is interrupted.
        (
            Text,
            "# TYPE s summary\ns_count 1\na 1\ns_sum 2\n",
            vec!["untyped s_count{} 1", "untyped a{} 1", "untyped s_sum{} 2"],
        ),
        (
            OpenMetrics,
            "# TYPE a counter\n# UNIT a seconds\na_total 1 1.5\na_created 7\n# TYPE i info\ni_info{v=\"1\"} 1\n# TYPE g gaugehistogram\ng_gcount 1\n# EOF\n",
            vec![
                "counter a_total{} 1 1500",
                "untyped a_created{} 7",
                "untyped i_info{v=\"1\"} 1",
                "untyped g_gcount{} 1",
            ],
        ),
    ] {
        for chunk in [1, 7, 4096] {
            let page = convert(text.as_bytes(), format, chunk);
            let found = families(&page).into_iter().map(|family| {
                let kind = family.r#type().as_str_name().to_lowercase();
                format!("{kind} {}", series(&family.encode_length_delimited_to_vec()).join(","))
            });
            assert_eq!(found.collect::<Vec<_>>(), expected, "{text}");
        }
    }
}

#[test]
fn help_and_exemplars_stay() {
    let text = "# HELP a A \\\\ \\n.\n# TYPE a counter\na_total 1 # {id=\"x\"} 0.5 1.25\n\
                # TYPE h histogram\nh_bucket{le=\"+Inf\"} 1 # {id=\"y\"} 2\nh_sum 1\nh_count 1\n# EOF\n";
    let found = families(&convert(text.as_bytes(), Format::OpenMetrics, 100));
    assert_eq!(found[0].help(), "A \\ \n.");
    let counter = found[0].metric[0].counter.as_ref().unwrap();
    let exemplar = counter.exemplar.as_ref().unwrap();
    let time = exemplar.timestamp.unwrap();
    assert_eq!((exemplar.value(), time.seconds, time.nanos), (0.5, 1, 250_000_000));
    assert_eq!(exemplar.label[0].value(), "x");
    let histogram = found[1].metric[0].histogram.as_ref().unwrap();
    assert_eq!(histogram.bucket[0].exemplar.as_ref().unwrap().value(), 2.0);
    assert_eq!(found[1].help, None);
}

#[test]
fn a_large_family_is_written_in_parts_without_holding_a_histogram() {
    let gauges: String = (0..20_000).map(|n| format!("a{{n=\"{n}\"}} {n}\n")).collect();
    let gauges = convert(format!("# TYPE a gauge\n{gauges}").as_bytes(), Format::Text, 4096);
    assert_eq!(series(&gauges).len(), 20_000);
    let sizes = families(&gauges).into_iter().map(|family| family.encoded_len());
    assert!(sizes.max().unwrap() < MAX_MESSAGE + 4096);
    let sums = (0..50_000).map(|n| format!("s_sum{{n=\"{n:050}\"}} {n}\n"));
    let counts = (0..50_000).map(|n| format!("s_count{{n=\"{n:050}\"}} {n}\n"));
    let summaries: String =
        ["# TYPE s summary\n".to_owned()].into_iter().chain(sums).chain(counts).collect();
    assert_eq!(series(&convert(summaries.as_bytes(), Format::Text, 4096)).len(), 100_000);
    let histograms = (0..10_000).map(|n| {
        format!(
            "h_bucket{{n=\"{n}\",le=\"+Inf\"}} 1\nh_sum{{n=\"{n}\"}} 1\nh_count{{n=\"{n}\"}} 1\n"
        )
    });
    let histograms: String =
        ["# TYPE h histogram\n".to_owned()].into_iter().chain(histograms).collect();
    let page = convert(histograms.as_bytes(), Format::Text, 4096);
    assert_eq!(series(&page).len(), 30_000);
    assert!(families(&page).iter().all(|family| family.r#type() == MetricType::Histogram));
}

proptest! {
    #[test]
    fn any_lines_are_converted_to_a_readable_page(
        lines in proptest::collection::vec(
            prop_oneof![
                "# (TYPE|HELP) [ah]{1,2}(_sum)? (histogram|summary|counter|gauge|x)",
                "h(_bucket|_sum|_count|_total)?(\\{(le|quantile)=\"(1|\\+Inf|x|1.0)\"\\})? (1|2.5|-1|NaN|\\+Inf|1e300)( 5)?",
                "h(_bucket|_total)?(\\{le=\"\\+Inf\"\\})? 1 # \\{[a-b]=\"[^\\\\\"\n]{0,3}\"\\} [0-9.]{1,3}",
                ".{0,20}",
            ],
            0..12,
        ),
        is_openmetrics: bool,
        chunk in 1_usize..200,
    ) {
        let format = if is_openmetrics { Format::OpenMetrics } else { Format::Text };
        let text = lines.join("\n") + "\n";
        let mut output = Output::new(false);
        let mut same = Lines::new(format, format, Vec::new());
        same.push(text.as_bytes(), &mut Seen::default(), &mut output);
        same.finish(true, &mut Seen::default(), &mut output);
        let samples = output.finish().expect("a page");
        let samples = samples.split(|byte| *byte == b'\n');
        let samples = samples.filter(|line| !line.starts_with(b"#") && !line.trim_ascii().is_empty()).count();
        prop_assert_eq!(series(&convert(text.as_bytes(), format, chunk)).len(), samples);
    }
}

fn label(name: &str, value: &str) -> LabelPair {
    LabelPair { name: Some(name.to_owned()), value: Some(value.to_owned()) }
}

fn gauge(labels: &[(&str, &str)], value: f64) -> Metric {
    let label = labels.iter().map(|(name, value)| label(name, value)).collect();
    Metric { label, gauge: Some(Gauge { value: Some(value) }), ..Metric::default() }
}

fn family(name: &str, kind: MetricType, metric: Vec<Metric>) -> MetricFamily {
    MetricFamily {
        name: Some(name.to_owned()),
        help: Some("Help.".to_owned()),
        r#type: Some(kind.into()),
        metric,
        ..MetricFamily::default()
    }
}

fn page(families: &[MetricFamily]) -> Vec<u8> {
    families.iter().flat_map(|family| family.encode_length_delimited_to_vec()).collect()
}

/// Copies a page in chunks of this size. Returns the copy, the error, and the numbers of duplicate and malformed metrics.
fn copy(page: &[u8], chunk: usize, seen: &mut Seen) -> (Vec<u8>, Option<String>, u64, u64) {
    let mut output = Output::new(false);
    let mut copier = Copier::new(vec![Hidden { start: "hidden_", end: "_x" }]);
    let mut read = page.chunks(chunk).try_for_each(|chunk| copier.push(chunk, seen, &mut output));
    let finished = copier.finish(&mut output);
    read = read.and(finished);
    let copy = output.finish().expect("a page").to_vec();
    (copy, read.err().map(|error| error.to_string()), copier.duplicates, copier.malformed)
}

#[test]
fn a_page_is_copied_byte_by_byte() {
    let native = Histogram { schema: Some(3), positive_delta: vec![1, -1], ..Histogram::default() };
    let mut with_unit = family("u", MetricType::Gauge, vec![gauge(&[("x", "\u{e9}\n")], 1.0)]);
    with_unit.unit = Some("bytes".to_owned());
    let original = page(&[
        family("a", MetricType::Gauge, vec![gauge(&[], f64::NAN), gauge(&[("x", "1")], 2.0)]),
        family(
            "n",
            MetricType::Histogram,
            vec![Metric { histogram: Some(native), ..Metric::default() }],
        ),
    ]);
    for chunk in [1, 2, 10, 4096] {
        let (copied, error, ..) = copy(&original, chunk, &mut Seen::default());
        assert_eq!(error, None);
        assert!(copied.iter().eq(original.iter()), "{chunk}");
        let (copied, ..) =
            copy(&page(std::slice::from_ref(&with_unit)), chunk, &mut Seen::default());
        assert_eq!(families(&copied), [with_unit.clone()]);
    }
}

#[test]
fn hidden_families_series_of_earlier_sources_and_malformed_metrics_are_left_out() {
    let mut seen = Seen::default();
    let histogram = Histogram { bucket: vec![Bucket::default()], ..Histogram::default() };
    let histogram = Metric { histogram: Some(histogram), ..Metric::default() };
    let summary = Metric { summary: Some(Summary::default()), ..Metric::default() };
    let counter = Metric { counter: Some(Counter::default()), ..Metric::default() };
    let later = page(&[
        family("hidden_x", MetricType::Gauge, vec![gauge(&[], 1.0)]),
        family(
            "g",
            MetricType::Gauge,
            vec![gauge(&[("x", "a\\\"\n")], 1.0), gauge(&[("x", "b")], 1.0)],
        ),
        family("h", MetricType::Histogram, vec![histogram]),
        family("s", MetricType::Summary, vec![summary]),
        family("c", MetricType::Counter, vec![counter]),
        family(
            "bad",
            MetricType::Gauge,
            vec![
                gauge(&[("x", "1"), ("x", "2")], 1.0),
                gauge(&[("", "")], 1.0),
                gauge(&[("__name__", "")], 1.0),
            ],
        ),
        family("", MetricType::Gauge, vec![gauge(&[], 1.0)]),
        family("last", MetricType::Gauge, vec![gauge(&[], 1.0)]),
    ]);
    seen.begin_source(false);
    let mut lines = Lines::new(Format::Text, Format::Protobuf, Vec::new());
    let earlier = "g{x=\"a\\\\\\\"\\n\"} 7\nh_count 1\ns_count 1\nc 1\n";
    lines.push(earlier.as_bytes(), &mut seen, &mut Output::new(false));
    seen.begin_source(true);
    let (copied, error, duplicates, malformed) = copy(&later, 100, &mut seen);
    assert_eq!((error, duplicates, malformed), (None, 4, 4));
    assert_eq!(series(&copied), ["g{x=\"b\"} 1", "last{} 1"]);
}

#[test]
fn a_hostile_page_is_cut_and_its_complete_metrics_stay() {
    let good = family("good", MetricType::Gauge, vec![gauge(&[], 1.0)]);
    let metric_field = |content: &[u8]| {
        let mut metric = vec![0x22];
        encode_varint(content.len() as u64, &mut metric);
        [&metric, content].concat()
    };
    let message = |content: &[u8]| {
        let mut message = Vec::new();
        encode_varint(content.len() as u64, &mut message);
        [&message, content].concat()
    };
    let head = family("bad", MetricType::Gauge, Vec::new()).encode_to_vec();
    // Empty labels are the densest.
    let labels = gauge(&[("", ""); 1_000_000], 1.0).encode_to_vec();
    let nested = vec![0x0b; 50_000];
    let long_help = MetricFamily { help: Some("x".repeat(1 << 20)), ..good.clone() };
    let metric = metric_field(&gauge(&[("x", "y")], 1.0).encode_to_vec());
    let not_ordered = [metric, head.clone()].concat();
    let good_page = page(std::slice::from_ref(&good));
    for (what, bad, expected, left) in [
        ("nothing", vec![], None, 0),
        (
            "a million labels",
            message(&[head.clone(), metric_field(&labels)].concat()),
            Some("a metric, or the head"),
            0,
        ),
        (
            "a message over 1 MiB of one field",
            message(&[&head[..], &metric_field(&vec![0; 1 << 20])].concat()),
            Some("a metric, or the head"),
            0,
        ),
        ("a long help text", page(&[long_help]), Some("a metric, or the head"), 0),
        (
            "deep nesting in a metric",
            message(&[&head[..], &metric_field(&nested)].concat()),
            None,
            0,
        ),
        ("deep nesting in a family", message(&nested), Some("without a valid tag"), 0),
        (
            "a length that lies",
            [&[good_page[0] - 1][..], &good_page[1..]].concat(),
            Some("longer than its message"),
            0,
        ),
        (
            "a field that lies",
            message(&[&head[..], &[0x22, 99]].concat()),
            Some("longer than its message"),
            0,
        ),
        ("a page cut off", good_page[..good_page.len() - 1].to_vec(), Some("ends inside"), 0),
        (
            "a page cut off after a metric",
            [vec![90], good.encode_to_vec()].concat(),
            Some("ends inside"),
            1,
        ),
        ("a length without an end", vec![0xff; 11], Some("a valid length"), 0),
        ("metrics before name and type", message(&not_ordered), Some("follows its metrics"), 0),
        ("no UTF-8", message(&[0x0a, 1, 0xff]), Some("invalid fields"), 0),
    ] {
        let page = [good_page.clone(), bad].concat();
        for chunk in [1000, 1 << 20] {
            let (copied, error, ..) = copy(&page, chunk, &mut Seen::default());
            match (&error, expected) {
                (Some(error), Some(expected)) => {
                    assert!(error.contains(expected), "{what}: {error}")
                }
                _ => assert_eq!(error.as_deref(), expected, "{what}"),
            }
            assert_eq!(series(&copied).len(), 1 + left, "{what}");
        }
    }
}

proptest! {
    #[test]
    fn any_bytes_are_copied_to_a_readable_page(
        bytes in proptest::collection::vec(any::<u8>(), 0..300),
        at in 0_usize..300,
        chunk in 1_usize..100,
    ) {
        let good = family("a", MetricType::Gauge, vec![gauge(&[("x", "1")], 1.0), gauge(&[("x", "2")], 2.0)]);
        let mut mutated = page(&[good.clone(), good]);
        let at = at.min(mutated.len());
        mutated.splice(at..(at + bytes.len() / 20).min(mutated.len()), bytes.iter().copied().take(bytes.len() / 10));
        for page in [mutated, bytes] {
            let (copied, ..) = copy(&page, chunk, &mut Seen::default());
            families(&copied);
        }
    }
}
