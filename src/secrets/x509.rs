//! Reads PEM and X.509: chains, bundles of roots and private keys.

use std::time::SystemTime;

use rustls::crypto::aws_lc_rs::sign::any_supported_type;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};
use x509_parser::x509::SubjectPublicKeyInfo;
use zeroize::Zeroizing;

use crate::pem;

/// What matters of a leaf certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Leaf {
    pub(super) public_key: Vec<u8>,
    pub(super) not_before: SystemTime,
    pub(super) not_after: SystemTime,
    /// The DNS names and URIs of the subject alternative name.
    pub(super) names: Vec<String>,
}

/// An error in the text of a certificate chain or of its private key. It contains nothing of the key.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    #[error("holds no certificate in {bytes} bytes, expected PEM")]
    NoCertificate { bytes: usize },
    #[error("holds a broken certificate at {index}: {found}")]
    BrokenCertificate { index: usize, found: String },
    #[error("holds no private key in {bytes} bytes, expected PEM without a password")]
    NoKey { bytes: usize },
    #[error("holds a private key of no kind that can be used: {0}")]
    UnusableKey(#[source] rustls::Error),
    #[error("holds a private key that does not belong to the certificate")]
    ForeignKey,
}

/// The first certificate of a chain; all others must be certificates as well.
pub(super) fn leaf(chain: &[u8]) -> Result<Leaf, TextError> {
    let mut leaf = None;
    for (index, der) in pem::items::<CertificateDer>(chain).enumerate() {
        let broken = |found| TextError::BrokenCertificate { index, found };
        let der = der.map_err(|error| broken(error.to_string()))?;
        let certificate = parse(&der).map_err(broken)?;
        leaf.get_or_insert_with(|| Leaf {
            public_key: certificate.public_key().subject_public_key.data.to_vec(),
            not_before: certificate.validity().not_before.to_datetime().into(),
            not_after: certificate.validity().not_after.to_datetime().into(),
            names: names(&certificate),
        });
    }
    leaf.ok_or(TextError::NoCertificate { bytes: chain.len() })
}

/// The public half of a private key.
pub(super) fn public_key(pem: &[u8]) -> Result<Vec<u8>, TextError> {
    let Ok(der) = pem::first::<PrivateKeyDer>(pem) else {
        return Err(TextError::NoKey { bytes: pem.len() });
    };
    let der = Zeroizing::new(der);
    let key = any_supported_type(&der).map_err(TextError::UnusableKey)?;
    let unusable = || {
        let problem = "it has no public key".to_owned();
        TextError::UnusableKey(rustls::Error::General(problem))
    };
    let public = key.public_key().ok_or_else(unusable)?;
    let (_, public) = SubjectPublicKeyInfo::from_der(&public).map_err(|_| unusable())?;
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
        Ok((rest, _)) => Err(format!("a certificate with {} bytes behind it", rest.len())),
        Err(error) => Err(format!("no X.509 certificate ({error})")),
    }
}

/// The DNS names and URIs of the subject alternative name; none where it cannot be read.
pub(crate) fn names(certificate: &X509Certificate<'_>) -> Vec<String> {
    let names = certificate.subject_alternative_name().ok().flatten();
    let names = names.map(|names| names.value.general_names.as_slice());
    let text = |name: &GeneralName<'_>| match name {
        GeneralName::DNSName(name) | GeneralName::URI(name) => Some((*name).to_owned()),
        _ => None,
    };
    names.unwrap_or_default().iter().filter_map(text).collect()
}
