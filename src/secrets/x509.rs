//! Reads PEM and X.509: chains, bundles of roots and private keys.

use std::fmt;
use std::time::SystemTime;

use rustls::crypto::aws_lc_rs::sign::any_supported_type;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};
use x509_parser::x509::SubjectPublicKeyInfo;
use zeroize::Zeroizing;

use super::metrics::seconds;
use crate::clock::rfc3339;
use crate::duration::approximate;
use crate::pem;
use crate::problem::{Problem, codes};

/// The most names of a certificate in a text.
pub(crate) const MAX_NAMES: usize = 8;
/// The part of its life a certificate that is renewed in time never gets to.
const LAST_TENTH: f64 = 0.1;

const NO_PUBLIC_HALF: &str = "the private key does not have a public half";

/// What matters of a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Facts {
    pub(crate) subject: String,
    pub(crate) issuer: String,
    pub(super) public_key: Vec<u8>,
    pub(crate) not_before: SystemTime,
    pub(crate) not_after: SystemTime,
    /// The DNS names and URIs of the subject alternative name.
    pub(crate) names: Vec<String>,
}

impl Facts {
    pub(crate) fn read(der: &[u8]) -> Result<Self, String> {
        let certificate = parse(der)?;
        let validity = certificate.validity();
        Ok(Self {
            subject: certificate.subject().to_string(),
            issuer: certificate.issuer().to_string(),
            public_key: certificate.public_key().subject_public_key.data.to_vec(),
            not_before: validity.not_before.to_datetime().into(),
            not_after: validity.not_after.to_datetime().into(),
            names: names(&certificate),
        })
    }

    /// The problem of a certificate that is not valid at `now`, or only for the last tenth of its life.
    pub(crate) fn validity_problem(&self, subject: &str, now: SystemTime) -> Option<Problem> {
        let (begin, end) = (self.not_before, self.not_after);
        let (wait, left) = (seconds(begin, now), seconds(end, now));
        let (code, what, date) = if wait > 0.0 {
            let what = format!("is valid in {}, from", approximate(wait));
            (codes::CERTIFICATE_NOT_YET_VALID, what, begin)
        } else if left < 0.0 {
            let what = format!("expired {} ago, at", approximate(-left));
            (codes::CERTIFICATE_EXPIRED, what, end)
        } else if left < seconds(end, begin) * LAST_TENTH {
            let what = format!("expires in {}, at", approximate(left));
            (codes::CERTIFICATE_EXPIRES_SOON, what, end)
        } else {
            return None;
        };
        let (date, now) = (rfc3339(date), rfc3339(now));
        let found = format!("{self} {what} {date}; the time here is {now}");
        Some(Problem::new(code, subject, found))
    }
}

impl fmt::Display for Facts {
    /// By its names, or its subject where it has none.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.names.get(..MAX_NAMES).unwrap_or(&self.names) {
            [] => f.write_str(&self.subject),
            names => f.write_str(&names.join(", ")),
        }
    }
}

pub(super) fn no_certificate(content: &[u8]) -> String {
    format!("no certificate in {} bytes, expected PEM", content.len())
}

/// The first certificate of a chain; all others must be certificates as well.
pub(super) fn leaf(chain: &[u8]) -> Result<Facts, String> {
    let mut leaf = None;
    for (index, der) in pem::items::<CertificateDer>(chain).enumerate() {
        let broken = |found| format!("certificate {} is broken: {found}", index + 1);
        let der = der.map_err(|error| broken(error.to_string()))?;
        let facts = Facts::read(&der).map_err(broken)?;
        leaf.get_or_insert(facts);
    }
    leaf.ok_or_else(|| no_certificate(chain))
}

/// The public half of a private key. Errors contain nothing of the key.
pub(super) fn public_key(pem: &[u8]) -> Result<Vec<u8>, String> {
    let bytes = pem.len();
    let der = pem::first::<PrivateKeyDer>(pem)
        .map_err(|_| format!("no private key in {bytes} bytes, expected PEM without a password"))?;
    let der = Zeroizing::new(der);
    let key = any_supported_type(&der)
        .map_err(|error| format!("the private key is of a kind that is not supported: {error}"))?;
    let public = key.public_key().ok_or(NO_PUBLIC_HALF)?;
    let (_, public) = SubjectPublicKeyInfo::from_der(&public).map_err(|_| NO_PUBLIC_HALF)?;
    Ok(public.subject_public_key.data.to_vec())
}

/// The certificates of a bundle; None stands for a broken one.
pub(super) fn bundle(pem: &[u8]) -> impl Iterator<Item = Option<Vec<u8>>> {
    pem::items::<CertificateDer>(pem).map(|der| {
        let der = der.ok()?.to_vec();
        parse(&der).is_ok().then_some(der)
    })
}

/// Name and key of a certificate, as far as Envoy compares them; whether it is valid now, and its end
/// in seconds since 1970.
pub(super) fn issue(der: &[u8]) -> Option<(Vec<u8>, (bool, i64))> {
    let certificate = parse(der).ok()?;
    let name = certificate.subject().to_string().to_lowercase();
    let holder = [name.as_bytes(), certificate.public_key().raw].concat();
    let validity = certificate.validity();
    Some((
        holder,
        (validity.is_valid(), validity.not_after.timestamp()),
    ))
}

/// Writes certificates as PEM.
pub(super) fn text(certificates: impl IntoIterator<Item = Vec<u8>>) -> String {
    let ders = certificates.into_iter();
    let texts = ders.map(|der| pem::encode("CERTIFICATE", &der).to_string());
    texts.collect()
}

pub(super) fn parse(der: &[u8]) -> Result<X509Certificate<'_>, String> {
    match X509Certificate::from_der(der) {
        Ok(([], certificate)) => Ok(certificate),
        Ok((rest, _)) => Err(format!("{} bytes follow its end", rest.len())),
        Err(error) => Err(format!("not an X.509 certificate ({error})")),
    }
}

/// The DNS names and URIs of the subject alternative name; none where it cannot be read.
pub(super) fn names(certificate: &X509Certificate<'_>) -> Vec<String> {
    let names = certificate.subject_alternative_name().ok().flatten();
    let names = names.map(|names| names.value.general_names.as_slice());
    let text = |name: &GeneralName<'_>| match name {
        GeneralName::DNSName(name) | GeneralName::URI(name) => Some((*name).to_owned()),
        _ => None,
    };
    names.unwrap_or_default().iter().filter_map(text).collect()
}
