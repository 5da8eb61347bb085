//! Two containers of one pod run the agent: one serves, the other waits and takes over.
//!
//! Both mount [`DIRECTORY`]. The agent that holds a lock on its private subdirectory serves: `pilot-agent proxy`
//! takes the lock before it does anything else, and becomes `pilot-agent standby` if another process has it. The
//! kernel releases the lock when the process ends, however it ends. `pilot-agent standby` waits for the lock, and
//! then becomes `pilot-agent proxy` with the arguments and the environment that the former holder has [recorded].
//!
//! An agent whose build differs from the one that its container ran before asks the agent that serves for its place
//! instead: see [`channel`]. The lock then passes with the listening sockets.
//!
//! [recorded]: record::Record

pub mod channel;
mod exec;
pub mod record;
pub mod wait;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use tokio::net::UnixListener;
use tokio::sync::watch;

use crate::config::environment::{Environment, ISTIO_AGENT_STANDBY};
use crate::directory::Directory;
use crate::exit_code::ExitCode;
use crate::lifecycle::BoxError;
use crate::problem::{Problem, codes};
use crate::{unix_socket, version};
use channel::{Hello, VERSION};
use record::{End, Record};

/// The directory in memory that both containers mount.
pub const DIRECTORY: &str = "./etc/istio/proxy";
/// Its subdirectory, which only the agents' user has access to.
const PRIVATE: &str = "istio-agent-standby";
const SOCKET: &str = "handover";
/// How long a program may take to tell its version.
const TELLS_VERSION: Duration = Duration::from_secs(5);

/// What both agents of the pod read and write. Clones share all of it.
#[derive(Clone, Debug)]
pub struct Standby {
    /// The name of this container.
    name: String,
    build: String,
    directory: Arc<Directory>,
    /// None while another agent has it.
    lock: Arc<Mutex<Option<OwnedFd>>>,
    /// The other agent, if it is connected and waits.
    waiting: Arc<Mutex<Option<Hello>>>,
    /// Changes when the other agent is to take over.
    order: watch::Sender<()>,
    /// What this process was started with.
    record: Arc<Record>,
}

/// What an agent that has just started does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Serves,
    /// It asks the agent that serves for its place.
    Succeeds,
}

impl Standby {
    /// Opens the directory, if this agent is one of two.
    fn open(environment: &Environment) -> Result<Option<Self>, Problem> {
        let name = environment.get(&ISTIO_AGENT_STANDBY);
        if name.is_empty() {
            return Ok(None);
        }
        if !is_name(&name) {
            let (subject, expected) = (ISTIO_AGENT_STANDBY.name, "the name of the container");
            return Err(Problem::value(
                codes::SETTING_INVALID,
                subject,
                &name,
                expected,
            ));
        }
        let parent = Path::new(DIRECTORY);
        let directory = std::fs::create_dir_all(parent)
            .and_then(|()| Directory::private(parent, &name, true))
            .and_then(|_of_this_container| Directory::private(parent, PRIVATE, true))
            .map_err(|error| Problem::new(codes::STANDBY_UNUSABLE, DIRECTORY, error))?;
        Ok(Some(Self {
            name,
            build: String::new(),
            directory: Arc::new(directory),
            lock: Arc::default(),
            waiting: Arc::default(),
            order: watch::Sender::default(),
            record: Arc::new(Record::of_process(environment)),
        }))
    }

    /// Takes the lock of an agent that is about to serve and run this Envoy, and records what this process was
    /// started with.
    ///
    /// Returns None if the variable is not set. Does not return if another agent serves and this container has the
    /// same build as before: this process becomes `pilot-agent standby`.
    pub async fn enter(
        environment: &Environment,
        envoy: &Path,
    ) -> Result<Option<(Self, Role)>, BoxError> {
        let Some(mut standby) = Self::open(environment)? else {
            return Ok(None);
        };
        standby.build = build(envoy).await;
        let is_new = standby.has_new_build()?;
        let file = standby.build_file();
        let build = standby.build.as_bytes();
        standby.directory.replace_files(&[(&file, build)], 0o600)?;
        let role = match Lock::open()?.try_take()? {
            Some(lock) => {
                standby.serve_with(lock)?;
                Role::Serves
            }
            None if is_new => {
                tracing::info!(
                    "container {} has a new build; asking the agent that serves for its place",
                    standby.name
                );
                Role::Succeeds
            }
            None => {
                tracing::info!("another container of this pod serves; waiting as its standby");
                return Err(exec::standby().into());
            }
        };
        Ok(Some((standby, role)))
    }

    /// Whether this container ran another build before.
    fn has_new_build(&self) -> io::Result<bool> {
        match self.directory.read_private(&self.build_file()) {
            Ok(before) => Ok(*before != self.build.as_bytes()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Has the next agent of this container ask for the place of the agent that serves.
    fn forget_build(&self) -> io::Result<()> {
        let file = self.build_file();
        self.directory.replace_files(&[(&file, b"")], 0o600)
    }

    fn build_file(&self) -> String {
        format!("build-{}", self.name)
    }

    /// Records that the agent is about to exit because it was told to, so that the standby exits as well.
    pub fn record_end(&self, code: ExitCode) {
        if let Err(error) = End::now(code).write(&self.directory) {
            let problem = Problem::new(codes::STANDBY_UNUSABLE, "record of the end", error);
            tracing::warn!("{}", problem.consequence("the standby serves again"));
        }
    }

    pub fn hello(&self) -> Hello {
        Hello {
            version: VERSION,
            name: self.name.clone(),
            build: self.build.clone(),
        }
    }

    /// Listens for the other agent, in place of a former one.
    pub fn listen(&self) -> io::Result<UnixListener> {
        self.directory.remove_file(SOCKET)?;
        UnixListener::bind(socket())
    }

    /// Duplicates the lock for the agent that takes over.
    pub fn duplicate_lock(&self) -> io::Result<OwnedFd> {
        let lock = self.lock.lock();
        let lock = lock.as_ref().ok_or_else(|| io::Error::other("no lock"))?;
        lock.try_clone()
    }

    /// Keeps the lock, and records what this process was started with.
    pub fn serve_with(&self, lock: OwnedFd) -> io::Result<()> {
        *self.lock.lock() = Some(lock);
        tracing::info!("container {} serves", self.name);
        self.directory.remove_file(record::END)?;
        self.record.write(&self.directory)
    }

    pub fn has_lock(&self) -> bool {
        self.lock.lock().is_some()
    }

    /// Leaves the lock to the agent that has taken over.
    pub fn leave_lock(&self) {
        *self.lock.lock() = None;
    }

    /// Notes whether the other agent is connected and waits.
    pub fn set_waiting(&self, other: Option<Hello>) {
        *self.waiting.lock() = other;
    }

    /// Has the other agent take over. None if there is none.
    pub fn order_handover(&self) -> Option<Hello> {
        let other = self.waiting.lock().clone()?;
        self.order.send_replace(());
        Some(other)
    }

    pub fn orders(&self) -> watch::Receiver<()> {
        self.order.subscribe()
    }

    /// Becomes `pilot-agent standby`. Returns only on failure.
    pub fn wait(&self) -> io::Error {
        exec::standby()
    }
}

/// Whether this is a container whose agent waits while the other one serves.
pub fn another_serves(environment: &Environment) -> bool {
    let name = environment.get(&ISTIO_AGENT_STANDBY);
    let serves = std::fs::read_link(Path::new(DIRECTORY).join("XDS"));
    let own = unix_socket::of_container(Path::new("XDS"), &name);
    !name.is_empty() && serves.is_ok_and(|serves| serves != own)
}

/// Where the agent that serves listens for the other one.
pub fn socket() -> PathBuf {
    Path::new(DIRECTORY).join(PRIVATE).join(SOCKET)
}

/// The lock, not yet taken. It belongs to the open file, which duplicates in other processes share.
struct Lock(OwnedFd);

impl Lock {
    fn open() -> io::Result<Self> {
        let directory = Directory::private(Path::new(DIRECTORY), PRIVATE, false)?;
        Ok(Self(directory.as_fd().try_clone_to_owned()?))
    }

    fn try_take(self) -> io::Result<Option<OwnedFd>> {
        match flock(&self.0, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(self.0)),
            Err(Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits until it is free. Blocks.
    fn take(self) -> io::Result<OwnedFd> {
        flock(&self.0, FlockOperation::LockExclusive)?;
        Ok(self.0)
    }
}

/// The versions of this agent and of Envoy.
async fn build(envoy: &Path) -> String {
    let agent = version::full(&version::istio().unwrap_or_default());
    let envoy = told_by(envoy, "--version").await;
    format!("{agent}, Envoy {}", envoy.unwrap_or_else(|why| why))
}

/// What a program prints for this argument, on one line. Envoy prints to either output.
pub async fn told_by(program: &Path, argument: &str) -> Result<String, String> {
    let mut command = tokio::process::Command::new(program);
    command
        .arg(argument)
        .stdin(Stdio::null())
        .kill_on_drop(true);
    let output = tokio::time::timeout(TELLS_VERSION, command.output()).await;
    let named = |why: String| format!("{}: {why}", program.display());
    let output = output
        .map_err(|_| named("no answer".to_owned()))?
        .map_err(|error| named(error.to_string()))?;
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    let words: Vec<_> = text.split_whitespace().collect();
    if output.status.success() && !words.is_empty() {
        Ok(words.join(" "))
    } else {
        Err(named(output.status.to_string()))
    }
}

/// The names Kubernetes gives containers (RFC 1123).
fn is_name(name: &str) -> bool {
    (1..64).contains(&name.len())
        && name
            .bytes()
            .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_container_is_checked() {
        let long = "a".repeat(64);
        for (name, expected) in [
            ("istio-standby", true),
            ("a1", true),
            ("", false),
            ("..", false),
            ("a/b", false),
            ("A", false),
            (&long, false),
        ] {
            assert_eq!(is_name(name), expected, "{name}");
        }
    }
}
