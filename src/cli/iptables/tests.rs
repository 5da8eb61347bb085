//! Tests command lines of `istio-iptables`, and compares their rules with the golden files in
//! `tests/golden/capture`.
//!
//! A golden file begins with the command line, which `variables`, `nameservers` and `v6` may follow. The rest is
//! the output of a dry run. `capture-nftables` has the same files for `--native-nftables`.
//! `UPDATE_GOLDEN=1` rewrites the files.

use std::fs;
use std::io::Write;
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::Stdio;

use super::machine::{captured, families, field};
use super::*;
use crate::capture::config::{Host, Selection, Settings};
use crate::capture::iptables::saved::Saved;
use crate::capture::layout::Layout;
use crate::capture::rules::{Family, Id};
use crate::cli::{Command, ParseError, parse};

/// Parses a command line, and returns its flags.
fn given(line: &str) -> Vec<Flag> {
    let words = line.split(' ').filter(|word| !word.is_empty());
    let words = words.map(|word| word.trim_matches('\'').to_owned());
    let line = ["pilot-agent".to_owned()].into_iter().chain(words);
    let typed = parse(line).expect("a command line");
    assert!(matches!(typed.cli.command, Some(Command::Iptables(_))));
    typed.flags
}

fn flags(line: &str, variables: &[(&str, &str)]) -> IptablesFlags {
    let environment = variables.iter().copied().collect();
    let arguments = flags::arguments(&given(line), &environment);
    IptablesFlags::read(&arguments).expect("flags")
}

fn settings(line: &str, variables: &[(&str, &str)]) -> Settings {
    flags(line, variables).settings
}

/// Returns the rules in which root's number replaces all names of users and groups.
fn rules_of_root(mut config: Config) -> Rules {
    let (Selection::AllBut(groups) | Selection::Only(groups)) = &mut config.owner_groups;
    for id in config.uids.iter_mut().chain(&mut config.gids).chain(groups) {
        if matches!(id, Id::Name(_)) {
            *id = Id::from(0);
        }
    }
    Rules::new(&config)
}

/// Returns the header of a golden file, and the configuration that the header describes.
fn configured(file: &str) -> (String, Config) {
    let header: Vec<_> = file.lines().take_while(|l| l.starts_with("# ")).collect();
    let line = header[0].trim_start_matches("# ");
    let (mut host, mut variables) = (Host::default(), Vec::new());
    for each in &header[1..] {
        match each.trim_start_matches("# ").split_once(": ") {
            None if *each == "# v6" => host.has_v6 = true,
            Some(("nameservers", list)) => {
                let servers = list.split(' ').map(|server| server.parse().expect("an address"));
                host.nameservers = servers.collect();
            }
            Some(("variables", list)) => {
                let pairs = list.split(' ');
                variables = pairs.map(|pair| pair.split_once('=').expect("NAME=value")).collect();
            }
            other => panic!("{other:?} in {file}"),
        }
    }
    let (config, _) = Config::check(&settings(line, &variables), &host).expect("a configuration");
    (header.join("\n") + "\n", config)
}

#[test]
fn rules_equal_the_golden_files() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/capture");
    let mut count = 0;
    for entry in fs::read_dir(&folder).expect("golden files") {
        let path = entry.expect("an entry").path();
        let (header, config) = configured(&fs::read_to_string(&path).expect("a golden file"));
        let nftables = header.replacen('\n', " --native-nftables\n", 1);
        let rules = Rules::new(&config);
        let name = path.file_name().expect("a name");
        for (path, text) in [
            (
                folder.with_file_name("capture-nftables").join(name),
                nftables + &nftables::transaction(&rules),
            ),
            (path, header + &iptables::dry_run(&rules)),
        ] {
            #[expect(clippy::disallowed_methods, reason = "of the tests, not the agent")]
            if std::env::var_os("UPDATE_GOLDEN").is_some() {
                fs::write(&path, text).expect("written");
            } else {
                let file = fs::read_to_string(&path).unwrap_or_default();
                assert_eq!(text, file, "{}", path.display());
            }
        }
        count += 1;
    }
    assert!(count >= 20, "{count} golden files");
}

/// Each file has the arguments and variables of istio-validation, and the rules that Istio's CNI plugin set up
/// in its pod, in the output of `iptables-save` or `nft -j list ruleset`.
#[test]
fn verify_with_istio_validations_arguments_accepts_the_cni_plugins_rules() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/capture-cni");
    for name in ["usual", "annotations", "tproxy"] {
        for (suffix, is_native) in [("", false), ("-nftables", true)] {
            let file = fs::read_to_string(folder.join(name.to_owned() + suffix)).expect(name);
            let mut lines = file.splitn(3, '\n');
            let mut header = |start| lines.next().and_then(|line: &str| line.strip_prefix(start));
            let line = header("# ").expect("arguments").to_owned() + " --verify";
            let variables = header("# variables: ").expect("variables").split(' ');
            let environment = variables.filter_map(|it| it.split_once('=')).collect();
            let saved = lines.next().expect("rules");
            let flags = read(&flags::arguments(&given(&line), &environment)).expect("flags");
            let (config, _) = Config::check(&flags.settings, &Host::default()).expect("settings");
            let rules = Rules::new(&config);
            for family in [Family::V4, Family::V6] {
                let (versions, found) = if is_native {
                    let found = nftables::parse(saved.as_bytes(), family).expect("rules");
                    (nftables::versions(&rules, family), found)
                } else if family == Family::V4 {
                    let found = Saved::parse(saved).expect("rules").layout();
                    (vec![Layout::new(&rules, family)], found)
                } else {
                    // The pods have no IPv6 address.
                    continue;
                };
                let findings = verify::compare(&versions, &found, family);
                let is_named = is_native && family == Family::V6;
                assert_eq!(findings.len(), usize::from(is_named), "{name}: {findings:#?}");
                assert!(!findings.iter().any(Finding::affects_traffic), "{findings:#?}");
                // Missing rules are found with these arguments, too.
                let without = verify::compare(&versions, &Layout::default(), family);
                assert!(without.iter().any(Finding::affects_traffic), "{name}");
            }
        }
    }
}

#[test]
fn iptables_rules_read_from_the_kernel_equal_those_written() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/capture");
    for entry in fs::read_dir(folder).expect("golden files") {
        let path = entry.expect("an entry").path();
        let (_, config) = configured(&fs::read_to_string(&path).expect("a golden file"));
        let rules = Rules::new(&config);
        // Every machine has the user and the group root. The kernel lists their number in place of the name.
        let of_root = rules_of_root(config);
        for (family, program) in [(Family::V4, "iptables"), (Family::V6, "ip6tables")] {
            let wanted = Layout::new(&of_root, family);
            let text = iptables::restore(&rules, family);
            let words = text.split(' ').map(|word| match word {
                "envoy" | "mesh" | "web" | "backup" | "java" | "ftp" => "root",
                word => word,
            });
            let text = words.collect::<Vec<_>>().join(" ");
            for kind in ["legacy", "nft"] {
                let program = format!("{program}-{kind}");
                let script = format!("{program}-restore --noflush && {program}-save --counters");
                let Some(saved) = in_namespace(&script, &text) else {
                    return;
                };
                let found = Saved::parse(&saved).expect("a text").layout();
                assert_eq!(found, wanted, "{program}, {}:\n{saved}", path.display());
            }
        }
    }
}

#[test]
fn nft_rules_read_from_the_kernel_equal_those_written() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/capture");
    for entry in fs::read_dir(folder).expect("golden files") {
        let path = entry.expect("an entry").path();
        let (_, config) = configured(&fs::read_to_string(&path).expect("a golden file"));
        let rules = Rules::new(&config);
        let of_root = rules_of_root(config);
        let mut text = nftables::transaction(&rules);
        for name in ["envoy", "mesh", "web", "backup", "java", "ftp"] {
            text = text.replace(&format!("\"{name}\""), "\"root\"");
        }
        let Some(listed) = in_namespace("nft -f - && nft -j list ruleset", &text) else {
            return;
        };
        for family in [Family::V4, Family::V6] {
            let found = nftables::parse(listed.as_bytes(), family).expect("a rule set");
            let wanted = nftables::versions(&of_root, family).remove(0);
            assert_eq!(found, wanted, "{}:\n{listed}", path.display());
        }
    }
}

/// Runs a script with the input `text` in a new network namespace, which has no rules. Returns its output; None
/// on a machine without namespaces.
fn in_namespace(script: &str, text: &str) -> Option<String> {
    let mut child = std::process::Command::new("unshare");
    child.args(["--net", "sh", "-c", script]);
    child.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = child.spawn().expect("unshare");
    let mut input = child.stdin.take().expect("a pipe");
    // This fails on a machine without namespaces, because nothing reads the input.
    let _ = input.write_all(text.as_bytes());
    drop(input);
    let output = child.wait_with_output().expect("an end");
    if output.status.success() {
        return Some(String::from_utf8(output.stdout).expect("text"));
    }
    #[expect(clippy::disallowed_methods, reason = "of the tests, not the agent")]
    let is_required = std::env::var_os("NETNS_TESTS").is_some();
    assert!(!is_required, "{script}: {}:\n{text}", output.status);
    eprintln!("skipped: it takes root, network namespaces and `{script}`");
    None
}

#[test]
fn a_flag_beats_its_variables_and_the_second_variable_the_first() {
    let ports = |line: &str, variables: &[(&str, &str)]| {
        let found = settings(line, variables);
        (found.inbound_capture_port, found.redirect_dns)
    };
    let variables = [("INBOUND_CAPTURE_PORT", "1"), ("REDIRECT_DNS", "true")];
    let line = "istio-iptables";
    assert_eq!(ports(line, &[]), ("15006".to_owned(), false));
    assert_eq!(ports(line, &variables), ("1".to_owned(), true));
    let line = "istio-iptables -z 2 --redirect-dns=false";
    assert_eq!(ports(line, &variables), ("2".to_owned(), false));
    let stronger = [("REDIRECT_DNS", "true"), ("ISTIO_META_DNS_CAPTURE", "false")];
    assert!(!settings("istio-iptables", &stronger).redirect_dns);
    let ignored = [("REDIRECT_DNS", "true"), ("ISTIO_META_DNS_CAPTURE", "on")];
    assert!(settings("istio-iptables", &ignored).redirect_dns);
    let stronger = [("DROP_INVALID", "0"), ("INVALID_DROP", "1")];
    assert!(settings("istio-iptables", &stronger).drop_invalid);
    // `--envoy-port` has no variable. An empty variable of another flag overrides its default.
    let none = [("ENVOY_PORT", "1"), ("ISTIO_OUTBOUND_OWNER_GROUPS", "")];
    let found = settings("istio-iptables", &none);
    assert_eq!(
        (found.envoy_port.as_str(), found.istio_outbound_owner_groups.as_str()),
        ("15001", "")
    );
}

#[test]
fn the_lines_of_istios_templates_and_scripts_are_understood() {
    for line in [
        "istio-iptables -p 15001 -z 15006 -u 1337 -m REDIRECT -i '*' -x '' -b '*' -d 15090,15021,15020 \
         --log_output_level=default:info --run-validation --skip-rule-apply",
        "istio-iptables -p 15001 -z 15006 -e 15008 -u 1 -g 2 -m TPROXY -b 1 -d 2 -c eth0 -i 10.0.0.0/8 \
         -x 10.1.0.0/16 -q 3 -o 4 -k eth1 -t 1337 -r 133 -n --iptables-probe-port 15002 \
         --probe-timeout 5s --capture-all-dns --drop-invalid=true --dual-stack \
         --network-namespace=/x --cni-mode --reconcile --force-apply --native-nftables \
         --force-iptables-binary nft",
        "istio-iptables --cleanup-only proxy",
    ] {
        given(line);
    }
    for line in ["--old", "--probe-timeout 5", "--iptables-probe-port 65536", "-n=maybe"] {
        let line = format!("pilot-agent istio-iptables {line}");
        let result = parse(line.split(' ').map(str::to_owned));
        assert!(matches!(result, Err(ParseError::Invalid(_))), "{line}");
    }
}

#[tokio::test]
async fn a_dry_run_writes_the_file_of_its_variable() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("rules");
    let file = path.to_str().expect("text").to_owned();
    let environment = [("DRY_RUN_FILE_PATH", file)].into_iter().collect();
    match run(&given("istio-iptables -n -i *"), false, &environment).await {
        Ok((text, _)) => assert_eq!(fs::read_to_string(&path).expect("a file"), text),
        // The machine has no network.
        Err(error) => assert_eq!(error.to_string(), "no valid local IP address found"),
    }
}

#[test]
fn modes_and_probe_settings_are_read_from_flags_and_variables() {
    let variables = [
        ("RECONCILE", "true"),
        ("FORCE_APPLY", "1"),
        ("CNI_MODE", "t"),
        ("NETWORK_NAMESPACE", "/proc/1/ns/net"),
        ("IPTABLES_PROBE_PORT", "15"),
        ("PROBE_TIMEOUT", "90s"),
    ];
    let found = flags("istio-iptables", &variables);
    assert!(found.reconcile && found.force_apply && found.cni_mode);
    assert_eq!(found.network_namespace, "/proc/1/ns/net");
    assert_eq!((found.iptables_probe_port, found.probe_timeout.as_secs()), (15, 90));
    let line = "istio-iptables --reconcile=false --iptables-probe-port 16 --probe-timeout 1m";
    let found = flags(line, &variables);
    assert!(!found.reconcile && found.force_apply);
    assert_eq!((found.iptables_probe_port, found.probe_timeout.as_secs()), (16, 60));
    for ignored in [&[] as &[_], &[("IPTABLES_PROBE_PORT", "65536"), ("PROBE_TIMEOUT", "5")]] {
        let found = flags("istio-iptables", ignored);
        assert_eq!((found.iptables_probe_port, found.probe_timeout.as_secs()), (15002, 5));
    }
}

#[test]
fn istio_clean_iptables_is_a_command() {
    let line = "pilot-agent istio-clean-iptables -u 5";
    let parsed = parse(line.split(' ').map(str::to_owned)).expect(line);
    let command = parsed.cli.command;
    assert!(matches!(command, Some(Command::CleanIptables(_))));
    let arguments = flags::arguments(&parsed.flags, &Environment::default());
    assert_eq!(arguments, ["--proxy-uid=5"]);
}

#[test]
fn only_servers_at_port_53_are_captured() {
    let servers = ["10.0.0.1:53", "10.0.0.2:5353", "[2001:db8::1]:53"];
    let servers = servers.map(|server| server.parse().expect(server));
    let expected: [IpAddr; 2] = ["10.0.0.1", "2001:db8::1"].map(|text| text.parse().expect(text));
    assert_eq!(captured(&servers), expected);
}

#[test]
fn the_first_address_decides_on_ipv6_and_any_with_dual_stack() {
    for (addresses, single, dual) in [
        ("", None, None),
        ("127.0.0.1 169.254.1.1 ::1 fe80::1 ff02::1 224.0.0.1", None, None),
        ("127.0.0.1 10.0.0.1 2001:db8::1", Some(false), Some(true)),
        ("fe80::1 2001:db8::1 10.0.0.1", Some(true), Some(true)),
        ("10.0.0.1 10.0.0.2", Some(false), Some(false)),
        ("::ffff:10.0.0.1", Some(false), Some(false)),
    ] {
        let parsed = || addresses.split_whitespace().map(|a| a.parse().expect(a));
        let has_v6 = |is_dual| families(parsed(), is_dual).map(|(_, has_v6)| has_v6);
        assert_eq!(has_v6(false), single, "{addresses}");
        assert_eq!(has_v6(true), dual, "{addresses}");
    }
}

#[test]
fn the_user_of_envoy_is_found_by_name() {
    let passwd =
        "root:x:0:0::/:/bin/sh\nbroken\nistio-proxy:x:1338:1338::/:/bin/false\nbad:x:y:1::/:";
    for (user, uid) in [
        ("istio-proxy", Some(1338)),
        ("root", Some(0)),
        ("broken", None),
        ("bad", None),
        ("x", None),
    ] {
        assert_eq!(field(passwd, 0, user, 2), uid, "{user}");
    }
}
