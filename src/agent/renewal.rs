//! Connects certificate renewal to its authority.

use std::time::Duration;

use super::Agent;
use crate::ca::csr::KeyType;
use crate::ca::istio::IstioCa;
use crate::clock::Clock;
use crate::config::KeyChoice;
use crate::istiod::Istiod;
use crate::secrets::{self, Secrets};

/// For the connection to istiod, and for its first answer to a CSR.
const SIGNING_LIMIT: Duration = Duration::from_secs(10);

impl Agent {
    pub(super) fn renewal(&mut self, istiod: &Istiod) -> Secrets {
        let authority = match self.config.ca_istiod.clone() {
            Some(config) => self.istiod("connection to the certificate authority", config),
            None => istiod.clone(),
        };
        let parameters = &self.config.secrets;
        let signer = parameters.cert_signer.clone().unwrap_or_default();
        let authority = IstioCa::new(authority, signer, SIGNING_LIMIT);
        let config = secrets::Config {
            identity: parameters.identity.clone(),
            key_type: key_type(parameters.key),
            encoding: parameters.encoding,
            ttl: parameters.ttl,
            grace_ratio: parameters.grace_ratio,
            grace_jitter: parameters.grace_jitter,
            least_pause: secrets::LEAST_PAUSE,
            spread_by: self.config.bootstrap.node.id.clone(),
            keep: parameters.keep.clone(),
        };
        let (secrets, renewal) = secrets::new(config, authority, Clock::system(), &self.metrics);
        self.spawn_until_shutdown("certificate renewal", renewal);
        secrets
    }
}

fn key_type(key: KeyChoice) -> KeyType {
    match key {
        KeyChoice::EcdsaP256 => KeyType::P256,
        KeyChoice::EcdsaP384 => KeyType::P384,
        KeyChoice::Rsa { bits } => KeyType::Rsa(bits),
    }
}
