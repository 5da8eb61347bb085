//! A child process: its output kept for failures, its figures read from `/proc`, its end certain.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Mutex;

use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, prlimit};

use super::until;

/// How much of an output is shown.
const SHOWN_LINES: usize = 150;

/// Killed when dropped; its output is printed when that is because of a failure.
pub struct Process {
    child: Mutex<Child>,
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
            child: Mutex::new(child),
            log: log.to_owned(),
        }
    }

    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child.lock().unwrap())
    }

    /// Sends a signal, to one that may just have ended.
    pub fn signal(&self, signal: Signal) {
        let _ = kill_process(self.pid(), signal); // Its end is seen elsewhere.
    }

    pub fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    pub fn is_running(&self) -> bool {
        self.status().is_none()
    }

    fn status(&self) -> Option<ExitStatus> {
        self.child.lock().unwrap().try_wait().unwrap()
    }

    pub async fn end(&mut self) -> ExitStatus {
        let mut status = None;
        until("the end of a process", || {
            status = self.status();
            status.is_some()
        })
        .await;
        status.unwrap()
    }

    /// Waits for the end: exit code and log.
    pub async fn ends(mut self) -> (i32, String) {
        let code = self.end().await.code();
        (code.unwrap_or(-1), self.log())
    }

    /// All it has written so far.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap()).into_owned()
    }

    /// Waits for a line with `text` in it.
    pub async fn logs(&self, text: &str) {
        until(&format!("{text:?} in the log"), || {
            assert!(self.is_running(), "it ended without saying {text:?}");
            self.log().contains(text)
        })
        .await;
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

    /// Lets it have no more than this many files and sockets.
    pub fn limit_open_files(&self, most: u64) {
        let limit = Rlimit {
            current: Some(most),
            maximum: Some(most),
        };
        prlimit(Some(self.pid()), Resource::Nofile, limit).unwrap();
    }

    fn proc(&self, file: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{file}", self.pid().as_raw_nonzero()))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let child = self.child.get_mut().unwrap();
        let _ = child.kill(); // It may have ended.
        let _ = child.wait();
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
