//! How systemd hears from the agent.

use std::time::Duration;

use super::Sources;
use super::environment as variables;
use crate::systemd::Config;

impl Sources<'_> {
    /// None if systemd did not start the agent, or expects no message of it.
    pub(super) fn systemd(&mut self) -> Option<Config> {
        let socket = self.text(&variables::NOTIFY_SOCKET)?;
        let watchdog = self.watchdog();
        let config = Config::new(&socket, watchdog);
        if config.is_none() {
            let expected = "a path, or an abstract name after @; systemd is not notified";
            self.warn(variables::NOTIFY_SOCKET.name, socket, expected);
        }
        config
    }

    fn watchdog(&mut self) -> Option<Duration> {
        let name = variables::WATCHDOG_USEC.name;
        let found = self.text(&variables::WATCHDOG_USEC)?;
        let process = self.text(&variables::WATCHDOG_PID);
        if process.is_some_and(|process| process != std::process::id().to_string()) {
            return None;
        }
        let time = found.parse().ok().filter(|time| *time > 0);
        if time.is_none() {
            self.warn(name, found, "microseconds; the watchdog is not answered");
        }
        time.map(Duration::from_micros)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::machine;

    #[test]
    fn systemd_is_notified_at_the_socket_it_names_and_its_watchdog_if_it_is_for_this_process() {
        let own: &str = std::process::id().to_string().leak();
        for (socket, time, process, expected, warned) in [
            ("", "2000000", "", None, None),
            ("/run/notify", "", "", Some("None"), None),
            ("@notify", "2000000", "", Some("Some(1s)"), None),
            ("/run/notify", "2000000", own, Some("Some(1s)"), None),
            ("/run/notify", "2000000", "0", Some("None"), None),
            (
                "/run/notify",
                "1min",
                "",
                Some("None"),
                Some("WATCHDOG_USEC"),
            ),
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
            let period = found
                .as_deref()
                .and_then(|text| text.split_once("period: "));
            let period = period.map(|(_, period)| period.trim_end_matches(" }"));
            assert_eq!(period, expected, "{socket} {time} {process}");
            let subjects: Vec<_> = config.warnings.iter().map(|w| &*w.subject).collect();
            let warned: Vec<_> = warned.into_iter().collect();
            assert_eq!(subjects, warned, "{socket} {time} {process}");
        }
    }
}
