//! Reads flags, environment, mesh configuration and downward API into one checked [`Config`].
//!
//! [`load`] reads everything once, builds the configuration of each module, and reports every problem
//! at once, each with the variable or member, what was found and what was expected. Nothing is checked
//! again afterwards. Well-known paths are relative: they resolve against the working directory, also
//! Envoy's, so that several agents can run side by side.

mod control_plane;
mod dns;
mod effective;
pub mod environment;
mod envoy;
mod envoy_bootstrap;
pub mod flags;
mod health;
mod merged;
mod node;
pub mod pod;
pub mod report;
mod secret_files;
mod statsd;
mod status;
mod validate;
mod wasm;
mod workload;

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::compliance::Policy;
use crate::dial::proxy::Proxies;
pub use crate::problem::Problem;
use crate::problem::{Diagnostics, codes};
use crate::proxy_config::ProxyConfig;
use crate::volume::Volume;
use crate::xds::last_known_good;
use crate::{bootstrap, istiod, logging, scrape};
pub use control_plane::GoogleToken;
pub use dns::DnsParameters;
use effective::Documents;
use environment::Environment;
use flags::{LogFlags, ProxyFlags};
use merged::{Merged, Origins};
use pod::{Interface, Pairs};
pub use secret_files::{AbsentSocket, SecretSources};
pub use workload::WorkloadCertificate;

/// Everything the agent needs to run.
#[derive(Clone, Debug)]
pub struct Config {
    pub istiod: istiod::Config,
    /// The certificate authority, when it is not reached over the same connection.
    pub ca_istiod: Option<istiod::Config>,
    pub secrets: WorkloadCertificate,
    pub secret_sources: SecretSources,
    /// The identity token of Google, where istiod authenticates the agent by one.
    pub google_token: Option<GoogleToken>,
    pub may_dump_core: bool,
    pub xds_socket: PathBuf,
    /// The largest message accepted from Envoy.
    pub max_request_bytes: usize,
    /// Where Envoy's configuration is kept over a restart, if anywhere.
    pub kept: Option<last_known_good::Config>,
    /// `ISTIO_META_CLUSTER_ID`.
    pub cluster_id: String,
    pub sds_socket: PathBuf,
    pub bootstrap: bootstrap::Config,
    /// Whether Envoy starts from a custom bootstrap, which the agent neither writes nor removes.
    pub has_custom_bootstrap: bool,
    pub grpc: Option<bootstrap::grpc::Config>,
    pub scrape: scrape::Config,
    pub dns: Option<DnsParameters>,
    /// The file with the pod's resolvers.
    pub resolv_conf: PathBuf,
    /// None if Envoy is left to fetch modules itself.
    pub wasm: Option<crate::wasm::Config>,
    /// The files that the bootstrap and Envoy depend on.
    pub inputs: Vec<PathBuf>,
    pub platform: bootstrap::platform::Config,
    /// None when the agent runs without Envoy.
    pub envoy: Option<crate::envoy::Config>,
    pub status: Option<crate::status::Config>,
    pub systemd: Option<crate::systemd::Config>,
    /// None if the workload is not checked.
    pub health: Option<crate::health::Config>,
    /// For the log: there is one kind of token.
    pub jwt_policy: String,
    /// Problems with the certificate authority. They matter unless another process serves the
    /// workload's secrets.
    pub authority_problems: Vec<Problem>,
    /// Settings that were left out or replaced by a default.
    pub warnings: Vec<Problem>,
    /// Settings without effect, as pilot-agent ignores them too or has no use for them here.
    pub ignored: Vec<String>,
}

/// The consequence of a value that cannot be used and has no default.
/// Files that container runtimes create.
const CONTAINER_MARKS: [&str; 2] = ["/.dockerenv", "/run/.containerenv"];

const LEFT_OUT: &str = "the value is ignored";

/// Every problem of a configuration, as one error.
#[derive(Debug, thiserror::Error)]
#[error("the configuration cannot be used: {}", report::texts(.0).join("; "))]
pub struct Unusable(pub Vec<Problem>);

/// The inputs of the configuration, and the problems found in them.
struct Loader<'a> {
    flags: &'a ProxyFlags,
    env: &'a Environment,
    /// The working directory, against which paths resolve.
    root: &'a Path,
    proxy_config: ProxyConfig,
    /// Where its members were set.
    origins: Origins,
    policy: Policy,
    labels: Option<Pairs>,
    annotations: Pairs,
    addresses: Vec<IpAddr>,
    /// The addresses of every interface.
    own_addresses: Vec<IpAddr>,
    namespace: String,
    proxies: Proxies,
    notes: Diagnostics,
    authority_problems: Vec<Problem>,
}

/// Reads the configuration. `root` is the working directory.
pub fn load(
    flags: &ProxyFlags,
    log: &LogFlags,
    env: &Environment,
    root: &Path,
) -> Result<Config, Vec<Problem>> {
    load_with(flags, log, env, root, pod::interfaces())
}

/// Reads the configuration of a machine with these interfaces.
pub(crate) fn load_with(
    flags: &ProxyFlags,
    log: &LogFlags,
    env: &Environment,
    root: &Path,
    interfaces: io::Result<Vec<Interface>>,
) -> Result<Config, Vec<Problem>> {
    Loader::read(flags, env, root, interfaces, None).config(log)
}

/// The status port of the agent that runs in `root`. That agent reports problems of its
/// configuration.
pub fn status_port(env: &Environment, root: &Path) -> Option<u16> {
    with_documents(env, root, |documents| documents.status_port())
}

/// The ProxyConfig of all its sources, whether the agent can use it or not.
pub fn proxy_config(flags: &ProxyFlags, env: &Environment, root: &Path) -> ProxyConfig {
    with_documents(env, root, |documents| documents.merge(flags).config)
}

fn with_documents<T>(env: &Environment, root: &Path, read: impl FnOnce(Documents<'_>) -> T) -> T {
    let annotations = pod::pairs(root, "annotations", &mut Vec::new()).unwrap_or_default();
    read(Documents {
        env,
        root,
        annotations: &annotations,
    })
}

impl Config {
    /// The file of the token for istiod, if that is where it is from.
    pub fn token_file(&self) -> Option<&Path> {
        match &self.istiod.token {
            istiod::token::Source::File(path) => Some(path),
            istiod::token::Source::None | istiod::token::Source::Mock => None,
        }
    }

    /// Logs warnings, the node and the effective configuration, in pilot-agent's words.
    pub fn announce(&self) {
        for warning in &self.warnings {
            tracing::warn!("{warning}");
        }
        let node = &self.bootstrap.node;
        let ips: Vec<_> = node.addresses.iter().map(ToString::to_string).collect();
        if let [kind, _, id, domain] = node.id.splitn(4, '~').collect::<Vec<_>>()[..] {
            tracing::info!(?ips, "type" = kind, id, domain, "Proxy role");
        }
        let effective = Value::from(node.proxy_config.printable());
        tracing::info!(target: logging::WHOLE, "Effective config: {effective}");
        tracing::info!("JWT policy is {}", self.jwt_policy);
        if !self.secret_sources.has_authority() {
            tracing::info!(
                "Workload is using file mounted certificates. Skipping connecting to CA"
            );
            return;
        }
        let fetcher = match (&self.google_token, &self.istiod.token) {
            (Some(_), _) => "GoogleComputeEngine",
            (None, istiod::token::Source::Mock) => "Mock",
            (None, _) => "JWT",
        };
        let trust_domain = &self.secrets.renewal.identity.trust_domain;
        tracing::info!("using credential fetcher of {fetcher} type in {trust_domain} trust domain");
        let ca = self.ca_istiod.as_ref().unwrap_or(&self.istiod);
        let address = &ca.address;
        tracing::info!("CA Endpoint {address}, provider Citadel");
        if let istiod::Security::Tls(tls) = &ca.security {
            let roots = match &tls.roots {
                istiod::tls::Roots::System(_) => "system certs".to_owned(),
                istiod::tls::Roots::File(path) => format!("certs: {}", path.display()),
            };
            tracing::info!("Using CA {address} cert with {roots}");
        }
    }
}

impl<'a> Loader<'a> {
    /// `described` are the annotations of a pod that is described, not run: nothing is looked up for it.
    fn read(
        flags: &'a ProxyFlags,
        env: &'a Environment,
        root: &'a Path,
        interfaces: io::Result<Vec<Interface>>,
        described: Option<Pairs>,
    ) -> Self {
        let mut warnings = Vec::new();
        let labels = pod::pairs(root, "labels", &mut warnings);
        let annotations = described.or_else(|| pod::pairs(root, "annotations", &mut warnings));
        let annotations = annotations.unwrap_or_default();
        let documents = Documents {
            env,
            root,
            annotations: &annotations,
        };
        let Merged {
            config,
            origins,
            mut notes,
        } = documents.merge(flags);
        notes.warnings.splice(..0, warnings);
        let interfaces = interfaces.unwrap_or_else(|error| {
            let code = codes::INTERFACES_UNREADABLE;
            let problem = Problem::new(code, "network interfaces", error);
            notes.warnings.push(problem);
            Vec::new()
        });
        let warnings = &mut notes.warnings;
        let instance_ip = env.get(&environment::INSTANCE_IP);
        let excluded = annotations.get(pod::EXCLUDED_INTERFACES);
        let excluded: Vec<_> = entries(excluded.map_or("", String::as_str)).collect();
        let addresses = pod::addresses(&instance_ip, &interfaces, &excluded, warnings);
        let own_addresses: BTreeSet<_> = interfaces.iter().map(|own| own.address).collect();
        let namespace = env.get(&environment::POD_NAMESPACE);
        let policy = control_plane::compliance(env, warnings);
        Self {
            flags,
            env,
            root,
            proxy_config: config,
            origins,
            policy,
            labels,
            addresses,
            own_addresses: own_addresses.into_iter().collect(),
            namespace,
            proxies: control_plane::proxies(env, warnings),
            annotations,
            notes,
            authority_problems: Vec::new(),
        }
    }

    /// The configuration, or every problem of it.
    fn config(mut self, log: &LogFlags) -> Result<Config, Vec<Problem>> {
        let config = self.build(log);
        let (notes, authority_problems) = (self.notes, self.authority_problems);
        if !notes.problems.is_empty() {
            return Err([notes.problems, authority_problems].concat());
        }
        Ok(Config {
            authority_problems,
            warnings: notes.warnings,
            ..config
        })
    }

    /// Builds the configuration of each module; only of use if no problem was found.
    fn build(&mut self, log: &LogFlags) -> Config {
        let sds_socket = self.sds_socket();
        let xds_socket = Path::new(&self.proxy_config.config_path).join("XDS");
        let secret_sources = self.secret_sources(&sds_socket);
        let may_serve = secret_sources.absent_socket != AbsentSocket::Serve
            || below(self.root, &sds_socket).exists();
        let (istiod, ca_istiod) = self.control_plane(secret_sources.has_authority(), may_serve);
        let bootstrap = self.bootstrap(&xds_socket, &sds_socket, log.as_json);
        let secrets = self.workload_certificate(&bootstrap.node.id, &secret_sources);
        let grpc = self.grpc(&xds_socket);
        let max_request_bytes = self.get(&environment::ISTIO_GPRC_MAXRECVMSGSIZE);
        let ignored = self.env.without_effect().into_iter();
        let ignored = ignored.map(|(name, why)| format!("{name} ({why})"));
        Config {
            istiod,
            ca_istiod,
            secrets,
            secret_sources,
            google_token: self.google_token(),
            may_dump_core: self.get(&environment::ISTIO_AGENT_CORE_DUMP),
            xds_socket,
            sds_socket,
            // More than the address space is the same as no limit.
            max_request_bytes: usize::try_from(max_request_bytes).unwrap_or(usize::MAX),
            envoy: self.envoy(&bootstrap),
            has_custom_bootstrap: !self.proxy_config.custom_config_file.is_empty(),
            status: self.status(grpc.as_ref().map(|grpc| grpc.path.clone())),
            systemd: self.systemd(),
            health: self.health(),
            grpc,
            scrape: self.scrape(&bootstrap),
            bootstrap,
            platform: self.platform(),
            dns: self.dns(),
            resolv_conf: self.resolv_conf_path(""),
            wasm: self.wasm(),
            kept: self.kept(),
            inputs: self.inputs(),
            jwt_policy: self.get(&environment::JWT_POLICY),
            cluster_id: self.get(&environment::ISTIO_META_CLUSTER_ID),
            authority_problems: Vec::new(),
            warnings: Vec::new(),
            ignored: ignored.collect(),
        }
    }

    fn get<T: environment::Value>(&self, variable: &environment::Variable<T>) -> T {
        self.env.get(variable)
    }

    /// The variable unless it is empty.
    fn text(&self, variable: &environment::Variable<String>) -> Option<String> {
        Some(self.get(variable)).filter(|text| !text.is_empty())
    }

    /// The directory that a variable names, unless it is empty.
    fn volume(&self, variable: &environment::Variable<String>) -> Option<Volume> {
        let is_container = self.env.is_set(&environment::KUBERNETES_SERVICE_HOST)
            || CONTAINER_MARKS.iter().any(|path| Path::new(path).exists());
        Some(Volume {
            directory: self.text(variable)?.into(),
            is_default: !self.env.is_set(variable),
            is_machine: !is_container,
        })
    }

    /// The entries of a list with commas.
    fn list(&self, variable: &environment::Variable<String>) -> Vec<String> {
        entries(&self.get(variable)).map(str::to_owned).collect()
    }

    /// Numbers of users; None is every user.
    fn users(&mut self, variable: &environment::Variable<String>) -> Option<BTreeSet<u32>> {
        let given = self.get(variable);
        if given == "any" {
            return None;
        }
        let numbers = self.list(variable);
        let users: Result<_, _> = numbers.iter().map(|user| user.parse()).collect();
        if users.is_err() {
            let expected = "numbers of users, separated by commas, or any";
            self.problem(variable.name, &given, expected);
        }
        Some(users.unwrap_or_default())
    }

    fn sds_socket(&mut self) -> PathBuf {
        let name = self.get(&environment::WORKLOAD_IDENTITY_SOCKET_FILE);
        if name.is_empty() || name.contains('/') || name == ".." {
            let expected = "a file name without a directory";
            self.problem("WORKLOAD_IDENTITY_SOCKET_FILE", &name, expected);
        }
        Path::new("./var/run/secrets/workload-spiffe-uds").join(name)
    }

    fn problem(&mut self, subject: &str, found: &str, expected: impl Into<Cow<'static, str>>) {
        self.notes.problem(subject, found, expected);
    }

    fn warn(
        &mut self,
        subject: &str,
        found: &str,
        expected: impl Into<Cow<'static, str>>,
        consequence: impl Into<Cow<'static, str>>,
    ) {
        self.notes.warn(subject, found, expected, consequence);
    }
}

/// The root of a pod that is described, not run. No path that it names is looked at on this machine.
const NOWHERE: &str = "/nonexistent";

/// Resolves a path against a root.
fn below(root: &Path, path: impl AsRef<Path>) -> PathBuf {
    let relative = path.as_ref().strip_prefix("/").ok();
    let relative = relative.filter(|_| root == Path::new(NOWHERE));
    root.join(relative.unwrap_or(path.as_ref()))
}

/// The entries of a list with commas that are not empty.
fn entries(text: &str) -> impl Iterator<Item = &str> {
    let entries = text.split(',').map(str::trim);
    entries.filter(|entry| !entry.is_empty())
}

#[cfg(test)]
mod dns_tests;
#[cfg(test)]
mod envoy_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod workload_tests;
