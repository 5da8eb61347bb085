//! The workload's identity and what its certificates are to be like.
//!
//! Does not make keys.

use std::time::Duration;

use super::Sources;
use super::environment as variables;
use crate::identity::SpiffeId;

/// What the secrets room needs to know.
#[derive(Clone, Debug)]
pub struct SecretsParameters {
    pub identity: SpiffeId,
    pub key: KeyChoice,
    /// Lifetime asked for.
    pub ttl: Duration,
    /// Part of the lifetime left at renewal, from 0 to 1.
    pub grace_ratio: f64,
    pub grace_jitter: f64,
    /// `ISTIO_META_CERT_SIGNER`.
    pub cert_signer: Option<String>,
}

/// The kind of private key. ECDSA is the default: such keys are made in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyChoice {
    EcdsaP256,
    EcdsaP384,
    Rsa { bits: u32 },
}

impl Sources<'_> {
    pub(super) fn secrets(&mut self) -> SecretsParameters {
        let signer = self.get(&variables::ISTIO_META_CERT_SIGNER);
        SecretsParameters {
            identity: SpiffeId::new(
                self.get(&variables::TRUST_DOMAIN),
                self.namespace.clone(),
                self.get(&variables::SERVICE_ACCOUNT),
            ),
            key: self.key(),
            ttl: self.ttl(),
            grace_ratio: self.ratio(&variables::SECRET_GRACE_PERIOD_RATIO),
            grace_jitter: self.ratio(&variables::SECRET_GRACE_PERIOD_RATIO_JITTER),
            cert_signer: Some(signer).filter(|signer| !signer.is_empty()),
        }
    }

    fn key(&mut self) -> KeyChoice {
        let algorithm = self.get(&variables::ECC_SIGNATURE_ALGORITHM);
        let rsa_asked_for = self.env.is_set(&variables::WORKLOAD_RSA_KEY_SIZE);
        match algorithm.as_str() {
            "" if rsa_asked_for => self.rsa(),
            "" | "ECDSA" => match self.get(&variables::ECC_CURVE).as_str() {
                "P384" => KeyChoice::EcdsaP384,
                _ => KeyChoice::EcdsaP256,
            },
            other => {
                self.problem("ECC_SIGNATURE_ALGORITHM", other, "ECDSA");
                KeyChoice::EcdsaP256
            }
        }
    }

    fn rsa(&mut self) -> KeyChoice {
        let bits = self.get(&variables::WORKLOAD_RSA_KEY_SIZE);
        if !matches!(bits, 2048 | 3072 | 4096) {
            self.problem(
                "WORKLOAD_RSA_KEY_SIZE",
                &bits.to_string(),
                "2048, 3072 or 4096 bits",
            );
        }
        KeyChoice::Rsa { bits }
    }

    fn ttl(&mut self) -> Duration {
        let ttl = self.get(&variables::SECRET_TTL);
        if ttl < Duration::from_secs(1) {
            self.problem("SECRET_TTL", &format!("{ttl:?}"), "at least 1s");
        }
        ttl
    }

    fn ratio(&mut self, variable: &variables::Variable<f64>) -> f64 {
        let ratio = self.get(variable);
        if !(0.0..=1.0).contains(&ratio) {
            self.problem(variable.name, &ratio.to_string(), "a number from 0 to 1");
        }
        ratio
    }
}
