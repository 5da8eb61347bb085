//! The workload's identity and the parameters of its certificates.

use std::time::Duration;

use super::Sources;
use super::environment as variables;
use crate::ca::key::{Encoding, KeyType};
use crate::identity::SpiffeId;
use crate::secrets::{self, output};

/// What becomes of the workload's certificate.
#[derive(Clone, Debug)]
pub struct WorkloadCertificate {
    pub renewal: secrets::Config,
    /// `ISTIO_META_CERT_SIGNER`; may be empty.
    pub cert_signer: String,
    /// Where to write key, chain and roots, if anywhere.
    pub output: Option<output::Config>,
    /// Whether the mesh's trust bundle comes by discovery (PCDS).
    pub mesh_roots: bool,
}

impl Sources<'_> {
    /// `node_id` is what renewals are spread by.
    pub(super) fn workload_certificate(&mut self, node_id: &str) -> WorkloadCertificate {
        WorkloadCertificate {
            renewal: secrets::Config {
                identity: SpiffeId::new(
                    self.get(&variables::TRUST_DOMAIN),
                    self.namespace.clone(),
                    self.get(&variables::SERVICE_ACCOUNT),
                ),
                key_type: self.key_type(),
                encoding: match self.get(&variables::PKCS8_KEY) {
                    true => Encoding::Pkcs8,
                    false => Encoding::Traditional,
                },
                ttl: self.ttl(),
                grace_ratio: self.ratio(&variables::SECRET_GRACE_PERIOD_RATIO),
                grace_jitter: self.ratio(&variables::SECRET_GRACE_PERIOD_RATIO_JITTER),
                least_pause: secrets::LEAST_PAUSE,
                spread_by: node_id.to_owned(),
                cache: self
                    .text(&variables::ISTIO_AGENT_KEEP_CERTS)
                    .map(Into::into),
            },
            cert_signer: self.get(&variables::ISTIO_META_CERT_SIGNER),
            output: self.output(),
            mesh_roots: self.get(&variables::PROXY_CONFIG_XDS_AGENT),
        }
    }

    fn output(&mut self) -> Option<output::Config> {
        Some(output::Config {
            directory: self.text(&variables::OUTPUT_CERTS)?.into(),
            readable_by_all: self.text(&variables::KUBERNETES_SERVICE_HOST).is_some(),
        })
    }

    fn key_type(&mut self) -> KeyType {
        let algorithm = self.get(&variables::ECC_SIGNATURE_ALGORITHM);
        let rsa_asked_for = self.env.is_set(&variables::WORKLOAD_RSA_KEY_SIZE);
        match algorithm.as_str() {
            "" if rsa_asked_for => {
                let bits = self.get(&variables::WORKLOAD_RSA_KEY_SIZE);
                if !matches!(bits, 2048 | 3072 | 4096) {
                    let expected = "2048, 3072 or 4096 bits";
                    self.problem("WORKLOAD_RSA_KEY_SIZE", &bits.to_string(), expected);
                }
                KeyType::Rsa(bits)
            }
            "" | "ECDSA" => match self.get(&variables::ECC_CURVE).as_str() {
                "P384" => KeyType::P384,
                _ => KeyType::P256,
            },
            other => {
                self.problem("ECC_SIGNATURE_ALGORITHM", other, "ECDSA");
                KeyType::P256
            }
        }
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
