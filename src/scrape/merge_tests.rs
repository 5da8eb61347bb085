//! Lines in, families out.

use proptest::prelude::*;

use super::*;
use crate::scrape::page::Names;

/// Writes heads and samples down as they come; names that begin with `taken` are refused.
#[derive(Default)]
struct Written {
    to: Option<Format>,
    text: Vec<u8>,
    refused: Vec<String>,
    opened: Vec<String>,
    names: Names,
}

impl Sink for Written {
    fn open(&mut self, family: &mut Family) -> bool {
        let to = self.to.expect("a format");
        let is_new = !family.name.starts_with("taken") && self.names.take(family, to);
        if is_new {
            self.opened.push(family.name.clone());
            family.write_head(to, &mut self.text);
        } else {
            self.refused.push(family.name.clone());
        }
        is_new
    }

    fn write(&mut self, samples: &[u8]) {
        self.text.extend_from_slice(samples);
    }
}

fn merged(page: &[u8], from: Format, to: Format, is_whole: bool) -> (String, u64) {
    let mut results = Vec::new();
    // The page is the same however it is cut.
    for size in [1, 7, page.len().max(1)] {
        let mut sink = Written {
            to: Some(to),
            ..Written::default()
        };
        let mut filter = Filter::new(from, to, WINDOW);
        for piece in page.chunks(size) {
            filter.push(piece, &mut sink).expect("short lines");
        }
        filter.finish(is_whole, &mut sink);
        let text = String::from_utf8(sink.text).expect("text");
        results.push((text, filter.malformed()));
    }
    assert!(results.windows(2).all(|pair| pair[0] == pair[1]));
    results.remove(0)
}

#[test]
fn text_becomes_openmetrics_without_another_name_for_a_sample() {
    let page = "# a comment\n\n# TYPE a_total counter\n# HELP a_total A \"counter\".\na_total 1 1500\n\
                # TYPE envoy_cx counter\nenvoy_cx{a=\"b\",} 2\n# TYPE u untyped\nu 3\n\
                # TYPE h histogram\nh_bucket{le=\"+Inf\"} 1\nh_sum 1\nh_count 1\nbare 4\n";
    let expected = "# HELP a A \\\"counter\\\".\n# TYPE a counter\na_total 1 1.500\n\
                    # TYPE envoy_cx unknown\nenvoy_cx{a=\"b\"} 2\n# TYPE u unknown\nu 3\n\
                    # TYPE h histogram\nh_bucket{le=\"+Inf\"} 1\nh_sum 1\nh_count 1\nbare 4\n";
    let found = merged(page.as_bytes(), Format::Text, Format::OpenMetrics, true);
    assert_eq!(found, (expected.to_owned(), 0));
}

#[test]
fn a_counter_whose_name_in_openmetrics_is_taken_stays_as_it_is() {
    let page = "# TYPE rq counter\nrq{x=\"1\"} 1\n# TYPE rq_total counter\n# HELP rq_total All.\n\
                rq_total 2\n# TYPE rq gauge\nrq{x=\"2\"} 3\nrq_total{x=\"2\"} 4\n";
    let expected = "# TYPE rq unknown\nrq{x=\"1\"} 1\nrq{x=\"2\"} 3\n\
                    # HELP rq_total All.\n# TYPE rq_total unknown\nrq_total 2\nrq_total{x=\"2\"} 4\n";
    let found = merged(page.as_bytes(), Format::Text, Format::OpenMetrics, true);
    assert_eq!(found, (expected.to_owned(), 1));
}

#[test]
fn a_name_that_was_left_is_forgotten() {
    let mut sink = Written {
        to: Some(Format::OpenMetrics),
        ..Written::default()
    };
    let mut filter = Filter::new(Format::Text, Format::OpenMetrics, 1000);
    let page = "a 1\nb 1\nc 1\nd 1\ne 1\n# TYPE a_total counter\na_total 1\n";
    filter.push(page.as_bytes(), &mut sink).expect("short");
    filter.finish(true, &mut sink);
    assert_eq!(sink.opened, ["a", "b", "c", "d", "e", "a_total"]);
    assert!(filter.numbers.is_empty(), "{:?}", filter.numbers);
}

#[test]
fn openmetrics_becomes_text_without_what_text_has_no_place_for() {
    let page = "# TYPE a counter\n# UNIT a seconds\n# HELP a A.\na_total 1 1.5 # {t=\"x\"} 1\n\
                a_created 5\n# TYPE i info\ni_info{v=\"1\"} 1\n# TYPE g gaugehistogram\n\
                g_bucket{le=\"+Inf\"} 1\ng_gcount 1\ng_gsum 1\n# TYPE s summary\ns_count 1\n\
                s_sum 1\ns_created 5\n# EOF\nlate 1\n";
    let expected = "# HELP a_total A.\n# TYPE a_total counter\na_total 1 1500\n\
                    # TYPE i_info gauge\ni_info{v=\"1\"} 1\ng_bucket{le=\"+Inf\"} 1\n\
                    g_gcount 1\ng_gsum 1\n# TYPE s summary\ns_count 1\ns_sum 1\n";
    let found = merged(page.as_bytes(), Format::OpenMetrics, Format::Text, true);
    assert_eq!(found, (expected.to_owned(), 0));
}

#[test]
fn a_family_in_pieces_comes_out_in_one() {
    let page = "# TYPE a gauge\n# TYPE h histogram\na{x=\"1\"} 1\nb 1\nh_bucket{le=\"+Inf\"} 1\n\
                a{x=\"2\"} 2\nh_count 1\nb{x=\"1\"} 2\nh_sum 1\n";
    let expected = "# TYPE a gauge\na{x=\"1\"} 1\na{x=\"2\"} 2\n# TYPE h histogram\n\
                    h_bucket{le=\"+Inf\"} 1\nh_count 1\nh_sum 1\nb 1\nb{x=\"1\"} 2\n";
    let found = merged(page.as_bytes(), Format::Text, Format::Text, true);
    assert_eq!(found, (expected.to_owned(), 0));
}

#[test]
fn what_is_no_line_is_left_out_and_counted() {
    let page = b"a 1\n\x00\xff\xfe\n<html>\nb{ 2\n# TYPE c nonsense\nc 3\n# TYPE c gauge\nd 4";
    for (is_whole, last, lines) in [(true, "d 4\n", 5), (false, "", 6)] {
        let found = merged(page, Format::Text, Format::Text, is_whole);
        assert_eq!(found, (format!("a 1\nc 3\n{last}"), lines));
    }
}

#[test]
fn a_line_without_an_end_cuts_the_source_off() {
    let mut sink = Written {
        to: Some(Format::Text),
        ..Written::default()
    };
    let mut filter = Filter::new(Format::Text, Format::Text, WINDOW);
    assert_eq!(filter.push(b"a 1\n", &mut sink), Ok(()));
    assert_eq!(filter.push(&[b'x'; LONGEST_LINE], &mut sink), Ok(()));
    assert_eq!(filter.push(b"x", &mut sink), Err(LineTooLong));
    filter.finish(false, &mut sink);
    assert_eq!(sink.text, b"a 1\n");
}

#[test]
fn a_family_larger_than_the_window_passes_through_it() {
    let mut sink = Written {
        to: Some(Format::Text),
        ..Written::default()
    };
    let mut filter = Filter::new(Format::Text, Format::Text, WINDOW);
    let mut expected = 0;
    for number in 0..100_000 {
        let line = format!("big{{n=\"{number}\"}} 1\n");
        expected += line.len();
        filter.push(line.as_bytes(), &mut sink).expect("short");
        assert!(filter.held <= WINDOW && expected - sink.text.len() <= WINDOW);
    }
    filter.push(b"next 1\n", &mut sink).expect("short");
    filter.push(b"taken 1\nbig 2\n", &mut sink).expect("short");
    filter.finish(true, &mut sink);
    assert_eq!(sink.opened, ["big", "next"]);
    assert_eq!(sink.refused, ["taken"]);
    // The last line found its family still in the window.
    assert_eq!(sink.text.len(), expected + "big 2\nnext 1\n".len());
}

#[test]
fn a_family_that_comes_back_after_it_has_left_is_refused_once() {
    let mut sink = Written {
        to: Some(Format::Text),
        ..Written::default()
    };
    let mut filter = Filter::new(Format::Text, Format::Text, WINDOW);
    filter.push(b"a 1\n", &mut sink).expect("short");
    let line = format!("b{{x=\"{}\"}} 1\n", "y".repeat(1000));
    for _ in 0..=WINDOW / 1000 {
        filter.push(line.as_bytes(), &mut sink).expect("short");
    }
    filter.push(b"a 2\na 3\n", &mut sink).expect("short");
    filter.finish(true, &mut sink);
    assert_eq!(sink.opened, ["a", "b"]);
    assert_eq!(sink.refused, ["a"]);
}

#[test]
fn metadata_alone_fills_no_memory() {
    let mut sink = Written {
        to: Some(Format::Text),
        ..Written::default()
    };
    let mut filter = Filter::new(Format::Text, Format::Text, WINDOW);
    for number in 0..20_000 {
        let line = format!("# HELP a{number} {}\n", "x".repeat(100));
        filter.push(line.as_bytes(), &mut sink).expect("short");
        assert!(filter.held <= WINDOW && filter.blocks.len() < 1000);
    }
    filter.finish(true, &mut sink);
    assert!(sink.text.is_empty() && filter.numbers.is_empty() && filter.held == 0);
}

/// Pages of lines that nearly are some.
fn pages() -> impl Strategy<Value = String> {
    let part = prop::sample::select(vec![
        "a",
        "a_total",
        "b",
        "b_bucket",
        "b_count",
        "{",
        "}",
        "le=\"1\"",
        "x=\"\\\"\"",
        ",",
        " ",
        "1",
        "NaN",
        "1.5",
        "-7",
        "\n",
        "\n",
        "\n",
        "\n# TYPE ",
        "\n# HELP ",
        "# UNIT ",
        "# EOF",
        " counter",
        " gauge",
        " histogram",
        " summary",
        " info",
        " # {x=\"y\"} 1",
        "\"",
        "\\",
        "é",
        "\na 1\n",
        "\nb_bucket{le=\"1\"} 2\n",
        "\n# TYPE a counter\n",
        "\na_total 5 7\n",
    ]);
    prop::collection::vec(part, 0..60).prop_map(|parts| parts.concat())
}

proptest! {
    #[test]
    fn what_comes_out_is_good_whatever_goes_in(page in pages(), is_whole: bool) {
        use Format::{OpenMetrics, Text};
        for (from, to) in [(Text, Text), (Text, OpenMetrics), (OpenMetrics, Text), (OpenMetrics, OpenMetrics)] {
            let (once, _) = merged(page.as_bytes(), from, to, is_whole);
            let again = merged(once.as_bytes(), to, to, true);
            prop_assert_eq!(again, (once, 0));
        }
    }

    #[test]
    fn bytes_of_any_kind_do_no_harm(page: Vec<u8>) {
        merged(&page, Format::Text, Format::OpenMetrics, true);
        merged(&page, Format::OpenMetrics, Format::Text, false);
    }
}
