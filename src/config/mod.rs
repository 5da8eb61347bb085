//! Reads flags, environment, mesh configuration and downward API into one checked [`Config`].
//!
//! [`load`] reads everything once, builds the configuration of each module, and reports every problem
//! at once, each with the variable or member, what was found and what was expected. Nothing is checked
//! again afterwards. Well-known paths are relative: they resolve against the working directory, also
//! Envoy's, so that several agents can run side by side.

mod admin;
mod control_plane;
mod dns;
pub mod environment;
mod envoy;
mod envoy_bootstrap;
pub mod flags;
mod health;
mod merged;
pub mod pod;
pub mod report;
mod secrets;
mod statsd;
mod status;
mod validate;
mod wasm;

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::mem;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::files::volume::Volume;
use crate::net::dial::proxy::Proxies;
use crate::problem::{Code, Diagnostics, Problem};
use crate::proxy_config::ProxyConfig;
use crate::trust::compliance::Policy;
use crate::xds::ledger;
use crate::{bootstrap, istiod, logging, scrape};
pub use control_plane::GoogleToken;
pub use dns::DnsParameters;
use environment::Environment;
use flags::{LogFlags, ProxyFlags};
use merged::Origins;
use pod::{Interface, Pairs};
pub use secrets::{AbsentSocket, SecretSources, WorkloadCertificate};

/// Everything the agent needs to run.
#[derive(Clone, Debug)]
pub struct Config {
    pub istiod: istiod::Config,
    /// The connection to the certificate authority, unless it is the same.
    pub ca_istiod: Option<istiod::Config>,
    pub secrets: WorkloadCertificate,
    pub secret_sources: SecretSources,
    /// The identity token of Google, if istiod authenticates the agent by one.
    pub google_token: Option<GoogleToken>,
    pub may_dump_core: bool,
    pub xds_socket: PathBuf,
    /// The largest message accepted from Envoy.
    pub max_request_bytes: usize,
    /// Storage of the last known good configuration; None if it is not stored.
    pub last_known_good: Option<ledger::Config>,
    /// `ISTIO_META_CLUSTER_ID`.
    pub cluster_id: String,
    pub sds_socket: PathBuf,
    pub bootstrap: bootstrap::Config,
    /// True if Envoy starts from a custom bootstrap, which the agent neither writes nor removes.
    pub has_custom_bootstrap: bool,
    pub grpc: Option<bootstrap::grpc::Config>,
    pub scrape: scrape::Config,
    pub dns: Option<DnsParameters>,
    /// The file with the pod's resolvers.
    pub resolv_conf: PathBuf,
    /// None if Envoy fetches modules itself.
    pub wasm: Option<crate::wasm::Config>,
    /// The files that the bootstrap and Envoy depend on.
    pub inputs: Vec<PathBuf>,
    pub platform: bootstrap::platform::Config,
    /// None if the agent runs without Envoy.
    pub envoy: Option<crate::envoy::Config>,
    pub status: Option<crate::status::Config>,
    pub systemd: Option<crate::runtime::systemd::Config>,
    /// None if the workload is not checked.
    pub health: Option<crate::health::Config>,
    /// The value of `JWT_POLICY`, which is only logged: there is one kind of token.
    pub jwt_policy: String,
    /// Problems with the certificate authority. They matter unless another process serves the
    /// workload's secrets.
    pub authority_problems: Vec<Problem>,
    /// Settings that are ignored or replaced by a default.
    pub warnings: Vec<Problem>,
    /// Settings that have no effect in this agent, each with the reason.
    pub ignored: Vec<String>,
}

/// Files that container runtimes create.
const CONTAINER_MARKS: [&str; 2] = ["/.dockerenv", "/run/.containerenv"];

/// The consequence of a value that cannot be used and has no default.
const IGNORED: &str = "the value is ignored";

/// The expected form of an address.
const HOST_PORT: &str = "host:port with a port from 1 to 65535";

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
    /// The origin of each of its members.
    origins: Origins,
    policy: Policy,
    labels: Option<Pairs>,
    annotations: Pairs,
    addresses: Vec<IpAddr>,
    /// The addresses of every interface, sorted and each once.
    interface_addresses: Vec<IpAddr>,
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
    Loader::read(flags, env, root, pod::interfaces(), None).config(log)
}

/// Reads the status port of the agent that runs in `root`. That agent reports its configuration
/// problems.
pub fn status_port(env: &Environment, root: &Path) -> Option<u16> {
    let annotations = pod::pairs(root, "annotations", &mut Vec::new()).unwrap_or_default();
    // No flag changes it.
    merged::proxy_config(env, root, &annotations).agent_port()
}

/// Returns the socket of the admin interface of the Envoy whose agent runs in `root`. None for a port.
pub fn admin_socket(env: &Environment, root: &Path) -> Option<PathBuf> {
    let annotations = pod::pairs(root, "annotations", &mut Vec::new()).unwrap_or_default();
    let config = merged::proxy_config(env, root, &annotations);
    admin::socket(&config, env).unwrap_or_default().map(|path| below(root, path))
}

/// Reads the ProxyConfig of all its sources, even if the agent cannot use it.
pub fn proxy_config(flags: &ProxyFlags, env: &Environment, root: &Path) -> ProxyConfig {
    Loader::read(flags, env, root, Ok(Vec::new()), None).proxy_config
}

impl Config {
    /// The file with the token for istiod; None if the token is not read from a file.
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
        tracing::info!(target: logging::UNABRIDGED, "Effective config: {effective}");
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
    /// Merges ProxyConfig and reads the pod. `manifest_annotations` come from a pod manifest: such a pod
    /// does not run here, so nothing is looked up for it.
    fn read(
        flags: &'a ProxyFlags,
        env: &'a Environment,
        root: &'a Path,
        interfaces: io::Result<Vec<Interface>>,
        manifest_annotations: Option<Pairs>,
    ) -> Self {
        let mut pod_warnings = Vec::new();
        let labels = pod::pairs(root, "labels", &mut pod_warnings);
        let annotations = manifest_annotations
            .or_else(|| pod::pairs(root, "annotations", &mut pod_warnings))
            .unwrap_or_default();
        let merged = merged::merge(flags, env, root, &annotations);
        let mut notes = merged.notes;
        notes.warnings.splice(..0, pod_warnings);
        let interfaces = interfaces.unwrap_or_else(|error| {
            let code = Code::InterfacesUnreadable;
            notes.warnings.push(Problem::new(code, "network interfaces", error));
            Vec::new()
        });
        let warnings = &mut notes.warnings;
        let instance_ip = env.get(&environment::INSTANCE_IP);
        let excluded = annotations.get(pod::EXCLUDED_INTERFACES).map_or("", String::as_str);
        let excluded: Vec<_> = entries(excluded).collect();
        let interface_addresses: BTreeSet<_> = interfaces.iter().map(|it| it.address).collect();
        Self {
            flags,
            env,
            root,
            proxy_config: merged.config,
            origins: merged.origins,
            labels,
            addresses: pod::addresses(instance_ip, &interfaces, &excluded, warnings),
            interface_addresses: interface_addresses.into_iter().collect(),
            namespace: env.get(&environment::POD_NAMESPACE),
            policy: control_plane::compliance(env, warnings),
            proxies: control_plane::proxies(env, warnings),
            annotations,
            notes,
            authority_problems: Vec::new(),
        }
    }

    /// Builds the configuration, or returns every problem.
    fn config(mut self, log: &LogFlags) -> Result<Config, Vec<Problem>> {
        let config = self.build(log);
        if self.notes.problems.is_empty() {
            Ok(config)
        } else {
            Err([self.notes.problems, config.authority_problems].concat())
        }
    }

    /// Builds the configuration of each module. It is usable only if `notes` has no problem.
    fn build(&mut self, log: &LogFlags) -> Config {
        let sds_socket = self.sds_socket();
        let xds_socket = Path::new(&self.proxy_config.config_path).join("XDS");
        let secret_sources = self.secret_sources(&sds_socket);
        let may_serve = secret_sources.absent_socket != AbsentSocket::Serve
            || below(self.root, &sds_socket).exists();
        let (istiod, ca_istiod) = self.control_plane(secret_sources.has_authority(), may_serve);
        let bootstrap = self.bootstrap(&xds_socket, &sds_socket, log.as_json);
        let secrets = self.workload_certificate(&secret_sources);
        let grpc = self.grpc(&xds_socket);
        let ignored = self.env.without_effect();
        Config {
            istiod,
            ca_istiod,
            secrets,
            secret_sources,
            google_token: self.google_token(),
            may_dump_core: self.get(&environment::ISTIO_AGENT_CORE_DUMP),
            xds_socket,
            sds_socket,
            max_request_bytes: self.get(&environment::ISTIO_GPRC_MAXRECVMSGSIZE),
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
            last_known_good: self.last_known_good(),
            inputs: self.inputs(),
            jwt_policy: self.get(&environment::JWT_POLICY),
            cluster_id: self.get(&environment::ISTIO_META_CLUSTER_ID),
            authority_problems: mem::take(&mut self.authority_problems),
            warnings: mem::take(&mut self.notes.warnings),
            ignored: ignored.map(|(name, why)| format!("{name} ({why})")).collect(),
        }
    }

    fn get<T: environment::Value>(&self, variable: &environment::Variable<T>) -> T {
        self.env.get(variable)
    }

    /// Returns the directory that the variable names; None if the variable is empty.
    fn volume(&self, variable: &environment::Variable<Option<PathBuf>>) -> Option<Volume> {
        let is_container = self.env.is_set(&environment::KUBERNETES_SERVICE_HOST)
            || CONTAINER_MARKS.iter().any(|path| Path::new(path).exists());
        Some(Volume {
            directory: self.get(variable)?,
            is_default: !self.env.is_set(variable),
            is_machine: !is_container,
        })
    }

    /// Reads user IDs; None is every user.
    fn users(&mut self, variable: &environment::Variable<String>) -> Option<BTreeSet<u32>> {
        let given = self.get(variable);
        if given == "any" {
            return None;
        }
        let users: Result<_, _> = entries(&given).map(str::parse).collect();
        if users.is_err() {
            self.problem(variable.row.name, given, "numbers of users, separated by commas, or any");
        }
        Some(users.unwrap_or_default())
    }

    /// Returns the socket at which the workload's secrets are served, by the agent or another process.
    fn sds_socket(&mut self) -> PathBuf {
        let name = self.get(&environment::WORKLOAD_IDENTITY_SOCKET_FILE);
        if name.is_empty() || name.contains('/') || name == ".." {
            self.problem("WORKLOAD_IDENTITY_SOCKET_FILE", &name, "a file name without a directory");
        }
        Path::new("./var/run/secrets/workload-spiffe-uds").join(name)
    }

    fn problem(
        &mut self,
        subject: impl ToString,
        found: impl ToString,
        expected: impl Into<Cow<'static, str>>,
    ) {
        let found = found.to_string();
        self.notes.add(Problem::value(Code::SettingInvalid, subject, &found, expected));
    }

    fn warn(
        &mut self,
        subject: impl ToString,
        found: impl ToString,
        expected: impl Into<Cow<'static, str>>,
        consequence: impl Into<Cow<'static, str>>,
    ) {
        let found = found.to_string();
        self.notes.warnings.push(Problem::replaced(subject, &found, expected, consequence));
    }

    /// Returns `used`, which is the value `found` within its limits. Warns if they differ.
    fn limited<T: fmt::Debug + PartialEq>(
        &mut self,
        subject: &str,
        found: T,
        used: T,
        expected: impl Into<Cow<'static, str>>,
    ) -> T {
        if used != found {
            self.warn(subject, format!("{found:?}"), expected, format!("{used:?} is used"));
        }
        used
    }
}

/// The root of a pod manifest: the pod does not run here, so none of its paths is looked up on this machine.
const NOWHERE: &str = "/nonexistent";

/// Resolves a path against a root.
fn below(root: &Path, path: impl AsRef<Path>) -> PathBuf {
    let path = path.as_ref();
    match path.strip_prefix("/") {
        // `join` would replace the root by an absolute path.
        Ok(relative) if root == Path::new(NOWHERE) => root.join(relative),
        _ => root.join(path),
    }
}

/// Splits a comma-separated list, without empty entries.
fn entries(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim).filter(|it| !it.is_empty())
}

/// Reads the configuration of a machine with these interfaces.
#[cfg(test)]
pub(crate) fn load_with(
    flags: &ProxyFlags,
    log: &LogFlags,
    env: &Environment,
    root: &Path,
    interfaces: io::Result<Vec<Interface>>,
) -> Result<Config, Vec<Problem>> {
    Loader::read(flags, env, root, interfaces, None).config(log)
}

#[cfg(test)]
mod dns_tests;
#[cfg(test)]
mod envoy_tests;
#[cfg(test)]
mod secrets_tests;
#[cfg(test)]
mod tests;
