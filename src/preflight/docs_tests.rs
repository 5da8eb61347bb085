//! Tests that `docs/differences.md` contains the rows of the table.

use std::collections::BTreeSet;

use super::*;
use crate::config::environment::docs_tests::assert_generated;

const PAGE: &str = include_str!("../../docs/differences.md");

/// Returns the page without the small differences, which have no ids.
fn page() -> &'static str {
    let parts = PAGE.split_once("<!-- differences: end -->");
    parts.expect("where the part ends").0
}

/// Returns the rows of a part of the page.
fn rows(part: &str) -> impl Iterator<Item = &str> {
    part.lines().filter(|line| line.starts_with("| `"))
}

/// Returns the ids of all rows of the page, including the rows that hold for all pods.
pub(crate) fn ids() -> impl Iterator<Item = &'static str> {
    rows(page()).filter_map(|row| row.split('`').nth(1))
}

#[test]
fn differences_md_has_every_row_of_the_table() {
    for row in TABLE {
        let settings = row.selectors.iter().filter_map(|selector| match selector {
            Selector::Set(names) => Some(format!("`{names}`")),
            Selector::Problem(code) => Some(format!("[`{0}`](problems.md)", code.name())),
            _ => None,
        });
        let settings: Vec<_> = settings.collect();
        let break_line = if settings.is_empty() { "" } else { "<br>" };
        let code = format!("`{}`{break_line}{}", row.id, settings.join(", "));
        let [pilot_agent, this_agent, advice] =
            [row.pilot_agent, row.this_agent, row.advice].map(sentence);
        let begin = format!("| {code} | {pilot_agent} | {this_agent} | ");
        let end = format!("{} |", format!(" | {advice}").trim_end());
        let is_row = |line: &str| line.starts_with(&begin) && line.ends_with(&end);
        assert!(rows(page()).any(is_row), "{begin}…{end}");
    }
    let are_in_table =
        |row: &&str| TABLE.iter().any(|it| row.starts_with(&format!("| `{}`", it.id)));
    let (reported, others): (Vec<_>, Vec<_>) = rows(page()).partition(are_in_table);
    assert_eq!(reported.len(), TABLE.len());
    // Rows that hold for all pods have no settings.
    assert!(others.iter().all(|row| !row.contains("`<br>")));
}

#[test]
fn differences_md_ends_with_the_small_differences() {
    let mut text = "\n| subject | pilot-agent | this agent |\n|---|---|---|\n".to_owned();
    for (subject, pilot_agent, this_agent) in small_differences::TABLE {
        text += &format!("| {subject} | {pilot_agent} | {this_agent} |\n");
    }
    assert_generated("differences.md", "small differences", &(text + "\n"));
}

#[test]
fn ids_are_unique_and_texts_can_be_joined() {
    let unique: BTreeSet<_> = ids().collect();
    assert_eq!(unique.len(), ids().count());
    let mut sections = page().split("\n## ");
    let harmful = sections.find(|section| section.starts_with("The twelve that can hurt\n"));
    assert_eq!(rows(harmful.expect("a section")).count(), 12);
    for row in TABLE {
        for text in [row.pilot_agent, row.this_agent] {
            let is_name = text.starts_with("Envoy");
            let is_capital = text.starts_with(char::is_uppercase);
            assert!(is_name == is_capital && !text.ends_with('.'), "{text}");
        }
    }
}

/// Returns the text with a capital letter and a full stop. Names of programs and settings keep their
/// first letter.
pub(crate) fn sentence(text: &str) -> String {
    let is_name = ["pilot-agent", "istiod", "rustls", "istioctl", "`"]
        .iter()
        .any(|name| text.starts_with(name));
    match text.split_at_checked(1) {
        None => String::new(),
        Some(_) if is_name => format!("{text}."),
        Some((first, rest)) => format!("{}{rest}.", first.to_uppercase()),
    }
}
