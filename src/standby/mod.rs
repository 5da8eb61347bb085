//! Coordinates two containers of one pod that run the agent: one serves, the other waits and takes over.
//!
//! Both mount [`DIRECTORY`]. The agent that holds a lock on its private subdirectory serves: `pilot-agent proxy`
//! takes the lock before it does anything else, and becomes `pilot-agent standby` if another process has the lock. The
//! kernel releases the lock when the process ends for any reason. `pilot-agent standby` waits for the lock, and
//! then becomes `pilot-agent proxy` with the arguments and the environment that the former holder has [recorded].
//!
//! An agent whose build differs from the build that its container ran before asks the agent that serves for a handover
//! instead: see [`channel`]. The lock is then passed with the listening sockets.
//!
//! [recorded]: record::Record

pub mod channel;
mod check;
pub mod exec;
pub mod gate;
pub mod record;
pub mod wait;

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde::{Serialize, Serializer};
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::config::environment::{Environment, ISTIO_AGENT_STANDBY};
use crate::files::directory::Directory;
use crate::files::regular_file::{self, if_exists};
use crate::problem::{Code, Problem};
use crate::program;
use crate::runtime::clock::in_utc;
use crate::runtime::lifecycle::{self, BoxError};
use crate::version;
use channel::{Hello, VERSION};
use record::{End, Record};

/// The directory in memory that both containers mount.
pub const DIRECTORY: &str = "./etc/istio/proxy";
/// The subdirectory to which only the agents' user has access.
const PRIVATE: &str = "istio-agent-standby";
const SOCKET: &str = "handover";
/// The time limit for Envoy to print its version.
const VERSION_LIMIT: Duration = Duration::from_secs(5);
/// The longest version that is used, in characters.
const MAX_VERSION: usize = 1000;
/// The largest record of a build, in bytes.
const MAX_BUILD: u64 = 16 << 10;

/// The state that the two agents of the pod share, as this agent knows it. Clones share it.
#[derive(Clone, Debug)]
pub struct Pair {
    /// The name of this container.
    name: String,
    build: String,
    directory: Arc<Directory>,
    /// None while another agent has the lock.
    lock: Arc<Mutex<Option<OwnedFd>>>,
    state: Arc<Mutex<State>>,
    /// Changes when the other agent is to take over, as the user has requested from this one.
    handover_request: watch::Sender<()>,
}

/// The two containers, as the agent that serves knows them.
#[derive(Clone, Debug, Default, Serialize)]
pub struct State {
    /// The container that serves.
    pub serves: String,
    pub build: String,
    /// The connected agents that wait, in the order of their connections: one, unless the user starts more.
    #[serde(rename = "waits", serialize_with = "first")]
    pub waiting: Vec<Arc<Waiting>>,
    /// True while an Envoy of the other container finishes its connections.
    #[serde(rename = "former_envoy")]
    pub has_parent: bool,
    /// The last handover from this agent.
    pub last: Option<Handover>,
    /// The time when the last other agent ceased to wait; before, the start of this agent. While `waiting` is empty, no
    /// agent has waited since.
    #[serde(skip)]
    pub last_waiting_ended: Option<Instant>,
}

impl State {
    pub fn waits(&self) -> Option<&Waiting> {
        self.waiting.first().map(Arc::as_ref)
    }
}

fn first<S: Serializer>(waiting: &[Arc<Waiting>], serializer: S) -> Result<S::Ok, S::Error> {
    waiting.first().map(Arc::as_ref).serialize(serializer)
}

/// An agent that is connected and waits.
#[derive(Clone, Debug, Serialize)]
pub struct Waiting {
    pub name: String,
    pub build: String,
    /// The reason why it cannot take over.
    #[serde(rename = "hindrance")]
    pub takeover_blocker: Option<String>,
    /// True if it has checked its roots and its token, which older builds do not.
    #[serde(skip)]
    pub is_checked: bool,
}

#[derive(Clone, Debug, Serialize)]
pub struct Handover {
    pub to: String,
    pub build: String,
    /// The end of the handover.
    #[serde(serialize_with = "in_utc")]
    pub at: SystemTime,
    pub failed: Option<String>,
}

impl Pair {
    /// Creates and opens the directories that both agents use, without the lock. Fails if the variable is not the name
    /// of a container.
    fn open(environment: &Environment) -> Result<Self, Problem> {
        let name = environment.get(&ISTIO_AGENT_STANDBY);
        if !is_name(&name) {
            let code = Code::SettingInvalid;
            let subject = ISTIO_AGENT_STANDBY.row.name;
            return Err(Problem::value(code, subject, &name, "the name of the container"));
        }
        let parent = Path::new(DIRECTORY);
        let directory = fs::create_dir_all(parent)
            .and_then(|()| Directory::private(parent, &name, true))
            .and_then(|_of_this_container| Directory::private(parent, PRIVATE, true))
            .map_err(|error| Problem::new(Code::StandbyUnusable, DIRECTORY, error))?;
        Ok(Self {
            name,
            build: String::new(),
            directory: Arc::new(directory),
            lock: Arc::default(),
            state: Arc::default(),
            handover_request: watch::Sender::default(),
        })
    }

    /// Takes the lock for an agent that is about to serve and run this Envoy, and records its arguments and its
    /// environment once it has the lock.
    ///
    /// Returns None if the variable is not set, and a pair without the lock if the agent has to ask the
    /// agent that serves for a handover. Does not return if another agent serves and this container has the same build
    /// as before: this process becomes `pilot-agent standby`.
    pub async fn enter(environment: &Environment, envoy: &Path) -> Result<Option<Self>, BoxError> {
        if environment.get(&ISTIO_AGENT_STANDBY).is_empty() {
            return Ok(None);
        }
        // A stop request is handled once the agent runs, at the latest after Envoy's version has been read.
        lifecycle::hold_signals()?;
        let mut pair = Self::open(environment)?;
        pair.build = build(envoy).await;
        let is_new = pair.has_new_build()?;
        // It is recorded before the handover, so that a build whose handover fails is not tried again.
        pair.record_build(&pair.build)?;
        pair.change(|state| {
            state.serves.clone_from(&pair.name);
            state.build.clone_from(&pair.build);
            state.last_waiting_ended = Some(Instant::now());
        });
        let lock = open_lock()?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => pair.serve_with(lock)?,
            Err(Errno::WOULDBLOCK) if is_new => tracing::info!(
                "container {} has a new build; asking the agent that serves to hand over",
                pair.name
            ),
            Err(Errno::WOULDBLOCK) => {
                tracing::info!("another container of this pod serves; waiting as its standby");
                return Err(exec::standby().into());
            }
            Err(error) => return Err(error.into()),
        }
        Ok(Some(pair))
    }

    /// Returns true if this container ran another build before.
    fn has_new_build(&self) -> io::Result<bool> {
        let former = if_exists(self.directory.read_private(&build_file(&self.name)))?;
        Ok(former.is_some_and(|former| *former != self.build.as_bytes()))
    }

    /// Records the build that this container runs. After an empty one, the next agent of this container takes over.
    fn record_build(&self, build: &str) -> io::Result<()> {
        self.directory.replace_files(&[(&build_file(&self.name), build.as_bytes())], 0o600)
    }

    /// Records that the agent is about to exit and does not need a successor, so that the standby exits as well.
    pub fn record_end(&self) {
        if let Err(error) = record::write(&self.directory, record::END, &End::now()) {
            let problem = Problem::new(Code::StandbyUnusable, "record of the end", error);
            tracing::warn!("{}", problem.consequence("the standby serves again"));
        }
    }

    /// Describes this agent to the other one. Runs `envoy`, the program of its Envoy, to get the hot restart version.
    pub async fn hello(&self, envoy: &Path) -> Hello {
        Hello {
            version: VERSION,
            name: self.name.clone(),
            build: self.build.clone(),
            hot_restart_version: read_output(envoy, "--hot-restart-version").await,
            mounts: mounts().unwrap_or_default(),
            self_check: None,
        }
    }

    /// Returns the directories of a volume with the stored configuration of this container and of the other one, if that
    /// one serves or has served last.
    pub fn volume_directories(&self) -> (String, Option<String>) {
        let former = last_serving().filter(|last| *last != self.name);
        (format!("istio-agent-{}", self.name), former.map(|it| format!("istio-agent-{it}")))
    }

    /// Listens for connections of the other agent, in place of a former agent.
    pub fn listen(&self) -> io::Result<UnixListener> {
        self.directory.remove_file(SOCKET)?;
        UnixListener::bind(socket())
    }

    /// Duplicates the lock for the agent that takes over.
    pub fn duplicate_lock(&self) -> io::Result<OwnedFd> {
        match &*self.lock.lock() {
            Some(lock) => lock.try_clone(),
            None => Err(io::Error::other("no lock")),
        }
    }

    /// Stores the lock, and records the arguments and the environment of this process.
    pub fn serve_with(&self, lock: OwnedFd) -> io::Result<()> {
        *self.lock.lock() = Some(lock);
        tracing::info!("container {} serves", self.name);
        self.directory.remove_file(record::END)?;
        let record = Record::from_process(&Environment::from_process());
        record::write(&self.directory, record::RECORD, &record)
    }

    pub fn has_lock(&self) -> bool {
        self.lock.lock().is_some()
    }

    /// Closes the lock, which the agent that has taken over holds, too.
    pub fn leave_lock(&self) {
        *self.lock.lock() = None;
    }

    pub fn state(&self) -> State {
        self.state.lock().clone()
    }

    pub fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock());
    }

    /// Requests that the other agent takes over. Returns its container, or None if no agent waits.
    pub fn request_handover(&self) -> Option<String> {
        let other = self.state.lock().waits()?.name.clone();
        self.handover_request.send_replace(());
        Some(other)
    }

    /// Returns a receiver that changes with each request from now on.
    pub fn handover_requests(&self) -> watch::Receiver<()> {
        self.handover_request.subscribe()
    }
}

/// Returns the container whose agent serves or has served last.
fn last_serving() -> Option<String> {
    let socket = fs::read_link(Path::new(DIRECTORY).join("XDS")).ok()?;
    Some(socket.to_str()?.strip_prefix("XDS-")?.to_owned())
}

/// Returns true if the agent of this container waits while the other one serves.
pub fn another_serves(environment: &Environment) -> bool {
    let name = environment.get(&ISTIO_AGENT_STANDBY);
    !name.is_empty() && last_serving().is_some_and(|serving| serving != name)
}

/// Names the container that serves, for `pilot-agent version`. Returns None if the pod has no standby.
pub fn version_text(environment: &Environment) -> Option<String> {
    if !environment.is_set(&ISTIO_AGENT_STANDBY) {
        return None;
    }
    let serving = last_serving()?;
    let file = Path::new(DIRECTORY).join(PRIVATE).join(build_file(&serving));
    let build = regular_file::read_text(&file, MAX_BUILD).unwrap_or_default();
    Some(format!("container {serving} serves: {build}"))
}

/// Returns the path of the socket at which the agent that serves accepts the other one.
pub fn socket() -> PathBuf {
    Path::new(DIRECTORY).join(PRIVATE).join(SOCKET)
}

/// Opens the file of the lock, without taking the lock. The lock belongs to the open file, which duplicates of the
/// descriptor in other processes share.
fn open_lock() -> io::Result<OwnedFd> {
    Directory::private(Path::new(DIRECTORY), PRIVATE, false)?.as_fd().try_clone_to_owned()
}

fn build_file(name: &str) -> String {
    format!("build-{name}")
}

/// Returns the mount points of this container, without those below `/dev`, `/proc` and `/sys`.
fn mounts() -> io::Result<BTreeSet<String>> {
    let table = regular_file::read_kernel("/proc/self/mountinfo")?;
    let volumes = table.lines().filter_map(|line| line.split(' ').nth(4)).filter(|mount| {
        let top = mount.split('/').nth(1).unwrap_or_default();
        !["", "dev", "proc", "sys"].contains(&top)
    });
    Ok(volumes.map(str::to_owned).collect())
}

/// Describes the build of a container by the versions of this agent and of Envoy.
async fn build(envoy: &Path) -> String {
    let agent = version::full(&version::istio().unwrap_or_default());
    format!("{agent}, Envoy {}", read_output(envoy, "--version").await)
}

/// Runs Envoy with this argument. Returns in one line what it prints to either output, or why there is nothing. The error
/// of a program that fails does not contain its output, which may differ each time: the same program is the same build.
async fn read_output(envoy: &Path, argument: &str) -> String {
    let name = envoy.display();
    let output = match program::run_with_stderr(envoy, &[argument], "", VERSION_LIMIT).await {
        Ok(output) => output,
        Err(error) => return format!("{name}: {error}"),
    };
    let bytes = [output.stdout, output.stderr].concat();
    let line = String::from_utf8_lossy(&bytes).split_whitespace().collect::<Vec<_>>().join(" ");
    if output.status.success() && !line.is_empty() {
        line.chars().take(MAX_VERSION).collect()
    } else {
        format!("{name}: {}", output.status)
    }
}

/// Returns true for a name that a container can have in Kubernetes (RFC 1123).
fn is_name(name: &str) -> bool {
    (1..64).contains(&name.len())
        && name.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_error_of_a_failing_program_is_the_same_each_time() {
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("script");
        fs::write(&script, "echo $$ >&2; exit 3").unwrap();
        let (shell, script) = (Path::new("/bin/sh"), script.to_str().unwrap());
        assert_eq!(read_output(shell, script).await, "/bin/sh: exit status: 3");
    }

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
