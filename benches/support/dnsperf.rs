//! Starts other DNS servers with the same names, and `dnsperf`, which queries all servers in the same
//! way.

use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::process::Command;

use super::{Process, write};

/// The figures of a server that was queried at a fixed rate.
pub struct DnsperfFigures {
    pub cpu_per_query: f64,
    pub lost: u64,
}

/// Returns true if the program is installed.
pub fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|directory| directory.join(program).is_file())
}

/// Queries the server for `names`, over and over, at `rate` queries per second.
pub fn ask(
    server: &Process,
    address: SocketAddr,
    names: &Path,
    rate: u64,
    seconds: u64,
) -> DnsperfFigures {
    let cpu = server.cpu();
    let mut command = Command::new("dnsperf");
    command
        .arg("-d")
        .arg(names)
        .args(["-s", &address.ip().to_string()])
        .args(["-p", &address.port().to_string()])
        .args(["-Q", &rate.to_string()])
        .args(["-l", &seconds.to_string()])
        .args(["-c", "4", "-q", "1000", "-t", "2"]);
    let output = command.output().expect("dnsperf");
    let cpu = (server.cpu() - cpu).as_secs_f64() * 1e6;
    let text = String::from_utf8_lossy(&output.stdout);
    let [completed, lost] = ["Queries completed:", "Queries lost:"].map(|name| figure(&text, name));
    DnsperfFigures { cpu_per_query: cpu / completed as f64, lost }
}

fn figure(text: &str, name: &str) -> u64 {
    let line = text.lines().find(|line| line.trim().starts_with(name));
    let rest = line.and_then(|line| line.trim().strip_prefix(name));
    let number = rest.and_then(|rest| rest.split_whitespace().next()?.parse().ok());
    number.unwrap_or_else(|| panic!("no {name} of dnsperf in {text}"))
}

/// Starts an unbound that has one thread, like the agent, and knows only these names.
pub fn unbound(place: &Path, address: SocketAddr, names: &[(String, IpAddr)]) -> Process {
    let mut text = format!(
        "server:\n interface: {}@{}\n num-threads: 1\n use-syslog: no\n logfile: \"\"\n\
         \x20do-daemonize: no\n username: \"\"\n chroot: \"\"\n pidfile: \"\"\n verbosity: 0\n\
         \x20module-config: \"iterator\"\n local-zone: \"svc.cluster.local.\" static\n",
        address.ip(),
        address.port()
    );
    for (name, ip) in names {
        writeln!(text, " local-data: \"{name}. 30 IN A {ip}\"").expect("memory");
    }
    text += "remote-control:\n control-enable: no\n";
    write(place, "unbound.conf", &text);
    Process::start(Command::new("unbound").arg("-d").arg("-c").arg(place.join("unbound.conf")))
}

pub fn dnsmasq(place: &Path, address: SocketAddr, names: &[(String, IpAddr)]) -> Process {
    let mut text = String::new();
    for (name, ip) in names {
        writeln!(text, "{ip} {name}").expect("memory");
    }
    write(place, "hosts", &text);
    let mut command = Command::new("dnsmasq");
    command
        .args(["--keep-in-foreground", "--no-resolv", "--no-hosts"])
        .args(["--bind-interfaces", "--conf-file=/dev/null", "--pid-file="])
        .args(["--cache-size=10000", "--local-ttl=30", "--user=root"])
        .arg(format!("--listen-address={}", address.ip()))
        .arg(format!("--port={}", address.port()))
        .arg(format!("--addn-hosts={}", place.join("hosts").display()));
    Process::start(&mut command)
}
