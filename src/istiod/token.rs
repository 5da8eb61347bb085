//! The bearer token: read when needed, never kept past its file.
//!
//! A platform replaces the file while the agent runs, so each call reads it anew. A call without a
//! usable token is made all the same, without the header: a client certificate may be enough, and
//! istiod decides.
//!
//! Does not look inside the token, nor log any part of it.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use http::HeaderValue;
use zeroize::Zeroizing;

use super::file;

/// No token is this large; a file that is was meant for something else.
const LARGEST: u64 = 64 * 1024;

/// Where tokens come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    None,
    File(PathBuf),
}

/// Reads the token and complains once about each new reason why there is none.
#[derive(Debug)]
pub(super) struct Reader {
    source: Source,
    complaint: Mutex<Option<String>>,
}

/// Why a file gave no token.
#[derive(Debug, thiserror::Error)]
enum Unusable {
    #[error("{path}: {source}", path = .path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("{path} is empty", path = .path.display())]
    Empty { path: PathBuf },
    #[error("{path} has byte {byte:#04x} at position {position}, which no header may hold", path = .path.display())]
    NotAllowed {
        path: PathBuf,
        byte: u8,
        position: usize,
    },
}

impl Reader {
    pub(super) fn new(source: Source) -> Self {
        let complaint = Mutex::default();
        Self { source, complaint }
    }

    /// The `authorization` header as of now.
    pub(super) fn authorization(&self) -> Option<HeaderValue> {
        let Source::File(path) = &self.source else {
            return None;
        };
        match read(path) {
            Ok(value) => {
                self.complain(None);
                Some(value)
            }
            Err(problem) => {
                self.complain(Some(problem.to_string()));
                None
            }
        }
    }

    fn complain(&self, problem: Option<String>) {
        let mut last = self
            .complaint
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if *last != problem
            && let Some(problem) = &problem
        {
            tracing::warn!("failed to fetch token from file: {problem}; calling istiod without");
        }
        *last = problem;
    }
}

fn read(path: &Path) -> Result<HeaderValue, Unusable> {
    let content = file::read(path, LARGEST).map_err(|source| Unusable::Unreadable {
        path: path.into(),
        source,
    })?;
    let token = content.trim_ascii();
    if token.is_empty() {
        return Err(Unusable::Empty { path: path.into() });
    }
    if let Some(position) = token.iter().position(|byte| !byte.is_ascii_graphic()) {
        return Err(Unusable::NotAllowed {
            path: path.into(),
            byte: token[position],
            position,
        });
    }
    let header = Zeroizing::new([b"Bearer ", token].concat());
    let mut value = HeaderValue::from_bytes(&header).map_err(|_| Unusable::NotAllowed {
        path: path.into(),
        byte: token[0],
        position: 0,
    })?;
    value.set_sensitive(true);
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(content: &[u8]) -> Result<String, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("istio-token");
        std::fs::write(&path, content).unwrap();
        match read(&path) {
            Ok(value) => Ok(value.to_str().unwrap().to_owned()),
            Err(problem) => Err(problem
                .to_string()
                .replace(path.to_str().unwrap(), "")
                .trim_start_matches([':', ' '])
                .to_owned()),
        }
    }

    #[test]
    fn trims_a_token_and_refuses_what_no_header_may_hold() {
        let not_allowed = "has byte 0x0a at position 1, which no header may hold";
        let table: [(&[u8], Result<&str, &str>); 6] = [
            (b"abc", Ok("Bearer abc")),
            (b" \n abc.def-_=\r\n", Ok("Bearer abc.def-_=")),
            (b"", Err("is empty")),
            (b" \n\t", Err("is empty")),
            (b"a\nb", Err(not_allowed)),
            (&[b'x'; 65_537], Err("more than 65536 bytes")),
        ];
        for (content, expected) in table {
            let expected = expected.map(str::to_owned).map_err(str::to_owned);
            assert_eq!(answer(content), expected, "{}", content.escape_ascii());
        }
    }

    #[test]
    fn a_missing_file_and_a_directory_give_no_header_and_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let missing = read(&dir.path().join("none")).unwrap_err().to_string();
        assert!(missing.contains("none: No such file"), "{missing}");
        let directory = read(dir.path()).unwrap_err().to_string();
        assert!(directory.ends_with("not a regular file"), "{directory}");
    }

    #[test]
    fn reads_the_file_again_each_time_and_hides_the_value() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("istio-token");
        let reader = Reader::new(Source::File(path.clone()));
        assert_eq!(reader.authorization(), None);
        for token in ["first", "second"] {
            std::fs::write(&path, token).unwrap();
            let value = reader.authorization().unwrap();
            assert_eq!(value, format!("Bearer {token}"));
            assert!(!format!("{value:?}").contains(token));
        }
        assert_eq!(Reader::new(Source::None).authorization(), None);
    }
}
