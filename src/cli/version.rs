//! The `version` command: the Istio release this agent follows, in the forms pilot-agent prints, and the
//! build of this agent.

use clap::Args;
use serde_json::json;

use crate::version::{AGENT_VERSION, ISTIO_VERSION, REVISION, STATUS};

/// There is no Go in here, and readers of the version expect some word.
const GOLANG_VERSION: &str = "none";

#[derive(Args, Clone, Debug)]
pub struct VersionFlags {
    /// Prints the version alone.
    #[arg(short, long, num_args = 0..=1, require_equals = true, default_value = "false",
          default_missing_value = "true", value_parser = crate::config::flags::truth,
          action = clap::ArgAction::Set)]
    short: bool,
    /// Output form: yaml or json.
    #[arg(short, long, default_value = "", value_parser = output)]
    output: String,
}

/// What `version` prints, without its last line feed.
pub fn text(flags: &VersionFlags) -> String {
    match flags.output.as_str() {
        "json" => json(),
        "yaml" => yaml(),
        _ if flags.short => format!("client version: {ISTIO_VERSION}"),
        _ => format!(
            "client version: version.BuildInfo{{Version:{ISTIO_VERSION:?}, \
             GitRevision:{REVISION:?}, GolangVersion:{GOLANG_VERSION:?}, \
             BuildStatus:{STATUS:?}, GitTag:{ISTIO_VERSION:?}}}\n\
             agent version: istio-agent {AGENT_VERSION}"
        ),
    }
}

fn output(text: &str) -> Result<String, String> {
    match text {
        "" | "json" | "yaml" => Ok(text.to_owned()),
        _ => Err("--output must be 'yaml' or 'json'".to_owned()),
    }
}

const MEMBERS: [(&str, &str); 5] = [
    ("version", ISTIO_VERSION),
    ("revision", REVISION),
    ("golang_version", GOLANG_VERSION),
    ("status", STATUS),
    ("tag", ISTIO_VERSION),
];

fn json() -> String {
    let client: serde_json::Value = MEMBERS.into_iter().collect();
    let agent = json!({ "version": AGENT_VERSION });
    let both = json!({ "clientVersion": client, "agentVersion": agent });
    format!("{both:#}\n")
}

/// Every value in quotes: a revision may look like a number.
fn yaml() -> String {
    let client: String = MEMBERS
        .iter()
        .map(|(name, value)| format!("  {name}: {value:?}\n"))
        .collect();
    format!("clientVersion:\n{client}agentVersion:\n  version: {AGENT_VERSION:?}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(short: bool, output: &str) -> String {
        let output = output.to_owned();
        text(&VersionFlags { short, output })
    }

    #[test]
    fn json_and_yaml_say_the_same_in_istios_shape() {
        let json: serde_json::Value = serde_json::from_str(&printed(false, "json")).expect("JSON");
        let yaml: serde_json::Value =
            serde_saphyr::from_str(&printed(false, "yaml")).expect("YAML");
        assert_eq!(json, yaml);
        let client = json["clientVersion"].as_object().expect("an object");
        let names: Vec<_> = client.keys().map(String::as_str).collect();
        assert_eq!(
            names,
            ["version", "revision", "golang_version", "status", "tag"]
        );
        assert_eq!(client["version"], ISTIO_VERSION);
        assert_eq!(json["agentVersion"]["version"], AGENT_VERSION);
    }

    #[test]
    fn text_begins_as_pilot_agents_and_short_is_one_line() {
        let long = printed(false, "");
        let start = format!("client version: version.BuildInfo{{Version:\"{ISTIO_VERSION}\", ");
        assert!(long.starts_with(&start), "{long}");
        assert_eq!(
            printed(true, ""),
            format!("client version: {ISTIO_VERSION}")
        );
    }
}
