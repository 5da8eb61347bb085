//! Connects certificate renewal to its authority.

use std::time::Duration;

use super::Agent;
use crate::ca::istio::IstioCa;
use crate::clock::Clock;
use crate::istiod::Istiod;
use crate::secrets::{self, Secrets};

/// For the connection to istiod, and for its first answer to a CSR.
const SIGNING_LIMIT: Duration = Duration::from_secs(10);

impl Agent {
    /// Has certificates signed and renewed as configured.
    pub(super) fn renewal(&mut self, istiod: &Istiod) -> Secrets {
        let authority = match self.config.ca_istiod.clone() {
            Some(config) => self.istiod("connection to the certificate authority", config),
            None => istiod.clone(),
        };
        let config = self.config.secrets.clone();
        let authority = IstioCa::new(authority, config.cert_signer, SIGNING_LIMIT);
        let (secrets, renewal) =
            secrets::new(config.renewal, authority, Clock::system(), &self.metrics);
        self.spawn_until_shutdown("certificate renewal", renewal);
        secrets
    }
}
