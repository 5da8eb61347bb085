//! Tests that `docs/problems.md` lists the codes of the table, and checks the table.

use std::collections::BTreeSet;

use super::codes::{FOLLOWS, TABLE};
use crate::config::environment::docs_tests::assert_generated;
use crate::preflight::docs_tests::{self, sentence};

#[test]
fn problems_md_lists_every_code() {
    let mut text = String::new();
    for codes in TABLE.chunk_by(|code, next| code.section == next.section) {
        text += &format!("\n## {}\n\n", codes[0].section);
        text += "| code | cause | consequence | what to do |\n|---|---|---|---|\n";
        for code in codes {
            let texts = [code.cause, code.consequence, code.remedy].map(sentence);
            let line = format!("| `{}` | {}", code.name, texts.join(" | "));
            text += &format!("{} |\n", line.trim_end());
        }
    }
    assert_generated("problems.md", "codes", &(text + "\n"));
}

#[test]
fn causes_and_consequences_are_codes_and_form_no_cycle() {
    let has = |names: &[&str], code: &str| names.iter().any(|name| code.starts_with(name));
    for (causes, follow) in FOLLOWS {
        for name in causes.iter().chain(*follow) {
            assert!(TABLE.iter().any(|code| has(&[name], code.name)), "{name}");
        }
    }
    // Each step keeps the codes that one of the remaining codes causes. Without a cycle, none is left
    // at the end.
    let mut left: Vec<_> = TABLE.iter().map(|code| code.name).collect();
    for _ in TABLE {
        let mut next = left.clone();
        next.retain(|name| {
            FOLLOWS.iter().any(|(causes, follow)| {
                has(follow, name) && left.iter().any(|cause| has(causes, cause))
            })
        });
        left = next;
    }
    assert_eq!(left, [""; 0]);
}

#[test]
fn codes_are_unique_and_texts_can_be_joined() {
    let codes = TABLE.iter().map(|code| code.name);
    let names: Vec<_> = codes.chain(docs_tests::ids()).collect();
    let unique: BTreeSet<_> = names.iter().collect();
    assert_eq!(unique.len(), names.len());
    for code in TABLE {
        assert!(!code.cause.is_empty() && !code.remedy.is_empty(), "{}", code.name);
        for text in [code.cause, code.consequence, code.remedy] {
            let is_name = text.starts_with("Envoy") || text.starts_with("ProxyConfig");
            let is_capital = text.starts_with(char::is_uppercase);
            assert!(is_name == is_capital && !text.ends_with('.'), "{text}");
        }
    }
}
