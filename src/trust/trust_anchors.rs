//! Reads trust anchors from PEM files.
//!
//! Broken and expired certificates are left out, which is logged once; a file without usable ones is an error with the
//! reason. Expiry is checked here, because path validation ignores the dates of an anchor. Files are read
//! again at each call.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use parking_lot::Mutex;
use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;

use crate::files::regular_file;
use crate::problem::{Code, Problem};
use crate::trust::pem;

/// Trusted certificates, and webpki's form of them.
#[derive(Debug)]
pub(crate) struct TrustAnchors {
    pub(crate) store: Arc<RootCertStore>,
    pub(crate) certificates: HashSet<CertificateDer<'static>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Roots {
    /// A PEM file with one or more certificates.
    File(PathBuf),
    System(SystemRoots),
}

/// The trust anchors of the operating system, found as by Go's package crypto/x509: in the first file that can be
/// read, and in each file of the directories.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SystemRoots {
    files: Vec<PathBuf>,
    directories: Vec<PathBuf>,
}

impl fmt::Display for Roots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => path.display().fmt(f),
            Self::System(_) => f.write_str(SYSTEM),
        }
    }
}

/// The size limit of a PEM file, which is many times the size of an operating system's bundle.
pub(crate) const MAX_PEM: u64 = 16 << 20;

const SYSTEM: &str = "the operating system";

/// Why a source has no usable trust anchors.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Unreadable(#[from] io::Error),
    #[error("the file is empty")]
    Empty,
    #[error("no PEM certificate in {0} bytes")]
    NoPem(usize),
    #[error("no usable certificate ({0})")]
    NoneUsable(LeftOut),
    #[error("no root certificates found ({left_out}); {problems}")]
    NoneOnSystem { left_out: LeftOut, problems: String },
}

/// The numbers of certificates that are not used.
#[derive(Debug, thiserror::Error)]
#[error("{broken} broken, {expired} expired")]
pub(crate) struct LeftOut {
    broken: usize,
    expired: usize,
}

/// The last line about certificates that are left out, by their source.
static LOGGED: Mutex<BTreeMap<String, String>> = Mutex::new(BTreeMap::new());

/// The bundles of different operating systems; the first that exists is used.
pub const SYSTEM_BUNDLES: [&str; 8] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/pki/tls/cacert.pem",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/cert.pem",
    "/usr/local/etc/ssl/cert.pem",
    "/etc/ssl/certs/ca-certificates",
];
const SYSTEM_DIRECTORIES: [&str; 2] = ["/etc/ssl/certs", "/etc/pki/tls/certs"];

impl SystemRoots {
    /// Takes the values of `SSL_CERT_FILE` and `SSL_CERT_DIR` (directories separated by colons). An empty value stands
    /// for the defaults.
    pub fn new(file: &str, directories: &str) -> Self {
        Self {
            files: match file {
                "" => SYSTEM_BUNDLES.map(PathBuf::from).to_vec(),
                file => vec![file.into()],
            },
            directories: match directories {
                "" => SYSTEM_DIRECTORIES.map(PathBuf::from).to_vec(),
                directories => directories.split(':').map(PathBuf::from).collect(),
            },
        }
    }

    fn read(&self, now: SystemTime) -> Result<TrustAnchors, Error> {
        let mut anchors = Anchors::default();
        let mut problems = Vec::new();
        for path in &self.files {
            match regular_file::read(path, MAX_PEM) {
                Ok(pem) => {
                    anchors.add(&pem, now);
                    break;
                }
                Err(error) => problems.push(format!("{}: {error}", path.display())),
            }
        }
        for directory in &self.directories {
            #[expect(
                clippy::disallowed_methods,
                reason = "the operating system's directory has links"
            )]
            match std::fs::read_dir(directory) {
                Ok(entries) => {
                    // The directory also has files without certificates, and links to the same certificates.
                    for entry in entries.flatten() {
                        if let Ok(pem) = regular_file::read(&entry.path(), MAX_PEM) {
                            anchors.add(&pem, now);
                        }
                    }
                }
                Err(error) => problems.push(format!("{}: {error}", directory.display())),
            }
        }
        anchors
            .finish(SYSTEM)
            .map_err(|left_out| Error::NoneOnSystem { left_out, problems: problems.join("; ") })
    }
}

pub(crate) async fn load(roots: &Roots) -> Result<Arc<TrustAnchors>, Problem> {
    let blocking = roots.clone();
    tokio::task::spawn_blocking(move || read(&blocking))
        .await
        .unwrap_or_else(|panic| Err(unusable(roots, panic)))
}

/// Reads trust anchors like [`load`], but blocks.
pub(crate) fn read(roots: &Roots) -> Result<Arc<TrustAnchors>, Problem> {
    let now = SystemTime::now();
    let read = match roots {
        Roots::File(path) => regular_file::read(path, MAX_PEM)
            .map_err(Error::from)
            .and_then(|pem| parse(path, &pem, now)),
        Roots::System(system) => system.read(now),
    };
    read.map(Arc::new).map_err(|why| unusable(roots, why))
}

pub(crate) fn unusable(roots: &Roots, why: impl ToString) -> Problem {
    let code = match roots {
        Roots::File(_) => Code::IstiodRootsUnusable,
        Roots::System(_) => Code::SystemRootsUnusable,
    };
    Problem::new(code, format!("root certificates of {roots}"), why)
}

/// The usable certificates so far, each once, and the numbers of unusable ones.
#[derive(Default)]
struct Anchors {
    valid: HashSet<CertificateDer<'static>>,
    broken: usize,
    expired: usize,
}

impl Anchors {
    fn add(&mut self, pem: &[u8], now: SystemTime) {
        for certificate in pem::items::<CertificateDer>(pem) {
            let certificate = certificate.ok().and_then(|der| Some((not_after(&der)?, der)));
            match certificate {
                Some((end, _)) if end < now => self.expired += 1,
                Some((_, der)) => drop(self.valid.insert(der)),
                None => self.broken += 1,
            }
        }
    }

    /// Returns the usable certificates, and logs the number of those left out of `source`. Without any usable
    /// one, this number is the error.
    fn finish(self, source: &str) -> Result<TrustAnchors, LeftOut> {
        let mut store = RootCertStore::empty();
        let valid = self.valid.iter().map(|der| der.as_ref().into());
        let (used, unusable) = store.add_parsable_certificates(valid);
        let left_out = LeftOut { broken: self.broken + unusable, expired: self.expired };
        if used == 0 {
            return Err(left_out);
        }
        let line = format!("{used} root certificates of {source} are used; left out: {left_out}");
        if left_out.broken + left_out.expired > 0
            && LOGGED.lock().insert(source.to_owned(), line.clone()).as_ref() != Some(&line)
        {
            match source {
                SYSTEM => tracing::info!("{line}"),
                _ => tracing::warn!("{line}"),
            }
        }
        Ok(TrustAnchors { store: store.into(), certificates: self.valid })
    }
}

/// Parses trust anchors. Warnings name `path` as their origin.
pub(crate) fn parse(path: &Path, pem: &[u8], now: SystemTime) -> Result<TrustAnchors, Error> {
    let mut anchors = Anchors::default();
    anchors.add(pem, now);
    let count = anchors.valid.len() + anchors.broken + anchors.expired;
    let path = path.display();
    if let Some(left_over) = pem::left_over(pem) {
        tracing::warn!("{path} holds {left_over}; it is ignored");
    }
    anchors.finish(&path.to_string()).map_err(|left_out| match count {
        0 if pem.trim_ascii().is_empty() => Error::Empty,
        0 => Error::NoPem(pem.len()),
        _ => Error::NoneUsable(left_out),
    })
}

pub(crate) fn not_after(der: &[u8]) -> Option<SystemTime> {
    let (_, certificate) = x509_parser::parse_x509_certificate(der).ok()?;
    Some(certificate.validity().not_after.to_datetime().into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::istiod::fake::{self, Authority};

    fn outcome(pem: &str) -> Result<usize, String> {
        parse(Path::new("/r"), pem.as_bytes(), SystemTime::now())
            .map(|found| found.store.len())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn usable_certificates_are_taken_and_an_error_says_what_was_found() {
        let good = Authority::new("good").pem();
        let expired = Authority::expired("old").pem();
        let cut = good.replace("-----END CERTIFICATE-----", "");
        let base64 = "-----BEGIN CERTIFICATE-----\n!!!\n-----END CERTIFICATE-----\n";
        let der = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        let key = fake::key_pem();
        assert_eq!(outcome(&good), Ok(1));
        assert_eq!(outcome(&format!("# two\n{good}{}", Authority::new("b").pem())), Ok(2));
        assert_eq!(outcome(&format!("{base64}{der}{expired}{good}")), Ok(1));
        let both = format!("{}{}", good.trim(), Authority::new("b").pem());
        for pem in [both.replace('\n', "\r"), format!("\u{feff}{both}"), both] {
            assert_eq!(outcome(&pem), Ok(2));
        }
        for (pem, expected) in [
            ("", "is empty"),
            (" \n", "is empty"),
            ("hello", "no PEM certificate in 5 bytes"),
            (&key, "no PEM certificate in"),
            (base64, "1 broken, 0 expired"),
            (der, "1 broken, 0 expired"),
            (&cut, "1 broken, 0 expired"),
            (&expired, "0 broken, 1 expired"),
        ] {
            let text = outcome(pem).unwrap_err();
            assert!(text.contains(expected), "{text}");
        }
    }

    /// Tests also that an empty variable stands for the default paths.
    #[test]
    fn system_roots_are_read_from_ssl_cert_file_and_ssl_cert_dir() {
        let place = tempfile::tempdir().expect("a folder");
        let put = |path: &str, text: &str| {
            let path = place.path().join(path);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("made");
            std::fs::write(path, text).expect("written");
        };
        let [a, b, c, d] = ["a", "b", "c", "d"].map(|name| Authority::new(name).pem());
        put("file.pem", &a);
        put("one/b.pem", &b);
        put("one/again.pem", &format!("{a}{b}"));
        put("one/README", "not PEM");
        put("two/c.crt", &c);
        put("outside.pem", &d);
        let link = |target: &str, path: &str| {
            std::os::unix::fs::symlink(target, place.path().join(path)).expect("linked");
        };
        link("b.pem", "one/0a1b2c3d.0");
        link("../outside.pem", "two/linked.pem");
        link("../gone.pem", "two/dangling.pem");
        let count = |file: &str, directories: &[&str]| {
            let at = |path: &&str| place.path().join(path).display().to_string();
            let directories: Vec<_> = directories.iter().map(at).collect();
            let found = SystemRoots::new(&at(&file), &directories.join(":"));
            found
                .read(SystemTime::now())
                .map(|found| found.store.len())
                .map_err(|error| error.to_string())
        };
        assert_eq!(count("file.pem", &["none"]), Ok(1));
        assert_eq!(count("file.pem", &["one"]), Ok(2));
        assert_eq!(count("none", &["one", "none", "two"]), Ok(4));
        let text = count("none.pem", &["nowhere"]).expect_err("no certificate");
        assert!(text.contains("none.pem: No such file"), "{text}");
        assert!(text.contains("nowhere: No such file"), "{text}");
        assert_eq!(SystemRoots::new("", "/a:/b").files.len(), 8);
        let directories = SystemRoots::new("/f", "").directories;
        assert_eq!(directories, SYSTEM_DIRECTORIES.map(PathBuf::from));
    }
}
