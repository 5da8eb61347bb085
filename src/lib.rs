//! A drop-in replacement for Istio's `pilot-agent`, the process that runs next to Envoy in every
//! sidecar, gateway and mesh VM.
//!
//! The modules are listed in reading order: the start of the program, the modules in the order in which
//! data passes through them, then the base modules that they share. `ARCHITECTURE.md` shows which
//! module may use which.
#![cfg_attr(test, allow(clippy::arithmetic_side_effects, clippy::disallowed_methods))]

pub mod agent;
pub mod cli;
pub mod config;

pub mod doctor;

pub mod preflight;

pub mod scope;

pub mod support_bundle;

pub mod capture;

pub mod xds;

pub mod dns;

pub mod sds;

pub mod secrets;

pub mod ca;

pub mod istiod;

pub mod envoy;

pub mod standby;

pub mod status;

pub mod health;

pub mod probe;

pub mod bootstrap;

pub mod scrape;

pub mod wasm;

pub mod systemd;

pub mod address;

pub mod duration;

pub mod problem;

mod spelling;

pub mod proxy_config;

pub mod exit_code;

pub mod report;

pub mod version;

pub mod identity;

mod pem;

pub mod clock;

pub mod backoff;

mod permission;

pub mod volume;

mod port;

mod json;

mod regular_file;

mod replace_file;

mod directory;

mod request_path;

pub mod executor;

pub mod dial;

pub mod http_client;

pub mod compliance;

pub mod trust_anchors;

mod chain_verifier;

mod unverified_tls;

pub mod unix_socket;

mod netlink;

mod file_watch;

pub mod lifecycle;

pub mod logging;

pub mod metrics;

pub mod proto;
