//! The files of one secret: reads and checks them.
//!
//! A key and its chain are read and checked as one; what was checked is what is served, byte for
//! byte unless Envoy cannot read it. Of a bundle of roots, broken certificates are left out.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use zeroize::Zeroizing;

use crate::pem;
use crate::regular_file;
use crate::secrets::certificate::{Certificate, Roots, Secret};
use crate::secrets::x509::{self, TextError};

/// The largest file read, many times the bundle of an operating system.
const MAX_FILE: u64 = 4 << 20;

/// The files of one secret.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    Pair { chain: PathBuf, key: PathBuf },
    Roots(PathBuf),
}

/// Why the files of a secret cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("cannot read {path}: {source}", path = .path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("{path} {source}", path = .path.display())]
    Unusable { path: PathBuf, source: TextError },
    #[error("{most} secrets are read from files already")]
    TooMany { most: usize },
}

/// A secret, how many certificates are left out of roots, and what is not PEM.
pub(super) type Content = (Secret, usize, Option<&'static str>);

impl Source {
    /// Reads and checks the secret. Blocks.
    pub(super) fn read(&self) -> Result<Content, FileError> {
        match self {
            Self::Pair { chain, key } => pair(chain, key),
            Self::Roots(path) => {
                let file = read(path)?;
                let (roots, broken) = Roots::from_file(&file);
                let missing = TextError::NoCertificate { bytes: file.len() };
                let roots = roots.ok_or_else(|| unusable(path, missing))?;
                Ok((Secret::Roots(roots), broken, pem::left_over(&file)))
            }
        }
    }

    pub(super) fn paths(&self) -> impl Iterator<Item = &Path> {
        let (first, second) = match self {
            Self::Pair { chain, key } => (chain, Some(key)),
            Self::Roots(path) => (path, None),
        };
        std::iter::once(first).chain(second).map(PathBuf::as_path)
    }
}

impl fmt::Display for Source {
    /// The resource name Envoy asks for.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pair { chain, key } => {
                write!(f, "file-cert:{}~{}", chain.display(), key.display())
            }
            Self::Roots(path) => write!(f, "file-root:{}", path.display()),
        }
    }
}

impl FileError {
    /// Whether there is no file, or nothing in it.
    pub fn is_absence(&self) -> bool {
        match self {
            Self::Unreadable { source, .. } => source.kind() == io::ErrorKind::NotFound,
            Self::Unusable { source, .. } => matches!(
                source,
                TextError::NoCertificate { bytes: 0 } | TextError::NoKey { bytes: 0 }
            ),
            Self::TooMany { .. } => false,
        }
    }
}

fn pair(chain_path: &Path, key_path: &Path) -> Result<Content, FileError> {
    let (chain, key) = (read(chain_path)?, read(key_path)?);
    let left_over = pem::left_over(&chain).or_else(|| pem::left_over(&key));
    let leaf = x509::leaf(&chain).map_err(|error| unusable(chain_path, error))?;
    let certificate = Certificate::new(chain, leaf, key);
    let certificate = certificate.map_err(|error| unusable(key_path, error))?;
    Ok((Secret::Certificate(Arc::new(certificate)), 0, left_over))
}

fn unusable(path: &Path, source: TextError) -> FileError {
    let path = path.to_owned();
    FileError::Unusable { path, source }
}

/// The whole of a regular file. A pipe or device neither blocks nor fills memory.
fn read(path: &Path) -> Result<Zeroizing<Vec<u8>>, FileError> {
    regular_file::read(path, MAX_FILE).map_err(|source| FileError::Unreadable {
        path: path.to_owned(),
        source,
    })
}
