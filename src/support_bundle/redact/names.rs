//! What the names of settings, headers and members of JSON say about their values.

use std::collections::HashMap;

/// Parts of names, in lower case and without punctuation, whose values are secret.
const SECRET: [&[u8]; 13] = [
    b"password",
    b"passwd",
    b"passphrase",
    b"secret",
    b"token",
    b"credential",
    b"privatekey",
    b"apikey",
    b"accesskey",
    b"ticketkey",
    b"pkcs12",
    b"authorization",
    b"cookie",
];
/// Ends of names whose values are not, though one of the parts is in them.
const HARMLESS: [&[u8]; 22] = [
    b"file",
    b"filename",
    b"path",
    b"name",
    b"type",
    b"ttl",
    b"uri",
    b"endpoint",
    // Variables that Kubernetes sets for each service.
    b"host",
    b"port",
    b"addr",
    b"proto",
    b"tcp",
    b"udp",
    b"config",
    b"configs",
    b"bucket",
    b"maxtokens",
    b"perfill",
    b"activesecrets",
    b"warmingsecrets",
    b"staticsecrets",
];
/// Starts of variables that hold headers.
const HEADERS: [&[u8]; 2] = [b"xdsheader", b"caheader"];
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
        match plain.as_slice() {
            b"name" | b"headername" => Self::Name,
            b"key" => Self::Key,
            b"value" | b"rawvalue" => Self::Value,
            b"exact" | b"prefix" | b"suffix" | b"contains" | b"regex" | b"stringvalue"
            | b"exactmatch" | b"prefixmatch" | b"suffixmatch" | b"containsmatch"
            | b"inlinestring" | b"inlinebytes" => Self::Matcher,
            b"certificatechain" | b"trustedca" | b"validationcontext" | b"sdsconfig"
            | b"ocspstaple" | b"crl" => Self::Public,
            b"type" | b"filename" | b"path" | b"versioninfo" | b"lastupdated" | b"clustername" => {
                Self::Harmless
            }
            _ if is_secret_plain(&plain) => Self::Secret {
                is_whole: !contains(&plain, b"authorization") && !contains(&plain, b"cookie"),
            },
            b"initialmetadata" => Self::Headers,
            _ if ["header", "headers", "headerstoadd"]
                .iter()
                .any(|end| plain.ends_with(end.as_bytes())) =>
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
    is_secret(name) && name.iter().all(is_letter)
}

/// Whether the credentials of this header have several words.
pub(super) fn is_header_of_credentials(name: &[u8]) -> bool {
    let plain = plain(name);
    contains(&plain, b"authorization") || contains(&plain, b"cookie")
}

/// Whether a colon behind it may be one of a sentence.
pub(super) fn is_word_of_prose(name: &[u8]) -> bool {
    let plain = plain(name);
    let singular = plain.strip_suffix(b"s").unwrap_or(&plain);
    [&b"token"[..], b"secret", b"credential"].contains(&singular)
}

fn is_secret_plain(plain: &[u8]) -> bool {
    if HEADERS.iter().any(|start| plain.starts_with(start)) {
        return true;
    }
    SECRET.iter().any(|part| contains(plain, part))
        && !HARMLESS.iter().any(|end| plain.ends_with(end))
}

fn contains(plain: &[u8], part: &[u8]) -> bool {
    plain.windows(part.len()).any(|window| window == part)
}

/// The name in lower case, without punctuation. No name is longer than its end.
fn plain(name: &[u8]) -> Vec<u8> {
    let name = &name[name.len().saturating_sub(LONGEST)..];
    let letters = name.iter().filter(|byte| byte.is_ascii_alphanumeric());
    letters.map(u8::to_ascii_lowercase).collect()
}
