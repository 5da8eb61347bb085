//! Tests the agent as the unit of systemd starts it on a machine. The tests run the unit's commands without systemd.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::Signal;
use serde_json::json;
use tokio::net::{TcpStream, UnixDatagram};

use crate::support::control_plane::{ACCOUNT, ControlPlane, NAMESPACE};
use crate::support::http::{Backend, header, request};
use crate::support::namespace::{self, Peer};
use crate::support::process::{Process, children_of};
use crate::support::programs::envoy_binary;
use crate::support::resources::{captured, logged, passthrough, transparent};
use crate::support::{eventually, soon};

const UNIT: &str = include_str!("../../../deploy/systemd/istio-agent.service");
const LINE: &str = "a request in the access log\n";
const TRAFFIC: [&str; 2] = ["10.9.0.1/24", "10.9.0.2/24"];

/// Returns the values of a setting of the unit, which must have at least one.
fn unit(name: &str) -> Vec<&'static str> {
    let lines = UNIT.lines().filter_map(|line| line.split_once('='));
    let found: Vec<_> = lines.filter(|(found, _)| *found == name).collect();
    assert!(!found.is_empty(), "the unit has no {name}");
    found.into_iter().map(|(_, value)| value).collect()
}

/// The root directory of a machine, with the files that the package and istioctl install.
struct Machine(PathBuf);

impl Machine {
    fn new(mode: &str, control_plane: &ControlPlane) -> Self {
        let machine = Self(namespace::machine());
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy");
        machine.copy(env!("CARGO_BIN_EXE_pilot-agent").as_ref(), "usr/bin/pilot-agent");
        machine.copy(&envoy_binary().unwrap(), "usr/local/bin/envoy");
        machine.copy(&sources.join("systemd/start"), "usr/libexec/istio-agent/start");
        machine.copy(&sources.join("package/postinst"), "postinst");
        let mut postinst = Command::new("chroot");
        let installed = postinst.arg(&machine.0).args(["/postinst", "configure"]).status();
        assert!(installed.unwrap().success());

        let address = control_plane.address();
        let mesh = json!({ "defaultConfig": {
            "discoveryAddress": address,
            "terminationDrainDuration": "0s",
            "concurrency": 1,
        }});
        let cluster = format!(
            "CA_ADDR='{address}'\nISTIO_INBOUND_INTERCEPTION_MODE='{mode}'\nISTIO_INBOUND_PORTS='*'\n\
             ISTIO_LOCAL_EXCLUDE_PORTS='22,15090,15021,15020'\nISTIO_NAMESPACE='{NAMESPACE}'\n\
             ISTIO_SERVICE='machines.{NAMESPACE}'\nISTIO_SERVICE_CIDR='*'\nISTIO_SVC_IP='10.9.0.1'\n\
             SERVICE_ACCOUNT='{ACCOUNT}'\n"
        );
        // The script postinst has made /etc/istio a link to /var/lib/istio.
        machine.write("var/lib/istio/config/mesh", &mesh.to_string());
        machine.write("var/lib/istio/envoy/cluster.env", &cluster);
        machine.write("etc/certs/root-cert.pem", &control_plane.istiod.root_pem());
        machine.write("run/secrets/tokens/istio-token", &control_plane.token());
        machine.write(
            "etc/default/istio-agent",
            "ISTIO_AGENT_FLAGS=--log_output_level=xdsproxy:debug\n",
        );
        machine
    }

    /// Copies a file as dpkg does: the new file replaces the old one by a rename, so that a program that runs keeps its
    /// own file.
    fn copy(&self, source: &Path, path: &str) {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::copy(source, path.with_extension("new")).unwrap();
        fs::rename(path.with_extension("new"), path).unwrap();
    }

    /// Writes a file that belongs to `istio-proxy`.
    fn write(&self, path: &str, content: &str) {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        let user = self.user();
        chown(path, Some(user), Some(user)).unwrap();
    }

    fn user(&self) -> u32 {
        let users = fs::read_to_string(self.0.join("etc/passwd")).unwrap();
        let name = unit("User")[0];
        let user = users.lines().find_map(|line| line.strip_prefix(&format!("{name}:x:")));
        user.unwrap().split(':').next().unwrap().parse().unwrap()
    }

    /// Returns the command for a line of the unit, with the user, the capabilities and the environment that systemd
    /// gives it. A line with a plus sign runs as root.
    fn command(&self, line: &str) -> Command {
        let mut command = Command::new("chroot");
        command.arg(&self.0);
        let words = match line.strip_prefix('+') {
            Some(words) => words,
            None => {
                let [capabilities] = unit("CapabilityBoundingSet")[..] else { panic!("one set") };
                assert_eq!(unit("AmbientCapabilities"), [capabilities]);
                let kept = capabilities.strip_prefix("CAP_").unwrap().to_lowercase();
                let kept = format!("=-all,+{kept}");
                command
                    .args(["setpriv", "--reuid", unit("User")[0], "--regid", unit("Group")[0]])
                    .args(["--init-groups", "--no-new-privs"])
                    .arg(format!("--inh-caps{kept}"))
                    .arg(format!("--ambient-caps{kept}"))
                    .arg(format!("--bounding-set{kept}"));
                line
            }
        };
        let [file] = unit("EnvironmentFile")[..] else { panic!("one file") };
        let file = self.0.join(file.trim_start_matches("-/"));
        let settings = fs::read_to_string(file).unwrap();
        command
            .args(words.split(' '))
            .current_dir(unit("WorkingDirectory")[0])
            .env_clear()
            .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
            .env("NOTIFY_SOCKET", "/run/notify")
            // A second in place of the unit's 60 s, so that the watchdog message comes soon.
            .env("WATCHDOG_USEC", "1000000")
            // This makes the outputs sockets, like those to the journal. See `Process::start`.
            .env("JOURNAL_STREAM", "8:1")
            .envs(settings.lines().filter_map(|line| line.split_once('=')));
        command
    }

    fn start(&self) -> Process {
        let [line] = unit("ExecStart")[..] else { panic!("one command") };
        Process::start(&mut self.command(line), &self.0.join("log"))
    }

    /// Runs the commands of a setting, such as `ExecStartPre`. Each must succeed.
    fn run(&self, name: &str) {
        for line in unit(name) {
            let output = self.command(line).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{line}: {said}");
        }
    }

    /// Returns the socket on which systemd receives the agent's messages.
    fn systemd(&self) -> UnixDatagram {
        let path = self.0.join("run/notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        fs::set_permissions(path, PermissionsExt::from_mode(0o777)).unwrap();
        socket
    }
}

/// Waits until systemd has received a message.
async fn wait_for_message(systemd: &UnixDatagram, message: &str) {
    soon(async {
        let mut buffer = [0; 64];
        loop {
            let length = systemd.recv(&mut buffer).await.unwrap();
            if buffer[..length] == *message.as_bytes() {
                return;
            }
        }
    })
    .await;
}

fn rules() -> String {
    let tables = ["nat", "mangle"].map(|table| {
        let output = Command::new("iptables-save").args(["-t", table]).output();
        String::from_utf8(output.unwrap().stdout).unwrap()
    });
    tables.concat()
}

async fn control_plane(mode: &str) -> ControlPlane {
    let outbound = logged(captured("outbound", 15001, &[]), "/dev/stdout", LINE);
    let inbound = captured("inbound", 15006, &[]);
    let (inbound, sources) = match mode {
        "TPROXY" => (transparent(inbound), &[][..]),
        _ => (inbound, &["127.0.0.6"][..]),
    };
    ControlPlane::of(&[
        inbound,
        outbound,
        passthrough("inbound", sources),
        passthrough("outbound", &[]),
    ])
    .await
}

async fn serves(mode: &str, envoy_capabilities: &str) {
    let peer = Peer::join(&[(TRAFFIC[0], TRAFFIC[1])]);
    let listen = |port| TcpListener::bind(("0.0.0.0", port)).unwrap();
    let (own, other) = (listen(8080), peer.within(|| listen(80)));
    let _backends = [own, other].map(Backend::naming_clients);
    let control_plane = control_plane(mode).await;
    let machine = Machine::new(mode, &control_plane);
    let systemd = machine.systemd();

    machine.run("ExecStartPre");
    let mut agent = machine.start();
    wait_for_message(&systemd, "READY=1").await;
    let [envoy] = children_of(agent.pid())[..] else { panic!("one Envoy") };
    let status = fs::read_to_string(format!("/proc/{}/status", envoy.as_raw_nonzero())).unwrap();
    assert!(status.contains(&format!("CapEff:\t{envoy_capabilities}\n")), "{status}");

    // The file of the agent's program is replaced while the agent runs.
    machine.copy(env!("CARGO_BIN_EXE_pilot-agent").as_ref(), "usr/bin/pilot-agent");
    wait_for_message(&systemd, "WATCHDOG=1").await;
    let mut stream = soon(TcpStream::connect("10.9.0.2:80")).await.unwrap();
    let answer = request(&mut stream, "outside", "/").await.unwrap();
    assert_eq!(header(&answer, "x-mark"), Some("outbound"));
    let stream = peer.within(|| std::net::TcpStream::connect("10.9.0.1:8080").unwrap());
    stream.set_nonblocking(true).unwrap();
    let mut stream = TcpStream::from_std(stream).unwrap();
    let answer = request(&mut stream, "machine", "/").await.unwrap();
    assert_eq!(header(&answer, "x-mark"), Some("inbound"));
    let client = if mode == "TPROXY" { "10.9.0.2" } else { "127.0.0.6" };
    assert_eq!(header(&answer, "x-client"), Some(client));

    agent.signal(Signal::TERM);
    wait_for_message(&systemd, "STOPPING=1").await;
    assert!(agent.end().await.success());
    eventually(LINE, async || agent.log().contains(LINE).then_some(())).await;
    assert!(rules().contains("ISTIO_"));
    machine.run("ExecStopPost");
    assert!(!rules().contains("ISTIO_"), "{}", rules());
    let certificate = machine.0.join("etc/certs/cert-chain.pem");
    assert!(certificate.exists(), "the client certificate for the next start");
}

#[tokio::test]
async fn the_unit_captures_traffic_serves_logs_to_the_journal_and_cleans_up() {
    const TEST: &str =
        "machine::the_unit_captures_traffic_serves_logs_to_the_journal_and_cleans_up";
    if envoy_binary().is_some() && namespace::is_inside(TEST) {
        serves("REDIRECT", "0000000000000000").await;
    }
}

#[tokio::test]
async fn the_unit_gives_envoy_the_capability_that_tproxy_needs() {
    const TEST: &str = "machine::the_unit_gives_envoy_the_capability_that_tproxy_needs";
    if envoy_binary().is_some() && namespace::is_inside(TEST) {
        // The bit is that of CAP_NET_ADMIN.
        serves("TPROXY", "0000000000001000").await;
    }
}

#[tokio::test]
async fn an_agent_that_can_write_nothing_ends_and_names_the_file() {
    const TEST: &str = "machine::an_agent_that_can_write_nothing_ends_and_names_the_file";
    if envoy_binary().is_none() || !namespace::is_inside(TEST) {
        return;
    }
    let _peer = Peer::join(&[(TRAFFIC[0], TRAFFIC[1])]);
    let control_plane = control_plane("REDIRECT").await;
    let machine = Machine::new("REDIRECT", &control_plane);
    machine.run("ExecStartPre");
    let var = machine.0.join("var");
    let var = var.to_str().unwrap();
    namespace::run("mount", &["--bind", var, var]);
    namespace::run("mount", &["-o", "remount,ro,bind", var]);
    let mut agent = machine.start();
    assert_eq!(agent.end().await.code(), Some(255));
    let expected = "etc/istio/proxy/XDS";
    eventually(expected, async || {
        let log = agent.log();
        (log.contains(expected) && log.contains("Read-only file system")).then_some(())
    })
    .await;
    machine.run("ExecStopPost");
}
