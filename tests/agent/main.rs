//! The agent's modules together, against a real control plane behind real TLS, with a scripted Envoy
//! on a real socket.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::arithmetic_side_effects,
    clippy::disallowed_methods,
    unreachable_pub
)]

mod clients;
mod control_planes;
mod custom_bootstrap;
mod metrics;
mod relay;
mod support;
