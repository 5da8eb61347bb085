//! The agent with its Envoy in a directory of its own, and an Envoy without an agent.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use http::Method;
use istio_agent::envoy::admin::Admin;
use rustix::process::{Pid, Signal};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::control_plane::{ACCOUNT, ControlPlane, NAMESPACE};
use super::process::{Process, child_of};
use super::{eventually, free_port, local};

const TOKEN: &str = "var/run/secrets/tokens/istio-token";
const ROOT: &str = "var/run/secrets/istio/root-cert.pem";

/// What may differ from one agent to the next.
#[derive(Clone, Copy, Default)]
pub struct Settings<'a> {
    /// None is an agent that starts none.
    pub envoy: Option<&'a Path>,
    pub environment: &'a [(&'a str, &'a str)],
}

pub struct Pod {
    pub agent: Process,
    pub envoy: Admin,
    pub status_port: u16,
    directory: TempDir,
}

impl Pod {
    pub fn start(settings: Settings<'_>, control_plane: &ControlPlane) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (admin_port, status_port) = (free_port(), free_port());
        write(directory.path(), ROOT, &control_plane.istiod.root_pem());
        write(directory.path(), TOKEN, &control_plane.token());
        let proxy_config = json!({
            "discoveryAddress": control_plane.address(),
            "binaryPath": settings.envoy.unwrap_or(Path::new("none")),
            "proxyAdminPort": admin_port,
            "statusPort": status_port,
            "terminationDrainDuration": "1s",
            "concurrency": 1,
        });
        let mut command = Command::new(env!("CARGO_BIN_EXE_pilot-agent"));
        command
            .args([
                "proxy",
                "sidecar",
                "--log_output_level=default:info,xdsproxy:debug",
            ])
            .current_dir(directory.path())
            .env_clear()
            .envs(base_environment())
            .env("DISABLE_ENVOY", settings.envoy.is_none().to_string())
            .env("PROXY_CONFIG", proxy_config.to_string())
            .envs(settings.environment.iter().copied());
        Self {
            agent: Process::start(&mut command, &directory.path().join("agent.log")),
            envoy: admin(admin_port),
            status_port,
            directory,
        }
    }

    /// Starts one and waits until Envoy serves.
    pub async fn serving(settings: Settings<'_>, control_plane: &ControlPlane) -> Self {
        let pod = Self::start(settings, control_plane);
        ready(&pod.envoy).await;
        pod
    }

    pub fn path(&self, path: &str) -> PathBuf {
        self.directory.path().join(path)
    }

    /// As Kubernetes does it: at once, and not within the old file.
    pub fn replace_root(&self, pem: &str) {
        self.replace(ROOT, pem);
    }

    pub fn replace_token(&self, token: &str) {
        self.replace(TOKEN, token);
    }

    pub fn envoy_pid(&self) -> Option<Pid> {
        child_of(self.agent.pid())
    }

    /// The bootstrap the agent has given its Envoy.
    pub fn bootstrap(&self) -> Value {
        let text = fs::read_to_string(self.path("etc/istio/proxy/envoy-rev.json")).unwrap();
        serde_json::from_str(&text).unwrap()
    }

    fn replace(&self, path: &str, content: &str) {
        write(self.directory.path(), "new", content);
        fs::rename(self.path("new"), self.path(path)).unwrap();
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        // An agent that is killed has no time to end its Envoy.
        if let Some(envoy) = self.envoy_pid() {
            let _ = rustix::process::kill_process(envoy, Signal::KILL); // It may just have ended.
        }
    }
}

/// An Envoy nobody looks after.
pub struct BareEnvoy {
    pub admin: Admin,
    _process: Process,
    _directory: TempDir,
}

impl BareEnvoy {
    /// Starts it on a bootstrap, whose admin port is replaced by a free one, and waits until it
    /// serves.
    pub async fn serving(binary: &Path, mut bootstrap: Value) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let port = free_port();
        bootstrap["admin"]["address"] =
            json!({ "socket_address": { "address": "127.0.0.1", "port_value": port } });
        write(directory.path(), "bootstrap.json", &bootstrap.to_string());
        let mut command = Command::new(binary);
        command
            .args([
                "-c",
                "bootstrap.json",
                "-l",
                "warning",
                "--concurrency",
                "1",
            ])
            .arg("--disable-hot-restart")
            .current_dir(directory.path());
        let process = Process::start(&mut command, &directory.path().join("envoy.log"));
        let admin = admin(port);
        ready(&admin).await;
        Self {
            admin,
            _process: process,
            _directory: directory,
        }
    }
}

/// What Envoy says under a path of its admin port, if it answers with 200.
pub async fn ask(envoy: &Admin, path: &str) -> Option<String> {
    let answer = envoy.request(Method::GET, path).await.ok()?;
    answer
        .status
        .is_success()
        .then(|| String::from_utf8(answer.body.to_vec()).unwrap())
}

pub async fn ready(envoy: &Admin) {
    eventually("Envoy serves", async || ask(envoy, "/ready").await).await;
}

fn admin(port: u16) -> Admin {
    Admin::new(local(port).ip(), port, Duration::from_secs(5))
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

fn write(directory: &Path, path: &str, content: &str) {
    let path = directory.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, content).unwrap();
}
