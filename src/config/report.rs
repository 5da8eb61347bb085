//! Reports the effective configuration: every value and its origin, as YAML with comments or as JSON.
//!
//! [`report`] is the configuration of this machine, [`manifest_configuration`] the configuration of a pod manifest.
//! Secrets are hidden. A configuration that cannot be used is reported with its problems.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::environment::{Environment, Row, TABLE};
use super::flags::{Flag, LogFlags, ProxyFlags};
use super::merged::DEFAULT;
use super::pod::{self, Pairs};
use super::{Loader, NOWHERE, Problem};
use crate::problem::{Code, Diagnostics};

/// The sections of settings, each with its value and origin, then the texts of warnings and problems.
#[derive(Debug)]
pub struct Report(Value);

/// Reads the same sources as [`load`](super::load). `root` is the working directory.
pub fn report(
    flags: &ProxyFlags,
    log: &LogFlags,
    all: &[Flag],
    env: &Environment,
    root: &Path,
) -> Report {
    let loader = Loader::read(flags, env, root, pod::interfaces(), None);
    let mut members = loader.proxy_config.printable();
    for (name, value) in &mut members {
        *value = setting(value.take(), loader.origins.find(name));
    }
    // If the configuration cannot be used, these warnings are the only known ones.
    let merge_warnings = loader.notes.warnings.clone();
    let (warnings, problems) = match loader.config(log) {
        // Only a running agent knows whether another process serves the workload's secrets.
        Ok(config) => ([config.warnings, config.authority_problems].concat(), Vec::new()),
        Err(problems) => (merge_warnings, problems),
    };
    // This variable is shown member by member.
    let mut variables = Map::new();
    for row in TABLE.iter().filter(|row| row.name != "PROXY_CONFIG") {
        let (value, origin) = variable(row, env);
        variables.insert(row.name.to_owned(), setting(value.into(), origin));
    }
    let mut flags = Map::new();
    for flag in all.iter().filter(|flag| !flag.is_hidden) {
        let origin = if flag.is_given { "flag" } else { DEFAULT };
        flags.insert(flag.name.clone(), setting(json!(flag.value), origin));
    }
    Report(json!({
        "proxyConfig": members,
        "variables": variables,
        "flags": flags,
        "warnings": texts(&warnings),
        "problems": texts(&problems),
    }))
}

fn setting(value: Value, origin: &str) -> Value {
    json!({ "value": value, "origin": origin })
}

/// Problems that depend on the files and interfaces of the machine.
const MACHINE_DEPENDENT: [Code; 7] = [
    Code::BootstrapOverrideUnreadable,
    Code::DnsResolvConfUnreadable,
    Code::FileMissing,
    Code::FileUnreadable,
    Code::InterfaceUnknown,
    Code::InterfacesUnreadable,
    // The flag overrides the configuration, as in pilot-agent.
    Code::FlagOverridesConfig,
];

/// Reads the configuration of a pod manifest. Returns the members of ProxyConfig that are set, and the problems
/// of its flags, variables and annotations that do not depend on this machine.
pub fn manifest_configuration(
    flags: &ProxyFlags,
    log: &LogFlags,
    env: &Environment,
    annotations: Pairs,
) -> (Map<String, Value>, Diagnostics) {
    let mut loader = Loader::read(flags, env, NOWHERE.as_ref(), Ok(Vec::new()), Some(annotations));
    let mut members = loader.proxy_config.printable();
    members.retain(|name, _| loader.origins.find(name) != DEFAULT);
    let config = loader.build(log);
    let mut notes = loader.notes;
    notes.problems.extend(config.authority_problems);
    notes.warnings = config.warnings;
    for list in [&mut notes.problems, &mut notes.warnings] {
        list.retain(|found| !MACHINE_DEPENDENT.contains(&found.code));
    }
    (members, notes)
}

/// Returns the value to show, and its origin.
fn variable(row: &Row, env: &Environment) -> (String, &'static str) {
    match env.text(row.name) {
        None => (row.default.to_owned(), DEFAULT),
        // The headers of probes may hold credentials, and so may a proxy's URL.
        Some(_) if row.name == "ISTIO_KUBE_APP_PROBERS" => ("(not shown)".to_owned(), "variable"),
        Some(text) if row.name.ends_with("_PROXY") && text.contains('@') => {
            let (_, host) = text.rsplit_once('@').unwrap_or_default();
            (format!("(not shown)@{host}"), "variable")
        }
        Some(text) if (row.is_valid)(text) => (text.to_owned(), "variable"),
        Some(_) => (row.default.to_owned(), "default, as the variable is not of its type"),
    }
}

impl Report {
    pub fn is_usable(&self) -> bool {
        self.0["problems"] == json!([])
    }

    pub fn json(&self) -> Value {
        self.0.clone()
    }

    pub fn yaml(&self) -> String {
        let mut text = String::new();
        for (section, found) in self.0.as_object().into_iter().flatten() {
            if *found != json!([]) {
                text += &format!("{section}:\n");
            }
            for (name, setting) in found.as_object().into_iter().flatten() {
                let origin = setting["origin"].as_str().unwrap_or_default();
                let setting = format!("  {name}: {}", setting["value"]);
                text += &format!("{setting:<60} # {origin}\n");
            }
            for line in found.as_array().into_iter().flatten() {
                text += &format!("  - {line}\n");
            }
        }
        text
    }
}

/// Formats each problem.
pub(super) fn texts(problems: &[Problem]) -> Vec<String> {
    problems.iter().map(ToString::to_string).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tempfile::TempDir;

    use super::*;
    use crate::config::flags;

    fn reported(variables: &[(&str, &str)]) -> Report {
        let root = TempDir::new().expect("a directory");
        let secrets = root.path().join("var/run/secrets/istio");
        fs::create_dir_all(&secrets).expect("made");
        fs::write(secrets.join("root-cert.pem"), "").expect("written");
        let pod = root.path().join("etc/istio/pod");
        fs::create_dir_all(&pod).expect("made");
        let annotation = "proxy.istio.io/config=\"statusPort: 15099\"\n";
        fs::write(pod.join("annotations"), annotation).expect("written");
        let (flags, log, all) = flags::parse("--concurrency 2");
        let env = variables.iter().copied().collect();
        report(&flags, &log, &all, &env, root.path())
    }

    #[test]
    fn every_value_has_its_origin() {
        let report = reported(&[
            ("PROXY_CONFIG", "\nmeshId: m\nproxyMetadata: {TOKEN: hush}"),
            ("TRUST_DOMAIN", "td"),
            ("ISTIO_DELTA_XDS", "maybe"),
            ("HTTPS_PROXY", "http://cart:hush@proxy:3128"),
            (
                "ISTIO_KUBE_APP_PROBERS",
                r#"{"/app-health/a/livez": {"httpGet": {"port": 1, "httpHeaders": [{"name": "A", "value": "hush"}]}}}"#,
            ),
        ]);
        assert!(report.is_usable());
        let json = report.json();
        for (pointer, value, origin) in [
            ("/proxyConfig/proxyAdminPort", json!(15000), "default"),
            ("/proxyConfig/meshId", json!("m"), "PROXY_CONFIG line 2"),
            ("/proxyConfig/concurrency", json!(2), "--concurrency"),
            ("/proxyConfig/statusPort", json!(15099), "proxy.istio.io/config line 1"),
            ("/variables/TRUST_DOMAIN", json!("td"), "variable"),
            ("/variables/HTTPS_PROXY", json!("(not shown)@proxy:3128"), "variable"),
            ("/variables/ECC_CURVE", json!("P256"), "default"),
            (
                "/variables/ISTIO_DELTA_XDS",
                json!("true"),
                "default, as the variable is not of its type",
            ),
            ("/flags/concurrency", json!("2"), "flag"),
            ("/flags/type", json!("sidecar"), "default"),
        ] {
            let expected = json!({ "value": value, "origin": origin });
            assert_eq!(json.pointer(pointer), Some(&expected), "{pointer}");
        }
        assert!(!json.to_string().contains("hush"));
    }

    #[test]
    fn the_yaml_report_has_the_content_of_the_json_report() {
        let report = reported(&[("PROXY_CONFIG", "{tracing: {sampling: 5}, meshId: 'a # b'}")]);
        let text = report.yaml();
        let line = "  statusPort: 15099                                          \
                    # proxy.istio.io/config line 1\n";
        assert!(text.contains(line), "{text}");
        let read: Value = serde_saphyr::from_str(&text).expect("YAML");
        assert_eq!(read["proxyConfig"]["tracing"], json!({"sampling": 5}));
        assert_eq!(read["proxyConfig"]["meshId"], "a # b");
        assert_eq!(read["flags"]["concurrency"], "2");
        assert_eq!(read["warnings"].as_array().map(Vec::len), Some(1));
    }

    #[test]
    fn an_unusable_configuration_is_shown_with_its_problems() {
        let report = reported(&[("PROXY_CONFIG", "{drainDuration: 1, statusPort: x}")]);
        assert!(!report.is_usable());
        assert_eq!(report.json()["problems"].as_array().map(Vec::len), Some(2));
        assert!(report.yaml().contains("problems:\n  - \"drainDuration of "));
    }
}
