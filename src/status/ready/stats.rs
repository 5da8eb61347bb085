//! Envoy's counters about its start: clusters and listeners accepted, workers running.
//!
//! Envoy's `/ready` does not tell: an Envoy that cannot reach istiod, or rejects its listeners, calls
//! itself ready all the same.

use std::time::Duration;

use ::http::{Method, StatusCode};

use crate::envoy::admin::Admin;
use crate::lifecycle::with_causes;

const CONFIGURED_LIMIT: Duration = Duration::from_secs(1);
const LIVE_LIMIT: Duration = Duration::from_secs(3);

/// `^(cluster_manager\.cds|listener_manager\.lds)\.(update_success|update_rejected)$`
const CONFIGURED: &str = "/stats?usedonly&filter=%5E(cluster_manager%5C.cds%7Clistener_manager\
    %5C.lds)%5C.(update_success%7Cupdate_rejected)%24";
/// `^(server\.state|listener_manager\.workers_started)`
const LIVE: &str =
    "/stats?usedonly&filter=%5E(server%5C.state%7Clistener_manager%5C.workers_started)";

const STATE: &str = "server.state";
const WORKERS: &str = "listener_manager.workers_started";

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(in crate::status) enum Missing {
    #[error("failed to get config stats: {0}")]
    NoUpdates(String),
    #[error("failed to get readiness stats: {0}")]
    NoState(String),
    #[error("config not received from XDS server (is Istiod running?): {0}")]
    NotReceived(Updates),
    #[error("config received from XDS server, but was rejected: {0}")]
    Rejected(Updates),
    #[error("config not fully received from XDS server: {0}")]
    NotComplete(Updates),
    #[error("{name} is not yet updated: {body}")]
    NotUpdated { name: &'static str, body: String },
    #[error("server is not live, current state is: {0}")]
    NotLive(&'static str),
    #[error("workers have not yet started")]
    NoWorkers,
    #[error("envoy stat {name} missing separator. line:{line}")]
    Separator { name: &'static str, line: String },
    #[error("failed parsing Envoy stat {name}, expected a whole number. line:{line}")]
    Number { name: &'static str, line: String },
}

/// Envoy's counts of CDS and LDS updates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::status) struct Updates {
    clusters: u64,
    clusters_rejected: u64,
    listeners: u64,
    listeners_rejected: u64,
}

impl std::fmt::Display for Updates {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "cds updates: {} successful, {} rejected; lds updates: {} successful, {} rejected",
            self.clusters, self.clusters_rejected, self.listeners, self.listeners_rejected
        )
    }
}

/// Whether Envoy has accepted clusters and listeners.
pub(super) async fn is_configured(admin: Admin) -> Result<(), Missing> {
    let body = ask(admin, CONFIGURED, CONFIGURED_LIMIT).await;
    has_updates(&body.map_err(Missing::NoUpdates)?)
}

/// Whether Envoy is live and its workers run.
pub(super) async fn is_live(admin: Admin) -> Result<(), Missing> {
    let body = ask(admin, LIVE, LIVE_LIMIT).await;
    has_workers(&body.map_err(Missing::NoState)?)
}

async fn ask(admin: Admin, path: &str, limit: Duration) -> Result<String, String> {
    let asked = Admin { limit, ..admin }.request(Method::GET, path).await;
    match asked {
        Ok(answer) if answer.status() == StatusCode::OK => {
            Ok(String::from_utf8_lossy(answer.body()).into_owned())
        }
        Ok(answer) => Err(format!("unexpected status {}", answer.status().as_u16())),
        Err(error) => Err(with_causes(&error)),
    }
}

fn has_updates(body: &str) -> Result<(), Missing> {
    let updates = Updates {
        clusters: number(body, "cluster_manager.cds.update_success")?,
        clusters_rejected: number(body, "cluster_manager.cds.update_rejected")?,
        listeners: number(body, "listener_manager.lds.update_success")?,
        listeners_rejected: number(body, "listener_manager.lds.update_rejected")?,
    };
    match (updates.clusters, updates.listeners) {
        (1.., 1..) => Ok(()),
        (0, 0) => Err(Missing::NotReceived(updates)),
        _ if updates.clusters_rejected.max(updates.listeners_rejected) > 0 => {
            Err(Missing::Rejected(updates))
        }
        _ => Err(Missing::NotComplete(updates)),
    }
}

fn has_workers(body: &str) -> Result<(), Missing> {
    for name in [STATE, WORKERS] {
        if !body.contains(name) {
            let body = body.to_owned();
            return Err(Missing::NotUpdated { name, body });
        }
    }
    let state = number(body, STATE)?;
    let workers = number(body, WORKERS)?;
    match (state, workers) {
        (0, 1) => Ok(()),
        (0, _) => Err(Missing::NoWorkers),
        (1, _) => Err(Missing::NotLive("DRAINING")),
        (2, _) => Err(Missing::NotLive("PRE_INITIALIZING")),
        (3, _) => Err(Missing::NotLive("INITIALIZING")),
        _ => Err(Missing::NotLive("UNKNOWN")),
    }
}

/// The value of the first line that begins with `name`. Counters that are zero are not listed.
fn number(body: &str, name: &'static str) -> Result<u64, Missing> {
    let Some(line) = body.lines().find(|line| line.starts_with(name)) else {
        return Ok(0);
    };
    let mut parts = line.split(':');
    let (_, Some(value), None) = (parts.next(), parts.next(), parts.next()) else {
        let line = line.to_owned();
        return Err(Missing::Separator { name, line });
    };
    value.trim().parse().map_err(|_| Missing::Number {
        name,
        line: line.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lines of the four counters, those of zero left out.
    fn updates(counts: [u64; 4]) -> String {
        let names = [
            "cluster_manager.cds.update_success",
            "cluster_manager.cds.update_rejected",
            "listener_manager.lds.update_success",
            "listener_manager.lds.update_rejected",
        ];
        let lines = names.iter().zip(counts).filter(|(_, count)| *count > 0);
        lines
            .map(|(name, count)| format!("{name}: {count}\n"))
            .collect()
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
            let found = has_updates(&updates(counts)).err();
            let found = found.map(|missing| missing.to_string());
            match expected {
                None => assert_eq!(found, None, "{counts:?}"),
                Some(text) => assert!(found.expect("missing").contains(text), "{counts:?}"),
            }
        }
        let missing = has_updates(&updates([1, 2, 0, 4])).expect_err("missing");
        assert_eq!(
            missing.to_string(),
            "config received from XDS server, but was rejected: cds updates: 1 successful, 2 \
             rejected; lds updates: 0 successful, 4 rejected"
        );
        let missing = has_updates("").expect_err("missing");
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
            let found = has_workers(body).err().map(|missing| missing.to_string());
            assert_eq!(found.unwrap_or_default(), expected);
        }
    }
}
