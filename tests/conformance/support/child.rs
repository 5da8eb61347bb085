//! A running program: its log, its memory, its end. It never outlives the test.

use std::ffi::OsString;
use std::fs::File;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Mutex, OnceLock};

use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, prlimit};

use super::eventually;

/// A child process. Dropping it kills it, and prints its log if the test has failed.
pub struct Child {
    process: Mutex<std::process::Child>,
    log: PathBuf,
}

/// The binary that a variable names, or cargo's.
pub fn binary(variable: &str, built: Option<&str>) -> OsString {
    let named = std::env::var_os(variable);
    named
        .or_else(|| built.map(OsString::from))
        .unwrap_or_else(|| panic!("cargo has not built it and {variable} is not set"))
}

/// Whether the binary is this agent. Where it is another, `what` is said to be left out.
pub fn ours_only(what: &str) -> bool {
    static OURS: OnceLock<bool> = OnceLock::new();
    let ours = *OURS.get_or_init(|| {
        let agent = binary("AGENT_BIN", Some(env!("CARGO_BIN_EXE_pilot-agent")));
        let version = Command::new(agent).arg("version").output().unwrap();
        String::from_utf8_lossy(&version.stdout).contains("istio-agent")
    });
    if !ours {
        eprintln!("AGENT_BIN is another agent: not held to {what}.");
    }
    ours
}

impl Child {
    /// Starts a command with both of its outputs in a file.
    pub fn start(mut command: Command, log: PathBuf) -> Self {
        let output = File::create(&log).unwrap();
        let process = command
            .stdin(Stdio::null())
            .stdout(output.try_clone().unwrap())
            .stderr(output)
            .spawn()
            .unwrap();
        Self {
            process: Mutex::new(process),
            log,
        }
    }

    /// All the program has written so far.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap()).into_owned()
    }

    /// Waits for a line with `text` in it.
    pub async fn logs(&self, text: &str) {
        eventually(&format!("{text:?} in the log"), || {
            assert!(self.is_running(), "it ended without saying {text:?}");
            self.log().contains(text)
        })
        .await;
    }

    pub fn is_running(&self) -> bool {
        self.code().is_none()
    }

    fn code(&self) -> Option<i32> {
        let status = self.process.lock().unwrap().try_wait().unwrap();
        status.map(|status| status.code().unwrap_or(-1))
    }

    pub fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    /// Sends a signal, to one that may just have ended.
    pub fn signal(&self, signal: Signal) {
        let _ = kill_process(self.pid(), signal); // Its end is seen elsewhere.
    }

    /// Waits for the end: exit code and log.
    pub async fn ends(self) -> (i32, String) {
        let mut code = None;
        eventually("its end", || {
            code = self.code();
            code.is_some()
        })
        .await;
        (code.unwrap(), self.log())
    }

    /// Resident memory in bytes.
    pub fn memory(&self) -> usize {
        let status = format!("/proc/{}/status", self.pid().as_raw_nonzero());
        let status = std::fs::read_to_string(status).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:"));
        let kib = line.unwrap().split_whitespace().nth(1).unwrap();
        kib.parse::<usize>().unwrap() * 1024
    }

    pub fn threads(&self) -> usize {
        let folder = format!("/proc/{}/task", self.pid().as_raw_nonzero());
        std::fs::read_dir(folder).unwrap().count()
    }

    /// How many files and sockets it has open.
    pub fn descriptors(&self) -> usize {
        let folder = format!("/proc/{}/fd", self.pid().as_raw_nonzero());
        std::fs::read_dir(folder).unwrap().count()
    }

    /// Lets the program have no more than this many files and sockets.
    pub fn limit_descriptors(&self, most: u64) {
        let limit = Rlimit {
            current: Some(most),
            maximum: Some(most),
        };
        prlimit(Some(self.pid()), Resource::Nofile, limit).unwrap();
    }

    pub fn pid(&self) -> Pid {
        let id = self.process.lock().unwrap().id();
        Pid::from_raw(i32::try_from(id).unwrap()).unwrap()
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<_> = log.lines().rev().take(100).collect();
            eprintln!("--- the end of {}", self.log.display());
            for line in lines.into_iter().rev() {
                eprintln!("{}", line.chars().take(400).collect::<String>());
            }
        }
        let process = self.process.get_mut().unwrap();
        let _ = process.kill(); // It may have ended by itself.
        process.wait().unwrap();
    }
}
