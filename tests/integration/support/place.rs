//! The working directory of an agent, with the files that a pod would have, and the agent's environment.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use local_istiod::LocalIstiod;
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use super::process::Process;
use super::programs::binary;
use super::{free_port, until};

pub const ROOT: &str = "var/run/secrets/istio/root-cert.pem";
pub const TOKEN: &str = "var/run/secrets/tokens/istio-token";

/// A script that the agent runs in place of Envoy.
pub const FAKE_ENVOY: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/tests/integration/support/fake-envoy");

pub struct Place {
    directory: TempDir,
    proxy_config: Map<String, Value>,
    environment: Vec<(String, String)>,
    flags: Vec<String>,
    /// A program that starts the agent, with its arguments.
    starter: Vec<String>,
    status_port: u16,
}

impl Place {
    /// Creates files and settings with which an agent without Envoy reaches `istiod`.
    pub fn of(istiod: &LocalIstiod) -> Self {
        let place = Self {
            directory: tempfile::tempdir().unwrap(),
            proxy_config: Map::new(),
            environment: Vec::new(),
            flags: ["proxy", "sidecar"].map(str::to_owned).into(),
            starter: Vec::new(),
            status_port: free_port(),
        };
        place.write(ROOT, istiod.root_pem());
        place.write(TOKEN, token(istiod));
        // Without a resolver in this file, the doctor queries none of the machine's resolvers.
        place.write("resolv.conf", "");
        let status_port = json!(place.status_port);
        place
            .proxy("statusPort", status_port)
            .proxy("discoveryAddress", json!(istiod.address.to_string()))
            .proxy("terminationDrainDuration", json!("0s"))
            .set("POD_NAME", "bench")
            .set("POD_NAMESPACE", "default")
            .set("SERVICE_ACCOUNT", "bench")
            .set("ISTIO_META_CLUSTER_ID", "Kubernetes")
            .set("ISTIO_AGENT_RESOLV_CONF", "resolv.conf")
            .set("DISABLE_ENVOY", "true")
    }

    /// Creates a place like [`Place::of`], with a script in place of Envoy. The agent serves secrets only with an
    /// Envoy.
    pub fn with_envoy(istiod: &LocalIstiod) -> Self {
        Self::of(istiod).set("DISABLE_ENVOY", "false").proxy("binaryPath", json!(FAKE_ENVOY))
    }

    /// Sets a variable. If a variable is set more than once, the last value counts.
    pub fn set(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.into(), value.into()));
        self
    }

    /// Sets a member of `PROXY_CONFIG`.
    pub fn proxy(mut self, name: &str, value: Value) -> Self {
        self.proxy_config.insert(name.into(), value);
        self
    }

    pub fn flag(mut self, flag: &str) -> Self {
        self.flags.push(flag.into());
        self
    }

    /// Sets the kind of the proxy, which is `sidecar` otherwise.
    pub fn kind(mut self, kind: &str) -> Self {
        self.flags[1] = kind.into();
        self
    }

    /// Sets a command that starts the agent. The agent's path and arguments follow the given words.
    pub fn started_by(mut self, command: &[&str]) -> Self {
        self.starter = command.iter().map(|&word| word.into()).collect();
        self
    }

    pub fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        self.directory.path().join(path)
    }

    pub fn status_port(&self) -> u16 {
        self.status_port
    }

    pub fn xds_socket(&self) -> PathBuf {
        self.path("etc/istio/proxy/XDS")
    }

    pub fn sds_socket(&self) -> PathBuf {
        self.path("var/run/secrets/workload-spiffe-uds/socket")
    }

    /// Writes a file atomically, like the kubelet: a reader never finds a part of it.
    pub fn write(&self, path: &str, content: impl AsRef<[u8]>) {
        let path = self.path(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let draft = path.with_extension("draft");
        std::fs::write(&draft, content).unwrap();
        std::fs::rename(draft, path).unwrap();
    }

    pub fn mode(&self, path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    /// Starts the agent and waits for its discovery socket.
    pub async fn start(&self) -> Process {
        let agent = self.start_only();
        let socket = self.xds_socket();
        let answers = || std::os::unix::net::UnixStream::connect(&socket).is_ok();
        until("a discovery socket", || {
            assert!(agent.is_running(), "the agent ended");
            answers()
        })
        .await;
        agent
    }

    /// Starts the agent without waiting.
    pub fn start_only(&self) -> Process {
        let mut command = self.command();
        command.args(&self.flags).arg("--log_output_level=all:debug");
        Process::start(&mut command, &self.path("log"))
    }

    /// Runs another command of the agent with the same environment, and returns its output.
    pub fn run(&self, words: &[&str]) -> Output {
        let mut command = self.command();
        command.args(words);
        command.output().unwrap()
    }

    /// Returns a command that runs the agent's program, by its starter if there is one, with its environment.
    pub fn command(&self) -> Command {
        let agent = binary("AGENT_BIN", Some(env!("CARGO_BIN_EXE_pilot-agent")));
        let mut words = self.starter.iter().map(Into::into).chain([agent]);
        let mut command = Command::new(words.next().unwrap());
        command
            .args(words)
            .current_dir(self.directory.path())
            .env_clear()
            .env("PATH", "/usr/bin:/bin")
            .env("PROXY_CONFIG", Value::from(self.proxy_config.clone()).to_string())
            .envs(self.environment.iter().cloned());
        command
    }

    /// Starts an agent that ends by itself, and returns its exit code and its log.
    pub async fn ends(&self) -> (i32, String) {
        self.start_only().ends().await
    }
}

/// Returns a token that the control plane accepts.
pub fn token(istiod: &LocalIstiod) -> String {
    istiod.mint_token("default", "bench", Duration::from_secs(3600)).unwrap()
}
