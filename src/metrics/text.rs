//! Writes Prometheus' text exposition format, version 0.0.4.

use std::fmt::Write;
use std::sync::atomic::Ordering;

use super::{Buckets, Cell, Family, Kind, Series};

impl Family {
    pub(super) fn series(&self, name: &str) -> String {
        let mut text = String::new();
        match &self.series {
            Series::Cells(cells) => {
                for (values, cell) in cells.lock().iter() {
                    let values: Vec<_> = values.iter().map(String::as_str).collect();
                    if let Some(number) = cell.read(self.kind) {
                        line(&mut text, name, self.labels, &values, number);
                    }
                }
            }
            Series::Buckets(buckets) => buckets.write(&mut text, name),
            Series::Computed(collect) => collect(&mut |values, number| {
                line(&mut text, name, self.labels, values, number);
            }),
        }
        text
    }
}

fn format_number(number: f64) -> String {
    match number {
        f64::INFINITY => "+Inf".to_owned(),
        f64::NEG_INFINITY => "-Inf".to_owned(),
        number => number.to_string(),
    }
}

impl Cell {
    fn read(&self, kind: Kind) -> Option<f64> {
        let bits = self.bits.load(Ordering::Relaxed);
        match kind {
            _ if !self.is_recorded.load(Ordering::Relaxed) => None,
            Kind::Gauge => Some(f64::from_bits(bits)),
            Kind::Counter | Kind::Histogram => Some(bits as f64),
        }
    }
}

impl Buckets {
    fn write(&self, text: &mut String, name: &str) {
        let counts: Vec<_> =
            self.counts.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        let total: u64 = counts.iter().sum();
        if total == 0 {
            return;
        }
        let bounds = self.bounds.iter().copied().chain([f64::INFINITY]);
        let mut below = 0;
        for (bound, count) in bounds.zip(counts) {
            below += count;
            let bucket = format!("{name}_bucket");
            line(text, &bucket, &["le"], &[&format_number(bound)], below as f64);
        }
        let sum = f64::from_bits(self.sum.load(Ordering::Relaxed));
        for (suffix, number) in [("sum", sum), ("count", total as f64)] {
            line(text, &format!("{name}_{suffix}"), &[], &[], number);
        }
    }
}

/// Writes a sample. Source: Prometheus, "Exposition formats", text format details.
fn line(text: &mut String, name: &str, labels: &[&str], values: &[&str], number: f64) {
    text.push_str(name);
    for (index, (label, value)) in labels.iter().zip(values).enumerate() {
        let before = if index == 0 { '{' } else { ',' };
        let escaped = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        // Writing to a string does not fail, here and below.
        let _ = write!(text, "{before}{label}=\"{escaped}\"");
    }
    let end = if labels.is_empty() { "" } else { "}" };
    let _ = writeln!(text, "{end} {}", format_number(number));
}

#[cfg(test)]
mod tests {
    use crate::metrics::{Kind, Registry};

    #[test]
    fn values_of_labels_are_escaped() {
        let registry = Registry::default();
        registry.computed("a", "A.", Kind::Gauge, &["x", "y"], |series| {
            series(&["\"\\\n", "é"], -0.5);
        });
        assert!(registry.render().ends_with("a{x=\"\\\"\\\\\\n\",y=\"é\"} -0.5\n"));
    }

    #[test]
    fn buckets_count_everything_up_to_their_bound() {
        let registry = Registry::default();
        let histogram = registry.histogram("a", "A.", &[0.1, 1.0]);
        for value in [0.1, 0.5, 7.0] {
            histogram.observe(value);
        }
        assert_eq!(
            registry.render(),
            "# HELP a A.\n# TYPE a histogram\na_bucket{le=\"0.1\"} 1\na_bucket{le=\"1\"} 2\n\
             a_bucket{le=\"+Inf\"} 3\na_sum 7.6\na_count 3\n"
        );
    }

    #[test]
    fn computed_series_are_computed_for_each_scrape() {
        let registry = Registry::default();
        registry.computed("a", "A.", Kind::Gauge, &["n"], |series| {
            series(&["x"], f64::NAN);
            series(&["y"], f64::INFINITY);
        });
        assert!(registry.render().ends_with("a{n=\"x\"} NaN\na{n=\"y\"} +Inf\n"));
    }
}
