//! Compiles `proto/` without `protoc`, into messages, and into descriptors by which JSON is read.

#![expect(
    clippy::disallowed_methods,
    reason = "cargo speaks to build scripts by the environment"
)]

use std::error::Error;
use std::path::Path;
use std::{env, fs};

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=proto");
    let files = ["security/v1alpha1/ca.proto", "grpc/health/v1/health.proto"];
    let own = protox::compile(files, ["proto"])?;
    tonic_prost_build::configure()
        .build_transport(false)
        .compile_fds(own)?;
    let mut compiler = protox::Compiler::new(["proto"])?;
    compiler.include_imports(true).include_source_info(false);
    compiler.open_file("envoy/extensions/wasm/v3/wasm.proto")?;
    let descriptors = compiler.encode_file_descriptor_set();
    fs::write(
        Path::new(&env::var("OUT_DIR")?).join("wasm.fds"),
        descriptors,
    )?;
    Ok(())
}
