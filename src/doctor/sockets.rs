//! Checks the sockets of discovery and secrets: finds the process that listens, and connects to it.

use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use super::{Subject, error, run_blocking};
use crate::config::AbsentSocket;
use crate::files::regular_file;
use crate::net::unix_socket;
use crate::net::unix_socket::probe::{self, Health};
use crate::problem::Code;
use crate::report::Check;

/// The process that should listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    /// The agent that makes this check.
    This,
    /// An agent, if one runs.
    Agent,
    /// Another process, such as a SPIRE agent.
    Other,
}

/// The pid and the name of the process that listens, and its health.
type Listener = (i32, String, Health);

pub(super) async fn checks(subject: Subject<'_>) -> Vec<Check> {
    let config = subject.config;
    let (xds, sds) = tokio::join!(inspect(&config.xds_socket), inspect(&config.sds_socket));
    let owner = subject.running.map_or(Owner::Agent, |_| Owner::This);
    let is_own = config.secret_sources.absent_socket == AbsentSocket::Serve;
    let serves_secrets = subject.running.map_or(is_own, |it| it.serves_secrets);
    let sds_owner = if serves_secrets { owner } else { Owner::Other };
    let mut checks = vec![check("XDS socket", &config.xds_socket, &xds, owner)];
    if config.envoy.is_some() {
        checks.push(check("SDS socket", &config.sds_socket, &sds, sds_owner));
    }
    checks
}

async fn inspect(path: &Path) -> io::Result<Listener> {
    let socket = path.to_owned();
    let (pid, process) =
        run_blocking(move || listener(&socket)).await.map_err(io::Error::other)??;
    Ok((pid, process, probe::health(path).await))
}

/// Returns the pid and the name of the process that listens. Blocks.
fn listener(path: &Path) -> io::Result<(i32, String)> {
    match fs::metadata(path)?.file_type() {
        kind if kind.is_socket() => {}
        kind if kind.is_dir() => return Err(io::Error::other("a directory")),
        _ => return Err(io::Error::other("a file")),
    }
    // The kernel does not reveal a process of another container: its pid is 0.
    let pid = unix_socket::find_listener(path)?;
    let comm = regular_file::read_kernel(format!("/proc/{pid}/comm"));
    Ok((pid, comm.unwrap_or_else(|_| "of another container".to_owned()).trim().to_owned()))
}

fn check(name: &str, path: &Path, found: &io::Result<Listener>, owner: Owner) -> Check {
    let path = path.display();
    let own_pid = std::process::id();
    let absent = found.as_ref().err().and_then(|error| match error.kind() {
        io::ErrorKind::NotFound => Some("there is none"),
        io::ErrorKind::ConnectionRefused => Some("stale, no process listens"),
        _ => None,
    });
    let (code, found) = match (found, absent, owner) {
        (Ok((pid, process, health)), ..) => {
            let found = format!("process {pid} ({process}) listens");
            let is_foreign = owner == Owner::This && u32::try_from(*pid) != Ok(own_pid);
            match health {
                _ if is_foreign => {
                    (Code::SocketTaken, format!("{found}, not this agent ({own_pid})"))
                }
                Health::Healthy => return Check::ok(name, format!("{path}: {found}")),
                Health::Busy => (Code::SocketHangs, format!("{found}, its queue is full")),
                Health::Dead(problem) => (Code::SocketHangs, format!("{found}: {problem}")),
                Health::Absent => (Code::SocketHangs, "it has just gone".to_owned()),
            }
        }
        (Err(error), None, _) => (Code::SocketDirectory, error.to_string()),
        (Err(_), Some(found), Owner::This) => (Code::SocketTaken, found.to_owned()),
        (Err(_), Some(found), Owner::Other) => (Code::SocketNotServed, found.to_owned()),
        (Err(_), Some(found), Owner::Agent) => {
            return Check::skipped(name, format!("{path}: {found}, no agent runs"));
        }
    };
    error(code, name, format!("{path}: {found}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::Level::{Error, Ok, Skipped};

    #[test]
    fn the_level_of_a_socket_depends_on_its_expected_owner() {
        let own = i32::try_from(std::process::id()).expect("a pid");
        let listener = |pid, name: &str, health| io::Result::Ok((pid, name.to_owned(), health));
        let silent = || Health::Dead(io::ErrorKind::TimedOut.into());
        for (found, of_this, of_agent, of_other) in [
            (Err(io::ErrorKind::NotFound.into()), Error, Skipped, Error),
            (Err(io::Error::other("a file")), Error, Error, Error),
            (listener(own, "pilot-agent", Health::Healthy), Ok, Ok, Ok),
            (listener(0, "of another container", Health::Busy), Error, Error, Error),
            (listener(own, "pilot-agent", silent()), Error, Error, Error),
            (listener(0, "spire", Health::Healthy), Error, Ok, Ok),
        ] {
            let level = |owner| check("socket", Path::new("s"), &found, owner).level;
            let levels = [Owner::This, Owner::Agent, Owner::Other].map(level);
            assert_eq!(levels, [of_this, of_agent, of_other], "{found:?}");
        }
    }
}
