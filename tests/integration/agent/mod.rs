//! Tests the agent's modules together, with a real control plane behind real TLS and a scripted Envoy on a real
//! socket.

mod clients;
mod control_planes;
mod custom_bootstrap;
mod liveness;
mod metrics;
mod relay;
