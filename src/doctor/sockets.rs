//! The sockets of discovery and secrets, and the status port: who listens, and whether it answers.

use std::fs;
use std::io;
use std::net::Ipv4Addr;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use tokio::net::TcpStream;
use tokio::time::timeout;

use super::report::Check;
use super::{PROBE_LIMIT, Subject, aside};
use crate::config::{AbsentSocket, Config};
use crate::unix_socket;
use crate::unix_socket::probe::{self, Health};

/// The name of an agent's process, pilot-agent's too.
const AGENT: &str = "pilot-agent";
/// Envoy may run as another user.
const MODE: u32 = 0o666;
const SHARED: &str = "find what shares the directory with this container, end it, and restart this \
                      container";
const START: &str = "the agent binds it when it starts";

/// Which process is to listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    /// The agent of this process.
    This,
    /// An agent, if one runs.
    Agent,
    /// Another one, such as a SPIRE agent.
    Other,
}

/// What is at the path of a socket.
#[derive(Debug)]
enum Found {
    Absent,
    /// It cannot be looked at, is no socket, or does not let itself be connected to.
    Unusable(String),
    /// Left by a process that has ended.
    Stale,
    Listener(Listener, Health),
}

/// A process that listens, and the file of its socket.
#[derive(Debug)]
struct Listener {
    pid: i32,
    /// Of the process.
    name: String,
    /// Owner of the file.
    user: u32,
    mode: u32,
}

pub(super) async fn checks(subject: Subject<'_>) -> Vec<Check> {
    let config = subject.config;
    let (xds, sds, connected) = tokio::join!(
        look(&config.xds_socket),
        look(&config.sds_socket),
        is_port_taken(config),
    );
    let (of_xds, of_sds) = match subject.running {
        None => (Owner::Agent, owner_of_secrets(config, &sds)),
        Some(running) if running.serves_secrets => (Owner::This, Owner::This),
        Some(_) => (Owner::This, Owner::Other),
    };
    let port = status_port(subject, connected, is_agent(&xds));
    let mut checks = vec![check("XDS socket", &config.xds_socket, &xds, of_xds)];
    if config.envoy.is_some() {
        checks.push(check("SDS socket", &config.sds_socket, &sds, of_sds));
    }
    checks.push(port);
    checks
}

/// Which process is to serve secrets where no agent tells.
fn owner_of_secrets(config: &Config, found: &Found) -> Owner {
    let is_served = matches!(found, Found::Listener(_, Health::Healthy));
    match config.secret_sources.absent_socket {
        AbsentSocket::Serve if is_agent(found) || !is_served => Owner::Agent,
        _ => Owner::Other,
    }
}

fn is_agent(found: &Found) -> bool {
    matches!(found, Found::Listener(listener, _) if listener.name == AGENT)
}

async fn look(path: &Path) -> Found {
    let socket = path.to_owned();
    match aside(move || look_at(&socket)).await {
        Ok(Ok(listener)) => Found::Listener(listener, probe::health(path).await),
        Ok(Err(found)) => found,
        Err(late) => Found::Unusable(late),
    }
}

/// The process that listens, or what else there is. Blocks while the disk does.
fn look_at(path: &Path) -> Result<Listener, Found> {
    let unusable = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => Found::Absent,
        io::ErrorKind::ConnectionRefused => Found::Stale,
        _ => Found::Unusable(error.to_string()),
    };
    let file = match fs::metadata(path) {
        Ok(file) if file.file_type().is_socket() => file,
        Ok(file) if file.is_dir() => return Err(Found::Unusable("a directory".to_owned())),
        Ok(_) => return Err(Found::Unusable("a file".to_owned())),
        Err(error) => return Err(unusable(error)),
    };
    let pid = unix_socket::listener(path).map_err(unusable)?;
    Ok(Listener {
        pid,
        name: name_of(pid),
        user: file.uid(),
        mode: file.mode() & 0o777,
    })
}

fn name_of(pid: i32) -> String {
    let name = match pid {
        0 => None,
        pid => fs::read_to_string(format!("/proc/{pid}/comm")).ok(),
    };
    name.map_or_else(
        || "of another container".to_owned(),
        |name| name.trim().to_owned(),
    )
}

fn check(name: &str, path: &Path, found: &Found, owner: Owner) -> Check {
    let path = path.display();
    let (listener, health) = match found {
        Found::Listener(listener, health) => (listener, health),
        Found::Unusable(problem) => {
            return Check::error(name, format!("{path}: {problem}"))
                .expected("a socket, or nothing")
                .remedy("remove it, or correct the volume that holds it");
        }
        Found::Absent => return unserved(name, format!("{path}: there is none"), owner),
        Found::Stale => {
            let found = format!("{path}: a stale file, no process listens");
            return unserved(name, found, owner);
        }
    };
    if matches!(health, Health::Busy) {
        return unanswered(name, format!("{path}: its queue of connections is full"));
    }
    let Listener {
        pid,
        name: process,
        user,
        mode,
    } = listener;
    let found = format!("{path}: process {pid} ({process}) listens; user {user}, mode {mode:04o}");
    let own = std::process::id();
    match owner {
        Owner::This if u32::try_from(*pid) != Ok(own) => {
            return Check::error(name, found)
                .expected(format!("process {own}, this agent"))
                .remedy(SHARED);
        }
        Owner::Agent if process != AGENT => {
            return Check::warning(name, found)
                .expected("an agent or no process")
                .remedy("the agent replaces it when it starts, and that process gets no more connections");
        }
        _ => {}
    }
    match health {
        Health::Healthy if owner != Owner::Other && mode & MODE != MODE => {
            Check::warning(name, found)
                .expected(format!("mode {MODE:04o}"))
                .remedy(SHARED)
        }
        Health::Healthy => Check::ok(name, found),
        Health::Busy => unanswered(name, found),
        Health::Dead(problem) => unanswered(name, format!("{found}; {problem}")),
        Health::Absent => unserved(name, format!("{path}: it has just gone"), owner),
    }
}

/// A socket without a process.
fn unserved(name: &str, found: String, owner: Owner) -> Check {
    match owner {
        Owner::Agent => Check::ok(name, found).remedy(START),
        Owner::This => Check::error(name, found).expected("this agent's socket").remedy(SHARED),
        Owner::Other => Check::error(name, found)
            .expected("another process that serves secrets, such as a SPIRE agent")
            .remedy("check that process and the volume of the socket, or unset WORKLOAD_IDENTITY_SOCKET_FILE"),
    }
}

fn unanswered(name: &str, found: String) -> Check {
    Check::error(name, found)
        .expected("HTTP/2 settings in a second")
        .remedy("restart the process if it stays so")
}

/// Whether a process accepts on the status port.
async fn is_port_taken(config: &Config) -> bool {
    let Some(status) = &config.status else {
        return false;
    };
    let connect = TcpStream::connect((Ipv4Addr::LOCALHOST, status.port));
    timeout(PROBE_LIMIT, connect)
        .await
        .is_ok_and(|connected| connected.is_ok())
}

fn status_port(subject: Subject<'_>, is_taken: bool, has_agent: bool) -> Check {
    const NAME: &str = "status port";
    let Some(status) = &subject.config.status else {
        return Check::skipped(NAME, "switched off (statusPort: 0)");
    };
    let port = status.port;
    match (subject.running, is_taken) {
        (Some(_), true) => Check::ok(NAME, format!("this agent serves port {port}")),
        (Some(_), false) => Check::error(
            NAME,
            format!("port {port} takes no connection on 127.0.0.1"),
        )
        .expected("this agent")
        .remedy("look at the rules of the pod's network for its loopback interface"),
        (None, true) if has_agent => Check::ok(NAME, format!("port {port} takes connections")),
        (None, true) => Check::error(
            NAME,
            format!("a process that is no agent listens on port {port}"),
        )
        .expected("a free port")
        .remedy("give the application another port, or the agent (ProxyConfig.statusPort)"),
        (None, false) => Check::ok(NAME, format!("port {port} is free")).remedy(START),
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::Level::{Error, Ok, Warning};
    use super::*;

    #[test]
    fn what_a_socket_means_depends_on_who_is_to_listen() {
        let own = i32::try_from(std::process::id()).expect("a pid");
        let listener = |pid, name: &str, mode, health| {
            let (name, user) = (name.to_owned(), 1337);
            let listener = Listener {
                pid,
                name,
                user,
                mode,
            };
            Found::Listener(listener, health)
        };
        let silent = || Health::Dead(io::ErrorKind::TimedOut.into());
        for (found, of_this, of_agent, of_other) in [
            (Found::Absent, Error, Ok, Error),
            (Found::Stale, Error, Ok, Error),
            (Found::Unusable("a file".to_owned()), Error, Error, Error),
            (listener(own, AGENT, 0o666, Health::Healthy), Ok, Ok, Ok),
            (
                listener(own, AGENT, 0o600, Health::Healthy),
                Warning,
                Warning,
                Ok,
            ),
            (
                listener(0, "of another container", 0o666, Health::Busy),
                Error,
                Error,
                Error,
            ),
            (listener(own, AGENT, 0o666, silent()), Error, Error, Error),
            (
                listener(0, "spire", 0o660, Health::Healthy),
                Error,
                Warning,
                Ok,
            ),
        ] {
            let level = |owner| check("socket", Path::new("s"), &found, owner).level;
            let levels = [Owner::This, Owner::Agent, Owner::Other].map(level);
            assert_eq!(levels, [of_this, of_agent, of_other], "{found:?}");
        }
    }
}
