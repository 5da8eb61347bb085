//! Detects which process owns the workload SDS socket: the agent, or another process such as a SPIRE agent.
//!
//! The owner is detected before other modules are built, because Envoy's bootstrap and node metadata depend on it.

use std::path::Path;

use crate::bootstrap;
use crate::config::{AbsentSocket, Config};
use crate::files::regular_file::if_exists;
use crate::net::unix_socket::probe::{self, Health};
use crate::net::unix_socket::{self, Listener};
use crate::problem::{Code, Problem};

/// The socket at which another process serves the credentials of a gateway.
const CREDENTIALS: &str = "./var/run/secrets/credential-uds/socket";

/// The metadata that tells istiod that the agent serves files, in addition to another process.
const FILES: &str = "file-credential";

/// The owner, and the node metadata that describes it to istiod.
#[derive(Clone, Debug)]
pub(super) struct Detected {
    /// True if the agent serves the workload's secrets, not another process.
    pub(super) serves_workload: bool,
    metadata: Vec<&'static str>,
}

impl Detected {
    /// Binds the socket on which the agent serves secrets. If another process serves the workload's secrets, it is the
    /// socket for files; if that cannot be bound, as under a read-only root, the agent continues without it. Returns
    /// None without Envoy, because there is no client.
    pub(super) fn bind(&mut self, config: &Config) -> Result<Option<Listener>, Problem> {
        if config.envoy.is_none() {
            return Ok(None);
        }
        if self.serves_workload {
            return unix_socket::bind(&config.bootstrap.sds_socket).map(Some);
        }
        Ok(unix_socket::bind(&config.bootstrap.files_socket)
            .inspect_err(|error| {
                let code = Code::SdsSocketUnusable;
                tracing::warn!(
                    "{}",
                    Problem::new(code, "socket for secrets from files", &error.found)
                );
                self.metadata.retain(|name| *name != FILES);
            })
            .ok())
    }

    /// Adds the socket with the workload's secrets, and the node metadata, to Envoy's bootstrap.
    pub(super) fn add_to(&self, bootstrap: &mut bootstrap::Config, sds_socket: &Path) {
        if !self.serves_workload {
            sds_socket.clone_into(&mut bootstrap.sds_socket);
        }
        for name in &self.metadata {
            bootstrap.node.metadata.insert((*name).to_owned(), "true".into());
        }
    }
}

/// Probes the sockets of other processes, and removes those that are dead. Returns the owner of the workload socket.
pub(super) async fn detect(config: &Config) -> Result<Detected, Problem> {
    let mut metadata = Vec::new();
    if probe_or_remove(Path::new(CREDENTIALS), true).await? {
        tracing::info!("Credential SDS socket found");
        metadata.push("credential");
    }
    let is_served =
        detect_other_server(&config.sds_socket, config.secret_sources.absent_socket).await?;
    if is_served {
        metadata.push(FILES);
    }
    Ok(Detected { serves_workload: !is_served, metadata })
}

/// Probes the workload socket, and logs the result. Returns true if another process serves it, or is expected to. Fails
/// if one must serve it and none does.
async fn detect_other_server(socket: &Path, absent: AbsentSocket) -> Result<bool, Problem> {
    if unix_socket::is_link_to_container(socket) {
        return Ok(false);
    }
    // With `Wait`, a dead socket may belong to a process that is about to start, so it is not removed.
    let is_healthy = probe_or_remove(socket, absent != AbsentSocket::Wait).await?;
    match absent {
        _ if is_healthy => tracing::info!(
            "Existing workload SDS socket found at {}. Default Istio SDS Server will only serve files",
            socket.display()
        ),
        AbsentSocket::Serve => return Ok(false),
        AbsentSocket::Fail => {
            let subject = "agent configured for non-default SDS socket path";
            let found = format!("{} but no socket found", socket.display());
            return Err(Problem::new(Code::SdsSocketMissing, subject, found));
        }
        AbsentSocket::Wait => {
            let code = Code::SdsSocketAbsent;
            tracing::warn!("{}", Problem::new(code, socket.display(), code.cause()));
        }
    }
    Ok(true)
}

/// Probes the socket, and returns true if a process serves it. With `removes_dead`, removes a dead socket, so that it
/// can be bound again.
async fn probe_or_remove(socket: &Path, removes_dead: bool) -> Result<bool, Problem> {
    let problem = match probe::health(socket).await {
        // A full queue also means that a process serves it.
        Health::Healthy | Health::Busy => return Ok(true),
        Health::Dead(problem) if removes_dead => problem,
        Health::Dead(_) | Health::Absent => return Ok(false),
    };
    tracing::debug!("SDS socket {} is dead, removing it: {problem}", socket.display());
    if_exists(std::fs::remove_file(socket)).map_err(|error| {
        let path = socket.display();
        let found = format!("existing SDS socket could not be removed: {path}: {error}");
        Problem::new(Code::SdsSocketStale, "failed to check SDS socket", found)
    })?;
    Ok(false)
}
