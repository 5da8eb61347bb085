//! Resolves the name of the statsd collector, for which Envoy takes only an IP address.
//!
//! The lookup has a time limit and a thread of its own, because the system's resolver cannot be
//! interrupted. Without an answer or with an invalid address, the agent starts without statsd.

use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::mpsc;
use std::time::Duration;

use super::HOST_PORT;
use super::merged::Merged;
use crate::net::address;

const NAME: &str = "statsdUdpAddress";
/// The limit for the lookup of the name.
const LIMIT: Duration = Duration::from_secs(2);
const WITHOUT_STATSD: &str = "Envoy starts without statsd";

type LookUp = Box<dyn FnOnce(&str) -> io::Result<Vec<IpAddr>> + Send>;

/// Replaces the name by an address, or unsets it with a warning.
pub(super) fn resolve(merged: &mut Merged) {
    resolve_by(Box::new(look_up), LIMIT, merged);
}

fn look_up(host: &str) -> io::Result<Vec<IpAddr>> {
    Ok((host, 0).to_socket_addrs()?.map(|address| address.ip()).collect())
}

fn resolve_by(look_up: LookUp, limit: Duration, merged: &mut Merged) {
    let address = std::mem::take(&mut merged.config.statsd_udp_address);
    let Some((host, port)) = address::split(&address) else {
        return merged.warn(NAME, &address, HOST_PORT, WITHOUT_STATSD);
    };
    if host.parse::<IpAddr>().is_ok() {
        merged.config.statsd_udp_address = address;
        return;
    }
    match resolve_host(limit, host.to_owned(), look_up) {
        Ok(ip) => {
            let origin = format!("{}, looked up", merged.origins.find(NAME));
            merged.config.statsd_udp_address = SocketAddr::new(ip, port).to_string();
            merged.set_origin(NAME, &origin);
        }
        Err(reason) => {
            let found = format!("{address}: {reason}");
            merged.warn(NAME, &found, "a name that can be resolved", WITHOUT_STATSD);
        }
    }
}

/// Returns the first IPv4 address, else the last IPv6 address.
fn resolve_host(limit: Duration, host: String, look_up: LookUp) -> io::Result<IpAddr> {
    let (answer, answers) = mpsc::channel();
    std::thread::Builder::new().name("statsd".to_owned()).spawn(move || {
        // The receiver is dropped if the answer comes too late.
        let _ = answer.send(look_up(&host));
    })?;
    let found = answers
        .recv_timeout(limit)
        .map_err(|_| io::Error::other(format!("no answer within {limit:?}")))??;
    let v4 = found.iter().find(|ip| ip.is_ipv4());
    v4.or(found.last()).copied().ok_or_else(|| io::Error::other("no address"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolved<F>(text: &str, look_up: F) -> (Option<String>, usize)
    where
        F: FnOnce(&str) -> io::Result<Vec<IpAddr>> + Send + 'static,
    {
        let mut merged = Merged::builtin();
        merged.merge_text("it", text);
        resolve_by(Box::new(look_up), Duration::from_millis(20), &mut merged);
        let address = merged.config.statsd_udp_address;
        let used = Some(address).filter(|address| !address.is_empty());
        (used, merged.notes.warnings.len())
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn a_name_becomes_its_ipv4_address_if_it_has_one() {
        let text = "{statsdUdpAddress: 'statsd:8125'}";
        let both = |_: &str| Ok(vec![ip("fd00::1"), ip("10.0.0.1"), ip("10.0.0.2")]);
        assert_eq!(resolved(text, both), (Some("10.0.0.1:8125".into()), 0));
        let v6 = |_: &str| Ok(vec![ip("fd00::1"), ip("fd00::2")]);
        assert_eq!(resolved(text, v6), (Some("[fd00::2]:8125".into()), 0));
    }

    #[test]
    fn a_name_that_is_not_found_in_time_is_a_warning() {
        let text = "{statsdUdpAddress: 'statsd:8125'}";
        let refused = |_: &str| Err(io::Error::other("no such name"));
        assert_eq!(resolved(text, refused), (None, 1));
        assert_eq!(resolved(text, |_: &str| Ok(Vec::new())), (None, 1));
        let (_kept, never) = mpsc::channel::<Vec<IpAddr>>();
        let silent = move |_: &str| never.recv().map_err(io::Error::other);
        assert_eq!(resolved(text, silent), (None, 1));
    }

    #[test]
    fn ip_addresses_stay_and_without_a_valid_address_there_is_no_statsd() {
        for (address, is_valid) in [
            ("10.0.0.1:1", true),
            ("[fd00::1]:1", true),
            ("statsd", false),
            ("fd00::1", false),
            ("statsd:", false),
            ("statsd:syslog", false),
            ("a b:1", false),
        ] {
            let text = format!("{{statsdUdpAddress: '{address}'}}");
            let panics = |_: &str| panic!("looked up");
            let kept = is_valid.then(|| address.to_owned());
            assert_eq!(resolved(&text, panics), (kept, usize::from(!is_valid)));
        }
    }
}
