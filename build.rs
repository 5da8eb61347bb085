//! Compiles `proto/` without `protoc`, and leaves unwind tables out of releases.

#![expect(
    clippy::disallowed_methods,
    reason = "cargo speaks to build scripts by the environment"
)]

use std::error::Error;
use std::path::Path;
use std::{env, fs};

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    leave_out_unwind_tables()?;
    println!("cargo::rerun-if-changed=proto");
    let files = ["security/v1alpha1/ca.proto", "grpc/health/v1/health.proto"];
    let own = protox::compile(files, ["proto"])?;
    tonic_prost_build::configure()
        .build_transport(false)
        .compile_fds(own)?;
    Ok(())
}

/// A release neither unwinds nor, stripped, can print a backtrace, but the standard library brings
/// its tables for both: half a megabyte.
fn leave_out_unwind_tables() -> Result<(), Box<dyn Error>> {
    let variable = |name| env::var(name).map_err(|error| format!("{name}: {error}"));
    if variable("PROFILE")? == "release" && variable("CARGO_CFG_TARGET_OS")? == "linux" {
        let script = Path::new(&variable("OUT_DIR")?).join("no-unwind-tables.ld");
        let sections = "*(.eh_frame) *(.gcc_except_table .gcc_except_table.*)";
        let discard = format!("SECTIONS {{ /DISCARD/ : {{ {sections} }} }} INSERT AFTER .comment;");
        fs::write(&script, discard)?;
        println!("cargo::rustc-link-arg-bins=-Wl,-T,{}", script.display());
    }
    Ok(())
}
