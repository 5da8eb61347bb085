//! Flags, environment, mesh configuration and downward API become one checked [`Config`].
//!
//! [`load`] reads everything once, builds the form of each room, and reports every problem at once,
//! each with the variable or member, what was found and what was expected. Nothing is checked again
//! afterwards. Well-known paths are relative: they resolve against the working directory, also
//! Envoy's, so several agents can live side by side.
//!
//! Does not watch for changes, and opens no connection.

mod control_plane;
pub mod duration;
pub mod environment;
mod envoy;
pub mod interfaces;
mod members;
pub mod mesh;
mod node;
pub mod pod;
mod stats;
mod workload;

use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use serde_json::json;

use crate::cli::{LogFlags, ProxyFlags};
use crate::{bootstrap, istiod};
use environment::Environment;
use interfaces::Interface;
use mesh::ProxyConfig;
use pod::Pairs;
pub use workload::{KeyChoice, SecretsParameters};

/// Everything the agent needs to run.
#[derive(Clone, Debug)]
pub struct Config {
    pub istiod: istiod::Config,
    /// The certificate authority, when it is not reached over the same connection.
    pub ca_istiod: Option<istiod::Config>,
    pub secrets: SecretsParameters,
    /// Where Envoy asks for discovery.
    pub xds_socket: PathBuf,
    /// Largest message taken from Envoy.
    pub max_request_bytes: usize,
    /// `ISTIO_META_CLUSTER_ID`.
    pub cluster_id: String,
    /// Where Envoy asks for secrets.
    pub sds_socket: PathBuf,
    pub bootstrap: bootstrap::Config,
    /// The bootstrap of gRPC applications.
    pub grpc: Option<bootstrap::grpc::Config>,
    /// The cloud to ask where this is.
    pub platform: bootstrap::platform::Config,
    /// None when the agent runs without Envoy.
    pub envoy: Option<crate::envoy::Config>,
    /// Only logged: there is one kind of token.
    pub jwt_policy: String,
    /// What was found odd and replaced by a default.
    pub warnings: Vec<Problem>,
}

/// A setting that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Problem {
    /// Variable, flag, member or file.
    pub subject: String,
    pub found: String,
    pub expected: String,
}

/// Every problem of a configuration, as one error.
#[derive(Debug, thiserror::Error)]
pub struct Unusable(pub Vec<Problem>);

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let problems: Vec<_> = self.0.iter().map(ToString::to_string).collect();
        write!(
            f,
            "the configuration cannot be used: {}",
            problems.join("; ")
        )
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            subject,
            found,
            expected,
        } = self;
        write!(f, "{subject} is {found:?}, expected {expected}")
    }
}

/// What the parts of the configuration are built from.
struct Sources<'a> {
    flags: &'a ProxyFlags,
    env: &'a Environment,
    /// The working directory, against which files are looked for.
    root: &'a Path,
    mesh: ProxyConfig,
    labels: Option<Pairs>,
    annotations: Pairs,
    addresses: Vec<IpAddr>,
    namespace: String,
    problems: Vec<Problem>,
    warnings: Vec<Problem>,
}

/// Reads the configuration. `root` is the working directory.
pub fn load(
    flags: &ProxyFlags,
    log: &LogFlags,
    env: &Environment,
    root: &Path,
) -> Result<Config, Vec<Problem>> {
    load_with(flags, log, env, root, interfaces::of_this_machine())
}

/// Reads the configuration of a machine with these interfaces.
pub(crate) fn load_with(
    flags: &ProxyFlags,
    log: &LogFlags,
    env: &Environment,
    root: &Path,
    interfaces: std::io::Result<Vec<Interface>>,
) -> Result<Config, Vec<Problem>> {
    let mut sources = Sources::read(flags, env, root, interfaces);
    sources.refuse_templates();
    let sds_socket = sources.sds_socket();
    let xds_socket = Path::new(&sources.mesh.config_path).join("XDS");
    let (istiod, ca_istiod) = sources.control_plane();
    let secrets = sources.secrets();
    let bootstrap = sources.bootstrap(&xds_socket, &sds_socket, log.as_json);
    let envoy = sources.envoy(&bootstrap);
    let grpc = sources.grpc(&xds_socket);
    let platform = sources.platform();
    let max_request_bytes = sources.get(&environment::ISTIO_GPRC_MAXRECVMSGSIZE);
    let cluster_id = sources.get(&environment::ISTIO_META_CLUSTER_ID);
    let jwt_policy = sources.get(&environment::JWT_POLICY);
    if !sources.problems.is_empty() {
        return Err(sources.problems);
    }
    Ok(Config {
        istiod,
        ca_istiod,
        secrets,
        xds_socket,
        // Larger than any address space is as good as no limit.
        max_request_bytes: usize::try_from(max_request_bytes).unwrap_or(usize::MAX),
        sds_socket,
        bootstrap,
        grpc,
        platform,
        envoy,
        jwt_policy,
        cluster_id,
        warnings: sources.warnings,
    })
}

impl Config {
    /// Logs what an operator looks for first.
    pub fn announce(&self) {
        for warning in &self.warnings {
            tracing::warn!("{warning}");
        }
        let node = &self.bootstrap.node;
        let ips: Vec<_> = node.addresses.iter().map(ToString::to_string).collect();
        tracing::info!(ips = ips.join(","), id = node.id, "Proxy role");
        tracing::info!("Effective config: {}", mesh::printable(&node.proxy_config));
        tracing::info!("JWT policy is {}", self.jwt_policy);
        let ca = self.ca_istiod.as_ref().unwrap_or(&self.istiod);
        tracing::info!("CA Endpoint {}, provider Citadel", ca.address);
        if let istiod::Security::Tls(tls) = &ca.security {
            match &tls.roots {
                istiod::tls::Roots::System => {
                    tracing::info!("Using CA {} cert with system certs", ca.address);
                }
                istiod::tls::Roots::File(path) => {
                    tracing::info!(
                        "Using CA {} cert with certs: {}",
                        ca.address,
                        path.display()
                    );
                }
            }
        }
    }
}

impl<'a> Sources<'a> {
    fn read(
        flags: &'a ProxyFlags,
        env: &'a Environment,
        root: &'a Path,
        interfaces: std::io::Result<Vec<Interface>>,
    ) -> Self {
        let (mut problems, mut warnings) = (Vec::new(), Vec::new());
        let pod_file = |name: &str| root.join("./etc/istio/pod").join(name);
        let labels = pod::read_pairs(&pod_file("labels"), &mut warnings);
        let annotations = pod::read_pairs(&pod_file("annotations"), &mut warnings);
        let annotations = annotations.unwrap_or_default();
        let document = effective(flags, env, root, &annotations, &mut problems, &mut warnings);
        let mut mesh = document.read(&mut problems);
        if annotations.get(STATUS_PORT_ANNOTATION).map(String::as_str) == Some("0") {
            mesh.status_port = None;
        }
        let instance_ip = env.get(&environment::INSTANCE_IP, &mut warnings);
        let interfaces = interfaces.unwrap_or_else(|error| {
            warnings.push(Problem {
                subject: "network interfaces".to_owned(),
                found: error.to_string(),
                expected: "a list of them, going on without".to_owned(),
            });
            Vec::new()
        });
        let excluded = annotations
            .get(pod::EXCLUDED_INTERFACES)
            .map(String::as_str);
        let excluded = excluded
            .unwrap_or_default()
            .split(',')
            .filter(|name| !name.is_empty());
        let excluded: Vec<_> = excluded.map(str::to_owned).collect();
        let excluded: Vec<_> = excluded.iter().map(String::as_str).collect();
        Self {
            flags,
            env,
            root,
            mesh,
            labels,
            annotations,
            addresses: pod::addresses(&instance_ip, &interfaces, &excluded, &mut warnings),
            namespace: env.get(&environment::POD_NAMESPACE, &mut warnings),
            problems,
            warnings,
        }
    }

    fn get<T>(&mut self, variable: &environment::Variable<T>) -> T {
        self.env.get(variable, &mut self.warnings)
    }

    /// A template nobody would fill in must not pass unnoticed.
    fn refuse_templates(&mut self) {
        let variable = self.get(&environment::ISTIO_BOOTSTRAP);
        let flag = self.flags.template_file.clone();
        for (subject, found) in [("ISTIO_BOOTSTRAP", variable), ("--templateFile", flag)] {
            if !found.is_empty() {
                self.problem(
                    subject,
                    &found,
                    "nothing: this agent writes the bootstrap itself",
                );
            }
        }
    }

    fn sds_socket(&mut self) -> PathBuf {
        let name = self.get(&environment::WORKLOAD_IDENTITY_SOCKET_FILE);
        if name.is_empty() || name.contains('/') || name == ".." {
            self.problem(
                "WORKLOAD_IDENTITY_SOCKET_FILE",
                &name,
                "a file name without a directory",
            );
        }
        Path::new("./var/run/secrets/workload-spiffe-uds").join(name)
    }

    fn problem(&mut self, subject: &str, found: &str, expected: impl Into<String>) {
        self.problems.push(Problem {
            subject: subject.to_owned(),
            found: found.to_owned(),
            expected: expected.into(),
        });
    }
}

const STATUS_PORT_ANNOTATION: &str = "status.sidecar.istio.io/port";
const ADDRESS_ANNOTATION: &str = "sidecar.istio.io/discoveryAddress";
const CONFIG_ANNOTATION: &str = "proxy.istio.io/config";

/// Folds the documents, the weakest first.
fn effective(
    flags: &ProxyFlags,
    env: &Environment,
    root: &Path,
    annotations: &Pairs,
    problems: &mut Vec<Problem>,
    warnings: &mut Vec<Problem>,
) -> mesh::Document {
    let mut document = mesh::Document::builtin();
    let mesh_file = root.join(&flags.mesh_config);
    let mut note = |result: Result<(), Problem>| problems.extend(result.err());
    let origin = mesh_file.display().to_string();
    match std::fs::read_to_string(&mesh_file) {
        Ok(text) => note(document.overlay_mesh(&origin, &text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => note(Err(Problem {
            subject: origin,
            found: error.to_string(),
            expected: "a readable MeshConfig file, or none".to_owned(),
        })),
    }
    let from_env = env.get(&environment::PROXY_CONFIG, warnings);
    note(document.overlay_text("PROXY_CONFIG", &from_env));
    if let Some(text) = annotations.get(CONFIG_ANNOTATION) {
        note(document.overlay_text(CONFIG_ANNOTATION, text));
    }
    if let Some(address) = annotations.get(ADDRESS_ANNOTATION) {
        document.set(ADDRESS_ANNOTATION, "discoveryAddress", json!(address));
    }
    match annotations.get(STATUS_PORT_ANNOTATION).map(String::as_str) {
        None | Some("0") => {}
        Some(port) => document.set(STATUS_PORT_ANNOTATION, "statusPort", json!(port)),
    }
    let cpus = env.get(&environment::ISTIO_CPU_LIMIT, warnings);
    document.set_threads(flags.concurrency, cpus);
    document
}

#[cfg(test)]
mod tests;
