//! Identifies callers by a verified client certificate, or otherwise by a bearer token.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::SystemTime;

use http::HeaderMap;
use http::header::AUTHORIZATION;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::FromDer;

use super::token::{TokenError, TokenKey};
use crate::identity::{InvalidSpiffeId, SpiffeId};

/// The other end of a connection. If it has a leaf certificate, TLS has verified it.
#[derive(Clone, Debug)]
pub(super) struct Peer {
    pub(super) address: SocketAddr,
    pub(super) leaf: Option<Arc<[u8]>>,
}

/// An authenticator of identities in one trust domain.
#[derive(Clone, Debug)]
pub(super) struct Authenticator {
    pub(super) trust_domain: String,
    pub(super) tokens: Arc<TokenKey>,
}

/// The reason why a caller is not authenticated. The caller only sees a status code and a fixed text.
#[derive(Debug, thiserror::Error)]
pub(super) enum CallerError {
    #[error("neither a client certificate nor a bearer token")]
    Nothing,
    #[error("the connection is not TLS")]
    Plaintext,
    #[error("authorization is not of the form Bearer <token>")]
    NotBearer,
    #[error(transparent)]
    Token(#[from] TokenError),
    #[error("client certificate is unreadable")]
    Certificate,
    #[error("client certificate has {found} URI names, expected one")]
    Names { found: usize },
    #[error("client certificate: {0}")]
    Name(#[from] InvalidSpiffeId),
    #[error("client certificate is of trust domain {found:?}, expected {expected:?}")]
    TrustDomain { found: String, expected: String },
}

impl Authenticator {
    /// Returns the caller's identity. The certificate takes precedence; if it has no valid identity, the
    /// token decides.
    pub(super) fn caller(&self, peer: &Peer, headers: &HeaderMap) -> Result<SpiffeId, CallerError> {
        let Some(leaf) = &peer.leaf else {
            return self.bearer(headers);
        };
        self.certificate(leaf).or_else(|error| match self.bearer(headers) {
            Err(CallerError::Nothing) => Err(error),
            answer => answer,
        })
    }

    fn certificate(&self, leaf: &[u8]) -> Result<SpiffeId, CallerError> {
        let (_, leaf) = x509_parser::certificate::X509Certificate::from_der(leaf)
            .map_err(|_| CallerError::Certificate)?;
        let san = leaf.subject_alternative_name().map_err(|_| CallerError::Certificate)?;
        let uris: Vec<&str> = san
            .iter()
            .flat_map(|san| &san.value.general_names)
            .filter_map(|name| match name {
                GeneralName::URI(uri) => Some(*uri),
                _ => None,
            })
            .collect();
        let [uri] = uris.as_slice() else {
            return Err(CallerError::Names { found: uris.len() });
        };
        let identity: SpiffeId = uri.parse()?;
        if identity.trust_domain != self.trust_domain {
            return Err(CallerError::TrustDomain {
                found: identity.trust_domain,
                expected: self.trust_domain.clone(),
            });
        }
        Ok(identity)
    }

    fn bearer(&self, headers: &HeaderMap) -> Result<SpiffeId, CallerError> {
        let header = headers.get(AUTHORIZATION).ok_or(CallerError::Nothing)?;
        let token = header
            .to_str()
            .ok()
            .and_then(|header| header.strip_prefix("Bearer "))
            .ok_or(CallerError::NotBearer)?;
        let account = self.tokens.verify(token, SystemTime::now())?;
        Ok(SpiffeId {
            trust_domain: self.trust_domain.clone(),
            namespace: account.namespace,
            service_account: account.service_account,
        })
    }
}
