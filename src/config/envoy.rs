//! The configuration of Envoy and its command line.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;

use super::environment as variables;
use super::pod::NodeType;
use super::{LEFT_OUT, Loader, below};
use crate::bootstrap;
use crate::compliance::Policy;
use crate::dns::listen;
use crate::envoy::command::{Command, LogLevels};
use crate::envoy::crash_restart::Budget;
use crate::envoy::hot_restart;
use crate::envoy::shutdown::{Drain, Limits};
use crate::problem::{Problem, codes};
use crate::proxy_config::{time, yaml};
use crate::regular_file::{self, MAX_SETTINGS};
use crate::{duration, envoy};

/// Longest wait for an answer of Envoy's admin port.
const ADMIN_CALL: Duration = Duration::from_secs(2);
/// The wait after `quitquitquit`: Envoy exits within milliseconds unless it hangs.
const QUIT: Duration = Duration::from_secs(2);
/// The waits after SIGTERM and SIGKILL.
const TERMINATE: Duration = Duration::from_secs(5);
const KILL: Duration = Duration::from_secs(5);
/// An Envoy that exits within this time could not start.
const EARLY: Duration = Duration::from_secs(1);
/// The limit for a new Envoy to become live; most of its waits for configuration end after 30 s.
const NEXT_LIVE: Duration = Duration::from_secs(45);
/// The limit for the validation of a bootstrap, which may resolve names.
const CHECK: Duration = Duration::from_secs(15);
/// The time of a parent whose successor is in another container.
const HANDOVER: Duration = Duration::from_secs(600);
/// The user and group exempt from traffic capture.
const UNCAPTURED: u32 = 1337;
/// The part of a pod's grace period kept for the shutdown after the wait for connections.
const RESERVE: Duration = Duration::from_secs(5);

/// The default grace period in Kubernetes.
const USUAL_GRACE: Duration = Duration::from_secs(30);

impl Loader<'_> {
    pub(super) fn envoy(&mut self, bootstrap: &bootstrap::Config) -> Option<envoy::Config> {
        if self.get(&variables::DISABLE_ENVOY) {
            return None;
        }
        let v6 = self.addresses.iter().all(IpAddr::is_ipv6);
        Some(envoy::Config {
            command: self.command(bootstrap, v6),
            directory: bootstrap.directory.clone(),
            admin_host: bootstrap.admin_host(),
            admin_port: self.proxy_config.admin_port(),
            admin_call: ADMIN_CALL,
            early: EARLY,
            drain_inbound_only: self.flags.kind == NodeType::Sidecar,
            limits: Limits {
                drain_call: ADMIN_CALL,
                drain: self.drain(bootstrap.exit_on_zero_connections),
                long_requests: self.in_flight_grace(),
                quit: QUIT,
                terminate: TERMINATE,
                kill: KILL,
            },
            internal_ports: internal_ports(bootstrap),
            hot_restart: self.hot_restart(),
            restarts: self.restarts(),
        })
    }

    fn hot_restart(&mut self) -> Option<hot_restart::Limits> {
        let has_standby = !self.get(&variables::ISTIO_AGENT_STANDBY).is_empty();
        if !has_standby && !self.get(&variables::ISTIO_AGENT_HOT_RESTART) {
            return None;
        }
        let time = &variables::ISTIO_AGENT_PARENT_SHUTDOWN_TIME;
        let wanted = if has_standby && !self.env.is_set(time) {
            HANDOVER
        } else {
            self.get(time)
        };
        let least = self.proxy_config.drain_time();
        let least = least.saturating_add(Duration::from_secs(1));
        if wanted < least {
            let name = variables::ISTIO_AGENT_PARENT_SHUTDOWN_TIME.name;
            let (found, used) = (format!("{wanted:?}"), format!("{least:?} is used"));
            self.warn(name, &found, "more than the drain duration", used);
        }
        Some(hot_restart::Limits {
            parent_shutdown: wanted.max(least),
            live: NEXT_LIVE,
            check: CHECK,
        })
    }

    /// The files Envoy is started from.
    pub(super) fn inputs(&mut self) -> Vec<PathBuf> {
        let overriding = self.get(&variables::ISTIO_BOOTSTRAP_OVERRIDE);
        let program = &self.proxy_config.binary_path;
        let mut files = vec![
            "./etc/istio/pod/labels".into(),
            "./etc/istio/pod/annotations".into(),
            self.flags.mesh_config.clone(),
            // A program without a directory is found by PATH.
            if program.contains('/') {
                program.into()
            } else {
                PathBuf::new()
            },
            PathBuf::from(&self.proxy_config.custom_config_file),
            overriding.into(),
        ];
        files.retain(|file| !file.as_os_str().is_empty());
        files
    }

    fn drain(&mut self, until_idle: bool) -> Drain {
        if !until_idle {
            return Drain::For(self.proxy_config.termination_drain_time());
        }
        let ceiling = &variables::ISTIO_AGENT_DRAIN_CEILING;
        let given = self.get(ceiling);
        Drain::UntilIdle {
            at_least: self.get(&variables::MINIMUM_DRAIN_DURATION),
            at_most: match self.until_the_reserve() {
                Some(time) if !self.env.is_set(ceiling) => time,
                _ => given,
            },
        }
    }

    /// The pod's grace period, if known, less the reserve for the shutdown.
    fn until_the_reserve(&mut self) -> Option<Duration> {
        let grace = self.get(&variables::TERMINATION_GRACE_PERIOD_SECONDS);
        let grace = Duration::from_secs(grace.into());
        let half = duration::scaled(grace, 0.5);
        let time = grace.saturating_sub(RESERVE).max(half);
        Some(time).filter(|time| !time.is_zero())
    }

    /// How long in-flight requests may continue after a drain of fixed length.
    fn in_flight_grace(&mut self) -> Duration {
        let wanted = self.get(&variables::ISTIO_AGENT_LAST_REQUESTS);
        let is_set = self.env.is_set(&variables::ISTIO_AGENT_LAST_REQUESTS);
        let drain = self.proxy_config.termination_drain_time();
        match (self.until_the_reserve(), is_set) {
            (Some(time), true) => wanted.min(time.saturating_sub(drain)),
            (Some(time), false) => time.saturating_sub(drain),
            (None, true) => wanted,
            (None, false) => wanted.min(USUAL_GRACE.saturating_sub(RESERVE).saturating_sub(drain)),
        }
    }

    /// The statistics Envoy must keep for in-flight requests to continue after the drain.
    pub(super) fn statistics_of_requests(&mut self, until_idle: bool) -> Vec<String> {
        if until_idle || self.in_flight_grace().is_zero() || self.get(&variables::DISABLE_ENVOY) {
            return Vec::new();
        }
        let inbound_only = self.flags.kind == NodeType::Sidecar;
        envoy::statistics(inbound_only).map(str::to_owned).to_vec()
    }

    fn restarts(&mut self) -> Option<Budget> {
        let text = self.get(&variables::ISTIO_AGENT_ENVOY_RESTARTS);
        let budget = budget(&text);
        let is_off = text.is_empty() || text.split('/').next() == Some("0");
        if budget.is_none() && !is_off {
            let expected = "restarts in a duration, such as 3/10m";
            let name = variables::ISTIO_AGENT_ENVOY_RESTARTS.name;
            self.warn(name, &text, expected, "Envoy is not restarted");
        }
        budget
    }

    fn command(&mut self, bootstrap: &bootstrap::Config, v6: bool) -> Command {
        let level = &self.flags.proxy_log_level;
        let (log, dropped) = LogLevels::split(level, &self.flags.proxy_component_log_level);
        for part in dropped {
            let expected = "a level or component:level";
            self.warn("--proxyLogLevel", &part, expected, LEFT_OUT);
        }
        let threads = self.proxy_config.concurrency;
        let threads = threads.and_then(|threads| u32::try_from(threads).ok());
        // An agent that runs as root to replace the machine's resolver runs Envoy as the user exempt
        // from traffic capture, so that Envoy's own lookups are not captured.
        let replaces_resolver = listen::is_machine_resolver(&self.get(&variables::DNS_PROXY_ADDR));
        let is_root = rustix::process::getuid().is_root();
        Command {
            binary: PathBuf::from(&self.proxy_config.binary_path),
            bootstrap: match self.proxy_config.custom_config_file.as_str() {
                "" => bootstrap.file(),
                custom => custom.into(),
            },
            drain_time: self.proxy_config.drain_time(),
            is_ipv6: v6,
            file_flush_interval: time(self.proxy_config.file_flush_interval)
                .unwrap_or(Duration::from_secs(1)),
            file_flush_min_size_kb: self.proxy_config.file_flush_min_size_kb,
            log,
            skip_deprecated_logs: self.get(&variables::ENVOY_SKIP_DEPRECATED_LOGS),
            core_dump: self.get(&variables::ISTIO_ENVOY_ENABLE_CORE_DUMP),
            override_json: self.bootstrap_override(),
            // None is every hardware thread.
            concurrency: threads.filter(|threads| *threads != 0),
            user: (replaces_resolver && is_root).then_some(UNCAPTURED),
            fips_ciphers: matches!(self.policy, Policy::Fips140_2 | Policy::Fips140_3),
        }
    }

    /// The file merged over the bootstrap. Envoy starts without one that cannot be used.
    fn bootstrap_override(&mut self) -> Option<String> {
        let path = self.text(&variables::ISTIO_BOOTSTRAP_OVERRIDE)?;
        let host_ip = self.get(&variables::HOST_IP);
        let read = regular_file::read_text(&below(self.root, &path), MAX_SETTINGS);
        let read = read.map_err(|error| error.to_string());
        let parsed = read.and_then(|text| {
            let parsed = serde_saphyr::from_str::<Value>(&text);
            parsed.map_err(|error| {
                let (line, reason) = yaml::line_and_reason(&error);
                format!("line {line}: {reason}")
            })
        });
        let found = match parsed {
            Ok(document) if document.is_object() => {
                return Some(with_host_ip(&document.to_string(), &host_ip));
            }
            Ok(_) => "the document is not a YAML or JSON object".to_owned(),
            Err(error) => error,
        };
        let subject = format!("{path} (ISTIO_BOOTSTRAP_OVERRIDE)");
        let problem = Problem::new(codes::BOOTSTRAP_OVERRIDE_UNREADABLE, subject, found);
        self.notes.warnings.push(problem);
        None
    }
}

/// Ports of Envoy's own listeners, except the admin port.
fn internal_ports(bootstrap: &bootstrap::Config) -> Vec<u16> {
    let ports = &bootstrap.ports;
    let fixed = [ports.health, ports.prometheus];
    let secure = [ports.secure_metrics, ports.secure_merged_metrics];
    let all = fixed.into_iter().chain(secure);
    all.filter(|port| *port != 0).collect()
}

/// Restarts in a duration, as in `3/10m`.
fn budget(text: &str) -> Option<Budget> {
    let (restarts, within) = text.split_once('/')?;
    let restarts = restarts.parse().ok().filter(|restarts| *restarts > 0)?;
    let within = duration::parse(within).filter(|within| !within.is_zero())?;
    Some(Budget { restarts, within })
}

/// An IPv6 address stands in brackets, which may be there already.
fn with_host_ip(text: &str, host_ip: &str) -> String {
    const PLACE: &str = "$(HOST_IP)";
    let bracketed = match host_ip.contains(':') {
        true => format!("[{host_ip}]"),
        false => host_ip.to_owned(),
    };
    text.replace(&format!("[{PLACE}]"), &bracketed)
        .replace(PLACE, &bracketed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_ip_is_put_in_brackets_once_when_it_is_ipv6() {
        for (text, host_ip, expected) in [
            ("$(HOST_IP):1", "10.0.0.1", "10.0.0.1:1"),
            ("$(HOST_IP):1", "fd00::1", "[fd00::1]:1"),
            ("[$(HOST_IP)]:1", "fd00::1", "[fd00::1]:1"),
            ("[$(HOST_IP)]:1", "10.0.0.1", "10.0.0.1:1"),
            ("$(HOST_IP):1", "", ":1"),
        ] {
            assert_eq!(with_host_ip(text, host_ip), expected);
        }
    }

    #[test]
    fn a_budget_is_so_many_restarts_in_a_duration() {
        let expected = Budget {
            restarts: 3,
            within: Duration::from_secs(600),
        };
        assert_eq!(budget("3/10m"), Some(expected));
        for text in [
            "", "3", "0/10m", "3/0s", "3/10", "-1/10m", "3/10m/", "many/10m",
        ] {
            assert_eq!(budget(text), None, "{text}");
        }
    }
}
