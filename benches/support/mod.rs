//! The code that the benchmarks share: child processes and their figures, a control plane that sends as
//! fast as its peer reads, and an Envoy that only counts bytes.
#![allow(dead_code, unreachable_pub, unused_imports, reason = "each bench uses its part")]

pub mod baseline;
pub mod dnsperf;
pub mod last_known_good;
pub mod names;
pub mod peer;
pub mod table;

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hyper_util::rt::TokioIo;
pub use peer::block_on;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_setaffinity};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tonic::transport::{Channel, Endpoint};

/// A measured process, which is killed when dropped.
pub struct Process {
    child: Child,
    /// The last known CPU time of each thread in nanoseconds. The kernel forgets threads that end, but
    /// the sum must include them.
    used: Mutex<HashMap<OsString, u64>>,
}

impl Process {
    pub fn start(command: &mut Command) -> Self {
        let child = command
            .stdin(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
        let used = Mutex::default();
        Self { child, used }
    }

    /// Starts a process like [`Process::start`], with pipes to its standard input and from its standard
    /// output.
    pub fn with_pipes(command: &mut Command) -> (Self, ChildStdin, ChildStdout) {
        let pipes = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child =
            pipes.spawn().unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
        let input = child.stdin.take().expect("a pipe");
        let output = child.stdout.take().expect("a pipe");
        let used = Mutex::default();
        (Self { child, used }, input, output)
    }

    /// Starts the agent without Envoy in `directory`. The agent relays to the istiod at `address`.
    pub fn relay(directory: &Path, address: &str, root_pem: &str) -> Self {
        Self::relay_with(directory, address, root_pem, &[])
    }

    /// Starts the agent like [`Process::relay`], with more environment variables.
    pub fn relay_with(
        directory: &Path,
        address: &str,
        root_pem: &str,
        more: &[(&str, String)],
    ) -> Self {
        let mut command = agent(directory, root_pem);
        // Port 0 turns the status port off: two agents at the same time cannot share it, and a relay
        // does not need it.
        let annotation = "status.sidecar.istio.io/port=\"0\"\n";
        write(directory, "etc/istio/pod/annotations", annotation);
        command.envs(more.iter().map(|(name, value)| (name, value)));
        command
            .env("DISABLE_ENVOY", "true")
            .env("CA_ADDR", "127.0.0.1:9")
            .env("PROXY_CONFIG", format!("{{discoveryAddress: '{address}'}}"));
        Self::start(&mut command)
    }

    /// Starts the agent of a sidecar whose Envoy does nothing.
    pub fn sidecar(directory: &Path, address: &str, root_pem: &str) -> Self {
        Self::sidecar_with(directory, address, root_pem, "")
    }

    /// Starts the agent like [`Process::sidecar`], with more members of ProxyConfig.
    pub fn sidecar_with(directory: &Path, address: &str, root_pem: &str, more: &str) -> Self {
        use std::os::unix::fs::PermissionsExt;
        write(directory, "envoy", "#!/bin/sh\nexec sleep 1000\n");
        let envoy = directory.join("envoy");
        fs::set_permissions(&envoy, fs::Permissions::from_mode(0o755)).expect("writable");
        let envoy = envoy.display();
        let mut command = agent(directory, root_pem);
        command.env(
            "PROXY_CONFIG",
            format!("{{discoveryAddress: '{address}', binaryPath: '{envoy}', {more}}}"),
        );
        Self::start(&mut command)
    }

    /// Returns the CPU time of all threads so far. Of a thread that has ended, the last known time is
    /// included.
    pub fn cpu(&self) -> Duration {
        let mut used = self.used.lock().expect("not poisoned");
        for task in fs::read_dir(self.proc("task")).expect("the process runs") {
            let task = task.expect("a thread");
            // The thread may have ended.
            let stat = fs::read_to_string(task.path().join("schedstat"));
            let time = stat.ok().and_then(|stat| stat.split(' ').next()?.parse().ok());
            if let Some(time) = time {
                used.insert(task.file_name(), time);
            }
        }
        Duration::from_nanos(used.values().sum())
    }

    /// Pins all threads of the process, and the threads that they start, to a processor. None allows any
    /// processor.
    pub fn pin(&self, to: Option<usize>) {
        pin_all(self.child.id(), to);
    }

    /// Returns the value of a line of `/proc/<pid>/status` in KiB, for example of `VmRSS` or `VmHWM`.
    pub fn memory(&self, name: &str) -> u64 {
        self.status(name)
    }

    /// Returns the number of times that a thread gave up the processor to wait.
    pub fn wake_ups(&self) -> u64 {
        let tasks = fs::read_dir(self.proc("task")).expect("the process runs");
        let statuses = tasks.map(|task| task.expect("a thread").path().join("status"));
        statuses.map(|status| number(&status, "voluntary_ctxt_switches")).sum()
    }

    /// Returns the number on a line of `/proc/<pid>/status`.
    pub fn status(&self, name: &str) -> u64 {
        number(&self.proc("status"), name)
    }

    /// Returns the value of a line of `/proc/<pid>/smaps_rollup` in KiB, for example of `Rss`, `Pss` or
    /// `Anonymous`.
    pub fn memory_map(&self, name: &str) -> u64 {
        number(&self.proc("smaps_rollup"), name)
    }

    /// Returns the number of bytes that the process has written to files and sockets.
    pub fn written(&self) -> u64 {
        number(&self.proc("io"), "wchar")
    }

    /// Resets the peak of resident memory to the memory that is in use now.
    pub fn reset_peak(&self) {
        fs::write(self.proc("clear_refs"), "5").expect("clear_refs is writable");
    }

    fn proc(&self, file: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{file}", self.child.id()))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill(); // The process may have ended.
        let _ = self.child.wait();
    }
}

/// Returns the number on the first line of a file that begins with `name`.
pub fn number(file: &Path, name: &str) -> u64 {
    let text = fs::read_to_string(file).expect("the process runs");
    let line = text.lines().find(|line| line.starts_with(name));
    let number = line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok());
    number.unwrap_or_else(|| panic!("no number {name} in {}", file.display()))
}

/// Returns the agent's command in `directory`, with the root certificate that the agent trusts. The
/// environment variable `PILOT_AGENT` names another binary.
pub fn agent(directory: &Path, root_pem: &str) -> Command {
    write(directory, "var/run/secrets/istio/root-cert.pem", root_pem);
    let binary = std::env::var_os("PILOT_AGENT");
    let binary = binary.unwrap_or_else(|| env!("CARGO_BIN_EXE_pilot-agent").into());
    let mut command = Command::new(binary);
    command
        .args(["proxy", "sidecar", "--log_output_level=default:error"])
        .current_dir(directory)
        .env_clear()
        .envs(["POD_NAME", "SERVICE_ACCOUNT"].map(|name| (name, "bench")))
        .env("POD_NAMESPACE", "default")
        .env("INSTANCE_IP", "127.0.0.1")
        .env("CLOUD_PLATFORM", "none")
        .stdout(Stdio::null());
    command
}

/// Writes a file and its directories below `directory`.
pub fn write(directory: &Path, path: &str, content: &str) {
    let path = directory.join(path);
    fs::create_dir_all(path.parent().expect("a file has a directory")).expect("writable");
    fs::write(path, content).expect("writable");
}

/// Pins all threads of a process to a processor. None allows any processor.
pub fn pin_all(process: u32, to: Option<usize>) {
    for thread in fs::read_dir(format!("/proc/{process}/task")).expect("the process runs") {
        let name = thread.expect("a thread").file_name();
        let id = name.to_str().and_then(|name| name.parse().ok());
        pin(id.and_then(Pid::from_raw).expect("a thread's number"), to);
    }
}

/// Pins a thread, and the threads that it starts later, to a processor. None allows any processor.
pub fn pin(thread: Pid, to: Option<usize>) {
    let mut set = CpuSet::new();
    for processor in to.map_or(0..CpuSet::MAX_CPU, |to| to..to + 1) {
        set.set(processor);
    }
    // The call fails on a machine with one processor, where no choice exists.
    let _ = sched_setaffinity(Some(thread), &set);
}

/// Opens a gRPC channel over a Unix socket.
pub async fn channel(socket: &Path) -> Channel {
    let socket = socket.to_owned();
    let connector = tower::service_fn(move |_: http::Uri| {
        let socket = socket.clone();
        async move { tokio::net::UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    let endpoint = Endpoint::from_static("http://agent");
    endpoint.connect_with_connector(connector).await.expect("a connection")
}

/// Serves the statistics of an Envoy on its admin port. The Envoy becomes live once `is_live` is set.
pub async fn act_as_admin(listener: TcpListener, is_live: Arc<AtomicBool>) {
    const LIVE: &str = "cluster_manager.cds.update_success: 1\n\
                        listener_manager.lds.update_success: 1\n\
                        server.state: 0\nlistener_manager.workers_started: 1\n";
    loop {
        let (mut stream, _) = listener.accept().await.expect("a connection");
        let mut request = [0; 4096];
        let _ = stream.read(&mut request).await; // All requests get the same response.
        let body = if is_live.load(Ordering::Relaxed) { LIVE } else { "" };
        let length = body.len();
        let answer = format!(
            "HTTP/1.1 200 OK\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
        );
        let _ = stream.write_all(answer.as_bytes()).await; // The client may have closed it.
    }
}

/// Returns the middle value.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Waits until a process accepts connections on a socket file.
pub async fn connect(path: &Path) -> tokio::net::UnixStream {
    for _ in 0..50_000 {
        if let Ok(stream) = tokio::net::UnixStream::connect(path).await {
            return stream;
        }
        tokio::time::sleep(Duration::from_micros(100)).await;
    }
    panic!("no process serves {} after 5 s", path.display());
}
