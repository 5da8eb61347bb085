//! Configures the workload's secrets: their source, the certificate, and the users that may read them.
//!
//! The files that exist at the start decide the source: a certificate authority, files, or another process's
//! socket. The first that applies counts: Google's mounted certificates if requested, a complete set of
//! another provider's mounted certificates, the legacy files if requested. Otherwise there is an authority,
//! and legacy files take precedence over it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::Loader;
use super::environment::{self as variables, Variable};
use crate::ca::key::{Encoding, KeyType, RSA_SIZES};
use crate::problem::{Code, Problem};
use crate::proxy_config::{private_key_provider::Provider, time};
use crate::sds::SecretOptions;
use crate::sds::key_provider::{KeyProvider, Kind};
use crate::secrets::{self, files, output};
use crate::trust::identity::SpiffeId;
use crate::trust::trust_anchors::SYSTEM_BUNDLES;

/// The source of the workload's secrets, and their readers.
#[derive(Clone, Debug)]
pub struct SecretSources {
    pub files: files::Config,
    /// Additions to keys and roots.
    pub options: SecretOptions,
    pub absent_socket: AbsentSocket,
    /// Users that may read secrets, besides root and the agent's own; None is every user.
    pub users: Option<BTreeSet<u32>>,
}

/// The reaction to a workload socket that no other process serves at the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AbsentSocket {
    /// Wait for another process to serve it.
    Wait,
    Serve,
    Fail,
}

/// Renewal and output of the workload's certificate.
#[derive(Clone, Debug)]
pub struct WorkloadCertificate {
    pub renewal: secrets::Config,
    /// `ISTIO_META_CERT_SIGNER`; may be empty.
    pub cert_signer: String,
    /// The directory that key, chain and roots are written to, if any.
    pub output: Option<output::Config>,
    /// True if the mesh's trust bundle comes by discovery (PCDS).
    pub mesh_roots: bool,
}

const LEGACY: &str = "./etc/certs";
const MOUNTED: &str = "./var/run/secrets/workload-spiffe-credentials";

/// The files of a directory: chain, key and roots.
const NAMES: [&str; 3] = ["cert-chain.pem", "key.pem", "root-cert.pem"];
const GOOGLE_NAMES: [&str; 3] = ["certificates.pem", "private_key.pem", "ca_certificates.pem"];
const GOOGLE: &str = "GkeWorkloadCertificate";

/// The certificate revocation list (CRL) of a plugged-in authority.
const CRL: &str = "/var/run/secrets/istio/crl/ca-crl.pem";

/// The name of the socket that the agent serves itself unless another process does.
const DEFAULT_SOCKET: &str = "socket";

impl SecretSources {
    /// Returns true if an authority signs the workload's certificate.
    pub fn has_authority(&self) -> bool {
        let workload = self.files.workload.as_ref();
        workload.is_none_or(|workload| !workload.is_only_source)
    }
}

impl Loader<'_> {
    /// Configures the source of the workload's secrets, and their readers.
    pub(super) fn secret_sources(&mut self, socket: &Path) -> SecretSources {
        SecretSources {
            files: files::Config {
                workload: self.workload_files(),
                system_roots: system_bundle(),
                debounce: self.get(&variables::FILE_DEBOUNCE_DURATION),
            },
            options: SecretOptions {
                key_provider: self.key_provider(),
                crl: if self.get(&variables::PILOT_ENABLE_CA_CRL) {
                    Some(CRL.into())
                } else {
                    None
                },
            },
            absent_socket: self.absent_socket(socket),
            users: self.users(&variables::ISTIO_AGENT_SDS_USERS),
        }
    }

    /// Returns the files with the workload's certificate; None if only an authority provides it.
    fn workload_files(&mut self) -> Option<files::WorkloadFiles> {
        let is_requested = self.get(&variables::FILE_MOUNTED_CERTS);
        if let (true, Some(client)) = (is_requested, self.get(&variables::PROV_CERT)) {
            let expected = "nothing, because FILE_MOUNTED_CERTS is set";
            self.problem("PROV_CERT", client.to_string_lossy(), expected);
        }
        match self.get(&variables::CA_PROVIDER).as_str() {
            GOOGLE => {
                let missing = self.missing(MOUNTED, GOOGLE_NAMES);
                if !missing.is_empty() {
                    let found = format!("files do not exist: {}", missing.join(", "));
                    let subject = "GKE workload certificates";
                    self.notes.add(Problem::new(Code::FileMissing, subject, found));
                }
                return Some(files_in(MOUNTED, GOOGLE_NAMES, true));
            }
            "" | "Citadel" => {}
            other => self.problem("CA_PROVIDER", other, format!("Citadel or {GOOGLE}")),
        }
        if self.missing(MOUNTED, NAMES).is_empty() {
            return Some(files_in(MOUNTED, NAMES, true));
        }
        // Files that the agent writes itself are not a source.
        match self.get(&variables::OUTPUT_CERTS) {
            Some(it) if !is_requested && is_same_directory(&it, LEGACY.as_ref()) => None,
            _ => Some(files_in(LEGACY, NAMES, is_requested)),
        }
    }

    /// Returns the paths of the files that do not exist.
    fn missing(&self, directory: &str, names: [&str; 3]) -> Vec<String> {
        let mut paths = names.map(|name| format!("{directory}/{name}")).to_vec();
        paths.retain(|path| !self.root.join(path).is_file());
        paths
    }

    fn key_provider(&self) -> Option<KeyProvider> {
        let given = self.proxy_config.private_key_provider.as_ref()?;
        let (kind, method) = match given.provider.as_ref()? {
            Provider::Cryptomb(method) => (Kind::CryptoMb, method),
            Provider::Qat(method) => (Kind::Qat, method),
        };
        Some(KeyProvider {
            kind,
            poll_delay: time(method.poll_delay),
            fallback: method.fallback.unwrap_or_default(),
        })
    }

    fn absent_socket(&mut self, socket: &Path) -> AbsentSocket {
        let is_default = socket.ends_with(DEFAULT_SOCKET);
        match self.get(&variables::ISTIO_AGENT_EXTERNAL_SDS).as_str() {
            "wait" => AbsentSocket::Wait,
            "fallback" => AbsentSocket::Serve,
            "fail" => AbsentSocket::Fail,
            "" if is_default => AbsentSocket::Serve,
            "" => AbsentSocket::Fail,
            other => {
                self.problem("ISTIO_AGENT_EXTERNAL_SDS", other, "wait, fallback or fail");
                AbsentSocket::Fail
            }
        }
    }

    /// Returns the workload's SPIFFE ID.
    pub(super) fn identity(&self) -> SpiffeId {
        SpiffeId::new(
            self.get(&variables::TRUST_DOMAIN),
            self.namespace.clone(),
            self.get(&variables::SERVICE_ACCOUNT),
        )
    }

    /// Configures the workload's certificate.
    pub(super) fn workload_certificate(&mut self, sources: &SecretSources) -> WorkloadCertificate {
        let (key_type, falls_back_to_rsa) = self.key_type();
        WorkloadCertificate {
            renewal: secrets::Config {
                identity: self.identity(),
                key_type,
                falls_back_to_rsa,
                encoding: if self.get(&variables::PKCS8_KEY) {
                    Encoding::Pkcs8
                } else {
                    Encoding::Traditional
                },
                ttl: self.ttl(),
                grace_ratio: self.ratio(&variables::SECRET_GRACE_PERIOD_RATIO),
                grace_jitter: self.ratio(&variables::SECRET_GRACE_PERIOD_RATIO_JITTER),
                least_pause: secrets::MIN_PAUSE,
                cache: self.volume(&variables::ISTIO_AGENT_KEEP_CERTS),
            },
            cert_signer: self.get(&variables::ISTIO_META_CERT_SIGNER),
            output: self.output(sources),
            mesh_roots: self.get(&variables::PROXY_CONFIG_XDS_AGENT),
        }
    }

    /// Configures the output of secrets to files. None if there is none, or if it would overwrite their source.
    fn output(&mut self, sources: &SecretSources) -> Option<output::Config> {
        let directory = self.get(&variables::OUTPUT_CERTS)?;
        let source = sources.files.workload.as_ref().and_then(|files| files.chain.parent());
        if source.is_some_and(|source| is_same_directory(source, &directory)) {
            let found = format!("secrets are read from {}", directory.display());
            let problem = Problem::new(Code::SettingReplaced, "OUTPUT_CERTS", found);
            self.notes.warnings.push(problem.consequence("no files are written"));
            return None;
        }
        Some(output::Config {
            directory,
            readable_by_all: self.env.is_set(&variables::KUBERNETES_SERVICE_HOST),
        })
    }

    /// Returns the type of the key, and true if RSA follows after the authority has refused it.
    fn key_type(&mut self) -> (KeyType, bool) {
        let is_rsa_set = self.env.is_set(&variables::WORKLOAD_RSA_KEY_SIZE);
        // Envoy's QAT provider supports only RSA keys.
        let has_qat = self.key_provider().is_some_and(|it| it.kind == Kind::Qat);
        let curve = match self.get(&variables::ECC_CURVE).as_str() {
            "P384" => KeyType::P384,
            _ => KeyType::P256,
        };
        match self.get(&variables::ECC_SIGNATURE_ALGORITHM).as_str() {
            "" if is_rsa_set || has_qat => (self.rsa(), false),
            "" => (curve, true),
            "ECDSA" => (curve, false),
            other => {
                self.problem("ECC_SIGNATURE_ALGORITHM", other, "ECDSA");
                (KeyType::P256, false)
            }
        }
    }

    fn rsa(&mut self) -> KeyType {
        let bits = self.get(&variables::WORKLOAD_RSA_KEY_SIZE);
        let code = Code::WorkloadKeySize;
        let name = "WORKLOAD_RSA_KEY_SIZE";
        let found = bits.to_string();
        if !(2048..=8192).contains(&bits) {
            let expected = "a number of bits from 2048 to 8192";
            self.notes.add(Problem::value(code, name, &found, expected));
        } else if !RSA_SIZES.contains(&bits) {
            let problem = Problem::value(code, name, &found, "2048, 3072, 4096 or 8192");
            self.notes.warnings.push(problem.consequence("the next larger size is used"));
        }
        KeyType::Rsa(bits)
    }

    fn ttl(&mut self) -> Duration {
        let ttl = self.get(&variables::SECRET_TTL);
        if ttl < Duration::from_secs(1) {
            self.problem("SECRET_TTL", format!("{ttl:?}"), "at least 1s");
        }
        ttl
    }

    fn ratio(&mut self, variable: &Variable<f64>) -> f64 {
        let ratio = self.get(variable);
        self.limited(variable.row.name, ratio, ratio.clamp(0.0, 1.0), "a number from 0 to 1")
    }
}

fn files_in(directory: &str, names: [&str; 3], is_only_source: bool) -> files::WorkloadFiles {
    let [chain, key, roots] = names.map(|name| Path::new(directory).join(name));
    files::WorkloadFiles { chain, key, roots, is_only_source }
}

/// Returns true if both paths lead to one directory.
fn is_same_directory(one: &Path, other: &Path) -> bool {
    let absolute = [one, other].map(|path| std::path::absolute(path).ok());
    let canonical = [one, other].map(|path| path.canonicalize().ok());
    absolute[0] == absolute[1] || canonical[0].is_some() && canonical[0] == canonical[1]
}

/// Returns the system's first bundle of root certificates that exists, else the first one of all.
fn system_bundle() -> PathBuf {
    let mut bundles = SYSTEM_BUNDLES.iter();
    bundles.find(|path| Path::new(path).is_file()).unwrap_or(&SYSTEM_BUNDLES[0]).into()
}
