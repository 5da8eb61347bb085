//! Whose socket Envoy asks for the workload's secrets: the agent's, or somebody else's.
//!
//! Looked at before the rooms are built, as Envoy's bootstrap and its node depend on it. A socket of
//! somebody else is watched over from then on, so that the log tells when it goes and comes.
//!
//! Does not serve anything.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::Error;
use crate::backoff::Backoff;
use crate::bootstrap::node::Node;
use crate::config::{AbsentSocket, Config};
use crate::metrics::{Gauge, Registry};
use crate::unix_socket::probe::{self, Health};

/// Where gateways find a server of credentials.
const CREDENTIALS: &str = "./var/run/secrets/credential-uds/socket";

/// How often a healthy socket of somebody else is looked at.
const PAUSE: Duration = Duration::from_secs(30);

/// Bounds of the pause while it is not.
const SHORTEST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(10);

/// Who serves the workload's secrets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SdsOwner {
    Agent,
    Other { is_healthy: bool },
}

/// Who serves secrets, and what istiod is told of it in the node's metadata.
#[derive(Clone, Debug)]
pub(super) struct Detected {
    pub(super) owner: SdsOwner,
    metadata: Vec<&'static str>,
}

impl Detected {
    /// Tells istiod, and whoever writes a bootstrap for this node.
    pub(super) fn add_to(&self, node: &mut Node) {
        for name in &self.metadata {
            node.raw.insert((*name).to_owned(), "true".into());
        }
    }
}

/// Finds out who serves secrets.
pub(super) async fn detect(config: &Config) -> Result<Detected, Error> {
    let mut metadata = Vec::new();
    if is_healthy(Path::new(CREDENTIALS)).await? {
        tracing::info!("Credential SDS socket found");
        metadata.push("credential");
    }
    let owner = owner(&config.sds_socket, config.secret_sources.absent_socket).await?;
    if owner != SdsOwner::Agent {
        metadata.push("file-credential");
    }
    Ok(Detected { owner, metadata })
}

async fn owner(socket: &Path, absent: AbsentSocket) -> Result<SdsOwner, Error> {
    // What is dead now may be somebody's who is yet to come, and is left alone then.
    let is_healthy = match absent {
        AbsentSocket::Wait => matches!(probe::health(socket).await, Health::Healthy),
        AbsentSocket::Serve | AbsentSocket::Fail => is_healthy(socket).await?,
    };
    match absent {
        _ if is_healthy => log_found(socket),
        AbsentSocket::Serve => return Ok(SdsOwner::Agent),
        AbsentSocket::Fail => return Err(Error::NoWorkloadSocket(socket.display().to_string())),
        AbsentSocket::Wait => tracing::warn!(
            "nobody serves secrets at {} yet; Envoy waits, and the agent serves only files",
            socket.display()
        ),
    }
    Ok(SdsOwner::Other { is_healthy })
}

/// Whether somebody serves secrets there. A dead socket is removed: whoever comes needs its place.
async fn is_healthy(socket: &Path) -> Result<bool, Error> {
    let problem = match probe::health(socket).await {
        // One with a full queue is somebody's all the same.
        Health::Healthy | Health::Busy => return Ok(true),
        Health::Absent => return Ok(false),
        Health::Dead(problem) => problem,
    };
    tracing::debug!(
        "SDS socket {} is dead, removing it: {problem}",
        socket.display()
    );
    match std::fs::remove_file(socket) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => Err(Error::DeadSocket {
            path: socket.display().to_string(),
            source,
        }),
        _ => Ok(false),
    }
}

fn log_found(socket: &Path) {
    tracing::info!(
        "Existing workload SDS socket found at {}. Default Istio SDS Server will only serve files",
        socket.display()
    );
}

/// Watches over a socket of somebody else.
pub(super) fn watch_health(
    socket: PathBuf,
    is_healthy: bool,
    registry: &Registry,
) -> impl Future<Output = ()> + Send + use<> {
    let gauge = registry.gauge(
        "istio_agent_external_sds_healthy",
        "Whether the server of secrets that is not the agent answers",
    );
    gauge.set(f64::from(u8::from(is_healthy)));
    check_forever(socket, is_healthy, gauge)
}

async fn check_forever(socket: PathBuf, mut is_healthy: bool, gauge: Gauge) {
    let mut backoff = Backoff::new(SHORTEST, LONGEST);
    loop {
        let pause = match is_healthy {
            true => PAUSE,
            false => SHORTEST.max(backoff.next_wait()),
        };
        tokio::time::sleep(pause).await;
        let health = probe::health(&socket).await;
        if matches!(health, Health::Busy) {
            continue; // That tells nothing new.
        }
        match (is_healthy, &health) {
            (false, Health::Healthy) => {
                log_found(&socket);
                backoff.reset();
            }
            (true, Health::Absent | Health::Dead(_)) => tracing::warn!(
                "nobody serves secrets at {} any more ({health:?}); Envoy keeps what it has",
                socket.display()
            ),
            _ => {}
        }
        is_healthy = matches!(health, Health::Healthy);
        gauge.set(f64::from(u8::from(is_healthy)));
    }
}
