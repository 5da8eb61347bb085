//! Makes private keys and writes them as PEM.
//!
//! rcgen writes PKCS #8, which contains the traditional forms: PKCS #1 unchanged, SEC 1 without the name of
//! its curve, which is added again. Intermediate copies of a key are overwritten when dropped.

use aws_lc_rs::encoding::{AsDer, EcPrivateKeyRfc5915Der, Pkcs8V1Der};
use aws_lc_rs::rsa::{self, KeySize};
use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_ASN1_SIGNING, ECDSA_P384_SHA384_ASN1_SIGNING, EcdsaKeyPair,
};
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_ECDSA_P384_SHA384, PKCS_RSA_SHA256};
use x509_parser::asn1_rs::{Any, FromDer, Sequence, Tag};
use zeroize::Zeroizing;

use crate::runtime::lifecycle::BoxError;
use crate::trust::pem;

/// The algorithm of a private key. Making an ECDSA key takes microseconds, an RSA key milliseconds, one of
/// 8192 bits seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyType {
    P256,
    P384,
    /// The least size in bits, from 2048 to 8192; it is rounded up to one of [`RSA_SIZES`].
    Rsa(u32),
}

const UNDOCUMENTED_FORM: &str = "the library wrote the new key in a form it does not document";

/// The encoding of a private key in PEM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Encoding {
    /// PKCS #1 for RSA, SEC 1 for ECDSA.
    #[default]
    Traditional,
    Pkcs8,
}

/// The sizes of RSA keys the library makes, in bits.
pub const RSA_SIZES: [u32; 4] = [2048, 3072, 4096, 8192];

pub(super) fn generate(key_type: KeyType) -> Result<Zeroizing<KeyPair>, BoxError> {
    let key = match key_type {
        KeyType::P256 => KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256),
        KeyType::P384 => KeyPair::generate_for(&PKCS_ECDSA_P384_SHA384),
        KeyType::Rsa(bits) => {
            // rcgen does not make the largest size.
            let key =
                rsa::KeyPair::generate(rsa_size(bits)).map_err(|_| "cannot make an RSA key")?;
            let pkcs8: Pkcs8V1Der<'_> = key.as_der().map_err(|_| UNDOCUMENTED_FORM)?;
            KeyPair::from_pkcs8_der_and_sign_algo(&pkcs8.as_ref().into(), &PKCS_RSA_SHA256)
        }
    };
    Ok(Zeroizing::new(key?))
}

/// Rounds up to one of [`RSA_SIZES`].
fn rsa_size(bits: u32) -> KeySize {
    match bits {
        ..=2048 => KeySize::Rsa2048,
        2049..=3072 => KeySize::Rsa3072,
        3073..=4096 => KeySize::Rsa4096,
        4097.. => KeySize::Rsa8192,
    }
}

pub(super) fn to_pem(
    key: &KeyPair,
    key_type: KeyType,
    encoding: Encoding,
) -> Result<Zeroizing<String>, BoxError> {
    let pkcs8 = key.serialized_der();
    let algorithm = match (encoding, key_type) {
        (Encoding::Pkcs8, _) => return Ok(pem::encode("PRIVATE KEY", pkcs8)),
        (Encoding::Traditional, KeyType::Rsa(_)) => {
            return Ok(pem::encode(
                "RSA PRIVATE KEY",
                unwrap_pkcs8(pkcs8).ok_or(UNDOCUMENTED_FORM)?,
            ));
        }
        (Encoding::Traditional, KeyType::P256) => &ECDSA_P256_SHA256_ASN1_SIGNING,
        (Encoding::Traditional, KeyType::P384) => &ECDSA_P384_SHA384_ASN1_SIGNING,
    };
    let key = EcdsaKeyPair::from_pkcs8(algorithm, pkcs8).map_err(|_| UNDOCUMENTED_FORM)?;
    let sec1: EcPrivateKeyRfc5915Der<'_> =
        key.private_key().as_der().map_err(|_| UNDOCUMENTED_FORM)?;
    Ok(pem::encode("EC PRIVATE KEY", sec1.as_ref()))
}

/// Returns the key inside PKCS #8, which is version, algorithm, key (RFC 5958, section 2).
fn unwrap_pkcs8(pkcs8: &[u8]) -> Option<&[u8]> {
    let (_, outer) = Sequence::from_der(pkcs8).ok()?;
    let std::borrow::Cow::Borrowed(content) = outer.content else {
        return None;
    };
    let (rest, _version) = Any::from_der(content).ok()?;
    let (rest, _algorithm) = Any::from_der(rest).ok()?;
    let (_, key) = Any::from_der(rest).ok()?;
    (key.tag() == Tag::OctetString).then_some(key.data)
}

#[cfg(test)]
mod tests {
    use super::*;
    use aws_lc_rs::signature::RsaKeyPair;
    use rcgen::PublicKeyData;

    #[test]
    fn each_key_encoding_has_its_pem_label_and_the_same_key() {
        for (key_type, label) in [
            (KeyType::P256, "EC PRIVATE KEY"),
            (KeyType::P384, "EC PRIVATE KEY"),
            (KeyType::Rsa(2048), "RSA PRIVATE KEY"),
        ] {
            let key = generate(key_type).unwrap();
            for (encoding, label) in
                [(Encoding::Traditional, label), (Encoding::Pkcs8, "PRIVATE KEY")]
            {
                let pem = to_pem(&key, key_type, encoding).unwrap();
                assert!(pem.starts_with(&format!("-----BEGIN {label}-----\n")));
                assert!(pem.ends_with(&format!("\n-----END {label}-----\n")));
                assert!(pem.lines().all(|line| line.len() <= 64));
                let read = KeyPair::from_pem(&pem).unwrap();
                assert_eq!(read.der_bytes(), key.der_bytes(), "{key_type:?}");
            }
        }
    }

    #[test]
    fn rsa_sizes_are_rounded_up_to_one_the_library_makes() {
        for (bits, made) in [(2048, 2048), (2049, 3072), (3072, 3072), (4096, 4096)] {
            let key = generate(KeyType::Rsa(bits)).unwrap();
            let modulus = RsaKeyPair::from_pkcs8(key.serialized_der()).unwrap();
            assert_eq!(modulus.public_modulus_len() * 8, made, "{bits}");
        }
        for (bits, made) in [(4097, KeySize::Rsa8192), (8192, KeySize::Rsa8192)] {
            assert_eq!(rsa_size(bits), made);
        }
        let sizes = RSA_SIZES.map(|bits| rsa_size(bits).len() * 8);
        assert_eq!(sizes, RSA_SIZES.map(|bits| bits as usize));
    }

    #[test]
    fn an_elliptic_key_names_its_curve() {
        // The OIDs of the curves, in DER.
        for (key_type, curve) in [
            (KeyType::P256, &[0x06, 0x08, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07][..]),
            (KeyType::P384, &[0x06, 0x05, 0x2b, 0x81, 0x04, 0x00, 0x22]),
        ] {
            let key = generate(key_type).unwrap();
            let text = to_pem(&key, key_type, Encoding::Traditional).unwrap();
            let (_, block) = x509_parser::pem::parse_x509_pem(text.as_bytes()).unwrap();
            let names_it = block.contents.windows(curve.len()).any(|part| part == curve);
            assert!(names_it, "{key_type:?}");
        }
    }
}
