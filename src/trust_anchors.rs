//! Reads trust anchors from PEM files.
//!
//! Broken and expired certificates of a file are left out with a warning; a file without usable ones
//! is an error that says what was found. Expiry is checked here, as path validation ignores that of
//! an anchor. Earlier roots are not kept.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

use crate::regular_file;

/// Where trust anchors come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Roots {
    /// PEM, one or more certificates.
    File(PathBuf),
    /// The first bundle of the operating system that exists.
    System,
}

/// Many times the size of an operating system's bundle.
pub(crate) const LARGEST: u64 = 16 << 20;

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

/// The trust anchors, or why there are none.
pub(crate) async fn load(roots: &Roots) -> Result<RootCertStore, String> {
    let path = match roots {
        Roots::File(path) => path.clone(),
        Roots::System => system_bundle().await?,
    };
    match regular_file::read_aside(path.clone(), LARGEST).await {
        Ok(pem) => parse(&path, &pem, SystemTime::now()),
        Err(error) => Err(format!(
            "cannot read root certificates from {}: {error}",
            path.display()
        )),
    }
}

async fn system_bundle() -> Result<PathBuf, String> {
    for path in SYSTEM_BUNDLES {
        if tokio::fs::try_exists(path).await.is_ok_and(|found| found) {
            return Ok(path.into());
        }
    }
    let looked_for = SYSTEM_BUNDLES.join(", ");
    Err(format!(
        "no bundle of root certificates found on this system, looked for {looked_for}"
    ))
}

fn parse(path: &Path, pem: &[u8], now: SystemTime) -> Result<RootCertStore, String> {
    let mut store = RootCertStore::empty();
    let (mut broken, mut expired) = (0, 0);
    for certificate in CertificateDer::pem_slice_iter(pem) {
        match certificate.ok().as_ref().map(|der| (der, not_after(der))) {
            Some((_, Some(end))) if end < seconds(now) => expired += 1,
            Some((der, Some(_))) if store.add(der.clone()).is_ok() => {}
            _ => broken += 1,
        }
    }
    let found = match (store.len(), broken + expired) {
        (0, 0) if pem.trim_ascii().is_empty() => "is empty, expected PEM".to_owned(),
        (0, 0) => format!("holds no certificate in {} bytes, expected PEM", pem.len()),
        (0, _) => {
            format!("holds no certificate that can be used: {broken} broken, {expired} expired")
        }
        (_, 0) => return Ok(store),
        (used, _) => {
            tracing::warn!(
                "left out {broken} broken and {expired} expired root certificates of {}; using the other {used}",
                path.display()
            );
            return Ok(store);
        }
    };
    let path = path.display();
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
}
