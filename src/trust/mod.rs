//! Certificates and identities, and the verification of chains.

pub(crate) mod chain_verifier;
pub mod compliance;
pub mod identity;
pub(crate) mod key_pair;
pub(crate) mod pem;
pub(crate) mod tls_client;
pub mod trust_anchors;
