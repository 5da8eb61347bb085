//! Copies pages to a bundle, and leaves out what may hold a secret.
//!
//! Nothing is kept because it does not look like a secret. Of JSON, the members of an allow list are kept
//! ([`members`]); of lines, the fields of a known form ([`lines`]); of a report, the texts that the agent has composed
//! ([`report`]). A kept text consists of the characters of names, see [`is_name`].

mod json;
pub(super) mod lines;
mod members;
pub(super) mod report;

use std::io::{self, BufRead, BufReader, Read, Write};

use json::copy as copy_json;

/// The longest line that is examined, in bytes.
const MAX_LINE: u64 = 256 << 10;
/// The longest name, in bytes. Names of statistics have several parts.
const MAX_NAME: usize = 1024;

/// The form of a page.
#[derive(Clone, Copy, Debug)]
pub(super) enum Form {
    /// JSON with the members of this message, see [`members`].
    Json(&'static str),
    /// Lines, each of which is replaced by its kept part. None if nothing is kept.
    Lines(fn(&str) -> Option<String>),
}

impl Form {
    /// Copies a page. Adds the number of members or lines that are left out, or of which a part is.
    pub(super) fn copy(
        self,
        from: impl Read,
        to: &mut dyn Write,
        left_out: &mut u64,
    ) -> io::Result<()> {
        match self {
            Self::Json(message) => Ok(copy_json(message, from, to, left_out)?),
            Self::Lines(keep) => copy_lines(keep, from, to, left_out),
        }
    }
}

fn copy_lines(
    keep: fn(&str) -> Option<String>,
    from: impl Read,
    to: &mut dyn Write,
    left_out: &mut u64,
) -> io::Result<()> {
    let (mut from, mut line) = (BufReader::new(from), Vec::new());
    while (&mut from).take(MAX_LINE).read_until(b'\n', &mut line)? > 0 {
        if line.pop_if(|last| *last == b'\n').is_none() && line.len() as u64 == MAX_LINE {
            from.skip_until(b'\n')?;
            line.clear();
        }
        let kept = str::from_utf8(&line).ok().and_then(keep);
        *left_out += u64::from(kept.as_deref().map(str::as_bytes) != Some(&line));
        if let Some(kept) = kept {
            writeln!(to, "{kept}")?;
        }
        line.clear();
    }
    Ok(())
}

/// Returns true for a text that may be a name, an address, a number or a time. Headers, URLs with credentials, text in
/// JSON, templates and source code have other characters. Operators such as `==` are short.
pub(super) fn is_name(text: &str) -> bool {
    let is_allowed =
        |byte: u8| byte.is_ascii_alphanumeric() || b" !()*+,-./:;[]_|~".contains(&byte);
    text.len() <= 2 || text.len() <= MAX_NAME && text.bytes().all(is_allowed)
}

#[cfg(test)]
mod tests;
