//! Builds the bootstrap that Envoy starts from.
//!
//! [`document`] builds it from a typed [`Config`]; each section has its own file here. [`write`] puts it on
//! disk; dropping [`Written`] removes it, once Envoy has exited. [`grpc`] writes the bootstrap of gRPC
//! applications, and [`platform`] reads the cloud's metadata of the machine.

pub mod clusters;
mod config;
mod document;
mod file;
pub mod grpc;
mod listeners;
pub mod metadata;
pub mod node;
pub mod platform;
mod services;
pub mod show;
mod stats;
mod tls;

pub use config::{Config, Ports, StatsConfig};
pub use document::document;
pub use file::{Written, write};

#[cfg(test)]
mod tests;
