//! Which metrics are merged into one page.
//!
//! The application's are a sidecar's matter; gateways have none.
//!
//! Does not ask for any.

use super::Sources;
use super::environment as variables;
use super::pod::NodeType;
use crate::scrape::targets::{self, Target};
use crate::{bootstrap, scrape};

const ANNOTATIONS: &str = "ISTIO_PROMETHEUS_ANNOTATIONS";
/// The status port of an agent that has none configured.
const DEFAULT_PORT: u16 = 15020;

impl Sources<'_> {
    pub(super) fn scrape(&mut self, bootstrap: &bootstrap::Config) -> scrape::Config {
        let is_merged = self.get(&variables::PILOT_AGENT_MERGE_ENVOY_STATS);
        let has_envoy = !self.get(&variables::DISABLE_ENVOY);
        scrape::Config {
            envoy_port: (is_merged && has_envoy).then_some(bootstrap.prometheus_port),
            targets: self.targets(bootstrap.agent_port.unwrap_or(DEFAULT_PORT)),
            limit: self.get(&variables::ISTIO_AGENT_SCRAPE_LIMIT_BYTES).into(),
            timeout: self.get(&variables::ISTIO_AGENT_SCRAPE_TIMEOUT),
        }
    }

    fn targets(&mut self, status_port: u16) -> Vec<Target> {
        if self.flags.kind != NodeType::Sidecar {
            return Vec::new();
        }
        let Some(json) = self.env.text(ANNOTATIONS) else {
            return Vec::new();
        };
        targets::parse(json, status_port).unwrap_or_else(|error| {
            let expected = format!("targets that can be scraped: it has {error}");
            self.problem(ANNOTATIONS, json, expected);
            Vec::new()
        })
    }
}
