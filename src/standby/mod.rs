//! Two containers of one pod run the agent: one serves, the other waits and takes over.
//!
//! Both mount [`DIRECTORY`]. The agent that holds a lock on its private subdirectory serves: `pilot-agent proxy`
//! takes the lock before it does anything else, and becomes `pilot-agent standby` if another process has it. The
//! kernel releases the lock when the process ends, however it ends. `pilot-agent standby` waits for the lock, and
//! then becomes `pilot-agent proxy` with the arguments and the environment that the former holder has [recorded].
//!
//! [recorded]: record::Record

mod exec;
pub mod record;
pub mod wait;

use std::io;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::config::environment::{Environment, ISTIO_AGENT_STANDBY};
use crate::directory::Directory;
use crate::exit_code::ExitCode;
use crate::lifecycle::BoxError;
use crate::problem::{Problem, codes};
use record::{End, Record};

/// The directory in memory that both containers mount.
pub const DIRECTORY: &str = "./etc/istio/proxy";
/// Its subdirectory, which only the agents' user has access to.
const PRIVATE: &str = "istio-agent-standby";

/// What both agents of the pod read and write. Clones share the lock.
#[derive(Clone, Debug)]
pub struct Standby {
    /// The name of this container.
    name: String,
    directory: Arc<Directory>,
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
            directory: Arc::new(directory),
        }))
    }

    /// Takes the lock of an agent that is about to serve, and records what this process was started with.
    ///
    /// Returns None if the variable is not set. Does not return if another agent serves: this process becomes
    /// `pilot-agent standby`.
    pub fn enter(environment: &Environment) -> Result<Option<Self>, BoxError> {
        let Some(standby) = Self::open(environment)? else {
            return Ok(None);
        };
        if !standby.try_lock()? {
            tracing::info!("another container of this pod serves; waiting as its standby");
            return Err(exec::standby().into());
        }
        standby.directory.remove_file(record::END)?;
        Record::of_process(environment).write(&standby.directory)?;
        tracing::info!("container {} serves, with its standby", standby.name);
        Ok(Some(standby))
    }

    fn unlock(&self) -> io::Result<()> {
        Ok(flock(&*self.directory, FlockOperation::Unlock)?)
    }

    fn try_lock(&self) -> io::Result<bool> {
        match flock(&*self.directory, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(true),
            Err(Errno::WOULDBLOCK) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits for the lock. Blocks.
    fn lock(&self) -> io::Result<()> {
        Ok(flock(&*self.directory, FlockOperation::LockExclusive)?)
    }

    /// Records that the agent is about to exit because it was told to, so that the standby exits as well.
    pub fn record_end(&self, code: ExitCode) {
        if let Err(error) = End::now(code).write(&self.directory) {
            let problem = Problem::new(codes::STANDBY_UNUSABLE, "record of the end", error);
            tracing::warn!("{}", problem.consequence("the standby serves again"));
        }
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
