//! Reads trust anchors from PEM files.
//!
//! Broken and expired certificates of a file are left out with a warning; a file without usable ones
//! is an error that says what was found. Expiry is checked here, as path validation ignores that of
//! an anchor. The system's roots are kept until their files change; no others are.

use std::collections::HashSet;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use parking_lot::Mutex;
use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

use crate::regular_file;

/// Where trust anchors come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Roots {
    /// PEM, one or more certificates.
    File(PathBuf),
    System(SystemRoots),
}

/// Where the operating system keeps its trust anchors, as Go's package crypto/x509 looks for them: in
/// the first file that can be read, and in every file of the directories.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SystemRoots {
    files: Vec<PathBuf>,
    directories: Vec<PathBuf>,
}

/// The hour, and inode, size and time of each file and directory.
type Stamp = (i64, Vec<Option<(u64, u64, SystemTime)>>);

/// The system's trust anchors as they were read last.
static READ: Mutex<Vec<(SystemRoots, Stamp, Arc<RootCertStore>)>> = Mutex::new(Vec::new());

/// Many times the size of an operating system's bundle.
pub(crate) const MAX_PEM: u64 = 16 << 20;

/// Where the operating systems keep their bundle; the first that exists is used.
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
    /// By the variables `SSL_CERT_FILE` and `SSL_CERT_DIR`, directories with colons between; an empty
    /// one means the usual places.
    pub fn new(file: &str, directories: &str) -> Self {
        let usual = |paths: &[&str]| paths.iter().map(PathBuf::from).collect();
        Self {
            files: match file {
                "" => usual(&SYSTEM_BUNDLES),
                file => vec![file.into()],
            },
            directories: match directories {
                "" => usual(&SYSTEM_DIRECTORIES),
                directories => directories.split(':').map(PathBuf::from).collect(),
            },
        }
    }

    /// What was read last, unless a file or directory has changed or an hour has passed: files in a
    /// directory change too, and roots expire.
    fn current(&self, now: SystemTime) -> Result<Arc<RootCertStore>, String> {
        let state = |path: &PathBuf| {
            let found = std::fs::metadata(path).ok()?;
            Some((found.ino(), found.len(), found.modified().ok()?))
        };
        let states = self.files.iter().chain(&self.directories).map(state);
        let stamp = (seconds(now) / 3600, states.collect());
        let known = READ.lock().clone();
        if let Some((.., store)) = known.iter().find(|it| it.0 == *self && it.1 == stamp) {
            return Ok(store.clone());
        }
        let store = Arc::new(self.read(now)?);
        let mut read = READ.lock();
        read.retain(|known| known.0 != *self);
        read.push((self.clone(), stamp, store.clone()));
        Ok(store)
    }

    fn read(&self, now: SystemTime) -> Result<RootCertStore, String> {
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
            match entries(directory) {
                Ok(paths) => {
                    // Other files lie there, too.
                    let read = |path: PathBuf| regular_file::read(&path, MAX_PEM).ok();
                    let pems = paths.into_iter().filter_map(read);
                    pems.for_each(|pem| anchors.add(&pem, now));
                }
                Err(error) => problems.push(format!("{}: {error}", directory.display())),
            }
        }
        match anchors.store.is_empty() {
            true => Err(format!(
                "no root certificates found on this system: {} broken, {} expired; {}",
                anchors.broken,
                anchors.expired,
                problems.join("; ")
            )),
            false => Ok(anchors.finish("the system")),
        }
    }
}

impl Default for SystemRoots {
    fn default() -> Self {
        Self::new("", "")
    }
}

/// The files of a directory, except second names of one in the same directory.
fn entries(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let is_second_name = |path: &PathBuf| {
        let target = std::fs::read_link(path);
        target.is_ok_and(|target| !target.to_string_lossy().contains('/'))
    };
    let found = std::fs::read_dir(directory)?.flatten();
    let paths = found.map(|entry| entry.path());
    Ok(paths.filter(|path| !is_second_name(path)).collect())
}

/// The trust anchors, or why there are none.
pub(crate) async fn load(roots: &Roots) -> Result<Arc<RootCertStore>, String> {
    let roots = roots.clone();
    let read = tokio::task::spawn_blocking(move || read(&roots)).await;
    read.map_err(|error| format!("cannot read root certificates: {error}"))?
}

/// Like [`load`]. Blocks.
pub(crate) fn read(roots: &Roots) -> Result<Arc<RootCertStore>, String> {
    match roots {
        Roots::File(path) => match regular_file::read(path, MAX_PEM) {
            Ok(pem) => parse(path, &pem, SystemTime::now()).map(Arc::new),
            Err(error) => Err(format!(
                "cannot read root certificates from {}: {error}",
                path.display()
            )),
        },
        Roots::System(system) => system.current(SystemTime::now()),
    }
}

/// The usable certificates so far, each once, and how many were not usable.
struct Anchors {
    store: RootCertStore,
    known: HashSet<CertificateDer<'static>>,
    broken: usize,
    expired: usize,
}

impl Default for Anchors {
    fn default() -> Self {
        Self {
            store: RootCertStore::empty(),
            known: HashSet::new(),
            broken: 0,
            expired: 0,
        }
    }
}

impl Anchors {
    fn add(&mut self, pem: &[u8], now: SystemTime) {
        for certificate in CertificateDer::pem_slice_iter(pem) {
            let Ok(der) = certificate else {
                self.broken += 1;
                continue;
            };
            if !self.known.insert(der.clone()) {
                continue;
            }
            match not_after(&der) {
                Some(end) if end < seconds(now) => self.expired += 1,
                Some(_) if self.store.add(der).is_ok() => {}
                _ => self.broken += 1,
            }
        }
    }

    /// Warns of what was left out of `source`.
    fn finish(self, source: &str) -> RootCertStore {
        let (broken, expired, used) = (self.broken, self.expired, self.store.len());
        if broken + expired > 0 {
            tracing::warn!(
                "left out {broken} broken and {expired} expired root certificates of {source}; using the other {used}"
            );
        }
        self.store
    }
}

/// The trust anchors of a text, whose origin is `path` in errors.
pub(crate) fn parse(path: &Path, pem: &[u8], now: SystemTime) -> Result<RootCertStore, String> {
    let mut anchors = Anchors::default();
    anchors.add(pem, now);
    let (broken, expired) = (anchors.broken, anchors.expired);
    let path = path.display();
    let found = match (anchors.store.len(), broken + expired) {
        (0, 0) if pem.trim_ascii().is_empty() => "is empty, expected PEM".to_owned(),
        (0, 0) => format!("holds no certificate in {} bytes, expected PEM", pem.len()),
        (0, _) => {
            format!("holds no certificate that can be used: {broken} broken, {expired} expired")
        }
        _ => return Ok(anchors.finish(&path.to_string())),
    };
    Err(format!("root certificate file {path} {found}"))
}

/// The end of a certificate's validity in seconds since 1970.
pub(crate) fn not_after(der: &[u8]) -> Option<i64> {
    let (_, certificate) = x509_parser::parse_x509_certificate(der).ok()?;
    Some(certificate.validity().not_after.timestamp())
}

pub(crate) fn seconds(time: SystemTime) -> i64 {
    let since = time
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::istiod::fake::{self, Authority};

    fn outcome(pem: &str) -> Result<usize, String> {
        parse(Path::new("/r"), pem.as_bytes(), SystemTime::now()).map(|store| store.len())
    }

    #[test]
    fn usable_certificates_are_taken_and_an_error_says_what_was_found_if_none_is() {
        let good = Authority::new("good").pem();
        let expired = Authority::expired("old").pem();
        let cut = good.replace("-----END CERTIFICATE-----", "");
        let base64 = "-----BEGIN CERTIFICATE-----\n!!!\n-----END CERTIFICATE-----\n";
        let der = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        let key = fake::key_pem();
        assert_eq!(outcome(&good), Ok(1));
        assert_eq!(
            outcome(&format!("# two\n{good}{}", Authority::new("b").pem())),
            Ok(2)
        );
        assert_eq!(outcome(&format!("{base64}{der}{expired}{good}")), Ok(1));
        for (pem, expected) in [
            ("", "is empty"),
            (" \n", "is empty"),
            ("hello", "holds no certificate in 5 bytes"),
            (&key, "holds no certificate in"),
            (base64, "1 broken, 0 expired"),
            (der, "1 broken, 0 expired"),
            (&cut, "1 broken, 0 expired"),
            (&expired, "0 broken, 1 expired"),
        ] {
            let text = outcome(pem).unwrap_err();
            assert!(text.contains(expected) && text.contains("/r"), "{text}");
        }
    }

    #[test]
    fn system_roots_are_read_again_once_a_file_has_changed() {
        let place = tempfile::tempdir().expect("a folder");
        let path = |name: &str| place.path().join(name).display().to_string();
        let roots = SystemRoots::new(&path("file.pem"), &path(""));
        let current = |now| roots.current(now).map(|store| (store.len(), store));
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_770_000_000);
        assert!(current(now).is_err());
        std::fs::write(path("file.pem"), Authority::new("a").pem()).expect("written");
        let (count, first) = current(now).expect("roots");
        let (_, again) = current(now).expect("roots");
        assert!(count == 1 && Arc::ptr_eq(&first, &again));
        let both = Authority::new("a").pem() + &Authority::new("b").pem();
        std::fs::write(path("file.pem"), both).expect("written");
        let (count, changed) = current(now).expect("roots");
        let (_, hour_later) = current(now + Duration::from_secs(3600)).expect("roots");
        assert!(count == 2 && !Arc::ptr_eq(&changed, &hour_later));
    }

    /// Also the usual places are looked for, where a variable is empty.
    #[test]
    fn system_roots_are_where_ssl_cert_file_and_ssl_cert_dir_say() {
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
            found.read(SystemTime::now()).map(|store| store.len())
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
