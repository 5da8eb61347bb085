//! The names Envoy asks secrets by, as a type.
//!
//! A string becomes a [`Name`] or is refused; there is no name that falls back to the workload's
//! key. The order of the variants is the order of delivery: roots reach Envoy before a certificate
//! they have signed.
//!
//! Does not know whether the secret of a name can be had.

use std::fmt;

/// What Envoy may ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Name {
    /// `ROOTCA`: the trust anchors of the mesh.
    RootCa,
    /// `default`: the workload's key and certificate.
    Default,
}

/// A name nothing is served under.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("unknown secret name \"{shown}\", expected default or ROOTCA")]
pub struct UnknownName {
    /// The name, escaped and cut at [`LONGEST_SHOWN`] bytes.
    pub shown: String,
}

/// How many bytes of a foreign name appear in a message.
const LONGEST_SHOWN: usize = 256;

impl Name {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::RootCa => "ROOTCA",
            Self::Default => "default",
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl std::str::FromStr for Name {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        [Self::RootCa, Self::Default]
            .into_iter()
            .find(|name| name.as_str() == text)
            .ok_or_else(|| UnknownName {
                shown: escaped(text, LONGEST_SHOWN),
            })
    }
}

/// `text` fit for one line of a log: control characters escaped, at most `longest` bytes of it.
pub(crate) fn escaped(text: &str, longest: usize) -> String {
    let mut shown = String::new();
    for piece in text.chars().map(char::escape_debug) {
        if shown.len() + piece.len() > longest {
            shown.push('…');
            break;
        }
        shown.extend(piece);
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_two_exact_spellings_are_names() {
        assert_eq!("default".parse(), Ok(Name::Default));
        assert_eq!("ROOTCA".parse(), Ok(Name::RootCa));
        for text in ["", "Default", "rootca", "default ", "file-cert:a~b", "x"] {
            assert!(text.parse::<Name>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_foreign_name_is_shown_escaped_and_cut() {
        let error = "a\nb".parse::<Name>().expect_err("is unknown");
        assert_eq!(error.shown, "a\\nb");
        let error = "é".repeat(5_000).parse::<Name>().expect_err("is unknown");
        assert!(error.shown.len() <= LONGEST_SHOWN + '…'.len_utf8());
        assert!(error.shown.ends_with('…'));
    }
}
