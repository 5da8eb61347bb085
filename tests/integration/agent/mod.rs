//! The agent's modules together, against a real control plane behind real TLS, with a scripted Envoy
//! on a real socket.

mod clients;
mod control_planes;
mod custom_bootstrap;
mod metrics;
mod relay;
