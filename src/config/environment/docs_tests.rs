//! Tests that `docs/settings.md` lists the variables of the table.

use std::fs;
use std::path::Path;

use super::*;

/// Compares the part of a page of `docs` between two comments with the text that is generated for it.
/// `UPDATE_GOLDEN=1` writes the text to the page instead.
#[expect(clippy::disallowed_methods, reason = "how a developer asks for an update")]
pub(crate) fn assert_generated(page: &str, part: &str, expected: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs").join(page);
    let text = fs::read_to_string(&path).expect(page);
    let [begin, end] = ["begin", "end"].map(|word| format!("<!-- {part}: {word} -->\n"));
    let (head, rest) = text.split_once(&begin).expect("where the part begins");
    let (found, tail) = rest.split_once(&end).expect("where the part ends");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        let updated = format!("{head}{begin}{expected}{end}{tail}");
        fs::write(path, updated).expect("written");
    } else {
        assert!(
            found == expected,
            "docs/{page} is out of date: run this test with UPDATE_GOLDEN=1"
        );
    }
}

#[test]
fn settings_md_lists_every_environment_variable() {
    assert_generated("settings.md", "settings", &list_of_variables());
}

fn list_of_variables() -> String {
    let mut text = String::from("\nVariables with an effect:\n\n");
    text += &table("meaning", |row| matches!(row.state, State::Honoured), |_| None);
    text += "\nVariables that the agent refuses or ignores:\n\n";
    let rest = |row: &Row| matches!(row.state, State::Refused(_) | State::WithoutEffect(_));
    text += &table("reason", rest, |state| match state {
        State::Refused(why) | State::WithoutEffect(why) => Some(why),
        _ => None,
    });
    text + "\n"
}

/// Renders the rows that are `wanted`. The text that `last` returns for their state is in the last column.
fn table(
    heading: &str,
    wanted: fn(&Row) -> bool,
    last: fn(State) -> Option<&'static str>,
) -> String {
    let extra = heading != "meaning";
    let mut text = String::from("| variable | type | default | meaning |");
    text += &if extra { format!(" {heading} |\n") } else { "\n".to_owned() };
    text += if extra { "|---|---|---|---|---|\n" } else { "|---|---|---|---|\n" };
    for row in rows().filter(|row| wanted(row)) {
        let default = match (row.default, row.counterpart) {
            ("", Same) => String::new(),
            ("", Own) => "(not in pilot-agent)".to_owned(),
            (own, Own) => format!("`{own}` (not in pilot-agent)"),
            ("", Differs(there)) => format!("(pilot-agent: `{there}`)"),
            (own, Same) => format!("`{own}`"),
            (own, Differs(there)) => format!("`{own}` (pilot-agent: `{there}`)"),
        };
        let help = row.help.replace('|', "\\|");
        text += &format!("| `{}` | {} | {default} | {help} |", row.name, row.kind);
        text += &last(row.state).map_or_else(String::new, |last| format!(" {last} |"));
        text.push('\n');
    }
    text
}
