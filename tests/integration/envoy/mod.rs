//! Tests the agent as a program, between a real Envoy and a control plane with real TLS.
//!
//! Every test starts its own control plane in this process, and its own agent and Envoy in a temporary
//! directory. `ENVOY_BIN` or `PATH` gives the path of Envoy. Without Envoy the tests print that and are
//! skipped; if the variable `CI` is set they fail.

mod admin_socket;
mod capture;
mod certificates;
mod discovery;
mod doctor;
mod drain;
mod health;
mod hot_restart;
mod last_known_good;
mod lifecycle;
mod machine;
mod memory;
mod names;
mod on_demand;
mod on_demand_matrix;
mod outages;
mod page;
mod refused_resources;
mod scope;
mod secret_files;
mod spire;
mod standby;
mod status;
mod support_bundle;
mod wasm;
mod wasm_files;
