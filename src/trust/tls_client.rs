//! Configures TLS clients that are not connections to istiod.

use std::sync::Arc;

use rustls::client::danger::ServerCertVerifier;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{ClientConfig, Error};

use crate::net::unverified_tls;
use crate::trust::chain_verifier::OneOf;
use crate::trust::compliance::Policy;
use crate::trust::trust_anchors::TrustAnchors;

/// Returns the configuration of a client that presents `pair`, and accepts certificates below `roots` with one of
/// `names`, or with any name if there are none. Without roots it accepts any certificate.
pub(crate) fn config(
    roots: Option<TrustAnchors>,
    names: Vec<String>,
    pair: Option<CertifiedKey>,
    alpn_protocols: Vec<Vec<u8>>,
) -> Result<ClientConfig, Error> {
    let verifier: Arc<dyn ServerCertVerifier> = match roots {
        Some(roots) => Arc::new(OneOf { roots, names }),
        None => unverified_tls::verifier(),
    };
    let builder = Policy::None.builder()?.dangerous().with_custom_certificate_verifier(verifier);
    let mut config = match pair {
        Some(pair) => builder.with_client_cert_resolver(Arc::new(SingleCertAndKey::from(pair))),
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = alpn_protocols;
    Ok(config)
}
