//! Tests the exit codes and the output of `istio-iptables`.

use std::process::{Command, Output};

use crate::support::programs::{binary, is_this_agent};

fn run(words: &str) -> Output {
    let program = binary("AGENT_BIN", Some(env!("CARGO_BIN_EXE_pilot-agent")));
    let words = words.split(' ');
    let mut command = Command::new(program);
    command.arg("istio-iptables").args(words).env_clear();
    command.output().unwrap()
}

#[test]
fn exit_codes_of_istio_iptables_tell_settings_from_command_lines() {
    if !is_this_agent("rules on standard output") {
        return;
    }
    for (words, code, said) in [
        ("--dry-run -b * -i *", 0, "-A OUTPUT -j ISTIO_OUTPUT\n"),
        ("--skip-rule-apply", 0, "Istio config: --skip-rule-apply=true; IPv6: "),
        ("--dry-run -b 80,x", 1, "an item of --istio-inbound-ports is \"x\""),
        (
            "-b * -i * --explain out,tcp,1337,10.0.0.5:443",
            0,
            "-A ISTIO_OUTPUT -m owner --uid-owner 1337 -j RETURN\n",
        ),
        (
            "--explain out,tcp,1337,10.0.0.5:443 -b *",
            1,
            "--istio-service-cidr: missing; add the arguments of the container istio-init",
        ),
        (
            "--verify -i *",
            1,
            "--istio-inbound-ports: missing; add the arguments of the container istio-init",
        ),
        (
            "--explain out,sctp,1337,10.0.0.5:443",
            255,
            "the protocol of --explain is \"sctp\", expected tcp or udp",
        ),
        (
            "--skip-rule-apply -u no-such-user -g 1337",
            1,
            "the user in the arguments is \"no-such-user\", expected the name of a user of this machine",
        ),
        ("--skip-rule-apply -u root -g root", 0, "--proxy-uid=root --proxy-gid=root "),
        ("--dry-run --old", 255, "unknown flag: --old"),
    ] {
        let output = run(words);
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text);
        if text.contains("no valid local IP address found") {
            eprintln!("skipped: this machine has no network");
            return;
        }
        assert_eq!(output.status.code(), Some(code), "{words}: {text}");
        assert!(text.contains(said), "{words}: {text}");
    }
}
