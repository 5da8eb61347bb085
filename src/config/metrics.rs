//! The sources of merged metrics. Only sidecars have an application to scrape.

use super::Sources;
use super::environment as variables;
use super::pod::NodeType;
use crate::scrape::targets::{self, Target};
use crate::{bootstrap, scrape};

const ANNOTATIONS: &str = "ISTIO_PROMETHEUS_ANNOTATIONS";
/// The status port of an agent without a configured one.
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

#[cfg(test)]
mod tests {
    use crate::config::tests::machine;

    const TARGETS: &str = r#"{"targets":[{"port":"8080"},{"port":"9090","path":"/m"}]}"#;

    #[test]
    fn a_sidecar_merges_the_metrics_of_its_application_and_a_gateway_does_not() {
        let machine = machine(&[("ISTIO_PROMETHEUS_ANNOTATIONS", TARGETS)]);
        let config = machine.config().scrape;
        let ports: Vec<_> = config.targets.iter().map(|target| target.port).collect();
        assert_eq!((config.envoy_port, ports), (Some(15090), vec![8080, 9090]));
        assert_eq!((config.limit, config.timeout.as_secs()), (10 << 20, 10));
        let gateway = machine.load("router").expect("a good configuration");
        assert!(gateway.scrape.targets.is_empty());
    }

    #[test]
    fn targets_that_cannot_be_scraped_are_a_problem() {
        for json in ["", "{", r#"{"port":"15020"}"#, r#"{"port":"15099"}"#] {
            let machine = machine(&[
                ("ISTIO_PROMETHEUS_ANNOTATIONS", json),
                ("PROXY_CONFIG", "{statusPort: 15099}"),
            ]);
            assert_eq!(
                machine.subjects(),
                ["ISTIO_PROMETHEUS_ANNOTATIONS"],
                "{json}"
            );
            assert!(machine.load("router").is_ok(), "{json}");
        }
    }

    #[test]
    fn envoys_metrics_can_be_left_out() {
        for name in ["PILOT_AGENT_MERGE_ENVOY_STATS", "DISABLE_ENVOY"] {
            let value = if name == "DISABLE_ENVOY" {
                "true"
            } else {
                "false"
            };
            assert_eq!(machine(&[(name, value)]).config().scrape.envoy_port, None);
        }
    }
}
