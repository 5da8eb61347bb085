//! Counts the active requests or connections of an Envoy that shuts down, from its gauges.
//!
//! The connections of the pod's own listeners (health checks, scrapes, admin port, internal listeners) do not count, as
//! in pilot-agent. Requests are active HTTP requests, responses with unsent bytes, and connections without HTTP,
//! because only the two ends of such a connection know if it is idle. A tunnel counts as a connection, because it is a
//! connection inside another one. In a sidecar only inbound requests count, selected by istiod's names, because only
//! inbound listeners are drained. Envoy writes the colons of an IPv6 address as underscores.

use std::net::IpAddr;
use std::time::Duration;

use http::Method;

use super::admin::Admin;
use crate::runtime::lifecycle::with_causes;

/// Consecutive failures after which counting ends.
const FAILURES: u32 = 5;
const CONNECTIONS: &str = "downstream_cx_active";
const REQUESTS: &str = "downstream_rq_active";

/// HTTP connection managers of Envoy itself, or of the bootstrap.
const INTERNAL_MANAGERS: [&str; 6] =
    ["admin", "agent", "async-client", "secure_merged_stats", "secure_stats", "stats"];
/// The manager whose requests are tunnels.
const TUNNELS: &str = "connect_terminate";
/// Suffixes of the names of the listeners for all inbound traffic of a sidecar.
const INBOUND_PORTS: [&str; 2] = ["_15006", "_15008"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Active {
    Connections,
    Requests,
}

#[derive(Clone, Debug)]
pub(super) struct Counting {
    pub(super) active: Active,
    pub(super) period: Duration,
    pub(super) inbound_only: bool,
    pub(super) internal_ports: Vec<u16>,
}

/// Returns expressions for the names of the statistics that [`Active::Requests`] needs. They match no statistic of a
/// single worker.
pub fn statistics(inbound_only: bool) -> [&'static str; 2] {
    if inbound_only {
        [
            r"http\.(connect_terminate|[iI]nbound.*)\.downstream_(rq_active|cx_active|cx_tx_bytes_buffered)",
            r"listener\.[^w]+_1500[68]\.downstream_cx_active",
        ]
    } else {
        [
            r"http\..*\.downstream_(rq_active|cx_active|cx_tx_bytes_buffered)",
            r"listener\.[^w]+\.downstream_cx_active",
        ]
    }
}

impl Active {
    /// Returns the name in logs, and the page of the gauges that are not zero. `$` must be escaped in a query.
    fn name_and_path(self) -> (&'static str, &'static str) {
        match self {
            Self::Connections => {
                ("active connections", "/stats?usedonly&filter=downstream_cx_active%24")
            }
            Self::Requests => (
                "active requests",
                "/stats?usedonly&filter=downstream_(rq_active|cx_active|cx_tx_bytes_buffered)%24",
            ),
        }
    }
}

impl Counting {
    /// Counts in each period until none is left or Envoy has no count. Reports each count that has changed.
    pub(super) async fn until_none(self, admin: Admin, report: impl Fn(u64)) {
        let (name, path) = self.active.name_and_path();
        let mut failures = 0;
        let mut last = None;
        loop {
            match admin.call(Method::GET, path).await {
                Err(error) => {
                    // Envoy has exited if its admin port is closed.
                    failures = if error.is_closed() { FAILURES } else { failures + 1 };
                    let problem = with_causes(&error);
                    tracing::warn!(
                        "cannot count Envoy's {name} ({failures} of {FAILURES}): {problem}"
                    );
                    if failures == FAILURES {
                        return;
                    }
                }
                Ok(statistics) => match self.count(&statistics) {
                    None => return tracing::warn!("Envoy has no statistic for {name}"),
                    Some(0) => return tracing::info!("Envoy has no {name} left"),
                    Some(count) => {
                        failures = 0;
                        if last.replace(count) != Some(count) {
                            tracing::info!("Envoy still has {count} {name}");
                            report(count);
                        }
                    }
                },
            }
            tokio::time::sleep(self.period).await;
        }
    }

    fn count(&self, statistics: &str) -> Option<u64> {
        match self.active {
            Active::Connections if statistics.trim().is_empty() => None,
            Active::Connections => Some(self.connections(statistics)),
            // An Envoy without these statistics counts as idle, so nothing waits for it.
            Active::Requests => Some(self.requests(statistics)),
        }
    }

    fn connections(&self, statistics: &str) -> u64 {
        gauges(statistics)
            .filter(|(_, name, _)| *name == CONNECTIONS)
            .filter_map(|(scope, _, value)| Some((scope.strip_prefix("listener.")?, value)))
            .filter(|(listener, _)| self.is_workload_listener(listener))
            .map(|(_, value)| value)
            .fold(0, u64::saturating_add)
    }

    fn requests(&self, statistics: &str) -> u64 {
        let [mut requests, mut unsent, mut http_connections, mut connections] = [0_u64; 4];
        for (scope, name, value) in gauges(statistics) {
            let total = match (scope.split_once('.'), name) {
                (Some(("http", manager)), _) if !self.counts_manager(manager) => continue,
                (Some(("http", TUNNELS)), REQUESTS) => &mut connections,
                (Some(("http", _)), REQUESTS) => &mut requests,
                (Some(("http", _)), CONNECTIONS) => &mut http_connections,
                (Some(("http", _)), _) => &mut unsent,
                (Some(("listener", name)), CONNECTIONS) if self.counts_listener(name) => {
                    &mut connections
                }
                _ => continue,
            };
            *total = total.saturating_add(value);
        }
        requests.saturating_add(connections.saturating_sub(http_connections)).max(unsent.min(1))
    }

    fn counts_listener(&self, listener: &str) -> bool {
        let is_inbound = INBOUND_PORTS.iter().any(|port| listener.ends_with(port));
        self.is_workload_listener(listener) && (is_inbound || !self.inbound_only)
    }

    fn counts_manager(&self, manager: &str) -> bool {
        let name = manager.trim_end_matches(';');
        let is_inbound =
            [TUNNELS, "inbound", "Inbound"].iter().any(|prefix| name.starts_with(prefix));
        !INTERNAL_MANAGERS.contains(&name) && (is_inbound || !self.inbound_only)
    }

    /// Returns true if a listener belongs neither to Envoy itself nor to the pod.
    fn is_workload_listener(&self, listener: &str) -> bool {
        let is_envoys = ["admin", "admin.main_thread"].contains(&listener)
            || listener.contains("worker_")
            || listener.starts_with("envoy_internal_");
        !is_envoys && local_port(listener).is_none_or(|port| !self.internal_ports.contains(&port))
    }
}

/// Returns the port of a listener that is bound to all addresses or to loopback.
fn local_port(listener: &str) -> Option<u16> {
    let (address, port) = listener.rsplit_once('_')?;
    let address: IpAddr = address.trim_matches(['[', ']']).replace('_', ":").parse().ok()?;
    if address.is_unspecified() || address.is_loopback() { port.parse().ok() } else { None }
}

/// Reads scope, name and value from the lines `scope.name: value` of a page. Logs and skips other lines.
fn gauges(statistics: &str) -> impl Iterator<Item = (&str, &str, u64)> {
    statistics.lines().filter(|line| !line.trim().is_empty()).filter_map(|line| {
        let gauge = line.rsplit_once(": ").and_then(|(name, value)| {
            let (scope, name) = name.rsplit_once('.')?;
            Some((scope, name, value.trim().parse().ok()?))
        });
        if gauge.is_none() {
            tracing::warn!(line, "not a gauge of Envoy, expected a name and a number");
        }
        gauge
    })
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn counting(active: Active, inbound_only: bool, internal_ports: &[u16]) -> Counting {
        Counting {
            active,
            period: Duration::ZERO,
            inbound_only,
            internal_ports: internal_ports.to_vec(),
        }
    }

    #[tokio::test]
    async fn a_closed_admin_port_is_asked_once() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        drop(listener);
        let long = Duration::from_secs(3600);
        let admin = Admin::new(address.ip(), address.port(), long);
        let counting = Counting { period: long, ..counting(Active::Requests, true, &[]) };
        let ends = counting.until_none(admin, |_| panic!("a count"));
        let patience = Duration::from_secs(20);
        let ended = tokio::time::timeout(patience, ends).await;
        ended.expect("an end without another try");
    }

    const INTERNAL: [u16; 3] = [15021, 15090, 15443];

    #[test]
    fn only_connections_of_the_workloads_listeners_count() {
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
            let connections = counting(Active::Connections, true, &INTERNAL);
            assert_eq!(connections.count(statistics), expected, "{statistics}");
        }
    }

    const TUNNELED: &str = "\
        http.connect_terminate.downstream_cx_active: 1\n\
        http.connect_terminate.downstream_rq_active: 3\n\
        http.inbound_b;.downstream_cx_active: 2\n\
        listener.0.0.0.0_15008.downstream_cx_active: 1\n\
        listener.envoy_internal_main_internal.downstream_cx_active: 3\n";

    #[test]
    fn requests_and_connections_without_http_and_unsent_responses_count() {
        let idle = "\
            http.admin.downstream_rq_active: 1\n\
            http.agent.downstream_rq_active: 1\n\
            http.inbound_0.0.0.0_8080;.downstream_cx_active: 7\n\
            http.inbound_0.0.0.0_8080;.downstream_cx_tx_bytes_buffered: 0\n\
            http.inbound_0.0.0.0_8080;.downstream_rq_active: 0\n\
            http.outbound_0.0.0.0_80;.downstream_cx_active: 2\n\
            http.stats.downstream_cx_tx_bytes_buffered: 12\n\
            listener.0.0.0.0_15006.downstream_cx_active: 7\n\
            listener.0.0.0.0_15006.worker_0.downstream_cx_active: 7\n\
            listener.0.0.0.0_15021.downstream_cx_active: 1\n\
            listener.0.0.0.0_80.downstream_cx_active: 2\n\
            listener.admin.downstream_cx_active: 1\n";
        let more = |lines: &str| format!("{idle}{lines}");
        for (statistics, sidecar, other) in [
            (String::new(), 0, 0),
            ("no figures\na: b\nhttp.a: 1\n".to_owned(), 0, 0),
            (more(""), 0, 0),
            (more("http.InboundPassthroughCluster;.downstream_rq_active: 3\n"), 3, 3),
            (more("http.outbound_0.0.0.0_80;.downstream_rq_active: 3\n"), 0, 3),
            (more("http.inbound_a;.downstream_cx_tx_bytes_buffered: 900\n"), 1, 1),
            (more("listener.[__]_15006.downstream_cx_active: 2\n"), 2, 2),
            (more("listener.10.0.0.1_5432.downstream_cx_active: 4\n"), 0, 4),
            // One connection has three tunnels, of which two carry HTTP: the third one counts.
            (more(TUNNELED), 1, 1),
        ] {
            let count = |inbound_only| {
                counting(Active::Requests, inbound_only, &[15021]).count(&statistics)
            };
            let expected = (Some(sidecar), Some(other));
            assert_eq!((count(true), count(false)), expected, "{statistics}");
        }
    }
}
