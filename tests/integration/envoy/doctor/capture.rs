//! Tests the check of the capture rules by `pilot-agent doctor`, with real rules and without rules.

use std::net::{TcpListener, TcpStream};
use std::path::Path;

use local_istiod::LocalIstiod;
use serde_json::Value;

use crate::envoy::capture::{istio_iptables, text};
use crate::support::answering_istiod;
use crate::support::faults::{Fault, Says};
use crate::support::namespace::{self, AGENT, Peer};
use crate::support::place::Place;

/// Creates a place in which this user runs the agent's commands.
fn place(istiod: &LocalIstiod, user: u32, variables: &[(&str, &str)]) -> Place {
    let program = namespace::reachable(Path::new(env!("CARGO_BIN_EXE_pilot-agent")));
    let script = format!(
        "shift; exec setpriv --reuid {user} --regid {user} --clear-groups --inh-caps -all -- \
         {} \"$@\"",
        program.display()
    );
    let place = Place::of(istiod)
        .set("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .set("ISTIO_META_INTERCEPTION_MODE", "REDIRECT");
    let variables = variables.iter();
    let place = variables.fold(place, |place, (name, value)| place.set(name, value));
    place.write("resolv.conf", "nameserver 10.9.0.53\n");
    // By default, only root can use the directory.
    std::os::unix::fs::chown(place.path("."), Some(user), None).unwrap();
    place.started_by(&["sh", "-ec", &script, "-"])
}

/// Returns the results of the doctor's checks of the capture rules, for this kind of node.
fn says(place: &Place, kind: &str) -> String {
    let output = place.run(&["doctor", kind, "--json"]);
    let report: Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", text(&output)));
    let groups = report["groups"].as_array().unwrap();
    let group = groups.iter().find(|group| group["name"] == "capture");
    let checks = group.unwrap_or_else(|| panic!("{report:#}"))["checks"].as_array().unwrap();
    let lines = checks.iter().map(|check| {
        let texts = ["level", "found", "code"].map(|member| check[member].as_str());
        let [level, found, code] = texts.map(Option::unwrap_or_default);
        format!("{level}: {found} {code}").trim_end().to_owned()
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[tokio::test(flavor = "multi_thread")]
async fn the_doctor_finds_missing_and_wrong_rules_as_either_user() {
    const TEST: &str = "doctor::capture::the_doctor_finds_missing_and_wrong_rules_as_either_user";
    const MISSING: &str = "CAPTURE_RULES_MISSING";
    const CURE: &[&str] = &["log of the container istio-init", "delete the pod"];
    if !namespace::is_inside(TEST) {
        return;
    }
    let istiod = answering_istiod().await;
    let place = |user, variables: &[_]| place(&istiod, user, variables);
    let judge = async |name, user, variables: &[_], says: Says<'_>| {
        Fault::new(place(user, variables), says).judge(name).await;
    };
    let assert = |user, variables: &[_], words: &[&str]| {
        let said = says(&place(user, variables), "sidecar");
        assert!(words.iter().all(|words| said.contains(words)), "{words:?}: {said}");
    };
    let iptables = |words: &str| {
        let output = istio_iptables(0, words);
        assert!(output.status.success(), "{}", text(&output));
    };
    namespace::add_address("10.9.0.1/24");
    let no_chain: Says = (MISSING, &["rules", "no chain of Istio", "15001 and 15006"], CURE);
    judge("no rules", 0, &[], no_chain).await;
    assert(AGENT, &[], &["skipped", "cannot be read", "NET_ADMIN"]);
    let envoy = TcpListener::bind("127.0.0.1:15006").unwrap();
    let not_redirected: Says =
        (MISSING, &["127.0.0.6:15002 is not redirected", "127.0.0.1:15006"], CURE);
    judge("no rules, without NET_ADMIN", AGENT, &[], not_redirected).await;
    let said = says(&place(AGENT, &[]), "router");
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
        let not_captured: Says = (
            "DNS_NOT_CAPTURED",
            &["DNS queries are not redirected", "port 15053"],
            &["set `ISTIO_META_DNS_CAPTURE`", "delete the pod"],
        );
        judge("rules without DNS", 0, dns, not_captured).await;
        iptables(&format!("-u 1337 --redirect-dns --capture-all-dns {usual}"));
        assert(0, dns, &["ok"]);
        iptables(&format!("-u 2000 {usual}"));
        let own: Says = ("CAPTURE_PROXY_UID", &["user 1337"], &["--proxy-uid", "runAsUser"]);
        judge("rules for another user", 0, &[], own).await;
        let other_user: Says = (MISSING, &["for another user than 1337 (`--proxy-uid`"], CURE);
        judge("rules for another user, without NET_ADMIN", AGENT, &[], other_user).await;
        iptables(&format!("-u 1337 -p 15011 -z 15006 -i * -b * {back_end}"));
        assert(0, &[], &["ok", "lead to ports 15011 and 15006"]);
        iptables(&format!("--cleanup-only {back_end}"));
    }
    drop(envoy);
    // The rules of this version, and a DNS rule that Istio 1.12 leaves behind.
    iptables("-u 1337 -p 15001 -z 15006 -i * -b *");
    let rule = "-p udp -m udp --dport 53 -j REDIRECT --to-ports 15053";
    let words = format!("-t nat -A OUTPUT {rule}");
    namespace::run("iptables", &words.split(' ').collect::<Vec<_>>());
    let named = format!("an earlier version of Istio: nat: -A OUTPUT {rule}");
    let earlier: Says = ("CAPTURE_RULES_EARLIER", &[&named], &["pilot-agent istio-clean-iptables"]);
    judge("a rule of an earlier version", 0, &[], earlier).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_doctor_finds_inbound_connections_that_bypass_envoy() {
    const TEST: &str = "doctor::capture::the_doctor_finds_inbound_connections_that_bypass_envoy";
    const BYPASSED: &str = "CAPTURE_BYPASSED";
    if !namespace::is_inside(TEST) {
        return;
    }
    let istiod = answering_istiod().await;
    let client = Peer::join(&[("10.9.0.1/24", "10.9.0.2/24"), ("fd00::1/64", "fd00::2/64")]);
    let assert = |user, words: &[&str], others: &[&str]| {
        for address in ["10.9.0.1", "fd00::1"] {
            let variables = [("INSTANCE_IP", address)];
            let said = says(&place(&istiod, user, &variables), "sidecar");
            assert!(words.iter().all(|words| said.contains(words)), "{words:?}: {said}");
            assert!(!others.iter().any(|words| said.contains(words)), "{others:?}: {said}");
        }
    };
    let change_rules = |words: &str| {
        for program in ["iptables", "ip6tables"] {
            namespace::run(program, &words.split(' ').collect::<Vec<_>>());
        }
    };
    let _application = TcpListener::bind("[::]:8080").unwrap();
    let _envoy = TcpListener::bind("[::]:15006").unwrap();
    let call = || {
        let connect = |address| client.within(|| TcpStream::connect(address).unwrap());
        [connect("10.9.0.1:8080"), connect("[fd00::1]:8080")]
    };
    let ports = "-b * -d 15090,15021,15020";
    let output = istio_iptables(0, &format!("-p 15001 -z 15006 -u 1337 -i * --dual-stack {ports}"));
    assert!(output.status.success(), "{}", text(&output));
    // A connection that is captured ends at Envoy.
    let captured = call();
    assert(0, &["ok: lead to ports 15001 and 15006"], &["warning"]);
    assert(AGENT, &["ok: outbound: ", "inbound: not checked", "--verify"], &["warning"]);
    change_rules("-t nat -I PREROUTING -p tcp --dport 8080 -j ACCEPT");
    let rule = "nat: -A PREROUTING -p tcp --dport 8080 -j ACCEPT";
    assert(0, &["warning: ", ":8080 over eth0 goes to its destination", rule, BYPASSED], &["ok: "]);
    change_rules("-t nat -D PREROUTING -p tcp --dport 8080 -j ACCEPT");
    change_rules("-t nat -D PREROUTING -p tcp -j ISTIO_INBOUND");
    assert(0, &["error: ", "expected port 15006: no rule leads it", "CAPTURE_RULES_CHANGED"], &[]);
    assert(AGENT, &["inbound: not checked"], &["warning"]);
    let direct = call();
    assert(AGENT, &["warning: a connection from ", ":8080 without Envoy", BYPASSED], &[]);
    drop((captured, direct));
}
