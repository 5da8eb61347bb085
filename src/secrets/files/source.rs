//! Reads and checks the files of one secret.
//!
//! A key and its chain are read and checked together. The checked content is served, byte for byte unless
//! Envoy cannot read it. Broken certificates of a bundle of roots are left out.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use zeroize::Zeroizing;

use crate::files::regular_file;
use crate::problem::{Code, Problem};
use crate::secrets::certificate::{Certificate, Secret};
use crate::secrets::trust::Roots;
use crate::secrets::x509;
use crate::secrets::x509::Error::NoCertificate;
use crate::trust::pem;

/// The largest file read, many times the bundle of an operating system.
const MAX_FILE: u64 = 4 << 20;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    Pair { chain: PathBuf, key: PathBuf },
    Roots(PathBuf),
}

/// A secret, and what is left out of it.
pub(super) struct Checked {
    pub(super) secret: Secret,
    pub(super) invalid_certificates: usize,
    /// A description of text that is not PEM.
    pub(super) non_pem_text: Option<&'static str>,
}

impl Source {
    /// Reads and checks the secret. Blocks. Fails if a file is missing, unreadable or empty, or without a usable
    /// secret.
    pub(super) fn read(&self) -> Result<Checked, Problem> {
        match self {
            Self::Pair { chain, key } => read_pair(chain, key),
            Self::Roots(path) => {
                let file = read(path)?;
                let (roots, invalid_certificates) = Roots::from_file(&file);
                let roots =
                    roots.ok_or_else(|| unusable(path, file.len(), NoCertificate(file.len())))?;
                Ok(Checked {
                    secret: Secret::Roots(roots),
                    invalid_certificates,
                    non_pem_text: pem::left_over(&file),
                })
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

fn read_pair(chain_path: &Path, key_path: &Path) -> Result<Checked, Problem> {
    let chain = read(chain_path)?;
    let key = read(key_path)?;
    let non_pem_text = pem::left_over(&chain).or_else(|| pem::left_over(&key));
    let key_length = key.len();
    let leaf =
        x509::parse_chain(&chain).map_err(|found| unusable(chain_path, chain.len(), found))?;
    let certificate = Certificate::new(chain, leaf, key)
        .map_err(|found| unusable(key_path, key_length, found))?;
    Ok(Checked {
        secret: Secret::Certificate(Arc::new(certificate)),
        invalid_certificates: 0,
        non_pem_text,
    })
}

/// Returns the problem of a file, which counts as missing if it is empty.
fn unusable(path: &Path, bytes: usize, found: x509::Error) -> Problem {
    let code = match bytes {
        0 => Code::SecretFileMissing,
        _ => Code::SecretFileUnusable,
    };
    Problem::new(code, path.display(), found)
}

/// Reads a regular file. A pipe or device neither blocks nor fills memory.
fn read(path: &Path) -> Result<Zeroizing<Vec<u8>>, Problem> {
    regular_file::read(path, MAX_FILE).map_err(|error| {
        let code = match error.kind() {
            io::ErrorKind::NotFound => Code::SecretFileMissing,
            _ => Code::SecretFileUnreadable,
        };
        Problem::new(code, path.display(), error)
    })
}
