//! Fetches the Wasm modules of Envoy's filters, and hands them to Envoy as files.
#![allow(dead_code, reason = "wired up by the commits that follow")]

pub(crate) mod convert;
mod fetch;
