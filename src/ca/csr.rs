//! A key pair and a request for a SPIFFE identity.
//!
//! Does not choose the key type.

use rcgen::{CertificateParams, KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_ECDSA_P384_SHA384};
use rcgen::{PKCS_RSA_SHA256, RsaKeySize, SanType};
use zeroize::Zeroizing;

use crate::identity::SpiffeId;

/// The kind of key to generate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyType {
    P256,
    P384,
    Rsa(usize),
}

/// A request and the key that goes with its answer.
pub struct Request {
    pub csr_pem: String,
    pub key_pem: Zeroizing<String>,
}

impl std::fmt::Debug for Request {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Request").finish_non_exhaustive()
    }
}

/// Why there is no request.
#[derive(Debug, thiserror::Error)]
#[error("failed to generate key and certificate request")]
pub struct CsrError(#[from] rcgen::Error);

/// Generates a key and a request for `identity`.
pub fn generate(key_type: KeyType, identity: &SpiffeId) -> Result<Request, CsrError> {
    let key = match key_type {
        KeyType::P256 => KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?,
        KeyType::P384 => KeyPair::generate_for(&PKCS_ECDSA_P384_SHA384)?,
        KeyType::Rsa(_) => KeyPair::generate_rsa_for(&PKCS_RSA_SHA256, RsaKeySize::_2048)?,
    };
    let mut params = CertificateParams::default();
    params.subject_alt_names = vec![SanType::URI(identity.to_string().try_into()?)];
    Ok(Request {
        csr_pem: params.serialize_request(&key)?.pem()?,
        key_pem: Zeroizing::new(key.serialize_pem()),
    })
}
