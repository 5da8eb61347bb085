//! Compiles `proto/` without `protoc`, and for the control plane annexe Envoy's own definitions into
//! the descriptors it reads resource files by.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=proto");
    let own = protox::compile(["security/v1alpha1/ca.proto"], ["proto"])?;
    tonic_prost_build::configure()
        .build_transport(false)
        .compile_fds(own)?;
    Ok(())
}
