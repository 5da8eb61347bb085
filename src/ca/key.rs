//! A new private key, and its text form.
//!
//! The library hands out PKCS #8, in which the older forms are wrapped: PKCS #1 as it is, SEC 1
//! without the name of its curve, which is put back. Whatever holds a key on the way is overwritten
//! when dropped.
//!
//! Does not reuse keys.

use aws_lc_rs::encoding::{AsDer, EcPrivateKeyRfc5915Der};
use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_ASN1_SIGNING, ECDSA_P384_SHA384_ASN1_SIGNING, EcdsaKeyPair,
};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_ECDSA_P384_SHA384, PKCS_RSA_SHA256, RsaKeySize};
use x509_parser::asn1_rs::{Any, FromDer, OctetString, Sequence};
use zeroize::Zeroizing;

use super::csr::{CsrError, KeyType};

/// How a private key is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Encoding {
    /// PKCS #1 for RSA, SEC 1 for ECDSA.
    #[default]
    Traditional,
    Pkcs8,
}

/// Columns of PEM (RFC 7468, section 2).
const COLUMNS: usize = 64;

pub(super) fn generate(key_type: KeyType) -> Result<Zeroizing<KeyPair>, CsrError> {
    let size = match key_type {
        KeyType::P256 => return ecdsa(&PKCS_ECDSA_P256_SHA256),
        KeyType::P384 => return ecdsa(&PKCS_ECDSA_P384_SHA384),
        KeyType::Rsa(2048) => RsaKeySize::_2048,
        KeyType::Rsa(3072) => RsaKeySize::_3072,
        KeyType::Rsa(4096) => RsaKeySize::_4096,
        KeyType::Rsa(bits @ ..2048) => return Err(CsrError::RsaTooSmall { bits }),
        KeyType::Rsa(bits) => return Err(CsrError::RsaSize { bits }),
    };
    let key = KeyPair::generate_rsa_for(&PKCS_RSA_SHA256, size)?;
    Ok(Zeroizing::new(key))
}

fn ecdsa(algorithm: &'static rcgen::SignatureAlgorithm) -> Result<Zeroizing<KeyPair>, CsrError> {
    Ok(Zeroizing::new(KeyPair::generate_for(algorithm)?))
}

/// The key as PEM.
pub(super) fn encoded(
    key: &KeyPair,
    key_type: KeyType,
    encoding: Encoding,
) -> Result<Zeroizing<String>, CsrError> {
    let pkcs8 = key.serialized_der();
    match (encoding, key_type) {
        (Encoding::Pkcs8, _) => Ok(pem("PRIVATE KEY", pkcs8)),
        (Encoding::Traditional, KeyType::Rsa(_)) => {
            let inner = wrapped(pkcs8).ok_or(CsrError::Form)?;
            Ok(pem("RSA PRIVATE KEY", inner))
        }
        (Encoding::Traditional, KeyType::P256 | KeyType::P384) => {
            let algorithm = match key_type {
                KeyType::P384 => &ECDSA_P384_SHA384_ASN1_SIGNING,
                _ => &ECDSA_P256_SHA256_ASN1_SIGNING,
            };
            let key = EcdsaKeyPair::from_pkcs8(algorithm, pkcs8).map_err(|_| CsrError::Form)?;
            let sec1: EcPrivateKeyRfc5915Der<'_> =
                key.private_key().as_der().map_err(|_| CsrError::Form)?;
            Ok(pem("EC PRIVATE KEY", sec1.as_ref()))
        }
    }
}

/// What PKCS #8 wraps: version, algorithm, key (RFC 5958, section 2).
fn wrapped(pkcs8: &[u8]) -> Option<&[u8]> {
    let (_, outer) = Sequence::from_der(pkcs8).ok()?;
    let std::borrow::Cow::Borrowed(content) = outer.content else {
        return None;
    };
    let (rest, _version) = Any::from_der(content).ok()?;
    let (rest, _algorithm) = Any::from_der(rest).ok()?;
    let (_, key) = Any::from_der(rest).ok()?;
    (key.tag() == <OctetString<'_> as x509_parser::asn1_rs::Tagged>::TAG).then_some(key.data)
}

/// Sized beforehand: a text that grew would leave copies behind.
fn pem(label: &str, der: &[u8]) -> Zeroizing<String> {
    let base64 = Zeroizing::new(BASE64_STANDARD.encode(der));
    let lines = base64.len().div_ceil(COLUMNS);
    let mut pem = Zeroizing::new(String::with_capacity(
        base64.len() + lines + 2 * label.len() + 40,
    ));
    for part in ["-----BEGIN ", label, "-----\n"] {
        pem.push_str(part);
    }
    let mut rest = base64.as_str();
    while !rest.is_empty() {
        let (line, more) = rest.split_at(rest.len().min(COLUMNS));
        pem.push_str(line);
        pem.push('\n');
        rest = more;
    }
    for part in ["-----END ", label, "-----\n"] {
        pem.push_str(part);
    }
    pem
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::PublicKeyData;

    #[test]
    fn every_form_is_labelled_as_what_it_is_and_holds_the_same_key() {
        for (key_type, label) in [
            (KeyType::P256, "EC PRIVATE KEY"),
            (KeyType::P384, "EC PRIVATE KEY"),
            (KeyType::Rsa(2048), "RSA PRIVATE KEY"),
        ] {
            let key = generate(key_type).unwrap();
            for (encoding, label) in [
                (Encoding::Traditional, label),
                (Encoding::Pkcs8, "PRIVATE KEY"),
            ] {
                let pem = encoded(&key, key_type, encoding).unwrap();
                assert!(pem.starts_with(&format!("-----BEGIN {label}-----\n")));
                assert!(pem.ends_with(&format!("\n-----END {label}-----\n")));
                assert!(pem.lines().all(|line| line.len() <= COLUMNS));
                let read = KeyPair::from_pem(&pem).unwrap();
                assert_eq!(read.der_bytes(), key.der_bytes(), "{key_type:?}");
            }
        }
    }

    #[test]
    fn an_elliptic_key_names_its_curve() {
        for (key_type, curve) in [
            (
                KeyType::P256,
                &[0x06, 0x08, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07][..],
            ),
            (KeyType::P384, &[0x06, 0x05, 0x2b, 0x81, 0x04, 0x00, 0x22]),
        ] {
            let key = generate(key_type).unwrap();
            let text = encoded(&key, key_type, Encoding::Traditional).unwrap();
            let (_, block) = x509_parser::pem::parse_x509_pem(text.as_bytes()).unwrap();
            let names_it = block
                .contents
                .windows(curve.len())
                .any(|part| part == curve);
            assert!(names_it, "{key_type:?}");
        }
    }
}
