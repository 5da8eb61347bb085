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
