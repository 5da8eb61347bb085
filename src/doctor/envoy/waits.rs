//! What Envoy waits for: listeners and clusters that warm, and secrets it has not received.
//!
//! A full configuration dump may have 100 MB, so only names are requested, of at most 1 MiB. What is
//! found is looked for again, as an update warms for a moment.

use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::future::join_all;
use serde_json::Value;

use super::super::report::Check;
use super::{PROBE_LIMIT, page};

/// Until what was found is looked for again.
const PAUSE: Duration = Duration::from_millis(300);
/// A list of what waits.
struct Wait {
    name: &'static str,
    page: &'static str,
    names: fn(&Value) -> BTreeSet<String>,
    remedy: &'static str,
}

const WAITS: [Wait; 3] = [
    Wait {
        name: "warming listeners",
        page: "/init_dump?mask=listener",
        names: listeners,
        remedy: "SdsApi: does the secret exist, may the proxy's account read it; RDS: does istiod send \
                 the route (`istioctl proxy-status`)",
    },
    Wait {
        name: "warming clusters",
        page: "/config_dump?resource=dynamic_warming_clusters&mask=cluster.name",
        names: |dump| names(dump, "/cluster/name"),
        remedy: "they wait for endpoints (EDS), a secret or a name: does istiod send them \
                 (`istioctl proxy-status`)",
    },
    Wait {
        name: "missing secrets",
        page: "/config_dump?resource=dynamic_warming_secrets&mask=name",
        names: |dump| names(dump, "/name"),
        remedy: "does the secret exist, and may the proxy's account read it; for default and ROOTCA see \
                 the certificate",
    },
];

pub(super) async fn checks(admin: &str) -> Vec<Check> {
    join_all(WAITS.iter().map(|wait| check(wait, admin))).await
}

async fn check(wait: &Wait, admin: &str) -> Check {
    let look = async || page(admin, wait.page).await.map(|dump| (wait.names)(&dump));
    let looking = async {
        let first = look().await?;
        if first.is_empty() {
            return Ok(first);
        }
        tokio::time::sleep(PAUSE).await;
        Ok(&first & &look().await?)
    };
    let found = tokio::time::timeout(PROBE_LIMIT, looking).await;
    match found.unwrap_or_else(|_| Err(format!("no answer within {PROBE_LIMIT:?}"))) {
        Ok(found) if found.is_empty() => Check::ok(wait.name, "none"),
        Ok(found) => Check::error(wait.name, Vec::from_iter(found).join("; "))
            .expected("none")
            .remedy(wait.remedy),
        // Too much is cut off there, and said so.
        Err(why) => Check::warning(wait.name, why).expected("a list of them"),
    }
}

/// Each listener with what it waits for.
fn listeners(dump: &Value) -> BTreeSet<String> {
    let waiting = entries(dump, "unready_targets_dumps").filter_map(|waits| {
        let targets: Vec<_> = entries(waits, "target_names").map(text).collect();
        let name = listener(text(&waits["name"]));
        // Without a target it waits for the other listeners only.
        let waits = !targets.is_empty();
        waits.then(|| format!("{name} waits for {}", targets.join(", ")))
    });
    waiting.collect()
}

/// The listener of `init manager Listener-local-init-manager <listener> <hash>`.
fn listener(manager: &str) -> &str {
    let name = manager.strip_prefix("init manager Listener-local-init-manager ");
    let name = name.and_then(|name| name.rsplit_once(' '));
    name.map_or(manager, |(name, _)| name)
}

fn names(dump: &Value, pointer: &str) -> BTreeSet<String> {
    let names = entries(dump, "configs").filter_map(|config| config.pointer(pointer)?.as_str());
    names.map(str::to_owned).collect()
}

fn entries<'v>(value: &'v Value, name: &str) -> impl Iterator<Item = &'v Value> {
    value[name].as_array().into_iter().flatten()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or("unknown")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_listener_is_named_with_the_resources_it_waits_for() {
        let dump = json!({ "unready_targets_dumps": [
            {
                "name": "init manager Listener-local-init-manager 0.0.0.0_8443 11964082629421921887",
                "target_names": [
                    "shared target SdsApi kubernetes://shop-tls",
                    "shared target RdsRouteConfigSubscription RDS init https.443",
                    "target FilterConfigSubscription init auth",
                    "target VHDS",
                ],
            },
            { "name": "another manager", "target_names": ["target x"] },
            { "name": "init manager Listener-local-init-manager static 1" },
        ]});
        let expected = [
            "0.0.0.0_8443 waits for shared target SdsApi kubernetes://shop-tls, shared target RdsRouteConfigSubscription RDS init https.443, target FilterConfigSubscription init auth, target VHDS",
            "another manager waits for target x",
        ];
        assert_eq!(Vec::from_iter(listeners(&dump)), expected);
        for foreign in [
            json!(null),
            json!([]),
            json!({ "unready_targets_dumps": [7, "x"] }),
        ] {
            listeners(&foreign);
        }
    }
}
