//! Tests the complete agent from outside: files, sockets, gRPC and exit codes of its binary.
//!
//! Each test runs the binary in its own directory, breaks something, and expects a clear sentence in the log, and
//! recovery without a restart once the input is repaired. `AGENT_BIN` names the binary to test; without it, the one
//! that cargo has built is tested.
//!
//! Only [`properties`] tests the library directly.

mod capture;
mod certificates;
mod control_planes;
mod dns;
mod doctor;
mod floods;
mod grpc;
mod inputs;
mod istiod;
mod log_levels;
mod machine;
mod messages;
mod output;
mod properties;
mod proxy;
mod roots_and_tokens;
mod scrape;
mod secret_files;
mod secrets;
mod signals;
mod start;
mod status;
mod support_bundle;
mod trust;
mod version;
mod wall_clock;
mod wasm;
