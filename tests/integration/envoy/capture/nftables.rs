//! Tests the rules that `istio-iptables --native-nftables` sets up. Every test runs in its own network namespace.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitOptions};
use tokio::time::Instant;

use crate::envoy::capture::{istio_iptables, text};
use crate::support::namespace::{self, AGENT, APPLICATION};

const REDIRECT: &str = "--native-nftables -u 1337 -m REDIRECT -i * -b * -d 15090,15021,15020";
const TPROXY: &str = "--native-nftables -u 1337 -m TPROXY -i 10.0.0.0/8 -b 80,90 --redirect-dns \
                      --capture-all-dns --drop-invalid --protect-admin";
const OTHERS: &str = "table inet istio-proxy-nats {
    set kept { type ipv4_addr; elements = { 10.0.0.1 } }
    chain output {
        type nat hook output priority -100; policy accept;
        ip daddr @kept counter accept
    }
}
table ip istio-proxy-nat {
    chain prerouting { type nat hook prerouting priority -100; }
}
";

fn capture(words: &str) {
    let output = istio_iptables(0, words);
    assert!(output.status.success(), "{words}: {}", text(&output));
}

/// Returns all tables as `nft` lists them, without counters.
fn ruleset() -> String {
    let output = Command::new("nft").args(["-s", "list", "ruleset"]).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{}", text(&output));
    String::from_utf8(output.stdout).unwrap()
}

fn nft(input: &str) {
    std::fs::write("/mnt/input", input).unwrap();
    namespace::run("nft", &["-f", "/mnt/input"]);
}

#[test]
fn an_nft_run_sets_up_its_rules_whatever_rules_existed() {
    const TEST: &str = "capture::nftables::an_nft_run_sets_up_its_rules_whatever_rules_existed";
    if !namespace::is_inside(TEST) {
        return;
    }
    namespace::add_address("10.9.0.1/24");
    nft(OTHERS);
    let others = ruleset();
    let printed = istio_iptables(0, &format!("{REDIRECT} --dry-run"));
    assert!(text(&printed).contains("add table inet istio-proxy-nat\n"), "{}", text(&printed));
    assert_eq!(ruleset(), others, "a dry run changed something");
    capture(REDIRECT);
    let redirect = ruleset();
    assert!(redirect.contains("redirect to :15006"), "{redirect}");
    assert!(redirect.starts_with(&others), "{redirect}");
    for _ in 0..2 {
        capture(REDIRECT);
        assert_eq!(ruleset(), redirect);
    }
    capture(TPROXY);
    let tproxy = ruleset();
    assert!(tproxy.contains("table inet istio-proxy-mangle"), "{tproxy}");
    // A run also removes chains and rules of others or of another version in Istio's tables, and tables of
    // Istio that it does not need.
    nft(
        "add chain inet istio-proxy-nat stray\nadd table inet istio-proxy-raw\nadd chain inet istio-proxy-raw old",
    );
    capture(REDIRECT);
    assert_eq!(ruleset(), redirect);
    // A cleanup does not need the arguments of the set-up.
    for _ in 0..2 {
        capture("--native-nftables --cleanup-only");
        assert_eq!(ruleset(), others);
    }
}

#[test]
fn ipv6_is_not_captured_without_ipv6_addresses_even_with_ipv6_dns_servers() {
    const TEST: &str = "capture::nftables::\
        ipv6_is_not_captured_without_ipv6_addresses_even_with_ipv6_dns_servers";
    if !namespace::is_inside(TEST) {
        return;
    }
    namespace::add_address("10.9.0.1/24");
    namespace::put("/etc/resolv.conf", "nameserver 2001:db8::53\n");
    capture(&format!("{REDIRECT} --redirect-dns -u 1"));
    // If IPv6 were captured, the connection of an application would be redirected to port 15001.
    let server = TcpListener::bind("[::1]:0").unwrap();
    let agent = TcpListener::bind("[::]:15001").unwrap();
    let port = server.local_addr().unwrap().port();
    assert!(connects(APPLICATION, "::1", port));
    server.accept().unwrap();
    agent.set_nonblocking(true).unwrap();
    assert!(agent.accept().is_err(), "IPv6 was redirected");
}

#[test]
fn a_transaction_that_fails_changes_nothing_and_says_why() {
    const TEST: &str = "capture::nftables::a_transaction_that_fails_changes_nothing_and_says_why";
    if !namespace::is_inside(TEST) {
        return;
    }
    namespace::add_address("10.9.0.1/24");
    capture(TPROXY);
    let before = ruleset();
    let output = istio_iptables(0, &format!("{REDIRECT} -g no-such-group"));
    let said = text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    let unknown = "the group in the arguments is \"no-such-group\", expected the name of a group";
    assert!(said.contains(unknown), "{said}");
    let output = istio_iptables(APPLICATION, REDIRECT);
    let said = text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("Operation not permitted"), "{said}");
    assert_eq!(ruleset(), before);
    // This PATH has no nft.
    let mut command = program(REDIRECT);
    let output = command.env("PATH", "/nowhere").output().unwrap();
    let said = text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    let missing =
        "nativeNftables is enabled, but the nft binary is missing in the sidecar container image";
    assert!(said.contains(missing), "{said}");
}

#[test]
fn an_nft_that_fails_or_prints_garbage_is_named() {
    const TEST: &str = "capture::nftables::an_nft_that_fails_or_prints_garbage_is_named";
    if !namespace::is_inside(TEST) {
        return;
    }
    namespace::add_address("10.9.0.1/24");
    capture(REDIRECT);
    let failing = "echo 'Could not process rule: No such file or directory' >&2; exit 1";
    let failed = "failed (exit status: 1): Could not process rule: No such file or directory";
    for (script, words, said) in [
        (failing, "", failed),
        (failing, "--cleanup-only", failed),
        ("kill -9 $$", "", "failed (signal: 9 (SIGKILL))"),
        ("echo garbage", "--verify", "the output is not a rule set"),
        ("yes", "", "printed more than 67108864 bytes"),
    ] {
        std::fs::write("/mnt/nft", format!("#!/bin/sh\n{script}\n")).unwrap();
        namespace::run("chmod", &["755", "/mnt/nft"]);
        let mut command = program(&format!("{REDIRECT} {words}"));
        command.env("PATH", "/mnt:/usr/bin:/bin");
        let output = command.stdout(Stdio::piped()).output().unwrap();
        let found = text(&output);
        assert_eq!(output.status.code(), Some(1), "{script}: {found}");
        assert!(found.contains(said), "{script}: {found}");
    }
}

#[test]
fn ten_thousand_ranges_are_one_transaction() {
    const TEST: &str = "capture::nftables::ten_thousand_ranges_are_one_transaction";
    if !namespace::is_inside(TEST) {
        return;
    }
    namespace::add_address("2001:db8::1/64");
    let ranges: Vec<_> = (0..10_000).map(|n| format!("{n:x}::/16")).collect();
    let ranges = ranges.join(",");
    let started = Instant::now();
    capture(&format!("{REDIRECT} -x {ranges}"));
    eprintln!("10,000 ranges: {:?}", started.elapsed());
    assert_eq!(ruleset().matches("::/16 counter return").count(), 10_000);
}

fn program(words: &str) -> Command {
    let program = namespace::reachable(Path::new(env!("CARGO_BIN_EXE_pilot-agent")));
    let mut command = Command::new(program);
    command.arg("istio-iptables").args(words.split_whitespace());
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

/// Starts the command as the leader of a process group, so that it can be killed together with its children.
fn start(words: &str) -> Child {
    program(words).process_group(0).spawn().unwrap()
}

#[test]
fn two_runs_of_nft_at_once_leave_the_rules_of_one() {
    const TEST: &str = "capture::nftables::two_runs_of_nft_at_once_leave_the_rules_of_one";
    if !namespace::is_inside(TEST) {
        return;
    }
    namespace::add_address("10.9.0.1/24");
    let states = [REDIRECT, TPROXY].map(|words| {
        capture(words);
        ruleset()
    });
    for _ in 0..40 {
        let runs = [start(REDIRECT), start(TPROXY)];
        for run in runs {
            let output = run.wait_with_output().unwrap();
            assert!(output.status.success(), "{}", text(&output));
        }
        let found = ruleset();
        assert!(states.contains(&found), "{found}");
    }
}

#[test]
fn rules_of_nft_are_whole_or_absent_wherever_the_command_is_killed() {
    const TEST: &str =
        "capture::nftables::rules_of_nft_are_whole_or_absent_wherever_the_command_is_killed";
    if !namespace::is_inside(TEST) {
        return;
    }
    namespace::add_address("10.9.0.1/24");
    // Children of a killed command become children of this process, which can then wait for their end.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid())).unwrap();
    let cleanup = "--native-nftables --cleanup-only";
    let runs = [TPROXY, REDIRECT, cleanup];
    let mut longest = Duration::ZERO;
    let states = runs.map(|words| {
        let started = Instant::now();
        capture(words);
        longest = longest.max(started.elapsed());
        ruleset()
    });
    let (mut before, mut changed, mut seen) = (2, 0, BTreeSet::new());
    for round in 0..200_u32 {
        let wanted = usize::try_from(round % 3).unwrap();
        let mut run = start(runs[wanted]);
        // The moments of the kills are spread over the time that a run takes.
        thread::sleep(longest * (round * 37 % 100) / 100);
        let group = Pid::from_child(&run);
        let _ = rustix::process::kill_process_group(group, Signal::KILL);
        run.wait().unwrap();
        // Programs that the command has started were killed, too, and may end later than the command.
        while rustix::process::waitpgid(group, WaitOptions::empty()).is_ok() {}
        let found = ruleset();
        let is = states.iter().position(|state| *state == found);
        let is = is.unwrap_or_else(|| panic!("half a state in round {round}: {found}"));
        assert!(is == wanted || is == before, "round {round}: neither the old nor the new state");
        changed += usize::from(is == wanted);
        seen.insert(is);
        before = is;
    }
    eprintln!("200 runs killed within {longest:?}: {changed} had set up their rules");
    assert!((1..200).contains(&changed) && seen.len() == 3, "{changed} {seen:?}");
}

/// Returns true if the user can connect.
fn connects(user: u32, address: &str, port: u16) -> bool {
    let script = format!("exec 3<>/dev/tcp/{address}/{port}");
    let mut bash = Command::new("bash");
    let output = bash.args(["-c", &script]).uid(user).gid(user).output().unwrap();
    let said = text(&output);
    assert!(output.status.success() || said.contains("Connection refused"), "{said}");
    output.status.success()
}

#[test]
fn only_root_and_the_proxy_reach_the_admin_port() {
    const TEST: &str = "capture::nftables::only_root_and_the_proxy_reach_the_admin_port";
    if !namespace::is_inside(TEST) {
        return;
    }
    namespace::add_address("2001:db8::1/64");
    let servers = [("127.0.0.1", "127.0.0.1:15000"), ("::1", "[::1]:15000")];
    let servers = servers.map(|(address, socket)| (address, TcpListener::bind(socket).unwrap()));
    for back_end in ["", "--native-nftables"] {
        for (flag, application) in [("", true), ("--protect-admin", false)] {
            capture(&format!("-u 1337 -m REDIRECT -i * -b * {back_end} {flag}"));
            for (address, server) in &servers {
                for (user, expected) in [(0, true), (AGENT, true), (APPLICATION, application)] {
                    let case = format!("{back_end} {flag}: user {user} to {address}");
                    assert_eq!(connects(user, address, 15000), expected, "{case}");
                    if expected {
                        let (mut connection, _) = server.accept().unwrap();
                        // The connection must end without a reset, although its last packets have no owner.
                        assert_eq!(connection.read(&mut [0]).unwrap(), 0, "{case}");
                        drop(connection);
                    }
                }
            }
            let started = Instant::now();
            while last_acknowledgements() > 0 {
                assert!(started.elapsed() < Duration::from_secs(20), "connections do not end");
                thread::yield_now();
            }
            namespace::run("nft", &["flush ruleset"]);
        }
    }
}

#[test]
fn pilot_agent_request_reaches_the_admin_port_as_root_or_proxy() {
    const TEST: &str = "capture::nftables::\
        pilot_agent_request_reaches_the_admin_port_as_root_or_proxy";
    if !namespace::is_inside(TEST) {
        return;
    }
    namespace::add_address("10.9.0.1/24");
    capture(&format!("{REDIRECT} --protect-admin"));
    let server = TcpListener::bind("127.0.0.1:15000").unwrap();
    thread::spawn(move || {
        for connection in server.incoming() {
            let mut connection = connection.unwrap();
            let _ = connection.read(&mut [0; 4096]);
            let answer = "HTTP/1.1 200 OK\r\ncontent-length: 4\r\nconnection: close\r\n\r\nLIVE";
            let _ = connection.write_all(answer.as_bytes());
        }
    });
    for (user, succeeds) in [(0, true), (AGENT, true), (APPLICATION, false)] {
        let agent = namespace::reachable(Path::new(env!("CARGO_BIN_EXE_pilot-agent")));
        let mut command = Command::new(agent);
        command.args(["request", "GET", "ready"]).uid(user).gid(user);
        let output = command.output().unwrap();
        assert_eq!(output.status.success(), succeeds, "{user}: {}", text(&output));
        assert_eq!(output.stdout == b"LIVE\n", succeeds);
    }
}

/// Counts the closed connections that wait for the client's last acknowledgement.
fn last_acknowledgements() -> usize {
    let tables = ["/proc/self/net/tcp", "/proc/self/net/tcp6"]
        .map(|path| std::fs::read_to_string(path).unwrap());
    tables.concat().lines().filter(|line| line.split_whitespace().nth(3) == Some("09")).count()
}
