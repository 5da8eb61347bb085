//! Tests the rules that `istio-iptables` sets up and removes in a kernel, with both kinds of iptables.
//!
//! Every test runs in its own network namespace: see [`crate::support::namespace`].

use std::fs;
use std::io::Write;
use std::net::UdpSocket;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use crate::support::faults::{Fault, Says};
use crate::support::namespace::{self, AGENT};

const KINDS: [&str; 2] = ["legacy", "nft"];
const SIDECAR: &str = "-b * -i * -d 15090,15021 --dual-stack";
const OTHER: &str = "-b 80 -i 10.0.0.0/8,fd00::/8 -m TPROXY --redirect-dns --capture-all-dns \
                     --drop-invalid --dual-stack";

/// Returns true in the test's own network namespace, in which the pod gets an address of each family.
/// Otherwise runs the test in such a namespace.
fn is_inside(test: &str) -> bool {
    let inside = namespace::is_inside(&format!("capture::iptables::{test}"));
    if inside {
        namespace::add_address("10.1.1.1/24");
        namespace::run("ip", &["address", "add", "2001:db8::1/64", "dev", "lo", "nodad"]);
    }
    inside
}

fn command(words: &str) -> Command {
    let program = namespace::reachable(Path::new(env!("CARGO_BIN_EXE_pilot-agent")));
    let mut command = Command::new(program);
    command.arg("istio-iptables").args(words.split_whitespace());
    command
}

/// Runs the command. Returns its exit code, and everything that it printed.
fn ended(command: &mut Command) -> (Option<i32>, String) {
    let output = command.output().unwrap();
    let printed = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8(printed).unwrap())
}

/// Runs `istio-iptables` with this kind of iptables, which must succeed. Returns what it printed.
fn istio_iptables(kind: &str, words: &str) -> String {
    let words = format!("{words} --force-iptables-binary {kind}");
    let (code, printed) = ended(&mut command(&words));
    assert_eq!(code, Some(0), "{words}: {printed}");
    printed
}

/// Returns all tables of both families, with counters.
fn saved(kind: &str) -> String {
    let families = ["iptables", "ip6tables"].map(|family| {
        let program = format!("{family}-{kind}-save");
        let output = Command::new(&program).arg("--counters").output().unwrap();
        assert!(output.status.success(), "{program}");
        String::from_utf8(output.stdout).unwrap()
    });
    let lines = families.iter().flat_map(|text| text.lines());
    let lines = lines.filter(|line| !line.starts_with('#'));
    lines.map(|line| format!("{line}\n")).collect()
}

/// Returns the rules with the names of their chains, without counters. Tables and chains without rules do not appear.
fn rules(saved: &str) -> Vec<&str> {
    let rules = saved.lines().filter(|line| line.starts_with('['));
    rules.map(|line| line.split_once("] ").unwrap().1).collect()
}

fn restore(program: &str, text: &str) {
    let mut child = Command::new(program);
    child.args(["--noflush", "--counters"]).stdin(Stdio::piped());
    let mut child = child.spawn().unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    assert!(child.wait().unwrap().success(), "{program}: {text}");
}

/// Rules of other programs, partly in chains that traffic capture uses, too. A comment looks like a jump to a
/// chain of Istio, and a rule occurs twice.
const OTHERS: &str = r#"*nat
:KUBE-MARK - [0:0]
[7:420] -A PREROUTING -p tcp -m tcp --dport 7 -m comment --comment "a \"b\" -j ISTIO_X" -j ACCEPT
[1:60] -A OUTPUT -d 10.0.0.9/32 -p tcp -j KUBE-MARK
[1:60] -A OUTPUT -d 10.0.0.9/32 -p tcp -j KUBE-MARK
[2:120] -A KUBE-MARK -j MARK --set-xmark 0x4000/0x4000
COMMIT
*mangle
[5:300] -A OUTPUT -p tcp -m mark --mark 0x539 -j ACCEPT
COMMIT
"#;

#[test]
fn rules_are_set_up_once_and_removed_without_changing_foreign_rules() {
    if !is_inside("rules_are_set_up_once_and_removed_without_changing_foreign_rules") {
        return;
    }
    for kind in KINDS {
        for family in ["iptables", "ip6tables"] {
            let others = match family {
                "iptables" => OTHERS.to_owned(),
                _ => OTHERS.replace("10.0.0.9/32", "fd00::9/128"),
            };
            let all = "*raw\nCOMMIT\n".to_owned() + &others;
            restore(&format!("{family}-{kind}-restore"), &all);
        }
        let before = saved(kind);
        for words in [SIDECAR, OTHER, SIDECAR] {
            istio_iptables(kind, words);
            let applied = saved(kind);
            assert!(applied.contains("-A OUTPUT -j ISTIO_OUTPUT\n"), "{applied}");
            for line in before.lines().filter(|line| line.starts_with('[')) {
                assert!(applied.contains(line), "{line} is gone: {applied}");
            }
            let printed = istio_iptables(kind, words);
            assert!(printed.contains("no iptables rule needs a change"), "{printed}");
            assert_eq!(saved(kind), applied, "{kind}: {words}");
            istio_iptables(kind, &format!("{words} --force-apply"));
            assert_eq!(rules(&saved(kind)), rules(&applied), "{kind}: {words}");
        }
        istio_iptables(kind, OTHER);
        // A cleanup works with other arguments than the set-up.
        istio_iptables(kind, "--cleanup-only");
        let after = saved(kind);
        assert_eq!(rules(&after), rules(&before), "{kind}");
        for line in before.lines() {
            assert!(after.contains(line), "{kind}: {line} is gone: {after}");
        }
    }
}

#[test]
fn damaged_rules_and_rules_of_another_version_are_replaced() {
    if !is_inside("damaged_rules_and_rules_of_another_version_are_replaced") {
        return;
    }
    for kind in KINDS {
        istio_iptables(kind, SIDECAR);
        let whole = saved(kind);
        for damage in [
            "-t nat -D OUTPUT -j ISTIO_OUTPUT",
            "-t nat -I ISTIO_INBOUND 1 -j RETURN",
            "-t nat -F ISTIO_REDIRECT",
            "-t nat -D ISTIO_INBOUND 1",
            "-t nat -A OUTPUT -p tcp -j ISTIO_OUTPUT",
            "-t raw -N ISTIO_OUTPUT_DNS",
            "-t nat -N ISTIO_OLD",
        ] {
            let words: Vec<_> = damage.split(' ').collect();
            namespace::run(&format!("iptables-{kind}"), &words);
            let printed = istio_iptables(kind, SIDECAR);
            assert!(printed.contains("iptables-"), "{damage}: {printed}");
            assert_eq!(rules(&saved(kind)), rules(&whole), "{kind}: {damage}");
        }
        let old = "*nat\n:ISTIO_OLD - [0:0]\n:FOREIGN - [0:0]\n-I PREROUTING 1 -j ISTIO_OLD\n\
                   -A FOREIGN -p udp -j ISTIO_OLD\n-A FOREIGN -j RETURN\n-A ISTIO_OLD -j RETURN\n\
                   -A INPUT -g ISTIO_OLD\nCOMMIT\n";
        restore(&format!("iptables-{kind}-restore"), old);
        istio_iptables(kind, "--cleanup-only");
        assert_eq!(rules(&saved(kind)), ["-A FOREIGN -j RETURN"], "{kind}");
        assert!(!saved(kind).contains("ISTIO"), "{kind}");
    }
}

/// The DNS rules of Istio 1.8, 1.12 and 1.21. The rules of 1.12 redirect queries to a resolver at the pod's
/// address, which replaces `POD`; the rules of the other versions redirect queries to all resolvers.
const EARLIER: [&str; 3] = [
    "*nat
-A OUTPUT -p udp --dport 53 -m owner --uid-owner 1337 -j RETURN
-A OUTPUT -p udp --dport 53 -m owner --gid-owner 1337 -j RETURN
-A OUTPUT -p udp --dport 53 -j DNAT --to-destination 127.0.0.1:15053
-A POSTROUTING -p udp --dport 15053 -j SNAT --to-source 127.0.0.1
COMMIT
",
    "*raw
-A PREROUTING -d POD -p udp --sport 53 -j CT --zone 1
-A OUTPUT -p udp --dport 53 -m owner --uid-owner 2000 -j CT --zone 1
-A OUTPUT -p udp --sport 15053 -m owner --uid-owner 2000 -j CT --zone 2
-A OUTPUT -p udp --dport 53 -m owner --gid-owner 2000 -j CT --zone 1
-A OUTPUT -p udp --sport 15053 -m owner --gid-owner 2000 -j CT --zone 2
-A OUTPUT -d POD -p udp --dport 53 -j CT --zone 2
COMMIT
*nat
:ISTIO_OUTPUT - [0:0]
-A OUTPUT -p tcp -j ISTIO_OUTPUT
-A OUTPUT -p udp --dport 53 -m owner --uid-owner 2000 -j RETURN
-A OUTPUT -p udp --dport 53 -m owner --gid-owner 2000 -j RETURN
-A OUTPUT -d POD -p udp --dport 53 -j REDIRECT --to-ports 15053
COMMIT
",
    "*raw
-A PREROUTING -s POD -p udp --sport 53 -j CT --zone 1
-A PREROUTING -p udp --sport 53 -j CT --zone 1
-A OUTPUT -p udp --dport 53 -m owner --uid-owner 1337 -j CT --zone 1
-A OUTPUT -p udp --sport 15053 -m owner --uid-owner 1337 -j CT --zone 2
-A OUTPUT -p udp --dport 53 -j CT --zone 2
COMMIT
*nat
-A OUTPUT -p udp --dport 53 -m owner --uid-owner 1337 -j RETURN
-A OUTPUT -p udp --dport 53 -m owner --gid-owner 202 -j RETURN
-A OUTPUT -p udp --dport 53 -m owner ! --gid-owner 0 -m owner ! --gid-owner 1001 -j RETURN
-A OUTPUT -p udp --dport 53 -j REDIRECT --to-ports 15053
COMMIT
",
];

/// Rules of the node's DNS cache, of another DNS proxy, and of a firewall. The address of the DNS cache
/// replaces `LINK`.
const OTHERS_FOR_DNS: &str = "*raw
-A PREROUTING -d LINK -p udp --dport 53 -j CT --notrack
-A OUTPUT -s LINK -p udp --sport 53 -j CT --notrack
COMMIT
*nat
-A OUTPUT -p udp --dport 53 -m owner --uid-owner 101 -j RETURN
-A OUTPUT -d LINK -p udp --dport 53 -j REDIRECT --to-ports 5353
COMMIT
*filter
-A INPUT -i eth7 -p udp --dport 15053 -j DROP
COMMIT
";

/// Returns true if a query to a resolver at the pod's address reaches the resolver.
fn has_dns(pod: &str) -> bool {
    let resolver = UdpSocket::bind((pod, 53)).unwrap();
    let client = UdpSocket::bind((pod, 0)).unwrap();
    client.connect((pod, 53)).unwrap();
    // Nothing listens on the port that DNS rules redirect to, so the second send may fail. Only the
    // resolver's socket shows whether a query arrived.
    let _ = (client.send(b"question"), client.send(b"question"));
    resolver.set_nonblocking(true).unwrap();
    resolver.recv(&mut [0; 8]).is_ok()
}

#[test]
fn dns_rules_of_earlier_versions_are_replaced_and_those_of_others_stay() {
    if !is_inside("dns_rules_of_earlier_versions_are_replaced_and_those_of_others_stay") {
        return;
    }
    let pods = ["10.1.1.1", "2001:db8::1"];
    for kind in KINDS {
        let both = |text: &str| {
            for (family, pod, link) in
                [("iptables", pods[0], "169.254.20.10"), ("ip6tables", pods[1], "fd00::20")]
            {
                let text = text.replace("POD", pod).replace("LINK", link);
                if family == "iptables" || !text.contains("127.0.0.1") {
                    restore(&format!("{family}-{kind}-restore"), &text);
                }
            }
        };
        both(OTHERS_FOR_DNS);
        let others = saved(kind);
        for earlier in EARLIER {
            both(earlier);
            assert!(saved(kind).contains("15053 "), "{kind}: {earlier}");
            assert!(!has_dns(pods[0]), "{kind}: {earlier}");
            let verify = || ended(&mut command(&format!("{SIDECAR} --verify")));
            let (code, printed) = verify();
            let named = "IPv4: a rule is extra: nat: -A OUTPUT ";
            assert!(printed.contains(named), "{printed}");
            assert!(printed.contains("15053"), "{printed}");
            assert_eq!(code, Some(3), "{printed}");
            istio_iptables(kind, SIDECAR);
            let (code, printed) = verify();
            assert_eq!(code, Some(0), "{printed}");
            let replaced = saved(kind);
            assert_eq!(replaced.matches("15053").count(), 2, "{replaced}");
            for line in others.lines().filter(|line| line.starts_with('[')) {
                assert!(replaced.contains(line), "{line} is gone: {replaced}");
            }
            both(earlier);
            istio_iptables(kind, "--cleanup-only");
            assert_eq!(rules(&saved(kind)), rules(&others), "{kind}: {earlier}");
            assert!(pods.iter().all(|pod| has_dns(pod)), "{kind}: {earlier}");
        }
        istio_iptables(kind, SIDECAR);
        let printed = istio_iptables(kind, &format!("{SIDECAR} --dry-run"));
        assert!(!printed.contains("15053"), "{printed}");
        istio_iptables(kind, "--cleanup-only");
        for family in ["iptables", "ip6tables"] {
            for table in ["raw", "nat", "filter"] {
                namespace::run(&format!("{family}-{kind}"), &["-t", table, "-F"]);
            }
        }
    }
}

/// Creates a directory with the programs of one kind of iptables, one of which is replaced by a script.
/// Returns its path.
fn with_fake(kind: &str, fake: &str, script: &str) -> String {
    let directory = format!("/mnt/{kind}-{fake}");
    fs::create_dir_all(&directory).unwrap();
    for name in ["iptables", "ip6tables"] {
        for what in ["save", "restore"] {
            let name = format!("{name}-{kind}-{what}");
            let target = format!("/usr/sbin/xtables-{kind}-multi");
            let _ = symlink(target, format!("{directory}/{name}"));
        }
    }
    with_fake_in(&directory, fake, script);
    directory
}

fn with_fake_in(directory: &str, fake: &str, script: &str) {
    let path = format!("{directory}/{fake}");
    let _ = fs::remove_file(&path);
    fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn after_a_failure_midway_the_previous_rules_are_in_place() {
    if !is_inside("after_a_failure_midway_the_previous_rules_are_in_place") {
        return;
    }
    for kind in KINDS {
        let fake = format!("ip6tables-{kind}-restore");
        let path = with_fake(kind, &fake, "echo 'v1.8.9: no such table' >&2; exit 3");
        for old in ["--cleanup-only", SIDECAR] {
            restore(&format!("iptables-{kind}-restore"), OTHERS);
            istio_iptables(kind, old);
            let before = saved(kind);
            let (code, printed) = ended(command(OTHER).env("PATH", path.clone() + ":/bin"));
            assert_eq!(code, Some(1), "{printed}");
            let cause = format!("`{path}/{fake} --noflush");
            assert!(printed.contains(&cause), "{printed}");
            assert!(printed.contains("no such table"), "{printed}");
            assert_eq!(rules(&saved(kind)), rules(&before), "{kind}: {old}");
        }
    }
}

#[tokio::test]
async fn each_reason_why_no_rule_is_created_is_named_with_its_cure() {
    if !is_inside("each_reason_why_no_rule_is_created_is_named_with_its_cure") {
        return;
    }
    for address in ["10.1.1.1/24", "2001:db8::1/64"] {
        namespace::run("ip", &["address", "delete", address, "dev", "lo"]);
    }
    let says: Says =
        ("CAPTURE_NO_ADDRESS", &["no valid local IP address found"], &["check the CNI plugin"]);
    Fault::failing(command(SIDECAR), says).judge("no address").await;
    namespace::add_address("10.1.1.1/24");
    let says: Says = (
        "CAPTURE_PERMISSION",
        &["lacks the capability NET_ADMIN"],
        &["NET_RAW", "of the container istio-init"],
    );
    let mut unprivileged = command(SIDECAR);
    unprivileged.uid(AGENT).gid(AGENT);
    Fault::failing(unprivileged, says).judge("no NET_ADMIN").await;
    let says: Says = (
        "CAPTURE_PROGRAM_MISSING",
        &["iptables-save and iptables-restore (nft or legacy) are not in PATH (/mnt/none)"],
        &["install iptables", "--native-nftables"],
    );
    let mut lacking = command(SIDECAR);
    lacking.env("PATH", "/mnt/none");
    Fault::failing(lacking, says).judge("no iptables").await;
}

fn start(words: &str) -> Child {
    let mut command = command(words);
    let command = command.stdout(Stdio::null()).stderr(Stdio::null());
    command.process_group(0).spawn().unwrap()
}

#[test]
fn two_concurrent_runs_of_istio_iptables_are_serialized() {
    if !is_inside("two_concurrent_runs_of_istio_iptables_are_serialized") {
        return;
    }
    for kind in KINDS {
        let kinded = |words: &str| format!("{words} --force-iptables-binary {kind}");
        let [first, second] = [SIDECAR, OTHER].map(|words| {
            istio_iptables(kind, words);
            saved(kind)
        });
        for _ in 0..10 {
            let mut both = [SIDECAR, OTHER].map(|words| start(&kinded(words)));
            for child in &mut both {
                assert!(child.wait().unwrap().success());
            }
            let found = saved(kind);
            let found = rules(&found);
            let is_whole = found == rules(&first) || found == rules(&second);
            assert!(is_whole, "{kind}: {found:#?}");
        }
    }
}

/// Returns the rules of each table, first for IPv4 and then for IPv6.
fn tables(saved: &str) -> Vec<(String, Vec<&str>)> {
    let tables = saved.split_inclusive("COMMIT\n").map(|table| {
        let name = table.lines().next().unwrap().to_owned();
        (name, rules(table))
    });
    let mut tables: Vec<_> = tables.collect();
    // A table without rules may or may not exist.
    tables.retain(|(_, rules)| !rules.is_empty());
    tables
}

#[test]
fn each_table_is_whole_after_a_kill_at_any_moment() {
    if !is_inside("each_table_is_whole_after_a_kill_at_any_moment") {
        return;
    }
    let mut interrupted = 0;
    for kind in KINDS {
        let states = [SIDECAR, OTHER, "--cleanup-only"].map(|words| {
            istio_iptables(kind, words);
            (words, saved(kind))
        });
        let known: Vec<_> = states.iter().flat_map(|(_, saved)| tables(saved)).collect();
        for round in 0..100 {
            let (words, after) = &states[round % states.len()];
            let mut child = start(&format!("{words} --force-iptables-binary {kind}"));
            sleep(Duration::from_micros(fastrand::u64(0..30_000)));
            rustix::process::kill_process_group(
                rustix::process::Pid::from_child(&child),
                rustix::process::Signal::KILL,
            )
            .unwrap();
            let was_killed = !child.wait().unwrap().success();
            // A killed program that is in a system call ends later, and holds the lock until then. `flock`
            // waits for the lock.
            namespace::run("flock", &["/proc/self/ns/net", "true"]);
            let found = saved(kind);
            interrupted += u32::from(was_killed && rules(&found) != rules(after));
            for table in tables(&found) {
                assert!(known.contains(&table), "{kind}, {words}: {table:#?}");
            }
            istio_iptables(kind, words);
            assert_eq!(rules(&saved(kind)), rules(after), "{kind}: {words}");
        }
    }
    assert!(interrupted > 20, "{interrupted} of 200 were interrupted");
}

/// Returns the output of `ip`.
fn ip(words: &str) -> String {
    let mut ip = Command::new("ip");
    let output = ip.args(words.split(' ')).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn routes_are_there_once_while_they_are_needed() {
    if !is_inside("routes_are_there_once_while_they_are_needed") {
        return;
    }
    let rules = || ["-4 rule", "-6 rule"].map(|words| ip(words).matches("fwmark 0x539").count());
    let routes = || ["-4", "-6"].map(|family| ip(&format!("{family} route show table 133")));
    let passthrough = || ip("-6 address show dev lo").contains("inet6 ::6/128 ");
    for _ in 0..3 {
        istio_iptables("nft", &format!("{OTHER} --force-apply"));
    }
    assert_eq!(rules(), [1, 1]);
    for route in routes() {
        assert!(route.starts_with("local default dev lo "), "{route}");
        assert_eq!(route.lines().count(), 1, "{route}");
    }
    assert!(passthrough());
    istio_iptables("nft", SIDECAR);
    assert_eq!((rules(), passthrough()), ([0, 0], true));
    assert_eq!(routes(), ["", ""]);
    istio_iptables("nft", OTHER);
    // Earlier versions leave several equal rules behind.
    for _ in 0..3 {
        namespace::run("ip", &["rule", "add", "fwmark", "1337", "lookup", "133"]);
    }
    istio_iptables("nft", "--cleanup-only");
    assert_eq!((rules(), passthrough()), ([0, 0], false));
    assert_eq!(routes(), ["", ""]);
}

/// Returns the lines of all remaining rules of Istio, listed by both kinds of iptables and by nft.
fn left() -> String {
    let nft = Command::new("nft").args(["list", "ruleset"]).output().unwrap();
    let all = KINDS.map(saved).concat() + &String::from_utf8(nft.stdout).unwrap();
    let is_istios = |line: &&str| line.contains("ISTIO_") || line.contains("istio-proxy");
    all.lines().filter(is_istios).collect::<Vec<_>>().join("\n")
}

fn succeed(words: &str) -> String {
    let (code, printed) = ended(&mut command(words));
    assert_eq!(code, Some(0), "{words}: {printed}");
    printed
}

const BACK_ENDS: [&str; 3] =
    ["--force-iptables-binary legacy", "--force-iptables-binary nft", "--native-nftables"];

#[test]
fn a_cleanup_needs_neither_settings_nor_address_nor_back_end() {
    if !is_inside("a_cleanup_needs_neither_settings_nor_address_nor_back_end") {
        return;
    }
    for set_up in BACK_ENDS {
        for cleanup in ["", BACK_ENDS[0], BACK_ENDS[1], BACK_ENDS[2], "-b 80,x -u no-such-user"] {
            succeed(&format!("{OTHER} {set_up}"));
            assert!(left().contains("15006") || left().contains("istio"), "{set_up}");
            namespace::run("ip", &["address", "flush", "dev", "lo", "scope", "global"]);
            let printed = succeed(&format!("--cleanup-only --dry-run {cleanup}"));
            let is_named = ["-D OUTPUT -j ISTIO_OUTPUT\n", "delete table inet istio-proxy-nat\n"];
            assert!(is_named.iter().any(|named| printed.contains(named)), "{printed}");
            let printed = succeed(&format!("--cleanup-only {cleanup}"));
            assert_eq!(left(), "", "{set_up}, {cleanup}: {printed}");
            let is_rule_a_line = [
                "-restore: -D OUTPUT -j ISTIO_OUTPUT\n",
                "nft: delete table inet istio-proxy-nat\n",
            ];
            assert!(is_rule_a_line.iter().any(|line| printed.contains(line)), "{printed}");
            namespace::add_address("10.1.1.1/24");
            namespace::run("ip", &["address", "add", "2001:db8::1/64", "dev", "lo", "nodad"]);
        }
    }
}

#[test]
fn another_back_end_replaces_the_rules_of_the_one_before() {
    if !is_inside("another_back_end_replaces_the_rules_of_the_one_before") {
        return;
    }
    for (first, second) in [(0, 2), (1, 2), (2, 0), (2, 1)] {
        succeed(&format!("{OTHER} {}", BACK_ENDS[first]));
        succeed(&format!("{SIDECAR} {}", BACK_ENDS[second]));
        let found = left();
        assert_eq!(found.contains("istio-proxy"), second == 2, "{found}");
        assert_eq!(found.contains("ISTIO_"), second != 2, "{found}");
        succeed("--cleanup-only");
        assert_eq!(left(), "");
    }
}

#[test]
fn rules_for_other_marks_are_removed_and_policy_routing_of_others_stays() {
    if !is_inside("rules_for_other_marks_are_removed_and_policy_routing_of_others_stays") {
        return;
    }
    let lines = |words: &str, of: &str| {
        let lines = ip(words);
        let lines = lines.lines().filter(|line| line.contains(of));
        lines
            .map(|line| line.split_once(":\t").map_or(line, |(_, rule)| rule).trim().to_owned())
            .collect::<Vec<_>>()
    };
    for rule in [
        "from 10.9.9.0/24 fwmark 0x4d lookup 98",
        "fwmark 0x4d/0xff lookup 98",
        "fwmark 0x4d lookup 300",
        "fwmark 0x539 lookup 200",
        "fwmark 0x4d ipproto udp lookup 98",
    ] {
        namespace::run("ip", &["rule add", rule].join(" ").split(' ').collect::<Vec<_>>());
    }
    let others = ["-4 rule", "-6 rule"].map(|words| lines(words, "fwmark"));
    let own = "-b * -i * -m TPROXY -t 77 -r 99 -u 2000 -g 2001 --dual-stack";
    for back_end in BACK_ENDS {
        for next in [
            "--cleanup-only -t 77 -r 99",
            "-b * -i * -m REDIRECT -t 77 -r 99",
            "-b * -i * -m TPROXY -t 78 -r 98 -u 3000 --dual-stack",
        ] {
            succeed(&format!("{own} {back_end}"));
            assert_eq!(lines("-4 rule", "fwmark").len(), others[0].len() + 1);
            assert_eq!(lines("-6 route show table 99", "local default").len(), 1);
            let printed = succeed(&format!("{next} {back_end}"));
            if next.contains("-r 98") {
                // Routes are found only by the mark and the table in the arguments.
                succeed("--cleanup-only -t 77 -r 99");
                succeed("--cleanup-only -t 78 -r 98");
            }
            for family in ["-4", "-6"] {
                assert_eq!(ip(&format!("{family} route show table 99")), "", "{printed}");
            }
            let marked = KINDS.map(saved).concat();
            assert!(!marked.contains("0x4d") && !marked.contains("-owner 200"), "{marked}");
            succeed("--cleanup-only");
            let found = ["-4 rule", "-6 rule"].map(|words| lines(words, "fwmark"));
            assert_eq!(found, others, "{printed}");
        }
    }
    // pilot-agent leaves this rule and this route behind after a change from TPROXY to REDIRECT.
    namespace::run("ip", &["rule", "add", "fwmark", "1337", "lookup", "133"]);
    namespace::run("ip", &["route", "add", "local", "default", "dev", "lo", "table", "133"]);
    succeed("--cleanup-only");
    assert_eq!(["-4 rule", "-6 rule"].map(|words| lines(words, "fwmark")), others);
    assert_eq!(ip("route show table 133"), "");
}

#[test]
fn rules_for_interfaces_are_removed_and_those_of_others_stay() {
    if !is_inside("rules_for_interfaces_are_removed_and_those_of_others_stay") {
        return;
    }
    let earlier = "*nat\n-A PREROUTING -i eth5 -j RETURN\n-A OUTPUT -o eth6 -j RETURN\nCOMMIT\n\
                   *mangle\n-A PREROUTING -i eth5 -j RETURN\nCOMMIT\n";
    let later = "*nat\n-A OUTPUT -o eth7 -j RETURN\nCOMMIT\n";
    let both = |kind: &str, text: &str| {
        restore(&format!("iptables-{kind}-restore"), text);
        restore(&format!("ip6tables-{kind}-restore"), text);
    };
    for (kind, mode) in KINDS.iter().flat_map(|kind| [(*kind, "REDIRECT"), (*kind, "TPROXY")]) {
        both(kind, earlier);
        let words = format!("-m {mode} -b * -i * -c eth7,eth8 -k vm0,vm1 --dual-stack");
        istio_iptables(kind, &words);
        both(kind, later);
        let applied = saved(kind);
        let printed = istio_iptables(kind, &words);
        assert!(printed.contains("no iptables rule needs a change"), "{printed}");
        istio_iptables(kind, &format!("-m {mode} -b * -i 10.0.0.0/8 -c eth9 -k vm2 --dual-stack"));
        for interface in ["-i eth7", "-i eth8", "-o eth8", "vm0", "vm1"] {
            assert!(applied.contains(interface), "{kind}, {mode}: {applied}");
            let replaced = saved(kind);
            assert!(!replaced.contains(interface), "{interface}: {kind}, {mode}: {replaced}");
        }
        istio_iptables(kind, "--cleanup-only");
        let mut left = rules(&saved(kind)).iter().map(ToString::to_string).collect::<Vec<_>>();
        let mut others: Vec<_> = (earlier.to_owned() + later)
            .lines()
            .filter(|line| line.starts_with('-'))
            .flat_map(|line| [line.to_owned(), line.to_owned()])
            .collect();
        left.sort();
        others.sort();
        assert_eq!(left, others, "{kind}, {mode}");
        for program in ["iptables", "ip6tables"] {
            for table in ["nat", "mangle"] {
                namespace::run(&format!("{program}-{kind}"), &["-t", table, "-F"]);
            }
        }
        // No rule of Istio is in a chain of a jump here.
        istio_iptables(kind, &format!("-m {mode} -i * -c eth7 --dual-stack"));
        istio_iptables(kind, "--cleanup-only");
        assert_eq!(rules(&saved(kind)), [""; 0], "{kind}, {mode}");
    }
}

#[test]
fn empty_legacy_tables_do_not_select_legacy_iptables() {
    if !is_inside("empty_legacy_tables_do_not_select_legacy_iptables") {
        return;
    }
    for program in ["iptables-legacy", "ip6tables-legacy"] {
        namespace::run(program, &["-t", "nat", "-L"]);
    }
    succeed(SIDECAR);
    assert_eq!(rules(&saved("legacy")), [""; 0]);
    assert!(saved("nft").contains("-A OUTPUT -j ISTIO_OUTPUT\n"));
    // Legacy tables with a rule do select legacy iptables.
    succeed("--cleanup-only");
    namespace::run("iptables-legacy", &["-t", "nat", "-A", "OUTPUT", "-j", "RETURN"]);
    succeed(SIDECAR);
    assert!(saved("legacy").contains("-A OUTPUT -j ISTIO_OUTPUT\n"));
}

#[test]
fn at_most_one_iptables_program_per_family_runs_unless_rules_are_removed() {
    if !is_inside("at_most_one_iptables_program_per_family_runs_unless_rules_are_removed") {
        return;
    }
    for kind in KINDS {
        let path = with_fake(kind, "unused", "");
        for family in ["iptables", "ip6tables"] {
            for what in ["save", "restore"] {
                let name = format!("{family}-{kind}-{what}");
                let script = format!("echo {name} >>/mnt/run; exec /usr/sbin/{name} \"$@\"");
                with_fake_in(&path, &name, &script);
            }
        }
        let run = |words: &str| {
            let _ = fs::remove_file("/mnt/run");
            let (code, printed) = ended(command(words).env("PATH", &path));
            assert_eq!(code, Some(0), "{printed}");
            let run = fs::read_to_string("/mnt/run").unwrap_or_default();
            run.lines().map(|name| name.replace(kind, "")).collect::<Vec<_>>()
        };
        let (saves, restores) =
            (["iptables--save", "ip6tables--save"], ["iptables--restore", "ip6tables--restore"]);
        assert_eq!(run("--cleanup-only"), [""; 0], "{kind}");
        assert_eq!(run(SIDECAR), restores, "{kind}");
        assert_eq!(run(SIDECAR), saves, "{kind}");
        assert_eq!(run("--cleanup-only"), [saves, restores].concat(), "{kind}");
    }
}

#[test]
fn only_a_pod_with_ipv6_needs_its_programs() {
    if !is_inside("only_a_pod_with_ipv6_needs_its_programs") {
        return;
    }
    let path = with_fake("nft", "unused", "");
    fs::remove_file(format!("{path}/ip6tables-nft-restore")).unwrap();
    let (code, printed) = ended(command("-b * -i *").env("PATH", &path));
    assert_eq!(code, Some(0), "{printed}");
    let before = saved("nft");
    let (code, printed) = ended(command(SIDECAR).env("PATH", &path));
    assert_eq!(code, Some(1), "{printed}");
    let named =
        format!("ip6tables-save and ip6tables-restore (nft or legacy) are not in PATH ({path})");
    assert!(printed.contains(&named), "{printed}");
    assert_eq!(saved("nft"), before);
}

#[test]
fn failing_ip6tables_programs_matter_only_if_ipv6_rules_are_wanted_or_exist() {
    if !is_inside("failing_ip6tables_programs_matter_only_if_ipv6_rules_are_wanted_or_exist") {
        return;
    }
    const V4: &str = "-b * -i *";
    for (name, script) in [
        ("missing", ""),
        ("failing", "echo 'modprobe: not found' >&2; exit 1"),
        ("garbage", "echo 'the wrapper chose nft'"),
        ("killed", "kill -9 $$"),
    ] {
        // These are wrapper scripts, whose names do not show the kind of iptables.
        let path = format!("/mnt/{name}");
        fs::create_dir(&path).unwrap();
        for what in ["save", "restore"] {
            let script = format!("exec /usr/sbin/iptables-nft-{what} \"$@\"");
            with_fake_in(&path, &format!("iptables-{what}"), &script);
        }
        if !script.is_empty() {
            for what in ["save", "restore"] {
                with_fake_in(&path, &format!("ip6tables-{what}"), script);
            }
        }
        let path = format!("{path}:/bin");
        let run = |words: &str, expected| {
            let (code, printed) = ended(command(words).env("PATH", &path));
            assert_eq!(code, Some(expected), "{name}, {words}: {printed}");
            let is_left_alone = printed.contains("IPv6 rules stay unchanged: ");
            assert_eq!(is_left_alone, expected == 0 && !script.is_empty(), "{printed}");
        };
        run(V4, 0);
        assert!(saved("nft").contains("-A OUTPUT -j ISTIO_OUTPUT\n"));
        run(&format!("{V4} --verify"), 0);
        run("--cleanup-only", 0);
        assert_eq!(rules(&saved("nft")), [""; 0]);
        run(SIDECAR, 1);
        assert_eq!(rules(&saved("nft")), [""; 0]);
        // A cleanup fails if it cannot remove rules that the kernel has.
        istio_iptables("nft", SIDECAR);
        run("--cleanup-only", 1);
        istio_iptables("nft", "--cleanup-only");
    }
}

#[test]
fn net_admin_and_net_raw_suffice() {
    if !is_inside("net_admin_and_net_raw_suffice") {
        return;
    }
    let agent = namespace::reachable(Path::new(env!("CARGO_BIN_EXE_pilot-agent")));
    for kind in KINDS {
        for words in [OTHER, SIDECAR, SIDECAR, "--cleanup-only"] {
            let mut setpriv = Command::new("setpriv");
            let capabilities = "-all,+net_admin,+net_raw";
            setpriv.args(["--bounding-set", capabilities, "--inh-caps", capabilities]);
            setpriv.arg("--no-new-privs").arg(&agent).arg("istio-iptables");
            setpriv.args(words.split_whitespace());
            setpriv.args(["--force-iptables-binary", kind]);
            let (code, printed) = ended(&mut setpriv);
            assert_eq!(code, Some(0), "{kind}, {words}: {printed}");
            let is_there = saved(kind).contains("-A OUTPUT -j ISTIO_OUTPUT\n");
            assert_eq!(is_there, words != "--cleanup-only", "{kind}, {words}");
        }
    }
}
