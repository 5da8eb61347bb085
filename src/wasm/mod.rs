//! Fetches the Wasm modules of Envoy's filters, and hands them to Envoy as files.

pub(crate) mod convert;
