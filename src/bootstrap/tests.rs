//! Compares bootstraps with the golden files in `tests/golden/bootstrap`; `UPDATE_GOLDEN=1` rewrites the
//! files. With `ENVOY_BIN`, Envoy validates the bootstraps.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;
use crate::config::environment::Environment;
use crate::config::flags;
use crate::config::pod::Interface;
use crate::proxy_config::tracing::Tracer as Given;

/// Loads the configuration of a golden case from its flags, variables, interfaces and files.
fn config(case: &Path) -> crate::config::Config {
    let read = |name: &str| fs::read_to_string(case.join("input").join(name)).expect("an input");
    let line = read("flags");
    let words = line.trim().strip_prefix("proxy").expect("the command proxy");
    let (flags, log, _) = flags::parse(words);
    let env = read("env");
    let env: Environment = env.lines().filter_map(|line| line.split_once('=')).collect();
    let interfaces = read("interfaces");
    let interfaces =
        interfaces.lines().filter_map(|line| line.split_once(' ')).map(|(name, address)| {
            Interface {
                name: name.to_owned(),
                address: address.parse().expect("an address"),
                is_loopback: false,
            }
        });
    let root = case.join("input");
    let interfaces = Ok(interfaces.collect());
    crate::config::load_with(&flags, &log, &env, &root, interfaces)
        .unwrap_or_else(|problems| panic!("{}: {problems:?}", case.display()))
}

fn case(name: &str) -> PathBuf {
    cases().join(name)
}

fn cases() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/bootstrap")
}

fn names() -> Vec<String> {
    let entries = fs::read_dir(cases()).expect("cases");
    let names = entries.map(|entry| entry.expect("a case").file_name());
    let mut names: Vec<_> = names.map(|name| name.into_string().expect("text")).collect();
    names.sort();
    names
}

fn check(name: &str) {
    let case = case(name);
    let found = format!("{:#}\n", document(&config(&case).bootstrap));
    let expected = case.join("expected.json");
    if switch("UPDATE_GOLDEN").is_some() {
        fs::write(&expected, &found).expect("the golden file is written");
    }
    let expected = fs::read_to_string(&expected).unwrap_or_default();
    let lines = found.lines().zip(expected.lines()).enumerate();
    for (index, (found, expected)) in lines {
        assert_eq!(found, expected, "{name} line {}; UPDATE_GOLDEN=1 accepts it", index + 1);
    }
    assert_eq!(found.len(), expected.len(), "{name}; UPDATE_GOLDEN=1 accepts it");
}

/// Returns an environment variable that configures the tests, not the agent.
#[expect(clippy::disallowed_methods, reason = "tests have switches of their own")]
fn switch(name: &str) -> Option<std::ffi::OsString> {
    std::env::var_os(name)
}

#[test]
fn every_case_has_its_golden_bootstrap() {
    let names = names();
    assert!(!names.is_empty());
    for name in names {
        check(&name);
    }
}

#[test]
fn envoy_accepts_every_bootstrap_whose_extensions_it_has() {
    let Some(envoy) = switch("ENVOY_BIN") else {
        return;
    };
    let mut refused = Vec::new();
    for name in names() {
        let mut config = config(&case(&name)).bootstrap;
        // An upstream Envoy does not have Istio's own extension, and no longer has the Lightstep tracer.
        config.metadata_discovery = false;
        if let Some(tracing) = &mut config.node.proxy_config.tracing {
            let is_lightstep = |it: &mut Given| matches!(it, Given::Lightstep(_));
            tracing.tracer.take_if(is_lightstep);
        }
        if let Err(error) = show::validate(&config, Path::new(&envoy), None) {
            refused.push(format!("{name}: {error}"));
        }
    }
    assert!(refused.is_empty(), "{}", refused.join("\n"));
}

#[test]
fn a_grpc_application_finds_the_agent_and_its_certificates() {
    let root = TempDir::new().expect("a directory");
    let config = config(&case("sidecar"));
    let mut grpc = config.grpc.expect("a bootstrap by default");
    assert_eq!(grpc.path, Path::new("etc/istio/proxy/grpc-bootstrap.json"));
    grpc.path = root.path().join("made/grpc.json");
    grpc.certificates = Some("/certs".into());
    grpc::write(&grpc, &config.bootstrap.node).expect("written");
    let text = fs::read_to_string(&grpc.path).expect("the file");
    let found: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(found["xds_servers"][0]["server_uri"], "unix:///etc/istio/proxy/XDS");
    let metadata = &found["node"]["metadata"];
    assert_eq!(metadata["GENERATOR"], "grpc");
    assert_eq!(metadata["CLUSTER_ID"], "Kubernetes");
    assert_eq!(metadata.get("GENERATION"), None, "it has no type");
    assert_eq!(found["node"]["locality"]["zone"], "eu-1");
    let files = &found["certificate_providers"]["default"]["config"];
    assert_eq!(files["private_key_file"], "/certs/key.pem");
    let mode = fs::metadata(&grpc.path).expect("a file").permissions().mode();
    assert_eq!(mode & 0o777, 0o644);
}

#[test]
fn the_token_of_a_tracer_is_in_a_file_while_envoy_runs() {
    let root = TempDir::new().expect("a directory");
    let mut config = config(&case("tracing_lightstep")).bootstrap;
    config.directory = root.path().to_owned();
    let file = root.path().join("lightstep_access_token.txt");
    let written = write(&config).expect("written");
    assert_eq!(fs::read_to_string(&file).expect("a token"), "abcdefg1234567");
    let mode = fs::metadata(&file).expect("a file").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    drop(written);
    assert_eq!(fs::read_dir(root.path()).expect("listed").count(), 0);
}

#[test]
fn the_platforms_locality_is_used_if_no_label_has_one() {
    let mut config = config(&case("json_logs")).bootstrap;
    config.node.platform = platform::Platform {
        metadata: [("aws_region".to_owned(), "eu".to_owned())].into(),
        locality: platform::Locality { region: "eu".to_owned(), ..Default::default() },
    };
    let document = document(&config);
    assert_eq!(document["node"]["locality"], json!({"region": "eu"}));
    assert_eq!(document["node"]["metadata"]["PLATFORM_METADATA"], json!({"aws_region": "eu"}));
}

#[test]
fn the_bootstrap_file_is_complete_and_is_removed_after_envoy_exits() {
    let root = TempDir::new().expect("a directory");
    let case = case("sidecar");
    let mut config = config(&case).bootstrap;
    config.directory = root.path().join("etc/istio/proxy");
    let written = write(&config).expect("written");
    let path = config.file();
    let text = fs::read_to_string(&path).expect("the file");
    let parsed: Value = serde_json::from_str(&text).expect("strict JSON");
    assert_eq!(parsed, document(&config));
    assert_eq!(fs::read_dir(&config.directory).expect("listed").count(), 1);
    drop(written);
    assert!(!path.exists());
}

#[test]
fn the_default_file_is_where_pilot_agent_puts_it() {
    let case = case("sidecar");
    let config = config(&case).bootstrap;
    assert_eq!(config.file(), Path::new("etc/istio/proxy/envoy-rev.json"));
    assert_eq!(config.xds_socket, Path::new("./etc/istio/proxy/XDS"));
}

#[test]
fn the_connection_limit_comes_from_the_first_source_that_sets_it() {
    let meta = "ISTIO_META_GLOBAL_DOWNSTREAM_MAX_CONNECTIONS";
    let runtime = "overload.global_downstream_max_connections";
    for (document, limit) in [
        (json!({}), 2_147_483_647),
        (json!({"runtimeValues": {runtime: "5"}}), 5),
        (json!({"runtimeValues": {runtime: "5"}, "proxyMetadata": {meta: "6"}}), 6),
        (json!({"runtimeValues": {runtime: "5"}, "proxyMetadata": {meta: "six"}}), 5),
        (
            json!({"connectionSettings": {"globalDownstreamConnectionLimit": 7},
                   "proxyMetadata": {meta: "6"}}),
            7,
        ),
        (json!({"connectionSettings": {"globalDownstreamConnectionLimit": 0}}), 2_147_483_647),
    ] {
        let config = crate::proxy_config::from_json(&document);
        assert_eq!(document::connection_limit(&config), limit, "{document}");
    }
}

#[test]
fn either_member_may_give_the_address_of_the_metrics_service() {
    let mut config = config(&case("default")).bootstrap;
    let document = json!({"envoyMetricsServiceAddress": "metrics:1"});
    config.node.proxy_config = crate::proxy_config::from_json(&document);
    let (address, _) = services::metrics_service(&config).expect("a service");
    let expected = json!({"socket_address": {"address": "metrics", "port_value": 1}});
    assert_eq!(address, expected);
}

#[test]
fn the_host_ip_replaces_its_placeholder() {
    let mut config = config(&case("default")).bootstrap;
    for (host_ip, address, expected) in [
        ("10.0.0.1", "$(HOST_IP):9411", "10.0.0.1"),
        ("fd00::1", "[$(HOST_IP)]:9411", "fd00::1"),
        ("", "$(HOST_IP):9411", "$(HOST_IP)"),
    ] {
        host_ip.clone_into(&mut config.host_ip);
        let found = services::socket_address(&config, address).expect("an address");
        assert_eq!(found["socket_address"]["address"], expected, "{host_ip}");
    }
}
