//! The workload's identity and the parameters of its certificates.

use std::path::PathBuf;
use std::time::Duration;

use super::Sources;
use super::environment as variables;
use crate::ca::key::Encoding;
use crate::identity::SpiffeId;
use crate::secrets::output;

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
    pub encoding: Encoding,
    /// Where to keep key and certificate over a restart, if anywhere.
    pub keep: Option<PathBuf>,
    /// Where to write key, chain and roots, if anywhere.
    pub output: Option<output::Config>,
    /// Whether roots of the mesh come by discovery.
    pub mesh_roots: bool,
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
            encoding: match self.get(&variables::PKCS8_KEY) {
                true => Encoding::Pkcs8,
                false => Encoding::Traditional,
            },
            keep: self.directory(&variables::ISTIO_AGENT_KEEP_CERTS),
            output: self.output(),
            mesh_roots: self.get(&variables::PROXY_CONFIG_XDS_AGENT),
        }
    }

    fn directory(&mut self, variable: &variables::Variable<String>) -> Option<PathBuf> {
        let directory = self.get(variable);
        (!directory.is_empty()).then(|| directory.into())
    }

    fn output(&mut self) -> Option<output::Config> {
        let in_kubernetes = !self.get(&variables::KUBERNETES_SERVICE_HOST).is_empty();
        let directory = self.directory(&variables::OUTPUT_CERTS)?;
        Some(output::Config {
            directory,
            readable_by_all: in_kubernetes,
        })
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
