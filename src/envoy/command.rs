//! Builds Envoy's command line, with the arguments in pilot-agent's order, so that both look alike in `ps`.

use std::fmt::Display;
use std::num::NonZero;
use std::path::PathBuf;
use std::thread::available_parallelism;
use std::time::Duration;

use serde::{Deserialize, Serialize};

#[derive(Clone, Debug)]
pub struct Command {
    /// The path of the program if it has a slash, otherwise a name that is looked up in `PATH`.
    pub binary: PathBuf,
    pub bootstrap: PathBuf,
    /// Envoy's own drain time; whole seconds are used.
    pub drain_time: Duration,
    /// True if Envoy binds IPv6 addresses where it chooses an address by itself.
    pub is_ipv6: bool,
    pub file_flush_interval: Duration,
    /// Zero selects Envoy's default.
    pub file_flush_min_size_kb: u32,
    pub log: LogLevels,
    pub skip_deprecated_logs: bool,
    pub core_dump: bool,
    /// The JSON that Envoy merges over the bootstrap.
    pub override_json: Option<String>,
    /// None lets Envoy use every hardware thread.
    pub concurrency: Option<u32>,
    /// The user as which Envoy runs, and its only group; None for the agent's user.
    pub user: Option<u32>,
    /// True if Envoy's gRPC library may only use the TLS ciphers of FIPS 140.
    pub fips_ciphers: bool,
}

/// The relation of an Envoy to other Envoys.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Runs without hot restart.
    #[default]
    Alone,
    /// Validates its configuration and exits.
    Validate,
    /// Is able to hand over to a successor. Takes over from the Envoy of the previous restart epoch, if there is one.
    HotRestart { takeover: Takeover, parent_shutdown: Duration },
}

/// What Envoys that take over from each other have in common, and the restart epoch of one of them.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct Takeover {
    pub base_id: u32,
    /// 0 for an Envoy without a parent.
    pub restart_epoch: u32,
    /// The beginning of the paths of Envoy's hot restart sockets.
    pub socket_path: PathBuf,
    /// The number of the parent's workers, if it is known. With fewer workers, connections that wait for a worker of the
    /// parent would be reset.
    pub workers: Option<u32>,
}

/// The cipher suites pilot-agent names under `COMPLIANCE_POLICY` `fips-140-2` and `fips-140-3`.
const FIPS_CIPHERS: &str = "ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-RSA-AES128-GCM-SHA256:\
                            ECDHE-ECDSA-AES256-GCM-SHA384:ECDHE-RSA-AES256-GCM-SHA384";

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogLevels {
    pub level: Option<String>,
    pub components: Option<String>,
}

impl LogLevels {
    /// Splits `--proxyLogLevel` into the level and its `component:level` parts, which replace
    /// `--proxyComponentLogLevel`. Also returns the invalid parts.
    pub fn split(level: &str, components: &str) -> (Self, Vec<String>) {
        let mut levels = Self::default();
        let mut parts = Vec::new();
        let mut invalid = Vec::new();
        for part in level.split(',').filter(|part| !part.is_empty()) {
            match part.matches(':').count() {
                0 => levels.level = Some(part.to_owned()),
                1 => parts.push(part),
                _ => invalid.push(part.to_owned()),
            }
        }
        if parts.is_empty() {
            parts.push(components);
        }
        levels.components = Some(parts.join(",")).filter(|text| !text.is_empty());
        (levels, invalid)
    }
}

impl Command {
    pub(super) fn run_as(&self) -> u32 {
        self.user.unwrap_or_else(|| rustix::process::geteuid().as_raw())
    }

    /// Returns the variable that is added to the agent's own environment, if there is one.
    pub fn environment(&self) -> Option<(&'static str, &'static str)> {
        self.fips_ciphers.then_some(("GRPC_SSL_CIPHER_SUITES", FIPS_CIPHERS))
    }

    /// Returns the arguments after the program's name, in pilot-agent's order.
    pub fn arguments(&self, mode: &Mode) -> Vec<String> {
        let ip_version = if self.is_ipv6 { "v6" } else { "v4" };
        let flush_interval = self.file_flush_interval.as_millis();
        let flush_size = Some(self.file_flush_min_size_kb).filter(|size| *size > 0);
        [
            flag("-c", self.bootstrap.display()),
            flag("--drain-time-s", self.drain_time.as_secs()),
            flag("--drain-strategy", "immediate"),
            flag("--local-address-ip-version", ip_version),
            flag("--file-flush-interval-msec", flush_interval),
            mode.arguments(),
            switch("--allow-unknown-static-fields", true),
            optional("--file-flush-min-size-kb", flush_size),
            optional("-l", self.log.level.as_ref()),
            optional("--component-log-level", self.log.components.as_ref()),
            switch("--skip-deprecated-logs", self.skip_deprecated_logs),
            switch("--enable-core-dump", self.core_dump),
            optional("--config-yaml", self.override_json.as_ref()),
            optional("--concurrency", self.workers(mode)),
        ]
        .concat()
    }

    /// Returns the configured number of workers, or the parent's if that is larger. With None, Envoy has one for each
    /// hardware thread.
    pub(super) fn workers(&self, mode: &Mode) -> Option<u32> {
        let Mode::HotRestart { takeover, .. } = mode else {
            return self.concurrency;
        };
        match (self.concurrency, takeover.workers) {
            (None, Some(least)) => {
                let threads = available_parallelism().map_or(0, NonZero::get);
                Some(least).filter(|least| *least as usize > threads)
            }
            (own, least) => own.max(least),
        }
    }
}

fn flag(name: &str, value: impl Display) -> Vec<String> {
    vec![name.to_owned(), value.to_string()]
}

fn optional(name: &str, value: Option<impl Display>) -> Vec<String> {
    value.map_or_else(Vec::new, |value| flag(name, value))
}

fn switch(name: &str, is_on: bool) -> Vec<String> {
    if is_on { vec![name.to_owned()] } else { Vec::new() }
}

impl Mode {
    fn arguments(&self) -> Vec<String> {
        let alone = switch("--disable-hot-restart", true);
        match self {
            Self::Alone => alone,
            Self::Validate => [alone, flag("--mode", "validate")].concat(),
            Self::HotRestart { takeover, parent_shutdown } => {
                let epoch = Some(takeover.restart_epoch).filter(|epoch| *epoch > 0);
                [
                    flag("--parent-shutdown-time-s", parent_shutdown.as_secs()),
                    flag("--base-id", takeover.base_id),
                    // The default is an abstract socket, which every process of the pod can open.
                    flag("--socket-path", takeover.socket_path.display()),
                    flag("--socket-mode", "600"),
                    optional("--restart-epoch", epoch),
                    switch("--skip-hot-restart-parent-stats", epoch.is_some()),
                ]
                .concat()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command() -> Command {
        Command {
            binary: "/usr/local/bin/envoy".into(),
            bootstrap: "etc/istio/proxy/envoy-rev.json".into(),
            drain_time: Duration::from_secs(45),
            is_ipv6: false,
            file_flush_interval: Duration::from_secs(1),
            file_flush_min_size_kb: 0,
            log: LogLevels::split("warning", "misc:error").0,
            skip_deprecated_logs: true,
            core_dump: false,
            override_json: None,
            concurrency: Some(2),
            user: None,
            fips_ciphers: false,
        }
    }

    fn hot_restart(restart_epoch: u32, workers: Option<u32>) -> Mode {
        Mode::HotRestart {
            takeover: Takeover {
                base_id: 7,
                restart_epoch,
                socket_path: "etc/istio/proxy/e".into(),
                workers,
            },
            parent_shutdown: Duration::from_secs(60),
        }
    }

    #[test]
    fn the_charts_settings_give_the_charts_command_line() {
        assert_eq!(
            command().arguments(&Mode::Alone).join(" "),
            "-c etc/istio/proxy/envoy-rev.json --drain-time-s 45 --drain-strategy immediate \
             --local-address-ip-version v4 --file-flush-interval-msec 1000 --disable-hot-restart \
             --allow-unknown-static-fields -l warning --component-log-level misc:error \
             --skip-deprecated-logs --concurrency 2"
        );
    }

    #[test]
    fn successive_envoys_share_a_base_id_and_each_has_its_epoch() {
        for (restart_epoch, expected) in
            [(0, ""), (3, " --restart-epoch 3 --skip-hot-restart-parent-stats")]
        {
            let mode = hot_restart(restart_epoch, None);
            assert_eq!(
                mode.arguments().join(" "),
                format!(
                    "--parent-shutdown-time-s 60 --base-id 7 --socket-path etc/istio/proxy/e --socket-mode 600{expected}"
                )
            );
            let words = command().arguments(&mode);
            assert!(!words.contains(&"--disable-hot-restart".to_owned()));
        }
        let words = Mode::Validate.arguments().join(" ");
        assert_eq!(words, "--disable-hot-restart --mode validate");
    }

    #[test]
    fn a_successor_has_at_least_the_workers_of_its_parent() {
        let every_thread = available_parallelism().unwrap().get() as u32;
        for (own, parent, expected) in [
            (Some(1), Some(2), Some(2)),
            (Some(3), Some(2), Some(3)),
            (Some(1), None, Some(1)),
            (None, Some(every_thread), None),
            (None, Some(every_thread + 1), Some(every_thread + 1)),
            (None, None, None),
        ] {
            let command = Command { concurrency: own, ..command() };
            let words = command.arguments(&hot_restart(1, parent)).join(" ");
            let expected = expected.map(|workers| format!(" --concurrency {workers}"));
            let found = words.find(" --concurrency").map(|at| words[at..].to_owned());
            assert_eq!(found, expected, "{own:?} after {parent:?}");
        }
    }

    #[test]
    fn unset_options_are_not_passed_to_envoy() {
        let bare = Command {
            is_ipv6: true,
            log: LogLevels::default(),
            skip_deprecated_logs: false,
            concurrency: None,
            ..command()
        };
        assert!(bare.arguments(&Mode::Alone).join(" ").ends_with(
            "--local-address-ip-version v6 --file-flush-interval-msec 1000 \
             --disable-hot-restart --allow-unknown-static-fields"
        ));
    }

    #[test]
    fn the_environment_names_fips_ciphers_only_under_its_policy() {
        assert_eq!(command().environment(), None);
        let held = Command { fips_ciphers: true, ..command() };
        let (name, ciphers) = held.environment().expect("a variable");
        assert_eq!(name, "GRPC_SSL_CIPHER_SUITES");
        assert_eq!(ciphers.split(':').count(), 4);
        assert!(ciphers.split(':').all(|c| c.starts_with("ECDHE-") && c.contains("-GCM-")));
    }

    #[test]
    fn optional_arguments_have_the_order_of_pilot_agent() {
        let rare = Command {
            file_flush_min_size_kb: 64,
            core_dump: true,
            override_json: Some("{}".to_owned()),
            ..command()
        };
        assert!(rare.arguments(&Mode::Alone).join(" ").ends_with(
            "--allow-unknown-static-fields --file-flush-min-size-kb 64 -l warning \
             --component-log-level misc:error --skip-deprecated-logs --enable-core-dump \
             --config-yaml {} --concurrency 2"
        ));
    }

    #[test]
    fn splits_a_log_level_from_component_levels() {
        for (level, components, expected, dropped) in [
            ("info", "misc:error", (Some("info"), Some("misc:error")), 0),
            ("info,misc:warn", "a:b", (Some("info"), Some("misc:warn")), 0),
            ("info,warn", "", (Some("warn"), None), 0),
            ("a:b,c:d", "", (None, Some("a:b,c:d")), 0),
            ("info,a:b:c", "x:y", (Some("info"), Some("x:y")), 1),
            ("", "", (None, None), 0),
        ] {
            let (levels, neither) = LogLevels::split(level, components);
            assert_eq!((levels.level.as_deref(), levels.components.as_deref()), expected);
            assert_eq!(neither.len(), dropped, "{level}");
        }
    }
}
