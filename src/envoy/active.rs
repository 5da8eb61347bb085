//! Counts the active requests or connections of an Envoy that shuts down, from its gauges.
//!
//! The connections of the pod's own listeners (health checks, scrapes, admin port, internal listeners) do not count, as
//! in pilot-agent. Requests are active requests, unsent bytes of responses, and connections without
//! HTTP, because only their two ends know whether they are idle. A tunnel is a connection within another. In a
//! sidecar only inbound requests count, by istiod's names, because only inbound listeners are drained. Envoy writes
//! the colons of an IPv6 address as underscores.

use std::net::IpAddr;
use std::time::Duration;

use http::Method;

use super::admin::Admin;
use crate::lifecycle::with_causes;

/// After so many failures in a row the count is given up.
const FAILURES: u32 = 5;
const CONNECTIONS: &str = "downstream_cx_active";
const REQUESTS: &str = "downstream_rq_active";

/// HTTP connection managers that are Envoy's own, or the bootstrap's.
const OWN: [&str; 6] = [
    "admin",
    "agent",
    "async-client",
    "secure_merged_stats",
    "secure_stats",
    "stats",
];
/// The manager whose requests are tunnels.
const TUNNELS: &str = "connect_terminate";
/// The end of the names of the listeners that all inbound traffic of a sidecar is sent to.
const CAPTURED: [&str; 2] = ["_15006", "_15008"];

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
    /// Ports of the pod's own listeners.
    pub(super) internal_ports: Vec<u16>,
}

/// Expressions for the names of the statistics that [`Active::Requests`] needs; none is of a single worker.
pub fn statistics(inbound_only: bool) -> [&'static str; 2] {
    match inbound_only {
        true => [
            r"http\.(connect_terminate|[iI]nbound.*)\.downstream_(rq_active|cx_active|cx_tx_bytes_buffered)",
            r"listener\.[^w]+_1500[68]\.downstream_cx_active",
        ],
        false => [
            r"http\..*\.downstream_(rq_active|cx_active|cx_tx_bytes_buffered)",
            r"listener\.[^w]+\.downstream_cx_active",
        ],
    }
}

impl Active {
    /// The gauges that are not zero. `$` must be escaped in a query.
    fn path(self) -> &'static str {
        match self {
            Self::Connections => "/stats?usedonly&filter=downstream_cx_active%24",
            Self::Requests => {
                "/stats?usedonly&filter=downstream_(rq_active|cx_active|cx_tx_bytes_buffered)%24"
            }
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Connections => "active connections",
            Self::Requests => "active requests",
        }
    }
}

impl Counting {
    /// Counts in each period until none is left or Envoy has no count. Reports each count that has changed.
    pub(super) async fn until_none(self, admin: Admin, report: impl Fn(u64)) {
        let what = self.active.name();
        let (mut failures, mut last) = (0, None);
        loop {
            match self.statistics(admin).await {
                Err((problem, is_closed)) => {
                    failures = if is_closed { FAILURES } else { failures + 1 };
                    tracing::warn!(
                        "cannot count Envoy's {what} ({failures} of {FAILURES}): {problem}"
                    );
                    if failures == FAILURES {
                        return;
                    }
                }
                Ok(statistics) => match self.count(&statistics) {
                    None => return tracing::warn!("Envoy has no statistic for {what}"),
                    Some(0) => return tracing::info!("Envoy has no {what} left"),
                    Some(count) => {
                        failures = 0;
                        if last.replace(count) != Some(count) {
                            tracing::info!("Envoy still has {count} {what}");
                            report(count);
                        }
                    }
                },
            }
            tokio::time::sleep(self.period).await;
        }
    }

    /// Fails with the problem, and whether the port is closed, where nothing is under way.
    async fn statistics(&self, admin: Admin) -> Result<String, (String, bool)> {
        let answer = admin.request(Method::GET, self.active.path()).await;
        let answer = answer.map_err(|error| (with_causes(&error), error.is_closed()))?;
        if !answer.status().is_success() {
            let problem = format!("status {}, expected 200", answer.status().as_u16());
            return Err((problem, false));
        }
        Ok(String::from_utf8_lossy(answer.body()).into_owned())
    }

    fn count(&self, statistics: &str) -> Option<u64> {
        match self.active {
            Active::Connections if statistics.trim().is_empty() => None,
            Active::Connections => Some(self.connections(statistics)),
            // Envoy may not keep these, and then nothing is waited for.
            Active::Requests => Some(self.requests(statistics)),
        }
    }

    fn connections(&self, statistics: &str) -> u64 {
        gauges(statistics)
            .filter(|(_, name, _)| *name == CONNECTIONS)
            .filter_map(|(scope, _, value)| Some((scope.strip_prefix("listener.")?, value)))
            .filter(|(listener, _)| self.is_workloads(listener))
            .map(|(_, value)| value)
            .fold(0, u64::saturating_add)
    }

    fn requests(&self, statistics: &str) -> u64 {
        let (mut requests, mut unsent) = (0_u64, 0_u64);
        let (mut speak_http, mut connections) = (0_u64, 0_u64);
        for (scope, name, value) in gauges(statistics) {
            let total = match (scope.split_once('.'), name) {
                (Some(("http", manager)), _) if !self.counts_manager(manager) => continue,
                (Some(("http", TUNNELS)), REQUESTS) => &mut connections,
                (Some(("http", _)), REQUESTS) => &mut requests,
                (Some(("http", _)), CONNECTIONS) => &mut speak_http,
                (Some(("http", _)), _) => &mut unsent,
                (Some(("listener", name)), CONNECTIONS) if self.counts_listener(name) => {
                    &mut connections
                }
                _ => continue,
            };
            *total = total.saturating_add(value);
        }
        let active = requests.saturating_add(connections.saturating_sub(speak_http));
        active.max(unsent.min(1))
    }

    fn counts_listener(&self, listener: &str) -> bool {
        let is_captured = CAPTURED.iter().any(|port| listener.ends_with(port));
        self.is_workloads(listener) && (is_captured || !self.inbound_only)
    }

    fn counts_manager(&self, manager: &str) -> bool {
        let name = manager.trim_end_matches(';');
        let is_inbound = [TUNNELS, "inbound", "Inbound"]
            .iter()
            .any(|start| name.starts_with(start));
        !OWN.contains(&name) && (is_inbound || !self.inbound_only)
    }

    /// Whether a listener is neither Envoy's own nor the pod's.
    fn is_workloads(&self, listener: &str) -> bool {
        let is_envoys = ["admin", "admin.main_thread"].contains(&listener)
            || listener.contains("worker_")
            || listener.starts_with("envoy_internal_");
        let port = local_port(listener);
        !is_envoys && !port.is_some_and(|port| self.internal_ports.contains(&port))
    }
}

/// The port of a listener that is bound to all addresses or to loopback.
fn local_port(listener: &str) -> Option<u16> {
    let (address, port) = listener.rsplit_once('_')?;
    let address = address.trim_matches(['[', ']']).replace('_', ":");
    let address: IpAddr = address.parse().ok()?;
    let is_local = address.is_unspecified() || address.is_loopback();
    port.parse().ok().filter(|_| is_local)
}

/// Scope, name and value of the gauges of a page, `scope.name: value` each. Other lines are left out.
fn gauges(statistics: &str) -> impl Iterator<Item = (&str, &str, u64)> {
    let lines = statistics.lines().filter(|line| !line.trim().is_empty());
    lines.filter_map(|line| {
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
        let counting = Counting {
            period: long,
            ..counting(Active::Requests, true, &[])
        };
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
            (
                more("http.InboundPassthroughCluster;.downstream_rq_active: 3\n"),
                3,
                3,
            ),
            (
                more("http.outbound_0.0.0.0_80;.downstream_rq_active: 3\n"),
                0,
                3,
            ),
            (
                more("http.inbound_a;.downstream_cx_tx_bytes_buffered: 900\n"),
                1,
                1,
            ),
            (more("listener.[__]_15006.downstream_cx_active: 2\n"), 2, 2),
            (
                more("listener.10.0.0.1_5432.downstream_cx_active: 4\n"),
                0,
                4,
            ),
            // Three tunnels in one connection, in two of which HTTP is spoken.
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
