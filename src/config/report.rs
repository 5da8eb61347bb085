//! Reports the effective configuration: every value and its origin, as YAML with comments or as JSON.
//!
//! Secrets are hidden. A configuration that cannot be used is reported with its problems.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::environment::{Environment, TABLE};
use super::merged::{DEFAULT, Merged};
use super::{Problem, effective, load, pod_pairs};
use crate::cli::{LogFlags, ProxyFlags, config};
use crate::problem::Diagnostics;

/// The effective configuration and its origins.
#[derive(Debug)]
pub struct Report {
    proxy_config: Vec<Setting>,
    variables: Vec<Setting>,
    flags: Vec<Setting>,
    warnings: Vec<Problem>,
    problems: Vec<Problem>,
}

#[derive(Debug)]
struct Setting {
    name: String,
    value: Value,
    origin: String,
}

/// Reads what [`load`] reads. `root` is the working directory.
pub fn report(flags: &ProxyFlags, log: &LogFlags, env: &Environment, root: &Path) -> Report {
    let mut notes = Diagnostics::default();
    let annotations = pod_pairs(root, "annotations", &mut notes).unwrap_or_default();
    let merged = effective::merge(flags, env, root, &annotations, &mut notes);
    let (warnings, problems) = match load(flags, log, env, root) {
        // Whether another process serves the workload's secrets is known when the agent starts.
        Ok(config) => {
            let warnings = [config.warnings, config.authority_problems];
            (warnings.concat(), Vec::new())
        }
        Err(problems) => (notes.warnings, problems),
    };
    Report {
        proxy_config: proxy_config(&merged),
        variables: variables(env),
        flags: flags_used(flags),
        warnings,
        problems,
    }
}

fn proxy_config(merged: &Merged) -> Vec<Setting> {
    let members = merged.config.printable().into_iter();
    let settings = members.map(|(name, value)| Setting {
        origin: merged.origin(&name).to_owned(),
        name,
        value,
    });
    settings.collect()
}

fn variables(env: &Environment) -> Vec<Setting> {
    // This one is shown member by member.
    let rows = TABLE.iter().filter(|row| row.name != "PROXY_CONFIG");
    let settings = rows.map(|row| {
        let given = env.text(row.name);
        let (value, origin) = match given {
            None => (row.default, DEFAULT),
            // The headers of probes may hold credentials.
            Some(_) if row.name == "ISTIO_KUBE_APP_PROBERS" => ("(not shown)", "variable"),
            Some(text) if (row.is_good)(text) => (text, "variable"),
            Some(_) => (row.default, "default, as the variable is not of its type"),
        };
        Setting {
            name: row.name.to_owned(),
            value: json!(value),
            origin: origin.to_owned(),
        }
    });
    settings.collect()
}

fn flags_used(flags: &ProxyFlags) -> Vec<Setting> {
    let settings = config::flags(flags).into_iter().map(|flag| Setting {
        name: flag.name.to_owned(),
        value: json!(flag.value),
        origin: if flag.is_default { DEFAULT } else { "flag" }.to_owned(),
    });
    settings.collect()
}

impl Report {
    pub fn is_usable(&self) -> bool {
        self.problems.is_empty()
    }

    pub fn json(&self) -> Value {
        let section = |settings: &[Setting]| {
            let entries = settings.iter().map(|setting| {
                let entry = json!({ "value": setting.value, "origin": setting.origin });
                (setting.name.clone(), entry)
            });
            Value::Object(Map::from_iter(entries))
        };
        json!({
            "proxyConfig": section(&self.proxy_config),
            "variables": section(&self.variables),
            "flags": section(&self.flags),
            "warnings": texts(&self.warnings),
            "problems": texts(&self.problems),
        })
    }

    pub fn yaml(&self) -> String {
        let mut text = String::new();
        for (name, settings) in [
            ("proxyConfig", &self.proxy_config),
            ("variables", &self.variables),
            ("flags", &self.flags),
        ] {
            text += &format!("{name}:\n");
            for setting in settings {
                text += &setting.line();
            }
        }
        for (name, problems) in [("warnings", &self.warnings), ("problems", &self.problems)] {
            let lines = texts(problems);
            let lines = lines.iter().map(|line| format!("  - {}\n", json!(line)));
            match lines.collect::<String>() {
                none if none.is_empty() => {}
                lines => text += &format!("{name}:\n{lines}"),
            }
        }
        text
    }
}

impl Setting {
    fn line(&self) -> String {
        let setting = format!("  {}: {}", self.name, self.value);
        format!("{setting:<60} # {}\n", self.origin)
    }
}

fn texts(problems: &[Problem]) -> Vec<String> {
    problems.iter().map(ToString::to_string).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tempfile::TempDir;

    use super::*;
    use crate::cli::{self, Command};

    fn reported(variables: &[(&str, &str)]) -> Report {
        let root = TempDir::new().expect("a directory");
        let secrets = root.path().join("var/run/secrets/istio");
        fs::create_dir_all(&secrets).expect("made");
        fs::write(secrets.join("root-cert.pem"), "").expect("written");
        let pod = root.path().join("etc/istio/pod");
        fs::create_dir_all(&pod).expect("made");
        let annotation = "proxy.istio.io/config=\"statusPort: 15099\"\n";
        fs::write(pod.join("annotations"), annotation).expect("written");
        let line = "pilot-agent config sidecar --concurrency 2";
        let typed = cli::parse(line.split(' ').map(str::to_owned)).expect("flags");
        let Some(Command::Config(flags)) = typed.cli.command else {
            panic!("no config");
        };
        let env = variables.iter().copied().collect();
        report(&flags.proxy, &typed.cli.log, &env, root.path())
    }

    #[test]
    fn every_value_has_its_origin() {
        let report = reported(&[
            ("PROXY_CONFIG", "\nmeshId: m\nproxyMetadata: {TOKEN: hush}"),
            ("TRUST_DOMAIN", "td"),
            ("ISTIO_DELTA_XDS", "maybe"),
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
            (
                "/proxyConfig/statusPort",
                json!(15099),
                "proxy.istio.io/config line 1",
            ),
            ("/variables/TRUST_DOMAIN", json!("td"), "variable"),
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
    fn the_text_is_yaml_that_says_the_same() {
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
