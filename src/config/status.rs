//! The configuration of the status port, the application's probes, and the merged metrics. Only sidecars
//! have an application to scrape.

use std::net::IpAddr;
use std::path::PathBuf;

use super::Sources;
use super::environment as variables;
use super::pod::NodeType;
use crate::bootstrap::{self, StatsConfig};
use crate::probe;
use crate::scrape::targets::{self, Target};
use crate::scrape::{self, Hidden};
use crate::status::{self, Probers};

const ANNOTATIONS: &str = "ISTIO_PROMETHEUS_ANNOTATIONS";
/// The status port of an agent without a configured one.
const DEFAULT_PORT: u16 = 15020;
/// Start and end of the names of families behind the wait for last requests.
const GAUGES: [(&str, &str); 4] = [
    ("envoy_http_", "downstream_rq_active"),
    ("envoy_http_", "downstream_cx_active"),
    ("envoy_http_", "downstream_cx_tx_bytes_buffered"),
    ("envoy_listener_", "downstream_cx_active"),
];

impl Sources<'_> {
    /// None while the port is switched off.
    pub(super) fn status(&mut self, grpc_bootstrap: Option<PathBuf>) -> Option<status::Config> {
        let probers = self.probers();
        let config = status::Config {
            port: self.proxy_config.agent_port().unwrap_or_default(),
            metrics_localhost_only: self.get(&variables::METRICS_LOCALHOST_ACCESS_ONLY),
            application: self.application(),
            probers,
            probes: probe::Config {
                source: self.probe_source(),
                offers_http2: self.get(&variables::ISTIO_ENABLE_HTTP2_PROBING),
                keeps_connections: self.get(&variables::ENABLE_PROBE_KEEPALIVE_CONNECTIONS),
            },
            grpc_bootstrap,
            debug_users: self.users(&variables::ISTIO_AGENT_DEBUG_USERS),
            control_users: self.users(&variables::ISTIO_AGENT_CONTROL_USERS),
        };
        (config.port != 0).then_some(config)
    }

    /// The host of probes.
    pub(super) fn application(&mut self) -> String {
        match self.get(&variables::REWRITE_PROBE_LEGACY_LOCALHOST_DESTINATION) {
            true => "localhost".to_owned(),
            false => self.addresses[0].to_string(),
        }
    }

    /// The source of probes: of the probed address' family. Traffic capture leaves both alone.
    pub(super) fn probe_source(&self) -> IpAddr {
        match self.addresses[0] {
            IpAddr::V4(_) => [127_u8, 0, 0, 6].into(),
            IpAddr::V6(_) => [0_u16, 0, 0, 0, 0, 0, 0, 6].into(),
        }
    }

    fn probers(&mut self) -> Probers {
        let text = self.get(&variables::ISTIO_KUBE_APP_PROBERS);
        Probers::parse(&text).unwrap_or_else(|found| {
            for problem in found {
                let name = variables::ISTIO_KUBE_APP_PROBERS.name;
                self.problem(name, &problem, "");
            }
            Probers::default()
        })
    }

    pub(super) fn scrape(&mut self, bootstrap: &bootstrap::Config) -> scrape::Config {
        let is_merged = self.get(&variables::PILOT_AGENT_MERGE_ENVOY_STATS);
        let has_envoy = !self.get(&variables::DISABLE_ENVOY);
        scrape::Config {
            envoy_port: (is_merged && has_envoy).then_some(bootstrap.ports.prometheus),
            hidden: hidden(&bootstrap.stats),
            targets: self.targets(self.proxy_config.agent_port().unwrap_or(DEFAULT_PORT)),
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
            self.problem(ANNOTATIONS, &format!("it has {error}"), "");
            Vec::new()
        })
    }
}

/// The families Envoy keeps for the agent alone: those of the wait for last requests that no pattern
/// of the operator's may include.
fn hidden(choice: &StatsConfig) -> Vec<Hidden> {
    let may_be_included = |start: &str, gauge: &str| {
        let scope = start.trim_start_matches("envoy_").trim_end_matches('_');
        let prefixes = choice.prefixes.iter().map(String::as_str);
        let suffixes = choice.suffixes.iter().map(String::as_str);
        let mut prefixes =
            prefixes.map(|prefix| prefix.starts_with(scope) || scope.starts_with(prefix));
        let mut suffixes =
            suffixes.map(|suffix| suffix.ends_with(gauge) || gauge.ends_with(suffix));
        let mut expressions = choice.expressions.iter();
        prefixes.any(|fits| fits)
            || suffixes.any(|fits| fits)
            || expressions.any(|expression| may_match(expression, gauge))
    };
    if choice.of_requests.is_empty() {
        return Vec::new();
    }
    let gauges = GAUGES.into_iter();
    let hidden = gauges.filter(|(start, gauge)| !may_be_included(start, gauge));
    hidden.map(|(start, end)| Hidden { start, end }).collect()
}

/// Whether an expression may include a gauge of a listener's or a connection manager's: not if it has
/// a word that is not in their names.
fn may_match(expression: &str, gauge: &str) -> bool {
    const SCOPES: [&str; 5] = ["http", "listener", "inbound", "outbound", "digit"];
    let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let mut words = words.filter(|word| word.len() > 3).peekable();
    let is_scope = |word: &str| {
        let mut scopes = SCOPES.iter();
        scopes.any(|scope| word.starts_with(scope) || scope.contains(word))
    };
    let fits = |word: &str| gauge.contains(word) || is_scope(word);
    match expression.contains('|') && words.peek().is_some() {
        true => words.any(fits),
        false => words.all(fits),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
    fn gauges_of_the_wait_for_last_requests_are_hidden_unless_the_operator_may_include_them() {
        let [requests, http, buffered, listeners] = [true; 4];
        for (prefixes, suffixes, expressions, expected) in [
            ("", "", "", [requests, http, buffered, listeners]),
            (
                "cluster.",
                "rq_total",
                r".*circuit_breakers.*,upstream_(rq|cx)_retry",
                [true; 4],
            ),
            ("http.inbound", "", "", [false, false, false, listeners]),
            (
                "",
                "downstream_rq_active",
                "",
                [false, http, buffered, listeners],
            ),
            ("", "_active", "", [false, false, buffered, false]),
            ("listener", "", "", [requests, http, buffered, false]),
            (
                "",
                "",
                r"http\.inbound.*downstream_rq_.*",
                [false, http, buffered, listeners],
            ),
            ("", "", r".*(upstream|downstream)_cx.*", [false; 4]),
            ("", "", ".*", [false; 4]),
        ] {
            let list = |text: &str| -> Vec<String> {
                let parts = text.split(',').filter(|part| !part.is_empty());
                parts.map(str::to_owned).collect()
            };
            let choice = StatsConfig {
                prefixes: list(prefixes),
                suffixes: list(suffixes),
                expressions: list(expressions),
                of_requests: list("x"),
                ..StatsConfig::default()
            };
            let hidden = hidden(&choice);
            let found = GAUGES.map(|(start, end)| hidden.contains(&Hidden { start, end }));
            assert_eq!(found, expected, "{prefixes} {suffixes} {expressions}");
        }
        assert!(hidden(&StatsConfig::default()).is_empty());
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
