//! Network and mount namespaces of single tests. The network is empty at first, and changes of files are invisible
//! outside.
//!
//! A network namespace belongs to a process. A test that needs one therefore starts the test binary again inside a new
//! namespace, and there runs only itself. This needs root and some tools. Without them the test prints that and is
//! skipped; if the variable `NETNS_TESTS` is set, it fails.

use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::programs::variable;

const INSIDE: &str = "ISTIO_AGENT_TEST_INSIDE";

/// The directory with programs that every user of the namespace may start.
const PROGRAMS: &str = "/mnt";

/// The agent's user, whose traffic is not captured, and the application's user.
pub const AGENT: u32 = 1337;
pub const APPLICATION: u32 = 65_534;

/// Returns true inside the namespaces. Outside, it runs the test of this name, which must be one of [`crate::envoy`],
/// in new namespaces, fails if that fails, and returns false.
pub fn is_inside(test: &str) -> bool {
    if variable(INSIDE).is_some() {
        prepare();
        return true;
    }
    if let Some(missing) = missing() {
        let sentence = format!("A network of its own takes {missing}.");
        assert!(variable("NETNS_TESTS").is_none(), "{sentence}");
        eprintln!("{sentence} This test is not run.");
        return false;
    }
    let output = Command::new("unshare")
        .args(["--net", "--mount", "--"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", &format!("envoy::{test}"), "--nocapture"])
        .env(INSIDE, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    eprintln!("{said}\n{}", String::from_utf8_lossy(&output.stderr));
    // With a wrong name no test would run inside, and that is a success, too.
    let passed = output.status.success() && said.contains("1 passed");
    assert!(passed, "{test}: {}", output.status);
    false
}

/// Another machine: a second network namespace that is connected to this one.
pub struct Peer(Child);

impl Peer {
    /// Creates another machine that is connected by `eth0`, which has the first address of each pair here and the
    /// second one there. Each of the two is the default gateway of the other.
    pub fn join(addresses: &[(&str, &str)]) -> Self {
        let mut command = Command::new("unshare");
        command.args(["--net", "--", "sleep", "infinity"]);
        let peer = Self(command.spawn().unwrap());
        let own = fs::read_link("/proc/self/ns/net").unwrap();
        while fs::read_link(peer.network()).is_ok_and(|found| found == own) {
            std::thread::yield_now();
        }
        let pid = peer.0.id().to_string();
        let pair = ["link", "add", "eth0", "type", "veth", "peer", "name", "eth0"];
        run("ip", &[&pair[..], &["netns", &pid]].concat());
        run("ip", &["link", "set", "eth0", "up"]);
        peer.ip(&["link", "set", "lo", "up"]);
        peer.ip(&["link", "set", "eth0", "up"]);
        for (here, there) in addresses {
            let add = |address| ["address", "add", address, "dev", "eth0", "nodad"];
            run("ip", &add(here));
            peer.ip(&add(there));
            for (via, add) in [(there, None), (here, Some(&peer))] {
                let via = via.split('/').next().unwrap();
                let route = ["route", "add", "default", "via", via, "dev", "eth0"];
                add.map_or_else(|| run("ip", &route), |peer| peer.ip(&route));
            }
        }
        peer
    }

    /// Runs `ip` on the other machine.
    pub fn ip(&self, arguments: &[&str]) {
        let network = format!("--net={}", self.network());
        run("nsenter", &[&[&network, "--", "ip"], arguments].concat());
    }

    /// Calls `act` in the other machine's network. A socket that it creates stays in that network.
    pub fn within<T: Send>(&self, act: impl FnOnce() -> T + Send) -> T {
        let enter = || {
            let network = fs::File::open(self.network()).unwrap();
            let kind = Some(LinkNameSpaceType::Network);
            move_into_link_name_space(network.as_fd(), kind).unwrap();
            act()
        };
        std::thread::scope(|scope| scope.spawn(enter).join().unwrap())
    }

    fn network(&self) -> String {
        format!("/proc/{}/ns/net", self.0.id())
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.0.kill(); // `sleep infinity` does not end by itself.
        let _ = self.0.wait();
    }
}

/// Creates or replaces a file, for this namespace only.
pub fn put(path: &str, content: &str) {
    let source = Path::new(PROGRAMS).join(path.replace('/', "-"));
    let path = Path::new(path);
    fs::write(&source, content).unwrap();
    if !path.exists() {
        let directory = path.parent().unwrap();
        run("mount", &["-t", "tmpfs", "tmpfs", &nearest_existing(directory)]);
        fs::create_dir_all(directory).unwrap();
        fs::write(path, "").unwrap();
    }
    run("mount", &["--bind", &text(&source), &text(path)]);
}

/// Mounts an overlay with the files of this machine, and returns its directory. Changes there are visible in this
/// namespace only.
pub fn machine() -> PathBuf {
    let [changed, work, root] = ["changed", "work", "root"].map(|name| {
        let path = Path::new(PROGRAMS).join(name);
        fs::create_dir(&path).unwrap();
        text(&path)
    });
    let layers = format!("lowerdir=/,upperdir={changed},workdir={work}");
    run("mount", &["-t", "overlay", "overlay", "-o", &layers, &root]);
    for path in ["/dev", "/proc"] {
        run("mount", &["--rbind", path, &format!("{root}{path}")]);
    }
    run("mount", &["-t", "tmpfs", "tmpfs", &format!("{root}/run")]);
    root.into()
}

/// Returns a path at which other users can start a program: its own directory may be closed to them.
pub fn reachable(program: &Path) -> PathBuf {
    let place = Path::new(PROGRAMS).join(program.file_name().unwrap());
    if !place.exists() {
        fs::write(&place, "").unwrap();
        run("mount", &["--bind", &text(program), &text(&place)]);
    }
    place
}

/// Redirects all queries for port 53 to the agent, except those of the agent's user. These are not tracked: otherwise
/// the kernel would take a query of an application from the same source port for part of the same connection, and would
/// not redirect it.
pub fn capture_dns(port: u16) {
    let rules = format!(
        "add table inet capture;
         add chain inet capture untracked {{ type filter hook output priority -300; }};
         add rule inet capture untracked meta skuid {AGENT} meta l4proto {{ tcp, udp }}
         th dport 53 notrack;
         add rule inet capture untracked meta l4proto {{ tcp, udp }} th sport 53 notrack;
         add chain inet capture output {{ type nat hook output priority -100; }};
         add rule inet capture output meta skuid != {AGENT} meta l4proto {{ tcp, udp }}
         th dport 53 redirect to :{port}"
    );
    let rules = rules.split_whitespace().collect::<Vec<_>>().join(" ");
    run("nft", &[&rules]);
}

pub fn add_address(address: &str) {
    run("ip", &["address", "add", address, "dev", "lo"]);
}

pub fn run(program: &str, arguments: &[&str]) {
    let mut command = Command::new(program);
    let output = command.args(arguments).stdin(Stdio::null()).output();
    let output = output.unwrap_or_else(|error| panic!("{program}: {error}"));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {} {error}", output.status);
}

/// Returns true if a program is installed. Otherwise prints that a part of the test is skipped.
pub fn has(program: &str) -> bool {
    let found = is_on_path(program);
    if !found {
        eprintln!("There is no {program}: what it would show is left out.");
    }
    found
}

fn prepare() {
    run("ip", &["link", "set", "lo", "up"]);
    run("mount", &["-t", "tmpfs", "tmpfs", PROGRAMS]);
}

fn missing() -> Option<String> {
    if !rustix::process::getuid().is_root() {
        return Some("root".to_owned());
    }
    let tools = ["unshare", "nsenter", "setpriv", "mount", "ip", "nft", "iptables"];
    if let Some(tool) = tools.into_iter().find(|tool| !is_on_path(tool)) {
        return Some(tool.to_owned());
    }
    let mut test = Command::new("unshare");
    test.args(["--net", "--mount", "--", "nft", "add table inet test"]);
    let works = test.output().is_ok_and(|output| output.status.success());
    (!works).then(|| "the right to have namespaces, and nftables in the kernel".to_owned())
}

fn is_on_path(program: &str) -> bool {
    let path = variable("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|directory| directory.join(program).is_file())
}

/// Returns the directory, or its nearest parent that exists.
fn nearest_existing(directory: &Path) -> String {
    text(directory.ancestors().find(|path| path.exists()).unwrap())
}

fn text(path: &Path) -> String {
    path.to_str().unwrap().to_owned()
}
