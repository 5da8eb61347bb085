//! An agent with its Envoy in a temporary directory, and an Envoy without an agent.

use std::fs;
use std::net::Ipv6Addr;
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use http::Method;
use istio_agent::envoy::admin::{Address, Admin};
use rustix::process::{Pid, Signal};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::control_plane::{ACCOUNT, ControlPlane, NAMESPACE};
use super::place::{ROOT, TOKEN};
use super::process::{Process, child_of, children_of, is_alive};
use super::{eventually, free_port, local, namespace, until};

const PROXY_CONFIG: &str = "PROXY_CONFIG";

const ADMIN_LIMIT: Duration = Duration::from_secs(5);
/// The socket of Envoy's admin interface, below the pod's directory.
pub const ADMIN_SOCKET: &str = "etc/istio/proxy/admin/admin.sock";

/// The settings that a test chooses for an agent.
#[derive(Clone, Copy, Default)]
pub struct Settings<'a> {
    /// The path of Envoy; with None the agent starts no Envoy.
    pub envoy: Option<&'a Path>,
    pub environment: &'a [(&'a str, &'a str)],
}

impl Settings<'_> {
    /// Returns true if the pod's address is an IPv6 address. Envoy's admin address is one, too, then.
    fn is_v6(&self) -> bool {
        let is_v6 = |(name, value): &(&str, &str)| *name == "INSTANCE_IP" && value.contains(':');
        self.environment.iter().any(is_v6)
    }

    fn has_admin_socket(&self) -> bool {
        let is_setting = |it: &(&str, &str)| {
            [("ISTIO_AGENT_ADMIN_SOCKET", "true"), ("ISTIO_ENVOY_ADMIN_TRANSPORT", "UDS")]
                .contains(it)
        };
        self.environment.iter().any(is_setting)
    }
}

pub struct Pod {
    pub agent: Process,
    pub envoy: Admin,
    /// `proxyAdminPort`. Envoy does not listen on it if it has a socket.
    pub admin_port: u16,
    pub status_port: u16,
    directory: TempDir,
    proxy_config: String,
    /// The command that started the agent.
    started: Command,
}

impl Pod {
    pub fn start(settings: Settings<'_>, control_plane: &ControlPlane) -> Self {
        Self::start_as("sidecar", settings, control_plane)
    }

    /// Starts a pod whose proxy has this role, such as `router`.
    pub fn start_as(role: &str, settings: Settings<'_>, control_plane: &ControlPlane) -> Self {
        Self::draining_for(role, "1s", settings, control_plane)
    }

    /// Starts a pod whose Envoy drains for this time, such as `1s`.
    pub fn draining_for(
        role: &str,
        drain: &str,
        settings: Settings<'_>,
        control_plane: &ControlPlane,
    ) -> Self {
        Self::start_of(None, role, drain, settings, control_plane)
    }

    /// Starts a pod, as another user and group if they are given. Another user needs the namespaces of [`namespace`].
    fn start_of(
        user: Option<(u32, u32)>,
        role: &str,
        drain: &str,
        settings: Settings<'_>,
        control_plane: &ControlPlane,
    ) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (admin_port, status_port) = (free_port(), free_port());
        write(directory.path(), ROOT, &control_plane.istiod.root_pem());
        write(directory.path(), TOKEN, &control_plane.token());
        let mut proxy_config = json!({
            "discoveryAddress": control_plane.address(),
            "binaryPath": settings.envoy.unwrap_or(Path::new("none")),
            "proxyAdminPort": admin_port,
            "statusPort": status_port,
            "terminationDrainDuration": drain,
            "concurrency": 1,
        });
        // The members of the test's own PROXY_CONFIG replace those above.
        for (_, text) in settings.environment.iter().filter(|(name, _)| *name == PROXY_CONFIG) {
            let more: serde_json::Map<String, Value> = serde_json::from_str(text).unwrap();
            proxy_config.as_object_mut().unwrap().extend(more);
        }
        let proxy_config = proxy_config.to_string();
        let program = Path::new(env!("CARGO_BIN_EXE_pilot-agent"));
        let mut command = match user {
            Some((user, group)) => {
                chown_all(directory.path(), user);
                let mut command = Command::new(namespace::reachable(program));
                command.uid(user).gid(group);
                command
            }
            None => Command::new(program),
        };
        command
            .args(["proxy", role, "--log_output_level=default:info,xdsproxy:debug"])
            .current_dir(directory.path())
            .env_clear()
            .envs(base_environment())
            .env("DISABLE_ENVOY", settings.envoy.is_none().to_string())
            .envs(settings.environment.iter().copied())
            .env(PROXY_CONFIG, &proxy_config);
        Self {
            agent: Process::start(&mut command, &directory.path().join("agent.log")),
            envoy: if settings.has_admin_socket() {
                let path = directory.path().join(ADMIN_SOCKET);
                Admin { address: Address::Socket(path.into()), limit: ADMIN_LIMIT }
            } else if settings.is_v6() {
                Admin::new(Ipv6Addr::LOCALHOST.into(), admin_port, ADMIN_LIMIT)
            } else {
                admin(admin_port)
            },
            admin_port,
            status_port,
            directory,
            proxy_config,
            started: command,
        }
    }

    /// Kills agent and Envoy with SIGKILL, like the kernel when memory is short, calls `while_down`, and starts the
    /// agent again.
    pub async fn kill_and_restart(&mut self, while_down: impl FnOnce()) {
        self.kill().await;
        while_down();
        self.restart(&[]);
    }

    /// Kills the agent with SIGKILL, and waits until its Envoys have ended, too.
    pub async fn kill(&mut self) {
        let mut envoys = children_of(self.agent.pid());
        envoys.extend(self.envoy_pid());
        self.agent.signal(Signal::KILL);
        self.agent.end().await;
        until("the end of Envoy", || !envoys.iter().any(|envoy| is_alive(*envoy))).await;
    }

    /// Starts an agent that has ended again, with these additional variables.
    pub fn restart(&mut self, environment: &[(&str, &str)]) {
        self.started.envs(environment.iter().copied());
        let log = self.path("agent.log");
        self.agent = Process::start(&mut self.started, &log);
    }

    pub fn proxy_config(&self) -> &str {
        &self.proxy_config
    }

    /// Returns a command of the agent's program in the agent's directory, with `PROXY_CONFIG` and none of the agent's
    /// other variables. The caller adds the arguments.
    pub fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pilot-agent"));
        command
            .current_dir(self.directory.path())
            .env_clear()
            .env("PROXY_CONFIG", &self.proxy_config);
        command
    }

    /// Returns a command of the agent's program with the agent's environment. The caller adds the arguments.
    pub fn command_as_agent(&self) -> Command {
        let mut command = self.command();
        let variables = self.started.get_envs();
        command.envs(variables.filter_map(|(name, value)| Some((name, value?))));
        command
    }

    /// Runs a command of the agent's program, and asserts that it succeeds.
    pub async fn run(&self, arguments: &[&str]) {
        let mut command = self.command();
        command.args(arguments);
        let mut process = Process::start(&mut command, &self.path("command.log"));
        let status = process.end().await;
        assert!(status.success(), "{arguments:?}: {status}: {}", process.log());
    }

    /// Starts a pod and waits until Envoy is ready.
    pub async fn serving(settings: Settings<'_>, control_plane: &ControlPlane) -> Self {
        Self::serving_as(None, settings, control_plane).await
    }

    pub async fn serving_as(
        user: Option<(u32, u32)>,
        settings: Settings<'_>,
        control_plane: &ControlPlane,
    ) -> Self {
        let pod = Self::start_of(user, "sidecar", "1s", settings, control_plane);
        pod.serves().await;
        pod
    }

    pub async fn serves(&self) {
        ready(&self.envoy).await;
    }

    pub fn path(&self, path: &str) -> PathBuf {
        self.directory.path().join(path)
    }

    /// Replaces the root certificate atomically by a new file, like Kubernetes.
    pub fn replace_root(&self, pem: &str) {
        self.replace(ROOT, pem);
    }

    pub fn replace_token(&self, token: &str) {
        self.replace(TOKEN, token);
    }

    /// Returns the body of a response of the status port, or None without a response of status 2xx.
    pub async fn status(&self, method: Method, path: &str) -> Option<String> {
        // The client for Envoy's admin port fits the status port, too: both are HTTP on loopback.
        let answer = admin(self.status_port).request(method, path).await.ok()?;
        answer.status().is_success().then(|| String::from_utf8(answer.body().to_vec()).unwrap())
    }

    pub fn envoy_pid(&self) -> Option<Pid> {
        child_of(self.agent.pid())
    }

    /// Returns the bootstrap that the agent has generated for its Envoy.
    pub fn bootstrap(&self) -> Value {
        let text = fs::read_to_string(self.path("etc/istio/proxy/envoy-rev.json")).unwrap();
        serde_json::from_str(&text).unwrap()
    }

    pub fn replace(&self, path: &str, content: &str) {
        write(self.directory.path(), "new", content);
        fs::rename(self.path("new"), self.path(path)).unwrap();
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        // An agent that is killed cannot end its Envoy.
        for envoy in children_of(self.agent.pid()) {
            let _ = rustix::process::kill_process(envoy, Signal::KILL); // Envoy may have ended.
        }
    }
}

/// An Envoy without an agent.
pub struct BareEnvoy {
    pub admin: Admin,
    pub admin_port: u16,
    _process: Process,
    _directory: TempDir,
}

impl BareEnvoy {
    /// Starts Envoy with a bootstrap, in which it replaces the admin port by a free one, and waits until Envoy is
    /// ready.
    pub async fn serving(binary: &Path, mut bootstrap: Value) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let port = free_port();
        bootstrap["admin"]["address"] =
            json!({ "socket_address": { "address": "127.0.0.1", "port_value": port } });
        write(directory.path(), "bootstrap.json", &bootstrap.to_string());
        let mut command = Command::new(binary);
        command
            .args(["-c", "bootstrap.json", "-l", "warning", "--concurrency", "1"])
            .arg("--disable-hot-restart")
            .current_dir(directory.path());
        let process = Process::start(&mut command, &directory.path().join("envoy.log"));
        let admin = admin(port);
        ready(&admin).await;
        Self { admin, admin_port: port, _process: process, _directory: directory }
    }
}

/// Returns the body of a response of Envoy's admin port, or None without a response of status 2xx.
pub async fn ask(envoy: &Admin, path: &str) -> Option<String> {
    let answer = envoy.request(Method::GET, path).await.ok()?;
    answer.status().is_success().then(|| String::from_utf8(answer.body().to_vec()).unwrap())
}

pub async fn ready(envoy: &Admin) {
    eventually("Envoy serves", async || ask(envoy, "/ready").await).await;
}

pub fn admin(port: u16) -> Admin {
    Admin::new(local(port).ip(), port, ADMIN_LIMIT)
}

fn base_environment() -> [(&'static str, String); 8] {
    [
        ("POD_NAME", "cart-1".to_owned()),
        ("POD_NAMESPACE", NAMESPACE.to_owned()),
        ("SERVICE_ACCOUNT", ACCOUNT.to_owned()),
        ("INSTANCE_IP", "127.0.0.1".to_owned()),
        ("ISTIO_META_CLUSTER_ID", "Kubernetes".to_owned()),
        ("SECRET_GRACE_PERIOD_RATIO_JITTER", "0".to_owned()),
        ("ENVOY_STATUS_PORT", free_port().to_string()),
        ("ENVOY_PROMETHEUS_PORT", free_port().to_string()),
    ]
}

/// Changes the owner and group of a directory and its content to a user.
fn chown_all(directory: &Path, user: u32) {
    chown(directory, Some(user), Some(user)).unwrap();
    for entry in fs::read_dir(directory).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_dir() {
            chown_all(&entry.path(), user)
        } else {
            chown(entry.path(), Some(user), Some(user)).unwrap()
        }
    }
}

fn write(directory: &Path, path: &str, content: &str) {
    let path = directory.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, content).unwrap();
}
