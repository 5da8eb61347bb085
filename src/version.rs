//! The version of this build, and of the Istio release it follows.

use crate::metrics::Registry;

/// The Istio release whose behaviour this agent follows. Istiod decides by it what Envoy's agent
/// understands.
pub const ISTIO_VERSION: &str = "1.32.0";

pub const AGENT_VERSION: &str = env!("CARGO_PKG_VERSION");

pub const REVISION: &str = match option_env!("ISTIO_AGENT_REVISION") {
    Some(revision) => revision,
    None => "unknown",
};

/// `Clean` or `Modified`, given at build time.
pub const STATUS: &str = match option_env!("ISTIO_AGENT_STATUS") {
    Some(status) => status,
    None => "unknown",
};

/// Records the build as a metric.
pub fn publish(registry: &Registry) {
    const LABELS: &[&str; 4] = &["version", "istio_version", "revision", "status"];
    let help = "What this agent was built from; always 1.";
    let builds = registry.gauges("istio_agent_build_info", help, LABELS);
    let build = builds.with([AGENT_VERSION, ISTIO_VERSION, REVISION, STATUS]);
    build.set(1.0);
}

/// The version for logs.
pub fn full() -> String {
    format!("{ISTIO_VERSION}-{REVISION}-{STATUS} (istio-agent {AGENT_VERSION})")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_build_is_a_metric() {
        let registry = Registry::default();
        publish(&registry);
        let page = registry.render();
        let labels = format!("version=\"{AGENT_VERSION}\",istio_version=\"{ISTIO_VERSION}\"");
        assert!(
            page.contains(&format!("istio_agent_build_info{{{labels},")),
            "{page}"
        );
        assert!(page.ends_with("} 1\n"), "{page}");
    }
}
