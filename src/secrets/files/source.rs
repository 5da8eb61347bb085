//! Files a secret is read from, and the checks it passes on the way.
//!
//! A key and its chain are read, checked against each other and kept as one: what was checked is
//! what is served, byte for byte. Of a bundle of roots the certificates that can be read are taken.
//!
//! Does not keep anything, and does not look at who is named in a certificate.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use bytes::Bytes;
use rustls::crypto::aws_lc_rs::sign::any_supported_type;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use x509_parser::prelude::{FromDer, X509Certificate};
use x509_parser::x509::SubjectPublicKeyInfo;
use zeroize::Zeroizing;

use super::super::certificate::system_time;

/// Many times the bundle of an operating system.
const LARGEST: u64 = 4 << 20;

/// The files of one secret.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    Pair { chain: PathBuf, key: PathBuf },
    Roots(PathBuf),
}

/// What the files of a secret hold.
#[derive(PartialEq, Eq)]
pub enum Content {
    Pair {
        chain: Bytes,
        key: Zeroizing<Vec<u8>>,
        not_after: SystemTime,
    },
    Roots {
        pem: Bytes,
        /// How many elements of the file were left out.
        broken: usize,
    },
}

/// Why the files of a secret cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("cannot read {path}: {source}", path = .path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("{path} holds no certificate in {bytes} bytes, expected PEM", path = .path.display())]
    NoCertificate { path: PathBuf, bytes: usize },
    #[error("certificate {index} in {path} is broken: {found}", path = .path.display())]
    Broken {
        path: PathBuf,
        index: usize,
        found: String,
    },
    #[error("{path} holds no private key in {bytes} bytes, expected PEM without a password", path = .path.display())]
    NoKey { path: PathBuf, bytes: usize },
    #[error("the private key in {path} is of no kind that can be used: {source}", path = .path.display())]
    Key {
        path: PathBuf,
        source: rustls::Error,
    },
    #[error("the key in {key} does not belong to the certificate in {chain}", key = .key.display(), chain = .chain.display())]
    Mismatch { chain: PathBuf, key: PathBuf },
    #[error("{most} secrets are read from files already")]
    TooMany { most: usize },
}

impl Source {
    /// Reads and checks the secret. It may wait for a disk.
    pub(super) fn read(&self) -> Result<Content, FileError> {
        match self {
            Self::Pair { chain, key } => pair(chain, key),
            Self::Roots(path) => roots(path),
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
    /// As Envoy would ask for it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pair { chain, key } => {
                write!(f, "file-cert:{}~{}", chain.display(), key.display())
            }
            Self::Roots(path) => write!(f, "file-root:{}", path.display()),
        }
    }
}

impl fmt::Debug for Content {
    /// Everything but the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pair { chain, .. } => write!(f, "Pair({} bytes)", chain.len()),
            Self::Roots { pem, broken } => write!(f, "Roots({} bytes, {broken})", pem.len()),
        }
    }
}

fn pair(chain_path: &Path, key_path: &Path) -> Result<Content, FileError> {
    let (chain, key) = (read(chain_path)?, read(key_path)?);
    let (leaf_key, not_after) = leaf(chain_path, &chain)?;
    if leaf_key != public_key(key_path, &key)? {
        return Err(FileError::Mismatch {
            chain: chain_path.to_owned(),
            key: key_path.to_owned(),
        });
    }
    Ok(Content::Pair {
        chain: Bytes::copy_from_slice(&chain),
        key,
        not_after,
    })
}

/// The public key and the end of the first certificate; all others must be certificates as well.
fn leaf(path: &Path, pem: &[u8]) -> Result<(Vec<u8>, SystemTime), FileError> {
    let mut first = None;
    for (index, der) in CertificateDer::pem_slice_iter(pem).enumerate() {
        let broken = |found| FileError::Broken {
            path: path.to_owned(),
            index,
            found,
        };
        let der = der.map_err(|error| broken(error.to_string()))?;
        let certificate = parsed(&der).map_err(broken)?;
        first.get_or_insert_with(|| {
            let key = &certificate.public_key().subject_public_key.data;
            let not_after = certificate.validity().not_after.timestamp();
            (key.to_vec(), system_time(not_after))
        });
    }
    first.ok_or_else(|| no_certificate(path, pem))
}

/// The public half of a private key. Errors tell nothing of what the file holds.
fn public_key(path: &Path, pem: &[u8]) -> Result<Vec<u8>, FileError> {
    let path = path.to_owned();
    let Ok(der) = PrivateKeyDer::from_pem_slice(pem) else {
        let bytes = pem.len();
        return Err(FileError::NoKey { path, bytes });
    };
    let der = Zeroizing::new(der);
    let key = match any_supported_type(&der) {
        Ok(key) => key,
        Err(source) => return Err(FileError::Key { path, source }),
    };
    let unusable = || FileError::Key {
        path: path.clone(),
        source: rustls::Error::General("it tells no public key".to_owned()),
    };
    let public = key.public_key().ok_or_else(unusable)?;
    let (_, public) = SubjectPublicKeyInfo::from_der(&public).map_err(|_| unusable())?;
    Ok(public.subject_public_key.data.to_vec())
}

/// One broken certificate in a bundle must not take the others with it, as it would in Envoy.
fn roots(path: &Path) -> Result<Content, FileError> {
    let file = read(path)?;
    let (mut pem, mut broken) = (Vec::new(), 0);
    for block in blocks(&file) {
        let mut inside = CertificateDer::pem_slice_iter(block);
        match inside.next() {
            Some(Ok(der)) if parsed(&der).is_ok() => {
                pem.extend_from_slice(block.trim_ascii());
                pem.push(b'\n');
            }
            _ => broken += 1,
        }
    }
    if pem.is_empty() {
        return Err(no_certificate(path, &file));
    }
    let pem = pem.into();
    Ok(Content::Roots { pem, broken })
}

/// The parts of a bundle that claim to be certificates: each up to its end or to the next.
fn blocks(pem: &[u8]) -> Vec<&[u8]> {
    const BEGIN: &[u8] = b"-----BEGIN CERTIFICATE-----";
    const END: &[u8] = b"-----END CERTIFICATE-----";
    let find = |from: usize, what: &[u8]| {
        let mut windows = pem[from..].windows(what.len());
        windows
            .position(|window| window == what)
            .map(|at| from + at)
    };
    let mut blocks = Vec::new();
    let mut begin = find(0, BEGIN);
    while let Some(at) = begin {
        let next = find(at + BEGIN.len(), BEGIN);
        let rest = &pem[at..next.unwrap_or(pem.len())];
        let end = rest.windows(END.len()).position(|window| window == END);
        blocks.push(end.map_or(rest, |end| &rest[..end + END.len()]));
        begin = next;
    }
    blocks
}

fn parsed<'a>(der: &'a CertificateDer<'_>) -> Result<X509Certificate<'a>, String> {
    match X509Certificate::from_der(der) {
        Ok(([], certificate)) => Ok(certificate),
        Ok((rest, _)) => Err(format!("it has {} bytes behind it", rest.len())),
        Err(error) => Err(format!("no X.509 certificate ({error})")),
    }
}

fn no_certificate(path: &Path, pem: &[u8]) -> FileError {
    FileError::NoCertificate {
        path: path.to_owned(),
        bytes: pem.len(),
    }
}

/// The whole of a regular file. A pipe or a device by mistake neither holds us up nor fills memory.
fn read(path: &Path) -> Result<Zeroizing<Vec<u8>>, FileError> {
    regular(path).map_err(|source| FileError::Unreadable {
        path: path.to_owned(),
        source,
    })
}

fn regular(path: &Path) -> io::Result<Zeroizing<Vec<u8>>> {
    // Without the flag, opening a pipe waits for its writer.
    let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let file: File = OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    // Made large enough at once: a key that moves leaves a copy behind.
    let capacity = usize::try_from(metadata.len().min(LARGEST)).unwrap_or(0) + 1;
    let mut content = Zeroizing::new(Vec::with_capacity(capacity));
    let read = file.take(LARGEST + 1).read_to_end(&mut content)?;
    if read as u64 > LARGEST {
        let problem = format!("more than {LARGEST} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, problem));
    }
    Ok(content)
}
