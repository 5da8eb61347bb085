//! Tests the agent from outside. All tests are one program, so that the agent is linked once.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::arithmetic_side_effects,
    clippy::disallowed_methods,
    unreachable_pub
)]

mod agent;
mod architecture;
mod conformance;
mod envoy;
mod scrape;
mod support;
