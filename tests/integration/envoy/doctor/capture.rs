//! `pilot-agent doctor` beside real rules, or none.

use std::net::TcpListener;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::envoy::capture::{istio_iptables, text};
use crate::support::namespace::{self, AGENT};

/// What the doctor says about the rules as this user, beside this kind of node.
fn says(user: u32, kind: &str, variables: &[(&str, &str)]) -> String {
    let program = namespace::reachable(Path::new(env!("CARGO_BIN_EXE_pilot-agent")));
    let place = tempfile::tempdir().unwrap();
    let root = place.path().join("var/run/secrets/istio");
    std::fs::create_dir_all(&root).unwrap();
    std::fs::write(root.join("root-cert.pem"), "").unwrap();
    std::fs::write(place.path().join("resolv.conf"), "nameserver 10.9.0.53\n").unwrap();
    let (id, mut command) = (user.to_string(), Command::new("setpriv"));
    command
        .args(["--reuid", &id, "--regid", &id, "--clear-groups"])
        .args(["--inh-caps", "-all", "--"])
        .arg(program)
        .args(["doctor", kind, "--json"])
        .current_dir(place.path())
        .env("PROXY_CONFIG", r#"{"discoveryAddress": "127.0.0.1:1"}"#)
        .env("ISTIO_META_INTERCEPTION_MODE", "REDIRECT")
        .env("ISTIO_AGENT_RESOLV_CONF", "resolv.conf")
        .envs(variables.iter().copied());
    // The place is of root, and for it alone.
    std::os::unix::fs::chown(place.path(), Some(user), None).unwrap();
    let output = command.output().unwrap();
    let report: Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", text(&output)));
    let groups = report["groups"].as_array().unwrap();
    let group = groups.iter().find(|group| group["name"] == "capture");
    let check = &group.unwrap_or_else(|| panic!("{report:#}"))["checks"][0];
    ["level", "found", "expected", "remedy"]
        .map(|member| check[member].as_str().unwrap_or_default())
        .join(": ")
}

#[test]
fn the_doctor_finds_missing_and_wrong_rules_as_root_and_as_the_proxys_user() {
    const TEST: &str =
        "doctor::capture::the_doctor_finds_missing_and_wrong_rules_as_root_and_as_the_proxys_user";
    if !namespace::is_inside(TEST) {
        return;
    }
    let assert = |user, variables: &[_], words: &[&str]| {
        let said = says(user, "sidecar", variables);
        assert!(
            words.iter().all(|words| said.contains(words)),
            "{words:?}: {said}"
        );
    };
    let iptables = |words: &str| {
        let output = istio_iptables(0, words);
        assert!(output.status.success(), "{}", text(&output));
    };
    namespace::add_address("10.9.0.1/24");
    let missing = [
        "error",
        "no chain of Istio",
        "15001 and 15006",
        "istio-init",
    ];
    assert(0, &[], &missing);
    assert(AGENT, &[], &["skipped", "cannot be read", "NET_ADMIN"]);
    let envoy = TcpListener::bind("127.0.0.1:15006").unwrap();
    assert(
        AGENT,
        &[],
        &[
            "error",
            "127.0.0.6:15002 is not redirected",
            "127.0.0.1:15006",
        ],
    );
    let said = says(AGENT, "router", &[]);
    assert!(said.starts_with("skipped: only sidecars"), "{said}");
    let none = &[("ISTIO_META_INTERCEPTION_MODE", "NONE")];
    assert(0, none, &["skipped", "mode NONE"]);
    let dns = &[("ISTIO_META_DNS_CAPTURE", "true")];
    for back_end in ["", "--native-nftables"] {
        let usual = format!("-p 15001 -z 15006 -i * -b * {back_end}");
        for mode in ["REDIRECT", "TPROXY"] {
            iptables(&format!("-u 1337 -m {mode} {usual}"));
            assert(0, &[], &["ok", "lead to ports 15001 and 15006"]);
            assert(AGENT, &[], &["ok", "127.0.0.6:15002 is redirected"]);
        }
        assert(
            0,
            dns,
            &["error", "DNS queries are not redirected", "port 15053"],
        );
        iptables(&format!("-u 1337 --redirect-dns --capture-all-dns {usual}"));
        assert(0, dns, &["ok"]);
        iptables(&format!("-u 2000 {usual}"));
        assert(0, &[], &["error", "user 1337", "goes to its destination"]);
        assert(AGENT, &[], &["error", "is not redirected"]);
        iptables(&format!(
            "-u 1337 {} {back_end}",
            "-p 15011 -z 15006 -i * -b *"
        ));
        assert(0, &[], &["ok", "lead to ports 15011 and 15006"]);
        iptables(&format!("--cleanup-only {back_end}"));
    }
    drop(envoy);
    // As Istio 1.12 leaves it.
    iptables("-u 1337 -p 15001 -z 15006 -i * -b *");
    let rule = "-p udp -m udp --dport 53 -j REDIRECT --to-ports 15053";
    let words = format!("-t nat -A OUTPUT {rule}");
    namespace::run("iptables", &words.split(' ').collect::<Vec<_>>());
    let named = format!("an earlier version of Istio: nat: -A OUTPUT {rule}");
    assert(0, &[], &["error", &named]);
}
