//! Parses the injector's list of the application's metrics pages, and checks it.
//!
//! Without a list of targets, port and path are a single target.

use std::sync::Arc;

use serde::Deserialize;

use super::tls;
use crate::json;
use crate::net::request_path::escaped;

/// Ports of Envoy and of the agent, which the application cannot use.
const RESERVED: [u16; 9] = [15000, 15001, 15004, 15006, 15008, 15020, 15021, 15053, 15090];
const DEFAULT_PORT: &str = "80";
const DEFAULT_PATH: &str = "/metrics";

/// A metrics page of the application, on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    pub port: u16,
    /// Path and query.
    pub path: String,
    /// None for plain text.
    pub tls: Option<Arc<tls::Files>>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Annotations {
    scrape: String,
    #[serde(flatten)]
    single: Entry,
    targets: Vec<Entry>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Entry {
    port: String,
    path: String,
}

/// The reason why the list cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Invalid {
    #[error("expected a JSON object of scrape, port, path and targets, all text: {0}")]
    Json(#[from] serde_json::Error),
    #[error("port {0:?} is not a number from 1 to 65535")]
    Port(String),
    #[error("port {0} is the agent's own status port")]
    Own(u16),
    #[error("port {0} is reserved for Envoy and the agent")]
    Reserved(u16),
}

/// Reads `ISTIO_PROMETHEUS_ANNOTATIONS`.
pub fn parse(text: &str, status_port: u16) -> Result<Vec<Target>, Invalid> {
    let annotations: Option<Annotations> = json::read(text)?;
    let Annotations { scrape, mut single, mut targets } = annotations.unwrap_or_default();
    if scrape == "false" {
        return Ok(Vec::new());
    }
    if targets.is_empty() {
        if single.port.is_empty() {
            single.port = DEFAULT_PORT.to_owned();
        }
        targets.push(single);
    }
    targets.iter().map(|target| check(target, status_port)).collect()
}

fn check(target: &Entry, status_port: u16) -> Result<Target, Invalid> {
    let port = match target.port.parse() {
        Err(_) | Ok(0) => return Err(Invalid::Port(target.port.clone())),
        Ok(port) if port == status_port => return Err(Invalid::Own(port)),
        Ok(port) if RESERVED.contains(&port) => return Err(Invalid::Reserved(port)),
        Ok(port) => port,
    };
    let path = match target.path.as_str() {
        "" => DEFAULT_PATH.to_owned(),
        path if path.starts_with('/') => escaped(path),
        path => format!("/{}", escaped(path)),
    };
    Ok(Target { port, path, tls: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_followed_and_defaults_stand_for_missing_parts() {
        for (json, expected) in [
            (r#"{}"#, vec![(80, "/metrics")]),
            (r#"{"scrape":""}"#, vec![(80, "/metrics")]),
            (r#"{"scrape":"true","port":"9090","path":"/m?x=y"}"#, vec![(9090, "/m?x=y")]),
            (r#"{"scrape":"false","port":"15020"}"#, vec![]),
            (r#"{"path":"m"}"#, vec![(80, "/m")]),
            ("null", vec![(80, "/metrics")]),
            (r#"{"scrape":"true","path":"/m","port":"8080","targets":null}"#, vec![(8080, "/m")]),
            (
                r#"{"scrape":null,"path":null,"port":null,"targets":[null,{"port":"2","path":null}]}"#,
                vec![(2, "/metrics")],
            ),
            (r#"{"path":"/m \n"}"#, vec![(80, "/m%20%0A")]),
            (
                r#"{"port":"1","targets":[{"port":"2"},{"port":"3","path":"/x"}]}"#,
                vec![(2, "/metrics"), (3, "/x")],
            ),
            (r#"{"port":"1","targets":[{"port":"2","path":""}]}"#, vec![(2, "/metrics")]),
        ] {
            let found = parse(json, 15020).expect(json);
            let found: Vec<_> = found.iter().map(|t| (t.port, t.path.as_str())).collect();
            assert_eq!(found, expected, "{json}");
        }
    }

    #[test]
    fn the_error_for_an_unusable_scrape_target_gives_the_reason() {
        for (json, expected) in [
            ("", "a JSON object"),
            ("[", "a JSON object"),
            (r#"{"port":80}"#, "a JSON object"),
            (r#"{"port":"http"}"#, "port \"http\""),
            (r#"{"port":"0"}"#, "port \"0\""),
            (r#"{"port":"65536"}"#, "port \"65536\""),
            (r#"{"port":"15099"}"#, "the agent's own"),
            (r#"{"port":"015099"}"#, "the agent's own"),
            (r#"{"targets":[{"port":"1"},{"port":"015090"}]}"#, "port 15090 is reserved"),
            (r#"{"targets":[{}]}"#, "port \"\""),
        ] {
            let error = parse(json, 15099).expect_err(json).to_string();
            assert!(error.contains(expected), "{json}: {error}");
        }
    }
}
