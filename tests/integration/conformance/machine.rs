//! Tests the agent on a machine: the script that starts it there, and its messages to systemd.

use std::collections::HashMap;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;

use crate::support::place::Place;
use crate::support::{PATIENCE, local_istiod};

const SIDECAR: &str = "var/lib/istio/envoy/sidecar.env";
const CLUSTER: &str = "var/lib/istio/envoy/cluster.env";

/// Runs the start script in a directory, with an agent that prints its arguments and variables. Returns this
/// output, or the error output of the script.
fn start(directory: &Path, words: &[&str], variables: &[(&str, &str)]) -> Result<String, String> {
    let agent = directory.join("pilot-agent");
    std::fs::write(&agent, "#!/bin/sh\necho \"ARGUMENTS=$*\"\nexec env\n").unwrap();
    std::fs::set_permissions(&agent, PermissionsExt::from_mode(0o755)).unwrap();
    let script = include_str!("../../../deploy/systemd/start");
    let installed = "agent=/usr/bin/pilot-agent\n";
    assert_eq!(script.matches(installed).count(), 1);
    let script = script.replace(installed, &format!("agent={}\n", agent.display()));
    let envoy = "envoy=/usr/local/bin/envoy\n";
    assert_eq!(script.matches(envoy).count(), 1);
    let script = script.replace(envoy, &format!("envoy={}/of-istio\n", directory.display()));
    let output = Command::new("bash")
        .args(["-c", &script, "start"])
        .args(words)
        .current_dir(directory)
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    if output.status.success() {
        Ok(String::from_utf8(output.stdout).unwrap())
    } else {
        Err(String::from_utf8(output.stderr).unwrap())
    }
}

fn machine(files: &[(&str, &str)]) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for (path, content) in files {
        let path = directory.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }
    directory
}

#[test]
fn the_start_script_gives_the_agent_what_the_files_of_istioctl_say() {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let host = host.trim().split('.').next().unwrap();
    let defaults = "serviceCluster: rawvm\ncontrolPlaneAuthPolicy: MUTUAL_TLS";
    let named =
        "serviceCluster: cart.shop\ncontrolPlaneAuthPolicy: NONE\ndiscoveryAddress: pilot:1";
    let istioctl = "ISTIO_NAMESPACE='shop'\nISTIO_SERVICE='cart.shop'\nISTIO_SERVICE_CIDR='*'\n\
        ISTIO_METAJSON_LABELS='{\"app\":\"cart\"}'\nISTIO_SVC_IP='10.0.0.7'\nSERVICE_ACCOUNT='cart'\n";
    let windows = istioctl.replace('\n', "\r\n");
    let from_istioctl = [
        ("POD_NAMESPACE", "shop"),
        ("INSTANCE_IP", "10.0.0.7"),
        ("SERVICE_ACCOUNT", "cart"),
        ("ISTIO_SERVICE_CIDR", "*"),
        ("ISTIO_METAJSON_LABELS", "{\"app\":\"cart\"}"),
    ];
    for (sidecar, cluster, variables, expected) in [
        (
            None,
            None,
            &[][..],
            &[
                ("ARGUMENTS", "proxy"),
                ("INSTANCE_IP", ""),
                ("POD_NAME", host),
                ("POD_NAMESPACE", "default"),
                ("CA_ADDR", "istiod.istio-system.svc:15012"),
                ("PROXY_CONFIG", defaults),
                ("PROV_CERT", "./etc/certs"),
                ("OUTPUT_CERTS", "./etc/certs"),
            ][..],
        ),
        (None, Some(istioctl), &[], &from_istioctl),
        (None, Some(&*windows), &[], &from_istioctl),
        (
            Some(
                "export A='it''s' # a comment\nB=\"$A $NONE x\"\n\nC=of_sidecar\nISTIO_PILOT_PORT=5",
            ),
            Some("C=of_cluster\nPROV_CERT=\nISTIO_SYSTEM_NAMESPACE=mesh"),
            &[("C", "of_unit"), ("OUTPUT_CERTS", "/certs")],
            &[
                ("A", "its"),
                ("B", "its  x"),
                ("C", "of_cluster"),
                ("PROV_CERT", ""),
                ("OUTPUT_CERTS", "/certs"),
                ("CA_ADDR", "istiod.mesh.svc:5"),
            ],
        ),
        (
            Some("ISTIO_SERVICE=cart.shop\nISTIO_CP_AUTH=NONE\nPILOT_ADDRESS=pilot:1"),
            None,
            &[("ISTIO_AGENT_FLAGS", " --concurrency 2  --profiling=false "), ("POD_NAME", "m")],
            &[
                ("ARGUMENTS", "proxy --concurrency 2 --profiling=false"),
                ("CA_ADDR", "pilot:1"),
                ("PROXY_CONFIG", named),
                ("POD_NAME", "m"),
            ],
        ),
        (
            Some(
                "agent=/bin/false\nCA_ADDR=ca:1\nISTIO_PILOT_PORT=5\nPROXY_CONFIG='concurrency: 2'",
            ),
            None,
            &[("INSTANCE_IP", "10.0.0.8"), ("ISTIO_INBOUND_INTERCEPTION_MODE", "TPROXY")],
            &[
                ("CA_ADDR", "ca:1"),
                ("INSTANCE_IP", "10.0.0.8"),
                ("PROXY_CONFIG", "concurrency: 2\ndiscoveryAddress: istiod.istio-system.svc:5"),
            ],
        ),
    ] {
        let files = [(SIDECAR, sidecar), (CLUSTER, cluster)];
        let files = files.map(|(path, content)| content.map(|content| (path, content)));
        let files: Vec<_> = files.into_iter().flatten().collect();
        let printed = start(machine(&files).path(), &[], variables).unwrap();
        // A line without `=` continues the value of the line before.
        let mut found: HashMap<&str, String> = HashMap::new();
        let mut last = "";
        for line in printed.lines() {
            match line.split_once('=') {
                Some((name, value)) => {
                    last = name;
                    found.insert(name, value.to_owned());
                }
                None => *found.get_mut(last).unwrap() += &format!("\n{line}"),
            }
        }
        for (name, value) in expected {
            assert_eq!(found.get(name).map(|v| &**v), Some(*value), "{name}: {files:?}");
        }
    }
}

#[test]
fn the_start_script_finds_envoy_in_path_unless_configured() {
    const MESH: &str = "etc/istio/config/mesh";
    let named = "{\"defaultConfig\": {\"binaryPath\": \"/opt/envoy\"}}";
    for (files, proxy_config, expected) in [
        (&[][..], "concurrency: 2", true),
        (&[(MESH, "defaultConfig: {}")], "concurrency: 2", true),
        (&[(MESH, named)], "concurrency: 2", false),
        (&[], "binaryPath: /opt/envoy", false),
        (&[], " {\"concurrency\": 2}", false),
        (&[("of-istio", "")], "concurrency: 2", false),
    ] {
        let machine = machine(files);
        let executable = |name: &str| {
            let path = machine.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, "").unwrap();
            std::fs::set_permissions(path, PermissionsExt::from_mode(0o755)).unwrap();
        };
        executable("bin/envoy");
        if files.iter().any(|(path, _)| *path == "of-istio") {
            executable("of-istio");
        }
        let bin = machine.path().join("bin");
        let path = format!("/usr/sbin:/usr/bin:/sbin:/bin:{}", bin.display());
        let variables = [("PATH", &*path), ("PROXY_CONFIG", proxy_config)];
        let printed = start(machine.path(), &[], &variables).unwrap();
        let found =
            printed.contains(&format!("{proxy_config}\nbinaryPath: {}/envoy\n", bin.display()));
        assert_eq!(found, expected, "{files:?} {proxy_config}: {printed}");
        assert!(found || !printed.contains("bin/envoy"), "{printed}");
    }
}

#[test]
fn the_start_script_names_a_file_that_it_cannot_use() {
    for (content, expected) in [
        ("A='no end\n", "cluster.env is not made of shell assignments"),
        ("ISTIO NAMESPACE=shop\n", "cluster.env is not made of shell assignments"),
    ] {
        let said = start(machine(&[(CLUSTER, content)]).path(), &[], &[]).unwrap_err();
        assert!(said.contains(expected), "{content:?}: {said}");
    }
    let folder = machine(&[(&format!("{CLUSTER}/file"), "")]);
    let said = start(folder.path(), &[], &[]).unwrap_err();
    assert!(said.contains("cluster.env is no file that"), "{said}");
    let said = start(machine(&[]).path(), &["stop"], &[]).unwrap_err();
    assert!(said.contains("'stop' is not prepare, clean or doctor"), "{said}");
}

#[test]
fn the_doctor_has_the_settings_of_the_unit_and_of_istioctl() {
    const DEFAULT: &str = "etc/default/istio-agent";
    let unit = "# A comment\nISTIO_AGENT_FLAGS=--concurrency 2  --profiling=false\nA=\"x y\"\n\
        ISTIO_SVC_IP=192.0.2.1\n#B=unset\nC=of_unit\n";
    let files = [(DEFAULT, unit), (CLUSTER, "C=of_cluster\n")];
    let printed = start(machine(&files).path(), &["doctor", "--json"], &[]).unwrap();
    for expected in [
        "ARGUMENTS=doctor --concurrency 2 --profiling=false --json",
        "A=x y",
        "C=of_cluster",
        "INSTANCE_IP=192.0.2.1",
    ] {
        assert!(printed.lines().any(|line| line == expected), "{expected}: {printed}");
    }
    assert!(!printed.contains("unset"), "{printed}");
    // For the unit, systemd reads this file, and the script does not.
    let printed = start(machine(&files).path(), &[], &[]).unwrap();
    assert!(printed.starts_with("ARGUMENTS=proxy\n"), "{printed}");
}

#[test]
fn the_start_script_does_not_remove_custom_iptables_rules() {
    for (custom, expected) in [("", "istio-iptables --cleanup-only"), ("true", "")] {
        let variables = [("ISTIO_CUSTOM_IP_TABLES", custom)];
        let printed = start(machine(&[]).path(), &["clean"], &variables).unwrap();
        let arguments = printed.lines().find_map(|line| line.strip_prefix("ARGUMENTS="));
        assert_eq!(arguments.unwrap_or_default(), expected);
    }
}

/// Receives messages as systemd until `last` arrives, and returns them.
fn receive_until(systemd: &UnixDatagram, last: &str) -> Vec<String> {
    let mut heard = Vec::new();
    while heard.last().is_none_or(|message| message != last) {
        let mut buffer = [0; 64];
        let length = systemd.recv(&mut buffer).expect("a message in time");
        heard.push(String::from_utf8_lossy(&buffer[..length]).into_owned());
    }
    heard
}

#[tokio::test]
async fn systemd_gets_readiness_and_watchdog_messages_unless_the_agent_hangs() {
    let istiod = local_istiod().await;
    let place = Place::of(&istiod);
    let socket = place.path("notify");
    let systemd = UnixDatagram::bind(&socket).unwrap();
    systemd.set_read_timeout(Some(PATIENCE)).unwrap();
    let place = place.set("NOTIFY_SOCKET", socket.to_str().unwrap()).set("WATCHDOG_USEC", "100000");
    let agent = place.start().await;
    receive_until(&systemd, "READY=1");
    receive_until(&systemd, "WATCHDOG=1");
    agent.signal(Signal::STOP);
    systemd.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let mut buffer = [0; 64];
    // These messages were sent before the agent stopped.
    while systemd.recv(&mut buffer).is_ok() {}
    agent.signal(Signal::CONT);
    systemd.set_read_timeout(Some(PATIENCE)).unwrap();
    receive_until(&systemd, "WATCHDOG=1");
    agent.terminate();
    assert_eq!(agent.ends().await.0, 0);
}
