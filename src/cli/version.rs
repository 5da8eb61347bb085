//! The `version` command.
//!
//! Does not ask a running agent: it tells what this binary is.

use clap::Args;
use serde_json::json;

/// The Istio release whose behaviour this agent follows. Istiod decides by it what Envoy's agent
/// understands.
pub const ISTIO_VERSION: &str = "1.32.0";

const AGENT_VERSION: &str = env!("CARGO_PKG_VERSION");

const REVISION: &str = match option_env!("ISTIO_AGENT_REVISION") {
    Some(revision) => revision,
    None => "unknown",
};

#[derive(Args, Clone, Debug)]
pub struct VersionFlags {
    /// Prints the version alone.
    #[arg(short, long)]
    pub short: bool,
    /// Output form: json.
    #[arg(short, long, value_parser = ["json"])]
    pub output: Option<String>,
}

/// What `version` prints.
pub fn text(flags: &VersionFlags) -> String {
    if flags.output.is_some() {
        let info = json!({ "clientVersion": {
            "version": ISTIO_VERSION,
            "revision": REVISION,
            "status": "Clean",
            "tag": AGENT_VERSION,
        }});
        return format!("{info:#}\n");
    }
    if flags.short {
        return format!("client version: {ISTIO_VERSION}");
    }
    format!(
        "client version: {} (istio-agent {AGENT_VERSION}, revision {REVISION})",
        ISTIO_VERSION
    )
}

/// One word for the log.
pub fn full() -> String {
    format!("{ISTIO_VERSION}-{REVISION}-istio-agent-{AGENT_VERSION}")
}
