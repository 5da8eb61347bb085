//! Tests that `docs/problems.md` lists the codes of the table, and checks the table.

use std::collections::BTreeSet;

use super::Code;
use crate::config::environment::docs_tests::assert_generated;
use crate::preflight::docs_tests::{self, sentence};

#[test]
fn problems_md_lists_every_code() {
    let mut text = String::new();
    for codes in Code::ALL.chunk_by(|code, next| code.section() == next.section()) {
        text += &format!("\n## {}\n\n", codes[0].section());
        text += "| code | cause | consequence | what to do |\n|---|---|---|---|\n";
        for code in codes {
            let texts = [code.cause(), code.consequence(), code.remedy()].map(sentence);
            let line = format!("| `{}` | {}", code.name(), texts.join(" | "));
            text += &format!("{} |\n", line.trim_end());
        }
    }
    assert_generated("problems.md", "codes", &(text + "\n"));
}

#[test]
fn no_code_hides_itself_through_others() {
    // Each step keeps the codes that one of the remaining codes hides. Without a cycle, none is left at the end.
    let mut left = Code::ALL.to_vec();
    for _ in Code::ALL {
        let before = left.clone();
        left.retain(|code| before.iter().any(|cause| cause.hides().contains(code)));
    }
    assert_eq!(left, []);
}

#[test]
fn codes_are_unique_and_texts_can_be_joined() {
    let codes = Code::ALL.iter().map(|code| code.name());
    let names: Vec<_> = codes.chain(docs_tests::ids()).collect();
    let unique: BTreeSet<_> = names.iter().collect();
    assert_eq!(unique.len(), names.len());
    for code in Code::ALL {
        assert!(!code.cause().is_empty() && !code.remedy().is_empty(), "{code:?}");
        for text in [code.cause(), code.consequence(), code.remedy()] {
            let is_name = text.starts_with("Envoy") || text.starts_with("ProxyConfig");
            let is_capital = text.starts_with(char::is_uppercase);
            assert!(is_name == is_capital && !text.ends_with('.'), "{text}");
        }
    }
}
