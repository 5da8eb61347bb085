//! Parses X.509 from PEM: chains, bundles of roots and private keys.

use std::fmt;
use std::time::SystemTime;

use rustls::crypto::aws_lc_rs::sign::any_supported_type;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use x509_parser::error::X509Error;
use x509_parser::nom;
use x509_parser::prelude::{FromDer, X509Certificate};
use x509_parser::x509::SubjectPublicKeyInfo;
use zeroize::Zeroizing;

use super::schedule::signed_seconds;
use crate::problem::{Code, Problem};
use crate::runtime::clock::rfc3339;
use crate::runtime::duration::rounded_seconds;
use crate::runtime::lifecycle::BoxError;
use crate::trust::{chain_verifier, pem};

/// The most names of a certificate that are shown in a text.
pub(crate) const MAX_NAMES: usize = 8;
/// The part of its lifetime that a certificate does not reach if it is renewed in time.
const LAST_TENTH: f64 = 0.1;

/// Why text is not a usable chain or key.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("{0} bytes follow its end")]
    TrailingBytes(usize),
    #[error("not an X.509 certificate ({0})")]
    NotX509(nom::Err<X509Error>),
    #[error("certificate {number} is broken: {why}")]
    Broken { number: usize, why: BoxError },
    #[error("no certificate in {0} bytes, expected PEM")]
    NoCertificate(usize),
    #[error("no private key in {0} bytes, expected PEM without a password")]
    NoKey(usize),
    #[error("the private key is of a kind that is not supported: {0}")]
    KeyKind(rustls::Error),
    #[error("the private key does not have a public half")]
    NoPublicHalf,
    #[error("the private key does not belong to the certificate")]
    OtherKey,
}

/// The fields of a certificate that the agent uses.
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
    pub(crate) fn read(der: &[u8]) -> Result<Self, Error> {
        let certificate = parse(der)?;
        let validity = certificate.validity();
        Ok(Self {
            subject: certificate.subject().to_string(),
            issuer: certificate.issuer().to_string(),
            public_key: certificate.public_key().subject_public_key.data.to_vec(),
            not_before: validity.not_before.to_datetime().into(),
            not_after: validity.not_after.to_datetime().into(),
            names: chain_verifier::alternative_names(&certificate),
        })
    }

    /// Reports a certificate that is not valid at `now`, or in the last tenth of its lifetime.
    pub(crate) fn validity_problem(&self, subject: &str, now: SystemTime) -> Option<Problem> {
        let wait = signed_seconds(self.not_before, now);
        let left = signed_seconds(self.not_after, now);
        let (code, what, date) = if wait > 0.0 {
            let what = format!("is valid in {}, from", rounded_seconds(wait));
            (Code::CertificateNotYetValid, what, self.not_before)
        } else if left < 0.0 {
            let what = format!("expired {} ago, at", rounded_seconds(-left));
            (Code::CertificateExpired, what, self.not_after)
        } else if left < signed_seconds(self.not_after, self.not_before) * LAST_TENTH {
            let what = format!("expires in {}, at", rounded_seconds(left));
            (Code::CertificateExpiresSoon, what, self.not_after)
        } else {
            return None;
        };
        let [date, now] = [date, now].map(rfc3339);
        let found = format!("{self} {what} {date}; the time here is {now}");
        Some(Problem::new(code, subject, found))
    }
}

impl fmt::Display for Facts {
    /// Writes the names, or the subject if there are none.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.names.get(..MAX_NAMES).unwrap_or(&self.names) {
            [] => f.write_str(&self.subject),
            names => f.write_str(&names.join(", ")),
        }
    }
}

/// Checks that all items of a chain are certificates. Returns the first one.
pub(super) fn parse_chain(chain: &[u8]) -> Result<Facts, Error> {
    let mut leaf = None;
    for (index, der) in pem::items::<CertificateDer>(chain).enumerate() {
        let facts = der
            .map_err(BoxError::from)
            .and_then(|der| Ok(Facts::read(&der)?))
            .map_err(|why| Error::Broken { number: index + 1, why })?;
        leaf.get_or_insert(facts);
    }
    leaf.ok_or(Error::NoCertificate(chain.len()))
}

/// Derives the public half of a private key. Errors do not quote the key.
pub(super) fn public_key(pem: &[u8]) -> Result<Vec<u8>, Error> {
    let key = pem::first::<PrivateKeyDer>(pem).map_err(|_| Error::NoKey(pem.len()))?;
    let key = any_supported_type(&Zeroizing::new(key)).map_err(Error::KeyKind)?;
    let public = key.public_key().ok_or(Error::NoPublicHalf)?;
    let (_, public) = SubjectPublicKeyInfo::from_der(&public).map_err(|_| Error::NoPublicHalf)?;
    Ok(public.subject_public_key.data.to_vec())
}

/// Returns the certificates of a bundle, as DER; None stands for a broken one.
pub(super) fn certificates(pem: &[u8]) -> impl Iterator<Item = Option<Vec<u8>>> {
    pem::items::<CertificateDer>(pem).map(|der| {
        let der = der.ok()?.to_vec();
        if parse(&der).is_ok() { Some(der) } else { None }
    })
}

/// Returns the name and key of a certificate, as far as Envoy compares them, and its rank among the
/// certificates with the same name and key: valid ones before others, then by their end, in seconds since 1970.
pub(super) fn holder_and_rank(der: &[u8]) -> Option<(Vec<u8>, (bool, i64))> {
    let certificate = parse(der).ok()?;
    let name = certificate.subject().to_string().to_lowercase();
    let holder = [name.as_bytes(), certificate.public_key().raw].concat();
    let validity = certificate.validity();
    let rank = (validity.is_valid(), validity.not_after.timestamp());
    Some((holder, rank))
}

pub(super) fn to_pem(ders: &[Vec<u8>]) -> String {
    ders.iter().map(|der| pem::encode("CERTIFICATE", der).to_string()).collect()
}

pub(super) fn parse(der: &[u8]) -> Result<X509Certificate<'_>, Error> {
    match X509Certificate::from_der(der) {
        Ok(([], certificate)) => Ok(certificate),
        Ok((rest, _)) => Err(Error::TrailingBytes(rest.len())),
        Err(error) => Err(Error::NotX509(error)),
    }
}
