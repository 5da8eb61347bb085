//! A real SPIRE: its server, and its agent, which serves secrets on the SDS socket of a workload.
//!
//! The root certificate of the mesh signs SPIRE's intermediate CA. SPIRE's agent is attested by a join token and the
//! workload by its user, because neither needs a cluster.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use local_istiod::Keys;
use rustix::process::getuid;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::free_port;
use super::process::Process;
use super::programs::variable;

const TRUST_DOMAIN: &str = "cluster.local";

/// The identity of the SPIRE agent, which may issue the workload's certificate.
const NODE: &str = "spiffe://cluster.local/node";

/// The identity of the workload, in the form that istiod uses.
pub const IDENTITY: &str = "spiffe://cluster.local/ns/shop/sa/cart";

/// The lifetime of certificates that must not expire during a test, in seconds.
pub const LONG: u32 = 3600;

/// Returns the folder with SPIRE's programs, and builds them on first use. With None the test must be skipped.
pub fn spire_programs() -> Option<&'static Path> {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    if variable("SPIRE_TESTS").is_none() {
        eprintln!(
            "SPIRE_TESTS is not set, and SPIRE takes minutes to build. This test is not run."
        );
        return None;
    }
    Some(BUILT.get_or_init(|| {
        let output = Command::new("python3")
            .args(["-B", "deploy/cluster/programs.py", "spire"])
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .output()
            .expect("Python");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "cannot build SPIRE: {errors}");
        String::from_utf8(output.stdout).unwrap().trim().into()
    }))
}

pub struct Spire {
    /// The keys of the mesh. Their root certificate has signed SPIRE's intermediate CA.
    pub keys: Keys,
    programs: &'static Path,
    // Fields are dropped in order, so the server ends before its directory is removed.
    _server: Process,
    directory: TempDir,
}

impl Spire {
    /// Starts the server, without an agent or an entry.
    pub async fn start(programs: &'static Path) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let keys = Keys::load_or_generate(directory.path(), TRUST_DOMAIN).unwrap();
        let port = free_port();
        let config = json!({
            "server": {
                "bind_address": "127.0.0.1",
                "bind_port": port,
                "socket_path": path("server.socket"),
                "data_dir": directory.path(),
                "trust_domain": TRUST_DOMAIN,
                // A new entry must be known soon: each time that Envoy asks in vain, it waits longer, up to 30 s.
                "experimental": { "cache_reload_interval": "1s" },
            },
            "plugins": {
                "DataStore": { "sql": { "plugin_data": {
                    "database_type": "sqlite3",
                    "connection_string": path("datastore.sqlite3"),
                }}},
                "KeyManager": { "memory": { "plugin_data": {} } },
                "NodeAttestor": { "join_token": { "plugin_data": {} } },
                "UpstreamAuthority": { "disk": { "plugin_data": {
                    "key_file_path": path("root-key.pem"),
                    "cert_file_path": path("root-cert.pem"),
                }}},
            },
        });
        std::fs::write(path("server.conf"), config.to_string()).unwrap();
        let mut command = Command::new(programs.join("spire-server"));
        command.args(["run", "-config"]).arg(path("server.conf"));
        let server = Process::start(&mut command, &path("server.log"));
        server.logs("Starting Server APIs").await;
        let config = json!({
            "agent": {
                "server_address": "127.0.0.1",
                "server_port": port,
                "insecure_bootstrap": true,
                "data_dir": path("agent"),
                "trust_domain": TRUST_DOMAIN,
                "experimental": { "sync_interval": "1s" },
            },
            "plugins": {
                // A join token is valid once, so the agent needs its key again after a restart.
                "KeyManager": { "disk": { "plugin_data": { "directory": path("agent") } } },
                "NodeAttestor": { "join_token": { "plugin_data": {} } },
                "WorkloadAttestor": { "unix": { "plugin_data": {} } },
            },
        });
        std::fs::write(path("agent.conf"), config.to_string()).unwrap();
        Self { keys, programs, _server: server, directory }
    }

    /// Registers the user of this process as the workload, with certificates that are valid for this many seconds.
    pub fn register(&self, seconds: u32) {
        let (user, seconds) = (format!("unix:uid:{}", getuid()), seconds.to_string());
        let entry = ["-parentID", NODE, "-spiffeID", IDENTITY, "-selector", &user];
        let life = ["-x509SVIDTTL", &seconds];
        self.ask(&[&["entry", "create"], &entry[..], &life].concat());
    }

    /// Starts SPIRE's agent on the workload's socket, and waits until it serves. The agent may have run before.
    pub async fn serve(&self, socket: &Path) -> Process {
        let token = ["token", "generate", "-spiffeID", NODE, "-output", "json"];
        let token: Value = serde_json::from_str(&self.ask(&token)).unwrap();
        let mut command = Command::new(self.programs.join("spire-agent"));
        command
            .args(["run", "-joinToken", token["value"].as_str().unwrap()])
            .arg("-config")
            .arg(self.path("agent.conf"))
            .arg("-socketPath")
            .arg(socket);
        let agent = Process::start(&mut command, &self.path("agent.log"));
        agent.logs("Starting Workload and SDS APIs").await;
        agent
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Returns the output of a command to the server.
    fn ask(&self, arguments: &[&str]) -> String {
        let output = Command::new(self.programs.join("spire-server"))
            .args(arguments)
            .arg("-socketPath")
            .arg(self.path("server.socket"))
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {errors}");
        String::from_utf8(output.stdout).unwrap()
    }
}
