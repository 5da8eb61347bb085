//! Parses the resource names of secrets.
//!
//! A string becomes a [`Name`] or is rejected; no name falls back to the workload's key, and each name has
//! one spelling only. The order of the variants is the order of delivery: roots reach Envoy before a
//! certificate they have signed.

use std::fmt;

use crate::problem::{Code, Problem};

/// The resource name of a secret that Envoy may request.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Name {
    /// `ROOTCA`: the trust anchors of the mesh.
    RootCa,
    /// `file-root:system`: the trust anchors of the operating system.
    SystemRoots,
    /// `file-root:<path>`: trust anchors from a file.
    FileRoot(String),
    /// `default`: the workload's key and certificate.
    Default,
    /// `file-cert:<chain>~<key>`: a key and its certificate from files.
    FileCert { chain: String, key: String },
}

/// The workload's own names.
pub const DEFAULT: &str = "default";
pub const ROOT_CA: &str = "ROOTCA";

const FILE_ROOT: &str = "file-root:";
const FILE_CERT: &str = "file-cert:";

/// The word that stands for a path in `file-root:system`.
const SYSTEM: &str = "system";

/// The number of bytes of an unknown name that appear in a message.
const MAX_SHOWN: usize = 256;

/// The longest path the kernel takes, without its terminating zero.
const MAX_PATH: usize = 4095;

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RootCa => f.write_str(ROOT_CA),
            Self::Default => f.write_str(DEFAULT),
            Self::SystemRoots => write!(f, "{FILE_ROOT}{SYSTEM}"),
            Self::FileRoot(path) => write!(f, "{FILE_ROOT}{path}"),
            Self::FileCert { chain, key } => write!(f, "{FILE_CERT}{chain}~{key}"),
        }
    }
}

impl std::str::FromStr for Name {
    type Err = Problem;

    fn from_str(text: &str) -> Result<Self, Problem> {
        let name = match text {
            ROOT_CA => Some(Self::RootCa),
            DEFAULT => Some(Self::Default),
            _ => parse_file_name(text),
        };
        name.ok_or_else(|| {
            const KNOWN: &str = "default, ROOTCA, file-root:<path> or file-cert:<chain>~<key>";
            let found = format!("\"{}\", expected {KNOWN}", escaped(text, MAX_SHOWN));
            Problem::new(Code::SecretNameUnknown, "unknown secret name", found)
        })
    }
}

/// Parses the names that contain paths.
fn parse_file_name(text: &str) -> Option<Name> {
    if let Some(path) = text.strip_prefix(FILE_ROOT) {
        return match path {
            SYSTEM => Some(Name::SystemRoots),
            _ => parse_path(path).map(Name::FileRoot),
        };
    }
    let (chain, key) = text.strip_prefix(FILE_CERT)?.split_once('~')?;
    Some(Name::FileCert { chain: parse_path(chain)?, key: parse_path(key)? })
}

/// Returns the path, if it can be one. A tilde separates paths, so none contains it; control characters
/// would break a line of the log.
fn parse_path(text: &str) -> Option<String> {
    let fits = (1..=MAX_PATH).contains(&text.len());
    let is_forbidden = text.contains(|c: char| c == '~' || c.is_control());
    if fits && !is_forbidden { Some(text.to_owned()) } else { None }
}

/// Escapes control characters for one line of a log, and cuts the text at `limit` bytes.
pub(crate) fn escaped(text: &str, limit: usize) -> String {
    let mut shown = String::new();
    for piece in text.chars().map(char::escape_debug) {
        if shown.len() + piece.clone().map(char::len_utf8).sum::<usize>() > limit {
            shown.push('…');
            break;
        }
        shown.extend(piece);
    }
    shown
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_name_has_one_spelling() {
        let cert = |chain: &str, key: &str| Name::FileCert {
            chain: chain.to_owned(),
            key: key.to_owned(),
        };
        for (text, name) in [
            ("default", Name::Default),
            ("ROOTCA", Name::RootCa),
            ("file-root:system", Name::SystemRoots),
            ("file-root:/a b", Name::FileRoot("/a b".to_owned())),
            ("file-root:./system", Name::FileRoot("./system".to_owned())),
            ("file-cert:a~b", cert("a", "b")),
            ("file-cert:file-cert:/a~/b", cert("file-cert:/a", "/b")),
        ] {
            assert_eq!(text.parse().as_ref(), Ok(&name), "{text}");
            assert_eq!(name.to_string(), text);
        }
        let long = format!("file-root:{}", "x".repeat(MAX_PATH + 1));
        for text in [
            "",
            "Default",
            "rootca",
            "default ",
            "x",
            "file-root:",
            "file-root:a~b",
            "file-root:a\0",
            "file-root:a\nb",
            "File-root:a",
            "file-cert:",
            "file-cert:a",
            "file-cert:~",
            "file-cert:~b",
            "file-cert:a~",
            "file-cert:a~b~c",
            "file-cert:a~~b",
            "kubernetes://a",
            "kubernetes-gateway://a/b",
            "configmap://a",
            "invalid://",
            "builtin://",
            "sds://a",
            &long,
        ] {
            assert!(text.parse::<Name>().is_err(), "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn a_name_is_written_as_it_was_read(
            prefix in "(file-cert:|file-root:|default|ROOTCA|)",
            rest in ".{0,40}",
            tilde in "~?",
            more in ".{0,10}",
        ) {
            let text = format!("{prefix}{rest}{tilde}{more}");
            match text.parse::<Name>() {
                Ok(name) => prop_assert_eq!(name.to_string(), text),
                Err(problem) => prop_assert!(problem.found.len() <= MAX_SHOWN + 100),
            }
        }
    }

    #[test]
    fn a_foreign_name_is_shown_escaped_and_cut() {
        let problem = "a\nb".parse::<Name>().expect_err("is unknown");
        assert_eq!(problem.code, Code::SecretNameUnknown);
        assert!(problem.found.starts_with("\"a\\nb\","), "{problem}");
        for long in ["é".repeat(5_000), format!("a{}", "é".repeat(5_000))] {
            let problem = long.parse::<Name>().expect_err("is unknown");
            let (shown, _) = problem.found.split_once("…\", expected").expect("is cut");
            assert!(shown.len() <= MAX_SHOWN + 1);
        }
    }
}
