//! Reports settings that cannot be used or have no effect.

use std::io;
use std::net::UdpSocket;

use super::capture::is_captured;
use crate::config::Config;
use crate::logging;
use crate::problem::{Code, Level, Problem};
use crate::report::Check;

pub(super) fn checks(config: &Result<Config, Vec<Problem>>) -> Vec<Check> {
    let config = match config {
        Ok(config) => config,
        Err(problems) => return checks_of(Level::Error, problems),
    };
    let consequence = "the agent cannot request certificates, unless another process serves them";
    let mut checks = checks_of(Level::Warning, &config.warnings);
    for problem in &config.authority_problems {
        checks.push(Check::with_level(Level::Warning, &problem.clone().consequence(consequence)));
    }
    checks.extend(foreign_address(config));
    if checks.is_empty() {
        checks.push(Check::ok("settings", "all can be used"));
    }
    checks.extend(logging::levels().silent().as_ref().map(Check::from));
    if !config.ignored.is_empty() {
        checks.push(Check::ok("settings without effect", config.ignored.join(", ")));
    }
    checks
}

/// Checks that the address by which istiod knows a captured pod, `INSTANCE_IP`, belongs to the pod.
fn foreign_address(config: &Config) -> Option<Check> {
    let address = config.bootstrap.node.addresses.first()?;
    if !is_captured(config) {
        return None;
    }
    if UdpSocket::bind((*address, 0)).err()?.kind() != io::ErrorKind::AddrNotAvailable {
        return None;
    }
    let found = format!("{address} is on no interface");
    let problem = Problem::new(Code::InterfaceUnknown, "INSTANCE_IP", found)
        .consequence("istiod and peers expect the pod at an address that it does not have")
        .remedy("set INSTANCE_IP to the pod's address (`fieldPath: status.podIP`)");
    Some(Check::with_level(Level::Warning, &problem))
}

fn checks_of(level: Level, problems: &[Problem]) -> Vec<Check> {
    problems.iter().map(|it| Check::with_level(level, it)).collect()
}
