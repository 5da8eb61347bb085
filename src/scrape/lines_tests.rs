//! Tests how the lines of sources become the lines of a merged page.

#[path = "lines_kinds_tests.rs"]
mod kinds;

use proptest::prelude::*;

use super::Format::{OpenMetrics, Text};
use super::*;

/// The numbers of lines that were left out of a page: identical series, and malformed lines.
type LeftOut = (u64, u64);

/// Merges the pages of several sources, each of which arrives in chunks of `size` bytes.
fn merged_in(
    size: usize,
    pages: &[(Format, &[u8])],
    to: Format,
    is_whole: bool,
) -> (Vec<u8>, LeftOut) {
    let (mut seen, mut output) = (Seen::default(), Output::new(false));
    let hidden = vec![Hidden { start: "hidden_", end: "_active" }];
    let (mut merged, mut left_out) = (Vec::new(), (0, 0));
    for (index, (from, page)) in pages.iter().enumerate() {
        seen.begin_source(index + 1 == pages.len());
        let mut lines = Lines::new(*from, to, hidden.clone());
        for chunk in page.chunks(size) {
            lines.push(chunk, &mut seen, &mut output);
            merged.extend(output.take_ready().into_iter().flatten());
        }
        lines.finish(is_whole, &mut seen, &mut output);
        left_out.0 += lines.duplicates;
        left_out.1 += lines.malformed;
    }
    merged.extend(output.finish().expect("a page"));
    (merged, left_out)
}

/// Merges pages in chunks of several sizes, and checks that the results do not differ.
fn merged(pages: &[(Format, &[u8])], to: Format, is_whole: bool) -> (String, LeftOut) {
    let whole = merged_in(usize::MAX, pages, to, is_whole);
    for size in [1, 7] {
        assert_eq!(merged_in(size, pages, to, is_whole), whole);
    }
    (String::from_utf8(whole.0).expect("text"), whole.1)
}

fn texts<'p>(pages: &[&'p str]) -> Vec<(Format, &'p [u8])> {
    pages.iter().map(|page| (Text, page.as_bytes())).collect()
}

#[test]
fn valid_lines_of_the_text_format_pass_unchanged() {
    let page = "# a comment\n\n#\n# HELP a  C:\\dir \"x\"\n# TYPE a gauge\na{x=\"}\\\"\\\\ # é\", } 1e3  15\t\n\
                a { y = \"1\" }\t+Inf\n# UNIT a s\nb NaN\nb -0x\nb_bucket{le=\"+Inf\"} 1\nb 1\n\
                {\"c.d\",\"e f\"=\"g\"} 0.5\n# TYPE \"c.d\" untyped\n# TYPE late counter\nlate 0\nlast 1";
    let dropped = page.replace("b -0x\n", "");
    let expected = dropped.replace("# TYPE \"c.d\" untyped\n", "") + "\n";
    assert_eq!(merged(&texts(&[page]), Text, true), (expected, (0, 1)));
}

#[test]
fn metadata_after_samples_of_its_family_is_left_out() {
    let bare = "late 1\nlate{a=\"b\"} 2\n";
    let histogram = "h_bucket{le=\"+Inf\"} 1\nh_sum 1\nh_count 1\n";
    let typed = format!("{histogram}# TYPE h histogram\n");
    for (from, to, page, expected) in [
        (Text, Text, "late 1\n# HELP late L.\n# TYPE late gauge\nlate{a=\"b\"} 2\n", bare),
        (
            OpenMetrics,
            OpenMetrics,
            "late_s 1\n# UNIT late_s s\nlate_s{a=\"b\"} 2\n",
            "late_s 1\nlate_s{a=\"b\"} 2\n",
        ),
        (Text, OpenMetrics, "late_total 1\n# TYPE late_total counter\n", "late_total 1\n"),
        (OpenMetrics, Text, "late_total 1\n# TYPE late counter\n", "late_total 1\n"),
        (OpenMetrics, OpenMetrics, "late_total 1\n# TYPE late counter\n", "late_total 1\n"),
        (Text, Text, "{\"l.e\"} 1\n# TYPE \"l.e\" gauge\n", "{\"l.e\"} 1\n"),
        (Text, Text, &typed, &typed),
        (Text, OpenMetrics, &typed, histogram),
        (
            OpenMetrics,
            OpenMetrics,
            "late_total 1\n# HELP late L.\n# TYPE late counter\nlate_total{a=\"b\"} 2\n",
            "late_total 1\nlate_total{a=\"b\"} 2\n",
        ),
        // The names of a histogram's samples are not families any more.
        (
            Text,
            Text,
            "# HELP h H.\n# TYPE h histogram\n# HELP h_sum S.\n# TYPE h_count counter\nh_count 1\n",
            "# HELP h H.\n# TYPE h histogram\nh_count 1\n",
        ),
        // A sample of another family is no reason.
        (Text, OpenMetrics, "a_count 1\n# TYPE a gauge\na 1\n", "a_count 1\n# TYPE a gauge\na 1\n"),
    ] {
        let found = merged(&[(from, page.as_bytes())], to, true);
        assert_eq!(found, (expected.to_owned(), (0, 0)), "{from:?} to {to:?}");
    }
}

#[test]
fn a_malformed_sample_does_not_affect_later_samples_of_its_name() {
    let pages = ["a 1\n", "hidden_x_active 1\nb one\nb 1\nc 1\na one\na 2\n", "b 2\n"];
    let expected = "a 1\nb 1\nc 1\n".to_owned();
    assert_eq!(merged(&texts(&pages), Text, true), (expected, (2, 2)));
}

#[test]
fn a_family_is_declared_once_and_keeps_its_samples() {
    let pages = [
        "# HELP a First.\n# TYPE a counter\na{x=\"1\"} 1\nbare 1\n",
        "# TYPE a gauge\n# HELP a Second.\na{x=\"2\"} 2\n# TYPE bare gauge\nbare{x=\"1\"} 1\n\
         # TYPE b gauge\nb 1\n",
        "# HELP b Too.\n# TYPE b gauge\nb{x=\"1\"} 1\n# TYPE b gauge\nb{x=\"2\"} 1\n",
    ];
    let expected = "# HELP a First.\n# TYPE a counter\na{x=\"1\"} 1\nbare 1\na{x=\"2\"} 2\n\
                    bare{x=\"1\"} 1\n# TYPE b gauge\nb 1\nb{x=\"1\"} 1\nb{x=\"2\"} 1\n";
    assert_eq!(merged(&texts(&pages), Text, true), (expected.to_owned(), (0, 0)));
}

#[test]
fn identical_series_of_a_later_source_are_left_out() {
    for (first, later, expected) in [
        ("a 1\n", "a 2\n", ""),
        ("a 1\n", "a{} 2\n", ""),
        ("a{x=\"1\",y=\"2\"} 1\n", "a { y = \"2\" , x=\"1\", } 2 3\n", ""),
        ("a{x=\"1\"} 1\n", "a{x=\"2\"} 2\n", "a{x=\"2\"} 2\n"),
        ("a{x=\"1\"} 1\n", "a{y=\"1\"} 2\n", "a{y=\"1\"} 2\n"),
        ("a{x=\"1\"} 1\n", "b{x=\"1\"} 2\n", "b{x=\"1\"} 2\n"),
        ("a{x=\"1\",y=\"2\"} 1\n", "a{x=\"1,y=2\"} 2\n", "a{x=\"1,y=2\"} 2\n"),
        ("{\"a.b\",x=\"1\"} 1\n", "{\"a.b\",x=\"1\"} 2\n", ""),
        // A source may have several samples of one series.
        ("b 1\n", "a 1 1000\na 2 2000\n", "a 1 1000\na 2 2000\n"),
    ] {
        let duplicates = u64::from(expected.is_empty());
        let expected = format!("{first}{expected}");
        let found = merged(&texts(&[first, later]), Text, true);
        assert_eq!(found, (expected, (duplicates, 0)), "{later}");
        // Another source between the two does not change the result.
        let found = merged(&texts(&[first, "other 1\n", later]), Text, true);
        assert_eq!(found.1, (duplicates, 0), "{later}");
    }
}

#[test]
fn a_registry_concatenated_twice_keeps_all_samples() {
    let registry = "# HELP a A.\n# TYPE a counter\na{x=\"1\"} 1\n# TYPE b gauge\nb 2\n";
    let expected = format!("{registry}a{{x=\"1\"}} 1\nb 2\n");
    let found = merged(&texts(&[&registry.repeat(2)]), Text, true);
    assert_eq!(found, (expected, (0, 0)));
}

#[test]
fn malformed_lines_are_left_out_and_counted() {
    for line in [
        &b"a"[..],
        b"a ",
        b"1a 1",
        b"a one",
        b"a 1 2 3",
        b"a 1 soon",
        b"a{x=\"1\"",
        b"a{x=\"1\"}",
        b"{} ",
        b"{x",
        b"a\x00 1",
        b"a{x=\"\xff\"} 1",
        b"<html>",
        b"Not Found",
        b"# TYPE a nonsense",
        b"# TYPE",
        b"# HELP",
        b"# TYPE \"a gauge",
        b"# HELP \xff x",
    ] {
        let page = [b"good 1\n", line, b"\nalso 2\n"].concat();
        let found = merged(&[(Text, &page)], Text, true);
        let expected = ("good 1\nalso 2\n".to_owned(), (0, 1));
        assert_eq!(found, expected, "{}", String::from_utf8_lossy(line));
    }
}

#[test]
fn an_open_quote_is_closed_later_or_its_line_is_dropped() {
    let many = "b 1\n".repeat(MAX_LINE / 4);
    for (page, left, malformed) in [
        ("a{x=\"1\n2\n\n3\"} 1\nb 1\n", "a{x=\"1\n2\n\n3\"} 1\nb 1\n", 0),
        ("a{x=\"1} 1\nb 1\n", "b 1\n", 1),
        ("a{x=\"1} 1\nb{x=\"1\"} 1\nb 1\n", "b{x=\"1\"} 1\nb 1\n", 1),
        ("a{x=\"1\na{x=\"1\na{x=\"1\nb 1", "b 1\n", 3),
        ("a{x=\"\\\"\na{x=\"\\\"\nb 1\n", "b 1\n", 2),
        ("a{x=\"1\n# TYPE b gauge\nb 1\n", "# TYPE b gauge\nb 1\n", 1),
        (&format!("a{{x=\"1\n{many}c 1\n"), &format!("{many}c 1\n"), 1),
        // With the lines up to the closing quote, the sample would be longer than a line may be.
        (&format!("a{{x=\"1\n{many}\"}} 1\nc 1\n"), &format!("{many}c 1\n"), 2),
    ] {
        let begin = &page[..page.len().min(30)];
        for size in [7, 65_536, usize::MAX] {
            let (found, left_out) = merged_in(size, &texts(&[page]), Text, true);
            assert!(found == left.as_bytes(), "{begin:?} in {size}");
            assert_eq!(left_out, (0, malformed), "{begin:?} in {size}");
        }
    }
}

#[test]
fn a_name_known_with_quotes_needs_them_on_the_next_line_too() {
    let page = "{\"a.b\"} 1\na.b 2\na.b{} 2\n{\"a.b\",\"x y\"=\"1\"} 3\nc{x y=\"1\"} 4\nc{\"x y\"=\"1\"} 5\n";
    let expected = "{\"a.b\"} 1\n{\"a.b\",\"x y\"=\"1\"} 3\nc{\"x y\"=\"1\"} 5\n";
    let found = merged(&texts(&[page]), Text, true);
    assert_eq!(found, (expected.to_owned(), (0, 3)));
}

#[test]
fn a_line_over_1_mib_is_skipped_and_the_rest_passes() {
    let long = |length: usize| format!("a{{x=\"{}\"}} 1", "y".repeat(length - 9));
    for (length, is_kept) in [(MAX_LINE, true), (MAX_LINE + 1, false), (3 * MAX_LINE, false)] {
        let line = long(length) + "\n";
        let page = format!("before 1\n{line}after 1\n");
        for size in [usize::MAX, 100_000, 65_536] {
            let (found, left_out) = merged_in(size, &texts(&[&page]), Text, true);
            let expected = if is_kept { page.clone() } else { page.replace(&line, "") };
            assert!(found == expected.as_bytes(), "{length} in {size}: {} bytes", found.len());
            assert_eq!(left_out, (0, u64::from(!is_kept)), "{length} in {size}");
        }
    }
}

#[test]
fn an_incomplete_last_line_of_an_interrupted_source_is_dropped() {
    for (is_whole, expected) in [(true, "a 1\nb 12\n"), (false, "a 1\n")] {
        assert_eq!(merged(&texts(&["a 1\nb 12"]), Text, is_whole).0, expected);
    }
}

#[test]
fn hidden_families_are_left_out_with_their_declarations() {
    let page = "# TYPE hidden_rq_active gauge\nhidden_rq_active{x=\"1\"} 1\n# TYPE hidden_rq gauge\n\
                hidden_rq 1\nhidden__active 2\nmy_hidden_active 1\n";
    let expected = "# TYPE hidden_rq gauge\nhidden_rq 1\nmy_hidden_active 1\n";
    assert_eq!(merged(&texts(&[page]), Text, true), (expected.to_owned(), (0, 0)));
}

#[test]
fn carriage_returns_are_removed() {
    let page = "# TYPE a gauge\r\na 1\r\n\r\n";
    let expected = "# TYPE a gauge\na 1\n\n";
    assert_eq!(merged(&texts(&[page]), Text, true), (expected.to_owned(), (0, 0)));
}

#[test]
fn text_becomes_openmetrics_without_another_name_for_a_sample() {
    let page = "# a comment\n\n# HELP a_total A \"counter\".\n# TYPE a_total counter\na_total 1\n\
                # HELP rq R.\n# TYPE rq counter\nrq{a=\"b\"} 2\n# HELP rq_total R.\n# TYPE rq_total counter\n\
                rq_total 3\n# TYPE u untyped\nu 3\n# UNIT u s\n# EOF\n# TYPE h histogram\n\
                h_bucket{le=\"+Inf\"} 1\nh_sum 1\nh_count 1\nbare 4\n";
    let expected = "# HELP a A \"counter\".\n# TYPE a counter\na_total 1\n\
                    # HELP rq R.\n# TYPE rq unknown\nrq{a=\"b\"} 2\n# HELP rq_total R.\n\
                    # TYPE rq_total unknown\nrq_total 3\n# TYPE u unknown\nu 3\n# TYPE h histogram\n\
                    h_bucket{le=\"+Inf\"} 1\nh_sum 1\nh_count 1\nbare 4\n";
    let found = merged(&texts(&[page]), OpenMetrics, true);
    assert_eq!(found, (expected.to_owned(), (0, 0)));
}

#[test]
fn openmetrics_is_converted_to_text_without_units_exemplars_and_info_types() {
    let page = "# TYPE a counter\n# UNIT a seconds\n# HELP a A.\na_total 1 1.5 # {t=\"# }\"} 1\n\
                a_total{x=\"# y\"} 2 # {} 1\na_created 5\n# TYPE i info\ni_info{v=\"1\"} 1\n\
                # TYPE x unknown\nx 1\n# TYPE s summary\ns_count 1\n# EOF\nlate 1\n";
    let expected = "# TYPE a_total counter\n# HELP a A.\na_total 1\na_total{x=\"# y\"} 2\n\
                    a_created 5\ni_info{v=\"1\"} 1\n# TYPE x untyped\nx 1\n# TYPE s summary\ns_count 1\n";
    let found = merged(&[(OpenMetrics, page.as_bytes())], Text, true);
    assert_eq!(found, (expected.to_owned(), (0, 0)));
}

#[test]
fn openmetrics_passes_unchanged_except_comments_and_eof() {
    let page = "# TYPE a counter\n# TYPE b_seconds gauge\n# UNIT b_seconds seconds\n# HELP a \n# a comment\n\na_total 1 1.5 # {t=\"x\"} 1\n\
                a_created 5\n# TYPE i info\ni_info{v=\"1\"} 1\n# EOF \t\r\nlate 1\n";
    let expected = page.replace("# a comment\n\n", "");
    let expected = expected.split("# EOF").next().expect("a page").to_owned();
    let found = merged(&[(OpenMetrics, page.as_bytes())], OpenMetrics, true);
    assert_eq!(found, (expected, (0, 0)));
}

#[test]
fn duplicates_beyond_the_remembered_series_are_not_removed() {
    let page: String = (0..40_000).map(|number| format!("a{{n=\"{number}\"}} 1\n")).collect();
    let (found, (duplicates, malformed)) = merged_in(65_536, &texts(&[&page, &page]), Text, true);
    let lines = found.iter().filter(|byte| **byte == b'\n').count() as u64;
    assert_eq!((lines + duplicates, malformed), (80_000, 0));
    assert!((20_000..40_000).contains(&duplicates), "{duplicates}");
}

/// Generates pages of lines that are valid or almost valid.
fn pages() -> impl Strategy<Value = String> {
    let part = prop::sample::select(vec![
        "a",
        "a_total",
        "b_bucket",
        "{",
        "}",
        "le=\"1\"",
        "x=\"\\\"\"",
        ",",
        " ",
        "1",
        "NaN",
        "1.5",
        "\n",
        "\n",
        "\n",
        "\r\n",
        "\n# TYPE ",
        "\n# HELP ",
        "# UNIT ",
        "# EOF",
        " counter",
        " gauge",
        " info",
        " # {x=\"y\"} 1",
        "\"",
        "\\",
        "é",
        "\na 1\n",
        "\nb_bucket{le=\"1\"} 2\n",
        "\n# TYPE a counter\n",
    ]);
    prop::collection::vec(part, 0..60).prop_map(|parts| parts.concat())
}

proptest! {
    #[test]
    fn a_merged_page_merges_into_itself(page in pages(), other in pages(), is_whole: bool) {
        for (from, to) in [(Text, Text), (Text, OpenMetrics), (OpenMetrics, Text), (OpenMetrics, OpenMetrics)] {
            let pages = [(Text, other.as_bytes()), (from, page.as_bytes())];
            let (once, _) = merged(&pages, to, is_whole);
            let (again, left_out) = merged(&[(to, once.as_bytes())], to, true);
            prop_assert_eq!((again, left_out), (once, (0, 0)));
        }
    }

    #[test]
    fn bytes_of_any_kind_do_no_harm(page: Vec<u8>) {
        merged(&[(Text, &page), (OpenMetrics, &page)], OpenMetrics, true);
        merged(&[(OpenMetrics, &page), (Text, &page)], Text, false);
    }
}
