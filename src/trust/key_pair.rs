//! Pairs a certificate chain with its key.

use rustls::crypto::aws_lc_rs::sign::any_supported_type;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use rustls::{Error, InconsistentKeys};

/// Fails if the key does not belong to the chain. rustls' own pairing would leave a copy of the key in memory.
pub(crate) fn certified(
    chain: Vec<CertificateDer<'static>>,
    key: &PrivateKeyDer<'_>,
) -> Result<CertifiedKey, Error> {
    let pair = CertifiedKey::new(chain, any_supported_type(key)?);
    match pair.keys_match() {
        Ok(()) | Err(Error::InconsistentKeys(InconsistentKeys::Unknown)) => Ok(pair),
        Err(error) => Err(error),
    }
}
