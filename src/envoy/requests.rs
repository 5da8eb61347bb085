//! Counts what an Envoy still owes its clients: requests under way, bytes of answers not sent yet, and
//! connections that carry no requests of their own.
//!
//! The figures are Envoy's own gauges, one line each. A connection of HTTP that is idle owes nobody
//! anything. Of one that is not HTTP nobody but its ends knows, so each counts: those are a listener's
//! connections less the ones that speak HTTP. A tunnel is no request but a connection within another.
//! Of a sidecar only what comes in counts, by the names istiod gives, as only that is drained. The
//! pod's own internal_ports does not count.
//!
//! Does not know how long to go on, or what follows.

use super::connections;

/// `$` is escaped: a query must not hold it as it is everywhere. What was never used is left out, as
/// it is zero.
pub(super) const PATH: &str =
    "/stats?usedonly&filter=downstream_(rq_active|cx_active|cx_tx_bytes_buffered)%24";

/// Managers of connections that are Envoy's own, or the bootstrap's.
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
/// The ports all that comes into a sidecar is sent to, at the end of those listeners' names.
const CAPTURED: [&str; 2] = ["_15006", "_15008"];

/// What Envoy has to keep for this, as expressions for whole names. Of a listener each thread has
/// figures, too, which are not needed and many.
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

/// How many there are. None is left where there are no figures, as Envoy may not keep them.
pub(super) fn under_way(statistics: &str, inbound_only: bool, internal_ports: &[u16]) -> u64 {
    let (mut requests, mut speak_http, mut connections) = (0_u64, 0_u64, 0_u64);
    let mut is_sending = false;
    for line in statistics.lines() {
        let Some((name, value)) = line.rsplit_once(": ") else {
            continue;
        };
        let Ok(value) = value.trim().parse::<u64>() else {
            continue;
        };
        let Some((scope, gauge)) = name.rsplit_once('.') else {
            continue;
        };
        if let Some(manager) = scope.strip_prefix("http.") {
            if !manager_counts(manager, inbound_only) {
                continue;
            }
            match gauge {
                "downstream_rq_active" if manager == TUNNELS => {
                    connections = connections.saturating_add(value);
                }
                "downstream_rq_active" => requests = requests.saturating_add(value),
                "downstream_cx_active" => speak_http = speak_http.saturating_add(value),
                _ => is_sending |= value > 0,
            }
        } else if let Some(listener) = scope.strip_prefix("listener.")
            && gauge == "downstream_cx_active"
            && connections::counts(listener, internal_ports)
            && (!inbound_only || CAPTURED.iter().any(|port| listener.ends_with(port)))
        {
            connections = connections.saturating_add(value);
        }
    }
    let owed = requests.saturating_add(connections.saturating_sub(speak_http));
    owed.max(u64::from(is_sending))
}

fn manager_counts(manager: &str, inbound_only: bool) -> bool {
    let name = manager.trim_end_matches(';');
    let comes_in = [TUNNELS, "inbound", "Inbound"]
        .iter()
        .any(|start| name.starts_with(start));
    !OWN.contains(&name) && (comes_in || !inbound_only)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TUNNELED: &str = "\
        http.connect_terminate.downstream_cx_active: 1\n\
        http.connect_terminate.downstream_rq_active: 3\n\
        http.inbound_b;.downstream_cx_active: 2\n\
        listener.0.0.0.0_15008.downstream_cx_active: 1\n\
        listener.envoy_internal_main_internal.downstream_cx_active: 3\n";

    #[test]
    fn counts_requests_and_connections_without_requests_and_answers_not_sent_yet() {
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
            let count = |inbound_only| under_way(&statistics, inbound_only, &[15021]);
            assert_eq!(
                (count(true), count(false)),
                (sidecar, other),
                "{statistics}"
            );
        }
    }
}
