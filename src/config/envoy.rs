//! Configures Envoy's process: command line, restarts and shutdown.

use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use super::environment as variables;
use super::pod::NodeType;
use super::{IGNORED, Loader, below};
use crate::bootstrap::{self, Ports};
use crate::dns::listen;
use crate::envoy;
use crate::envoy::admin::{Address, Admin};
use crate::envoy::command::{Command, LogLevels};
use crate::envoy::hot_restart;
use crate::envoy::shutdown::{Drain, Limits};
use crate::files::regular_file::{self, MAX_SETTINGS};
use crate::problem::{Code, Problem};
use crate::proxy_config::{time, yaml};
use crate::runtime::duration;
use crate::trust::compliance::Policy;

/// The limit for a response of Envoy's admin port.
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
/// The shutdown time of an Envoy whose successor is in another container.
const PAIR_SHUTDOWN: Duration = Duration::from_secs(600);
/// The user and group exempt from traffic capture.
const UNCAPTURED: u32 = 1337;
/// The part of a pod's grace period that is reserved for the shutdown after the wait for connections.
const RESERVE: Duration = Duration::from_secs(5);

/// The default grace period in Kubernetes.
const USUAL_GRACE: Duration = Duration::from_secs(30);

impl Loader<'_> {
    /// Configures Envoy's process; None if the agent runs without Envoy.
    pub(super) fn envoy(&mut self, bootstrap: &bootstrap::Config) -> Option<envoy::Config> {
        if self.get(&variables::DISABLE_ENVOY) {
            return None;
        }
        Some(envoy::Config {
            command: self.command(bootstrap),
            directory: bootstrap.directory.clone(),
            shared_directory: bootstrap.directory.clone(),
            admin: Admin {
                address: match &bootstrap.admin_socket {
                    Some(socket) => Address::Socket(socket.as_path().into()),
                    None => Address::Port(
                        (bootstrap.admin_host(), self.proxy_config.admin_port()).into(),
                    ),
                },
                limit: ADMIN_CALL,
            },
            early: EARLY,
            drain_inbound_only: self.flags.kind == NodeType::Sidecar,
            limits: Limits {
                delay: self.drain_delay(),
                drain_call: ADMIN_CALL,
                drain: self.drain(bootstrap.exit_on_zero_connections),
                long_requests: self.in_flight_grace(),
                quit: QUIT,
                terminate: TERMINATE,
                kill: KILL,
            },
            internal_ports: internal_ports(bootstrap),
            hot_restart: self.hot_restart(),
            restarts: self.get(&variables::ISTIO_AGENT_ENVOY_RESTARTS),
        })
    }

    /// Configures hot restarts; None if there are none.
    fn hot_restart(&mut self) -> Option<hot_restart::Limits> {
        let is_pair = !self.container().is_empty();
        if !is_pair && !self.get(&variables::ISTIO_AGENT_HOT_RESTART) {
            return None;
        }
        let variable = &variables::ISTIO_AGENT_PARENT_SHUTDOWN_TIME;
        let wanted =
            if is_pair && !self.env.is_set(variable) { PAIR_SHUTDOWN } else { self.get(variable) };
        let drain = self.proxy_config.drain_time();
        let min = drain.saturating_add(Duration::from_secs(1));
        let expected = "more than the drain duration";
        Some(hot_restart::Limits {
            parent_shutdown: self.limited(variable.row.name, wanted, wanted.max(min), expected),
            live: NEXT_LIVE,
            check: CHECK,
        })
    }

    /// Lists the files that Envoy and its bootstrap depend on.
    pub(super) fn inputs(&self) -> Vec<PathBuf> {
        let binary = self.proxy_config.binary_path.as_str();
        // A binary without a directory is found by PATH.
        let binary_file = if binary.contains('/') { binary } else { "" };
        let mut files = vec![
            "./etc/istio/pod/labels".into(),
            "./etc/istio/pod/annotations".into(),
            self.flags.mesh_config.clone(),
            binary_file.into(),
            PathBuf::from(&self.proxy_config.custom_config_file),
            self.get(&variables::ISTIO_BOOTSTRAP_OVERRIDE).unwrap_or_default(),
        ];
        files.retain(|file| !file.as_os_str().is_empty());
        files
    }

    fn drain(&self, until_idle: bool) -> Drain {
        if !until_idle {
            return Drain::For(self.proxy_config.termination_drain_time());
        }
        let ceiling = &variables::ISTIO_AGENT_DRAIN_CEILING;
        Drain::UntilIdle {
            at_least: self.get(&variables::MINIMUM_DRAIN_DURATION),
            at_most: match self.grace_without_reserve() {
                Some(time) if !self.env.is_set(ceiling) => time,
                _ => self.get(ceiling),
            },
        }
    }

    /// Returns the pod's grace period without the reserve for the shutdown; None if it is unknown.
    fn grace_without_reserve(&self) -> Option<Duration> {
        let grace = Duration::from_secs(self.get(&variables::TERMINATION_GRACE_PERIOD_SECONDS));
        if grace.is_zero() {
            return None;
        }
        let time = grace.saturating_sub(RESERVE).max(duration::scaled(grace, 0.5));
        Some(time.saturating_sub(self.longest_delay()))
    }

    /// Returns the delay before the drain: the configured one, and a random part of the jitter. Warns if the longest one
    /// does not fit into the grace period.
    fn drain_delay(&mut self) -> Duration {
        let delay = self.get(&variables::ISTIO_AGENT_DRAIN_DELAY);
        let wanted = delay.saturating_add(self.get(&variables::ISTIO_AGENT_DRAIN_JITTER));
        let longest = self.limited(
            "ISTIO_AGENT_DRAIN_DELAY and ISTIO_AGENT_DRAIN_JITTER",
            wanted,
            self.longest_delay(),
            "no more than the grace period with the drain and 2s",
        );
        let jitter = duration::scaled(longest.saturating_sub(delay), fastrand::f64());
        delay.min(longest).saturating_add(jitter)
    }

    /// Returns the longest delay before the drain that fits into the grace period.
    fn longest_delay(&self) -> Duration {
        let drain = if self.get(&variables::EXIT_ON_ZERO_ACTIVE_CONNECTIONS) {
            self.get(&variables::MINIMUM_DRAIN_DURATION)
        } else {
            self.proxy_config.termination_drain_time()
        };
        let grace = match self.get(&variables::TERMINATION_GRACE_PERIOD_SECONDS) {
            0 => USUAL_GRACE,
            seconds => Duration::from_secs(seconds),
        };
        let delay = self.get(&variables::ISTIO_AGENT_DRAIN_DELAY);
        let jitter = self.get(&variables::ISTIO_AGENT_DRAIN_JITTER);
        delay.saturating_add(jitter).min(grace.saturating_sub(drain).saturating_sub(QUIT))
    }

    /// Returns the time that in-flight requests have after a drain of fixed length.
    fn in_flight_grace(&self) -> Duration {
        let variable = &variables::ISTIO_AGENT_LAST_REQUESTS;
        let wanted = self.get(variable);
        let drain = self.proxy_config.termination_drain_time();
        match (self.grace_without_reserve(), self.env.is_set(variable)) {
            (Some(time), true) => wanted.min(time.saturating_sub(drain)),
            (Some(time), false) => time.saturating_sub(drain),
            (None, true) => wanted,
            (None, false) => {
                let left = USUAL_GRACE.saturating_sub(RESERVE).saturating_sub(drain);
                wanted.min(left.saturating_sub(self.longest_delay()))
            }
        }
    }

    /// Lists the statistics by which the agent waits for in-flight requests after the drain.
    pub(super) fn request_statistics(&self, until_idle: bool) -> Vec<String> {
        if until_idle || self.in_flight_grace().is_zero() || self.get(&variables::DISABLE_ENVOY) {
            return Vec::new();
        }
        envoy::statistics(self.flags.kind == NodeType::Sidecar).map(str::to_owned).to_vec()
    }

    /// Configures Envoy's command line. Warns of log levels that cannot be used.
    fn command(&mut self, bootstrap: &bootstrap::Config) -> Command {
        let level = &self.flags.proxy_log_level;
        let (log, dropped) = LogLevels::split(level, &self.flags.proxy_component_log_level);
        for part in dropped {
            self.warn("--proxyLogLevel", part, "a level or component:level", IGNORED);
        }
        let threads = self.proxy_config.concurrency.map(u32::try_from);
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
            is_ipv6: self.addresses.iter().all(IpAddr::is_ipv6),
            file_flush_interval: time(self.proxy_config.file_flush_interval)
                .unwrap_or(Duration::from_secs(1)),
            file_flush_min_size_kb: self.proxy_config.file_flush_min_size_kb,
            log,
            skip_deprecated_logs: self.get(&variables::ENVOY_SKIP_DEPRECATED_LOGS),
            core_dump: self.get(&variables::ISTIO_ENVOY_ENABLE_CORE_DUMP),
            override_json: self.bootstrap_override(),
            // None is one thread for every hardware thread.
            concurrency: threads.and_then(Result::ok).filter(|it| *it != 0),
            user: if replaces_resolver && is_root { Some(UNCAPTURED) } else { None },
            fips_ciphers: matches!(self.policy, Policy::Fips140_2 | Policy::Fips140_3),
        }
    }

    /// Reads the file that Envoy merges over its bootstrap. If it cannot be used, Envoy starts without it.
    fn bootstrap_override(&mut self) -> Option<String> {
        let path = self.get(&variables::ISTIO_BOOTSTRAP_OVERRIDE)?;
        match read_object(&below(self.root, &path)) {
            Ok(document) => Some(with_host_ip(&document, &self.get(&variables::HOST_IP))),
            Err(error) => {
                let subject = format!("{} (ISTIO_BOOTSTRAP_OVERRIDE)", path.display());
                let code = Code::BootstrapOverrideUnreadable;
                self.notes.warnings.push(Problem::new(code, subject, error));
                None
            }
        }
    }
}

/// Reads a YAML or JSON object and returns it as JSON.
fn read_object(path: &Path) -> io::Result<String> {
    let text = regular_file::read_text(path, MAX_SETTINGS)?;
    let document: Value = serde_saphyr::from_str(&text).map_err(|error| {
        let (line, reason) = yaml::line_and_reason(&error);
        io::Error::other(format!("line {line}: {reason}"))
    })?;
    if !document.is_object() {
        return Err(io::Error::other("the document is not a YAML or JSON object"));
    }
    Ok(document.to_string())
}

/// Returns the ports of Envoy's static listeners.
fn internal_ports(bootstrap: &bootstrap::Config) -> Vec<u16> {
    let Ports { health, prometheus, secure_metrics, secure_merged_metrics } = bootstrap.ports;
    let mut ports = vec![health, prometheus, secure_metrics, secure_merged_metrics];
    ports.retain(|port| *port != 0);
    ports
}

/// Replaces `$(HOST_IP)`. An IPv6 address is put in brackets, unless the text has them.
fn with_host_ip(text: &str, host_ip: &str) -> String {
    let host = if host_ip.contains(':') { format!("[{host_ip}]") } else { host_ip.to_owned() };
    text.replace("[$(HOST_IP)]", &host).replace("$(HOST_IP)", &host)
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
}
