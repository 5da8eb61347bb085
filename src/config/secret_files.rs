//! The sources of secrets: a certificate authority, files, or another process's socket; and the users
//! that may read them.
//!
//! The files present at the start decide. The first that applies counts: Google's mounted certificates
//! if requested, a complete set of another provider's mounted certificates, the legacy files if
//! requested. Otherwise there is an authority, and legacy files take precedence over it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::Loader;
use super::environment as variables;
use crate::problem::{Problem, codes};
use crate::proxy_config::{private_key_provider::Provider, time};
use crate::sds::SecretOptions;
use crate::sds::key_provider::{KeyProvider, Kind};
use crate::secrets::files;
use crate::trust_anchors::SYSTEM_BUNDLES;

#[derive(Clone, Debug)]
pub struct SecretSources {
    pub files: files::Config,
    /// Additions to keys and roots.
    pub options: SecretOptions,
    pub absent_socket: AbsentSocket,
    /// Users that may read secrets, besides root and the agent's own; None is every user.
    pub users: Option<BTreeSet<u32>>,
}

/// What to do when no other process serves the workload's socket at the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AbsentSocket {
    /// Wait for another process to serve it.
    Wait,
    Serve,
    Fail,
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
const OWN_SOCKET: &str = "socket";

impl SecretSources {
    /// Whether an authority signs the workload's certificate.
    pub fn has_authority(&self) -> bool {
        let workload = self.files.workload.as_ref();
        workload.is_none_or(|workload| !workload.is_only_source)
    }
}

impl Loader<'_> {
    pub(super) fn secret_sources(&mut self, socket: &Path) -> SecretSources {
        let lists = self.get(&variables::PILOT_ENABLE_CA_CRL);
        SecretSources {
            files: files::Config {
                workload: self.workload_files(),
                system_roots: system_roots(),
                debounce: self.get(&variables::FILE_DEBOUNCE_DURATION),
            },
            options: SecretOptions {
                key_provider: self.key_provider(),
                crl: lists.then(|| CRL.into()),
            },
            absent_socket: self.absent_socket(socket),
            users: self.users(&variables::ISTIO_AGENT_SDS_USERS),
        }
    }

    fn workload_files(&mut self) -> Option<files::WorkloadFiles> {
        let mounted = self.get(&variables::FILE_MOUNTED_CERTS);
        if let (true, Some(client)) = (mounted, self.text(&variables::PROV_CERT)) {
            let expected = "nothing, because FILE_MOUNTED_CERTS is set";
            self.problem("PROV_CERT", &client, expected);
        }
        if self.is_google() {
            return Some(workload_files(MOUNTED, GOOGLE_NAMES, true));
        }
        if self.missing(MOUNTED, NAMES).is_empty() {
            return Some(workload_files(MOUNTED, NAMES, true));
        }
        // Files the agent writes itself are not a source.
        let output = self.text(&variables::OUTPUT_CERTS);
        let is_output = output.is_some_and(|output| is_same(Path::new(&output), LEGACY.as_ref()));
        (mounted || !is_output).then(|| workload_files(LEGACY, NAMES, mounted))
    }

    fn is_google(&mut self) -> bool {
        match self.get(&variables::CA_PROVIDER).as_str() {
            GOOGLE => {
                let missing = self.missing(MOUNTED, GOOGLE_NAMES);
                if !missing.is_empty() {
                    let found = format!("files do not exist: {}", missing.join(", "));
                    let (code, subject) = (codes::FILE_MISSING, "GKE workload certificates");
                    self.notes.add(Problem::new(code, subject, found));
                }
                true
            }
            "" | "Citadel" => false,
            other => {
                self.problem("CA_PROVIDER", other, format!("Citadel or {GOOGLE}"));
                false
            }
        }
    }

    fn missing(&self, directory: &str, names: [&str; 3]) -> Vec<String> {
        let paths = names.map(|name| Path::new(directory).join(name));
        let missing = paths.iter().filter(|path| !self.root.join(path).is_file());
        missing.map(|path| path.display().to_string()).collect()
    }

    pub(super) fn key_provider(&self) -> Option<KeyProvider> {
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
        let is_own = socket.file_name().is_some_and(|name| name == OWN_SOCKET);
        match self.get(&variables::ISTIO_AGENT_EXTERNAL_SDS).as_str() {
            "wait" => AbsentSocket::Wait,
            "fallback" => AbsentSocket::Serve,
            "fail" => AbsentSocket::Fail,
            "" if is_own => AbsentSocket::Serve,
            "" => AbsentSocket::Fail,
            other => {
                self.problem("ISTIO_AGENT_EXTERNAL_SDS", other, "wait, fallback or fail");
                AbsentSocket::Fail
            }
        }
    }
}

fn workload_files(directory: &str, names: [&str; 3], is_only_source: bool) -> files::WorkloadFiles {
    let [chain, key, roots] = names.map(|name| Path::new(directory).join(name));
    files::WorkloadFiles {
        chain,
        key,
        roots,
        is_only_source,
    }
}

/// Whether two paths are of one directory.
pub(super) fn is_same(one: &Path, other: &Path) -> bool {
    let absolute = |path: &Path| std::path::absolute(path).ok();
    let canonical = |path: &Path| std::fs::canonicalize(path).ok();
    absolute(one) == absolute(other)
        || canonical(one).is_some_and(|one| Some(one) == canonical(other))
}

/// The first bundle if none exists yet.
fn system_roots() -> PathBuf {
    let found = SYSTEM_BUNDLES.iter().find(|path| Path::new(path).is_file());
    found.unwrap_or(&SYSTEM_BUNDLES[0]).into()
}
