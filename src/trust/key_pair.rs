//! Pairs a certificate chain with its key.

use rustls::crypto::aws_lc_rs::sign::any_supported_type;
use rustls::pki_types::{self, CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use rustls::{Error, InconsistentKeys};
use zeroize::Zeroizing;

use crate::trust::pem;

/// The part of a pair that cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unusable {
    #[error(transparent)]
    Chain(pki_types::pem::Error),
    #[error(transparent)]
    Key(pki_types::pem::Error),
    #[error(transparent)]
    Pair(Error),
}

pub(crate) fn from_pem(chain: &[u8], key: &[u8]) -> Result<CertifiedKey, Unusable> {
    let chain = pem::items(chain).collect::<Result<_, _>>().map_err(Unusable::Chain)?;
    certified(chain, &Zeroizing::new(pem::first(key).map_err(Unusable::Key)?))
        .map_err(Unusable::Pair)
}

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
