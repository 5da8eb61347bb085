//! Looks at Envoy's admin port for listeners and clusters that warm, and for secrets that Envoy waits for.
//!
//! A full configuration dump may have 100 MB, so only names are requested. A finding is
//! looked for again, because an update warms for a moment.

use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::future::join_all;
use serde_json::Value;

use super::admin::Admin;
use crate::problem::{Code, Problem, codes};

/// The pause before a finding is looked for again.
const PAUSE: Duration = Duration::from_millis(300);

/// A code, its subject, a page, and the names on the page.
type Wait = (
    &'static Code,
    &'static str,
    &'static str,
    fn(&Value) -> BTreeSet<String>,
);

const WAITS: [Wait; 3] = [
    (
        codes::LISTENER_WARMING,
        "warming listeners",
        "/init_dump?mask=listener",
        listeners,
    ),
    (
        codes::CLUSTER_WARMING,
        "warming clusters",
        "/config_dump?resource=dynamic_warming_clusters&mask=cluster.name",
        |dump| names(dump, "/cluster/name"),
    ),
    (
        codes::SECRET_AWAITED,
        "missing secrets",
        "/config_dump?resource=dynamic_warming_secrets&mask=name",
        |dump| names(dump, "/name"),
    ),
];

/// Lists what Envoy waits for. A page that cannot be read is a problem with another code.
pub async fn waits(admin: Admin) -> Vec<Problem> {
    let found = join_all(WAITS.iter().map(|wait| check(wait, admin))).await;
    found.into_iter().flatten().collect()
}

async fn check((code, subject, page, names): &Wait, admin: Admin) -> Option<Problem> {
    let look = async || admin.page(page).await.map(|page| names(&page));
    let looking = async {
        let first = look().await?;
        if first.is_empty() {
            return Ok(first);
        }
        tokio::time::sleep(PAUSE).await;
        Ok(&first & &look().await?)
    };
    let found = tokio::time::timeout(admin.limit, looking).await;
    match found.unwrap_or_else(|_| Err("no answer in time".to_owned())) {
        Ok(found) if found.is_empty() => None,
        Ok(found) => Some(Problem::new(
            code,
            *subject,
            Vec::from_iter(found).join("; "),
        )),
        Err(why) => Some(Problem::new(codes::ENVOY_NOT_INSPECTED, *subject, why)),
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
