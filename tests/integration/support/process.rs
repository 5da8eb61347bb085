//! A child process. Its output is printed if the test fails, its figures are read from `/proc`, and it ends with the
//! test.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Mutex;

use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, prlimit};

use super::until;

/// The number of lines of the output that are printed.
const SHOWN_LINES: usize = 150;

/// A process that is killed when it is dropped. If the test has failed by then, its output is printed.
pub struct Process {
    child: Mutex<Child>,
    log: PathBuf,
}

impl Process {
    /// Starts a process whose standard output and standard error are the log. If the command sets `JOURNAL_STREAM`,
    /// both are a socket that is copied to the log: systemd sets this variable if they are sockets of the journal.
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
        Self { child: Mutex::new(child), log: log.to_owned() }
    }

    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child.lock().unwrap())
    }

    /// Sends a signal. The process may just have ended.
    pub fn signal(&self, signal: Signal) {
        let _ = kill_process(self.pid(), signal); // `end` reports a process that has ended.
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

    /// Waits for the end of the process, and returns its exit code, or -1 after a signal, and its log.
    pub async fn ends(mut self) -> (i32, String) {
        let code = self.end().await.code();
        (code.unwrap_or(-1), self.log())
    }

    /// Returns the output so far.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap()).into_owned()
    }

    /// Waits until the log contains `text`.
    pub async fn logs(&self, text: &str) {
        until(&format!("{text:?} in the log"), || {
            assert!(self.is_running(), "it ended without saying {text:?}");
            self.log().contains(text)
        })
        .await;
    }

    /// Returns a value of `/proc/<pid>/status`, in KiB.
    pub fn memory(&self, name: &str) -> u64 {
        let status = fs::read_to_string(self.proc("status")).unwrap();
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    /// Resets the peak of the resident memory (`VmHWM`) to the current value.
    pub fn reset_peak(&self) {
        fs::write(self.proc("clear_refs"), "5").unwrap();
    }

    pub fn open_files(&self) -> usize {
        fs::read_dir(self.proc("fd")).unwrap().count()
    }

    pub fn threads(&self) -> usize {
        fs::read_dir(self.proc("task")).unwrap().count()
    }

    /// Limits the open files and sockets of the process.
    pub fn limit_open_files(&self, most: u64) {
        let limit = Rlimit { current: Some(most), maximum: Some(most) };
        prlimit(Some(self.pid()), Resource::Nofile, limit).unwrap();
    }

    fn proc(&self, file: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{file}", self.pid().as_raw_nonzero()))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let child = self.child.get_mut().unwrap();
        let _ = child.kill(); // The process may have ended.
        let _ = child.wait();
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<_> = log.lines().collect();
            let shown = &lines[lines.len().saturating_sub(SHOWN_LINES)..];
            eprintln!("--- {} ---\n{}", self.log.display(), shown.join("\n"));
        }
    }
}

/// Returns the first child of a process that is not a zombie.
pub fn child_of(parent: Pid) -> Option<Pid> {
    children_of(parent).into_iter().next()
}

/// Returns the children of a process that are not zombies.
pub fn children_of(parent: Pid) -> Vec<Pid> {
    let processes = fs::read_dir("/proc").unwrap();
    let pids = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter(|pid| parent_of(*pid) == Some(parent)).filter_map(Pid::from_raw).collect()
}

pub fn is_alive(pid: Pid) -> bool {
    parent_of(pid.as_raw_nonzero().get()).is_some()
}

/// Returns the names of the processes whose working directory is this one.
pub fn running_in(directory: &Path) -> Vec<String> {
    let directory = directory.canonicalize().unwrap();
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let in_there = processes.filter(|process| {
        fs::read_link(process.path().join("cwd")).is_ok_and(|found| found == directory)
    });
    let name = |process: fs::DirEntry| fs::read_to_string(process.path().join("comm"));
    in_there.filter_map(|process| name(process).ok()).collect()
}

/// Returns the parent of a process. Returns None if the process has ended, even if it is not reaped yet.
fn parent_of(pid: i32) -> Option<Pid> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may contain parentheses itself.
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace();
    let state = fields.next().filter(|state| *state != "Z");
    state.and_then(|_| Pid::from_raw(fields.next()?.parse().ok()?))
}
