//! Tests `istio-iptables --verify`, and that real packets arrive where `--explain` says.

use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use fastrand::Rng;
use rustix::process::{Gid, Uid};
use rustix::thread::{set_thread_gid, set_thread_groups, set_thread_uid};

use crate::envoy::capture::{istio_iptables, text};
use crate::support::namespace::{self, AGENT, Peer};

/// The longest wait for a response.
const LIMIT: Duration = Duration::from_secs(5);
/// The number of random argument lists, and the number of flows that are sent for each list.
const LISTS: usize = 25;
const FLOWS: usize = 40;

/// The port of the agent's DNS proxy.
const DNS_PORT: &str = "15053";
/// The ports of applications and of Envoy on this machine.
const PORTS_HERE: &str = "53,80,8080,15000,15021,15001,15006,15008";
/// The addresses of this machine. "There" is the peer, another machine.
const HERE: &str = "127.0.0.1,::1,10.9.0.1,2001:db8:9::1";
const PORTS_THERE: &str = "53,443,8080,9000";
const THERE: &str = "10.9.0.2,10.96.0.10,192.0.2.10,2001:db8:9::2,2001:db8:96::10";

const USERS: [&str; 4] = ["1337/1337", "0/0", "1000/1000", "1000/1337"];
const FROM_HERE: [&str; 19] = [
    "10.96.0.10:443",
    "10.96.0.10:8080",
    "10.96.0.10:53",
    "192.0.2.10:443",
    "192.0.2.10:9000",
    "10.9.0.2:53",
    "10.9.0.2:443",
    "[2001:db8:96::10]:443",
    "[2001:db8:96::10]:53",
    "[2001:db8:9::2]:53",
    "[2001:db8:9::2]:9000",
    "10.9.0.1:80",
    "10.9.0.1:15008",
    "127.0.0.1:8080",
    "127.0.0.1:53",
    "127.0.0.1:15000",
    "[2001:db8:9::1]:80",
    "[::1]:8080",
    "[::1]:15000",
];
const FROM_THERE: [&str; 8] = [
    "10.9.0.1:80",
    "10.9.0.1:8080",
    "10.9.0.1:15021",
    "10.9.0.1:15008",
    "10.9.0.1:53",
    "[2001:db8:9::1]:80",
    "[2001:db8:9::1]:8080",
    "[2001:db8:9::1]:15021",
];

#[test]
fn verify_says_what_differs_and_exits_with_3_if_traffic_goes_elsewhere() {
    const TEST: &str =
        "capture::flows::verify_says_what_differs_and_exits_with_3_if_traffic_goes_elsewhere";
    if !namespace::is_inside(TEST) {
        return;
    }
    namespace::add_address("10.9.0.1/24");
    namespace::add_address("2001:db8::1/64");
    let words = "-i * -b * -d 15021 --dual-stack --native-nftables";
    let verify = || {
        let output = istio_iptables(0, &format!("{words} --verify"));
        (output.status.code(), text(&output))
    };
    let (code, said) = verify();
    assert_eq!(code, Some(3), "{said}");
    assert!(said.contains("IPv4: a rule is missing: nat: -A OUTPUT -j ISTIO_OUTPUT"), "{said}");
    assert!(said.contains("IPv6: a rule is missing: nat: -A OUTPUT -j ISTIO_OUTPUT"), "{said}");
    let output = istio_iptables(0, words);
    assert!(output.status.success(), "{}", text(&output));
    let right = "The rules are those that these arguments ask for: traffic is captured.\n";
    assert_eq!(verify(), (Some(0), right.to_owned()));
    // A chain of another version is reported, but it is harmless: the status stays 0.
    namespace::run("nft", &["add chain inet istio-proxy-nat istio-old"]);
    let (code, said) = verify();
    assert_eq!(code, Some(0), "{said}");
    assert!(
        said.contains("IPv4: a chain is not of this version of Istio: nat: istio-old\n"),
        "{said}"
    );
    namespace::run("nft", &["insert rule inet istio-proxy-nat output ip daddr 10.0.0.0/8 accept"]);
    let (code, said) = verify();
    assert_eq!(code, Some(3), "{said}");
    let first = "IPv4: a rule of others comes first and may take traffic: nat: -A OUTPUT -d 10.0.0.0/8 -j ACCEPT\n";
    assert!(said.contains(first), "{said}");
    assert!(!said.contains("IPv6: a rule"), "{said}");
}

/// Verifies rules in the way that the sidecar does in mode TPROXY: as root, with NET_ADMIN, without NET_RAW.
/// Istio's CNI plugin asks both kinds of iptables for rules, which creates empty legacy tables; so does this
/// test.
#[test]
fn verify_without_net_raw_reads_nft_where_empty_legacy_tables_exist() {
    const TEST: &str =
        "capture::flows::verify_without_net_raw_reads_nft_where_empty_legacy_tables_exist";
    if !namespace::is_inside(TEST) {
        return;
    }
    namespace::add_address("10.9.0.1/24");
    let words = "-i * -b * -m TPROXY --force-iptables-binary nft";
    let output = istio_iptables(0, words);
    assert!(output.status.success(), "{}", text(&output));
    namespace::run("iptables-legacy", &["-t", "nat", "-S"]);
    let program = namespace::reachable(Path::new(env!("CARGO_BIN_EXE_pilot-agent")));
    let output = Command::new("setpriv")
        .args(["--inh-caps", "-all", "--bounding-set", "-all,+net_admin"])
        .arg(program)
        .args("istio-iptables -i * -b * -m TPROXY --verify".split(' '))
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
}

#[test]
fn verify_names_missing_routes_and_rules_of_others_with_comments() {
    const TEST: &str =
        "capture::flows::verify_names_missing_routes_and_rules_of_others_with_comments";
    if !namespace::is_inside(TEST) {
        return;
    }
    namespace::add_address("10.9.0.1/24");
    namespace::add_address("2001:db8::1/64");
    let words = "-i * -b * -m TPROXY --dual-stack --force-iptables-binary nft";
    for (break_it, named) in [
        (
            "ip -4 rule del fwmark 1337",
            "IPv4: captured packets have no route: rule that looks up mark 1337 in table 133",
        ),
        (
            "ip -6 route flush table 133",
            "IPv6: captured packets have no route: local default route in table 133",
        ),
        (
            "ip address del ::6/128 dev lo",
            "IPv6: captured packets have no route: address ::6/128 of lo",
        ),
        (
            "iptables-nft -t nat -I OUTPUT -p tcp -m comment --comment not-ours -j ACCEPT",
            "IPv4: a rule of others comes first and may take traffic: nat: -A OUTPUT -p tcp -m comment",
        ),
    ] {
        let output = istio_iptables(0, words);
        assert!(output.status.success(), "{}", text(&output));
        let output = istio_iptables(0, &format!("{words} --verify"));
        assert!(output.status.success(), "{}", text(&output));
        let (program, arguments) = break_it.split_once(' ').unwrap();
        namespace::run(program, &arguments.split(' ').collect::<Vec<_>>());
        let output = istio_iptables(0, &format!("{words} --verify"));
        let said = text(&output);
        assert_eq!(output.status.code(), Some(3), "{break_it}: {said}");
        assert!(said.contains(named), "{break_it}: {said}");
    }
}

#[test]
fn verify_names_each_dns_rule_that_is_missing_moved_or_extra() {
    const TEST: &str = "capture::flows::verify_names_each_dns_rule_that_is_missing_moved_or_extra";
    if !namespace::is_inside(TEST) {
        return;
    }
    namespace::add_address("10.9.0.1/24");
    namespace::put("/etc/resolv.conf", "nameserver 10.9.0.53\n");
    let program = namespace::reachable(Path::new(env!("CARGO_BIN_EXE_pilot-agent")));
    let run = |kind: &str, more: &[&str]| {
        let mut command = Command::new(&program);
        command.args(["istio-iptables", "-i=*", "-b=*", "--redirect-dns"]);
        command.args(["--force-iptables-binary", kind]).args(more);
        command.env("ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE", "202");
        let output = command.output().unwrap();
        (output.status.code(), text(&output))
    };
    let zone = "ISTIO_OUTPUT_DNS -d 10.9.0.53/32 -p udp -m udp --dport 53 -j CT --zone 2";
    let redirect =
        "ISTIO_OUTPUT_DNS -d 10.9.0.53/32 -p udp -m udp --dport 53 -j REDIRECT --to-ports 15053";
    let moved =
        "-D ISTIO_OUTPUT -d 127.0.0.1/32 -j RETURN; -I ISTIO_OUTPUT 1 -d 127.0.0.1/32 -j RETURN";
    for kind in ["legacy", "nft"] {
        for (table, damage, named) in [
            (
                "raw",
                format!("-D {zone}"),
                "a rule is missing: raw: -A ISTIO_OUTPUT_DNS -d 10.9.0.53/32 -p udp --dport 53 -j CT --zone 2",
            ),
            (
                "nat",
                "-D ISTIO_OUTPUT -j ISTIO_OUTPUT_DNS".to_owned(),
                "a rule is missing: nat: -A ISTIO_OUTPUT -j ISTIO_OUTPUT_DNS",
            ),
            (
                "nat",
                format!("-D {redirect}"),
                "a rule is missing: nat: -A ISTIO_OUTPUT_DNS -d 10.9.0.53/32 -p udp --dport 53 -j REDIRECT --to-port 15053",
            ),
            (
                "nat",
                "-A ISTIO_INBOUND -p tcp --dport 7 -j RETURN".to_owned(),
                "a rule is extra: nat: -A ISTIO_INBOUND -p tcp --dport 7 -j RETURN",
            ),
            (
                "nat",
                moved.to_owned(),
                "rules are in another order: found nat: -A ISTIO_OUTPUT -d 127.0.0.1/32 -j RETURN, expected nat: -A ISTIO_OUTPUT -s 127.0.0.6/32 -o lo -j RETURN",
            ),
        ] {
            assert_eq!(run(kind, &[]).0, Some(0));
            let right = "The rules are those that these arguments ask for: traffic is captured.\n";
            assert_eq!(run(kind, &["--verify"]), (Some(0), right.to_owned()));
            for change in damage.split("; ") {
                let words: Vec<_> = ["-t", table].into_iter().chain(change.split(' ')).collect();
                namespace::run(&format!("iptables-{kind}"), &words);
            }
            let (code, said) = run(kind, &["--verify"]);
            assert_eq!(code, Some(3), "{said}");
            let lines: Vec<_> = said.lines().skip(1).collect();
            assert_eq!(lines, [format!("  IPv4: {named}")], "{kind}: {damage}");
        }
        assert_eq!(run(kind, &["--cleanup-only"]).0, Some(0));
    }
}

/// Receivers in one network namespace, which reply with the place at which a connection or datagram arrived.
struct Receivers(Child);

impl Receivers {
    fn start(user: u32, name: &str, addresses: &str, ports: &str) -> Self {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/integration/support/receiver.py");
        let script = namespace::reachable(Path::new(script));
        let mut command = Command::new("python3");
        command.arg("-B").arg(script).uid(user).gid(user);
        command.args([name, addresses, ports]);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        let output = child.stdout.take().unwrap();
        BufReader::new(output).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        Self(child)
    }
}

impl Drop for Receivers {
    fn drop(&mut self) {
        let _ = self.0.kill(); // The receiver does not end by itself.
        let _ = self.0.wait();
    }
}

/// The arguments of `istio-iptables`, and the owner groups, which are given in an environment variable.
#[derive(Debug)]
struct Arguments {
    words: Vec<&'static str>,
    groups: &'static str,
}

impl Arguments {
    fn any(rng: &mut Rng) -> Self {
        let mut words = vec!["--dual-stack"];
        // A word that is listed several times is chosen more often. An empty word leaves the option out.
        for options in [
            &["-u=1337", "-u=1337,2000-2010", ""][..],
            &["-m=TPROXY", "-m=REDIRECT"],
            &["-b=*", "-b=*", "-b=80,15021", "-b="],
            &["-d=15021,8080-8090", ""],
            &[
                "-i=*",
                "-i=*",
                "-i=10.96.0.0/16,2001:db8:96::/64",
                "-i=127.0.0.0/8,10.0.0.0/8",
                "-i=",
            ],
            &["-x=192.0.2.0/24", "-x=10.96.0.0/16,2001:db8:96::10/128", ""],
            &["-q=9000", "-q=440:450", ""],
            &["-o=53", "-o=8000:9000", "", ""],
            &["-c=eth0", "-c=net+", "", "", ""],
            &["--redirect-dns", "--redirect-dns", ""],
            &["--capture-all-dns", ""],
            &["--drop-invalid", ""],
            &["--protect-admin", ""],
            &["--native-nftables", "--force-iptables-binary=nft", "--force-iptables-binary=legacy"],
        ] {
            let word = options[rng.usize(..options.len())];
            words.extend(Some(word).filter(|word| !word.is_empty()));
        }
        let groups = ["*", "*", "1000", "0,1337"];
        let groups = groups[rng.usize(..groups.len())];
        Self { words, groups }
    }

    fn run(&self, more: &[&str]) -> Output {
        let program = namespace::reachable(Path::new(env!("CARGO_BIN_EXE_pilot-agent")));
        let mut command = Command::new(program);
        command.arg("istio-iptables").args(&self.words).args(more);
        command.env("ISTIO_OUTBOUND_OWNER_GROUPS", self.groups);
        command.output().unwrap()
    }

    /// Returns the text of the receiver that `--explain` predicts for a flow, and the output of `--explain`.
    fn expected(&self, flow: &str, destination: SocketAddr) -> (String, String) {
        let output = self.run(&["--explain", flow]);
        let said = text(&output);
        assert!(output.status.success(), "{self:?} {flow}: {said}");
        let port_behind = |words: &str| {
            let (_, rest) = said.split_once(words)?;
            let end = rest.find(|character: char| !character.is_ascii_digit());
            Some(format!("here {}", &rest[..end.unwrap()]))
        };
        let redirected = port_behind(" is redirected to port ");
        let passed = || port_behind(" passes unchanged to port ");
        let place = redirected.or_else(passed).or_else(|| {
            let address = destination.ip().to_string();
            let side = ["there", "here"][usize::from(HERE.split(',').any(|here| here == address))];
            let is_untouched = said.contains(" goes to its destination");
            is_untouched.then(|| format!("{side} {}", destination.port()))
        });
        let place = match place {
            Some(place) if flow.contains(",tcp,") => format!("{place} {destination}"),
            Some(place) => place,
            None => {
                assert!(said.contains(" is rejected "), "{said}");
                "refused".to_owned()
            }
        };
        (place, said)
    }
}

/// Sends the first packet of a flow as a user, which the calling thread becomes. Returns the text of the
/// receiver, or the error.
fn send(is_tcp: bool, destination: SocketAddr, user: &str) -> String {
    let (user, group) = user.split_once('/').unwrap();
    let (user, group) =
        (Uid::from_raw(user.parse().unwrap()), Gid::from_raw(group.parse().unwrap()));
    set_thread_groups(&[]).unwrap();
    set_thread_gid(group).unwrap();
    set_thread_uid(user).unwrap();
    let answer = || {
        let mut answer = String::new();
        if is_tcp {
            let mut stream = TcpStream::connect_timeout(&destination, LIMIT)?;
            stream.set_read_timeout(Some(LIMIT))?;
            stream.read_to_string(&mut answer)?;
        } else {
            let any = if destination.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
            let socket = UdpSocket::bind(any)?;
            socket.connect(destination)?;
            socket.set_read_timeout(Some(LIMIT))?;
            socket.send(b"?")?;
            let mut buffer = [0; 100];
            let length = socket.recv(&mut buffer)?;
            answer.push_str(&String::from_utf8_lossy(&buffer[..length]));
        }
        Ok::<_, std::io::Error>(answer)
    };
    answer().unwrap_or_else(|error| match error.kind() {
        ErrorKind::ConnectionRefused => "refused".to_owned(),
        _ => error.to_string(),
    })
}

#[test]
fn real_packets_arrive_where_explain_says() {
    const TEST: &str = "capture::flows::real_packets_arrive_where_explain_says";
    if !namespace::is_inside(TEST) {
        return;
    }
    let peer =
        Peer::join(&[("10.9.0.1/24", "10.9.0.2/24"), ("2001:db8:9::1/64", "2001:db8:9::2/64")]);
    for address in ["10.96.0.10/32", "192.0.2.10/32", "2001:db8:96::10/128"] {
        peer.ip(&["address", "add", address, "dev", "lo"]);
    }
    namespace::put("/etc/resolv.conf", "nameserver 10.9.0.2\nnameserver 2001:db8:9::2\n");
    let _here = Receivers::start(0, "here", HERE, PORTS_HERE);
    // The rules put responses of the DNS port into the conntrack zone of redirected queries only if the
    // agent's user sends them.
    let _dns = Receivers::start(AGENT, "here", HERE, DNS_PORT);
    let _there = peer.within(|| Receivers::start(0, "there", THERE, PORTS_THERE));
    let mut rng = Rng::with_seed(16);
    let mut ends = vec![
        "is redirected to port 15001",
        "is redirected to port 15006",
        "is redirected to port 15053",
        "passes unchanged to port 15006",
        "goes to its destination",
        "is rejected",
    ];
    for _ in 0..LISTS {
        let arguments = Arguments::any(&mut rng);
        let output = arguments.run(&[]);
        assert!(output.status.success(), "{arguments:?}: {}", text(&output));
        let output = arguments.run(&["--verify"]);
        assert!(output.status.success(), "{arguments:?}: {}", text(&output));
        for _ in 0..FLOWS {
            let said = check_random_flow(&arguments, &peer, &mut rng);
            ends.retain(|end| !said.contains(end));
        }
        let output = arguments.run(&["--cleanup-only"]);
        assert!(output.status.success(), "{arguments:?}: {}", text(&output));
    }
    assert!(ends.is_empty(), "no packet had these ends: {ends:?}");
}

/// Sends a random flow from this machine or from the peer, and asserts that it arrives where `--explain`
/// says. Returns the output of `--explain`.
fn check_random_flow(arguments: &Arguments, peer: &Peer, rng: &mut Rng) -> String {
    let is_tcp = rng.u8(..4) > 0;
    let protocol = if is_tcp { "tcp" } else { "udp" };
    let (flow, destination, found) = if rng.u8(..4) > 0 {
        let user = USERS[rng.usize(..USERS.len())];
        let destination: SocketAddr = FROM_HERE[rng.usize(..FROM_HERE.len())].parse().unwrap();
        let found = thread::scope(|scope| {
            let sender = scope.spawn(|| send(is_tcp, destination, user));
            sender.join().unwrap()
        });
        (format!("out,{protocol},{user},{destination}"), destination, found)
    } else {
        let destination: SocketAddr = FROM_THERE[rng.usize(..FROM_THERE.len())].parse().unwrap();
        let found = peer.within(|| send(is_tcp, destination, "1000/1000"));
        (format!("in,{protocol},{destination}"), destination, found)
    };
    let (expected, said) = arguments.expected(&flow, destination);
    assert_eq!(found, expected, "{arguments:?}, {flow}: {said}");
    said
}
