//! Configures the status port, the application's probes, the merged metrics, and the notification of
//! systemd. Only sidecars have an application to scrape.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::environment as variables;
use super::pod::NodeType;
use super::{Loader, admin};
use crate::bootstrap::{self, StatsConfig};
use crate::probe;
use crate::problem::{Code, Problem};
use crate::runtime::systemd;
use crate::scrape::targets::{self, Target};
use crate::scrape::{self, Hidden, tls};
use crate::status::{self, Probers};

const ANNOTATIONS: &str = "ISTIO_PROMETHEUS_ANNOTATIONS";
/// The status port if none is configured.
const DEFAULT_PORT: u16 = 15020;
/// Start and end of the names of the metric families by which the agent waits for in-flight requests.
const GAUGES: [(&str, &str); 4] = [
    ("envoy_http_", "downstream_rq_active"),
    ("envoy_http_", "downstream_cx_active"),
    ("envoy_http_", "downstream_cx_tx_bytes_buffered"),
    ("envoy_listener_", "downstream_cx_active"),
];

impl Loader<'_> {
    /// None if the port is switched off.
    pub(super) fn status(&mut self, grpc_bootstrap: Option<PathBuf>) -> Option<status::Config> {
        let probers = self.probers();
        // Its problems are reported even if there is no status port.
        let config = status::Config {
            port: self.proxy_config.agent_port().unwrap_or_default(),
            metrics_localhost_only: self.get(&variables::METRICS_LOCALHOST_ACCESS_ONLY),
            application_host: self.application(),
            probers,
            probes: probe::Config {
                source: self.probe_source(),
                offers_http2: self.get(&variables::ISTIO_ENABLE_HTTP2_PROBING),
                keeps_connections: self.get(&variables::ENABLE_PROBE_KEEPALIVE_CONNECTIONS),
            },
            has_control: !admin::is_istios(&self.proxy_config, self.env).unwrap_or_default(),
            readiness_query: self.readiness_query(),
            grpc_bootstrap,
            debug_users: self.users(&variables::ISTIO_AGENT_DEBUG_USERS),
            control_users: self.users(&variables::ISTIO_AGENT_CONTROL_USERS),
        };
        if config.port == 0 { None } else { Some(config) }
    }

    /// Returns the limit of a query to Envoy's admin interface.
    fn readiness_query(&mut self) -> Duration {
        let variable = &variables::PROXY_READINESS_PROBE_TIMEOUT;
        let wanted = self.get(variable);
        let used = if wanted.is_zero() { Duration::from_secs(3) } else { wanted };
        self.limited(variable.row.name, wanted, used, "more than 0s")
    }

    /// Returns the host of probes.
    pub(super) fn application(&self) -> String {
        if self.get(&variables::REWRITE_PROBE_LEGACY_LOCALHOST_DESTINATION) {
            "localhost".to_owned()
        } else {
            self.addresses[0].to_string()
        }
    }

    /// Returns the source address of probes, in the family of the probed address. Traffic from it is not captured.
    pub(super) fn probe_source(&self) -> IpAddr {
        match self.addresses[0] {
            IpAddr::V4(_) => [127_u8, 0, 0, 6].into(),
            IpAddr::V6(_) => [0_u16, 0, 0, 0, 0, 0, 0, 6].into(),
        }
    }

    fn probers(&mut self) -> Probers {
        Probers::parse(&self.get(&variables::ISTIO_KUBE_APP_PROBERS)).unwrap_or_else(|errors| {
            for error in errors {
                let name = variables::ISTIO_KUBE_APP_PROBERS.row.name;
                self.notes.add(Problem::new(Code::SettingInvalid, name, error));
            }
            Probers::default()
        })
    }

    /// Configures the merged metrics.
    pub(super) fn scrape(&mut self, bootstrap: &bootstrap::Config) -> scrape::Config {
        let is_merged = self.get(&variables::PILOT_AGENT_MERGE_ENVOY_STATS);
        let has_envoy = !self.get(&variables::DISABLE_ENVOY);
        let envoy_port = bootstrap.ports.prometheus;
        scrape::Config {
            envoy_port: if is_merged && has_envoy { Some(envoy_port) } else { None },
            hidden: hidden(&bootstrap.stats),
            targets: self.targets(self.proxy_config.agent_port().unwrap_or(DEFAULT_PORT)),
            limit: self.get(&variables::ISTIO_AGENT_SCRAPE_LIMIT_BYTES),
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
        let mut targets = targets::parse(json, status_port).unwrap_or_else(|error| {
            self.notes.add(Problem::new(Code::SettingInvalid, ANNOTATIONS, error));
            Vec::new()
        });
        let variable = &variables::ISTIO_AGENT_SCRAPE_TLS;
        let given = self.get(variable);
        if given.is_empty() {
            return targets;
        }
        match tls::parse(&given) {
            Ok(files) => {
                for target in &mut targets {
                    target.tls = files.get(&target.port).cloned().map(Arc::new);
                }
            }
            Err(error) => {
                self.notes.add(Problem::new(Code::SettingInvalid, variable.row.name, error));
            }
        }
        targets
    }

    /// None if systemd did not start the agent, or expects no notifications.
    pub(super) fn systemd(&mut self) -> Option<systemd::Config> {
        let socket = self.get(&variables::NOTIFY_SOCKET)?;
        let config = systemd::Config::new(&socket, self.watchdog());
        if config.is_none() {
            let expected = "a path, or an abstract name after @";
            self.warn("NOTIFY_SOCKET", socket, expected, "systemd is not notified");
        }
        config
    }

    /// Returns the interval in which systemd expects notifications, if they are for this process.
    fn watchdog(&self) -> Option<Duration> {
        let process = self.get(&variables::WATCHDOG_PID);
        if process.is_some_and(|process| process != std::process::id().to_string()) {
            return None;
        }
        Some(Duration::from_micros(self.get(&variables::WATCHDOG_USEC)?.get()))
    }
}

/// Returns the metric families that Envoy keeps only for the agent. None is hidden if the operator configures
/// statistics, which may include them.
fn hidden(choice: &StatsConfig) -> Vec<Hidden> {
    let own = [&choice.prefixes, &choice.suffixes, &choice.expressions];
    if choice.in_flight_expressions.is_empty() || own.iter().any(|patterns| !patterns.is_empty()) {
        return Vec::new();
    }
    GAUGES.map(|(start, end)| Hidden { start, end }).to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::machine;

    const TARGETS: &str = r#"{"targets":[{"port":"8080"},{"port":"9090","path":"/m"}]}"#;

    #[test]
    fn a_sidecar_merges_metrics_of_its_application_and_a_gateway_does_not() {
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
            assert_eq!(machine.subjects(), ["ISTIO_PROMETHEUS_ANNOTATIONS"], "{json}");
            assert!(machine.load("router").is_ok(), "{json}");
        }
    }

    #[test]
    fn in_flight_gauges_are_hidden_unless_the_operator_includes_them() {
        let waits = || StatsConfig {
            in_flight_expressions: vec!["x".to_owned()],
            ..StatsConfig::default()
        };
        assert_eq!(hidden(&waits()).len(), GAUGES.len());
        assert!(hidden(&StatsConfig::default()).is_empty());
        let mut own = [(); 3].map(|()| waits());
        own[0].prefixes.push("http.inbound".to_owned());
        own[1].suffixes.push("rq_active".to_owned());
        own[2].expressions.push(".*".to_owned());
        assert!(own.iter().all(|choice| hidden(choice).is_empty()));
    }

    #[test]
    fn envoys_metrics_can_be_left_out() {
        for (name, value) in [("PILOT_AGENT_MERGE_ENVOY_STATS", "false"), ("DISABLE_ENVOY", "true")]
        {
            assert_eq!(machine(&[(name, value)]).config().scrape.envoy_port, None);
        }
    }

    #[test]
    fn systemd_is_notified_and_the_watchdog_only_if_its_pid_matches() {
        let own: &str = std::process::id().to_string().leak();
        for (socket, time, process, expected, warned) in [
            ("", "2000000", "", None, None),
            ("/run/notify", "", "", Some("None"), None),
            ("@notify", "2000000", "", Some("Some(1s)"), None),
            ("/run/notify", "2000000", own, Some("Some(1s)"), None),
            ("/run/notify", "2000000", "0", Some("None"), None),
            ("/run/notify", "1min", "", Some("None"), Some("WATCHDOG_USEC")),
            ("/run/notify", "0", "", Some("None"), Some("WATCHDOG_USEC")),
            ("notify", "", "", None, Some("NOTIFY_SOCKET")),
        ] {
            let config = machine(&[
                ("NOTIFY_SOCKET", socket),
                ("WATCHDOG_USEC", time),
                ("WATCHDOG_PID", process),
            ])
            .config();
            let found = config.systemd.map(|systemd| format!("{systemd:?}"));
            let period = found.as_deref().and_then(|text| text.split_once("period: "));
            let period = period.map(|(_, period)| period.trim_end_matches(" }"));
            assert_eq!(period, expected, "{socket} {time} {process}");
            let subjects: Vec<_> = config.warnings.iter().map(|w| &*w.subject).collect();
            let warned: Vec<_> = warned.into_iter().collect();
            assert_eq!(subjects, warned, "{socket} {time} {process}");
        }
    }
}
