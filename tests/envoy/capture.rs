//! Traffic capture with real rules, as `istio-iptables` sets them up.
//!
//! Every test has a network of its own: see [`crate::support::namespace`].

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use tokio::time::Instant;

use crate::support::namespace::{self, AGENT};

/// Runs the command as a user.
pub fn istio_iptables(user: u32, words: &str) -> Output {
    let program = namespace::reachable(Path::new(env!("CARGO_BIN_EXE_pilot-agent")));
    let mut command = Command::new(program);
    command
        .arg("istio-iptables")
        .args(words.split_whitespace())
        .uid(user)
        .gid(user);
    command.output().unwrap()
}

pub fn text(output: &Output) -> String {
    let both = [&output.stdout[..], &output.stderr].concat();
    String::from_utf8_lossy(&both).into_owned()
}

/// Sets the rules of a usual sidecar up.
fn capture(words: &str) {
    let usual = "-p 15001 -z 15006 -u 1337 -m REDIRECT -i * -b * -d 15090,15021,15020 --dry-run";
    let output = istio_iptables(0, &format!("{usual} {words}"));
    let printed = text(&output);
    assert!(output.status.success(), "{printed}");
    // Tables of IPv4 come first, then the same ones of IPv6.
    let mut seen = Vec::new();
    for table in printed.split_inclusive("COMMIT\n") {
        let Some(at) = table.find("* ") else { break };
        let (table, name) = (&table[at..], table[at..].lines().next().unwrap().to_owned());
        let program = match seen.contains(&name) {
            false => "iptables-restore",
            true => "ip6tables-restore",
        };
        seen.push(name);
        let path = format!("/mnt/rules-{}", seen.len());
        std::fs::write(&path, table).unwrap();
        namespace::run(program, &["--noflush", &path]);
    }
}

#[test]
fn validation_passes_as_the_proxys_user_and_fails_as_root_or_without_rules() {
    const TEST: &str =
        "capture::validation_passes_as_the_proxys_user_and_fails_as_root_or_without_rules";
    if !namespace::is_inside(TEST) {
        return;
    }
    let validate = |user, timeout| {
        let words = format!(
            "-p 15001 -z 15006 -u 1337 -m REDIRECT -i * -b * -d 15090,15021,15020 \
             --run-validation --skip-rule-apply --probe-timeout {timeout}"
        );
        let started = Instant::now();
        let output = istio_iptables(user, &words);
        (output.status.code(), text(&output), started.elapsed())
    };
    // Applied rules come with it.
    namespace::add_address("::6/128");
    for (address, destination) in [
        ("10.9.0.1/24", "127.0.0.6:15002"),
        ("2001:db8::1/64", "[::6]:15002"),
    ] {
        namespace::add_address(address);
        let (code, said, time) = validate(AGENT, "1500ms");
        assert_eq!(code, Some(126), "{said}");
        let hint = format!("no connection of user 1337 to {destination} was redirected");
        assert!(
            said.contains(&hint) && said.contains("cni.repair"),
            "{said}"
        );
        assert!(time < Duration::from_secs(5), "{time:?}");
        capture("");
        let (code, said, _) = validate(AGENT, "30s");
        assert_eq!(code, Some(0), "{said}");
        let (code, said, _) = validate(0, "1500ms");
        assert_eq!(code, Some(126), "{said}");
        namespace::run("nft", &["flush ruleset"]);
        namespace::run("ip", &["address", "del", address, "dev", "lo"]);
    }
}
