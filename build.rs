//! Compiles `proto/` without `protoc`, into messages, and into descriptors by which JSON is read.

#![expect(
    clippy::disallowed_methods,
    reason = "cargo speaks to build scripts by the environment"
)]

use std::error::Error;
use std::path::Path;
use std::{env, fs};

const PROXY_CONFIG: &str = "mesh/v1alpha1/proxy.proto";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=proto");
    let files = [
        "security/v1alpha1/ca.proto",
        "grpc/health/v1/health.proto",
        PROXY_CONFIG,
    ];
    let own = protox::compile(files, ["proto"])?;
    tonic_prost_build::configure()
        .build_transport(false)
        .btree_map(".istio.mesh")
        // They hold tokens.
        .skip_debug([".istio.mesh"])
        .compile_fds(own)?;
    let read_as_json = [
        ("wasm.fds", "envoy/extensions/wasm/v3/wasm.proto"),
        ("proxy_config.fds", PROXY_CONFIG),
    ];
    for (name, file) in read_as_json {
        let mut compiler = protox::Compiler::new(["proto"])?;
        compiler.include_imports(true).include_source_info(false);
        compiler.open_file(file)?;
        let path = Path::new(&env::var("OUT_DIR")?).join(name);
        fs::write(path, compiler.encode_file_descriptor_set())?;
    }
    Ok(())
}
