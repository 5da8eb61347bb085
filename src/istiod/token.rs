//! The bearer token: read when needed, never kept past its file.

use std::path::PathBuf;

/// Where tokens come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    None,
    File(PathBuf),
}
