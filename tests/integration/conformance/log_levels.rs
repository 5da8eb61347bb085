//! Tests log levels that are changed while the agent runs.

use serde_json::Value;

use crate::support::place::Place;
use crate::support::programs::is_this_agent;
use crate::support::{local_istiod, relays};

#[tokio::test]
async fn the_request_command_sets_log_levels_that_expire() {
    if !is_this_agent("levels at run time") {
        return;
    }
    let mut istiod = local_istiod().await;
    let place = Place::of(&istiod);
    // `Place::start` sets the level debug for every scope.
    let agent = place.start().await;
    let port = format!("--debug-port={}", place.status_port());
    let request = |method: &str, path: &str| {
        let output = place.run(&["request", &port, method, path]);
        assert!(output.status.success(), "{output:?}");
        let scopes: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
        let is_proxy = |scope: &&Value| scope["scope"] == "xdsproxy";
        let scope = scopes.iter().find(is_proxy).unwrap();
        scope["level"].as_str().unwrap().to_owned()
    };
    assert_eq!(request("GET", "debug/logging"), "debug");
    let silenced = place.run(&["request", &port, "POST", "debug/logging?level=none"]);
    let said = String::from_utf8_lossy(&silenced.stderr).into_owned();
    assert!(said.contains("the level is \"none\", expected"), "{said}");
    assert_eq!(request("POST", "debug/logging?level=error"), "error");
    let before = agent.log().len();
    relays(&place, &mut istiod).await;
    assert_eq!(agent.log()[before..].matches("\txdsproxy\t").count(), 0);
    assert_eq!(request("PUT", "debug/logging?level=debug"), "debug");
    relays(&place, &mut istiod).await;
    assert!(agent.log()[before..].contains("\txdsproxy\t"));
    let path = "debug/logging?scope=xdsproxy&level=error&for=500ms";
    assert_eq!(request("POST", path), "error");
    agent.logs("temporary log levels expired").await;
    assert_eq!(request("GET", "debug/logging"), "debug");
}
