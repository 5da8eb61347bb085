//! The workload's identity and the parameters of its certificates.

use std::path::PathBuf;
use std::time::Duration;

use super::environment as variables;
use super::secret_files::is_same;
use super::{Loader, SecretSources};
use crate::ca::key::{Encoding, KeyType, RSA_SIZES};
use crate::identity::SpiffeId;
use crate::problem::{Problem, codes};
use crate::sds::key_provider::Kind;
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

impl Loader<'_> {
    pub(super) fn identity(&self) -> SpiffeId {
        SpiffeId::new(
            self.get(&variables::TRUST_DOMAIN),
            self.namespace.clone(),
            self.get(&variables::SERVICE_ACCOUNT),
        )
    }

    /// `node_id` is what renewals are spread by.
    pub(super) fn workload_certificate(
        &mut self,
        node_id: &str,
        sources: &SecretSources,
    ) -> WorkloadCertificate {
        let (key_type, falls_back_to_rsa) = self.key_type();
        WorkloadCertificate {
            renewal: secrets::Config {
                identity: self.identity(),
                key_type,
                falls_back_to_rsa,
                encoding: match self.get(&variables::PKCS8_KEY) {
                    true => Encoding::Pkcs8,
                    false => Encoding::Traditional,
                },
                ttl: self.ttl(),
                grace_ratio: self.ratio(&variables::SECRET_GRACE_PERIOD_RATIO),
                grace_jitter: self.ratio(&variables::SECRET_GRACE_PERIOD_RATIO_JITTER),
                least_pause: secrets::MIN_PAUSE,
                spread_by: node_id.to_owned(),
                cache: self.volume(&variables::ISTIO_AGENT_KEEP_CERTS),
            },
            cert_signer: self.get(&variables::ISTIO_META_CERT_SIGNER),
            output: self.output(sources),
            mesh_roots: self.get(&variables::PROXY_CONFIG_XDS_AGENT),
        }
    }

    fn output(&mut self, sources: &SecretSources) -> Option<output::Config> {
        let directory = PathBuf::from(self.text(&variables::OUTPUT_CERTS)?);
        let source = sources.files.workload.as_ref();
        let source = source.and_then(|files| files.chain.parent());
        if source.is_some_and(|source| is_same(source, &directory)) {
            let directory = directory.display();
            let (code, name) = (codes::SETTING_REPLACED, variables::OUTPUT_CERTS.name);
            let problem = Problem::new(code, name, format!("secrets are read from {directory}"));
            let problem = problem.consequence("no files are written");
            self.notes.warnings.push(problem);
            return None;
        }
        Some(output::Config {
            directory,
            readable_by_all: self.text(&variables::KUBERNETES_SERVICE_HOST).is_some(),
        })
    }

    /// The type of key, and whether RSA follows should the authority refuse it.
    fn key_type(&mut self) -> (KeyType, bool) {
        let algorithm = self.get(&variables::ECC_SIGNATURE_ALGORITHM);
        let is_rsa_set = self.env.is_set(&variables::WORKLOAD_RSA_KEY_SIZE);
        // Envoy's QAT provider takes no other keys.
        let has_qat = self.key_provider().is_some_and(|it| it.kind == Kind::Qat);
        match algorithm.as_str() {
            "" if is_rsa_set || has_qat => (self.rsa(), false),
            "" => (self.curve(), true),
            "ECDSA" => (self.curve(), false),
            other => {
                self.problem("ECC_SIGNATURE_ALGORITHM", other, "ECDSA");
                (KeyType::P256, false)
            }
        }
    }

    fn curve(&mut self) -> KeyType {
        match self.get(&variables::ECC_CURVE).as_str() {
            "P384" => KeyType::P384,
            _ => KeyType::P256,
        }
    }

    fn rsa(&mut self) -> KeyType {
        let bits = self.get(&variables::WORKLOAD_RSA_KEY_SIZE);
        let (name, found) = ("WORKLOAD_RSA_KEY_SIZE", bits.to_string());
        if !(2048..=8192).contains(&bits) {
            let expected = "a number of bits from 2048 to 8192";
            let problem = Problem::value(codes::WORKLOAD_KEY_SIZE, name, &found, expected);
            self.notes.add(problem);
        } else if !RSA_SIZES.contains(&bits) {
            let expected = "2048, 3072, 4096 or 8192";
            let problem = Problem::value(codes::WORKLOAD_KEY_SIZE, name, &found, expected);
            let problem = problem.consequence("the next larger size is used");
            self.notes.warnings.push(problem);
        }
        KeyType::Rsa(bits)
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
        let used = ratio.clamp(0.0, 1.0);
        if used != ratio {
            let (found, used) = (ratio.to_string(), format!("{used} is used"));
            self.warn(variable.name, &found, "a number from 0 to 1", used);
        }
        used
    }
}
