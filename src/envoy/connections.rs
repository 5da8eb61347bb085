//! Counts the connections an Envoy still has, and waits until none of what is counted is left.
//!
//! The figures are Envoy's own gauges of its listeners, one line each. Those of the pod's own
//! internal_ports do not count: health checks, scrapes, the admin port that is asked here, and Envoy's
//! internal listeners. Envoy writes the colons of an IPv6 address as underscores.
//!
//! Does not know how long to go on, or what follows.

use std::net::IpAddr;
use std::time::Duration;

use http::Method;

use super::admin::Admin;
use crate::lifecycle::with_causes;

pub(super) const PERIOD: Duration = Duration::from_secs(1);
/// The same when nothing new comes in.
pub(super) const LAST_PERIOD: Duration = Duration::from_millis(100);
/// So many failures in a row mean that there will be no figures.
const FAILURES: u32 = 5;
/// `$` is escaped: a query must not hold it as it is everywhere.
pub(super) const PATH: &str = "/stats?usedonly&filter=downstream_cx_active%24";
const GAUGE: &str = ".downstream_cx_active";

/// The sum of all that counts; none when there are no figures at all.
pub(super) fn sum(statistics: &str, internal_ports: &[u16]) -> Option<u64> {
    if statistics.trim().is_empty() {
        return None;
    }
    let counted = statistics.lines().filter(|line| !line.trim().is_empty());
    Some(
        counted
            .filter_map(|line| figure(line, internal_ports))
            .sum(),
    )
}

/// The figure of one line, if it counts.
fn figure(line: &str, internal_ports: &[u16]) -> Option<u64> {
    let Some((name, value)) = line.rsplit_once(": ") else {
        tracing::warn!(line, "Envoy counts connections in a form that is not known");
        return None;
    };
    let listener = name.strip_prefix("listener.")?.strip_suffix(GAUGE)?;
    if !counts(listener, internal_ports) {
        return None;
    }
    let value = value.trim().parse();
    if value.is_err() {
        tracing::warn!(
            line,
            "Envoy counts connections by something that is no number"
        );
    }
    value.ok()
}

/// Whether a listener is none of Envoy's own or of the pod's internal_ports.
pub(super) fn counts(listener: &str, internal_ports: &[u16]) -> bool {
    let of_envoy = ["admin", "admin.main_thread"].contains(&listener)
        || listener.contains("worker_")
        || listener.starts_with("envoy_internal_");
    !of_envoy && !port_of_own(listener).is_some_and(|port| internal_ports.contains(&port))
}

/// The port of a listener that is bound to everywhere or to this machine.
fn port_of_own(listener: &str) -> Option<u16> {
    let (address, port) = listener.rsplit_once('_')?;
    let address = address.trim_matches(['[', ']']).replace('_', ":");
    let address: IpAddr = address.parse().ok()?;
    let is_own = address.is_unspecified() || address.is_loopback();
    port.parse().ok().filter(|_| is_own)
}

/// What is looked at, and how often.
#[derive(Clone, Copy, Debug)]
pub(super) struct Look {
    pub(super) path: &'static str,
    /// In words.
    pub(super) what: &'static str,
    pub(super) period: Duration,
}

/// Looks at once and then after each period, and returns when `count` finds none left or when Envoy
/// does not say. Tells `counted` of each figure.
pub(super) async fn gone(
    admin: Admin,
    look: Look,
    count: impl Fn(&str) -> Option<u64>,
    counted: impl Fn(u64),
) {
    let what = look.what;
    let (mut failures, mut last) = (0, None);
    loop {
        match ask(admin, look.path).await {
            Err(problem) => {
                failures += 1;
                tracing::warn!("cannot count Envoy's {what} ({failures} of {FAILURES}): {problem}");
                if failures == FAILURES {
                    return;
                }
            }
            Ok(statistics) => match count(&statistics) {
                None => return tracing::warn!("Envoy has no figures of its {what}"),
                Some(0) => return tracing::info!("Envoy has no {what} left"),
                Some(active) => {
                    failures = 0;
                    if last.replace(active) != Some(active) {
                        tracing::info!("Envoy still has {active} {what}");
                        counted(active);
                    }
                }
            },
        }
        tokio::time::sleep(look.period).await;
    }
}

async fn ask(admin: Admin, path: &str) -> Result<String, String> {
    let answer = admin.request(Method::GET, path).await;
    let answer = answer.map_err(|error| with_causes(&error))?;
    if !answer.status.is_success() {
        return Err(format!("status {}, expected 200", answer.status.as_u16()));
    }
    Ok(String::from_utf8_lossy(&answer.body).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: [u16; 3] = [15021, 15090, 15443];

    #[test]
    fn sums_listeners_of_the_workload_and_nothing_else() {
        let internal = "\
            listener.envoy_internal_connect_originate.downstream_cx_active: 7\n\
            listener.admin.downstream_cx_active: 1\n\
            listener.admin.main_thread.downstream_cx_active: 1\n\
            listener.0.0.0.0_15021.downstream_cx_active: 2\n\
            listener.[__]_15021.downstream_cx_active: 2\n\
            listener.127.0.0.1_15090.downstream_cx_active: 1\n\
            listener.[__1]_15090.downstream_cx_active: 1\n\
            listener.0.0.0.0_15443.downstream_cx_active: 1\n\
            listener.0.0.0.0_8443.worker_0.downstream_cx_active: 6\n\
            http.ingress.downstream_cx_active: 9\n";
        let workload = "\
            listener.0.0.0.0_8443.downstream_cx_active: 6\n\
            listener.[__]_9093.downstream_cx_active: 8\n\
            listener.10.0.0.1_80.downstream_cx_active: 1\n\
            listener.10.0.0.2_80.downstream_cx_active: 1\n\
            listener.[fd00__1]_80.downstream_cx_active: 2\n\
            listener.books.downstream_cx_active: 1\n";
        let both = format!("{internal}{workload}");
        let odd = "no figure\nlistener.0.0.0.0_1.downstream_cx_active: many\n";
        for (statistics, expected) in [
            (both.as_str(), Some(19)),
            (internal, Some(0)),
            (odd, Some(0)),
            ("listener.10.0.0.1_15021.downstream_cx_active: 1", Some(1)),
            ("\n", None),
            ("", None),
        ] {
            assert_eq!(sum(statistics, &OWN), expected, "{statistics}");
        }
    }
}
