//! What the names of settings, headers and members of JSON say about their values.
//!
//! Names are compared in lower case and without punctuation.

use std::collections::HashMap;

/// Parts of names whose values are secret.
const SECRET: &str = "password passwd passphrase secret token credential privatekey apikey accesskey \
                      ticketkey signingkey hmackey encryptionkey pkcs12 authorization cookie";
/// Ends of names whose values are not, though one of the parts is in them: of files, of Envoy's
/// configuration, and of the variables that Kubernetes sets for each service.
const HARMLESS: &str = "file filename path name type ttl uri endpoint config configs bucket maxtokens \
                        perfill activesecrets warmingsecrets staticsecrets host port addr proto tcp udp";
/// Starts of variables that hold headers.
const HEADERS: [&str; 2] = ["xdsheader", "caheader"];
const LONGEST: usize = 128;
const MOST_JUDGED: usize = 1000;

/// What a member of an object is, as its name says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Member {
    #[default]
    Other,
    /// Its scalar is secret, and what an object of that name holds if `is_whole`.
    Secret {
        is_whole: bool,
    },
    /// Public, also as a part of a secret.
    Public,
    /// Public if it is a text.
    Harmless,
    /// A name or key that says what a value beside it is.
    Name,
    Key,
    Value,
    /// What a value is compared with, or a value of several kinds.
    Matcher,
    /// One header or several.
    Headers,
}

impl Member {
    pub(super) fn of(name: &[u8]) -> Self {
        let plain = plain(name);
        match plain.as_str() {
            "name" | "headername" => Self::Name,
            "key" => Self::Key,
            "value" | "rawvalue" => Self::Value,
            "exact" | "prefix" | "suffix" | "contains" | "regex" | "stringvalue" | "exactmatch"
            | "prefixmatch" | "suffixmatch" | "containsmatch" | "inlinestring" | "inlinebytes" => {
                Self::Matcher
            }
            "certificatechain" | "trustedca" | "validationcontext" | "sdsconfig" | "ocspstaple"
            | "crl" => Self::Public,
            "type" | "filename" | "path" | "versioninfo" | "lastupdated" | "clustername" => {
                Self::Harmless
            }
            // Keys of JSON web tokens are not always public ones.
            "jwks" | "localjwks" => Self::Secret { is_whole: true },
            _ if is_secret_plain(&plain) => Self::Secret {
                is_whole: !is_header_of_credentials(name),
            },
            _ if ["header", "headers", "headerstoadd", "initialmetadata"]
                .iter()
                .any(|end| plain.ends_with(end)) =>
            {
                Self::Headers
            }
            _ => Self::Other,
        }
    }
}

/// Names that were judged, as they repeat.
#[derive(Default)]
pub(super) struct Members(HashMap<Vec<u8>, Member>);

impl Members {
    pub(super) fn judge(&mut self, name: &[u8]) -> Member {
        if let Some(member) = self.0.get(name) {
            return *member;
        }
        if self.0.len() == MOST_JUDGED {
            self.0.clear();
        }
        let member = Member::of(name);
        if name.len() <= LONGEST {
            self.0.insert(name.to_owned(), member);
        }
        member
    }
}

/// Whether a value of this name is secret.
pub(crate) fn is_secret(name: &[u8]) -> bool {
    is_secret_plain(&plain(name))
}

/// Whether this is the name of a header, say, whose value is secret. Other names have other letters.
pub(super) fn is_secret_header(name: &[u8]) -> bool {
    let is_letter = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_".contains(byte);
    name.iter().all(is_letter) && is_secret(name)
}

/// Whether the credentials of this header have several words.
pub(super) fn is_header_of_credentials(name: &[u8]) -> bool {
    let plain = plain(name);
    plain.contains("authorization") || plain.contains("cookie")
}

/// Whether a colon behind it may be one of a sentence.
pub(super) fn is_word_of_prose(name: &[u8]) -> bool {
    ["token", "secret", "credential"].contains(&plain(name).trim_end_matches('s'))
}

fn is_secret_plain(plain: &str) -> bool {
    let is_secret = SECRET.split(' ').any(|part| plain.contains(part));
    let is_harmless = || HARMLESS.split(' ').any(|end| plain.ends_with(end));
    HEADERS.iter().any(|start| plain.starts_with(start)) || is_secret && !is_harmless()
}

/// The name in lower case, without punctuation. Of a long one its end counts.
fn plain(name: &[u8]) -> String {
    let name = &name[name.len().saturating_sub(LONGEST)..];
    let letters = name.iter().filter(|byte| byte.is_ascii_alphanumeric());
    letters
        .map(|byte| byte.to_ascii_lowercase() as char)
        .collect()
}
