//! Implements the `version` command: prints the version of Istio that is sent to istiod, in the formats of
//! pilot-agent, and the build of this agent.

use clap::Args;
use serde_json::{Value, json};

use crate::config::environment::{Environment, ISTIO_META_ISTIO_VERSION};
use crate::problem::Problem;
use crate::runtime::lifecycle::BoxError;
use crate::standby;
use crate::trust::compliance;
use crate::version::{self as build, AGENT_VERSION, REVISION, STATUS};

/// Programs that read the version expect a word. This agent is not built with Go.
const GOLANG_VERSION: &str = "none";

#[derive(Args, Clone, Debug, Default)]
pub struct VersionFlags {
    /// Words, which pilot-agent ignores too.
    #[arg(hide = true)]
    ignored: Vec<String>,
    /// Prints only the version.
    #[arg(short, long, num_args = 0..=1, require_equals = true, default_value = "false",
          default_missing_value = "true", value_parser = crate::config::flags::parse_bool,
          action = clap::ArgAction::Set)]
    short: bool,
    /// Output format: yaml or json.
    #[arg(short, long, default_value = "", value_parser = output)]
    output: String,
}

/// Logs the version.
pub fn announce(env: &Environment) -> Result<(), Problem> {
    tracing::info!("Version {}", build::full(&istio(env)?));
    tracing::info!("cryptographic module: {}", compliance::module());
    Ok(())
}

/// Returns the version of Istio that is sent to istiod. Fails if the file with the image's version is unreadable.
pub(super) fn istio(env: &Environment) -> Result<String, Problem> {
    match env.get(&ISTIO_META_ISTIO_VERSION) {
        unset if unset.is_empty() => build::istio(),
        version => Ok(version),
    }
}

/// Returns the output of `version`. As in pilot-agent, JSON and YAML end with an empty line.
pub fn text(flags: &VersionFlags, env: &Environment) -> Result<String, Problem> {
    let istio = istio(env)?;
    Ok(match flags.output.as_str() {
        "json" => format!("{:#}\n\n", build_info(&istio)),
        "yaml" => yaml(&build_info(&istio)) + "\n",
        _ if flags.short => format!("client version: {istio}"),
        _ => format!(
            "client version: version.BuildInfo{{Version:{istio:?}, \
             GitRevision:{REVISION:?}, GolangVersion:{GOLANG_VERSION:?}, \
             BuildStatus:{STATUS:?}, GitTag:{istio:?}}}\n\
             agent version: istio-agent {AGENT_VERSION}\n\
             cryptographic module: {}{}",
            compliance::module(),
            standby::version_text(env).map_or_else(String::new, |text| format!("\n{text}")),
        ),
    })
}

pub(super) fn output(text: &str) -> Result<String, BoxError> {
    match text {
        "" | "json" | "yaml" => Ok(text.to_owned()),
        _ => Err("--output must be 'yaml' or 'json'".into()),
    }
}

fn build_info(istio: &str) -> Value {
    json!({
        "clientVersion": {
            "version": istio,
            "revision": REVISION,
            "golang_version": GOLANG_VERSION,
            "status": STATUS,
            "tag": istio,
        },
        "agentVersion": {"version": AGENT_VERSION, "cryptographicModule": compliance::module()},
    })
}

/// Renders two levels of YAML. Every value is in quotes, because a revision may look like a number.
fn yaml(info: &Value) -> String {
    let mut text = String::new();
    for (section, members) in info.as_object().into_iter().flatten() {
        text += &format!("{section}:\n");
        for (name, value) in members.as_object().into_iter().flatten() {
            text += &format!("  {name}: {value}\n");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(short: bool, output: &str) -> String {
        let output = output.to_owned();
        let env = Environment::from_iter([("ISTIO_META_ISTIO_VERSION", "1.28.3")]);
        let flags = VersionFlags { short, output, ..VersionFlags::default() };
        text(&flags, &env).expect("a version")
    }

    #[test]
    fn json_and_yaml_say_the_same_in_istios_shape() {
        let json: Value = serde_json::from_str(&printed(false, "json")).expect("JSON");
        let yaml: Value = serde_saphyr::from_str(&printed(false, "yaml")).expect("YAML");
        assert_eq!(json, yaml);
        let client = json["clientVersion"].as_object().expect("an object");
        let names: Vec<_> = client.keys().map(String::as_str).collect();
        assert_eq!(names, ["version", "revision", "golang_version", "status", "tag"]);
        assert_eq!(client["version"], "1.28.3");
        assert_eq!(json["agentVersion"]["version"], AGENT_VERSION);
    }

    #[test]
    fn text_begins_as_pilot_agents_and_short_is_one_line() {
        let long = printed(false, "");
        let start = "client version: version.BuildInfo{Version:\"1.28.3\", ";
        assert!(long.starts_with(start), "{long}");
        assert_eq!(printed(true, ""), "client version: 1.28.3");
    }
}
