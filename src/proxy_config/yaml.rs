//! Parses YAML and JSON documents to a tree of values with their line numbers.
//!
//! [`object`] is the entry. Scalars have their YAML type: `yes` and `on` are booleans, a quoted number is text.
//! The depth of a document and the size its aliases may expand to are limited.

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::Number;
use serde_saphyr::{DuplicateKeyPolicy, Spanned};

use crate::problem::{Code, Diagnostics, Problem};

/// A value with its position.
pub type Node = Spanned<Tree>;

/// Returns the line of a value, counted from 1.
pub fn line(node: &Node) -> u64 {
    node.referenced.line()
}

/// A value of a document.
#[derive(Clone, Debug)]
pub enum Tree {
    Null,
    Bool(bool),
    Number(Number),
    Text(String),
    List(Vec<Node>),
    /// The entries, in which keys may be repeated.
    Map(Vec<(String, Node)>),
}

/// The maximum number of values that aliases repeat.
const MAX_REPEATED: usize = 10_000;

/// The maximum depth of values. Each level takes up to 32 KB of stack without optimization; ProxyConfig
/// needs eight levels.
const MAX_DEPTH: usize = 24;

/// Reads the object of the first document, the only one that Go reads; None if it is empty, null or unusable.
pub fn object(origin: &str, text: &str, notes: &mut Diagnostics) -> Option<Node> {
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! { max_depth: MAX_DEPTH },
        duplicate_keys: DuplicateKeyPolicy::LastWins,
        alias_limits: serde_saphyr::alias_limits! { max_total_replayed_events: MAX_REPEATED },
    };
    let mut first = None;
    let read = serde_saphyr::with_deserializer_from_str_with_options(text, options, |document| {
        first = Some(Node::deserialize(document)?);
        Ok(())
    });
    let error = read.err().map(|error| {
        let (line, reason) = line_and_reason(&error);
        Problem::new(Code::SettingInvalid, format!("{origin} line {line}"), reason)
    });
    let Some(node) = first else {
        notes.problems.extend(error);
        return None;
    };
    if let Some(Problem { subject, .. }) = error {
        let found = "another document after the first one";
        notes.warnings.push(Problem::new(Code::FileLine, subject, found));
    }
    match node.value {
        Tree::Null => None,
        Tree::Map(_) => Some(node),
        ref other => {
            let subject = format!("{origin} line {}", line(&node));
            let problem = Problem::new(Code::SettingInvalid, subject, other.describe());
            notes.add(problem.expected("a YAML or JSON object"));
            None
        }
    }
}

/// Returns the line and the reason of an error, without the text around it.
pub fn line_and_reason(error: &serde_saphyr::Error) -> (u64, String) {
    let error = error.without_snippet();
    let line = error.location().map_or(1, |at| at.line());
    (line, error.to_string().split(" at line ").next().unwrap_or_default().to_owned())
}

impl Tree {
    /// Formats the value for an error: text in quotes, other values with their type.
    pub fn describe(&self) -> String {
        match self {
            Self::Bool(value) => format!("the boolean {value}"),
            Self::Number(number) => format!("the number {number}"),
            Self::Text(text) => format!("{text:?}"),
            other => other.kind().to_owned(),
        }
    }

    /// Returns the type of the value, for an error that must not show a secret.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool(_) => "a boolean",
            Self::Number(_) => "a number",
            Self::Text(_) => "a string",
            Self::List(_) => "a list",
            Self::Map(_) => "an object",
        }
    }
}

impl<'de> Deserialize<'de> for Tree {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TreeVisitor)
    }
}

struct TreeVisitor;

impl<'de> Visitor<'de> for TreeVisitor {
    type Value = Tree;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E: de::Error>(self) -> Result<Tree, E> {
        Ok(Tree::Null)
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<Tree, E> {
        Ok(Tree::Bool(value))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Tree, E> {
        Ok(Tree::Number(value.into()))
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Tree, E> {
        Ok(Tree::Number(value.into()))
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Tree, E> {
        let number = Number::from_f64(value).map(Tree::Number);
        number.ok_or_else(|| E::custom("a number must be finite"))
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Tree, E> {
        Ok(Tree::Text(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Tree, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            list.push(item);
        }
        Ok(Tree::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Tree, A::Error> {
        let mut map = Vec::new();
        while let Some(entry) = entries.next_entry()? {
            map.push(entry);
        }
        Ok(Tree::Map(map))
    }
}

/// Reads the object of a document, or returns the problem that makes it unusable.
#[cfg(test)]
pub fn parse(text: &str) -> Result<Option<Node>, Problem> {
    let mut notes = Diagnostics::default();
    let node = object("it", text, &mut notes);
    notes.problems.pop().map_or(Ok(node), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(node: &Node) -> String {
        match &node.value {
            Tree::Map(entries) => {
                let entries = entries.iter().map(|(k, v)| format!("{k}={}", shape(v)));
                format!("{{{}}}@{}", entries.collect::<Vec<_>>().join(" "), line(node))
            }
            Tree::List(items) => {
                let items: Vec<_> = items.iter().map(shape).collect();
                format!("[{}]@{}", items.join(" "), line(node))
            }
            other => format!("{}@{}", other.describe(), line(node)),
        }
    }

    #[test]
    fn every_value_has_its_line() {
        let text = "# comment\na: 1\nb:\n  c: [x,\n    'yes']\n  d: yes\n7: ~\n";
        let node = parse(text).expect("good").expect("an object");
        assert_eq!(
            shape(&node),
            "{a=the number 1@2 b={c=[\"x\"@4 \"yes\"@5]@4 d=the boolean true@6}@4 7=null@7}@2"
        );
    }

    #[test]
    fn an_empty_document_is_none() {
        for text in ["", " \n", "# only a comment\n", "null", "~", "---\n"] {
            assert!(parse(text).expect("good").is_none(), "{text:?}");
        }
    }

    #[test]
    fn further_yaml_documents_are_named_and_ignored() {
        for (rest, named) in [
            ("", None),
            ("---\n", Some("it line 3")),
            ("---\nb: 2\n", Some("it line 4")),
            ("...\n---\n[\n", Some("it line 5")),
            ("...\n}", Some("it line 4")),
        ] {
            let mut notes = Diagnostics::default();
            let node = object("it", &format!("---\na: 1\n{rest}"), &mut notes);
            assert_eq!(shape(&node.expect("an object")), "{a=the number 1@2}@2");
            assert_eq!(notes.problems, [], "{rest}");
            let subjects = notes.warnings.iter().map(|warning| warning.subject.as_str());
            assert_eq!(subjects.collect::<Vec<_>>(), Vec::from_iter(named), "{rest}");
        }
    }

    #[test]
    fn a_document_other_than_an_object_is_a_problem_without_its_text() {
        for (text, subject) in [
            ("a: 1\nb: [", "it line 2"),
            ("\n- 1", "it line 2"),
            ("a: .inf", "it line 1"),
            ("a: 1\ntoken: \"hush", "it line 2"),
        ] {
            let problem = parse(text).expect_err(text);
            assert_eq!(problem.subject, subject, "{problem}");
            assert!(!problem.to_string().contains("hush"), "{problem}");
        }
    }

    #[test]
    fn broken_yaml_is_a_problem_with_source_line_and_reason() {
        for (text, expected) in [
            ("a: [1, 2\nb: }", "it line 2: illegal placement of ':' indicator"),
            ("a:\n\tb: c", "it line 2: tabs disallowed within this context (block indentation)"),
            ("{\"a\": 1", "it line 1: unclosed bracket '{'"),
            ("- 1", "it line 1 is a list, expected a YAML or JSON object"),
        ] {
            let problem = parse(text).expect_err(text);
            assert_eq!(problem.brief(), expected);
        }
    }

    #[test]
    fn a_document_that_is_too_deep_or_expands_too_far_is_refused() {
        let deep = ["[", "{a: ", "- ", "? "].map(|nested| nested.repeat(100_000));
        let mut bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
        for level in 1..12 {
            let alias = format!("*a{}, ", level - 1).repeat(10);
            bomb += &format!("a{level}: &a{level} [{alias}]\n");
        }
        let indented: String = (0..100).map(|depth| " ".repeat(depth) + "a:\n").collect();
        let endless = [indented, bomb, "a: &a {b: *a}".to_owned()];
        for text in deep.into_iter().chain(endless) {
            assert!(parse(&text).is_err());
        }
    }

    #[test]
    fn an_error_of_broken_yaml_shows_no_secret() {
        for value in [
            "*hush",
            "%hush",
            "@hush",
            "\"hush\" x",
            "!!int hush",
            "!!bool hush",
            "`hush",
            "'hush",
            "!hush x",
            "[hush",
            "{hush: a",
            "hush: a",
            "|hush",
            "\"\\qhush\"",
            "&hush",
            "!!binary hush",
            "!!float hush",
            "!!null hush",
            "\"\\uhush\"",
        ] {
            if let Err(problem) = parse(&format!("TOKEN: {value}")) {
                assert!(!problem.to_string().contains("hush"), "{value}: {problem}");
            }
        }
    }
}
