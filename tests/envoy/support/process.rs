//! A child process: its output kept for failures, its figures read from `/proc`, its end certain.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use rustix::process::{Pid, Signal};

use super::eventually;

/// How much of an output is shown.
const SHOWN_LINES: usize = 150;

/// Killed when dropped; its output is printed when that is because of a failure.
pub struct Process {
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Both outputs are the log, or sockets that are copied to it if a variable says so that systemd
    /// sets where they are the journal's.
    pub fn start(command: &mut Command, log: &Path) -> Self {
        let mut file = fs::File::create(log).unwrap();
        let mut variables = command.get_envs();
        let output: OwnedFd = if variables.any(|(name, _)| name == "JOURNAL_STREAM") {
            let (mut journal, output) = UnixStream::pair().unwrap();
            std::thread::spawn(move || io::copy(&mut journal, &mut file).unwrap());
            output.into()
        } else {
            file.into()
        };
        let child = command
            .stdin(Stdio::null())
            .stdout(output.try_clone().unwrap())
            .stderr(output)
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
        Self {
            child,
            log: log.to_owned(),
        }
    }

    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    pub fn signal(&self, signal: Signal) {
        rustix::process::kill_process(self.pid(), signal).unwrap();
    }

    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    pub async fn end(&mut self) -> ExitStatus {
        let child = &mut self.child;
        eventually("the end of a process", async || child.try_wait().unwrap()).await
    }

    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }

    /// A line of `/proc/<pid>/status`, in KiB.
    pub fn memory(&self, name: &str) -> u64 {
        let status = fs::read_to_string(self.proc("status")).unwrap();
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    /// Starts the high-water mark again at what is in use now.
    pub fn reset_peak(&self) {
        fs::write(self.proc("clear_refs"), "5").unwrap();
    }

    pub fn open_files(&self) -> usize {
        fs::read_dir(self.proc("fd")).unwrap().count()
    }

    pub fn threads(&self) -> usize {
        fs::read_dir(self.proc("task")).unwrap().count()
    }

    fn proc(&self, file: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{file}", self.child.id()))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill(); // It may have ended.
        let _ = self.child.wait();
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<_> = log.lines().collect();
            let shown = &lines[lines.len().saturating_sub(SHOWN_LINES)..];
            eprintln!("--- {} ---\n{}", self.log.display(), shown.join("\n"));
        }
    }
}

/// The only child of a process that is not a zombie.
pub fn child_of(parent: Pid) -> Option<Pid> {
    children_of(parent).into_iter().next()
}

/// The children of a process that are not zombies.
pub fn children_of(parent: Pid) -> Vec<Pid> {
    let processes = fs::read_dir("/proc").unwrap();
    let pids = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter(|pid| parent_of(*pid) == Some(parent))
        .filter_map(Pid::from_raw)
        .collect()
}

pub fn is_alive(pid: Pid) -> bool {
    parent_of(pid.as_raw_nonzero().get()).is_some()
}

/// The processes that run in a directory.
pub fn running_in(directory: &Path) -> Vec<String> {
    let directory = directory.canonicalize().unwrap();
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let in_there = processes.filter(|process| {
        fs::read_link(process.path().join("cwd")).is_ok_and(|found| found == directory)
    });
    let name = |process: fs::DirEntry| fs::read_to_string(process.path().join("comm"));
    in_there.filter_map(|process| name(process).ok()).collect()
}

/// None of a process that has ended, reaped or not.
fn parent_of(pid: i32) -> Option<Pid> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in brackets may hold brackets itself.
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace();
    let state = fields.next().filter(|state| *state != "Z");
    state.and_then(|_| Pid::from_raw(fields.next()?.parse().ok()?))
}
