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

pub mod problem;

pub mod program;

mod spelling;

pub mod proxy_config;

pub mod report;

pub mod version;

mod json;

pub mod runtime;

pub mod files;

pub mod trust;

pub mod net;

pub mod logging;

pub mod metrics;

pub mod proto;
