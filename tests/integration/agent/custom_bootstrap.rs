//! Tests a custom bootstrap with the binary of the agent.

use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;

#[test]
fn a_custom_bootstrap_is_passed_to_envoy_and_kept() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    fs::create_dir_all(root.join("var/run/secrets/istio")).unwrap();
    fs::write(root.join("var/run/secrets/istio/root-cert.pem"), "").unwrap();
    fs::create_dir(root.join("own")).unwrap();
    fs::write(root.join("own/envoy.json"), "{}").unwrap();
    let fake = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/integration/support/fake-envoy");
    symlink(fake, root.join("fake-envoy.exits-cleanly")).unwrap();
    fs::create_dir_all(root.join("etc/istio/pod")).unwrap();
    let no_status_port = "status.sidecar.istio.io/port=\"0\"\n";
    fs::write(root.join("etc/istio/pod/annotations"), no_status_port).unwrap();
    let config = "{customConfigFile: own/envoy.json, binaryPath: ./fake-envoy.exits-cleanly}";
    let ended = Command::new(env!("CARGO_BIN_EXE_pilot-agent"))
        .arg("proxy")
        .current_dir(root)
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .env("INSTANCE_IP", "127.0.0.1")
        .env("PROXY_CONFIG", config)
        .output()
        .unwrap();
    let log = String::from_utf8_lossy(&ended.stdout);
    assert_eq!(ended.status.code(), Some(0), "{log}");
    let arguments = fs::read_to_string(root.join("own/arguments")).unwrap();
    assert!(arguments.starts_with("-c own/envoy.json "), "{arguments}");
    assert!(root.join("own/envoy.json").exists());
    assert!(!root.join("etc/istio/proxy/envoy-rev.json").exists());
}
