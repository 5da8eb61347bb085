//! `docs/differences.md` lists the rows of the table.

use std::collections::BTreeSet;

use super::*;
use crate::config::environment::docs_tests::assert_generated;

#[test]
fn the_documentation_lists_every_difference_as_it_is() {
    assert_generated("differences.md", "differences", &list_of_differences());
}

#[test]
fn ids_are_unique_and_texts_can_be_joined() {
    let ids: BTreeSet<_> = TABLE.iter().map(|row| row.id).collect();
    assert_eq!(ids.len(), TABLE.len());
    for row in TABLE {
        let is_benign = row.impact == Impact::Benign;
        assert_eq!(row.advice.is_empty(), is_benign, "{}", row.id);
        for text in [row.pilot_agent, row.this_agent, row.reason] {
            let is_name = text.starts_with("Envoy");
            let is_capital = text.starts_with(char::is_uppercase);
            assert!(is_name == is_capital && !text.ends_with('.'), "{text}");
        }
    }
}

/// The harmful rows, and then the others by section.
fn list_of_differences() -> String {
    let (harmful, others): (Vec<_>, Vec<_>) =
        TABLE.iter().partition(|row| row.impact == Impact::Harmful);
    assert_eq!(harmful.len(), 12);
    let mut text = "\n## The twelve that can hurt\n".to_owned();
    text += &table(&harmful);
    for rows in others.chunk_by(|row, next| row.section == next.section) {
        text += &format!("\n## {}\n", rows[0].section);
        text += &table(rows);
    }
    text + "\n"
}

fn table(rows: &[&Difference]) -> String {
    let mut text =
        "\n| code | pilot-agent | this agent | reason | whom it can surprise |\n".to_owned();
    text += "|---|---|---|---|---|\n";
    for row in rows {
        let settings = row.selectors.iter().filter_map(|selector| match selector {
            Selector::Set(names) => Some(format!("`{names}`")),
            Selector::Problem(code) => Some(format!("[`{0}`](problems.md)", code.name)),
            _ => None,
        });
        let settings: Vec<_> = settings.collect();
        let break_line = if settings.is_empty() { "" } else { "<br>" };
        let code = format!("`{}`{break_line}{}", row.id, settings.join(", "));
        let texts = [row.pilot_agent, row.this_agent, row.reason, row.advice];
        let line = format!("| {code} | {}", texts.map(sentence).join(" | "));
        text += &format!("{} |\n", line.trim_end());
    }
    text
}

/// The text with capital and full stop. Names of programs and settings keep their first letter.
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
