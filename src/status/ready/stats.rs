//! Reads Envoy's counters about its start: clusters and listeners accepted, workers running.
//!
//! Envoy's `/ready` is not enough: an Envoy that cannot reach istiod, or rejects its listeners, reports that it is
//! ready anyway.

use super::NotReady;
use crate::envoy::admin::Admin;

/// `^(cluster_manager\.cds|listener_manager\.lds)\.(update_success|update_rejected)$`
const CONFIGURED: &str = "/stats?usedonly&filter=%5E(cluster_manager%5C.cds%7Clistener_manager\
    %5C.lds)%5C.(update_success%7Cupdate_rejected)%24";
/// `^(server\.state|listener_manager\.workers_started)`
const LIVE: &str =
    "/stats?usedonly&filter=%5E(server%5C.state%7Clistener_manager%5C.workers_started)";

const STATE: &str = "server.state";
const WORKERS: &str = "listener_manager.workers_started";

/// Fails unless Envoy has accepted clusters and listeners.
pub(super) async fn check_configured(admin: &Admin) -> Result<(), NotReady> {
    check_updates(&query(admin, "config", CONFIGURED).await?)
}

/// Fails unless Envoy is live and its workers run.
pub(super) async fn check_live(admin: &Admin) -> Result<(), NotReady> {
    check_workers(&query(admin, "readiness", LIVE).await?)
}

async fn query(admin: &Admin, what: &'static str, path: &str) -> Result<String, NotReady> {
    admin.text(path).await.map_err(|why| NotReady::NoStats { what, why: why.to_string() })
}

fn check_updates(body: &str) -> Result<(), NotReady> {
    let clusters = number(body, "cluster_manager.cds.update_success")?;
    let clusters_rejected = number(body, "cluster_manager.cds.update_rejected")?;
    let listeners = number(body, "listener_manager.lds.update_success")?;
    let listeners_rejected = number(body, "listener_manager.lds.update_rejected")?;
    let problem = match (clusters, listeners) {
        (1.., 1..) => return Ok(()),
        (0, 0) => "config not received from XDS server (is Istiod running?)",
        _ if clusters_rejected.max(listeners_rejected) > 0 => {
            "config received from XDS server, but was rejected"
        }
        _ => "config not fully received from XDS server",
    };
    Err(NotReady::NotConfigured {
        problem,
        clusters: (clusters, clusters_rejected),
        listeners: (listeners, listeners_rejected),
    })
}

fn check_workers(body: &str) -> Result<(), NotReady> {
    if let Some(name) = [STATE, WORKERS].into_iter().find(|name| !body.contains(name)) {
        return Err(NotReady::NotUpdated { name, body: body.to_owned() });
    }
    let state = match (number(body, STATE)?, number(body, WORKERS)?) {
        (0, 1) => return Ok(()),
        (0, _) => return Err(NotReady::NoWorkers),
        (1, _) => "DRAINING",
        (2, _) => "PRE_INITIALIZING",
        (3, _) => "INITIALIZING",
        _ => "UNKNOWN",
    };
    Err(NotReady::NotLive { state })
}

/// Returns the value of the first line that begins with `name`. Envoy does not list counters that are zero.
fn number(body: &str, name: &'static str) -> Result<u64, NotReady> {
    let Some(line) = body.lines().find(|line| line.starts_with(name)) else {
        return Ok(0);
    };
    match line.split_once(':') {
        Some((_, value)) if !value.contains(':') => {
            value.trim().parse().map_err(|_| NotReady::NoNumber { name, line: line.to_owned() })
        }
        _ => Err(NotReady::NoSeparator { name, line: line.to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the lines of the four counters. A counter of zero has no line, as in Envoy's response.
    fn updates(counts: [u64; 4]) -> String {
        let names = [
            "cluster_manager.cds.update_success",
            "cluster_manager.cds.update_rejected",
            "listener_manager.lds.update_success",
            "listener_manager.lds.update_rejected",
        ];
        let lines = names.iter().zip(counts).filter(|(_, count)| *count > 0);
        lines.map(|(name, count)| format!("{name}: {count}\n")).collect()
    }

    #[test]
    fn an_envoy_is_configured_once_it_has_accepted_clusters_and_listeners() {
        for (counts, expected) in [
            ([1, 0, 1, 0], None),
            ([1, 2, 3, 4], None),
            ([0, 0, 0, 0], Some("not received")),
            ([0, 1, 0, 1], Some("not received")),
            ([1, 0, 0, 0], Some("not fully received")),
            ([0, 0, 1, 0], Some("not fully received")),
            ([1, 0, 0, 1], Some("was rejected")),
            ([1, 1, 0, 0], Some("was rejected")),
        ] {
            let found = check_updates(&updates(counts)).err();
            match expected {
                None => assert_eq!(found, None, "{counts:?}"),
                Some(text) => {
                    assert!(found.expect("missing").to_string().contains(text), "{counts:?}");
                }
            }
        }
        let missing = check_updates(&updates([1, 2, 0, 4])).expect_err("missing");
        assert_eq!(
            missing.to_string(),
            "config received from XDS server, but was rejected: cds updates: 1 successful, 2 \
             rejected; lds updates: 0 successful, 4 rejected"
        );
        let missing = check_updates("").expect_err("missing");
        assert_eq!(
            missing.to_string(),
            "config not received from XDS server (is Istiod running?): cds updates: 0 successful, \
             0 rejected; lds updates: 0 successful, 0 rejected"
        );
    }

    #[test]
    fn an_envoy_is_live_once_its_workers_run() {
        for (body, expected) in [
            ("server.state: 0\nlistener_manager.workers_started: 1\n", ""),
            (
                "server.state: 0\nlistener_manager.workers_started: 0\n",
                "workers have not yet started",
            ),
            (
                "listener_manager.workers_started: 1\nserver.state: 2",
                "server is not live, current state is: PRE_INITIALIZING",
            ),
            (
                "listener_manager.workers_started: 1\nserver.state: 7",
                "server is not live, current state is: UNKNOWN",
            ),
            (
                "server.state: 0\n",
                "listener_manager.workers_started is not yet updated: server.state: 0\n",
            ),
            ("", "server.state is not yet updated: "),
            (
                "server.state: 0: 1\nlistener_manager.workers_started: 1",
                "envoy stat server.state missing separator. line:server.state: 0: 1",
            ),
            (
                "server.state: x\nlistener_manager.workers_started: 1",
                "failed parsing Envoy stat server.state, expected a whole number. \
                 line:server.state: x",
            ),
        ] {
            let found = check_workers(body).err();
            assert_eq!(found.map_or_else(String::new, |missing| missing.to_string()), expected);
        }
    }
}
